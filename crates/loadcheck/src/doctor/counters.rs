//! Memory counters of the kernel: of a process, and the pressure of the machine.

use std::fs;

use onelayer_probe::{PeakReset, ProbeError, Procfs};

use crate::report::Check;

/// All checks of counters.
pub(super) fn counters() -> Vec<Check> {
    let procfs = Procfs::default();
    let myself = procfs.myself();
    vec![
        judge_reset(&myself.reset_peak(), procfs.is_of_this_namespace()),
        judge_rollup(myself.exact_memory().anon_bytes.ok().map_err(|reason| reason.to_string())),
        judge_pressure(&fs::read_to_string("/proc/pressure/memory").unwrap_or_default()),
    ]
}

fn judge_reset(reset: &Result<PeakReset, ProbeError>, is_of_this_namespace: bool) -> Check {
    const CHECK: &str = "peak_reset";
    if !is_of_this_namespace {
        return Check::limited(
            CHECK,
            "/proc counts the processes of another namespace",
            "process trees cannot be watched: `exec` and `compare --cmd` report no memory",
        )
        .fix("mount -t proc proc /proc (in the namespace); unshare with --mount-proc");
    }
    match reset {
        Ok(_) => Check::ok(CHECK, "the peak of resident memory can be reset (clear_refs)"),
        Err(error) => Check::limited(
            CHECK,
            error.to_string(),
            "the peak of a run is sampled, and may miss what lasts less than a few milliseconds",
        )
        .fix("a kernel built with CONFIG_PROC_PAGE_MONITOR, and a /proc that may be written to"),
    }
}

fn judge_rollup(anon_bytes: Result<u64, String>) -> Check {
    match anon_bytes {
        Ok(_) => Check::ok("exact_memory", "smaps_rollup: exact, shared pages counted once"),
        Err(reason) => Check::limited(
            "exact_memory",
            reason,
            "memory of a process tree is a sum of counters that may lag, shared pages counted several times",
        )
        .fix("a kernel from 4.14 on, built with CONFIG_PROC_PAGE_MONITOR"),
    }
}

fn judge_pressure(text: &str) -> Check {
    if text.lines().any(|line| line.starts_with("some ")) {
        return Check::ok("pressure", "/proc/pressure/memory: time that was lost to a lack of memory");
    }
    Check::missing("pressure", "no /proc/pressure/memory", "time lost to a lack of memory is not reported")
        .fix("boot with psi=1; the kernel needs CONFIG_PSI")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::State;

    #[test]
    fn counters_that_are_missing_are_told() {
        let reset = || Ok(PeakReset { before_bytes: 2, after_bytes: 1 });
        assert_eq!(judge_reset(&reset(), true).state, State::Ok);
        assert_eq!(judge_reset(&reset(), false).state, State::Limited);
        let refused = ProbeError::PeakResetIneffective { path: "/x".into(), peak_bytes: 2, rss_bytes: 1 };
        assert!(judge_reset(&Err(refused), true).found.contains("no effect"));
        assert_eq!(judge_rollup(Ok(1)).state, State::Ok);
        assert_eq!(judge_rollup(Err("hidden".to_owned())).found, "hidden");
        assert_eq!(judge_pressure("some avg10=0.00 total=1\n").state, State::Ok);
        assert_eq!(judge_pressure("").state, State::Missing);
    }
}
