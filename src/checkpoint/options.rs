//! Options for opening a checkpoint.

/// The reference's limit on a header, in bytes.
const HEADER_BYTES_MAX: u64 = 100_000_000;

/// Options for opening a checkpoint.
///
/// # Example
/// ```
/// use onelayer::checkpoint::OpenOptions;
///
/// let options = OpenOptions::new().allow_opaque_dtypes(true).header_bytes_max(1 << 30);
/// assert!(options.open("/nonexistent").unwrap_err().is_missing());
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct OpenOptions {
    pub(super) header_bytes_max: u64,
    pub(super) allow_opaque_dtypes: bool,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self { header_bytes_max: HEADER_BYTES_MAX, allow_opaque_dtypes: false }
    }
}

impl OpenOptions {
    /// The defaults: headers and indices up to 100 000 000 bytes, only dtypes of safetensors 0.8.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The longest header or index that is accepted, in bytes. The description takes at most four
    /// times this memory.
    #[must_use]
    pub fn header_bytes_max(mut self, bytes: u64) -> Self {
        self.header_bytes_max = bytes;
        self
    }

    /// Accepts tensors whose dtype the format does not know, as [`DType::Opaque`]. Their size comes
    /// from the offsets alone and is not compared with the shape.
    ///
    /// [`DType::Opaque`]: super::DType::Opaque
    #[must_use]
    pub fn allow_opaque_dtypes(mut self, allow: bool) -> Self {
        self.allow_opaque_dtypes = allow;
        self
    }
}
