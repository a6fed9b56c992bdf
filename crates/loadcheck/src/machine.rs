//! The machine: kernel, memory, the memory limit of this process, and what memory pressure costs.
//!
//! Counters of pressure are the whole machine's: on a busy machine others contribute to them.

use std::fs;

use onelayer::units::HumanBytes;
use onelayer_probe::{CgroupVersion, Procfs};

use crate::report::{Cgroup, Host, LimitOf, Pressure, Report};

/// The machine, as a report has it.
pub(crate) fn host() -> Host {
    let procfs = Procfs::default();
    let machine = onelayer_probe::Host::read(&procfs);
    let group = procfs.myself().memory_group().ok();
    Host {
        kernel: machine.kernel.value().map(Into::into),
        ram_bytes: machine.ram_bytes.value(),
        cgroup: group.map(|group| Cgroup {
            version: if group.version() == CgroupVersion::V1 { 1 } else { 2 },
            limit_bytes: group.limit_bytes().value().flatten(),
        }),
        gpus: Vec::new(),
        unified_memory: false,
    }
}

/// The smaller of the cgroup's limit and the machine's memory.
pub(crate) fn memory_limit_bytes() -> Option<u64> {
    let host = host();
    let group_bytes = host.cgroup.and_then(|group| group.limit_bytes);
    match (group_bytes, host.ram_bytes) {
        (Some(group_bytes), Some(ram_bytes)) => Some(group_bytes.min(ram_bytes)),
        (group_bytes, ram_bytes) => group_bytes.or(ram_bytes),
    }
}

/// The memory that a process can still take before the machine or its cgroup runs out. Page cache
/// that can be dropped counts as free. `None` where neither is known.
pub(crate) fn memory_available_bytes() -> Option<u64> {
    available().map(|(bytes, _)| bytes)
}

/// The same, and who bounds it.
pub(crate) fn available() -> Option<(u64, LimitOf)> {
    let procfs = Procfs::default();
    let machine_bytes = onelayer_probe::Host::read(&procfs).ram_available_bytes.value();
    let group_bytes =
        procfs.myself().memory_group().ok().and_then(|group| group.headroom_bytes().value().flatten());
    let in_group = group_bytes.filter(|group_bytes| machine_bytes.is_none_or(|bytes| *group_bytes < bytes));
    in_group.map(|bytes| (bytes, LimitOf::Cgroup)).or(machine_bytes.map(|bytes| (bytes, LimitOf::Machine)))
}

/// `NEEDED, and AVAILABLE of memory are available`, if that is too little.
pub(crate) fn shortage(needed_bytes: u64) -> Option<String> {
    let available_bytes = memory_available_bytes().filter(|available| needed_bytes > *available)?;
    let (needed, available) = (HumanBytes(needed_bytes), HumanBytes(available_bytes));
    Some(format!("{needed}, and {available} of memory are available"))
}

/// Counters of the machine's memory pressure at one moment.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PressureCounters {
    stalled_us: Option<u64>,
    refaults: Option<u64>,
}

impl PressureCounters {
    /// Reads them.
    pub(crate) fn now() -> Self {
        Self {
            stalled_us: fs::read_to_string("/proc/pressure/memory").ok().and_then(|text| stalled_us(&text)),
            refaults: fs::read_to_string("/proc/vmstat").ok().and_then(|text| refaults(&text)),
        }
    }

    /// The difference since then.
    pub(crate) fn until_now(self) -> Pressure {
        let now = Self::now();
        let since = |now: Option<u64>, then: Option<u64>| Some(now?.saturating_sub(then?));
        Pressure {
            memory_some_us: since(now.stalled_us, self.stalled_us),
            refaults: since(now.refaults, self.refaults),
        }
    }
}

/// Puts reasons for what is missing into the report.
pub(crate) fn note_missing_pressure(pressure: &Pressure, report: &mut Report) {
    if pressure.memory_some_us.is_none() {
        report.missing(
            "pressure.memory_some_us",
            "/proc/pressure/memory cannot be read (kernel built without PSI?)",
        );
    }
    if pressure.refaults.is_none() {
        report.missing("pressure.refaults", "/proc/vmstat has no refault counters");
    }
}

/// `some avg10=0.00 avg60=0.00 avg300=0.00 total=1234`
fn stalled_us(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("some "))?;
    line.split(' ').find_map(|field| field.strip_prefix("total="))?.parse().ok()
}

/// Before kernel 5.9 there is one counter, since then one for file pages and one for anonymous
/// ones.
fn refaults(text: &str) -> Option<u64> {
    let values = text.lines().filter_map(|line| line.split_once(' ')).filter(|(name, _)| {
        matches!(*name, "workingset_refault" | "workingset_refault_anon" | "workingset_refault_file")
    });
    let values: Vec<u64> = values.filter_map(|(_, value)| value.parse().ok()).collect();
    (!values.is_empty()).then(|| values.iter().sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_known_here() {
        let limit_bytes = memory_limit_bytes().expect("/proc/meminfo is readable here");
        assert!(limit_bytes > 1 << 20 && Some(limit_bytes) <= host().ram_bytes);
        let available_bytes = memory_available_bytes().expect("/proc/meminfo is readable here");
        assert!(available_bytes > 0 && available_bytes <= limit_bytes);
        assert!(host().kernel.is_some_and(|kernel| !kernel.contains('\n')));
    }

    #[test]
    fn counters_are_found() {
        let text = "some avg10=0.00 avg60=0.00 avg300=0.00 total=42\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=7\n";
        assert_eq!(stalled_us(text), Some(42));
        assert_eq!(stalled_us(""), None);
        let text =
            "nr_free 1\nworkingset_refault_anon 2\nworkingset_refault_file 3\nworkingset_activate_file 4\n";
        assert_eq!(refaults(text), Some(5));
        assert_eq!(refaults("nr_free 1\n"), None);
    }
}
