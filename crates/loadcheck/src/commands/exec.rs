//! `loadcheck exec -- CMD`: measures the process tree of any command, and holds it against the same
//! limits.

use std::ffi::OsString;
use std::time::{Duration, Instant};

use onelayer_probe::{ChildGroup, Procfs, TreeOptions, TreeSampler, TreeSummary};

use rustix::process::{Pid, set_child_subreaper};

use crate::args::{ExecArgs, Gate, Metric};
use crate::attached::{Attached, AttachedEvent};
use crate::config::bad_pattern;
use crate::exec::{Child, Ended, LineWatch};
use crate::limits;
use crate::machine::{self, PressureCounters, note_missing_pressure};
use crate::measuring::TIMELINE_ROWS;
use crate::numbers::bytes as human_bytes;
use crate::output::Output;
use crate::problem::{Code, Problem};
use crate::report::{CommandName, Exec, Outcome as RunOutcome, Place, Point, Pressure, Report, Run, Samples};
use crate::shell::{as_text, shell_word};
use crate::signals::{Interrupts, exit_of, interrupted, name_of};
use crate::sizes::SizeContext;

use super::group::own_group;
use super::run::verdict;
use super::{Outcome, new_report};

/// Rows that are kept anyway, to find where a limit was first exceeded.
const TIMELINE_ROWS_MIN: usize = 1024;

/// Measures a command.
pub(crate) fn run(args: &ExecArgs, output: &Output) -> Outcome {
    let mut report = new_report(CommandName::Exec);
    report.exec = Some(Exec { command: as_text(&args.command), ..Exec::default() });
    let gates = args.limits.gates();
    let context = SizeContext { limit_bytes: machine::memory_limit_bytes(), ..SizeContext::default() };
    let mut problems = output.check();
    problems.extend(limits::unmeasurable(&gates, None));
    problems.extend(gates.iter().filter_map(|gate| limits::limit_bytes(gate, &context).err()));
    let line = match args.until_line.as_deref().map(regex::bytes::Regex::new).transpose() {
        Ok(line) => line,
        Err(error) => {
            problems.push(bad_pattern("--until-line", &error));
            None
        }
    };
    // clap does not ask for --pid where a command conflicts with it.
    problems.extend(args.time.filter(|_| args.pid.is_none()).map(|_| {
        Problem::new(Code::Usage, "a command is measured until it ends")
            .at("--for")
            .help("`timeout 30s COMMAND` ends a command, --until-line stops it at a line; --for is for --pid")
    }));
    if !problems.is_empty() {
        return Outcome::refused(report, problems);
    }
    if let Some(pid) = args.pid {
        return attach(args, pid, output, report, &gates, &context);
    }
    let asked = Asked {
        command: &args.command,
        line,
        stdout_is_ours: output.owns_stdout(),
        reads_stdin: true,
        interval_ms: output.timeline_ms(args.export.timeline),
    };
    let measured =
        Interrupts::listen().and_then(|interrupts| Measured::take(asked, &interrupts, &mut report));
    match measured {
        Ok(measured) => measured.judge(args, &gates, &context, report),
        Err(problem) => Outcome::refused(report, vec![problem]),
    }
}

/// Measures a process that runs already.
fn attach(
    args: &ExecArgs,
    pid: u32,
    output: &Output,
    mut report: Report,
    gates: &[Gate],
    context: &SizeContext,
) -> Outcome {
    let interval_ms = output.timeline_ms(args.export.timeline);
    let measured = Interrupts::listen().and_then(|interrupts| {
        let process = Attached::find(pid)?;
        report.exec = Some(Exec { command: process.command(), pid: Some(pid), ..Exec::default() });
        Measured::attach(process, args.time, interval_ms, &interrupts, &mut report)
    });
    match measured {
        Ok(measured) => measured.judge(args, gates, context, report),
        Err(problem) => Outcome::refused(report, vec![problem]),
    }
}

/// The options of a sampler that keeps enough rows for a timeline, if there is to be one.
fn sampling(interval_ms: Option<u64>) -> TreeOptions {
    let timeline_rows = if interval_ms.is_some() { TIMELINE_ROWS } else { TIMELINE_ROWS_MIN };
    let mut options = TreeOptions { timeline_rows, ..TreeOptions::default() };
    if let Some(interval_ms) = interval_ms {
        options.interval = Duration::from_millis(interval_ms);
    }
    options
}

/// That a limit stands behind the command, which got it: a gate that never closes. With `--` it is
/// clear whose flags they are.
fn passed_on(command: &[OsString]) -> Option<String> {
    let is_limit = |word: &&OsString| {
        word.to_str()
            .is_some_and(|word| word.starts_with("--max-") || word == "--limit" || word == "--strict-noise")
    };
    let limit = command.iter().skip(1).find(is_limit)?.to_string_lossy().into_owned();
    let is_marked = std::env::args_os().any(|word| word == "--");
    (!is_marked).then(|| {
        format!("{limit} stands behind the command and was passed to it: flags of loadcheck come before the command")
    })
}

/// `1 process`, `3 processes`.
fn count(processes: usize) -> String {
    if processes == 1 { "1 process".to_owned() } else { format!("{processes} processes") }
}

/// A command to measure.
pub(super) struct Asked<'a> {
    /// The program and its arguments.
    pub(super) command: &'a [OsString],
    /// Measuring ends, and the command with it, when a line like this is seen.
    pub(super) line: Option<regex::bytes::Regex>,
    /// Its output goes to stderr.
    pub(super) stdout_is_ours: bool,
    /// It has our stdin.
    pub(super) reads_stdin: bool,
    /// Distance of the samples; `None` is the default.
    pub(super) interval_ms: Option<u64>,
}

/// A command that has ended, and what it cost.
pub(super) struct Measured {
    /// How it ended.
    pub(super) ended: Ended,
    summary: Option<TreeSummary>,
    cgroup_bytes: Option<u64>,
    /// Processes that the kernel killed for want of memory; `None` without a count.
    pub(super) oom_kills: Option<u64>,
    seconds: f64,
    cpu_seconds: Option<f64>,
    pressure: Pressure,
    awaited_line: bool,
    keeps_timeline: bool,
}

impl Measured {
    /// Runs the command and measures it.
    ///
    /// # Errors
    /// [`Code::CannotStart`]; nothing was measured then.
    pub(super) fn take(
        asked: Asked<'_>,
        interrupts: &Interrupts,
        report: &mut Report,
    ) -> Result<Self, Problem> {
        // A group of its own gives the kernel's own peak and sees processes that live too short to be
        // sampled.
        let group = own_group(interrupts, report);
        // Processes orphaned before the sampler starts become our children too.
        let _ = set_child_subreaper(Pid::from_raw(1));
        let before = PressureCounters::now();
        let awaited_line = asked.line.is_some();
        let watch = asked.line.map(LineWatch::new);
        let myself = Procfs::default().myself();
        let waited_before = myself.waited_cpu_seconds();
        let mut child =
            Child::start(asked.command, watch, asked.stdout_is_ours, asked.reads_stdin, group.as_ref())?;
        let interval_ms = asked.interval_ms;
        let group_directory = group.as_ref().map(|group| group.directory().to_owned());
        let options = TreeOptions { adopt_orphans: true, group: group_directory, ..sampling(interval_ms) };
        let sampler = TreeSampler::start(child.pid(), &options)
            .map_err(|error| {
                for metric in ["host", "rss", "file", "anon"] {
                    report.missing(&format!("peak.{metric}_bytes"), &error.to_string());
                }
            })
            .ok();
        let event = child.wait(interrupts);
        let pressure = before.until_now();
        let seconds = child.elapsed().as_secs_f64();
        let summary = sampler.and_then(|sampler| sampler.finish().ok());
        let memory = group.as_ref().map(ChildGroup::memory);
        let ended = child.end(event, interrupts);
        let cpu_seconds =
            myself.waited_cpu_seconds().combine(waited_before, |now, then| (now - then).max(0.0));
        Ok(Self {
            ended,
            summary,
            cgroup_bytes: memory.and_then(|memory| memory.peak_bytes.value()),
            oom_kills: group.map(|group| group.memory()).and_then(|memory| memory.oom_kill_count.value()),
            seconds,
            cpu_seconds: cpu_seconds.value(),
            pressure,
            awaited_line,
            keeps_timeline: interval_ms.is_some(),
        })
    }

    /// Measures a process that runs already until it ends, the time is up, or a signal asks to stop.
    /// The last is the usual end: the limits decide about the exit code then too.
    ///
    /// # Errors
    /// [`Code::CannotMeasure`] if its memory cannot be read.
    fn attach(
        process: Attached,
        time: Option<Duration>,
        interval_ms: Option<u64>,
        interrupts: &Interrupts,
        report: &mut Report,
    ) -> Result<Self, Problem> {
        let before = PressureCounters::now();
        let start = Instant::now();
        let at_start = Procfs::default().process(process.pid()).memory();
        if let Some(bytes) = at_start.rss_peak_bytes.value() {
            let text = human_bytes(bytes);
            report.note(format!("its own RSS peak was {text} when measuring began, by the kernel's mark"));
        }
        let sampler = TreeSampler::start(process.pid(), &sampling(interval_ms)).map_err(|error| {
            Problem::new(Code::CannotMeasure, error.to_string()).at(format!("--pid {}", process.pid()))
        })?;
        let event = process.wait(interrupts, time);
        let (pressure, seconds) = (before.until_now(), start.elapsed().as_secs_f64());
        report.exec.get_or_insert_default().has_ended = Some(event == AttachedEvent::Ended);
        for metric in ["cgroup_bytes", "oom_kill_count"] {
            report.missing(&format!("peak.{metric}"), "the process was not started in a group of its own");
        }
        Ok(Self {
            ended: Ended { is_attached: true, ..Ended::default() },
            summary: sampler.finish().ok(),
            cgroup_bytes: None,
            oom_kills: None,
            seconds,
            cpu_seconds: None,
            pressure,
            awaited_line: false,
            keeps_timeline: interval_ms.is_some(),
        })
    }

    fn judge(self, args: &ExecArgs, gates: &[Gate], context: &SizeContext, mut report: Report) -> Outcome {
        let run = self.run();
        self.note_missing(&mut report);
        if let Some(exec) = &mut report.exec {
            exec.exit_code = self.ended.exit_code;
            exec.signal = self.ended.signal;
            exec.oom_kills =
                self.oom_kills.filter(|_| self.ended.signal.is_some() || self.ended.exit_code != Some(0));
            exec.line_seen = self.awaited_line.then_some(self.ended.line_seen);
            exec.processes = self.summary.as_ref().map(|summary| u64::from(summary.process_count_peak));
        }
        report.notes.extend(passed_on(&args.command));
        if self.ended.left_behind > 0 {
            report.notes.push(format!("{} of the command still run", count(self.ended.left_behind)));
        }
        report.runs = vec![run];
        let first_exceeded = |metric: Metric, limit_bytes: u64| self.first_exceeded(metric, limit_bytes);
        let (limits, mut problems) =
            limits::judge(gates, &report.runs, context, &report.unavailable, &first_exceeded);
        report.limits = limits;
        report.verdict = verdict(&report, args.limits.strict_noise);
        let failure = self.failure().map(|problem| match self.oom_kills {
            Some(1..) => {
                let words: Vec<String> =
                    args.command.iter().map(|word| shell_word(&word.to_string_lossy())).collect();
                let template = shell_word(&words.join(" "));
                problem.help(format!(
                    "memory ran out: the peak above is what the limit allowed, not what the command needs; \
                     `loadcheck fit --cmd {template}` finds that"
                ))
            }
            _ => problem,
        });
        problems.extend(failure);
        report.fail(problems);
        Outcome { report, interrupted: self.ended.interrupted.map(exit_of), next: None }
    }

    /// Notes metrics that could not be measured.
    pub(super) fn note_missing(&self, report: &mut Report) {
        for entry in self.summary.iter().flat_map(|summary| &summary.unavailable) {
            report.missing(&entry.metric, &entry.reason);
        }
        report.missing("peak.pinned_bytes", "only the driver knows what another program has pinned");
        report.missing("peak.vram_bytes", "no device memory is measured by this version");
        note_missing_pressure(&self.pressure, report);
        report.missing("io", "what a process tree reads is not counted by this version");
    }

    /// The run, as a report has it.
    pub(super) fn run(&self) -> Run {
        let outcome = match &self.ended {
            ended if ended.interrupted.is_some() => RunOutcome::Interrupted,
            ended if ended.line_seen || ended.is_attached => RunOutcome::Stopped,
            ended if ended.signal.is_some() => RunOutcome::Killed,
            ended if ended.exit_code == Some(0) => RunOutcome::Completed,
            _ => RunOutcome::Failed,
        };
        let mut run = Run {
            strategy: "exec".to_owned(),
            outcome,
            seconds: Some(self.seconds),
            cpu_seconds: self.cpu_seconds,
            baseline: Point::default(),
            pressure: self.pressure.clone(),
            ..Run::default()
        };
        run.peak.cgroup_bytes = self.cgroup_bytes;
        let Some(summary) = &self.summary else { return run };
        let (host, rss) = (summary.host.value(), summary.rss.value());
        run.peak.host_bytes = host.map(|peak| peak.bytes);
        run.peak.rss_bytes = rss.map(|peak| peak.bytes);
        run.peak.anon_bytes = summary.anon_sum.value().map(|peak| peak.bytes);
        run.peak.file_bytes = summary.file_sum.value().map(|peak| peak.bytes);
        run.peak.at = host.map(|peak| Place { seconds: peak.seconds, ..Place::default() });
        run.peak.rss_at = rss.map(|peak| Place { seconds: peak.seconds, ..Place::default() });
        run.samples = Some(Samples::new(summary.interval_ms, &summary.timeline, self.keeps_timeline));
        run
    }

    /// When a limit was first exceeded: the first sample over it, or else the peak.
    fn first_exceeded(&self, metric: Metric, limit_bytes: u64) -> Option<Place> {
        let summary = self.summary.as_ref()?;
        let sample = summary.timeline.rows().find(|row| {
            let value = match metric {
                Metric::Host => row.host_bytes,
                Metric::Rss => row.rss_bytes,
                Metric::File => row.file_bytes,
                _ => None,
            };
            value > Some(limit_bytes)
        });
        let peak = match metric {
            Metric::Host => summary.host.value(),
            Metric::Rss => summary.rss.value(),
            Metric::File => summary.file_sum.value(),
            _ => None,
        };
        let seconds =
            sample.map(|row| row.elapsed.as_secs_f64()).or_else(|| peak.map(|peak| peak.seconds))?;
        Some(Place { seconds, ..Place::default() })
    }

    /// Why the command counts as failed, if it does.
    pub(super) fn failure(&self) -> Option<Problem> {
        let failed = |message: String| Problem::new(Code::ChildFailed, message);
        match &self.ended {
            Ended { interrupted: Some(signal), .. } => Some(interrupted(*signal)),
            Ended { line_seen: true, .. } | Ended { is_attached: true, .. } => None,
            Ended { signal: Some(signal), .. } => {
                let problem = failed(format!("the command was killed by {}", name_of(*signal)));
                Some(if self.oom_kills > Some(0) {
                    problem.help("the kernel's out-of-memory killer ended it: the memory limit of its container was reached")
                } else {
                    problem
                })
            }
            Ended { exit_code: Some(code), .. } if *code != 0 => {
                Some(failed(format!("the command ended with exit code {code}")))
            }
            _ if self.awaited_line => {
                Some(failed("the command ended before a line matched --until-line".to_owned()).help(
                    "a program that writes to a pipe may hold lines back: try `python -u` or `stdbuf -oL`",
                ))
            }
            _ => None,
        }
    }
}
