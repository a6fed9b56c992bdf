//! One run under a limit, in a control group, and its result.

use std::time::Duration;

use onelayer_probe::{ChildGroup, GroupMemory, ProbeError};
use rustix::param::page_size;

use super::guard::{Guarded, guarded};
use crate::problem::{Code, Problem};
use crate::report::{Try, TryOutcome};
use crate::signals::Interrupts;
use crate::worker::Stop;

/// How a loader ended, as it told itself or as its parent saw it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// By itself, everything loaded.
    Completed,
    /// Killed by SIGKILL.
    Killed(Problem),
    /// It said that there is too little memory.
    Refused(Problem),
    /// In another way.
    Failed(Problem),
    /// This signal came.
    Interrupted(i32),
}

/// A run that is over.
#[derive(Clone, Debug)]
pub(super) struct Ran {
    pub(super) end: End,
    pub(super) seconds: Option<f64>,
    pub(super) peak_host_bytes: Option<u64>,
    pub(super) cached_share: Option<f64>,
}

/// Runs `load` in a group with that limit. What comes back is a try, and why the search has to end,
/// if it has to.
///
/// # Errors
/// Where there can be no such group.
pub(super) fn try_once(
    limit_bytes: Option<u64>,
    give_up: Option<Duration>,
    interrupts: &Interrupts,
    load: impl FnOnce(&ChildGroup) -> Ran,
) -> Result<(Try, Option<Stop>), Problem> {
    let group = ChildGroup::create(limit_bytes).map_err(|error| no_group(&error))?;
    interrupts.remember_leftover(group.directory());
    let (ran, guard) = guarded(&group, give_up, || load(&group));
    // Processes that outlive the command would be charged to the next run.
    let _ = group.kill();
    let memory = group.memory();
    drop(group);
    interrupts.forget_leftovers();
    Ok(judge(limit_bytes, ran, guard, &memory))
}

/// The result of a run.
fn judge(limit_bytes: Option<u64>, ran: Ran, guard: Guarded, memory: &GroupMemory) -> (Try, Option<Stop>) {
    let kills = memory.oom_kill_count.value();
    // Before kernel 4.13, version 1 does not count kills.
    let was_at_limit = kills.map_or(memory.limit_hit_count.value() > Some(0), |kills| kills > 0);
    let is_limited = limit_bytes.is_some();
    let (outcome, stop) = match ran.end {
        End::Interrupted(signal) => (TryOutcome::Interrupted, Some(Stop::Signal(signal))),
        // Whatever it says: a part of it is gone, and it was the limit.
        _ if is_limited && kills > Some(0) => (TryOutcome::Killed, None),
        End::Killed(_) | End::Failed(_) if guard == Guarded::TooSlow => (TryOutcome::TooSlow, None),
        End::Killed(_) if is_limited && was_at_limit => (TryOutcome::Killed, None),
        End::Completed => (TryOutcome::Ok, None),
        End::Refused(_) if is_limited => (TryOutcome::Refused, None),
        End::Killed(problem) if was_at_limit => {
            let help = "it does not even work without a limit of ours: a limit further out, or the machine's memory, is too small";
            (TryOutcome::Failed, Some(problem.help(help).into()))
        }
        End::Refused(problem) | End::Failed(problem) | End::Killed(problem) => {
            (TryOutcome::Failed, Some(problem.into()))
        }
    };
    let page_bytes = u64::try_from(page_size()).unwrap_or(4096);
    let tried = Try {
        limit_bytes,
        outcome,
        seconds: ran.seconds,
        slowdown: None,
        peak_host_bytes: ran.peak_host_bytes,
        peak_cgroup_bytes: memory.peak_bytes.value(),
        limit_hits: memory.limit_hit_count.value(),
        refault_bytes: memory.file_refault_count.value().map(|count| count.saturating_mul(page_bytes)),
        cached_share: ran.cached_share,
    };
    (tried, stop)
}

/// There is no group to try limits in: what to do about it.
pub(crate) fn no_group(error: &ProbeError) -> Problem {
    let problem = Problem::new(Code::CannotMeasure, error.to_string());
    match error {
        ProbeError::GroupNotPermitted { .. } | ProbeError::GroupNotHere { .. } | ProbeError::GroupNotDelegated { .. } => {
            problem.help(
                "limits are tried in control groups of our own. On a machine: as root, or `systemd-run --user --scope -p \
                 Delegate=yes -- loadcheck fit ...`. In a container: `docker run --security-opt writable-cgroups=true ...` \
                 (Docker 28), `podman run --security-opt unmask=/sys/fs/cgroup ...`, or `--privileged`. `loadcheck doctor` \
                 shows what is missing",
            )
        }
        ProbeError::GroupHoldsProcesses { .. } => problem.help(
            "start it alone in a group of its own: `systemd-run --user --scope -p Delegate=yes -- loadcheck fit ...`; in a \
             container, as its first process: `docker run ... loadcheck fit ...`",
        ),
        _ => problem,
    }
}

#[cfg(test)]
mod tests {
    use onelayer_probe::{Measured, Procfs};

    use super::*;

    fn memory(kills: u64, hits: u64) -> GroupMemory {
        let mut memory = Procfs::default().myself().memory_group().unwrap().read();
        memory.oom_kill_count = Measured::Value(kills);
        memory.limit_hit_count = Measured::Value(hits);
        memory
    }

    fn outcome(limit: Option<u64>, end: &End, guard: Guarded, kills: u64) -> (TryOutcome, bool) {
        let ran = Ran { end: end.clone(), seconds: None, peak_host_bytes: None, cached_share: None };
        let (tried, stop) = judge(limit, ran, guard, &memory(kills, 5));
        (tried.outcome, stop.is_some())
    }

    #[test]
    fn a_kill_by_the_limit_is_a_result_and_any_other_failure_is_none() {
        let problem = || Problem::new(Code::ChildFailed, "x");
        let (killed, failed) = (End::Killed(problem()), End::Failed(problem()));
        let refused = End::Refused(problem());
        let left_alone = Guarded::LeftAlone;
        assert_eq!(outcome(Some(1), &End::Completed, left_alone, 0), (TryOutcome::Ok, false));
        assert_eq!(outcome(Some(1), &killed, left_alone, 1), (TryOutcome::Killed, false));
        assert_eq!(outcome(Some(1), &failed, left_alone, 1), (TryOutcome::Killed, false), "a shell says 137");
        assert_eq!(
            outcome(Some(1), &End::Completed, left_alone, 1),
            (TryOutcome::Killed, false),
            "a part of it"
        );
        assert_eq!(outcome(Some(1), &killed, left_alone, 0), (TryOutcome::Failed, true), "by somebody else");
        assert_eq!(outcome(Some(1), &failed, left_alone, 0), (TryOutcome::Failed, true));
        assert_eq!(outcome(Some(1), &refused, left_alone, 0), (TryOutcome::Refused, false));
        assert_eq!(outcome(Some(1), &killed, Guarded::TooSlow, 0), (TryOutcome::TooSlow, false));
        assert_eq!(
            outcome(Some(1), &failed, Guarded::TooSlow, 0),
            (TryOutcome::TooSlow, false),
            "a parent may say that its child was killed before it is itself"
        );
        assert_eq!(outcome(None, &killed, left_alone, 1), (TryOutcome::Failed, true), "the machine was full");
        assert_eq!(outcome(None, &refused, left_alone, 0), (TryOutcome::Failed, true));
        let interrupted = End::Interrupted(2);
        assert_eq!(outcome(Some(1), &interrupted, left_alone, 1), (TryOutcome::Interrupted, true));
    }
}
