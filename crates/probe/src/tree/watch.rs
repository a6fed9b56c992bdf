//! Takes the samples of a tree: finds its live processes, sums their memory, keeps the peaks.
//!
//! A process is identified by its id and start time, so a reused id counts as another process. One
//! sample reads all files of a process through one directory descriptor, so it cannot mix two
//! processes.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use super::subreaper::Subreaper;
use super::{ProcessRecord, TreeMethod, TreeOptions, TreePeak, TreeSummary, children};
use crate::measured::UnavailableList;
use crate::timeline::Timeline;
use crate::{Measured, ProbeError, Process, ProcessMemory, Reason};

/// Maximum number of process records.
const RECORD_COUNT_MAX: usize = 4096;

/// Slow readings take at most one part in `1 + REST_FACTOR` of the time.
const REST_FACTOR: u32 = 4;

/// Limits a slow reading: after each one, it rests for a multiple of the time taken.
#[derive(Debug, Default)]
struct Pacer {
    rest_until: Option<Instant>,
}

impl Pacer {
    fn is_due(&self) -> bool {
        self.rest_until.is_none_or(|until| Instant::now() >= until)
    }

    fn ran_since(&mut self, start: Instant) {
        let end = Instant::now();
        self.rest_until = Some(end + (end - start) * REST_FACTOR);
    }
}

/// A live process of the tree.
#[derive(Clone, Copy, Debug)]
struct Member {
    start_ticks: u64,
    /// Index of its record, if it has one.
    record: Option<usize>,
}

/// The running peak of one metric.
#[derive(Debug)]
struct RunningPeak(Measured<TreePeak>);

impl RunningPeak {
    fn new() -> Self {
        Self(Measured::Unavailable(Reason::NotHere("no process of the tree was seen alive")))
    }

    fn offer(&mut self, bytes: Measured<u64>, elapsed: Duration, process_count: u32) {
        match (bytes, &self.0) {
            (Measured::Value(bytes), Measured::Value(peak)) if bytes <= peak.bytes => {}
            (Measured::Value(bytes), _) => {
                self.0 = Measured::Value(TreePeak { bytes, seconds: elapsed.as_secs_f64(), process_count });
            }
            (Measured::Unavailable(reason), Measured::Unavailable(_)) => {
                self.0 = Measured::Unavailable(reason)
            }
            (Measured::Unavailable(_), Measured::Value(_)) => {}
        }
    }

    fn is_below(&self, bytes: Measured<u64>) -> bool {
        match (bytes, &self.0) {
            (Measured::Value(bytes), Measured::Value(peak)) => bytes > peak.bytes,
            (Measured::Value(_), Measured::Unavailable(_)) => true,
            (Measured::Unavailable(_), _) => false,
        }
    }
}

/// The state of watching one tree.
#[derive(Debug)]
pub(super) struct Watch {
    options: TreeOptions,
    subreaper: Option<Subreaper>,
    start: Instant,
    members: HashMap<u32, Member>,
    records: Vec<ProcessRecord>,
    process_count: u64,
    process_count_peak: u32,
    ended_count: u64,
    sample_count: u64,
    last_sample: Duration,
    gap_max: Duration,
    discovery_pacer: Pacer,
    exact_pacer: Pacer,
    exact_due_since: Option<Duration>,
    exact_gap_max: Duration,
    exact_refused: Option<Reason>,
    host: RunningPeak,
    rss: RunningPeak,
    host_sum: RunningPeak,
    rss_sum: RunningPeak,
    anon_sum: RunningPeak,
    file_sum: RunningPeak,
    shmem_sum: RunningPeak,
    timeline: Timeline,
}

impl Watch {
    pub(super) fn new(
        root_pid: u32,
        options: &TreeOptions,
        subreaper: Option<Subreaper>,
    ) -> Result<Self, ProbeError> {
        if !options.procfs.is_of_this_namespace() {
            let reason = Reason::NotHere("/proc is that of another namespace of process ids");
            return Err(ProbeError::Process { pid: root_pid, reason });
        }
        let mut watch = Self {
            options: options.clone(),
            subreaper,
            start: Instant::now(),
            members: HashMap::new(),
            records: Vec::new(),
            process_count: 0,
            process_count_peak: 0,
            ended_count: 0,
            sample_count: 0,
            last_sample: Duration::ZERO,
            gap_max: Duration::ZERO,
            discovery_pacer: Pacer::default(),
            exact_pacer: Pacer::default(),
            exact_due_since: None,
            exact_gap_max: Duration::ZERO,
            exact_refused: None,
            host: RunningPeak::new(),
            rss: RunningPeak::new(),
            host_sum: RunningPeak::new(),
            rss_sum: RunningPeak::new(),
            anon_sum: RunningPeak::new(),
            file_sum: RunningPeak::new(),
            shmem_sum: RunningPeak::new(),
            timeline: Timeline::new(options.timeline_rows),
        };
        let stat = options.procfs.process(root_pid).stat();
        let stat = stat.map_err(|reason| ProbeError::Process { pid: root_pid, reason })?;
        // An ended root that was not yet waited for is admitted: it may have live children.
        watch.admit(root_pid, &stat, Duration::ZERO);
        Ok(watch)
    }

    /// Takes one sample and returns the number of live processes.
    pub(super) fn sample(&mut self) -> u32 {
        let elapsed = self.start.elapsed();
        if self.sample_count > 0 {
            self.gap_max = self.gap_max.max(elapsed - self.last_sample);
        }
        self.sample_count += 1;
        self.last_sample = elapsed;
        if self.discovery_pacer.is_due() {
            let start = Instant::now();
            self.discover(elapsed);
            self.discovery_pacer.ran_since(start);
        }
        let (alive, sum) = self.read_members(elapsed);
        let count = u32::try_from(alive.len()).unwrap_or(u32::MAX);
        self.process_count_peak = self.process_count_peak.max(count);
        let Some(sum) = sum else { return 0 };
        self.timeline.push(elapsed, &sum);
        self.host_sum.offer(sum.host_bytes, elapsed, count);
        self.rss_sum.offer(sum.rss_bytes, elapsed, count);
        self.anon_sum.offer(sum.anon_bytes, elapsed, count);
        self.file_sum.offer(sum.file_bytes, elapsed, count);
        self.shmem_sum.offer(sum.shmem_bytes, elapsed, count);
        if count == 1 {
            self.host.offer(sum.host_bytes, elapsed, count);
            self.rss.offer(sum.rss_bytes, elapsed, count);
        } else {
            self.sum_exactly_if_useful(&alive, &sum, elapsed, count);
        }
        count
    }

    /// Reads every member and removes ended ones. Returns the live processes and the plain sum of
    /// their memory.
    fn read_members(&mut self, elapsed: Duration) -> (Vec<Process>, Option<ProcessMemory>) {
        let mut alive = Vec::with_capacity(self.members.len());
        let mut sum: Option<ProcessMemory> = None;
        let pids: Vec<u32> = self.members.keys().copied().collect();
        for pid in pids {
            let process = self.options.procfs.process(pid);
            let member = self.members[&pid];
            let stat = process.stat().ok().filter(|stat| stat.start_ticks == member.start_ticks);
            let memory = match &stat {
                Some(stat) if !stat.has_ended() => process.memory(),
                _ => ProcessMemory::unavailable(Reason::ProcessEnded),
            };
            if memory.rss_bytes.reason() == Some(Reason::ProcessEnded) {
                self.leave(pid);
                continue;
            }
            if let Some(record) = member.record.and_then(|index| self.records.get_mut(index)) {
                record.last_seen_seconds = elapsed.as_secs_f64();
                record.rss_peak_bytes = memory.rss_peak_bytes.larger_known(record.rss_peak_bytes);
                record.host_peak_bytes = memory.host_bytes.larger_known(record.host_peak_bytes);
                if let Some(stat) = stat.filter(|stat| stat.name != record.name) {
                    record.name = stat.name;
                }
            }
            sum = Some(sum.map_or(memory, |sum| add(&sum, &memory)));
            alive.push(process);
        }
        (alive, sum)
    }

    /// Takes the exact sum if it could be a new peak and the last one was long enough ago.
    fn sum_exactly_if_useful(
        &mut self,
        alive: &[Process],
        sum: &ProcessMemory,
        elapsed: Duration,
        count: u32,
    ) {
        if !self.host.is_below(sum.host_bytes) && !self.rss.is_below(sum.rss_bytes) {
            self.exact_due_since = None;
            return;
        }
        if !self.exact_pacer.is_due() {
            self.exact_due_since.get_or_insert(elapsed);
            return;
        }
        if let Some(since) = self.exact_due_since.take() {
            self.exact_gap_max = self.exact_gap_max.max(elapsed - since);
        }
        let start = Instant::now();
        let (mut host, mut rss) = (Measured::Value(0), Measured::Value(0));
        for process in alive {
            let exact = process.exact_memory();
            if exact.pss_bytes.reason() == Some(Reason::ProcessEnded) {
                continue;
            }
            host = host.plus(exact.host_share_bytes());
            rss = rss.plus(exact.pss_bytes);
        }
        self.exact_pacer.ran_since(start);
        if let Some(reason) = host.reason().or(rss.reason()) {
            self.exact_refused = Some(reason);
        }
        self.host.offer(host, elapsed, count);
        self.rss.offer(rss, elapsed, count);
    }

    /// Finds new members: children of members, orphans, processes of the group.
    fn discover(&mut self, elapsed: Duration) {
        let procfs = self.options.procfs.clone();
        let mut queue: VecDeque<u32> = self.members.keys().copied().collect();
        let outsiders = self.options.group.as_deref().map(children::members).unwrap_or_default();
        for pid in outsiders {
            self.consider(pid, elapsed, &mut queue, |_| true);
        }
        if let Some(subreaper) = &self.subreaper {
            let own_pid = subreaper.own_pid();
            for pid in subreaper.orphans(&procfs) {
                self.consider(pid, elapsed, &mut queue, |parent_pid| parent_pid == own_pid);
            }
        }
        while let Some(parent) = queue.pop_front() {
            for pid in children::children(&procfs, parent) {
                self.consider(pid, elapsed, &mut queue, |parent_pid| parent_pid == parent);
            }
        }
    }

    /// Admits `pid` unless it is known, has ended, or was reused since it was listed.
    fn consider(
        &mut self,
        pid: u32,
        elapsed: Duration,
        queue: &mut VecDeque<u32>,
        is_parent: impl Fn(u32) -> bool,
    ) {
        if self.members.contains_key(&pid) {
            return;
        }
        let Ok(stat) = self.options.procfs.process(pid).stat() else { return };
        if stat.has_ended() {
            if let Some(subreaper) = &self.subreaper {
                subreaper.reap(pid);
            }
        } else if is_parent(stat.parent_pid) {
            self.admit(pid, &stat, elapsed);
            queue.push_back(pid);
        }
    }

    fn admit(&mut self, pid: u32, stat: &crate::activity::Stat, elapsed: Duration) {
        let nothing_yet = Measured::Unavailable(Reason::NotHere("it ended before its first sample"));
        self.process_count += 1;
        let record = (self.records.len() < RECORD_COUNT_MAX).then_some(self.records.len());
        if record.is_some() {
            self.records.push(ProcessRecord {
                pid,
                parent_pid: stat.parent_pid,
                name: stat.name.clone(),
                first_seen_seconds: elapsed.as_secs_f64(),
                last_seen_seconds: elapsed.as_secs_f64(),
                rss_peak_bytes: nothing_yet,
                host_peak_bytes: nothing_yet,
                has_ended: false,
            });
        }
        self.members.insert(pid, Member { start_ticks: stat.start_ticks, record });
    }

    fn leave(&mut self, pid: u32) {
        let Some(member) = self.members.remove(&pid) else { return };
        self.ended_count += 1;
        if let Some(record) = member.record.and_then(|index| self.records.get_mut(index)) {
            record.has_ended = true;
        }
        if let Some(subreaper) = &self.subreaper {
            subreaper.reap(pid);
        }
    }

    pub(super) fn summary(mut self, interval: Duration) -> TreeSummary {
        if let Some(since) = self.exact_due_since {
            self.exact_gap_max = self.exact_gap_max.max(self.last_sample - since);
        }
        let (host, host_method) = self.reported_peak(&self.host, &self.host_sum);
        let (mut rss, rss_method) = self.reported_peak(&self.rss, &self.rss_sum);
        if rss_method == TreeMethod::SingleProcess {
            // Never two processes at once, so the kernel's marks cover the time between samples.
            let mark = self.records.iter().filter_map(|record| record.rss_peak_bytes.value()).max();
            rss = rss.map(|peak| TreePeak { bytes: peak.bytes.max(mark.unwrap_or(0)), ..peak });
        }
        let mut list = UnavailableList::default();
        for (name, peak) in [
            ("host_bytes", &host),
            ("rss_bytes", &rss),
            ("anon_bytes", &self.anon_sum.0),
            ("file_bytes", &self.file_sum.0),
            ("shmem_bytes", &self.shmem_sum.0),
        ] {
            list.note("peak.", name, peak);
        }
        if let Some(reason) = self.exact_refused {
            list.note("peak.", "shared_once", &Measured::<u64>::Unavailable(reason));
        }
        TreeSummary {
            seconds: self.last_sample.as_secs_f64(),
            interval_ms: interval.as_secs_f64() * 1e3,
            gap_ms_max: self.gap_max.as_secs_f64() * 1e3,
            shared_once_gap_ms_max: self.exact_gap_max.as_secs_f64() * 1e3,
            sample_count: self.sample_count,
            host,
            host_method,
            rss,
            rss_method,
            host_sum: self.host_sum.0,
            rss_sum: self.rss_sum.0,
            anon_sum: self.anon_sum.0,
            file_sum: self.file_sum.0,
            shmem_sum: self.shmem_sum.0,
            process_count: self.process_count,
            process_count_peak: self.process_count_peak,
            ended_count: self.ended_count,
            processes: self.records,
            timeline: self.timeline,
            unavailable: list.into_vec(),
        }
    }

    /// The exact peak, or the plain sum if the exact one could not be read.
    fn reported_peak(&self, once: &RunningPeak, sum: &RunningPeak) -> (Measured<TreePeak>, TreeMethod) {
        if self.process_count_peak <= 1 {
            (once.0, TreeMethod::SingleProcess)
        } else if self.exact_refused.is_some() {
            (sum.0, TreeMethod::PlainSum)
        } else {
            (once.0, TreeMethod::SharedOnce)
        }
    }
}

/// The plain sum of two processes' memory. It has no high-water mark: the marks are of different
/// times.
fn add(left: &ProcessMemory, right: &ProcessMemory) -> ProcessMemory {
    let no_mark = Measured::Unavailable(Reason::NotHere("several processes have no common high-water mark"));
    ProcessMemory {
        host_bytes: left.host_bytes.plus(right.host_bytes),
        rss_bytes: left.rss_bytes.plus(right.rss_bytes),
        rss_peak_bytes: no_mark,
        anon_bytes: left.anon_bytes.plus(right.anon_bytes),
        file_bytes: left.file_bytes.plus(right.file_bytes),
        shmem_bytes: left.shmem_bytes.plus(right.shmem_bytes),
        swap_bytes: left.swap_bytes.plus(right.swap_bytes),
        locked_bytes: left.locked_bytes.plus(right.locked_bytes),
        pinned_bytes: left.pinned_bytes.plus(right.pinned_bytes),
        hugetlb_bytes: left.hugetlb_bytes.plus(right.hugetlb_bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Procfs;
    use std::fs;
    use std::path::Path;

    /// Writes the files of a fake process.
    fn imitate(root: &Path, pid: u32, parent: u32, start_ticks: u64, anon_kib: u64, children: &str) {
        let directory = root.join(pid.to_string());
        let thread = directory.join("task").join(pid.to_string());
        fs::create_dir_all(&thread).unwrap();
        fs::write(thread.join("children"), children).unwrap();
        let stat =
            format!("{pid} (p{pid}) S {parent} 0 0 0 0 0 0 0 0 0 0 0 0 0 20 0 1 0 {start_ticks} 0 0\n");
        fs::write(directory.join("stat"), stat).unwrap();
        let status = format!(
            "VmHWM:\t{anon_kib} kB\nVmRSS:\t{anon_kib} kB\nRssAnon:\t{anon_kib} kB\nRssFile:\t0 kB\n\
             RssShmem:\t0 kB\nVmSwap:\t0 kB\nVmLck:\t0 kB\nVmPin:\t0 kB\nHugetlbPages:\t0 kB\n"
        );
        fs::write(directory.join("status"), status).unwrap();
        let rollup = format!(
            "Rss: {anon_kib} kB\nPss: {0} kB\nPss_Anon: {0} kB\nPss_File: 0 kB\nPss_Shmem: 0 kB\nAnonymous: {anon_kib} kB\n\
             AnonHugePages: 0 kB\nSwap: 0 kB\nSwapPss: 0 kB\nLocked: 0 kB\nShared_Hugetlb: 0 kB\nPrivate_Hugetlb: 0 kB\n",
            anon_kib / 2
        );
        fs::write(directory.join("smaps_rollup"), rollup).unwrap();
    }

    fn watch(root: &Path) -> Watch {
        let options = TreeOptions { procfs: Procfs::at(root), ..TreeOptions::default() };
        Watch::new(7, &options, None).unwrap()
    }

    fn bytes(peak: Measured<TreePeak>) -> u64 {
        peak.value().unwrap().bytes
    }

    /// Makes both slow readings due again.
    fn rest(watch: &mut Watch) {
        watch.discovery_pacer = Pacer::default();
        watch.exact_pacer = Pacer::default();
    }

    #[test]
    fn shared_pages_count_once_and_the_plain_sum_stands_beside() {
        let root = tempfile::tempdir().unwrap();
        imitate(root.path(), 7, 1, 100, 1000, "8 ");
        imitate(root.path(), 8, 7, 101, 600, "9 ");
        imitate(root.path(), 9, 8, 102, 400, "");
        let mut watch = watch(root.path());
        assert_eq!(watch.sample(), 3);
        let summary = watch.summary(Duration::from_millis(5));
        assert_eq!((bytes(summary.host), summary.host_method), (1000 * 1024, TreeMethod::SharedOnce));
        assert_eq!((bytes(summary.host_sum), bytes(summary.rss_sum)), (2000 * 1024, 2000 * 1024));
        assert_eq!((summary.process_count, summary.process_count_peak), (3, 3));
        let parents: Vec<_> =
            summary.processes.iter().map(|record| (record.pid, record.parent_pid)).collect();
        assert_eq!(parents, [(7, 1), (8, 7), (9, 8)]);
    }

    #[test]
    fn a_reused_id_is_another_process() {
        let root = tempfile::tempdir().unwrap();
        imitate(root.path(), 7, 1, 100, 1000, "8 ");
        imitate(root.path(), 8, 7, 101, 600, "");
        let mut watch = watch(root.path());
        assert_eq!(watch.sample(), 2);
        // The child ended, and an unrelated large process got its id.
        imitate(root.path(), 7, 1, 100, 1000, "");
        imitate(root.path(), 8, 1, 900, 5_000_000, "");
        rest(&mut watch);
        assert_eq!(watch.sample(), 1);
        let summary = watch.summary(Duration::from_millis(5));
        assert_eq!(bytes(summary.host_sum), 1600 * 1024);
        assert_eq!((summary.process_count, summary.ended_count), (2, 1));
        assert!(summary.processes[1].has_ended && !summary.processes[0].has_ended);
    }

    #[test]
    fn an_id_that_was_reused_before_it_was_looked_at_is_not_admitted() {
        let root = tempfile::tempdir().unwrap();
        imitate(root.path(), 7, 1, 100, 1000, "8 ");
        imitate(root.path(), 8, 1, 900, 5_000_000, "");
        let mut watch = watch(root.path());
        assert_eq!(watch.sample(), 1);
    }

    #[test]
    fn a_child_stays_known_after_its_parent_has_ended() {
        let root = tempfile::tempdir().unwrap();
        imitate(root.path(), 7, 1, 100, 10, "8 ");
        imitate(root.path(), 8, 7, 101, 600, "");
        let mut watch = watch(root.path());
        watch.sample();
        fs::remove_dir_all(root.path().join("7")).unwrap();
        imitate(root.path(), 8, 1, 101, 900, "");
        rest(&mut watch);
        assert_eq!(watch.sample(), 1);
        let summary = watch.summary(Duration::from_millis(5));
        assert_eq!(bytes(summary.host), 900 * 1024);
        assert_eq!(summary.ended_count, 1);
    }

    #[test]
    fn an_unreadable_rollup_makes_it_the_plain_sum_and_says_why() {
        let root = tempfile::tempdir().unwrap();
        imitate(root.path(), 7, 1, 100, 1000, "8 ");
        imitate(root.path(), 8, 7, 101, 600, "");
        fs::remove_file(root.path().join("8/smaps_rollup")).unwrap();
        let mut watch = watch(root.path());
        watch.sample();
        let summary = watch.summary(Duration::from_millis(5));
        assert_eq!((bytes(summary.host), summary.host_method), (1600 * 1024, TreeMethod::PlainSum));
        let entry = summary.unavailable.iter().find(|entry| entry.metric == "peak.shared_once").unwrap();
        assert!(entry.reason.contains("smaps_rollup"), "{}", entry.reason);
    }

    #[test]
    fn costly_readings_rest_and_a_late_one_is_reported() {
        let root = tempfile::tempdir().unwrap();
        imitate(root.path(), 7, 1, 100, 1000, "8 ");
        imitate(root.path(), 8, 7, 101, 600, "");
        let mut watch = watch(root.path());
        watch.sample();
        watch.exact_pacer.rest_until = Some(Instant::now() + Duration::from_secs(60));
        imitate(root.path(), 8, 7, 101, 800, "");
        watch.sample();
        std::thread::sleep(Duration::from_millis(3));
        watch.sample();
        let summary = watch.summary(Duration::from_millis(5));
        assert_eq!(bytes(summary.host), 800 * 1024, "of the first sample");
        assert_eq!(bytes(summary.host_sum), 1800 * 1024);
        assert!(summary.shared_once_gap_ms_max >= 3.0, "{}", summary.shared_once_gap_ms_max);
    }

    #[test]
    fn a_root_that_ended_at_once_is_missing_and_not_an_error() {
        let root = tempfile::tempdir().unwrap();
        imitate(root.path(), 7, 1, 100, 1000, "");
        let stat = fs::read_to_string(root.path().join("7/stat")).unwrap().replace(" S ", " Z ");
        fs::write(root.path().join("7/stat"), stat).unwrap();
        fs::write(root.path().join("7/status"), "State:\tZ (zombie)\n").unwrap();
        let mut watch = watch(root.path());
        assert_eq!(watch.sample(), 0);
        let summary = watch.summary(Duration::from_millis(5));
        assert!(summary.host.value().is_none() && summary.rss.value().is_none());
        assert_eq!((summary.process_count, summary.ended_count), (1, 1));
        assert!(summary.unavailable.iter().any(|entry| entry.metric == "peak.host_bytes"));
    }

    #[test]
    fn a_root_that_is_gone_is_refused() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("stat"), "").unwrap();
        let options = TreeOptions { procfs: Procfs::at(root.path()), ..TreeOptions::default() };
        let refused = Watch::new(7, &options, None).unwrap_err();
        assert!(matches!(refused, ProbeError::Process { pid: 7, reason: Reason::ProcessEnded }), "{refused}");
    }
}
