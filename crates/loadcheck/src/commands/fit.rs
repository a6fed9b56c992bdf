//! `loadcheck fit`: the smallest memory limit under which a load really works, found by running it
//! under limits.

use std::ffi::OsString;

use onelayer::units::HumanBytes;
use onelayer_probe::ChildGroup;
use rustix::process::{Pid, set_child_subreaper};

use crate::args::{Device, FitArgs, Next, name_of};
use crate::config::LoadConfig;
use crate::entries::{Commands, Entry, What, entries, no_source};
use crate::fit::{Loader, Session, emitted_lines, no_group};
use crate::machine;
use crate::output::Output;
use crate::output::print_fit_log;
use crate::output::terminal::Terminal;
use crate::problem::{Code, Problem};
use crate::report::{CommandName, Fit, Fitted, Report, Source, Verdict};
use crate::signals::Interrupts;
use crate::sizes::{Size, SizeContext};
use crate::source::{self, Resolved};
use crate::strategies::Strategy;
use crate::worker::Stop;

use super::worker_run::prepare;
use super::{Outcome, new_report};

/// Searches.
pub(crate) fn run(args: &FitArgs, output: &Output, terminal: &Terminal) -> Outcome {
    let mut report = new_report(CommandName::Fit);
    report.fit = Some(Fit {
        cache: Some(args.cache),
        runs: u64::from(args.runs),
        emit: args.emit.map(name_of),
        headroom_percent: args.emit.map(|_| args.headroom),
        ..Fit::default()
    });
    let mut problems = output.check();
    let resolved = source::resolve_if_given(&args.load.source).unwrap_or_else(|more| {
        problems.extend(more);
        None
    });
    let path = resolved.as_ref().map_or_else(|| (&args.load.source).into(), |found| found.path.clone());
    let (mut load, more) = LoadConfig::new(&args.load, path.clone());
    problems.extend(more);
    // Only our own loader, if nothing is named.
    let usual: &[Strategy] = if args.cmd.is_empty() { &[Strategy::Stream] } else { &[] };
    let entries = entries(&args.strategies, usual, Commands { templates: &args.cmd, names: &[] }, &path)
        .unwrap_or_else(|more| {
            problems.extend(more);
            Vec::new()
        });
    problems.extend(refusals(args, &entries));
    problems.extend(ChildGroup::create(Some(1 << 30)).err().map(|error| no_group(&error)));
    let Ok(interrupts) = Interrupts::listen().map_err(|problem| problems.push(problem)) else {
        return Outcome::refused(report, problems);
    };
    let mut context = SizeContext { limit_bytes: machine::memory_limit_bytes(), ..SizeContext::default() };
    if let Some(resolved) = &resolved {
        report.source = Some(resolved.named(Source::default()));
        // A command may load what is no checkpoint of ours.
        let has =
            |wanted: fn(&What) -> bool| entries.is_empty() || entries.iter().any(|entry| wanted(&entry.what));
        if has(|what| matches!(what, What::Strategy(_))) {
            let has_stream = has(|what| *what == What::Strategy(Strategy::Stream));
            match look(&mut load, has_stream, resolved, &interrupts, &mut report) {
                Ok(known) => context = known,
                Err(Stop::Problems(more)) => problems.extend(more),
                Err(Stop::Signal(signal)) => return Outcome::interrupted(report, problems, signal),
            }
        }
    }
    let range = range(args, &context).unwrap_or_else(|more| {
        problems.extend(more);
        (None, None)
    });
    if !problems.is_empty() {
        return Outcome::refused(report, problems);
    }
    let session = Session {
        terminal,
        interrupts: &interrupts,
        source: path,
        context,
        cache: args.cache,
        lo: range.0,
        hi: range.1,
        ceiling_bytes: context.limit_bytes.unwrap_or(u64::MAX / 2),
        precision: args.precision,
        runs: args.runs,
        max_slowdown: args.max_slowdown,
    };
    search_all(args, &session, &load, entries, report, output)
}

/// What cannot be asked for together.
fn refusals(args: &FitArgs, entries: &[Entry]) -> impl Iterator<Item = Problem> {
    let is_ours = |entry: &Entry| matches!(entry.what, What::Strategy(_));
    let no_source = (args.load.source.is_empty() && entries.iter().any(is_ours))
        .then(|| no_source("a strategy of loadcheck's loads a checkpoint"));
    let timeline = args.export.timeline.map(|_| {
        Problem::new(Code::Usage, "fit keeps what each run came to, no timelines")
            .at("--timeline")
            .help("loadcheck run --timeline, inside the limit that was found")
    });
    no_source.into_iter().chain(timeline)
}

/// Searches for one loader after the other.
fn search_all(
    args: &FitArgs,
    session: &Session<'_>,
    load: &LoadConfig,
    entries: Vec<Entry>,
    mut report: Report,
    output: &Output,
) -> Outcome {
    let mut stop = None;
    for entry in entries {
        let (loader, mut fitted) = begin(entry, load);
        let ended = session.search(&loader, &mut fitted);
        report.fit.get_or_insert_default().loaders.push(fitted);
        if let Err(early) = ended {
            stop = Some(early);
            break;
        }
    }
    let params = report.plan.as_ref().map(|plan| plan.params.clone());
    let has_command = report.fit.iter().flat_map(|fit| &fit.loaders).any(|fitted| fitted.command.is_some());
    if has_command {
        report.notes.push(
            "pages of programs and libraries that somebody else has read before are charged to nobody who is tried here; in a \
             container they may be, and can be taken back"
                .to_owned(),
        );
    }
    let fit = report.fit.get_or_insert_default();
    if let Some(emit) = args.emit.filter(|_| stop.is_none()) {
        let ours = params.as_ref().map(|params| (params, load));
        let lines = fit.loaders.iter().flat_map(|fitted| emitted_lines(emit, fitted, args.headroom, ours));
        fit.emitted = lines.collect();
    }
    if fit.loaders.iter().any(|fitted| fitted.smallest_bytes.is_none()) {
        report.verdict = Verdict::Fail;
    }
    if args.emit.is_some() && !output.format.is_machine() {
        // On stdout there are only the lines.
        print_fit_log(&report, session.terminal);
    }
    if let Some(stop) = stop {
        return Outcome::stopped(report, Vec::new(), stop);
    }
    let flags = vec![("emit", Some("k8s".to_owned()))];
    let next = Next { command: "fit", flags, why: "ready lines", ..Next::default() };
    let next = args.emit.is_none().then_some(next);
    Outcome { report, interrupted: None, next }
}

/// A loader that can be started, and its empty page of the report.
fn begin(entry: Entry, load: &LoadConfig) -> (Loader, Fitted) {
    let fitted = Fitted { strategy: entry.name, ..Fitted::default() };
    match entry.what {
        What::Strategy(strategy) => (Loader::Ours { load: Box::new(load.clone()), strategy }, fitted),
        What::Command(words) => {
            // Orphans of the command come to us, so that they can be stopped with it.
            let _ = set_child_subreaper(Pid::from_raw(1));
            let text = |word: &OsString| word.to_string_lossy().into_owned();
            let command = Some(words.iter().map(text).collect());
            (Loader::Command(words), Fitted { command, ..fitted })
        }
    }
}

/// The limits that were stated, in bytes.
fn range(args: &FitArgs, context: &SizeContext) -> Result<(Option<u64>, Option<u64>), Vec<Problem>> {
    let mut problems = Vec::new();
    let mut resolve = |flag: &str, size: Option<Size>| {
        let size = size?;
        match context.resolve(flag, size) {
            Ok(0) => problems
                .push(Problem::new(Code::Usage, "a limit is more than 0").at(format!("{flag} {size}"))),
            Ok(bytes) => return Some(bytes),
            Err(problem) => problems.push(problem),
        }
        None
    };
    let (lo, hi) = (resolve("--lo", args.lo), resolve("--hi", args.hi));
    if let (Some(lo), Some(hi)) = (lo, hi)
        && lo > hi
    {
        let (lo, hi) = (HumanBytes(lo), HumanBytes(hi));
        problems.push(Problem::new(Code::Usage, format!("--lo {lo} is more than --hi {hi}")));
    }
    if let (Some(lo), Some(here)) = (lo, context.limit_bytes)
        && lo > here
    {
        let (lo, here) = (HumanBytes(lo), HumanBytes(here));
        let message = format!("--lo {lo} is more than the {here} that there are here");
        problems.push(Problem::new(Code::CannotBeMet, message));
    }
    if problems.is_empty() { Ok((lo, hi)) } else { Err(problems) }
}

/// Device and headers, as `run` looks at them.
fn look(
    load: &mut LoadConfig,
    has_stream: bool,
    resolved: &Resolved,
    interrupts: &Interrupts,
    report: &mut Report,
) -> Result<SizeContext, Stop> {
    // Only our own way needs a device.
    let mut headers = LoadConfig { device: Device::None, ..load.clone() };
    let checked = prepare(if has_stream { load } else { &mut headers }, report, interrupts, true, None)?;
    report.source = Some(resolved.named(checked.source));
    report.plan = has_stream.then_some(checked.plan);
    report.notes.extend(checked.notes);
    Ok(checked.context)
}
