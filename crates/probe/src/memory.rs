//! The memory of one process from `/proc/<pid>/status`, and the reset of its peak.
//!
//! | field | line | meaning |
//! |---|---|---|
//! | `host_bytes` | sum, below | unreclaimable memory: the kernel can only free it by killing |
//! | `rss_bytes`, `rss_peak_bytes` | `VmRSS`, `VmHWM` | all resident pages, file pages too, now and at most |
//! | `anon_bytes`, `file_bytes`, `shmem_bytes` | `RssAnon`, `RssFile`, `RssShmem` | the three parts of `rss_bytes` |
//! | `swap_bytes` | `VmSwap` | swapped-out anonymous pages, without shared memory |
//! | `locked_bytes`, `pinned_bytes` | `VmLck`, `VmPin` | *address space* locked or pinned, resident or not |
//! | `hugetlb_bytes` | `HugetlbPages` | explicit huge pages, which `VmRSS` leaves out |
//!
//! `host_bytes` = anonymous + shared + swapped + explicit huge pages + locked file pages. A staging
//! ring registered with a driver is anonymous memory, so it is included. The kernel has no line for
//! locked file pages. The smaller of `VmLck` and `RssFile` is an upper bound, and 0 if nothing is
//! locked.
//!
//! **Lag.** Kernels since 6.2 count resident pages in per-CPU batches of `max(32, 2 * CPUs)` pages,
//! older ones in batches of 64 pages per thread. The sum in `status` may be off by up to batch x
//! CPUs (128 KiB per CPU on small machines, many MiB on large ones).
//! [`SmapsRollup`](super::SmapsRollup) walks the page tables and is exact. A
//! [`Snapshot`](super::Snapshot) holds both.
//!
//! Format: `proc_pid_status(5)` and `Documentation/filesystems/proc.rst` of the kernel.

use std::io::Write;

use rustix::fs::OFlags;
use serde::Serialize;

use super::measured::UnavailableList;
use super::procfs::{self, ProcFile, ProcReader, Process, STATUS};
use super::{Measured, ProbeError, Reason};
use onelayer_system::units::MIB;

/// The memory of one process at one moment, in bytes. See the table in the module docs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ProcessMemory {
    /// Unreclaimable memory.
    pub host_bytes: Measured<u64>,
    /// Resident memory.
    pub rss_bytes: Measured<u64>,
    /// Peak of resident memory since the last `exec` or [`Process::reset_peak`].
    pub rss_peak_bytes: Measured<u64>,
    /// Resident anonymous memory.
    pub anon_bytes: Measured<u64>,
    /// Resident pages of mapped files.
    pub file_bytes: Measured<u64>,
    /// Resident shared memory: tmpfs, memfd, shared anonymous mappings.
    pub shmem_bytes: Measured<u64>,
    /// Swapped-out anonymous memory.
    pub swap_bytes: Measured<u64>,
    /// Address space locked with `mlock`.
    pub locked_bytes: Measured<u64>,
    /// Address space pinned by the kernel for devices.
    pub pinned_bytes: Measured<u64>,
    /// Explicit huge pages.
    pub hugetlb_bytes: Measured<u64>,
}

impl ProcessMemory {
    /// All fields missing, for one reason.
    #[must_use]
    pub fn unavailable(reason: Reason) -> Self {
        let missing = Measured::Unavailable(reason);
        Self {
            host_bytes: missing,
            rss_bytes: missing,
            rss_peak_bytes: missing,
            anon_bytes: missing,
            file_bytes: missing,
            shmem_bytes: missing,
            swap_bytes: missing,
            locked_bytes: missing,
            pinned_bytes: missing,
            hugetlb_bytes: missing,
        }
    }

    /// Parses the text of a `status` file.
    #[must_use]
    pub fn parse(status: &[u8]) -> Self {
        let missing = |field| Measured::Unavailable(Reason::FieldMissing { file: STATUS.pattern, field });
        let mut memory = Self {
            host_bytes: missing("RssAnon"),
            rss_bytes: missing("VmRSS"),
            rss_peak_bytes: missing("VmHWM"),
            anon_bytes: missing("RssAnon"),
            file_bytes: missing("RssFile"),
            shmem_bytes: missing("RssShmem"),
            swap_bytes: missing("VmSwap"),
            locked_bytes: missing("VmLck"),
            pinned_bytes: missing("VmPin"),
            hugetlb_bytes: missing("HugetlbPages"),
        };
        let mut is_zombie = false;
        for (key, value) in procfs::keyed_lines(status) {
            let (slot, field) = match key {
                b"State" => {
                    is_zombie = matches!(value.trim_ascii_start().first(), Some(b'Z' | b'X'));
                    continue;
                }
                b"VmRSS" => (&mut memory.rss_bytes, "VmRSS"),
                b"VmHWM" => (&mut memory.rss_peak_bytes, "VmHWM"),
                b"RssAnon" => (&mut memory.anon_bytes, "RssAnon"),
                b"RssFile" => (&mut memory.file_bytes, "RssFile"),
                b"RssShmem" => (&mut memory.shmem_bytes, "RssShmem"),
                b"VmSwap" => (&mut memory.swap_bytes, "VmSwap"),
                b"VmLck" => (&mut memory.locked_bytes, "VmLck"),
                b"VmPin" => (&mut memory.pinned_bytes, "VmPin"),
                b"HugetlbPages" => (&mut memory.hugetlb_bytes, "HugetlbPages"),
                _ => continue,
            };
            *slot = procfs::kib_field(value).ok_or(Reason::Malformed { file: STATUS.pattern, field }).into();
        }
        if is_zombie && memory.rss_bytes.value().is_none() {
            return Self::unavailable(Reason::ProcessEnded);
        }
        memory.complete();
        memory
    }

    /// Fills in the fields that are computed from other lines.
    fn complete(&mut self) {
        // `HugetlbPages` came with kernel 4.4 and `RssAnon` with 4.5. A kernel that prints only `RssAnon`
        // was built without explicit huge pages.
        let has_no_huge_pages =
            matches!(self.hugetlb_bytes, Measured::Unavailable(Reason::FieldMissing { .. }));
        if has_no_huge_pages && self.anon_bytes.value().is_some() {
            self.hugetlb_bytes = Measured::Value(0);
        }
        let locked_file_bytes = match self.locked_bytes {
            Measured::Value(0) => Measured::Value(0),
            locked => locked.combine(self.file_bytes, u64::min),
        };
        self.host_bytes = self
            .anon_bytes
            .plus(self.shmem_bytes)
            .plus(self.swap_bytes)
            .plus(self.hugetlb_bytes)
            .plus(locked_file_bytes);
    }

    /// The fields with their names in a report.
    #[must_use]
    pub fn fields(&self) -> [(&'static str, Measured<u64>); 10] {
        [
            ("host_bytes", self.host_bytes),
            ("rss_bytes", self.rss_bytes),
            ("rss_peak_bytes", self.rss_peak_bytes),
            ("anon_bytes", self.anon_bytes),
            ("file_bytes", self.file_bytes),
            ("shmem_bytes", self.shmem_bytes),
            ("swap_bytes", self.swap_bytes),
            ("locked_bytes", self.locked_bytes),
            ("pinned_bytes", self.pinned_bytes),
            ("hugetlb_bytes", self.hugetlb_bytes),
        ]
    }

    pub(crate) fn note_unavailable(&self, prefix: &str, list: &mut UnavailableList) {
        for (name, measured) in self.fields() {
            list.note(prefix, name, &measured);
        }
    }
}

/// An open `/proc/<pid>/status`, which can be read many times without allocating.
#[derive(Debug)]
pub(crate) struct MemoryReader {
    reader: Result<ProcReader, Reason>,
}

impl MemoryReader {
    pub(crate) fn new(process: &Process) -> Self {
        Self { reader: ProcReader::open(process, &STATUS) }
    }

    pub(crate) fn read(&mut self) -> ProcessMemory {
        match self.reader.as_mut().map_err(|reason| *reason).and_then(ProcReader::read) {
            Ok(text) => ProcessMemory::parse(text),
            Err(reason) => ProcessMemory::unavailable(reason),
        }
    }
}

/// The result of [`Process::reset_peak`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PeakReset {
    /// The high-water mark before.
    pub before_bytes: u64,
    /// The high-water mark after, close to resident memory.
    pub after_bytes: u64,
}

static CLEAR_REFS: ProcFile = ProcFile { name: "clear_refs", pattern: "/proc/<pid>/clear_refs" };

/// How far the peak may exceed resident memory right after a reset: other threads may free memory
/// in between, and the counters lag.
const PEAK_RESET_SLACK_BYTES: u64 = 4 * MIB;

impl Process {
    /// Current memory, from `status`.
    #[must_use]
    pub fn memory(&self) -> ProcessMemory {
        match self.read(&STATUS) {
            Ok(text) => ProcessMemory::parse(&text),
            Err(reason) => ProcessMemory::unavailable(reason),
        }
    }

    /// Sets the high-water mark of resident memory (`VmHWM`) to current resident memory, and checks
    /// the result.
    ///
    /// Writes `5` to `clear_refs` (since kernel 4.0), which changes nothing else.
    ///
    /// # Errors
    /// [`ProbeError::PeakResetRefused`] without permission or on kernels without that file;
    /// [`ProbeError::PeakResetIneffective`] if the mark did not change;
    /// [`ProbeError::PeakResetUnchecked`] if it cannot be read.
    pub fn reset_peak(&self) -> Result<PeakReset, ProbeError> {
        let path = self.path().join(CLEAR_REFS.name);
        let before = self.memory().rss_peak_bytes.ok();
        let before_bytes = before.map_err(|reason| ProbeError::PeakResetUnchecked { reason })?;
        self.open_file(&CLEAR_REFS, OFlags::WRONLY)
            .map_err(|reason| match reason {
                Reason::Unreadable { errno, .. } => std::io::Error::from_raw_os_error(errno),
                other => std::io::Error::other(other),
            })
            .and_then(|mut file| file.write_all(b"5"))
            .map_err(|source| ProbeError::PeakResetRefused { path: path.clone(), source })?;
        let memory = self.memory();
        let (peak_bytes, rss_bytes) = memory
            .rss_peak_bytes
            .combine(memory.rss_bytes, |peak, rss| (peak, rss))
            .ok()
            .map_err(|reason| ProbeError::PeakResetUnchecked { reason })?;
        if peak_bytes.saturating_sub(rss_bytes) > PEAK_RESET_SLACK_BYTES {
            return Err(ProbeError::PeakResetIneffective { path, peak_bytes, rss_bytes });
        }
        Ok(PeakReset { before_bytes, after_bytes: peak_bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Procfs;

    const STATUS_TEXT: &[u8] = b"Name:\tx: y\nState:\tS (sleeping)\nVmPeak:\t    9000 kB\nVmLck:\t       0 kB\n\
        VmPin:\t       4 kB\nVmHWM:\t    5000 kB\nVmRSS:\t    4000 kB\nRssAnon:\t    1000 kB\nRssFile:\t    2500 kB\n\
        RssShmem:\t     500 kB\nVmSwap:\t      16 kB\nHugetlbPages:\t    2048 kB\nThreads:\t1\n";

    fn with(from: &str, to: &str) -> ProcessMemory {
        let text = String::from_utf8(STATUS_TEXT.to_vec()).unwrap();
        assert!(text.contains(from));
        ProcessMemory::parse(text.replace(from, to).as_bytes())
    }

    #[test]
    fn host_is_what_the_kernel_cannot_take_back() {
        let memory = ProcessMemory::parse(STATUS_TEXT);
        assert_eq!(memory.host_bytes, Measured::Value((1000 + 500 + 16 + 2048) * 1024));
        assert_eq!(memory.rss_bytes, Measured::Value(4000 * 1024));
        assert_eq!(memory.rss_peak_bytes, Measured::Value(5000 * 1024));
        assert_eq!(memory.file_bytes, Measured::Value(2500 * 1024));
        assert_eq!(memory.pinned_bytes, Measured::Value(4 * 1024));
    }

    #[test]
    fn locked_file_pages_count_and_are_bounded_by_both_lines() {
        let host = |lock: &str| with("VmLck:\t       0", lock).host_bytes.value().unwrap();
        let rest = (1000 + 500 + 16 + 2048) * 1024;
        assert_eq!(host("VmLck:\t     100"), rest + 100 * 1024);
        assert_eq!(host("VmLck:\t   99999"), rest + 2500 * 1024);
    }

    #[test]
    fn a_missing_line_is_missing_and_takes_the_sum_with_it() {
        let memory = with("RssShmem:", "Elsewhere:");
        let reason = Reason::FieldMissing { file: STATUS.pattern, field: "RssShmem" };
        assert_eq!(memory.shmem_bytes, Measured::Unavailable(reason));
        assert_eq!(memory.host_bytes, Measured::Unavailable(reason));
        assert_eq!(memory.rss_bytes, Measured::Value(4000 * 1024));
    }

    #[test]
    fn a_kernel_without_huge_pages_has_measured_zero_of_them() {
        assert_eq!(with("HugetlbPages:", "Elsewhere:").hugetlb_bytes, Measured::Value(0));
        let older = ProcessMemory::parse(b"VmRSS:\t 10 kB\n");
        assert!(older.hugetlb_bytes.value().is_none() && older.host_bytes.value().is_none());
    }

    #[test]
    fn broken_numbers_are_malformed_not_zero() {
        let memory = with("RssAnon:\t    1000 kB", "RssAnon:\t    -1 kB");
        let reason = Reason::Malformed { file: STATUS.pattern, field: "RssAnon" };
        assert_eq!(memory.anon_bytes, Measured::Unavailable(reason));
        assert_eq!(memory.host_bytes, Measured::Unavailable(reason));
    }

    #[test]
    fn a_zombie_has_ended() {
        let memory = ProcessMemory::parse(b"Name:\tx\nState:\tZ (zombie)\nThreads:\t1\n");
        assert_eq!(memory, ProcessMemory::unavailable(Reason::ProcessEnded));
    }

    #[test]
    fn a_reset_that_changes_nothing_is_an_error() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("self");
        std::fs::create_dir(&directory).unwrap();
        let status = "VmHWM:\t  90000 kB\nVmRSS:\t  4000 kB\n";
        std::fs::write(directory.join("status"), status).unwrap();
        let process = Procfs::at(root.path()).myself();
        let refused = process.reset_peak().unwrap_err();
        assert!(matches!(refused, ProbeError::PeakResetRefused { .. }), "{refused}");
        std::fs::write(directory.join("clear_refs"), "").unwrap();
        let ineffective = process.reset_peak().unwrap_err();
        assert!(
            matches!(ineffective, ProbeError::PeakResetIneffective { peak_bytes: 92_160_000, .. }),
            "{ineffective}"
        );
        assert_eq!(std::fs::read(directory.join("clear_refs")).unwrap(), b"5");
    }
}
