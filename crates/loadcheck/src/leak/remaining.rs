//! Memory that stays on the machine after the processes of a cycle have ended, and memory that the
//! processes of a running command hold.
//!
//! Memory that ends with a process cannot leak beyond it. The rest is looked for here:
//!
//! | | is | read from |
//! |---|---|---|
//! | host | memory of processes that were left behind, and shared memory (tmpfs, System V, memfd) | `status`; the control group of all cycles, or else the whole machine's `Shmem` |
//! | file, pinned | the same of processes that were left behind | `status` |
//! | vram | the whole device; of a running command, its processes, where NVML lists them | NVML |
//!
//! Page cache is no leak: the kernel takes it back. Where the whole machine or device is counted,
//! other programs count too. The slope allows for that as long as they do not grow steadily.

use onelayer_probe::{ChildGroup, GpuMemory, NvmlError, Procfs, Reason};

use super::held::{CyclePoint, Held};
use crate::args::POINTS_MIN;
use crate::descendants::{descendant_ids, tree_of};
use crate::report::{Gpu, Report};

/// Measures it.
pub(crate) struct RemainingMemory {
    group: Option<ChildGroup>,
    gpu: Option<Result<GpuMemory, NvmlError>>,
    /// A process that was not started here: its tree is measured instead of our descendants.
    root: Option<u32>,
}

impl RemainingMemory {
    /// With the group that all cycles run in, if there is one, and the GPU that they use, if they
    /// do.
    pub(crate) fn new(group: Option<ChildGroup>, gpu: Option<&Gpu>) -> Self {
        let open = |gpu: &Gpu| {
            let total_bytes = gpu.memory_total_bytes.unwrap_or(0);
            GpuMemory::open(gpu.uuid.as_deref(), gpu.pci_bus_id.as_deref(), total_bytes)
        };
        Self { group, gpu: gpu.map(open), root: None }
    }

    /// The same for the tree of a process that runs already.
    pub(crate) fn of_tree(root: u32, gpu: Option<&Gpu>) -> Self {
        Self { root: Some(root), ..Self::new(None, gpu) }
    }

    /// The group that all cycles run in.
    pub(crate) fn group(&self) -> Option<&ChildGroup> {
        self.group.as_ref()
    }

    /// Notes what is not measured.
    pub(crate) fn note(&self, report: &mut Report) {
        match &self.gpu {
            None => report.missing("slope.vram", "no device memory is used: --device names none"),
            Some(Err(error)) => report.missing("slope.vram", &error.to_string()),
            Some(Ok(_)) => {}
        }
    }

    /// Notes whose device memory it is.
    pub(crate) fn note_whose_vram(&self, is_of_processes: bool, report: &mut Report) {
        if !is_of_processes && matches!(self.gpu, Some(Ok(_))) {
            report.note("vram is the whole device's: what others do there is in it".to_owned());
        }
    }

    /// Memory that is left after a cycle's process has ended, and how many processes it left
    /// behind.
    pub(crate) fn after_end(&self) -> (Held, usize) {
        let processes = OfProcesses::of(&descendant_ids());
        let own_bytes = processes
            .held
            .host_bytes
            .zip(processes.shared_bytes)
            .map(|(host, shared)| host - shared.min(host));
        let host_bytes = own_bytes.zip(self.shared_bytes()).map(|(own, shared)| own + shared);
        let held = Held { host_bytes, rss_bytes: None, vram_bytes: self.device_bytes(), ..processes.held };
        (held, processes.pids.len())
    }

    /// Memory of a command's processes, with the whole device's memory; and their own part of
    /// that, if the driver lists any of them. `None` if none lives any more.
    pub(crate) fn of_processes(&mut self) -> Option<(Held, Option<u64>)> {
        let processes = OfProcesses::of(&self.root.map_or_else(descendant_ids, tree_of));
        if processes.pids.is_empty() {
            return None;
        }
        let listed_bytes = self.gpu.as_mut().and_then(|gpu| {
            let gpu = gpu.as_mut().ok()?;
            // A process that does not use the device is not listed.
            let listed: Vec<u64> =
                processes.pids.iter().filter_map(|pid| gpu.of_process(*pid).ok()).collect();
            (!listed.is_empty()).then(|| listed.iter().sum())
        });
        Some((Held { vram_bytes: self.device_bytes(), ..processes.held }, listed_bytes))
    }

    fn device_bytes(&self) -> Option<u64> {
        self.gpu.as_ref()?.as_ref().ok()?.used_bytes().ok()
    }

    /// Shared memory of the group, or else of the machine.
    fn shared_bytes(&self) -> Option<u64> {
        match &self.group {
            Some(group) => group.memory().shmem_bytes.value(),
            None => shared_of(&std::fs::read_to_string("/proc/meminfo").ok()?),
        }
    }

    /// Whose shared memory is counted, for people.
    pub(crate) fn shared_note(&self) -> &'static str {
        match &self.group {
            Some(_) => "shared memory is that of the cycles' control group",
            None => "shared memory is the whole machine's: what others do is in it",
        }
    }
}

/// The memory of living processes.
struct OfProcesses {
    /// The sum. A page counts once for each process that maps it.
    held: Held,
    /// Shared memory among it.
    shared_bytes: Option<u64>,
    pids: Vec<u32>,
}

impl OfProcesses {
    /// Reads it now. A process that has ended meanwhile does not count.
    fn of(pids: &[u32]) -> Self {
        let procfs = Procfs::default();
        let none = Some(0);
        let nothing = Held {
            host_bytes: none,
            rss_bytes: none,
            file_bytes: none,
            pinned_bytes: none,
            ..Held::default()
        };
        let mut found = Self { held: nothing, shared_bytes: none, pids: Vec::new() };
        for &pid in pids {
            let memory = procfs.process(pid).memory();
            if memory.rss_bytes.reason() == Some(Reason::ProcessEnded) {
                continue;
            }
            found.held = found.held.and(Held::of(&memory));
            found.shared_bytes =
                found.shared_bytes.zip(memory.shmem_bytes.value()).map(|(sum, more)| sum + more);
            found.pids.push(pid);
        }
        found
    }
}

/// Decides, once for all points, whose device memory counts: the whole device's, which the points
/// have, or that of the command's processes. A mixture would be a step, or hide one. `listed` has
/// the bytes that the driver lists for the processes at each point. They count, and the answer is
/// true, if there are enough of them for a slope. Before the driver lists a process, it used none.
pub(crate) fn settle_vram(points: &mut [CyclePoint], listed: &[Option<u64>], warmup: u64) -> bool {
    let counted = points.iter().zip(listed).filter(|(point, _)| point.number > warmup);
    let count = counted.filter(|(_, bytes)| bytes.is_some()).count();
    let is_of_processes = u32::try_from(count).is_ok_and(|count| count >= POINTS_MIN);
    if is_of_processes {
        let mut before = Some(0);
        for (point, bytes) in points.iter_mut().zip(listed) {
            before = before.filter(|_| bytes.is_none());
            point.held.vram_bytes = bytes.or(before);
        }
    }
    is_of_processes
}

/// `Shmem` of the text of `/proc/meminfo`, in bytes.
fn shared_of(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("Shmem:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_of_the_machine_is_read() {
        assert_eq!(
            shared_of("Cached: 7 kB\nShmem:             2716 kB\nShmemHugePages: 1 kB\n"),
            Some(2716 << 10)
        );
        assert_eq!(shared_of("Cached: 7 kB\n"), None);
        assert!(RemainingMemory::new(None, None).shared_bytes().is_some());
    }

    /// The driver does not list a process before it uses the device, and once it fails to: neither
    /// makes it the whole device's.
    #[test]
    fn whose_device_memory_it_is_is_decided_once() {
        let point = |number| CyclePoint { number, held: Held { vram_bytes: Some(1000), ..Held::default() } };
        let vram =
            |points: &[CyclePoint]| points.iter().map(|point| point.held.vram_bytes).collect::<Vec<_>>();
        let mut points: Vec<CyclePoint> = (0..14).map(point).collect();
        let mut listed: Vec<Option<u64>> = (0..14).map(|number| (number > 3).then_some(number)).collect();
        listed[8] = None;
        let mut expected = listed.clone();
        expected[..4].fill(Some(0));
        assert!(settle_vram(&mut points, &listed, 3));
        assert_eq!(vram(&points), expected);

        // Seven are too few: the whole device's, everywhere.
        listed[9..11].fill(None);
        let mut points: Vec<CyclePoint> = (0..14).map(point).collect();
        assert!(!settle_vram(&mut points, &listed, 3));
        assert_eq!(vram(&points), [Some(1000); 14]);
    }

    /// Memory that outlives its process is found: a child that goes on, and a file in shared
    /// memory.
    #[test]
    fn what_is_left_behind_is_counted() {
        let remaining = RemainingMemory::new(None, None);
        let (before, _) = remaining.after_end();
        let mut child = std::process::Command::new("sleep").arg("30").spawn().unwrap();
        let found = (0..500).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(2));
            let (now, count) = remaining.after_end();
            count > 0 && now.file_bytes > before.file_bytes && now.host_bytes.is_some()
        });
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(found);
    }
}
