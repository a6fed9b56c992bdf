//! The activity of a process: page faults, bytes read, CPU time.
//!
//! From `/proc/<pid>/stat` and `/proc/<pid>/io` (`proc_pid_stat(5)`, `proc_pid_io(5)`). CPU time is
//! in clock ticks (usually 10 ms). `read_bytes` counts bytes fetched from storage when a read
//! enters the block layer. It includes page faults on mappings; a network file system may count
//! nothing.
//! `read_call_bytes` (`rchar`) counts bytes returned by read calls, cached or not; mappings do not
//! count.

use serde::Serialize;

use super::measured::UnavailableList;
use super::procfs::{self, IO, Process, STAT};
use super::{Measured, Reason};

/// Activity since the process started, or between two moments.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Activity {
    /// Page faults that needed no read.
    pub minor_faults: Measured<u64>,
    /// Page faults that waited for storage.
    pub major_faults: Measured<u64>,
    /// Seconds of CPU in user and kernel mode, all threads.
    pub cpu_seconds: Measured<f64>,
    /// Bytes fetched from storage.
    pub read_bytes: Measured<u64>,
    /// Bytes that read calls returned.
    pub read_call_bytes: Measured<u64>,
}

impl Activity {
    /// The activity since `earlier`.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            minor_faults: self.minor_faults.growth_since(earlier.minor_faults),
            major_faults: self.major_faults.growth_since(earlier.major_faults),
            cpu_seconds: self.cpu_seconds.combine(earlier.cpu_seconds, |now, then| (now - then).max(0.0)),
            read_bytes: self.read_bytes.growth_since(earlier.read_bytes),
            read_call_bytes: self.read_call_bytes.growth_since(earlier.read_call_bytes),
        }
    }

    pub(crate) fn note_unavailable(&self, prefix: &str, list: &mut UnavailableList) {
        list.note(prefix, "minor_faults", &self.minor_faults);
        list.note(prefix, "major_faults", &self.major_faults);
        list.note(prefix, "cpu_seconds", &self.cpu_seconds);
        list.note(prefix, "read_bytes", &self.read_bytes);
        list.note(prefix, "read_call_bytes", &self.read_call_bytes);
    }
}

/// The used fields of a `stat` file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stat {
    pub(crate) name: Box<str>,
    pub(crate) state: u8,
    pub(crate) parent_pid: u32,
    pub(crate) minor_faults: u64,
    pub(crate) major_faults: u64,
    pub(crate) cpu_ticks: u64,
    /// CPU ticks of descendants that were waited for.
    pub(crate) waited_cpu_ticks: u64,
    /// Ticks between boot and the process's start. Identifies a process together with the id.
    pub(crate) start_ticks: u64,
}

impl Stat {
    /// Parses the text of a `stat` file. The name is in parentheses and may contain `(`, `)`,
    /// spaces and line ends.
    pub(crate) fn parse(text: &[u8]) -> Option<Self> {
        let open = text.iter().position(|&byte| byte == b'(')?;
        let close = text.iter().rposition(|&byte| byte == b')')?;
        let name = String::from_utf8_lossy(text.get(open + 1..close)?).into();
        let rest = std::str::from_utf8(text.get(close + 1..)?).ok()?;
        // The first field here is the state, field 3 in the manual.
        let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
        let number = |manual_index: usize| fields.get(manual_index - 3)?.parse::<u64>().ok();
        Some(Self {
            name,
            state: *fields.first()?.as_bytes().first()?,
            parent_pid: u32::try_from(number(4)?).ok()?,
            minor_faults: number(10)?,
            major_faults: number(12)?,
            cpu_ticks: number(14)?.checked_add(number(15)?)?,
            waited_cpu_ticks: number(16)?.checked_add(number(17)?)?,
            start_ticks: number(22)?,
        })
    }

    pub(crate) fn has_ended(&self) -> bool {
        matches!(self.state, b'Z' | b'X' | b'x')
    }
}

impl Process {
    pub(crate) fn stat(&self) -> Result<Stat, Reason> {
        Stat::parse(&self.read(&STAT)?).ok_or(Reason::Malformed { file: STAT.pattern, field: "starttime" })
    }

    /// CPU seconds (user and kernel) of descendants that have ended and were waited for.
    ///
    /// Running processes do not count, nor do children of a parent that ignores `SIGCHLD`.
    #[must_use]
    pub fn waited_cpu_seconds(&self) -> Measured<f64> {
        Measured::from(self.stat().map(|stat| stat.waited_cpu_ticks)).map(ticks_to_seconds)
    }

    /// The activity since the process started.
    #[must_use]
    pub fn activity(&self) -> Activity {
        let stat = self.stat();
        let from_stat = |pick: fn(&Stat) -> u64| match &stat {
            Ok(stat) => Measured::Value(pick(stat)),
            Err(reason) => Measured::Unavailable(*reason),
        };
        let io = self.read(&IO);
        let from_io = |field: &'static str| -> Measured<u64> {
            let text = match &io {
                Ok(text) => text,
                Err(reason) => return Measured::Unavailable(*reason),
            };
            procfs::keyed_lines(text)
                .find(|(key, _)| *key == field.as_bytes())
                .ok_or(Reason::FieldMissing { file: IO.pattern, field })
                .and_then(|(_, value)| {
                    let number = std::str::from_utf8(value).ok().and_then(|value| value.trim().parse().ok());
                    number.ok_or(Reason::Malformed { file: IO.pattern, field })
                })
                .into()
        };
        Activity {
            minor_faults: from_stat(|stat| stat.minor_faults),
            major_faults: from_stat(|stat| stat.major_faults),
            cpu_seconds: from_stat(|stat| stat.cpu_ticks).map(ticks_to_seconds),
            read_bytes: from_io("read_bytes"),
            read_call_bytes: from_io("rchar"),
        }
    }
}

fn ticks_to_seconds(ticks: u64) -> f64 {
    let ticks_per_second = rustix::param::clock_ticks_per_second().max(1);
    let whole = std::time::Duration::from_secs(ticks / ticks_per_second);
    let part = std::time::Duration::from_nanos((ticks % ticks_per_second) * 1_000_000_000 / ticks_per_second);
    (whole + part).as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Procfs;

    #[test]
    fn a_name_full_of_parentheses_does_not_shift_the_fields() {
        let text = b"42 (a) R 7 (b\n) S 1 42 42 0 -1 4194560 100 0 3 0 5 6 7 8 20 0 1 0 987 1000 2 18446744073709551615";
        let stat = Stat::parse(text).unwrap();
        assert_eq!(&*stat.name, "a) R 7 (b\n");
        assert_eq!((stat.state, stat.parent_pid), (b'S', 1));
        assert_eq!((stat.minor_faults, stat.major_faults, stat.cpu_ticks), (100, 3, 11));
        assert_eq!(stat.waited_cpu_ticks, 15);
        assert_eq!(stat.start_ticks, 987);
        assert_eq!(Stat::parse(b"42 (cut) S 1 42"), None);
    }

    #[test]
    fn reading_a_file_shows_in_the_counters() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), vec![1; 3 << 20]).unwrap();
        let myself = Procfs::default().myself();
        let before = myself.activity();
        assert_eq!(std::fs::read(file.path()).unwrap().len(), 3 << 20);
        // A fresh mapping: the allocator may return pages that were touched before.
        let mut fresh = memmap2::MmapMut::map_anon(16 * rustix::param::page_size()).unwrap();
        fresh.fill(1);
        let done = myself.activity().since(&before);
        let call_bytes = done.read_call_bytes.value().expect("/proc/self/io is readable here");
        assert!(call_bytes >= 3 << 20, "{call_bytes}");
        assert!(done.minor_faults.value().unwrap() > 0);
    }

    #[test]
    fn children_count_once_they_were_waited_for() {
        let myself = Procfs::default().myself();
        let before = myself.waited_cpu_seconds().value().expect("/proc/self/stat is readable here");
        // The CPU time of a grandchild arrives through its parent.
        let script = "(i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done); :";
        assert!(std::process::Command::new("sh").args(["-c", script]).status().unwrap().success());
        let took = myself.waited_cpu_seconds().value().unwrap() - before;
        assert!(took > 0.0, "{took}");
    }

    #[test]
    fn without_proc_everything_is_missing() {
        let activity = Procfs::at("/nonexistent").myself().activity();
        assert!(activity.minor_faults.reason().is_some() && activity.read_bytes.reason().is_some());
        assert!(activity.cpu_seconds.reason().is_some());
    }
}
