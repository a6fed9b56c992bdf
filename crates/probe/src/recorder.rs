//! Keeps the peaks of a stream of samples, and the layer and tensor of each peak.
//!
//! It has no clock or thread and does not read `/proc`: the [`Sampler`](super::Sampler) feeds it.
//! All memory (labels, timeline) is allocated by [`Recorder::new`]; recording allocates nothing.

use std::time::Duration;

use serde::Serialize;

use super::measured::UnavailableList;
use super::timeline::Timeline;
use super::{Measured, ProcessMemory, Reason};

/// The longest layer or tensor name that a peak keeps, in bytes. A longer one is cut and ends in
/// `…`.
pub const LABEL_BYTES_MAX: usize = 256;

/// A position in a load.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct LoadPosition {
    /// The layer that was being loaded, if any.
    pub layer: Option<Box<str>>,
    /// The tensor that was being loaded, if any. Both names are cut after [`LABEL_BYTES_MAX`]
    /// bytes.
    pub tensor: Option<Box<str>>,
    /// Time since the baseline.
    pub seconds: f64,
}

/// The peak of one metric.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Peak {
    /// The size.
    pub bytes: u64,
    /// Where and when it was first reached.
    pub at: LoadPosition,
}

impl Measured<Peak> {
    /// The size, without the position.
    #[must_use]
    pub fn bytes(&self) -> Measured<u64> {
        match self {
            Self::Value(peak) => Measured::Value(peak.bytes),
            Self::Unavailable(reason) => Measured::Unavailable(*reason),
        }
    }
}

/// How the peak of resident memory was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RssPeakMethod {
    /// The kernel's high-water mark, reset before the run or raised during it: exact.
    HighWaterMark,
    /// The largest sample. The mark could not be reset, and an earlier peak hides this run's.
    Sampled,
}

/// The peaks of one run.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Peaks {
    /// Unreclaimable memory. Sampled: the kernel keeps no high-water mark of it.
    pub host: Measured<Peak>,
    /// Resident memory.
    pub rss: Measured<Peak>,
    /// How `rss` was found.
    pub rss_method: RssPeakMethod,
    /// Anonymous memory. Sampled, like all fields below.
    pub anon: Measured<Peak>,
    /// Pages of mapped files.
    pub file: Measured<Peak>,
    /// Shared memory.
    pub shmem: Measured<Peak>,
    /// Swapped-out memory.
    pub swap: Measured<Peak>,
    /// Locked address space.
    pub locked: Measured<Peak>,
    /// Pinned address space.
    pub pinned: Measured<Peak>,
    /// Explicit huge pages.
    pub hugetlb: Measured<Peak>,
}

impl Peaks {
    pub(crate) fn note_unavailable(&self, list: &mut UnavailableList) {
        for (name, peak) in [
            ("host_bytes", &self.host),
            ("rss_bytes", &self.rss),
            ("anon_bytes", &self.anon),
            ("file_bytes", &self.file),
            ("shmem_bytes", &self.shmem),
            ("swap_bytes", &self.swap),
            ("locked_bytes", &self.locked),
            ("pinned_bytes", &self.pinned),
            ("hugetlb_bytes", &self.hugetlb),
        ] {
            list.note("peak.", name, peak);
        }
    }
}

/// A string of bounded length, allocated once.
#[derive(Debug)]
struct Label(String);

impl Label {
    fn new() -> Self {
        // Touched here, so that its page is resident before the baseline.
        let mut text = "\0".repeat(LABEL_BYTES_MAX);
        text.clear();
        Self(text)
    }

    fn set(&mut self, text: &str) {
        const ELLIPSIS: &str = "…";
        self.0.clear();
        if text.len() <= LABEL_BYTES_MAX {
            self.0.push_str(text);
            return;
        }
        let mut end = LABEL_BYTES_MAX - ELLIPSIS.len();
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        self.0.push_str(&text[..end]);
        self.0.push_str(ELLIPSIS);
    }

    fn to_option(&self) -> Option<Box<str>> {
        (!self.0.is_empty()).then(|| self.0.as_str().into())
    }
}

/// The current layer and tensor, in memory that is allocated once.
#[derive(Debug)]
struct PositionBuffer {
    layer: Label,
    tensor: Label,
}

impl PositionBuffer {
    fn new() -> Self {
        Self { layer: Label::new(), tensor: Label::new() }
    }

    fn copy_from(&mut self, other: &Self) {
        self.layer.set(&other.layer.0);
        self.tensor.set(&other.tensor.0);
    }
}

/// The running peak of one metric.
#[derive(Debug)]
struct PeakCell {
    bytes: Measured<u64>,
    elapsed: Duration,
    position: PositionBuffer,
}

impl PeakCell {
    fn new() -> Self {
        let nothing_yet = Reason::NotHere("no sample was taken");
        Self {
            bytes: Measured::Unavailable(nothing_yet),
            elapsed: Duration::ZERO,
            position: PositionBuffer::new(),
        }
    }

    fn offer(&mut self, bytes: Measured<u64>, elapsed: Duration, position: &PositionBuffer) {
        let grew = match (self.bytes, bytes) {
            (Measured::Value(peak), Measured::Value(now)) => now > peak,
            (Measured::Unavailable(_), Measured::Value(_)) => true,
            (Measured::Value(_), Measured::Unavailable(_)) => false,
            (Measured::Unavailable(_), Measured::Unavailable(_)) => {
                self.bytes = bytes;
                false
            }
        };
        if grew {
            self.bytes = bytes;
            self.elapsed = elapsed;
            self.position.copy_from(position);
        }
    }

    fn peak(&self) -> Measured<Peak> {
        self.bytes.map(|bytes| Peak {
            bytes,
            at: LoadPosition {
                layer: self.position.layer.to_option(),
                tensor: self.position.tensor.to_option(),
                seconds: self.elapsed.as_secs_f64(),
            },
        })
    }
}

/// Positions of the metrics in [`ProcessMemory::fields`].
const HOST: usize = 0;
const RSS: usize = 1;
const RSS_MARK: usize = 2;
const ANON: usize = 3;
const FILE: usize = 4;
const SHMEM: usize = 5;
const SWAP: usize = 6;
const LOCKED: usize = 7;
const PINNED: usize = 8;
const HUGETLB: usize = 9;

/// Peaks and timeline of one run. See the module docs.
#[derive(Debug)]
pub struct Recorder {
    cells: [PeakCell; 10],
    position: PositionBuffer,
    timeline: Timeline,
    sample_count: u64,
    last_elapsed: Duration,
    gap_max: Duration,
    first_mark: Measured<u64>,
}

impl Recorder {
    /// An empty recorder whose timeline holds at most `timeline_rows` rows.
    #[must_use]
    pub fn new(timeline_rows: usize) -> Self {
        Self {
            cells: std::array::from_fn(|_| PeakCell::new()),
            position: PositionBuffer::new(),
            timeline: Timeline::new(timeline_rows),
            sample_count: 0,
            last_elapsed: Duration::ZERO,
            gap_max: Duration::ZERO,
            first_mark: Measured::Unavailable(Reason::NotHere("no sample was taken")),
        }
    }

    /// Makes `layer` the current layer and clears the current tensor.
    pub fn enter_layer(&mut self, layer: &str) {
        self.position.layer.set(layer);
        self.position.tensor.set("");
    }

    /// Makes `tensor` the current tensor of the current layer.
    pub fn enter_tensor(&mut self, tensor: &str) {
        self.position.tensor.set(tensor);
    }

    /// Adds a sample taken `elapsed` after the baseline, at the current layer and tensor.
    pub fn record(&mut self, elapsed: Duration, memory: &ProcessMemory) {
        // Two threads sample, and their readings may arrive out of order.
        let elapsed = elapsed.max(self.last_elapsed);
        if self.sample_count == 0 {
            self.first_mark = memory.rss_peak_bytes;
        } else {
            self.gap_max = self.gap_max.max(elapsed - self.last_elapsed);
        }
        self.last_elapsed = elapsed;
        self.sample_count += 1;
        for (cell, (_, bytes)) in self.cells.iter_mut().zip(memory.fields()) {
            cell.offer(bytes, elapsed, &self.position);
        }
        self.timeline.push(elapsed, memory);
    }

    /// The number of recorded samples.
    #[must_use]
    pub fn sample_count(&self) -> u64 {
        self.sample_count
    }

    /// The longest time between two samples. A shorter spike may have been missed.
    #[must_use]
    pub fn gap_max(&self) -> Duration {
        self.gap_max
    }

    /// The curve so far.
    #[must_use]
    pub fn timeline(&self) -> &Timeline {
        &self.timeline
    }

    /// The peaks so far. Pass `mark_was_reset` if the kernel's high-water mark was reset right
    /// before the first sample.
    #[must_use]
    pub fn peaks(&self, mark_was_reset: bool) -> Peaks {
        let mark = self.cells[RSS_MARK].bytes;
        let mark_grew = mark.combine(self.first_mark, |now, first| now > first).value() == Some(true);
        let is_exact = mark.value().is_some() && (mark_was_reset || mark_grew);
        let (rss, rss_method) =
            if is_exact { (RSS_MARK, RssPeakMethod::HighWaterMark) } else { (RSS, RssPeakMethod::Sampled) };
        let peak = |index: usize| self.cells[index].peak();
        Peaks {
            host: peak(HOST),
            rss: peak(rss),
            rss_method,
            anon: peak(ANON),
            file: peak(FILE),
            shmem: peak(SHMEM),
            swap: peak(SWAP),
            locked: peak(LOCKED),
            pinned: peak(PINNED),
            hugetlb: peak(HUGETLB),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(anon_kib: u64, file_kib: u64, mark_kib: u64) -> ProcessMemory {
        let text = format!(
            "VmHWM:\t{mark_kib} kB\nVmRSS:\t{} kB\nRssAnon:\t{anon_kib} kB\nRssFile:\t{file_kib} kB\nRssShmem:\t0 kB\n\
             VmSwap:\t0 kB\nVmLck:\t0 kB\nVmPin:\t0 kB\n",
            anon_kib + file_kib
        );
        ProcessMemory::parse(text.as_bytes())
    }

    fn milliseconds(count: u64) -> Duration {
        Duration::from_millis(count)
    }

    #[test]
    fn the_metric_positions_are_those_of_the_fields() {
        let fields = sample(1, 1, 1).fields().map(|(name, _)| name);
        for (index, name) in [
            (HOST, "host_bytes"),
            (RSS, "rss_bytes"),
            (RSS_MARK, "rss_peak_bytes"),
            (ANON, "anon_bytes"),
            (FILE, "file_bytes"),
            (SHMEM, "shmem_bytes"),
            (SWAP, "swap_bytes"),
            (LOCKED, "locked_bytes"),
            (PINNED, "pinned_bytes"),
            (HUGETLB, "hugetlb_bytes"),
        ] {
            assert_eq!(fields[index], name);
        }
    }

    #[test]
    fn each_peak_names_its_own_position() {
        let mut recorder = Recorder::new(8);
        recorder.record(milliseconds(0), &sample(10, 10, 20));
        recorder.enter_layer("model.layers.3");
        recorder.enter_tensor("model.layers.3.mlp.up_proj.weight");
        recorder.record(milliseconds(5), &sample(90, 10, 100));
        recorder.enter_layer("model.layers.4");
        recorder.record(milliseconds(25), &sample(20, 70, 100));
        let peaks = recorder.peaks(true);
        let host = peaks.host.value().unwrap();
        assert_eq!((host.bytes, host.at.seconds), (90 * 1024, 0.005));
        assert_eq!(host.at.layer.as_deref(), Some("model.layers.3"));
        assert_eq!(host.at.tensor.as_deref(), Some("model.layers.3.mlp.up_proj.weight"));
        let file = peaks.file.value().unwrap();
        assert_eq!((file.at.layer.as_deref(), file.at.tensor), (Some("model.layers.4"), None));
        assert_eq!(recorder.gap_max(), milliseconds(20));
    }

    #[test]
    fn a_mark_between_two_samples_is_caught_by_the_high_water_mark() {
        let mut recorder = Recorder::new(8);
        recorder.record(milliseconds(0), &sample(10, 10, 20));
        recorder.enter_layer("spike");
        recorder.record(milliseconds(5), &sample(10, 10, 300));
        let peaks = recorder.peaks(false);
        assert_eq!(peaks.rss_method, RssPeakMethod::HighWaterMark);
        let rss = peaks.rss.value().unwrap();
        assert_eq!((rss.bytes, rss.at.layer.as_deref()), (300 * 1024, Some("spike")));
    }

    #[test]
    fn an_older_higher_mark_is_not_taken_for_this_runs_peak() {
        let mut recorder = Recorder::new(8);
        recorder.record(milliseconds(0), &sample(10, 10, 900));
        recorder.record(milliseconds(5), &sample(30, 10, 900));
        let peaks = recorder.peaks(false);
        assert_eq!(peaks.rss_method, RssPeakMethod::Sampled);
        assert_eq!(peaks.rss.value().unwrap().bytes, 40 * 1024);
        assert_eq!(recorder.peaks(true).rss.value().unwrap().bytes, 900 * 1024);
    }

    #[test]
    fn nothing_sampled_is_missing_with_the_last_reason() {
        let mut recorder = Recorder::new(8);
        assert!(recorder.peaks(true).host.reason().is_some());
        recorder.record(milliseconds(0), &ProcessMemory::unavailable(Reason::ProcessEnded));
        let peaks = recorder.peaks(true);
        assert_eq!(peaks.host.reason(), Some(Reason::ProcessEnded));
        assert_eq!(peaks.rss.reason(), Some(Reason::ProcessEnded));
    }

    #[test]
    fn a_long_name_is_cut_at_a_character_and_allocates_nothing() {
        let mut recorder = Recorder::new(2);
        let capacity = recorder.position.layer.0.capacity();
        recorder.enter_layer(&"ü".repeat(40_000));
        recorder.record(milliseconds(1), &sample(1, 1, 1));
        let at = recorder.peaks(true).host.value().unwrap().at;
        let layer = at.layer.unwrap();
        assert!(layer.len() <= LABEL_BYTES_MAX && layer.ends_with("ü…"), "{}", layer.len());
        assert_eq!(recorder.position.layer.0.capacity(), capacity);
    }
}
