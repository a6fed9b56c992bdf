//! Measures a conversion, which runs in this process: from before the source is opened until
//! everything is freed.

use std::time::{Duration, Instant};

use onelayer_probe::{Sampler, SamplerOptions};

use crate::machine::{PressureCounters, note_missing_pressure};
use crate::measured::{self, point};
use crate::problem::{Code, Problem};
use crate::report::{IoCounters, Outcome, Point, Report, Run, Samples};
use crate::worker::give_heap_back;

/// A running measurement.
#[derive(Debug)]
pub(crate) struct Measurement {
    sampler: Sampler,
    before: PressureCounters,
    start: Instant,
}

/// Results of the conversion.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts {
    /// How it ended.
    pub(crate) outcome: Outcome,
    /// Its wall time; `None` means the time of the measurement.
    pub(crate) elapsed: Option<Duration>,
    /// Bytes that were read from the source.
    pub(crate) read_bytes: Option<u64>,
    /// Its budget, which the promise is derived from; `None` if it was not yet known.
    pub(crate) budget_bytes: Option<u64>,
}

impl Measurement {
    /// Records the baseline and starts sampling.
    ///
    /// # Errors
    /// If there is no thread to be had.
    pub(crate) fn start() -> Result<Self, Problem> {
        give_heap_back();
        let options = SamplerOptions { timeline_rows: 0, ..SamplerOptions::default() };
        let sampler = Sampler::start(&options).map_err(|error| cannot(&error))?;
        Ok(Self { sampler, before: PressureCounters::now(), start: Instant::now() })
    }

    /// Returns the run, and notes in the report what could not be measured.
    ///
    /// # Errors
    /// If the measurement failed.
    pub(crate) fn finish(self, facts: Facts, report: &mut Report) -> Result<Run, Problem> {
        let pressure = self.before.until_now();
        note_missing_pressure(&pressure, report);
        let elapsed = facts.elapsed.unwrap_or_else(|| self.start.elapsed());
        give_heap_back();
        let after_unload: Point = point(&self.sampler.snapshot().memory);
        let summary = self.sampler.finish().map_err(|error| cannot(&error))?;
        measured::note_unavailable(&summary, report);
        report.missing("peak.cgroup_bytes", "a conversion shares the cgroup of loadcheck itself");
        report.missing("peak.vram_bytes", "a conversion takes no device memory");
        report.missing("io.from_cache_bytes", "the counter has what a conversion reads of its own files too");
        Ok(Run {
            strategy: "convert".to_owned(),
            outcome: facts.outcome,
            seconds: Some(elapsed.as_secs_f64()),
            baseline: point(&summary.baseline.memory),
            peak: measured::peak(&summary),
            after_unload: Some(after_unload),
            io: IoCounters {
                read_bytes: facts.read_bytes,
                major_faults: summary.activity.major_faults.value(),
                ..IoCounters::default()
            },
            pressure,
            promise: facts.budget_bytes.and_then(|bytes| measured::promise(&summary, bytes, 0)),
            samples: Some(Samples::new(summary.interval_ms, &summary.timeline, false)),
            ..Run::default()
        })
    }
}

fn cannot(error: &dyn std::fmt::Display) -> Problem {
    Problem::new(Code::CannotMeasure, format!("cannot measure: {error}"))
}
