//! `loadcheck compare`: several ways of loading one checkpoint, in interleaved rounds, each run in
//! a fresh process.
//!
//! ```text
//! for each round: for each row, another one first: page cache -> run, measured -> Run
//! all runs -> summary (compare/) -> report
//! ```
//!
//! A row that does not complete is not run again; the others go on. Being refused for want of
//! memory, or killed by the kernel for it, is a result; any other failure is a problem and decides
//! the exit code.

use std::path::Path;

use crate::args::{CacheArg, CompareArgs, Device, Next};
use crate::compare::{Facts, add_notes, cpu_note, order, summarise};
use crate::config::LoadConfig;
use crate::entries::{Commands, Entry, What, entries};
use crate::exec;
use crate::output::Output;
use crate::output::terminal::Terminal;
use crate::problem::{Code, Problem};
use crate::progress::Progress;
use crate::report::{CacheState, CommandName, Outcome as RunOutcome, Report, Run};
use crate::signals::{Interrupts, name_of};
use crate::source::{self, Resolved};
use crate::strategies::{SimpleStrategy, Strategy};
use crate::worker::{Checked, MeasureTask, NOT_AS_ASKED, Stop, Task};

use super::exec::{Asked, Measured};
use super::run::verdict;
use super::worker_run::{Settled, measure, prepare};
use super::{Outcome, new_report};

/// The strategies that are compared by default.
const USUAL: [Strategy; 3] =
    [Strategy::Stream, Strategy::Simple(SimpleStrategy::Mmap), Strategy::Simple(SimpleStrategy::Read)];

/// Compares.
pub(crate) fn run(args: &CompareArgs, output: &Output, terminal: &Terminal) -> Outcome {
    let report = new_report(CommandName::Compare);
    let mut problems = output.check();
    let resolved = source::resolve(&args.load.source).map_err(|more| problems.extend(more)).ok();
    let path = resolved.as_ref().map_or_else(|| (&args.load.source).into(), |found| found.path.clone());
    let entries =
        entries(&args.strategies, &USUAL, Commands { templates: &args.commands, names: &args.names }, &path)
            .map_err(|more| problems.extend(more));
    let (config, more) = LoadConfig::new(&args.load, path);
    problems.extend(more);
    let Ok(interrupts) = Interrupts::listen().map_err(|problem| problems.push(problem)) else {
        return Outcome::refused(report, problems);
    };
    let entries = entries.unwrap_or_default();
    let headers = LoadConfig { device: Device::None, ..config.clone() };
    let is_over = vec![false; entries.len()];
    let mut session = Session {
        args,
        interval_ms: output.timeline_ms(args.export.timeline),
        terminal,
        config,
        headers,
        interrupts,
        report,
        entries,
        is_over,
        failures: Vec::new(),
    };
    // Headers are looked at even if something is wrong already: all problems come in one go.
    let prepared = session.prepare(resolved.is_some());
    let (checked, resolved) = match (prepared, resolved) {
        (Ok(checked), Some(resolved)) if problems.is_empty() => (checked, resolved),
        (Err(Stop::Signal(signal)), _) => return session.stopped(signal, None),
        (Err(Stop::Problems(more)), _) => {
            problems.extend(more);
            problems.extend(session.config.below_floor(&problems));
            return Outcome::refused(session.report, problems);
        }
        (Ok(_), _) => return Outcome::refused(session.report, problems),
    };
    session.note_source(&checked, &resolved);
    match session.measure_all(&checked) {
        Ok(()) => session.conclude(&checked),
        Err(Stop::Signal(signal)) => session.stopped(signal, Some(&checked)),
        Err(Stop::Problems(more)) => {
            session.failures.extend(more);
            session.conclude(&checked)
        }
    }
}

/// A `compare` in progress.
struct Session<'a> {
    args: &'a CompareArgs,
    /// Distance of the samples that are kept; `None` keeps none.
    interval_ms: Option<u64>,
    terminal: &'a Terminal,
    /// As it was asked for, the device decided: how `stream` loads.
    config: LoadConfig,
    /// The same without a device: to look at headers and page cache.
    headers: LoadConfig,
    interrupts: Interrupts,
    report: Report,
    entries: Vec<Entry>,
    /// The rows that did not complete, and are not run again.
    is_over: Vec<bool>,
    failures: Vec<Problem>,
}

impl Session<'_> {
    fn has_stream(&self) -> bool {
        self.entries.iter().any(|entry| entry.what == What::Strategy(Strategy::Stream))
    }

    /// Reads the headers, and decides on the device if `stream` needs one. What memory cannot hold
    /// is refused: that of `stream` is known here.
    fn prepare(&mut self, has_source: bool) -> Result<Checked, Stop> {
        if !self.has_stream() {
            return self.prepare_headers(has_source, None);
        }
        let prepared = prepare(&mut self.config, &mut self.report, &self.interrupts, has_source, None);
        match prepared {
            Ok(checked) => {
                self.config.settle(&checked.budgets);
                Ok(checked)
            }
            Err(Stop::Problems(problems))
                if !problems.is_empty()
                    && problems.iter().all(|problem| problem.code == Code::CannotBeMet)
                    && self.entries.len() > 1 =>
            {
                let checked = self.prepare_headers(has_source, None)?;
                let reason = problems.into_iter().next().map(|problem| problem.message);
                for index in 0..self.entries.len() {
                    if self.entries[index].what == What::Strategy(Strategy::Stream) {
                        let outcome = RunOutcome::Refused;
                        let run = Run { outcome, reason: reason.clone(), ..Run::default() };
                        self.push(index, 1, run);
                    }
                }
                Ok(checked)
            }
            Err(stop) => Err(stop),
        }
    }

    fn prepare_headers(&mut self, has_source: bool, cache: Option<CacheArg>) -> Result<Checked, Stop> {
        prepare(&mut self.headers, &mut self.report, &self.interrupts, has_source, cache)
    }

    fn note_source(&mut self, checked: &Checked, resolved: &Resolved) {
        self.report.source = Some(resolved.named(checked.source.clone()));
        let is_refused = self.report.runs.iter().any(|run| run.outcome == RunOutcome::Refused);
        self.report.plan = (self.has_stream() && !is_refused).then(|| checked.plan.clone());
        self.report.notes.extend(checked.notes.iter().cloned());
        if !self.config.device.has_own_memory() {
            self.report.missing("peak.vram_bytes", "the load takes no device memory");
        }
    }

    fn measure_all(&mut self, checked: &Checked) -> Result<(), Stop> {
        let (warmup, runs) = (self.args.warmup, self.args.runs);
        let warmups = (0..warmup).map(|number| (0, number, format!("warm-up {} of {warmup}", number + 1)));
        let counted = (0..runs).map(|number| (number + 1, number, format!("round {} of {runs}", number + 1)));
        for (round, number, label) in warmups.chain(counted) {
            for index in order(self.entries.len(), number) {
                if !self.is_over[index] {
                    self.measure_one(index, round, &label, checked)?;
                }
            }
        }
        Ok(())
    }

    /// One run of one row. A warm-up leaves no trace in the report unless it fails.
    fn measure_one(&mut self, index: usize, round: u32, label: &str, checked: &Checked) -> Result<(), Stop> {
        let cache = CacheState { asked: self.args.cache, cached_share: self.prepare_cache()? };
        let entry = self.entries[index].clone();
        let label = format!("{label}, {}", entry.name);
        let attempt = match &entry.what {
            What::Strategy(strategy) => self.by_worker(*strategy, &label, checked),
            What::Command(words) => self.by_command(words),
        };
        self.interrupts.forget_leftovers();
        let Attempt { mut run, problem, signal } = attempt;
        run.cache = cache;
        if let Some(problem) = problem {
            let place = match &problem.place {
                Some(place) => format!("{}: {place}", entry.name),
                None => entry.name.clone(),
            };
            self.failures.push(Problem { place: Some(place), ..problem });
        }
        if round > 0 || run.outcome != RunOutcome::Completed {
            self.push(index, round, run);
        }
        signal.map_or(Ok(()), |signal| Err(Stop::Signal(signal)))
    }

    fn push(&mut self, index: usize, round: u32, run: Run) {
        self.is_over[index] |= run.outcome != RunOutcome::Completed;
        let strategy = self.entries[index].name.clone();
        self.report.runs.push(Run { strategy, round: Some(u64::from(round)), ..run });
    }

    fn prepare_cache(&mut self) -> Result<Option<f64>, Stop> {
        if self.args.cache == CacheArg::Asis {
            return Ok(None);
        }
        let checked = self.prepare_headers(true, Some(self.args.cache))?;
        // Its row says how many runs did not begin as asked; here is what else there may be to say, once.
        for note in checked.notes.into_iter().filter(|note| !note.starts_with(NOT_AS_ASKED)) {
            self.report.note(note);
        }
        Ok(checked.cached_share)
    }

    /// A way of loading of this program's, in a worker.
    fn by_worker(&mut self, strategy: Strategy, label: &str, checked: &Checked) -> Attempt {
        let interval_ms = self.interval_ms;
        let load = self.config.clone();
        let task = match strategy {
            Strategy::Stream => Task::Measure(MeasureTask {
                load,
                budgets: checked.budgets,
                watches: Vec::new(),
                interval_ms,
            }),
            Strategy::Simple(strategy) => Task::MeasureSimple { load, strategy, refuses: true, interval_ms },
        };
        let params = (strategy == Strategy::Stream).then(|| checked.plan.params.clone());
        let progress = Progress::start(self.terminal.progress, label);
        let Settled { run, problems, signal, oom_kills, .. } =
            measure(task, ("", params), progress, &self.interrupts, &mut self.report);
        Attempt { run, problem: problems.into_iter().next(), signal }.judge(oom_kills)
    }

    /// Somebody else's command, its whole process tree.
    fn by_command(&mut self, words: &[std::ffi::OsString]) -> Attempt {
        let interval_ms = self.interval_ms;
        // Stdout carries data in every format, so the command's output goes to stderr.
        let asked =
            Asked { command: words, line: None, stdout_is_ours: true, reads_stdin: false, interval_ms };
        let measured = match Measured::take(asked, &self.interrupts, &mut self.report) {
            Ok(measured) => measured,
            Err(problem) => {
                return Attempt { run: Run::default(), problem: Some(problem), signal: None }.judge(None);
            }
        };
        // Processes that it left behind would disturb the next run.
        exec::end_descendants();
        measured.note_missing(&mut self.report);
        let ended = &measured.ended;
        let mut run = measured.run();
        (run.exit_code, run.signal) = (ended.exit_code, ended.signal);
        run.reason = match (ended.exit_code, ended.signal) {
            (Some(0), _) | (None, None) => None,
            (Some(code), _) => Some(format!("exit code {code}")),
            (None, Some(signal)) => Some(format!("by {}", name_of(signal))),
        };
        let signal = ended.interrupted;
        let problem = measured.failure().filter(|_| signal.is_none());
        Attempt { run, problem, signal }.judge(measured.oom_kills)
    }

    /// The rows, from all runs so far.
    fn sum_up(&mut self, checked: &Checked) {
        let tensor_bytes = Some(checked.plan.tensor_bytes);
        let facts = Facts {
            device: self.config.device,
            window: self.config.window,
            narrows: self.config.dtype.is_some(),
            tensor_bytes,
            cache: self.args.cache,
        };
        let mut rows = summarise(&self.entries, &self.report.runs, tensor_bytes);
        add_notes(&mut rows, &self.entries, &facts);
        self.report.notes.extend(cpu_note(&rows, &self.entries, &facts));
        let notes = &mut self.report.notes;
        if rows.iter().any(|row| row.command.is_some() && row.completed > 0) {
            notes.push("the time of a command is that of the whole program, its start included".to_owned());
            if self.config.select.is_some() {
                notes.push("--select does not apply to commands".to_owned());
            }
        }
        if self.config.device.has_own_memory() && rows.len() > 1 {
            notes.push(
                "only `stream` loads to the device; the others of ours end in memory of the host".to_owned(),
            );
        }
        self.report.comparison = rows;
    }

    /// Ends early, with what is known.
    fn stopped(mut self, signal: i32, checked: Option<&Checked>) -> Outcome {
        if let Some(checked) = checked {
            self.sum_up(checked);
        }
        Outcome::interrupted(self.report, self.failures, signal)
    }

    /// Sums up, and decides how it ended.
    fn conclude(mut self, checked: &Checked) -> Outcome {
        self.sum_up(checked);
        let rows = &self.report.comparison;
        let mut problems = self.failures;
        if problems.is_empty() && rows.iter().all(|row| row.completed == 0) {
            let is_killed = rows.iter().any(|row| row.outcome == RunOutcome::Killed);
            let code = if is_killed { Code::WorkerKilled } else { Code::CannotBeMet };
            problems.push(
                Problem::new(code, "memory holds none of the ways that were compared")
                    .help("--device none keeps nothing, --window 1 one layer at a time"),
            );
        }
        self.report.verdict = verdict(&self.report, false);
        self.report.fail(problems);
        let page = "compare.md";
        let flags = vec![("cache", Some("cold".to_owned())), ("export-markdown", Some(page.to_owned()))];
        let next = Next { command: "compare", flags, why: "for a page", ..Next::default() };
        let is_new = self.args.export.export_markdown.is_none() && !Path::new(page).exists();
        let next = is_new.then_some(next);
        Outcome { report: self.report, interrupted: None, next }
    }
}

/// A run that is over, and what is wrong with it.
struct Attempt {
    run: Run,
    problem: Option<Problem>,
    signal: Option<i32>,
}

impl Attempt {
    /// Sorts results from failures: what was refused for want of memory, or in whose group the
    /// kernel counted a process that it killed for it, is a result. (The parent of that
    /// process may well end by itself, with a code of its own.)
    fn judge(mut self, oom_kills: Option<u64>) -> Self {
        let Some(problem) = self.problem.take() else { return self };
        // Of a worker: `by SIGKILL before it could report`.
        let message = problem.message.strip_prefix("the worker was killed ").unwrap_or(&problem.message);
        let reason = self.run.reason.take().unwrap_or_else(|| message.to_owned());
        self.run.reason = Some(reason.clone());
        let was_under_way = matches!(self.run.outcome, RunOutcome::Killed | RunOutcome::Failed);
        if problem.code == Code::CannotBeMet {
            self.run.outcome = RunOutcome::Refused;
        } else if was_under_way && oom_kills > Some(0) {
            self.run.outcome = RunOutcome::Killed;
            self.run.reason = Some(match self.run.exit_code {
                Some(_) => format!("for want of memory, by the kernel ({reason})"),
                None => "for want of memory, by the kernel".to_owned(),
            });
        } else {
            self.problem = Some(problem);
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attempt(outcome: RunOutcome, code: Code) -> Attempt {
        let run = Run { outcome, ..Run::default() };
        Attempt { run, problem: Some(Problem::new(code, "why")), signal: None }
    }

    #[test]
    fn want_of_memory_is_a_result_and_nothing_else_is() {
        let refused = attempt(RunOutcome::Failed, Code::CannotBeMet).judge(None);
        assert_eq!((refused.run.outcome, refused.problem), (RunOutcome::Refused, None));
        assert_eq!(refused.run.reason.as_deref(), Some("why"));
        let killed = attempt(RunOutcome::Killed, Code::WorkerKilled).judge(Some(1));
        assert_eq!((killed.run.outcome, killed.problem), (RunOutcome::Killed, None));
        assert_eq!(killed.run.reason.as_deref(), Some("for want of memory, by the kernel"));
        for oom_kills in [None, Some(0)] {
            let killed = attempt(RunOutcome::Killed, Code::ChildFailed).judge(oom_kills);
            assert!(killed.problem.is_some(), "nobody knows who killed it");
        }
        let mut of_shell = attempt(RunOutcome::Failed, Code::ChildFailed);
        (of_shell.run.exit_code, of_shell.run.reason) = (Some(137), Some("exit code 137".to_owned()));
        let of_shell = of_shell.judge(Some(1));
        assert_eq!((of_shell.run.outcome, of_shell.problem), (RunOutcome::Killed, None));
        let reason = of_shell.run.reason.as_deref();
        assert_eq!(reason, Some("for want of memory, by the kernel (exit code 137)"));
        let failed = attempt(RunOutcome::Failed, Code::ChildFailed).judge(Some(0));
        assert!(failed.problem.is_some() && failed.run.reason.as_deref() == Some("why"));
    }
}
