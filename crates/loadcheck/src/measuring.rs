//! Measures this very process: a session from a baseline to the moment when everything was given
//! back, in the words of a report. For a worker that loads, and for a conversion.

use std::time::{Duration, Instant};

use onelayer::live::{self, MemoryKind};
use onelayer::units::MIB;
use onelayer_probe::{Activity, Measured, ProcessMemory, Procfs, Sampler, SamplerOptions, Summary};

use crate::heap;
use crate::problem::{Code, Problem};
use crate::report::{Peak, Place, Point, Promise, Report, Run, Samples, Split, Unavailable};

/// Growth that is allowed beside the budget: thread stacks and the allocator's slack.
pub(crate) const SLACK_BYTES: u64 = 16 * MIB;
/// Rows of a timeline that is kept.
pub(crate) const TIMELINE_ROWS: usize = 4096;

/// A measurement that goes on.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) sampler: Sampler,
    keeps_timeline: bool,
    /// Where the clock of the samples begins.
    pub(crate) baseline_taken: Instant,
    /// When the measured work began.
    pub(crate) start: Instant,
}

/// The moment when everything was loaded.
pub(crate) struct AfterLoad {
    /// Since the start of the load.
    pub(crate) elapsed: Duration,
    /// The process's counters since the baseline.
    pub(crate) activity: Activity,
    /// Memory.
    pub(crate) point: Point,
}

/// A measurement that is over.
pub(crate) struct Measurement {
    pub(crate) summary: Summary,
    /// Memory when everything was given back.
    pub(crate) after_unload: Point,
    /// Where the clock of the samples begins.
    pub(crate) baseline_taken: Instant,
    keeps_timeline: bool,
}

impl Session {
    /// Takes the baseline. With `interval_ms`, samples of that distance are kept.
    ///
    /// # Errors
    /// [`Code::CannotMeasure`] if there is no thread for the sampler.
    pub(crate) fn start(interval_ms: Option<u64>) -> Result<Self, Problem> {
        let mut options = SamplerOptions { timeline_rows: 0, ..SamplerOptions::default() };
        if let Some(interval_ms) = interval_ms {
            options.interval = Duration::from_millis(interval_ms);
            options.timeline_rows = TIMELINE_ROWS;
        }
        let sampler = Sampler::start(&options).map_err(cannot_measure)?;
        let now = Instant::now();
        Ok(Self { sampler, keeps_timeline: interval_ms.is_some(), baseline_taken: now, start: now })
    }

    /// The measured work begins now: what was measured and said since the baseline is not part of it.
    pub(crate) fn begin_work(&mut self) {
        self.start = Instant::now();
    }

    /// Memory before the load.
    pub(crate) fn baseline(&self) -> Point {
        point(&self.sampler.baseline().memory)
    }

    /// Memory now.
    pub(crate) fn now(&self) -> Point {
        point(&self.sampler.snapshot().memory)
    }

    /// The process's counters since the baseline.
    pub(crate) fn activity(&self) -> Activity {
        Procfs::default().myself().activity().since(&self.sampler.baseline().activity)
    }

    /// A moment of the load, at a layer.
    pub(crate) fn place(&self, layer: &str) -> Place {
        Place { layer: Some(layer.to_owned()), tensor: None, seconds: self.start.elapsed().as_secs_f64() }
    }

    /// Everything is loaded. `vram_bytes` measures the device.
    pub(crate) fn loaded(&self, vram_bytes: impl FnOnce() -> Option<u64>) -> AfterLoad {
        let elapsed = self.start.elapsed();
        let activity = self.activity();
        self.sampler.marker().sample();
        let vram_bytes = vram_bytes();
        AfterLoad { elapsed, activity, point: Point { vram_bytes, ..self.now() } }
    }

    /// Everything is given back. `vram_bytes` measures the device.
    ///
    /// # Errors
    /// [`Code::CannotMeasure`].
    pub(crate) fn finish(self, vram_bytes: impl FnOnce() -> Option<u64>) -> Result<Measurement, Problem> {
        heap::give_back();
        let vram_bytes = vram_bytes();
        let after_unload = Point { vram_bytes, ..self.now() };
        let Self { keeps_timeline, baseline_taken, .. } = self;
        let summary = self.sampler.finish().map_err(cannot_measure)?;
        Ok(Measurement { summary, after_unload, baseline_taken, keeps_timeline })
    }
}

impl Measurement {
    /// The part of a report that all measured loads share. The caller adds the outcome and the
    /// reads.
    pub(crate) fn run(&self, strategy: &str, elapsed: Duration, after_load: Option<&AfterLoad>) -> Run {
        let summary = &self.summary;
        let mut peak = peak(summary);
        // Sampled: memory held at the end was held, whether a sample caught it or not.
        peak.host_bytes = peak.host_bytes.max(after_load.and_then(|after_load| after_load.point.host_bytes));
        Run {
            strategy: strategy.to_owned(),
            seconds: Some(elapsed.as_secs_f64()),
            cpu_seconds: after_load.and_then(|after_load| after_load.activity.cpu_seconds.value()),
            baseline: point(&summary.baseline.memory),
            peak,
            after_load: after_load.map(|after_load| after_load.point.clone()),
            after_unload: Some(self.after_unload.clone()),
            samples: Some(Samples::new(summary.interval_ms, &summary.timeline, self.keeps_timeline)),
            ..Run::default()
        }
    }

    /// Growth of resident memory against its limit, if it was measured.
    pub(crate) fn promise(&self, limit_bytes: u64) -> Option<Promise> {
        let growth_bytes = self.summary.rss_growth_bytes().value()?;
        Some(Promise { limit_bytes, growth_bytes, kept: growth_bytes <= limit_bytes })
    }

    /// Metrics that could not be measured.
    pub(crate) fn unavailable(&self) -> Vec<Unavailable> {
        let entry = |entry: &onelayer_probe::Unavailable| Unavailable {
            metric: entry.metric.clone(),
            reason: entry.reason.clone(),
        };
        self.summary.unavailable.iter().map(entry).collect()
    }

    /// The same, as entries of a report.
    pub(crate) fn note_unavailable(&self, report: &mut Report) {
        self.unavailable().iter().for_each(|entry| report.missing(&entry.metric, &entry.reason));
    }
}

/// The most that resident memory may grow: the budget, the slack, and layers kept in host memory.
pub(crate) fn promised_bytes(budget_bytes: u64, resident_host_bytes: u64) -> u64 {
    budget_bytes.saturating_add(SLACK_BYTES).saturating_add(resident_host_bytes)
}

fn cannot_measure(error: onelayer_probe::ProbeError) -> Problem {
    Problem::new(Code::CannotMeasure, format!("cannot measure: {error}"))
}

fn point(memory: &ProcessMemory) -> Point {
    Point { host_bytes: memory.host_bytes.value(), rss_bytes: memory.rss_bytes.value(), ..Point::default() }
}

/// The same moment, with the allocations of our own loads told from everything else.
pub(crate) fn split(point: Point) -> Point {
    let live = live::snapshot();
    let ours_host_bytes = live.bytes(MemoryKind::Host);
    let all_bytes: u64 = live.allocations().iter().map(|one| one.bytes).sum();
    let ours_vram_bytes = all_bytes - ours_host_bytes;
    let split = Split {
        ours_host_bytes,
        other_host_bytes: point.host_bytes.map(|all| all.saturating_sub(ours_host_bytes)),
        ours_vram_bytes,
        other_vram_bytes: point.vram_bytes.map(|all| all.saturating_sub(ours_vram_bytes)),
    };
    Point { split: Some(split), ..point }
}

/// Where a peak was.
pub(crate) fn place_of(peak: &Measured<onelayer_probe::Peak>) -> Option<Place> {
    let Measured::Value(peak) = peak else { return None };
    Some(Place {
        layer: peak.at.layer.as_deref().map(str::to_owned),
        tensor: peak.at.tensor.as_deref().map(str::to_owned),
        seconds: peak.at.seconds,
    })
}

/// The highest values of host memory.
fn peak(summary: &Summary) -> Peak {
    let peak = &summary.peak;
    Peak {
        host_bytes: peak.host.bytes().value(),
        rss_bytes: peak.rss.bytes().value(),
        anon_bytes: peak.anon.bytes().value(),
        file_bytes: peak.file.bytes().value(),
        pinned_bytes: peak.pinned.bytes().value(),
        at: place_of(&peak.host),
        rss_at: place_of(&peak.rss),
        ..Peak::default()
    }
}
