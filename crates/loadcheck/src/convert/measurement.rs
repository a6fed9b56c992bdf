//! Measures a conversion, which runs in this process: from before the source is opened until
//! everything is freed.

use std::time::Duration;

use crate::heap;
use crate::machine::{PressureCounters, note_missing_pressure};
use crate::measuring::{Session, promised_bytes};
use crate::problem::Problem;
use crate::report::{IoCounters, Outcome, Report, Run};

/// A running measurement.
#[derive(Debug)]
pub(crate) struct Measurement {
    session: Session,
    before: PressureCounters,
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
    /// There is no thread to be had.
    pub(crate) fn start() -> Result<Self, Problem> {
        heap::give_back();
        Ok(Self { session: Session::start(None)?, before: PressureCounters::now() })
    }

    /// Returns the run, and notes in the report what could not be measured.
    ///
    /// # Errors
    /// The measurement failed.
    pub(crate) fn finish(self, facts: Facts, report: &mut Report) -> Result<Run, Problem> {
        let pressure = self.before.until_now();
        note_missing_pressure(&pressure, report);
        let elapsed = facts.elapsed.unwrap_or_else(|| self.session.start.elapsed());
        let measurement = self.session.finish(|| None)?;
        measurement.note_unavailable(report);
        report.missing("peak.cgroup_bytes", "a conversion shares the cgroup of loadcheck itself");
        report.missing("peak.vram_bytes", "a conversion takes no device memory");
        report.missing("io.from_cache_bytes", "the counter has what a conversion reads of its own files too");
        let activity = &measurement.summary.activity;
        Ok(Run {
            outcome: facts.outcome,
            io: IoCounters {
                read_bytes: facts.read_bytes,
                major_faults: activity.major_faults.value(),
                ..IoCounters::default()
            },
            pressure,
            promise: facts.budget_bytes.and_then(|bytes| measurement.promise(promised_bytes(bytes, 0))),
            ..measurement.run("convert", elapsed, None)
        })
    }
}
