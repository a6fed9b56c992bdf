//! The CPU quota of a control group.
//!
//! Version 2 writes `QUOTA PERIOD` or `max PERIOD` into `cpu.max`, version 1 has `cpu.cfs_quota_us`
//! (-1: none) and `cpu.cfs_period_us`. The smallest ratio of the group and its visible ancestors
//! counts. Sources: `cgroup-v2.rst` and `Documentation/scheduler/sched-bwc.rst` of the kernel.

use std::num::NonZeroUsize;

use super::locate::{CgroupVersion, Location};
use super::memory::read_text;
use crate::{Measured, Reason};

/// A CPU control group and its visible ancestors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuGroup {
    location: Location,
}

impl CpuGroup {
    pub(crate) fn new(location: Location) -> Self {
        Self { location }
    }

    /// The smallest quota in thousandths of a CPU; `Value(None)`: no quota.
    #[must_use]
    pub fn quota_millicpus(&self) -> Measured<Option<u64>> {
        let mut smallest: Option<u64> = None;
        for directory in &self.location.directories {
            let read = |file| match read_text(directory, file) {
                // The root group has no quota.
                Err(Reason::FieldMissing { .. }) => Ok(None),
                other => other.map(Some),
            };
            let quota = match self.location.version {
                CgroupVersion::V2 => {
                    read("cpu.max").and_then(|text| text.map_or(Ok(None), |text| parse_v2(&text)))
                }
                CgroupVersion::V1 => read("cpu.cfs_quota_us").and_then(|quota| {
                    let period = read("cpu.cfs_period_us")?;
                    quota.zip(period).map_or(Ok(None), |(quota, period)| parse_v1(&quota, &period))
                }),
            };
            match quota {
                Ok(quota) => smallest = [smallest, quota].into_iter().flatten().min(),
                Err(reason) => return Measured::Unavailable(reason),
            }
        }
        Measured::Value(smallest)
    }

    /// The number of threads that can run at once: the CPUs allowed for this process, limited by
    /// the quota (rounded down, at least 1). `None` if the CPUs cannot be counted.
    #[must_use]
    pub fn parallelism(&self) -> Option<NonZeroUsize> {
        let allowed = std::thread::available_parallelism().ok()?;
        let quota = self.quota_millicpus().value().flatten();
        let whole = quota.map(|millicpus| usize::try_from(millicpus / 1000).unwrap_or(usize::MAX));
        let whole = whole.map(|cpus| NonZeroUsize::new(cpus).unwrap_or(NonZeroUsize::MIN));
        Some(whole.map_or(allowed, |cpus| cpus.min(allowed)))
    }
}

fn ratio(quota: u64, period: u64) -> Option<u64> {
    quota.checked_mul(1000)?.checked_div(period)
}

fn parse_v2(text: &str) -> Result<Option<u64>, Reason> {
    const MALFORMED: Reason = Reason::Malformed { file: "the control group", field: "cpu.max" };
    let (quota, period) = text.trim().split_once(' ').ok_or(MALFORMED)?;
    if quota == "max" {
        return Ok(None);
    }
    let number = |text: &str| text.trim().parse::<u64>().map_err(|_| MALFORMED);
    ratio(number(quota)?, number(period)?).map(Some).ok_or(MALFORMED)
}

fn parse_v1(quota: &str, period: &str) -> Result<Option<u64>, Reason> {
    const MALFORMED: Reason = Reason::Malformed { file: "the control group", field: "cpu.cfs_quota_us" };
    let quota = quota.trim().parse::<i64>().map_err(|_| MALFORMED)?;
    let Ok(quota) = u64::try_from(quota) else { return Ok(None) };
    let period = period.trim().parse::<u64>().map_err(|_| MALFORMED)?;
    ratio(quota, period).map(Some).ok_or(MALFORMED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotas_of_both_versions() {
        assert_eq!(parse_v2("max 100000\n"), Ok(None));
        assert_eq!(parse_v2("150000 100000\n"), Ok(Some(1500)));
        assert_eq!(parse_v1("-1\n", "100000\n"), Ok(None));
        assert_eq!(parse_v1("50000\n", "100000\n"), Ok(Some(500)));
        assert!(parse_v2("").is_err() && parse_v2("1 0").is_err() && parse_v1("x", "1").is_err());
    }

    #[test]
    fn the_smallest_quota_on_the_way_up_counts() {
        let root = tempfile::tempdir().unwrap();
        let below = root.path().join("below");
        std::fs::create_dir(&below).unwrap();
        let mut location = Location {
            version: CgroupVersion::V2,
            directories: vec![below.clone(), root.path().to_path_buf()],
            is_own: true,
        };
        assert_eq!(CpuGroup::new(location.clone()).quota_millicpus(), Measured::Value(None));
        std::fs::write(below.join("cpu.max"), "150000 100000\n").unwrap();
        std::fs::write(root.path().join("cpu.max"), "50000 100000\n").unwrap();
        let group = CpuGroup::new(location.clone());
        assert_eq!(group.quota_millicpus(), Measured::Value(Some(500)));
        assert_eq!(group.parallelism(), Some(NonZeroUsize::MIN), "half a CPU still runs one thread");
        location.version = CgroupVersion::V1;
        std::fs::write(below.join("cpu.cfs_quota_us"), "-1\n").unwrap();
        std::fs::write(below.join("cpu.cfs_period_us"), "100000\n").unwrap();
        assert_eq!(CpuGroup::new(location).quota_millicpus(), Measured::Value(None));
    }
}
