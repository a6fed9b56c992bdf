//! Exact memory of one process: `/proc/<pid>/smaps_rollup` (since kernel 4.14).
//!
//! The kernel walks the page tables, so the numbers do not lag. A read takes time in proportion to
//! resident memory (8 ms per GiB of small pages on a 2026 server core) and holds the address
//! space's lock meanwhile. So it is read only at both ends of a run, and for process trees: only
//! `Pss` counts shared pages once, since it divides each page by the number of processes that map
//! it. `Pss_Anon`,
//! `Pss_File` and `Pss_Shmem` came with kernel 5.4.

use serde::Serialize;

use super::measured::UnavailableList;
use super::procfs::{self, Process, ROLLUP};
use super::{Measured, Reason};

/// Exact memory of one process, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct SmapsRollup {
    /// Resident memory.
    pub rss_bytes: Measured<u64>,
    /// Resident memory, shared pages divided among the processes that map them.
    pub pss_bytes: Measured<u64>,
    /// The anonymous part of `pss_bytes`.
    pub pss_anon_bytes: Measured<u64>,
    /// The file part of `pss_bytes`.
    pub pss_file_bytes: Measured<u64>,
    /// The shared-memory part of `pss_bytes`.
    pub pss_shmem_bytes: Measured<u64>,
    /// Resident anonymous memory, shared or not.
    pub anon_bytes: Measured<u64>,
    /// Anonymous memory in transparent huge pages.
    pub anon_huge_bytes: Measured<u64>,
    /// Swapped-out anonymous and shared memory.
    pub swap_bytes: Measured<u64>,
    /// `swap_bytes`, shared pages divided.
    pub swap_pss_bytes: Measured<u64>,
    /// Resident pages of locked mappings, shared pages divided; anonymous and file pages alike.
    pub locked_bytes: Measured<u64>,
    /// Explicit huge pages shared with other processes (not divided).
    pub hugetlb_shared_bytes: Measured<u64>,
    /// Explicit huge pages of this process alone.
    pub hugetlb_private_bytes: Measured<u64>,
}

impl SmapsRollup {
    /// All fields missing, for one reason.
    #[must_use]
    pub fn unavailable(reason: Reason) -> Self {
        let mut rollup = Self::parse(b"");
        for (_, slot) in rollup.slots() {
            *slot = Measured::Unavailable(reason);
        }
        rollup
    }

    /// Parses the text of a `smaps_rollup` file.
    #[must_use]
    pub fn parse(text: &[u8]) -> Self {
        let missing = Measured::Unavailable(Reason::FieldMissing { file: ROLLUP.pattern, field: "Rss" });
        let mut rollup = Self {
            rss_bytes: missing,
            pss_bytes: missing,
            pss_anon_bytes: missing,
            pss_file_bytes: missing,
            pss_shmem_bytes: missing,
            anon_bytes: missing,
            anon_huge_bytes: missing,
            swap_bytes: missing,
            swap_pss_bytes: missing,
            locked_bytes: missing,
            hugetlb_shared_bytes: missing,
            hugetlb_private_bytes: missing,
        };
        for (field, slot) in rollup.slots() {
            *slot = procfs::keyed_lines(text)
                .find(|(key, _)| *key == field.as_bytes())
                .ok_or(Reason::FieldMissing { file: ROLLUP.pattern, field })
                .and_then(|(_, value)| {
                    procfs::kib_field(value).ok_or(Reason::Malformed { file: ROLLUP.pattern, field })
                })
                .into();
        }
        rollup
    }

    fn slots(&mut self) -> [(&'static str, &mut Measured<u64>); 12] {
        [
            ("Rss", &mut self.rss_bytes),
            ("Pss", &mut self.pss_bytes),
            ("Pss_Anon", &mut self.pss_anon_bytes),
            ("Pss_File", &mut self.pss_file_bytes),
            ("Pss_Shmem", &mut self.pss_shmem_bytes),
            ("Anonymous", &mut self.anon_bytes),
            ("AnonHugePages", &mut self.anon_huge_bytes),
            ("Swap", &mut self.swap_bytes),
            ("SwapPss", &mut self.swap_pss_bytes),
            ("Locked", &mut self.locked_bytes),
            ("Shared_Hugetlb", &mut self.hugetlb_shared_bytes),
            ("Private_Hugetlb", &mut self.hugetlb_private_bytes),
        ]
    }

    /// This process's share of unreclaimable memory: anonymous, shared and swapped pages divided
    /// among the processes that map them, explicit huge pages, and locked file pages (at most the
    /// smaller of `Locked` and `Pss_File`). Summed over all processes, a shared page counts once.
    #[must_use]
    pub fn host_share_bytes(&self) -> Measured<u64> {
        let locked_file_bytes = match self.locked_bytes {
            Measured::Value(0) => Measured::Value(0),
            locked => locked.combine(self.pss_file_bytes, u64::min),
        };
        self.pss_anon_bytes
            .plus(self.pss_shmem_bytes)
            .plus(self.swap_pss_bytes)
            .plus(self.hugetlb_shared_bytes)
            .plus(self.hugetlb_private_bytes)
            .plus(locked_file_bytes)
    }

    pub(crate) fn note_unavailable(&self, prefix: &str, list: &mut UnavailableList) {
        for (name, measured) in [
            ("rss_bytes", self.rss_bytes),
            ("pss_bytes", self.pss_bytes),
            ("pss_anon_bytes", self.pss_anon_bytes),
            ("pss_file_bytes", self.pss_file_bytes),
            ("pss_shmem_bytes", self.pss_shmem_bytes),
            ("anon_bytes", self.anon_bytes),
            ("anon_huge_bytes", self.anon_huge_bytes),
            ("swap_bytes", self.swap_bytes),
            ("swap_pss_bytes", self.swap_pss_bytes),
            ("locked_bytes", self.locked_bytes),
            ("hugetlb_shared_bytes", self.hugetlb_shared_bytes),
            ("hugetlb_private_bytes", self.hugetlb_private_bytes),
        ] {
            list.note(prefix, name, &measured);
        }
    }
}

impl Process {
    /// Current exact memory. Slow in proportion to resident memory; see the module docs.
    #[must_use]
    pub fn exact_memory(&self) -> SmapsRollup {
        match self.read(&ROLLUP) {
            // A process without an address space (a zombie, a kernel thread) has an empty file.
            Ok(text) if text.is_empty() => SmapsRollup::unavailable(Reason::ProcessEnded),
            Ok(text) => SmapsRollup::parse(&text),
            Err(reason) => SmapsRollup::unavailable(reason),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &[u8] = b"555e7225e000-7fff9f4ce000 ---p 00000000 00:00 0                [rollup]\n\
        Rss:                1760 kB\nPss:                 381 kB\nPss_Dirty:           112 kB\n\
        Pss_Anon:            112 kB\nPss_File:            269 kB\nPss_Shmem:             3 kB\n\
        Anonymous:           120 kB\nAnonHugePages:         0 kB\nShared_Hugetlb:        0 kB\n\
        Private_Hugetlb:    2048 kB\nSwap:                  8 kB\nSwapPss:               4 kB\nLocked:               16 kB\n";

    #[test]
    fn shares_are_read_and_summed() {
        let rollup = SmapsRollup::parse(TEXT);
        assert_eq!(rollup.rss_bytes, Measured::Value(1760 * 1024));
        assert_eq!(rollup.anon_bytes, Measured::Value(120 * 1024));
        assert_eq!(rollup.host_share_bytes(), Measured::Value((112 + 3 + 4 + 2048 + 16) * 1024));
    }

    #[test]
    fn an_older_kernel_lacks_the_parts_and_so_the_share() {
        let text = String::from_utf8(TEXT.to_vec()).unwrap().replace("Pss_Anon:", "Pss_Anom:");
        let rollup = SmapsRollup::parse(text.as_bytes());
        let reason = Reason::FieldMissing { file: ROLLUP.pattern, field: "Pss_Anon" };
        assert_eq!(rollup.pss_bytes, Measured::Value(381 * 1024));
        assert_eq!(rollup.host_share_bytes(), Measured::Unavailable(reason));
    }
}
