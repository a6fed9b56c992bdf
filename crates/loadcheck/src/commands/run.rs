//! `loadcheck run`: measures a load in fresh worker processes, holds it against its limits and its
//! promise.

use std::path::Path;

use crate::args::{CacheArg, Device, Gate, Metric, Next, RunArgs};
use crate::config::LoadConfig;
use crate::inputs;
use crate::limits;
use crate::numbers::container;
use crate::output::Output;
use crate::output::terminal::Terminal;
use crate::problem::{Code, Problem};
use crate::progress::Progress;
use crate::report::{CacheState, CommandName, Place, Report, Verdict};
use crate::signals::Interrupts;
use crate::source::{self, Resolved};
use crate::worker::{Checked, MeasureTask, Stop, Task, Watch};

use super::worker_run::{Settled, measure, prepare};
use super::{Outcome, new_report};

/// Measures.
pub(crate) fn run(args: &RunArgs, output: &Output, terminal: &Terminal) -> Outcome {
    let report = new_report(CommandName::Run);
    let gates = args.limits.gates();
    let mut problems = output.check();
    let resolved = source::resolve(&args.load.source).map_err(|more| problems.extend(more)).ok();
    let path = resolved.as_ref().map(|resolved| resolved.path.clone()).unwrap_or_default();
    let (config, more) = LoadConfig::new(&args.load, path);
    let config = LoadConfig { hash: args.hash, verify: args.verify, ranks: args.ranks.clone(), ..config };
    let engine_time = args.engine_time.unwrap_or_default();
    let config = LoadConfig { passes: args.passes.clone(), engine_time, ..config };
    problems.extend(more);
    let (config, more) = by_map(args, config);
    problems.extend(more);
    problems.extend(nothing_to_verify(&config));
    let Ok(interrupts) = Interrupts::listen().map_err(|problem| problems.push(problem)) else {
        return Outcome::refused(report, problems);
    };
    let interval_ms = output.timeline_ms(args.export.timeline);
    let mut session =
        Session { args, interval_ms, terminal, config, interrupts, report, crossings: Vec::new() };
    // Device and headers are looked at even if something else is wrong already: all problems come in
    // one go.
    let prepared = session.prepare(resolved.is_some(), None);
    problems.extend(limits::unmeasurable(&gates, Some(session.config.device)));
    let (checked, resolved) = match (prepared, resolved) {
        (Ok(checked), Some(resolved)) => (checked, resolved),
        (Err(stop), _) => return session.stop(stop, problems),
        (Ok(_), None) => return Outcome::refused(session.report, problems),
    };
    session.config.settle(&checked.budgets);
    session.note_source(&checked, &resolved);
    let (watches, more) = watches(&gates, &checked);
    problems.extend(more);
    if !problems.is_empty() {
        return Outcome::refused(session.report, problems);
    }
    if let Err(stop) = session.measure_all(&checked, &watches) {
        return session.stop(stop, Vec::new());
    }
    session.judge(&gates, &checked)
}

/// A `run` in progress.
struct Session<'a> {
    args: &'a RunArgs,
    /// Distance of the samples that are kept; `None` keeps none.
    interval_ms: Option<u64>,
    terminal: &'a Terminal,
    config: LoadConfig,
    interrupts: Interrupts,
    report: Report,
    crossings: Vec<(Watch, Place)>,
}

impl Session<'_> {
    /// Decides on the device, reads the headers, and brings the page cache into the state that is
    /// wanted.
    fn prepare(&mut self, has_source: bool, cache: Option<CacheArg>) -> Result<Checked, Stop> {
        prepare(&mut self.config, &mut self.report, &self.interrupts, has_source, cache)
    }

    fn note_source(&mut self, checked: &Checked, resolved: &Resolved) {
        self.report.source = Some(resolved.named(checked.source.clone()));
        self.report.plan = Some(checked.plan.clone());
        self.report.notes.extend(checked.notes.iter().cloned());
        if self.config.device_map.is_some() {
            self.report.missing("peak.vram_bytes", "told place by place: runs[].places");
        } else if !self.config.device.has_own_memory() {
            self.report.missing("peak.vram_bytes", "the load takes no device memory");
        }
    }

    fn measure_all(&mut self, checked: &Checked, watches: &[Watch]) -> Result<(), Stop> {
        let (warmup, runs) = (self.args.warmup, self.args.runs);
        for number in 0..warmup {
            self.measure_one(&format!("warm-up {} of {warmup}", number + 1), checked, watches, false)?;
        }
        for number in 0..runs {
            let label = if runs == 1 { String::new() } else { format!("run {} of {runs}", number + 1) };
            self.measure_one(&label, checked, watches, true)?;
        }
        Ok(())
    }

    /// One load in one fresh process. A warm-up leaves no trace in the report unless it fails.
    fn measure_one(
        &mut self,
        label: &str,
        checked: &Checked,
        watches: &[Watch],
        counts: bool,
    ) -> Result<(), Stop> {
        let cache = CacheState { asked: self.args.cache, cached_share: self.prepare_cache()? };
        let task = Task::Measure(MeasureTask {
            load: self.config.clone(),
            budgets: checked.budgets,
            watches: watches.to_vec(),
            interval_ms: self.interval_ms,
        });
        let progress = Progress::start(self.terminal.progress, label);
        let stream = ("stream", Some(checked.plan.params.clone()));
        let Settled { mut run, mut problems, signal, crossings, hashes, .. } =
            measure(task, stream, progress, &self.interrupts, &mut self.report);
        self.crossings.extend(crossings.into_iter().map(|crossing| (crossing.watch, crossing.place)));
        run.cache = cache;
        let first_run = self.report.runs.is_empty();
        let is_whole = problems.is_empty() && signal.is_none();
        if counts || !is_whole {
            self.report.runs.push(run);
            if first_run {
                self.report.hashes = hashes;
            } else if is_whole && hashes != self.report.hashes {
                problems.push(Problem::new(
                    Code::LoadFailed,
                    "two runs delivered different bytes: the hashes differ",
                ));
            }
        }
        match signal {
            Some(signal) => Err(Stop::Signal(signal)),
            None if !problems.is_empty() => Err(Stop::Problems(problems)),
            None => Ok(()),
        }
    }

    fn prepare_cache(&mut self) -> Result<Option<f64>, Stop> {
        if self.args.cache == CacheArg::Asis {
            return Ok(None);
        }
        let checked = self.prepare(true, Some(self.args.cache))?;
        checked.notes.into_iter().for_each(|note| self.report.note(note));
        Ok(checked.cached_share)
    }

    /// Ends early, with what is known.
    fn stop(self, stop: Stop, mut problems: Vec<Problem>) -> Outcome {
        match stop {
            Stop::Signal(signal) => Outcome::interrupted(self.report, problems, signal),
            Stop::Problems(more) => {
                problems.extend(more);
                problems.extend(self.config.below_floor(&problems));
                Outcome::refused(self.report, problems)
            }
        }
    }

    /// Holds the runs against limits and promise.
    fn judge(mut self, gates: &[Gate], checked: &Checked) -> Outcome {
        let crossings = std::mem::take(&mut self.crossings);
        let first_exceeded = |metric: Metric, limit_bytes: u64| {
            let mut found = crossings
                .iter()
                .filter(|(watch, _)| watch.metric == metric && watch.limit_bytes == limit_bytes);
            found.next().map(|(_, place)| place.clone())
        };
        let report = &mut self.report;
        let (limits, problems) =
            limits::judge(gates, &report.runs, &checked.context, &report.unavailable, &first_exceeded);
        report.limits = limits;
        report.verdict = verdict(report, self.args.limits.strict_noise);
        report.fail(problems);
        let next = next(report);
        Outcome { report: self.report, interrupted: None, next }
    }
}

/// With the map, if there is one: nothing is decided about a device then.
fn by_map(args: &RunArgs, config: LoadConfig) -> (LoadConfig, Option<Problem>) {
    match args.device_map.as_deref().map(inputs::device_map) {
        None => (config, None),
        Some(Ok(map)) => (LoadConfig { device: Device::Host, device_map: Some(map), ..config }, None),
        // What else is wrong can be told without it.
        Some(Err(problem)) => (LoadConfig { device: Device::Host, ..config }, Some(problem)),
    }
}

/// `--verify` compares what was delivered.
fn nothing_to_verify(config: &LoadConfig) -> Option<Problem> {
    if config.verify && config.quantise.is_some() {
        let message = "--verify compares tensors with their files; quantised tensors differ from them";
        let help =
            "`loadcheck convert --quantise ... --verify` compares with the source, quantised a second time";
        return Some(Problem::new(Code::Usage, message).at("--verify").help(help));
    }
    (config.verify && config.device == Device::None).then(|| {
        Problem::new(Code::Usage, "--verify needs tensors to compare, and --device none keeps none")
            .help("--device host keeps the layers in memory; --hash works without keeping them")
    })
}

/// The limits in bytes, for the worker to watch.
fn watches(gates: &[Gate], checked: &Checked) -> (Vec<Watch>, Vec<Problem>) {
    let (mut watches, mut problems) = (Vec::new(), Vec::new());
    for gate in gates {
        match limits::limit_bytes(gate, &checked.context) {
            Ok(Some(limit_bytes)) => watches.push(Watch { metric: gate.metric, limit_bytes }),
            Ok(None) => {}
            Err(problem) => problems.push(problem),
        }
    }
    (watches, problems)
}

/// Broken limits and promises fail; with `--strict-noise`, a limit inside the spread of the runs is
/// inconclusive.
pub(crate) fn verdict(report: &Report, strict_noise: bool) -> Verdict {
    let promise_broken =
        report.runs.iter().any(|run| run.promise.as_ref().is_some_and(|promise| !promise.kept));
    let counts = |limit: &&crate::report::Limit| !(strict_noise && limit.inside_spread);
    if promise_broken || report.limits.iter().filter(counts).any(|limit| !limit.passed) {
        Verdict::Fail
    } else if strict_noise && report.limits.iter().any(|limit| limit.inside_spread) {
        Verdict::Inconclusive
    } else {
        Verdict::Pass
    }
}

/// The next useful command: a gate that holds what was measured, or a file that keeps the numbers.
fn next(report: &Report) -> Option<Next> {
    let peak = report.runs.iter().filter_map(|run| run.peak.host_bytes).max()?;
    if report.limits.is_empty() {
        let flags = vec![("max-memory", Some(container(peak).0))];
        return Some(Next { command: "run", flags, why: "a gate for CI", ..Next::default() });
    }
    keep("run", "loadcheck.json", "to keep the numbers")
}

/// The same command once more, its report in a file. None where there is such a file.
pub(super) fn keep(command: &'static str, file: &str, why: &'static str) -> Option<Next> {
    let flags = vec![("json", None), ("output", Some(file.to_owned()))];
    let next = Next { command, flags, keeps_limits: true, why, ..Next::default() };
    (!Path::new(file).exists()).then_some(next)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{Limit, Promise, Run};

    fn limit(passed: bool, inside_spread: bool) -> Limit {
        Limit {
            metric: "host".to_owned(),
            limit_bytes: Some(1),
            actual_bytes: Some(1),
            limit_seconds: None,
            actual_seconds: None,
            passed,
            inside_spread,
            first_exceeded_at: None,
        }
    }

    fn verdict_of(promises: &[bool], limits: Vec<Limit>, strict_noise: bool) -> Verdict {
        let mut report = Report::new(CommandName::Run);
        let run = |kept: &bool| Run {
            promise: Some(Promise { limit_bytes: 1, growth_bytes: 2, kept: *kept }),
            ..Run::default()
        };
        report.runs = promises.iter().map(run).collect();
        report.limits = limits;
        verdict(&report, strict_noise)
    }

    #[test]
    fn a_broken_promise_fails_whatever_the_limits_say() {
        assert_eq!(verdict_of(&[true, true], vec![], false), Verdict::Pass);
        assert_eq!(verdict_of(&[true, false], vec![limit(true, false)], false), Verdict::Fail);
        assert_eq!(verdict_of(&[true, false], vec![limit(true, true)], true), Verdict::Fail);
    }

    #[test]
    fn noise_is_inconclusive_only_if_that_is_asked_for() {
        for (passed, inside_spread, relaxed, strict) in [
            (true, false, Verdict::Pass, Verdict::Pass),
            (true, true, Verdict::Pass, Verdict::Inconclusive),
            (false, true, Verdict::Fail, Verdict::Inconclusive),
            (false, false, Verdict::Fail, Verdict::Fail),
        ] {
            assert_eq!(verdict_of(&[], vec![limit(passed, inside_spread)], false), relaxed);
            assert_eq!(verdict_of(&[], vec![limit(passed, inside_spread)], true), strict);
        }
        let both = vec![limit(false, true), limit(false, false)];
        assert_eq!(verdict_of(&[], both, true), Verdict::Fail, "a clear failure outweighs noise");
    }
}
