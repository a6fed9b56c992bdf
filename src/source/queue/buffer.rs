//! The buffers of a queue: memory that does not move while the kernel writes to it.
#![allow(unsafe_code, reason = "a trait that promises where memory is; no code of its own")]

/// Memory that a queue may own while the kernel writes to it.
///
/// # Safety
/// While the value exists, even if it is moved, and until it is dropped or leaked,
/// [`Self::bytes_mut`] returns the same bytes, and nobody else reads, writes or frees them. Two
/// values with the same [`Self::number`], given to the same queue one after the other, have the
/// same bytes.
pub(crate) unsafe trait ReadBuffer: Send {
    /// The whole buffer.
    fn bytes_mut(&mut self) -> &mut [u8];

    /// Its number, from 0. `None` if it has none; the kernel then looks it up for each read.
    #[cfg_attr(not(feature = "uring"), expect(dead_code, reason = "only the kernel's table has numbers"))]
    fn number(&self) -> Option<u32>;
}
