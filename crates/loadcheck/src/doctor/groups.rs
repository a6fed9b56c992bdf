//! Control groups (the one of this process, its limit, and whether new ones can be made) and swap.

use onelayer::units::HumanBytes;
use onelayer_probe::{CgroupVersion, ChildGroup, MemoryGroup, ProbeError, Procfs};

use crate::report::Check;

/// Any limit will do: the group stays empty.
const TRIED_LIMIT_BYTES: u64 = 1 << 30;

/// Tries to make a control group.
pub(super) fn cgroup() -> Check {
    let group = Procfs::default().myself().memory_group();
    let made = ChildGroup::create(Some(TRIED_LIMIT_BYTES)).map(|_| ());
    match group {
        Ok(group) => judge_cgroup(&describe(&group), &made),
        Err(reason) => judge_cgroup(&reason.to_string(), &made),
    }
}

/// `version 2, 1.2 GiB of at most 4 GiB in use, /sys/fs/cgroup/user.slice`
fn describe(group: &MemoryGroup) -> String {
    let version = if group.version() == CgroupVersion::V1 { 1 } else { 2 };
    let memory = group.read();
    let used =
        memory.usage_bytes.value().map_or_else(String::new, |used| format!("{} in use, ", HumanBytes(used)));
    let limit = match group.limit_bytes().value() {
        Some(Some(limit)) => format!("limit {}", HumanBytes(limit)),
        Some(None) => "no limit".to_owned(),
        None => "limit unknown".to_owned(),
    };
    format!("version {version}, {used}{limit}, {}", group.directory().display())
}

fn judge_cgroup(found: &str, made: &Result<(), ProbeError>) -> Check {
    const CONSEQUENCE: &str =
        "no control group can be made: `fit` cannot run, and the kernel's peak of a run is not known";
    match made {
        Ok(()) => Check::ok("cgroup", format!("{found}; groups with a limit can be made")),
        Err(error @ ProbeError::GroupNotHere { .. }) => {
            Check::missing("cgroup", format!("{found}; {error}"), CONSEQUENCE)
                .fix("mount it: mount -t cgroup2 none /sys/fs/cgroup (as root)")
        }
        Err(ProbeError::GroupNotPermitted { source, .. }) => {
            Check::limited("cgroup", format!("{found}; none can be made: {source}"), CONSEQUENCE).fix(
                "systemd-run --user --scope -p Delegate=yes -- loadcheck ...; or as root; in a container: docker run \
                 --security-opt writable-cgroups=true (Docker 28) or podman run --security-opt unmask=/sys/fs/cgroup",
            )
        }
        Err(ProbeError::GroupNotDelegated { found: controllers, .. }) => Check::limited(
            "cgroup",
            format!("{found}; the memory controller is not handed on (only `{controllers}`)"),
            CONSEQUENCE,
        )
        .fix("systemd-run --user --scope -p Delegate=yes -- loadcheck ..."),
        Err(ProbeError::GroupHoldsProcesses { process_count, .. }) => Check::limited(
            "cgroup",
            format!("{found}; {process_count} processes are in it, and a group with processes has no groups below"),
            CONSEQUENCE,
        )
        .fix("systemd-run --user --scope -p Delegate=yes -- loadcheck ...; in a container: as its first process"),
        Err(error) => Check::limited("cgroup", format!("{found}; none can be made: {error}"), CONSEQUENCE),
    }
}

/// Swap of the machine.
pub(super) fn swap() -> Check {
    judge_swap(&std::fs::read_to_string("/proc/swaps").unwrap_or_default())
}

/// A header, then a line each: name, type, size in KiB, used, priority.
fn judge_swap(text: &str) -> Check {
    let sizes =
        text.lines().skip(1).filter_map(|line| line.split_ascii_whitespace().nth(2)?.parse::<u64>().ok());
    let total_bytes = sizes.fold(0_u64, |sum, kib| sum.saturating_add(kib.saturating_mul(1024)));
    if total_bytes == 0 {
        return Check::ok("swap", "none");
    }
    Check::limited(
        "swap",
        HumanBytes(total_bytes).to_string(),
        "memory may be swapped out before a limit is hit; `fit` switches swap off for its groups, `host` includes \
         swapped memory",
    )
    .fix("for figures that can be repeated: swapoff -a (as root)")
}

#[cfg(test)]
mod tests {
    use std::io;

    use onelayer_probe::Reason;

    use super::*;
    use crate::report::State;

    #[test]
    fn every_refusal_has_a_way_out() {
        let parent = || "/sys/fs/cgroup/user.slice".into();
        let refusals = [
            (ProbeError::GroupNotHere { reason: Reason::NotHere("no memory controller") }, State::Missing),
            (
                ProbeError::GroupNotPermitted {
                    parent: parent(),
                    source: io::Error::from(io::ErrorKind::PermissionDenied),
                },
                State::Limited,
            ),
            (
                ProbeError::GroupNotDelegated { parent: parent(), found: "cpu pids".to_owned() },
                State::Limited,
            ),
            (ProbeError::GroupHoldsProcesses { parent: parent(), process_count: 7 }, State::Limited),
        ];
        for (error, state) in refusals {
            let check = judge_cgroup("version 2", &Err(error));
            assert_eq!(check.state, state);
            assert!(check.fix.is_some() && check.consequence.is_some(), "{check:?}");
        }
        assert_eq!(judge_cgroup("version 2", &Ok(())).state, State::Ok);
        let delegated = ProbeError::GroupNotDelegated { parent: parent(), found: "cpu pids".to_owned() };
        assert!(judge_cgroup("v", &Err(delegated)).found.contains("`cpu pids`"));
    }

    #[test]
    fn swap_is_added_up() {
        let header = "Filename Type Size Used Priority\n";
        assert_eq!(judge_swap(header).state, State::Ok);
        let text = format!("{header}/swapfile file 1048576 0 -2\n/dev/zram0 partition 1048576 5 100\n");
        let check = judge_swap(&text);
        assert_eq!((check.state, check.found.as_str()), (State::Limited, "2 GiB"));
        assert_eq!(judge_swap("").state, State::Ok);
    }
}
