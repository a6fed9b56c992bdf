//! Host memory that tensors own, one by one: pages of their own, a few cache lines of the
//! allocator's, or a part of a private mapping of a file.
#![allow(unsafe_code, reason = "memory is shared by address; each block says why it is there")]

use std::fs::File;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use memmap2::{Advice, MmapMut, MmapOptions};
use onelayer::DType;
use onelayer::units::ByteRange;

/// From here on memory is mapped: it is back with the system as soon as it is unmapped.
const MAPPED_BYTES_MIN: u64 = 256 << 10;
/// From here on pages should be huge ones.
const HUGE_BYTES_MIN: u64 = 4 << 20;

/// What the allocator hands out: aligned as vector instructions like it.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Line([u8; 64]);

/// Host memory of a fixed length. Zeroed and aligned to 64 bytes, unless it is a file's.
pub(crate) struct HostMemory {
    start: NonNull<u8>,
    len: usize,
    _owner: Owner,
}

/// What keeps the memory. Never touched: `start` is the way to the bytes.
#[allow(dead_code, reason = "kept to be dropped")]
enum Owner {
    Lines(Vec<Line>),
    Pages(MmapMut),
    File(Arc<FileMapping>),
}

// SAFETY: memory has no thread; whoever shares it by address orders the accesses, as the protocol's
// users do.
unsafe impl Send for HostMemory {}
// SAFETY: as above; what is reached through a shared reference is copied byte by byte, never lent.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Memory for so many bytes.
    pub(crate) fn new(bytes: u64) -> io::Result<Self> {
        let len = usize::try_from(bytes).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        if bytes >= MAPPED_BYTES_MIN {
            let mut pages = MmapMut::map_anon(len)?;
            if bytes >= HUGE_BYTES_MIN {
                // Small pages hold the same bytes.
                let _ = pages.advise(Advice::HugePage);
            }
            let start = NonNull::new(pages.as_mut_ptr()).expect("a mapping is somewhere");
            return Ok(Self { start, len, _owner: Owner::Pages(pages) });
        }
        let mut lines = vec![Line([0; 64]); len.div_ceil(size_of::<Line>())];
        let start = NonNull::new(lines.as_mut_ptr().cast()).expect("vectors point somewhere");
        Ok(Self { start, len, _owner: Owner::Lines(lines) })
    }

    /// Its length in bytes.
    pub(crate) fn len_bytes(&self) -> u64 {
        u64::try_from(self.len).expect("usize is at most 64 bits wide on every supported target")
    }

    /// Where it starts, for those who share it.
    pub(crate) fn address(&self) -> NonNull<u8> {
        self.start
    }

    /// The bytes, while nobody else has them.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: so many initialised bytes, kept by the owner, and borrowed as long as `self` is.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }

    /// Copies all of it to memory of the same length.
    pub(crate) fn copy_to(&self, target: &mut [u8]) {
        assert_eq!(target.len(), self.len, "copies are whole");
        // SAFETY: both have so many bytes, and `target` is borrowed alone, so it is other memory. A
        // consumer that writes here meanwhile breaks the protocol's rule.
        unsafe { std::ptr::copy_nonoverlapping(self.start.as_ptr(), target.as_mut_ptr(), self.len) };
    }
}

/// A private mapping of a whole file: pages belong to the page cache until somebody writes to them.
pub(crate) struct FileMapping {
    start: NonNull<u8>,
    len: usize,
    _pages: MmapMut,
}

// SAFETY: as for `HostMemory`.
unsafe impl Send for FileMapping {}
// SAFETY: as for `HostMemory`.
unsafe impl Sync for FileMapping {}

impl FileMapping {
    /// Maps a file. Nothing is read.
    pub(crate) fn new(file: &File) -> io::Result<Self> {
        // SAFETY: nobody gets a slice of it: what changes in the file under the mapping is seen by
        // consumers of the raw address alone, and callers document that for them.
        let mut pages = unsafe { MmapOptions::new().map_copy(file) }?;
        let start = NonNull::new(pages.as_mut_ptr()).expect("a mapping is somewhere");
        Ok(Self { start, len: pages.len(), _pages: pages })
    }

    /// A part of it that shares its pages; a copy if elements of that type would lie across their
    /// own alignment.
    pub(crate) fn part(self: &Arc<Self>, extent: ByteRange, dtype: DType) -> io::Result<HostMemory> {
        let outside = || io::Error::from(io::ErrorKind::UnexpectedEof);
        let start = usize::try_from(extent.start()).map_err(|_| outside())?;
        let len = usize::try_from(extent.len_bytes()).map_err(|_| outside())?;
        if start.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(outside());
        }
        // SAFETY: inside the mapping, as was just checked, or one past its end.
        let address = unsafe { self.start.add(start) };
        if dtype
            .bits()
            .is_some_and(|bits| !extent.start().is_multiple_of(bits.div_ceil(8).next_power_of_two()))
        {
            let copy = HostMemory::new(extent.len_bytes())?;
            // SAFETY: both have so many bytes, and the copy is memory of its own.
            unsafe { std::ptr::copy_nonoverlapping(address.as_ptr(), copy.start.as_ptr(), len) };
            return Ok(copy);
        }
        Ok(HostMemory { start: address, len, _owner: Owner::File(Arc::clone(self)) })
    }
}
