//! Host memory: pinned ranges, and reads and writes that return an error where memory is missing.
#![allow(unsafe_code, reason = "reads and writes the caller's memory by system calls that return EFAULT")]

use super::memory::DeviceBytes;
use super::{Sim, to_u64};
use crate::clock::{Clock, Point};
use crate::code::{Answer, Code};
use crate::random::mix;

/// Bytes per step.
const CHUNK_BYTES: usize = 256 << 10;

/// A pinned range.
#[derive(Debug)]
pub(crate) struct Pinned {
    pub(crate) len_bytes: usize,
    pub(crate) context: usize,
    /// Distinguishes it from a later range at the same address.
    pub(crate) identity: u64,
    /// Allocated by the driver, not registered.
    pub(crate) is_own: bool,
    /// The last use in each stream.
    pub(crate) uses: Clock,
}

/// The kind of a copy's host range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HostKind {
    Pinned { start: usize, identity: u64 },
    Pageable,
}

/// There is no such memory.
#[derive(Debug)]
pub(crate) struct Missing;

/// A checksum that changes with every byte, to detect changed memory.
#[derive(Debug)]
pub(crate) struct Sum(u64);

impl Sum {
    pub(crate) fn new() -> Self {
        Self(0x243F_6A88_85A3_08D3)
    }

    pub(crate) fn add(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<8>();
        let mut sum = self.0;
        for &word in words {
            sum = (sum ^ u64::from_le_bytes(word)).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
        }
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        self.0 = mix(sum ^ u64::from_le_bytes(last));
    }

    pub(crate) fn value(self) -> u64 {
        self.0
    }
}

/// Passes the memory to `take`, piece by piece.
pub(crate) fn read(
    start: usize,
    len: usize,
    mut take: impl FnMut(usize, &[u8]) -> Result<(), Missing>,
) -> Result<(), Missing> {
    let mut buffer = vec![0_u8; CHUNK_BYTES.min(len)];
    let mut done = 0;
    while done < len {
        let part = CHUNK_BYTES.min(len - done);
        read_part(start + done, &mut buffer[..part])?;
        take(done, &buffer[..part])?;
        done += part;
    }
    Ok(())
}

fn read_part(start: usize, buffer: &mut [u8]) -> Result<(), Missing> {
    let target = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    let source =
        libc::iovec { iov_base: std::ptr::with_exposed_provenance_mut(start), iov_len: buffer.len() };
    // SAFETY: takes nothing and always succeeds.
    let own = unsafe { libc::getpid() };
    // SAFETY: writes into the buffer at most; memory that cannot be read is an error
    // (process_vm_readv(2)).
    let read = unsafe { libc::process_vm_readv(own, &raw const target, 1, &raw const source, 1, 0) };
    if usize::try_from(read) == Ok(buffer.len()) {
        return Ok(());
    }
    let error = std::io::Error::last_os_error();
    if read == -1
        && matches!(error.raw_os_error(), Some(libc::EPERM | libc::ENOSYS))
        && is_mapped(start, buffer.len())
    {
        let source: *const u8 = std::ptr::with_exposed_provenance(start);
        // SAFETY: the range is mapped (checked above), the buffer is as long and ours, so they do
        // not overlap.
        unsafe { std::ptr::copy_nonoverlapping(source, buffer.as_mut_ptr(), buffer.len()) };
        return Ok(());
    }
    Err(Missing)
}

/// True if every page of the range is mapped.
pub(crate) fn is_mapped(start: usize, len: usize) -> bool {
    const PAGE: usize = 4096;
    let first = start / PAGE * PAGE;
    let Some(end) = start.checked_add(len) else { return false };
    let mut resident = vec![0_u8; (end - first).div_ceil(PAGE)];
    // SAFETY: writes one byte for each page into the buffer; pages that are not mapped are an error
    // (mincore(2)).
    let answer = unsafe {
        libc::mincore(std::ptr::with_exposed_provenance_mut(first), end - first, resident.as_mut_ptr())
    };
    answer == 0
}

/// Makes every page of a range resident, as pinning does. False if there is no memory for them.
pub(crate) fn make_resident(start: usize, len: usize) -> bool {
    const PAGE: usize = 4096;
    let first = start / PAGE * PAGE;
    // SAFETY: faults the pages in and changes no byte (madvise(2), `MADV_POPULATE_WRITE`).
    let answer = unsafe {
        libc::madvise(
            std::ptr::with_exposed_provenance_mut(first),
            start + len - first,
            libc::MADV_POPULATE_WRITE,
        )
    };
    // Kernels before 5.14 do not know the advice; the program then touches the pages itself.
    answer == 0 || std::io::Error::last_os_error().raw_os_error() == Some(libc::EINVAL)
}

/// The checksum of a range.
pub(crate) fn sum(start: usize, len: usize) -> Result<u64, Missing> {
    let mut sum = Sum::new();
    read(start, len, |_, part| {
        sum.add(part);
        Ok(())
    })?;
    Ok(sum.value())
}

/// Writes device bytes to the program's memory.
pub(crate) fn write(target: usize, bytes: &DeviceBytes, offset: u64, len: usize) -> Result<(), Missing> {
    let target = std::ptr::with_exposed_provenance_mut::<u8>(target);
    let mut done = 0;
    while done < len {
        // SAFETY: the kernel writes at most `len - done` bytes to the address given by the caller;
        // missing memory is an error (pread(2)).
        let read = unsafe { bytes.read_to(target.wrapping_add(done), len - done, offset + to_u64(done)) };
        done += read.ok_or(Missing)?;
    }
    Ok(())
}

impl Sim {
    /// Pins a range.
    pub(crate) fn pin(&mut self, start: usize, len: usize, is_own: bool) -> Answer {
        let context = self.current()?;
        let Some(end) = start.checked_add(len).filter(|_| start != 0 && len != 0) else {
            return Err(Code::INVALID_VALUE);
        };
        if let Some((&other, pinned)) = self.pinned.range(..end).next_back()
            && other + pinned.len_bytes > start
        {
            let text = format!("{start:#x}+{len} overlaps {other:#x}+{}", pinned.len_bytes);
            self.violation("register_overlap", text);
            return Err(Code::ALREADY_REGISTERED);
        }
        if !is_own && !is_mapped(start, len) {
            self.violation("register_unmapped", format!("{start:#x}+{len} is not mapped"));
            return Err(Code::INVALID_VALUE);
        }
        if self.ledger.pinned.now + to_u64(len) > self.config.pinned_bytes_max {
            return Err(Code::OUT_OF_MEMORY);
        }
        if !is_own && !make_resident(start, len) {
            return Err(Code::OUT_OF_MEMORY);
        }
        self.ledger.pinned.add(to_u64(len));
        let identity = self.next_identity();
        let pinned = Pinned { len_bytes: len, context, identity, is_own, uses: Clock::default() };
        self.pinned.insert(start, pinned);
        Ok(())
    }

    /// Unpins a range. Copies that still use it, or that the host has not waited for, are
    /// violations.
    pub(crate) fn unpin(&mut self, start: usize, is_own: bool) -> Answer {
        let is_known = self.pinned.get(&start).is_some_and(|pinned| pinned.is_own == is_own);
        if !is_known {
            self.violation("not_registered", format!("{start:#x} is not the start of a pinned range"));
            return Err(if is_own { Code::INVALID_VALUE } else { Code::NOT_REGISTERED });
        }
        let pinned = self.pinned.remove(&start).ok_or(Code::NOT_REGISTERED)?;
        self.ledger.pinned.subtract(to_u64(pinned.len_bytes));
        if self.lost_of_context(pinned.context).is_some() {
            return Ok(());
        }
        if let Some(point) = pinned.uses.points().find(|&point| !self.is_over(point)) {
            let text = format!("{start:#x} is unpinned while {} still uses it", self.place(point));
            self.violation("unregister_in_flight", text);
        } else if let Some(point) = pinned.uses.first_beyond(&self.host) {
            let text =
                format!("{start:#x} is unpinned, but the host has not waited for {}", self.place(point));
            self.violation("unregister_without_wait", text);
        }
        Ok(())
    }

    /// The kind of a copy's host range.
    pub(crate) fn host_kind(&mut self, start: usize, len: usize) -> Answer<HostKind> {
        let Some(end) = start.checked_add(len).filter(|_| start != 0) else {
            self.violation("host_range", format!("{start:#x}+{len} is no memory"));
            return Err(Code::INVALID_VALUE);
        };
        match self.pinned.range(..end).next_back() {
            Some((&first, pinned)) if first + pinned.len_bytes > start => {
                if first <= start && end <= first + pinned.len_bytes {
                    return Ok(HostKind::Pinned { start: first, identity: pinned.identity });
                }
                let text =
                    format!("{start:#x}+{len} is pinned in part only: {first:#x}+{}", pinned.len_bytes);
                self.violation("pinned_in_part", text);
                Err(Code::INVALID_VALUE)
            }
            _ => Ok(HostKind::Pageable),
        }
    }

    /// Records that work in a stream uses a pinned range.
    pub(crate) fn note_pinned_use(&mut self, kind: HostKind, point: Point) {
        if let HostKind::Pinned { start, .. } = kind
            && let Some(pinned) = self.pinned.get_mut(&start)
        {
            pinned.uses.raise(point);
        }
    }

    /// True if the host memory of a copy has the same kind as when the copy was queued.
    pub(crate) fn is_still_pinned(&self, kind: HostKind) -> bool {
        match kind {
            HostKind::Pageable => true,
            HostKind::Pinned { start, identity } => {
                self.pinned.get(&start).is_some_and(|pinned| pinned.identity == identity)
            }
        }
    }
}
