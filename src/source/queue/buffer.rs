//! What a queue reads into: memory that stays where it is while the kernel writes to it.
#![allow(unsafe_code, reason = "a trait that promises where memory is; no code of its own")]

/// Memory that a queue may own while the kernel writes to it.
///
/// # Safety
/// For as long as the value exists, wherever it is moved to and until it is dropped or leaked,
/// [`Self::bytes_mut`] gives the same bytes, and nobody else reads, writes or frees them. Two
/// values with the same [`Self::number`] that are given to the same queue, one after the other,
/// have the same bytes.
pub(crate) unsafe trait ReadBuffer: Send {
    /// All of it.
    fn bytes_mut(&mut self) -> &mut [u8];

    /// Which of several it is, from 0; `None` if it has no number, and then the kernel looks it up
    /// for each read.
    #[cfg_attr(not(feature = "uring"), expect(dead_code, reason = "only the kernel's table has numbers"))]
    fn number(&self) -> Option<u32>;
}
