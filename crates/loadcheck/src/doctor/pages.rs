//! Huge pages: a region is requested with `madvise`, touched, and looked up in `smaps`.

use std::fs;

use memmap2::{Advice, MmapMut};
use onelayer::units::{HumanBytes, MIB};

use crate::report::Check;

/// Two huge pages of 2 MiB: one is complete wherever the region starts.
const REGION_BYTES: usize = 4 << 20;
const TOUCH_BYTES: usize = 4096;

/// Tries to get a huge page.
pub(super) fn huge_pages() -> Check {
    let read = |name: &str| {
        fs::read_to_string(format!("/sys/kernel/mm/transparent_hugepage/{name}")).unwrap_or_default()
    };
    judge(&read("enabled"), &read("defrag"), &read("khugepaged/defrag"), touch())
}

/// Bytes of huge pages in a region of [`REGION_BYTES`]; `None` if unknown.
fn touch() -> Option<u64> {
    let mut region = MmapMut::map_anon(REGION_BYTES).ok()?;
    // A kernel without huge pages refuses the advice, which is no error.
    let _ = region.advise(Advice::HugePage);
    region.iter_mut().step_by(TOUCH_BYTES).for_each(|byte| *byte = 1);
    let address = u64::try_from(region.as_ptr().addr()).ok()?;
    anon_huge_bytes(&fs::read_to_string("/proc/self/smaps").ok()?, address)
}

/// `AnonHugePages` of the mapping that `address` is in.
fn anon_huge_bytes(smaps: &str, address: u64) -> Option<u64> {
    let mut is_ours = false;
    for line in smaps.lines() {
        let first = line.split_ascii_whitespace().next().unwrap_or_default();
        let range = first.split_once('-').and_then(|(start, end)| {
            Some((u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?))
        });
        if let Some((start, end)) = range {
            is_ours = (start..end).contains(&address);
        } else if is_ours && first == "AnonHugePages:" {
            let kib = line.split_ascii_whitespace().nth(1)?.parse::<u64>().ok()?;
            return kib.checked_mul(1024);
        }
    }
    None
}

/// The word in brackets: `always [madvise] never`.
fn chosen(text: &str) -> Option<&str> {
    text.split_once('[')?.1.split_once(']').map(|(word, _)| word)
}

fn judge(enabled: &str, defrag: &str, khugepaged: &str, huge_bytes: Option<u64>) -> Check {
    const CONSEQUENCE: &str =
        "the staging ring is of small pages: more CPU time for direct reads and for pinning";
    const FIX: &str = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (as root, on the host)";
    let Some(enabled) = chosen(enabled) else {
        return Check::missing("huge_pages", "the kernel has none", CONSEQUENCE)
            .fix("CONFIG_TRANSPARENT_HUGEPAGE");
    };
    let defrag = chosen(defrag).unwrap_or("unknown");
    let khugepaged = if khugepaged.trim() == "1" { "on" } else { "off" };
    let settings = format!("enabled {enabled}, defrag {defrag}, khugepaged {khugepaged}");
    match huge_bytes {
        Some(huge_bytes) if huge_bytes >= 2 * MIB => Check::ok(
            "huge_pages",
            format!("{settings}; {} of 4 MiB touched were huge", HumanBytes(huge_bytes)),
        ),
        _ if enabled == "never" => Check::limited("huge_pages", settings, CONSEQUENCE).fix(FIX),
        Some(_) => Check::limited(
            "huge_pages",
            format!("{settings}; of 4 MiB touched none was huge"),
            CONSEQUENCE,
        )
        .fix(
            "memory is in pieces: echo 1 > /proc/sys/vm/compact_memory (as root); or defrag: echo madvise > \
                 /sys/kernel/mm/transparent_hugepage/defrag",
        ),
        None => Check::limited(
            "huge_pages",
            format!("{settings}; /proc/self/smaps does not tell"),
            "whether the ring has them is not known",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::State;

    const SMAPS: &str = "7f0000000000-7f0000400000 rw-p 00000000 00:00 0 \nSize: 4096 kB\nAnonHugePages:      2048 kB\n\
        7f0000400000-7f0000401000 r--p 00000000 fe:01 12 /lib/x-y.so\nAnonHugePages:         0 kB\n";

    #[test]
    fn the_region_is_found_by_its_address() {
        assert_eq!(anon_huge_bytes(SMAPS, 0x7f00_0010_0000), Some(2 * MIB));
        assert_eq!(anon_huge_bytes(SMAPS, 0x7f00_0040_0000), Some(0));
        assert_eq!(anon_huge_bytes(SMAPS, 0x7f00_0040_1000), None);
    }

    #[test]
    fn settings_and_outcome_are_both_told() {
        let (madvise, never) = ("always [madvise] never\n", "always madvise [never]\n");
        assert_eq!(judge(madvise, madvise, "1\n", Some(4 * MIB)).state, State::Ok);
        assert_eq!(judge(madvise, madvise, "1\n", Some(0)).state, State::Limited);
        let check = judge(never, madvise, "1\n", Some(0));
        assert!(check.fix.unwrap().contains("hugepage/enabled"));
        assert_eq!(judge("", "", "", Some(0)).state, State::Missing);
        assert_eq!(judge(madvise, madvise, "0\n", None).state, State::Limited);
    }
}
