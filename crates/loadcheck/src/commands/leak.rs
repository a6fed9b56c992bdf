//! `loadcheck leak`: load, use, unload, again and again; what each kind of memory grows by from
//! cycle to cycle.
//!
//! ```text
//! in one process:     worker: floor, (load, use, unload, measure itself) x N   --points-->  slopes -> verdict
//! --isolate, --cmd:   floor, (start, wait for its end, measure the machine) x N --points-->
//! --each-line:        start, (line, measure its processes) x N, stop            --points-->
//! --pid:              (wait, measure the processes) x N                         --points-->
//! ```

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use onelayer_probe::SLOPE_CONFIDENCE;
use rustix::process::{Pid, set_child_subreaper};

use crate::args::{LeakArgs, POINTS_MIN};
use crate::attached::{Attached, AttachedEvent};
use crate::config::{LoadConfig, bad_pattern};
use crate::entries::no_source;
use crate::exec::{Child, Ended, Event, LineWatch, end_descendants};
use crate::leak::{
    CyclePoint, Held, RemainingMemory, Stated, gaps_of, limits_of, settle_vram, slopes_of, stated,
};
use crate::measuring::promised_bytes;
use crate::numbers::seconds;
use crate::output::terminal::Terminal;
use crate::output::{Output, to_stderr};
use crate::problem::{Code, Problem};
use crate::progress::Progress;
use crate::report::{
    CommandName, CycledLoad, Gpu, Leak, LeakMode, Outcome as RunOutcome, Params, Report, Run, Source,
};
use crate::shell::{CommandTemplate, as_text};
use crate::signals::{Interrupts, exit_of, interrupted, name_of};
use crate::source::{self, Resolved};
use crate::worker::{Checked, CycleLoad, Stop, Task};

use super::group::own_group;
use super::run::{keep, verdict};
use super::worker_run::{Settled, measure, measure_in, prepare};
use super::{Outcome, new_report};

/// How long processes that end with their parent may take to be gone.
const AFTER_END: Duration = Duration::from_millis(20);

/// Shortest cycle of a process that runs already.
const EVERY_MIN: Duration = Duration::from_millis(10);

/// Looks for leaks.
pub(crate) fn run(args: &LeakArgs, output: &Output, terminal: &Terminal) -> Outcome {
    let mut report = new_report(CommandName::Leak);
    let mut problems = output.check();
    problems.extend(args.export.timeline.map(|_| {
        Problem::new(Code::Usage, "leak keeps what was held after each cycle, no timelines")
            .at("--timeline")
            .help("loadcheck run --timeline, for one load")
    }));
    let limits = stated(&args.max_slopes).map_err(|problem| problems.push(problem)).ok();
    let pattern = args.each_line.as_deref().map(regex::bytes::Regex::new).transpose();
    let pattern = pattern.map_err(|error| problems.push(bad_pattern("--each-line", &error))).ok().flatten();
    let sources = sources(args, &mut problems);
    let command = args.cmd.as_deref().map(|text| command(text, args.load.source.is_empty(), sources.first()));
    let command = command.transpose().map_err(|problem| problems.push(problem)).ok().flatten();
    problems.extend((args.every < EVERY_MIN).then(|| {
        Problem::new(Code::Usage, format!("a cycle takes {} ms at least", EVERY_MIN.as_millis()))
            .at("--every")
    }));
    let attached = args.pid.map(Attached::find).transpose();
    let attached = attached.map_err(|problem| problems.push(problem)).ok().flatten();
    let Ok(interrupts) = Interrupts::listen().map_err(|problem| problems.push(problem)) else {
        return Outcome::refused(report, problems);
    };
    report.leak = Some(Leak {
        mode: match (args.isolate, &args.cmd, &args.each_line) {
            _ if args.pid.is_some() => LeakMode::Times,
            (true, ..) => LeakMode::Isolated,
            (_, None, _) => LeakMode::Process,
            (_, Some(_), None) => LeakMode::Command,
            (_, Some(_), Some(_)) => LeakMode::Lines,
        },
        cycles: u64::from(args.cycles),
        warmup: u64::from(args.warmup),
        command: attached.map(Attached::command).or_else(|| command.as_deref().map(as_text)),
        cycle_seconds: args.pid.map(|_| args.every.as_secs_f64()),
        confidence: SLOPE_CONFIDENCE,
        ..Leak::default()
    });
    let mut session = Session {
        args,
        terminal,
        interrupts,
        report,
        loads: Vec::new(),
        params: None,
        points: Vec::new(),
        failures: Vec::new(),
        signal: None,
    };
    match session.prepare_all(&sources, &mut problems) {
        Ok(()) if problems.is_empty() => {}
        Ok(()) => return Outcome::refused(session.report, problems),
        Err(signal) => return Outcome::interrupted(session.report, problems, signal),
    }
    let Some(limits) = limits else { return Outcome::refused(session.report, problems) };
    match (attached, command, pattern) {
        (Some(process), ..) => session.by_times(process),
        (None, None, _) if args.isolate => session.isolated(),
        (None, None, _) => session.in_one_process(),
        (None, Some(words), None) => session.by_command(&words),
        (None, Some(words), Some(pattern)) => session.by_lines(&words, pattern),
    }
    session.conclude(&limits)
}

/// SOURCE and what is loaded after it.
fn sources(args: &LeakArgs, problems: &mut Vec<Problem>) -> Vec<Resolved> {
    let given = std::iter::once(&args.load.source).chain(&args.then);
    let resolved = given.map(|given| source::resolve_if_given(given));
    resolved.filter_map(|found| found.map_err(|more| problems.extend(more)).ok().flatten()).collect()
}

/// The words of `--cmd`.
fn command(text: &str, is_left_out: bool, source: Option<&Resolved>) -> Result<Vec<OsString>, Problem> {
    let template = CommandTemplate::parse(text)?;
    if template.names_strategy() {
        let problem = Problem::new(Code::Usage, "--cmd has {strategy}, and leak has none to put in");
        return Err(problem.help("loadcheck compare -s NAME compares strategies"));
    }
    if template.names_source() && is_left_out {
        return Err(no_source("--cmd has {source}"));
    }
    Ok(template.words(source.map_or(Path::new(""), |source| &source.path), None))
}

/// A `leak` in progress.
struct Session<'a> {
    args: &'a LeakArgs,
    terminal: &'a Terminal,
    interrupts: Interrupts,
    report: Report,
    /// The loads of a cycle; empty for a command.
    loads: Vec<CycleLoad>,
    /// The parameters of the first of them.
    params: Option<Params>,
    /// Memory before the first cycle and after each.
    points: Vec<CyclePoint>,
    failures: Vec<Problem>,
    signal: Option<i32>,
}

impl Session<'_> {
    /// Cycles, those to warm up included.
    fn count(&self) -> u32 {
        self.args.warmup + self.args.cycles
    }

    /// Decides on the device and reads the headers of everything that is loaded. A command loads
    /// what it loads: of its source only the path matters.
    ///
    /// # Errors
    /// A signal.
    fn prepare_all(&mut self, sources: &[Resolved], problems: &mut Vec<Problem>) -> Result<(), i32> {
        let (mut config, more) = LoadConfig::new(&self.args.load, PathBuf::new());
        problems.extend(more);
        let first = sources.first();
        if self.args.cmd.is_some() || sources.is_empty() {
            self.report.source = first.map(|source| source.named(Source::default()));
            return match prepare(&mut config, &mut self.report, &self.interrupts, false, None) {
                Err(Stop::Signal(signal)) => Err(signal),
                Err(Stop::Problems(more)) => {
                    problems.extend(more);
                    Ok(())
                }
                Ok(_) => Ok(()),
            };
        }
        for source in sources {
            for component in components(self.args) {
                let mut load =
                    LoadConfig { path: crate::config::RawPath(source.path.clone()), ..config.clone() };
                if let Some(name) = component {
                    load.select = Some(format!("^{}/", regex::escape(name)));
                }
                match prepare(&mut load, &mut self.report, &self.interrupts, true, None) {
                    Ok(checked) => self.take(load.clone(), &checked, source, component),
                    Err(Stop::Signal(signal)) => return Err(signal),
                    Err(Stop::Problems(more)) => {
                        let below = load.below_floor(&more);
                        let more = more.into_iter().map(|problem| named(problem, component)).chain(below);
                        more.for_each(|problem| {
                            if !problems.contains(&problem) {
                                problems.push(problem);
                            }
                        });
                    }
                }
                // Decided once.
                config.device = load.device;
            }
        }
        Ok(())
    }

    /// One more thing that each cycle loads.
    fn take(&mut self, mut load: LoadConfig, checked: &Checked, source: &Resolved, component: Option<&str>) {
        load.settle(&checked.budgets);
        let plan = &checked.plan;
        let resident_host_bytes = plan.resident_host_bytes.unwrap_or(0);
        let promised_bytes = promised_bytes(checked.budgets.host_bytes, resident_host_bytes);
        let name = match component {
            Some(component) => format!("{}: {component}", source.given),
            None => source.given.clone(),
        };
        let leak = self.report.leak.get_or_insert_default();
        leak.loads.push(CycledLoad {
            name,
            tensor_bytes: plan.tensor_bytes,
            resident_bytes: plan.resident_bytes,
            promised_bytes: Some(promised_bytes),
        });
        for note in &checked.notes {
            self.report.note(note.clone());
        }
        if self.loads.is_empty() {
            self.report.source = Some(source.named(checked.source.clone()));
            self.report.plan = Some(plan.clone());
            self.params = Some(plan.params.clone());
        }
        if !load.device.has_own_memory() {
            self.report.missing("slope.vram", "the load takes no device memory");
        }
        let (budgets, tensor_bytes) = (checked.budgets, plan.tensor_bytes);
        self.loads.push(CycleLoad { load, budgets, promised_bytes, tensor_bytes });
    }

    /// All cycles in one worker, which measures itself.
    fn in_one_process(&mut self) {
        let task = Task::Cycle { loads: self.loads.clone(), count: self.count() };
        let progress = Progress::start(self.terminal.progress, "");
        let named = ("stream", self.params.clone());
        let settled = measure(task, named, progress, &self.interrupts, &mut self.report);
        self.points.extend(&settled.points);
        self.settle(settled);
    }

    /// A worker for each cycle; what stays on the machine after its end.
    fn isolated(&mut self) {
        let remaining = self.remaining();
        self.points.push(CyclePoint { number: 0, held: remaining.after_end().0 });
        for number in 1..=self.count() {
            let task = Task::Cycle { loads: self.loads.clone(), count: 1 };
            let label = format!("cycle {number} of {}", self.count());
            let progress = Progress::start(self.terminal.progress, &label);
            let named = ("stream", self.params.clone());
            let settled =
                measure_in(remaining.group(), task, named, progress, &self.interrupts, &mut self.report);
            self.settle(settled);
            if self.is_over() {
                break;
            }
            self.points.push(CyclePoint { number: u64::from(number), held: remaining.after_end().0 });
        }
        self.give_up(remaining);
    }

    /// A run of the command for each cycle; what stays on the machine after its end.
    fn by_command(&mut self, words: &[OsString]) {
        let remaining = self.remaining();
        let (floor, before) = remaining.after_end();
        self.points.push(CyclePoint { number: 0, held: floor });
        for number in 1..=self.count() {
            let ended = self.run_once(words, &remaining);
            if !self.is_completed(number, ended) {
                break;
            }
            // Processes that end with the command may take a moment.
            std::thread::sleep(AFTER_END);
            let (held, left) = remaining.after_end();
            self.report.leak.get_or_insert_default().left_behind =
                Some(u64::try_from(left.saturating_sub(before)).unwrap_or(u64::MAX));
            self.points.push(CyclePoint { number: u64::from(number), held });
        }
        self.give_up(remaining);
    }

    fn run_once(&self, words: &[OsString], remaining: &RemainingMemory) -> Result<Ended, Problem> {
        let mut child = Child::start(words, None, true, false, remaining.group())?;
        let event = child.wait(&self.interrupts);
        Ok(child.end(event, &self.interrupts))
    }

    /// One run of the command; what its processes hold at each line that matches.
    fn by_lines(&mut self, words: &[OsString], pattern: regex::bytes::Regex) {
        let mut remaining = self.remaining();
        let started = Child::start(words, Some(LineWatch::each(pattern)), true, false, remaining.group());
        let mut child = match started {
            Ok(child) => child,
            Err(problem) => {
                self.failures.push(problem);
                return self.give_up(remaining);
            }
        };
        let mut number = 0;
        let mut listed = Vec::new();
        self.push_line(number, remaining.of_processes(), &mut listed);
        let event = loop {
            let event = child.wait(&self.interrupts);
            if !matches!(event, Event::LineSeen) {
                break event;
            }
            number += 1;
            self.push_line(number, remaining.of_processes(), &mut listed);
            if number >= self.count() {
                break event;
            }
        };
        let is_of_processes = settle_vram(&mut self.points, &listed, u64::from(self.args.warmup));
        remaining.note_whose_vram(is_of_processes, &mut self.report);
        let seconds = child.elapsed().as_secs_f64();
        let ended = child.end(event, &self.interrupts);
        self.report.runs.push(Run {
            strategy: "exec".to_owned(),
            outcome: outcome_of(&ended),
            seconds: Some(seconds),
            exit_code: ended.exit_code,
            signal: ended.signal,
            ..Run::default()
        });
        let was_stopped = ended.line_seen;
        if was_stopped {
            self.signal = ended.interrupted;
        } else if self.is_completed(number + 1, Ok(ended)) {
            let note = format!("the command ended by itself after {number} lines");
            self.report.note(note);
        }
        self.give_up(remaining);
    }

    /// A process that runs already; what it and its descendants hold after each span of time.
    fn by_times(&mut self, process: Attached) {
        let mut remaining = RemainingMemory::of_tree(process.pid(), self.first_gpu());
        self.note_remaining(&remaining);
        let mut listed = Vec::new();
        if !self.terminal.quiet {
            let all = self.args.every.saturating_mul(self.count());
            let (count, every) = (self.count(), seconds(self.args.every.as_secs_f64()));
            to_stderr(&format!("{count} cycles of {every}: {}", seconds(all.as_secs_f64())));
        }
        self.push_line(0, remaining.of_processes(), &mut listed);
        let start = Instant::now();
        for number in 1..=self.count() {
            let due = self.args.every.saturating_mul(number).saturating_sub(start.elapsed());
            match process.wait(&self.interrupts, Some(due)) {
                AttachedEvent::TimeUp => self.push_line(number, remaining.of_processes(), &mut listed),
                AttachedEvent::Ended => {
                    self.report.note(format!("the process ended after {} cycles", number - 1));
                    break;
                }
                AttachedEvent::Interrupted(signal) => {
                    self.signal = Some(signal);
                    break;
                }
            }
        }
        let is_of_processes = settle_vram(&mut self.points, &listed, u64::from(self.args.warmup));
        remaining.note_whose_vram(is_of_processes, &mut self.report);
        let seconds = Some(start.elapsed().as_secs_f64());
        let outcome = if self.signal.is_some() { RunOutcome::Interrupted } else { RunOutcome::Stopped };
        self.report.runs.push(Run { strategy: "exec".to_owned(), outcome, seconds, ..Run::default() });
    }

    /// Of a command that is gone already nothing can be measured. `listed` has as many entries as
    /// there are points.
    fn push_line(&mut self, number: u32, held: Option<(Held, Option<u64>)>, listed: &mut Vec<Option<u64>>) {
        if let Some((held, listed_bytes)) = held {
            self.points.push(CyclePoint { number: u64::from(number), held });
            listed.push(listed_bytes);
        }
    }

    /// Where what stays is looked for.
    fn remaining(&mut self) -> RemainingMemory {
        // Orphans become our children.
        let _ = set_child_subreaper(Pid::from_raw(1));
        let group = own_group(&self.interrupts, &mut self.report);
        let remaining = RemainingMemory::new(group, self.first_gpu());
        self.note_remaining(&remaining);
        remaining
    }

    /// The GPU whose memory is looked at.
    fn first_gpu(&self) -> Option<&Gpu> {
        self.report.host.as_ref()?.gpus.first()
    }

    /// Notes what is not measured, or not of the processes alone.
    fn note_remaining(&mut self, remaining: &RemainingMemory) {
        remaining.note(&mut self.report);
        let mode = self.report.leak.as_ref().map(|leak| leak.mode).unwrap_or_default();
        if !matches!(mode, LeakMode::Lines | LeakMode::Times) {
            remaining.note_whose_vram(false, &mut self.report);
            self.report.note(remaining.shared_note().to_owned());
            self.report.missing("slope.rss", "a process that has ended has no resident pages");
        }
        self.report.missing("slope.live", "only a load in one process has such a list");
    }

    /// Kills the processes that were left behind, and removes the group.
    fn give_up(&mut self, remaining: RemainingMemory) {
        end_descendants();
        drop(remaining);
        self.interrupts.forget_leftovers();
    }

    /// Takes in what became of a worker. Of several, the run that took most is kept.
    fn settle(&mut self, settled: Settled) {
        let Settled { run, problems, signal, .. } = settled;
        let run = Run { params: self.params.clone(), ..run };
        match self.report.runs.first_mut() {
            None => self.report.runs.push(run),
            Some(most) => {
                let seconds = most.seconds.zip(run.seconds).map(|(one, two)| one + two);
                let grew = |run: &Run| run.promise.as_ref().map(|promise| promise.growth_bytes);
                if run.outcome != RunOutcome::Completed || grew(&run) > grew(most) {
                    *most = run;
                }
                most.seconds = seconds;
            }
        }
        self.failures.extend(problems);
        self.signal = self.signal.or(signal);
    }

    fn is_over(&self) -> bool {
        self.signal.is_some() || !self.failures.is_empty()
    }

    /// True if the command came to its end and said that all is well.
    fn is_completed(&mut self, cycle: u32, ended: Result<Ended, Problem>) -> bool {
        let what = match ended {
            Err(problem) => {
                self.failures.push(problem);
                return false;
            }
            Ok(Ended { interrupted: Some(signal), .. }) => {
                self.signal = Some(signal);
                return false;
            }
            Ok(Ended { exit_code: Some(0), .. }) => return true,
            Ok(Ended { exit_code: Some(code), .. }) => format!("ended with exit code {code}"),
            Ok(Ended { signal: Some(signal), .. }) => format!("was killed by {}", name_of(signal)),
            Ok(_) => "ended in an unknown way".to_owned(),
        };
        let problem = Problem::new(Code::ChildFailed, format!("the command {what}"));
        self.failures.push(problem.at(format!("cycle {cycle}")));
        false
    }

    /// Slopes, limits, and how it ended.
    fn conclude(mut self, limits: &Stated) -> Outcome {
        let warmup = u64::from(self.args.warmup);
        let slopes = slopes_of(&self.points, warmup, limits);
        let gaps = gaps_of(&self.points, warmup);
        gaps.iter().for_each(|gap| gap.tell(&mut self.report));
        let counted = self.points.iter().filter(|point| point.number > warmup).count();
        let mut problems = std::mem::take(&mut self.failures);
        if problems.is_empty() && self.signal.is_none() {
            problems.extend(limits.unmeasured(&slopes, &gaps, &self.report.unavailable));
            problems.extend(too_few(counted, self.args));
        }
        self.report.limits = limits_of(&slopes);
        if let Some(leak) = &mut self.report.leak {
            leak.counted = u64::try_from(counted).unwrap_or(u64::MAX);
            leak.slopes = slopes;
        }
        self.report.verdict = verdict(&self.report, self.args.strict_noise);
        problems.extend(self.signal.map(interrupted));
        self.report.fail(problems);
        let next = keep("leak", "leak.json", "every point");
        Outcome { report: self.report, interrupted: self.signal.map(exit_of), next }
    }
}

/// The outcome of a command that was measured line by line.
fn outcome_of(ended: &Ended) -> RunOutcome {
    match ended {
        Ended { interrupted: Some(_), .. } => RunOutcome::Interrupted,
        Ended { line_seen: true, .. } => RunOutcome::Stopped,
        Ended { exit_code: Some(0), .. } => RunOutcome::Completed,
        Ended { signal: Some(_), .. } => RunOutcome::Killed,
        _ => RunOutcome::Failed,
    }
}

/// A verdict on fewer cycles than can have one is none.
fn too_few(counted: usize, args: &LeakArgs) -> Option<Problem> {
    let is_enough = u32::try_from(counted).is_ok_and(|counted| counted >= POINTS_MIN);
    (!is_enough).then(|| {
        let asked = args.cycles;
        let message = format!("{counted} of {asked} cycles were measured, and a slope needs {POINTS_MIN}");
        let problem = Problem::new(Code::CannotMeasure, message);
        if args.each_line.is_some() {
            problem
                .help("a program that writes to a pipe may hold lines back: try `python -u` or `stdbuf -oL`")
        } else {
            problem
        }
    })
}

/// Each component that is loaded by itself; `None` is everything.
fn components(args: &LeakArgs) -> Vec<Option<&str>> {
    if args.components.is_empty() {
        vec![None]
    } else {
        args.components.iter().map(|name| Some(name.as_str())).collect()
    }
}

/// A component that there is none of is not a pattern that matches nothing.
fn named(problem: Problem, component: Option<&str>) -> Problem {
    match component {
        Some(name) if problem.code == Code::NothingSelected => Problem {
            message: "the checkpoint has no such component, or no tensors in it".to_owned(),
            place: Some(format!("--component {name}")),
            help: Some(
                "`loadcheck inspect` shows the components: what comes before the first / of a layer"
                    .to_owned(),
            ),
            ..problem
        },
        _ => problem,
    }
}
