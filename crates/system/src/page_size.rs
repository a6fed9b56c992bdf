//! Huge or small pages for fresh memory, by what touching it costs.
//!
//! The first touch of a page makes the kernel clear it. On a machine of its own, huge pages are the
//! cheap way: 2 MiB in about 0.1 ms, against 0.6 ms in small pages. In a virtual machine whose host
//! has taken the free memory back, 2 MiB take 5 ms in one huge page, and 0.6 to 2 ms in small ones.
//! The kernel does not say which of the two it is, so the first huge pages are touched and timed.

use std::time::{Duration, Instant};

use memmap2::{Advice, MmapMut};

use crate::units::{Alignment, to_usize};

/// Small pages are better if the first touch of a huge page takes longer than this: between what
/// it takes where memory is there (0.1 ms) and where it is not (5 ms).
const TOUCH_MAX: Duration = Duration::from_millis(1);
/// A huge page is touched for each of so many bytes, up to `PROBES_MAX`.
const BYTES_PER_PROBE: usize = 16 << 20;
/// The most huge pages that are touched. An odd number, for a majority.
const PROBES_MAX: usize = 3;

/// Asks for huge pages in a part of a fresh private anonymous mapping. Touches the first of them,
/// and takes small pages for the rest if that is slow.
///
/// Best effort: if the system refuses an advice, its default stays.
pub fn choose_page_size(mapping: &MmapMut, offset: usize, len: usize) {
    // Miri knows no madvise.
    if cfg!(miri) || mapping.advise_range(Advice::HugePage, offset, len).is_err() {
        return;
    }
    let huge_bytes = to_usize(Alignment::HUGE_PAGE.bytes());
    let skip = mapping.as_ptr().wrapping_add(offset).align_offset(huge_bytes);
    let (offset, len) = (offset + skip, len.saturating_sub(skip));
    let probes = (len / BYTES_PER_PROBE).min(PROBES_MAX);
    let is_slow = |probe: &usize| {
        let start = Instant::now();
        let touched = mapping.advise_range(Advice::PopulateWrite, offset + probe * huge_bytes, huge_bytes);
        // Linux before 5.14 cannot touch pages on request.
        touched.is_ok() && start.elapsed() > TOUCH_MAX
    };
    if (0..probes).filter(is_slow).count() * 2 > probes {
        let probed_bytes = probes * huge_bytes;
        let _ = mapping.advise_range(Advice::NoHugePage, offset + probed_bytes, len - probed_bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_few_pages_are_touched() {
        let huge_bytes = to_usize(Alignment::HUGE_PAGE.bytes());
        for len in [4 << 20, 40 << 20, 400 << 20] {
            let mapping = memmap2::MmapOptions::new().len(len + huge_bytes).map_anon().unwrap();
            let skip = mapping.as_ptr().align_offset(huge_bytes);
            choose_page_size(&mapping, skip, len);
            let mut pages = vec![0_u8; (len + huge_bytes).div_ceil(4096)];
            let address = mapping.as_ptr().cast_mut().cast();
            #[allow(unsafe_code, reason = "asks which pages are there")]
            // SAFETY: the range is the whole mapping, and there is a byte for each of its pages.
            let answer = unsafe { libc::mincore(address, len + huge_bytes, pages.as_mut_ptr()) };
            assert_eq!(answer, 0);
            let resident = pages.iter().filter(|&&page| page & 1 == 1).count() * 4096;
            assert!(resident <= PROBES_MAX * huge_bytes, "{resident} of {len}");
        }
    }
}
