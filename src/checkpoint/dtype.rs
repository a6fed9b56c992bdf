//! Element types of the safetensors format, with their sizes in bits.

/// An element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DType {
    /// bfloat16. (the helper adds all others)
    Bf16,
    /// A type this version does not know; the bytes pass through unread.
    Opaque,
}
