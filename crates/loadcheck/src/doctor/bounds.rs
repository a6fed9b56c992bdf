//! Limits of a process beside cgroups: resource limits, overcommit, CPUs, shared memory, and the
//! kernel's version.

use std::fs;

use onelayer::units::{HumanBytes, MIB};
use onelayer_probe::{Host, Procfs};
use rustix::process::{Resource, getrlimit};

use crate::report::Check;

/// The staging ring of a load with the default budget.
const RING_BYTES: u64 = 64 * MIB;
/// Docker's default.
const SHM_BYTES_SMALL: u64 = 64 * MIB;
/// `CAP_IPC_LOCK`, as a bit of `CapEff`.
const CAP_IPC_LOCK: u64 = 1 << 14;

/// Kernel versions, and the features they added for loads and measurements.
const SINCE: [((u32, u32), &str); 4] = [
    ((5, 6), "io_uring reads"),
    ((5, 19), "the kernel's peak of a control group (version 2)"),
    ((6, 1), "the alignment that direct I/O needs"),
    ((6, 5), "cachestat"),
];

/// The kernel.
pub(super) fn kernel() -> Check {
    judge_kernel(Host::read(&Procfs::default()).kernel.value().as_deref())
}

fn judge_kernel(release: Option<&str>) -> Check {
    let Some(release) = release else {
        return Check::limited(
            "kernel",
            "unknown",
            "/proc cannot be read: most of what is measured comes from there",
        )
        .fix("mount it: mount -t proc proc /proc (as root)");
    };
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse::<u32>().ok());
    let version = numbers.next().flatten().zip(numbers.next().flatten());
    let lacking: Vec<&str> = SINCE
        .iter()
        .filter(|(since, _)| version.is_some_and(|version| version < *since))
        .map(|(_, what)| *what)
        .collect();
    if lacking.is_empty() {
        return Check::ok("kernel", release);
    }
    Check::limited("kernel", release, format!("it lacks {}; other ways are taken", lacking.join(", ")))
        .fix("a kernel from 6.5 on")
}

/// The limit of locked memory.
pub(super) fn memlock() -> Check {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    judge_memlock(getrlimit(Resource::Memlock).current, has_ipc_lock(&status))
}

/// `CapEff: 000001ffffffffff`
fn has_ipc_lock(status: &str) -> bool {
    let set = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let set = set.and_then(|set| u64::from_str_radix(set.trim(), 16).ok());
    set.is_some_and(|set| set & CAP_IPC_LOCK != 0)
}

fn judge_memlock(limit_bytes: Option<u64>, has_ipc_lock: bool) -> Check {
    match limit_bytes {
        None => Check::ok("memlock", "unlimited"),
        Some(limit) if has_ipc_lock => {
            Check::ok("memlock", format!("{}, and a capability that lifts it", HumanBytes(limit)))
        }
        Some(limit) if limit >= RING_BYTES => Check::ok("memlock", HumanBytes(limit).to_string()),
        Some(limit) => Check::limited(
            "memlock",
            HumanBytes(limit).to_string(),
            "a staging ring of 64 MiB cannot be registered with io_uring, or locked",
        )
        .fix("ulimit -l unlimited; docker run --ulimit memlock=-1; in a unit: LimitMEMLOCK=infinity"),
    }
}

/// The limit of mapped memory.
pub(super) fn address_space() -> Check {
    judge_address_space(getrlimit(Resource::As).current)
}

fn judge_address_space(limit_bytes: Option<u64>) -> Check {
    match limit_bytes {
        None => Check::ok("address_space", "unlimited"),
        Some(limit) => Check::limited(
            "address_space",
            HumanBytes(limit).to_string(),
            "mapped files count, and a CUDA driver reserves many times the machine's memory",
        )
        .fix("ulimit -v unlimited"),
    }
}

/// The kernel's overcommit mode.
pub(super) fn overcommit() -> Check {
    judge_overcommit(&fs::read_to_string("/proc/sys/vm/overcommit_memory").unwrap_or_default())
}

fn judge_overcommit(text: &str) -> Check {
    match text.trim() {
        "0" => Check::ok("overcommit", "0: obvious excess is refused"),
        "1" => Check::ok("overcommit", "1: always"),
        "2" => Check::limited(
            "overcommit",
            "2: never",
            "an allocation may be refused with memory left: private mappings count whole, touched or not",
        )
        .fix("sysctl -w vm.overcommit_memory=0 (as root)"),
        _ => Check::limited("overcommit", "unknown", "/proc/sys/vm/overcommit_memory cannot be read"),
    }
}

/// The number of threads that run in parallel.
pub(super) fn cpu() -> Check {
    let procfs = Procfs::default();
    let host = Host::read(&procfs);
    let quota = procfs.myself().cpu_group().ok().and_then(|group| group.quota_millicpus().value().flatten());
    let count = host.cpu_count.value();
    judge_cpu(count, quota, host.cpu_model.value().as_deref())
}

fn judge_cpu(count: Option<usize>, quota_millicpus: Option<u64>, model: Option<&str>) -> Check {
    let Some(count) = count else {
        return Check::limited("cpu", "unknown", "the number of reading threads is a guess")
            .fix("--readers N");
    };
    let threads = if count == 1 { "1 thread".to_owned() } else { format!("{count} threads") };
    let model = model.map(|model| format!(", {model}")).unwrap_or_default();
    match quota_millicpus {
        // With less than one CPU, a load is throttled again and again.
        Some(quota) if quota < 1000 => Check::limited(
            "cpu",
            format!("a quota of {}.{:03} CPUs{model}", quota / 1000, quota % 1000),
            "a load is held up in the middle of its work; times mean little",
        )
        .fix("docker run --cpus 2; in Kubernetes: resources.limits.cpu; in a unit: CPUQuota=200%"),
        Some(quota) => Check::ok(
            "cpu",
            format!("{threads}, by a quota of {}.{:03} CPUs{model}", quota / 1000, quota % 1000),
        ),
        None => Check::ok("cpu", format!("{threads}{model}")),
    }
}

/// The size of `/dev/shm`.
pub(super) fn shm() -> Check {
    let size = rustix::fs::statvfs("/dev/shm").ok().map(|stat| stat.f_blocks.saturating_mul(stat.f_frsize));
    judge_shm(size)
}

fn judge_shm(size_bytes: Option<u64>) -> Check {
    match size_bytes {
        None => Check::missing("shm", "no /dev/shm", "loaders of several processes cannot hand tensors on")
            .fix("docker run --shm-size 1g; or mount -t tmpfs tmpfs /dev/shm (as root)"),
        Some(size) if size <= SHM_BYTES_SMALL => Check::limited(
            "shm",
            HumanBytes(size).to_string(),
            "loaders of several processes that hand tensors on may die of SIGBUS",
        )
        .fix("docker run --shm-size 1g; or mount -o remount,size=1g /dev/shm (as root)"),
        Some(size) => Check::ok("shm", format!("{} in /dev/shm", HumanBytes(size))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::State;

    #[test]
    fn kernels() {
        assert_eq!(judge_kernel(Some("6.18.44-foo")).state, State::Ok);
        assert_eq!(judge_kernel(Some("6.5")).state, State::Ok);
        let old = judge_kernel(Some("5.15.0-91-generic"));
        assert_eq!(old.state, State::Limited);
        assert!(
            old.consequence
                .as_ref()
                .is_some_and(|text| text.contains("cachestat") && !text.contains("io_uring"))
        );
        assert!(judge_kernel(Some("4.18.0")).consequence.unwrap().contains("io_uring"));
        assert_eq!(judge_kernel(None).state, State::Limited);
    }

    #[test]
    fn locked_memory() {
        assert!(has_ipc_lock("Name:\tx\nCapEff:\t000001ffffffffff\n"));
        assert!(has_ipc_lock("CapEff:\t0000000000004000\n"));
        assert!(!has_ipc_lock("CapEff:\t00000000a80425fb\n") && !has_ipc_lock(""));
        assert_eq!(judge_memlock(None, false).state, State::Ok);
        assert_eq!(judge_memlock(Some(8 * MIB), true).state, State::Ok);
        assert_eq!(judge_memlock(Some(64 * MIB), false).state, State::Ok);
        let check = judge_memlock(Some(8 * MIB), false);
        assert!(check.state == State::Limited && check.fix.unwrap().contains("ulimit -l"));
    }

    #[test]
    fn other_bounds() {
        assert_eq!(judge_address_space(None).state, State::Ok);
        assert_eq!(judge_address_space(Some(4096 * MIB)).state, State::Limited);
        let states = ["0\n", "1\n", "2\n", ""].map(|text| judge_overcommit(text).state);
        assert_eq!(states, [State::Ok, State::Ok, State::Limited, State::Limited]);
        let states = [None, Some(64 * MIB), Some(128 * MIB)].map(|size| judge_shm(size).state);
        assert_eq!(states, [State::Missing, State::Limited, State::Ok]);
        assert_eq!(judge_cpu(Some(2), None, Some("Fast")).found, "2 threads, Fast");
        assert_eq!(judge_cpu(Some(1), Some(1500), None).found, "1 thread, by a quota of 1.500 CPUs");
        assert_eq!(judge_cpu(Some(1), Some(250), None).state, State::Limited);
        assert_eq!(judge_cpu(None, None, None).state, State::Limited);
    }
}
