//! Host memory owned by single tensors: mapped pages, allocator memory for small ones, or a part of
//! a private file mapping.
#![allow(unsafe_code, reason = "memory is shared by address; each block says why it is valid")]

use std::fs::File;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use memmap2::{MmapMut, MmapOptions};
use onelayer::DType;
use onelayer::units::ByteRange;
use onelayer_system::choose_page_size;

/// From this size on memory is mapped, so that it returns to the system when it is freed.
const MAPPED_BYTES_MIN: u64 = 256 << 10;
/// From this size on huge pages are requested.
const HUGE_BYTES_MIN: u64 = 4 << 20;

/// A unit of allocator memory, aligned for vector instructions.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Line([u8; 64]);

/// Host memory of a fixed length. Zeroed and aligned to 64 bytes, unless it maps a file.
pub(crate) struct HostMemory {
    start: NonNull<u8>,
    len: usize,
    _owner: Owner,
}

/// The owner of the memory. Only `start` is used for access.
#[allow(dead_code, reason = "kept to be dropped")]
enum Owner {
    Lines(Vec<Line>),
    Pages(MmapMut),
    File(Arc<FileMapping>),
}

// SAFETY: memory is not bound to a thread; users that share it by address order their accesses, as
// the protocol requires.
unsafe impl Send for HostMemory {}
// SAFETY: as above; a shared reference only allows copies of bytes, no borrows.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Allocates `bytes` bytes.
    pub(crate) fn new(bytes: u64) -> io::Result<Self> {
        let len = usize::try_from(bytes).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        if bytes >= MAPPED_BYTES_MIN {
            let mut pages = MmapMut::map_anon(len)?;
            if bytes >= HUGE_BYTES_MIN {
                choose_page_size(&pages, 0, len);
            }
            let start = NonNull::new(pages.as_mut_ptr()).expect("a mapping has an address");
            return Ok(Self { start, len, _owner: Owner::Pages(pages) });
        }
        let mut lines = vec![Line([0; 64]); len.div_ceil(size_of::<Line>())];
        let start = NonNull::new(lines.as_mut_ptr().cast()).expect("vectors have an address");
        Ok(Self { start, len, _owner: Owner::Lines(lines) })
    }

    /// Its length in bytes.
    pub(crate) fn len_bytes(&self) -> u64 {
        u64::try_from(self.len).expect("usize is at most 64 bits wide on every supported target")
    }

    /// Its address, for sharing.
    pub(crate) fn address(&self) -> NonNull<u8> {
        self.start
    }

    /// The bytes, before they are shared.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: `len` initialised bytes, kept by the owner and borrowed as long as `self`.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }

    /// Copies all of it to memory of the same length.
    pub(crate) fn copy_to(&self, target: &mut [u8]) {
        assert_eq!(target.len(), self.len, "copies are whole");
        // SAFETY: both have as many bytes, and `target` is exclusively borrowed, so they do not
        // overlap. A consumer that writes here meanwhile violates the protocol.
        unsafe { std::ptr::copy_nonoverlapping(self.start.as_ptr(), target.as_mut_ptr(), self.len) };
    }
}

/// A private mapping of a whole file: pages belong to the page cache until they are written to.
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
    /// Maps a file without reading it.
    pub(crate) fn new(file: &File) -> io::Result<Self> {
        // SAFETY: no slice of it is handed out. Only consumers of the raw address see changes of
        // the file, which callers document.
        let mut pages = unsafe { MmapOptions::new().map_copy(file) }?;
        let start = NonNull::new(pages.as_mut_ptr()).expect("a mapping has an address");
        Ok(Self { start, len: pages.len(), _pages: pages })
    }

    /// A part of it that shares its pages, or a copy if its elements would be misaligned.
    pub(crate) fn part(self: &Arc<Self>, extent: ByteRange, dtype: DType) -> io::Result<HostMemory> {
        let outside = || io::Error::from(io::ErrorKind::UnexpectedEof);
        let start = usize::try_from(extent.start()).map_err(|_| outside())?;
        let len = usize::try_from(extent.len_bytes()).map_err(|_| outside())?;
        if start.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(outside());
        }
        // SAFETY: within the mapping, as just checked, or one past its end.
        let address = unsafe { self.start.add(start) };
        if dtype
            .bits()
            .is_some_and(|bits| !extent.start().is_multiple_of(bits.div_ceil(8).next_power_of_two()))
        {
            let copy = HostMemory::new(extent.len_bytes())?;
            // SAFETY: both have as many bytes, and the copy is separate memory.
            unsafe { std::ptr::copy_nonoverlapping(address.as_ptr(), copy.start.as_ptr(), len) };
            return Ok(copy);
        }
        Ok(HostMemory { start: address, len, _owner: Owner::File(Arc::clone(self)) })
    }
}
