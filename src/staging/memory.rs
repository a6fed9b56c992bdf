//! Anonymous memory for the ring and for host arenas. Forks do not inherit it, and dropping it
//! returns it to the system at once.
//!
//! It is a mapping rather than memory of the allocator: freeing is one `munmap`, so nothing stays
//! behind, and a driver can register it. Pages are resident once they are touched.
//!
//! From 2 MiB on it is 2 MiB aligned and asks for huge pages. Smaller memory refuses them: on a
//! system that gives huge pages to every mapping, 12 KiB would take 2 MiB of RAM at the first
//! touch.
#![allow(unsafe_code, reason = "hands out disjoint parts of one mapping; each block states its proof")]

use std::io;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;

use memmap2::{Advice, MmapMut, MmapOptions};

use crate::live::{Entry, MemoryKind, MemoryUse};
use crate::units::{Alignment, to_u64, to_usize};

/// How the ring's memory was obtained. Part of the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RingMode {
    /// Anonymous memory; the kernel accepted the advice to use huge pages.
    HugePages,
    /// Anonymous memory; the kernel knows no huge pages or refused the advice.
    SmallPages,
}

/// A private anonymous mapping, 2 MiB aligned if it is at least that large, else aligned to pages.
/// Zero-filled until written.
#[derive(Debug)]
pub(crate) struct AnonymousMemory {
    start: NonNull<u8>,
    len_bytes: u64,
    mode: RingMode,
    /// Its entry in the list of allocations.
    live: Entry,
    // Owns the memory; never read through again after `start` was taken from it.
    mapping: MmapMut,
}

// SAFETY: the struct owns its mapping, which is plain memory without thread affinity.
unsafe impl Send for AnonymousMemory {}
// SAFETY: through `&self` only `part` is reachable, and its contract forbids overlapping parts.
unsafe impl Sync for AnonymousMemory {}

impl AnonymousMemory {
    /// Maps `len_bytes`, at least one.
    ///
    /// # Errors
    /// The system's error if the mapping is refused.
    pub(crate) fn new(len_bytes: u64) -> io::Result<Self> {
        let is_huge = is_huge(len_bytes);
        // The system aligns mappings to small pages only: more is mapped, up to the next huge page
        // is skipped.
        let slack_bytes = if is_huge { Alignment::HUGE_PAGE.bytes() } else { 0 };
        let mapped_bytes = len_bytes.checked_add(slack_bytes).and_then(|bytes| usize::try_from(bytes).ok());
        let mapped_bytes = mapped_bytes.ok_or(io::ErrorKind::OutOfMemory)?;
        let mut mapping = MmapOptions::new().len(mapped_bytes).map_anon()?;
        let skip = if is_huge { mapping.as_ptr().align_offset(to_usize(slack_bytes)) } else { 0 };
        let len = to_usize(len_bytes);
        // Advice is best effort. The answer about huge pages is kept for the report.
        let _ = advise(&mapping, Advice::DontFork, skip, len);
        let page_advice = if is_huge { Advice::HugePage } else { Advice::NoHugePage };
        let is_taken = advise(&mapping, page_advice, skip, len).is_ok();
        let start = NonNull::new(mapping.as_mut_ptr()).ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: `skip` is 0 or below `slack_bytes`, and the mapping is `len_bytes + slack_bytes` long.
        let start = unsafe { start.add(skip) };
        let mode = if is_huge && is_taken { RingMode::HugePages } else { RingMode::SmallPages };
        Ok(Self {
            start,
            len_bytes,
            mode,
            live: Entry::new(MemoryKind::Host, MemoryUse::Scratch, len_bytes),
            mapping,
        })
    }

    /// Takes small pages for memory that nobody has touched, if huge ones are slow to touch here.
    /// The first pages are touched to find out.
    pub(crate) fn choose_page_size(&self) {
        if is_huge(self.len_bytes) {
            let skip = self.start.as_ptr().addr() - self.mapping.as_ptr().addr();
            onelayer_system::choose_page_size(&self.mapping, skip, to_usize(self.len_bytes));
        }
    }

    /// Returns the memory to the system and reports whether that worked; dropping does the same
    /// silently.
    ///
    /// # Errors
    /// The system's error if it keeps the mapping: a process with as many mappings as allowed may
    /// meet this (munmap(2)). The memory is lost then.
    pub(crate) fn unmap(self) -> io::Result<()> {
        if cfg!(miri) {
            // Miri supports no system calls of rustix.
            drop(self.mapping);
            return Ok(());
        }
        let mapping = ManuallyDrop::new(self.mapping);
        // SAFETY: a whole mapping of this process, whose owner ends here without unmapping it again; `self`
        // is gone, and with it every reference that was made through it.
        unsafe { rustix::mm::munmap(mapping.as_ptr().cast_mut().cast(), mapping.len()) }?;
        Ok(())
    }

    pub(crate) fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Its entry in the list of allocations.
    pub(crate) fn live(&self) -> &Entry {
        &self.live
    }

    pub(crate) fn mode(&self) -> RingMode {
        self.mode
    }

    /// `len_bytes` bytes from `offset_bytes`.
    ///
    /// # Panics
    /// If they do not lie in the mapping.
    ///
    /// # Safety
    /// For as long as the returned slice lives, no other reference to any of these bytes may be
    /// used.
    #[expect(clippy::mut_from_ref, reason = "the caller proves that parts are disjoint")]
    pub(crate) unsafe fn part_mut(&self, offset_bytes: u64, len_bytes: u64) -> &mut [u8] {
        let start = self.pointer_to(offset_bytes, len_bytes);
        // SAFETY: inside the mapping (checked), initialised (anonymous memory is zero-filled), exclusive
        // (the caller's promise), and alive for `&self`.
        unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), to_usize(len_bytes)) }
    }

    /// `len_bytes` bytes from `offset_bytes`, shared.
    ///
    /// # Panics
    /// If they do not lie in the mapping.
    ///
    /// # Safety
    /// For as long as the returned slice lives, nothing may write to these bytes.
    pub(crate) unsafe fn part(&self, offset_bytes: u64, len_bytes: u64) -> &[u8] {
        let start = self.pointer_to(offset_bytes, len_bytes);
        // SAFETY: inside the mapping (checked), initialised (anonymous memory is zero-filled), not written
        // (the caller's promise), and alive for `&self`.
        unsafe { std::slice::from_raw_parts(start.as_ptr(), to_usize(len_bytes)) }
    }

    /// Writes bytes from an offset on.
    pub(crate) fn fill(&mut self, offset_bytes: u64, bytes: &[u8]) {
        // SAFETY: borrowed for this call alone, so that nobody else refers to any of it.
        unsafe { self.part_mut(offset_bytes, to_u64(bytes.len())) }.copy_from_slice(bytes);
    }

    /// Reads bytes from an offset on.
    pub(crate) fn copy_to(&mut self, offset_bytes: u64, target: &mut [u8]) {
        // SAFETY: borrowed for this call alone, so that nobody else refers to any of it.
        target.copy_from_slice(unsafe { self.part_mut(offset_bytes, to_u64(target.len())) });
    }

    /// Returns the pages from `keep_bytes` on to the system; they read as zero when touched again.
    ///
    /// # Safety
    /// No reference to any of these bytes may exist.
    pub(crate) unsafe fn release_from(&self, keep_bytes: u64) -> io::Result<()> {
        let page = Alignment::new(to_u64(rustix::param::page_size())).expect("pages are powers of two");
        let from = page.up(keep_bytes).unwrap_or(u64::MAX);
        if from >= self.len_bytes {
            return Ok(());
        }
        let start = self.pointer_to(from, self.len_bytes - from);
        let len = to_usize(self.len_bytes - from);
        if cfg!(miri) {
            // Miri supports no madvise: its effect on the contents is written by hand.
            // SAFETY: a range of this mapping (checked above), unreferenced (the caller's promise).
            unsafe { start.as_ptr().write_bytes(0, len) };
            return Ok(());
        }
        // SAFETY: a page-aligned range of this private anonymous mapping (checked above),
        // unreferenced (the caller's promise), so nothing sees the loss of its contents.
        unsafe { rustix::mm::madvise(start.as_ptr().cast(), len, rustix::mm::Advice::LinuxDontNeed) }?;
        Ok(())
    }

    /// Bytes that are in RAM, from mincore(2).
    #[cfg(all(test, not(miri)))]
    pub(crate) fn resident_bytes(&self) -> u64 {
        let page = rustix::param::page_size();
        let mut pages = vec![0_u8; to_usize(self.len_bytes).div_ceil(page)];
        let start = self.start.as_ptr().cast();
        // SAFETY: the range lies in a live mapping, and there is one byte for each of its pages.
        let answer = unsafe { libc::mincore(start, to_usize(self.len_bytes), pages.as_mut_ptr()) };
        assert_eq!(answer, 0);
        to_u64(pages.iter().filter(|&&byte| byte & 1 == 1).count() * page)
    }

    /// The address of `offset_bytes`.
    ///
    /// # Panics
    /// If `len_bytes` bytes from there do not lie in the mapping.
    pub(crate) fn pointer_to(&self, offset_bytes: u64, len_bytes: u64) -> NonNull<u8> {
        let end = offset_bytes.checked_add(len_bytes);
        assert!(
            end.is_some_and(|end| end <= self.len_bytes),
            "{len_bytes} bytes at {offset_bytes} lie outside a mapping of {}",
            self.len_bytes
        );
        // SAFETY: `offset_bytes <= self.len_bytes`, so the pointer stays inside the mapping or one past its
        // end.
        unsafe { self.start.add(to_usize(offset_bytes)) }
    }
}

/// True for sizes that get huge pages.
pub(crate) fn is_huge(len_bytes: u64) -> bool {
    len_bytes >= Alignment::HUGE_PAGE.bytes()
}

fn advise(mapping: &MmapMut, advice: Advice, offset: usize, len: usize) -> io::Result<()> {
    // Miri knows no madvise.
    if cfg!(miri) { Ok(()) } else { mapping.advise_range(advice, offset, len) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(not(miri))]
    fn released_pages_leave_memory_and_read_as_zero() {
        for (len_bytes, keep_bytes) in [(8 << 20, 2 << 20), (64 << 10, 12 << 10), (64 << 10, 64 << 10)] {
            let memory = AnonymousMemory::new(len_bytes).unwrap();
            // SAFETY: the only reference to the mapping, gone at the end of the statement.
            unsafe { memory.part_mut(0, len_bytes) }.fill(7);
            assert_eq!(memory.resident_bytes(), len_bytes);
            // SAFETY: no reference to the mapping exists.
            unsafe { memory.release_from(keep_bytes) }.unwrap();
            assert_eq!(memory.resident_bytes(), keep_bytes);
            // SAFETY: nothing writes.
            let bytes = unsafe { memory.part(0, len_bytes) };
            let (kept, released) = bytes.split_at(to_usize(keep_bytes));
            assert!(kept.iter().all(|&byte| byte == 7) && released.iter().all(|&byte| byte == 0));
        }
    }

    #[test]
    #[cfg(not(miri))]
    fn a_fork_gets_no_copy() {
        for len_bytes in [12 << 10, 4 << 20] {
            let memory = AnonymousMemory::new(len_bytes).unwrap();
            let start = to_u64(memory.start.as_ptr().addr());
            let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
            let holds_start = |line: &&str| {
                let range = line.split(' ').next().and_then(|range| range.split_once('-'));
                let ends =
                    range.map(|(low, high)| (u64::from_str_radix(low, 16), u64::from_str_radix(high, 16)));
                matches!(ends, Some((Ok(low), Ok(high))) if (low..high).contains(&start))
            };
            let flags =
                maps.lines().skip_while(|line| !holds_start(line)).find(|line| line.starts_with("VmFlags:"));
            assert!(flags.unwrap().split(' ').any(|flag| flag == "dc"), "{flags:?}");
        }
    }

    #[test]
    #[cfg(not(miri))]
    fn a_small_mapping_is_resident_by_the_page() {
        let memory = AnonymousMemory::new(64 << 10).unwrap();
        assert_eq!(memory.mode(), RingMode::SmallPages);
        // SAFETY: the only reference to the mapping, gone at the end of the statement.
        unsafe { memory.part_mut(0, 1) }.fill(7);
        assert_eq!(memory.resident_bytes(), to_u64(rustix::param::page_size()));
    }

    #[test]
    #[cfg_attr(miri, ignore = "two million bytes, one by one")]
    fn starts_on_a_huge_page_and_is_zero() {
        let memory = AnonymousMemory::new(3 << 20).unwrap();
        assert_eq!(to_u64(memory.start.as_ptr().addr()) % Alignment::HUGE_PAGE.bytes(), 0);
        // SAFETY: the only reference to the mapping.
        let part = unsafe { memory.part_mut(1 << 20, 2 << 20) };
        assert!(part.iter().all(|&byte| byte == 0));
        part.fill(7);
    }

    #[test]
    #[should_panic(expected = "outside a mapping")]
    fn refuses_what_lies_outside() {
        let memory = AnonymousMemory::new(4096).unwrap();
        // SAFETY: the call panics before a reference exists.
        let _ = unsafe { memory.part(4000, 97) };
    }

    #[test]
    #[cfg(not(miri))] // miri ends when memory does
    fn refuses_what_no_machine_has() {
        assert!(AnonymousMemory::new(u64::MAX).is_err());
        assert!(AnonymousMemory::new(1 << 62).is_err());
    }
}
