//! `loadcheck convert`: rewrites a checkpoint, measures what that costs, and holds it against the
//! promise.
//!
//! ```text
//! baseline -- survey (headers) -- prepare -- run, or estimate for a dry run -- peaks -- report
//!             on a thread of its own, left alone     asked to end
//!             when a signal comes                    when a signal comes
//! ```

use onelayer_system::units::to_u64;
use std::path::{Path, PathBuf};

use onelayer::LoadPlan;
use onelayer::convert::{ConvertError, ConvertReport, PreparedConversion, WriteMode};

use crate::args::{ConvertArgs, Next};
use crate::config::below_floor;
use crate::convert::estimate::Forecast;
use crate::convert::interruptible::{Ended, OnSignal, run_interruptible};
use crate::convert::measurement::{Facts, Measurement};
use crate::convert::observer::{Heard, Observer};
use crate::convert::options::{Options, Settings};
use crate::convert::summary::summary;
use crate::convert::survey::Survey;
use crate::convert::translate::{self, Stage};
use crate::heap;
use crate::output::Output;
use crate::output::terminal::Terminal;
use crate::problem::{Code, Problem};
use crate::report::{
    CommandName, Convert, ConvertFile, ConvertMemory, Converted, Difference, Duplicate, Estimate, FileState,
    MemoryTerm, Outcome as RunOutcome, QuantisedTensor, ReadFallback, Report, SideFile, Verification,
};
use crate::signals::{Interrupts, exit_of, interrupted};
use crate::source::{self, Resolved};

use super::run::verdict;
use super::{Outcome, new_report};

/// Converts.
pub(crate) fn run(args: &ConvertArgs, output: &Output, terminal: &Terminal) -> Outcome {
    let report = new_report(CommandName::Convert);
    let mut problems = output.check();
    let (options, more) = Options::read(args);
    problems.extend(more);
    let resolved = source::resolve(&args.source).map_err(|more| problems.extend(more)).ok();
    let interrupts = Interrupts::listen().map_err(|problem| problems.push(problem)).ok();
    let (Some(resolved), Some(interrupts)) = (resolved, interrupts) else {
        problems.extend(below_floor(args.work.budget, &problems));
        return Outcome::refused(report, problems);
    };
    problems.extend(inside_source(&resolved.path, &args.target));
    let meter = match (!args.work.dry_run).then(Measurement::start).transpose() {
        Ok(meter) => meter,
        Err(problem) => {
            problems.push(problem);
            return Outcome::refused(report, problems);
        }
    };
    let session =
        Session { args, terminal, interrupts, resolved, observer: Observer::new(), meter, report, problems };
    session.carry_out(options)
}

/// That the target lies below the source, if it does: a source is not changed.
fn inside_source(source: &Path, target: &Path) -> Option<Problem> {
    let source = source.canonicalize().ok().filter(|source| source.is_dir())?;
    let target =
        if target.is_absolute() { target.to_owned() } else { std::env::current_dir().ok()?.join(target) };
    let nearest = target.ancestors().find_map(|folder| folder.canonicalize().ok())?;
    let is_below = nearest.starts_with(&source) && (nearest != source || !target.exists());
    is_below.then(|| {
        Problem::new(Code::TargetRefused, "the target lies inside the source, which is never changed")
            .at(target.display().to_string())
            .help("choose a directory beside it")
    })
}

/// A `convert` in progress.
struct Session<'a> {
    args: &'a ConvertArgs,
    terminal: &'a Terminal,
    interrupts: Interrupts,
    resolved: Resolved,
    observer: Observer,
    meter: Option<Measurement>,
    report: Report,
    problems: Vec<Problem>,
}

/// A conversion that can be run.
struct Ready {
    survey: Survey,
    settings: Settings,
    prepared: PreparedConversion,
    estimate: Option<(Estimate, Option<String>)>,
}

/// Everything known before anything is written.
struct Prepared {
    survey: Option<Survey>,
    ready: Result<Ready, Vec<Problem>>,
}

impl Session<'_> {
    fn carry_out(mut self, options: Options) -> Outcome {
        let (source, observer) = (self.resolved.path.clone(), self.observer.clone());
        // Headers are looked at even if something else is wrong already: all problems come in one go.
        let is_well = self.problems.is_empty();
        let done = run_interruptible(&self.interrupts, OnSignal::Leave, move || {
            prepare(&options, &source, &observer, is_well)
        });
        let prepared = match done {
            Ok(Ended::With(prepared, _)) => prepared,
            Ok(Ended::Left(signal)) => return self.interrupted(signal),
            Err(problem) => return self.refused(vec![problem]),
        };
        if let Some(survey) = &prepared.survey {
            self.note_source(survey);
        }
        match prepared.ready {
            Ok(ready) => self.go_on(ready),
            Err(more) => self.refused(more),
        }
    }

    /// It is planned; what is left is to do it, or to say how long that would take.
    fn go_on(mut self, ready: Ready) -> Outcome {
        let Ready { survey, settings, prepared, estimate } = ready;
        self.note_source(&survey);
        self.report.notes.extend(prepared.notes().iter().cloned());
        self.report.notes.extend(settings.notes());
        let mut convert = planned(self.args, &settings, &survey, &prepared);
        let short_bytes = convert.needed_bytes.saturating_sub(convert.free_bytes);
        if let Some((estimate, reason)) = estimate {
            if let Some(reason) = reason {
                self.report.missing("convert.estimate.seconds", &reason);
            }
            convert.estimate = Some(estimate);
            self.report.convert = Some(convert);
            if short_bytes > 0 {
                let problem = self.no_space();
                return self.refused(vec![problem]);
            }
            let next = Next { command: "convert", without: &["dry-run"], ..Next::default() };
            let next = Some(Next { why: "the same without --dry-run", ..next });
            return Outcome { next, ..Outcome::of(self.report) };
        }
        let budget_bytes = settings.params.budget_bytes;
        drop(settings);
        self.observer.show(self.terminal.progress, convert.part_files);
        self.report.convert = Some(convert);
        let (cancel, finish) = (prepared.cancel_handle(), self.args.work.finish);
        let ask = || {
            cancel.cancel();
            // A comparison changes nothing, and cannot be cancelled.
            !self.observer.is_verifying()
        };
        let done = run_interruptible(&self.interrupts, OnSignal::Ask(&ask), move || {
            let result = if finish { prepared.finish() } else { prepared.run() };
            result.map_err(Box::new)
        });
        match done {
            Ok(Ended::With(result, signal)) => self.conclude(result, signal, budget_bytes, &survey.shards),
            Ok(Ended::Left(signal)) => self.left(signal),
            Err(problem) => self.refused(vec![problem]),
        }
    }

    /// Puts what happened into the report, and judges it.
    fn conclude(
        mut self,
        result: Result<ConvertReport, Box<ConvertError>>,
        signal: Option<i32>,
        budget_bytes: u64,
        shards: &[PathBuf],
    ) -> Outcome {
        let heard = self.observer.finish();
        let converted = result.as_ref().ok();
        let outcome = match &result {
            Ok(_) => RunOutcome::Completed,
            Err(error) if translate::is_cancelled(error) => RunOutcome::Interrupted,
            Err(_) => RunOutcome::Failed,
        };
        let facts = Facts {
            outcome,
            elapsed: converted.map(|converted| converted.elapsed),
            read_bytes: converted.map(|converted| converted.read_bytes),
            budget_bytes: Some(budget_bytes),
        };
        if let Some(meter) = self.meter.take() {
            match meter.finish(facts, &mut self.report) {
                Ok(run) => self.report.runs.push(run),
                Err(problem) => self.problems.push(problem),
            }
        }
        if let Some(convert) = &mut self.report.convert {
            note_files(convert, &heard);
            convert.result = Some(match converted {
                Some(converted) => describe(converted, shards),
                None => so_far(&heard),
            });
        }
        match result {
            Ok(converted) => self.judge(converted),
            Err(error) if translate::is_cancelled(&error) => match signal {
                Some(signal) => self.interrupted(signal),
                None => self.refused(vec![Problem::new(Code::Interrupted, "the conversion was cancelled")]),
            },
            Err(error) => {
                let map_path = self.args.files.layers.as_deref();
                self.refused(translate::problems(&error, Stage::Running, map_path))
            }
        }
    }

    /// The comparison was not waited for.
    fn left(mut self, signal: i32) -> Outcome {
        let heard = self.observer.finish();
        if let Some(convert) = &mut self.report.convert {
            note_files(convert, &heard);
            convert.result = Some(so_far(&heard));
        }
        if heard.is_finished {
            self.report.notes.push("all is written; only the comparison was not finished".to_owned());
        }
        self.interrupted(signal)
    }

    fn judge(mut self, converted: ConvertReport) -> Outcome {
        for note in converted.notes {
            if !self.report.notes.contains(&note) {
                self.report.notes.push(note);
            }
        }
        if let Some(found) = converted.verification {
            let target = self.args.target.to_string_lossy().into_owned();
            let verification = compared(target, Some(self.resolved.given.clone()), &found);
            self.report.notes.extend(found.notes);
            self.problems.extend(difference_problem(&verification));
            self.report.verification = Some(verification);
        }
        self.report.verdict = verdict(&self.report, false);
        self.report.fail(self.problems);
        let target = self.args.target.to_string_lossy().into_owned();
        let next = match (converted.is_complete, self.args.work.verify) {
            (false, _) => Next {
                command: "convert",
                flags: vec![("finish", None)],
                without: &["part"],
                why: "once all parts are there",
                ..Next::default()
            },
            (true, true) => Next { command: "plan", places: vec![target], is_bare: true, ..Next::default() },
            (true, false) => Next {
                command: "verify",
                places: vec![target],
                flags: vec![("against", Some(self.resolved.given.clone()))],
                is_bare: true,
                ..Next::default()
            },
        };
        Outcome { report: self.report, interrupted: None, next: Some(next) }
    }

    fn note_source(&mut self, survey: &Survey) {
        let mut source = survey.source.clone();
        source.given = self.resolved.given.clone();
        source.resolved = Some(self.resolved.path.display().to_string());
        source.revision = self.resolved.revision.clone();
        self.report.source = Some(source);
    }

    fn no_space(&self) -> Problem {
        let Some(convert) = &self.report.convert else {
            return Problem::new(Code::NoSpace, "there is too little room");
        };
        let error = ConvertError::NoSpace {
            path: self.args.target.clone(),
            needed_bytes: convert.needed_bytes,
            free_bytes: convert.free_bytes,
        };
        let mut problems = translate::problems(&error, Stage::Preparing, None);
        problems.remove(0)
    }

    /// Ends with problems, with what is known.
    fn refused(mut self, more: Vec<Problem>) -> Outcome {
        self.problems.extend(more);
        self.problems.extend(below_floor(self.args.work.budget, &self.problems));
        self.report.fail(self.problems);
        Outcome::of(self.report)
    }

    /// Ends because of a signal.
    fn interrupted(mut self, signal: i32) -> Outcome {
        let problem = interrupted(signal).help("the same command continues after the finished files");
        self.problems.push(problem);
        self.report.fail(self.problems);
        Outcome { report: self.report, interrupted: Some(exit_of(signal)), next: None }
    }
}

/// Looks at the source and plans. Changes nothing; not `is_well`, it only looks.
fn prepare(options: &Options, source: &Path, observer: &Observer, is_well: bool) -> Prepared {
    let map_path = options.map_path();
    let (survey, checkpoint) = match Survey::open(source, &options.opening(), &options.map, map_path) {
        Ok(opened) => opened,
        Err(problems) => return Prepared { survey: None, ready: Err(problems) },
    };
    let settings = match options.settle(&survey, observer) {
        Ok(settings) if is_well => settings,
        settled => {
            return Prepared { survey: Some(survey), ready: Err(settled.err().unwrap_or_default()) };
        }
    };
    let for_estimate = options.args.work.dry_run.then_some(checkpoint);
    if for_estimate.is_none() {
        // What is opened next may take its place.
        heap::give_back();
    }
    let prepared = match settings.conversion.clone().prepare(source, &options.args.target) {
        Ok(prepared) => prepared,
        Err(error) => {
            let problems = translate::problems(&error, Stage::Preparing, map_path);
            return Prepared { survey: Some(survey), ready: Err(problems) };
        }
    };
    let estimate = for_estimate.map(|checkpoint| {
        let forecast = Forecast {
            checkpoint: &checkpoint,
            budget_bytes: settings.params.budget_bytes,
            target: &options.args.target,
            read_bytes: prepared.plan().map_or(0, LoadPlan::aligned_read_bytes),
            write_bytes: prepared.needed_bytes(),
            files: files_to_write(&prepared),
            free_bytes: prepared.free_bytes(),
        };
        forecast.measure()
    });
    Prepared { survey: None, ready: Ok(Ready { survey, settings, prepared, estimate }) }
}

/// How many files are left for this run.
fn files_to_write(prepared: &PreparedConversion) -> u64 {
    let files = prepared.files();
    let left = prepared.own_files().into_iter().filter(|&index| !files[index].is_done);
    u64::try_from(left.count()).unwrap_or(u64::MAX)
}

/// The plan of the conversion, as a report has it.
fn planned(
    args: &ConvertArgs,
    settings: &Settings,
    survey: &Survey,
    prepared: &PreparedConversion,
) -> Convert {
    let files: Vec<ConvertFile> = prepared
        .files()
        .into_iter()
        .map(|file| ConvertFile {
            name: file.name,
            bytes: file.file_bytes,
            tensors: file.tensors,
            layers: file.layers,
            state: if file.is_done { FileState::Kept } else { FileState::Planned },
        })
        .collect();
    let side_files = prepared.side_files().into_iter().map(|(name, bytes)| SideFile { name, bytes });
    let duplicates = prepared.duplicates().into_iter().map(|(name, same_as)| Duplicate { name, same_as });
    Convert {
        target: args.target.to_string_lossy().into_owned(),
        dry_run: args.work.dry_run,
        finish: args.work.finish,
        part: args.work.part.map(|part| part.to_string()),
        params: settings.params.clone(),
        summary: summary(&files, &|layer| survey.stack_of(layer)),
        files,
        part_files: to_u64(prepared.own_files().len()),
        side_files: side_files.collect(),
        describes_quantisation: prepared.describes_quantisation(),
        duplicates: duplicates.collect(),
        needed_bytes: prepared.needed_bytes(),
        free_bytes: prepared.free_bytes(),
        memory: prepared.plan().map(memory),
        estimate: None,
        result: None,
    }
}

fn memory(plan: &LoadPlan) -> ConvertMemory {
    let terms = plan.memory();
    let ring = terms.ring();
    let term = |name: &str, bytes| MemoryTerm { name: name.to_owned(), bytes };
    ConvertMemory {
        source: "derived".to_owned(),
        terms: terms.terms().iter().map(|part| term(part.kind.name(), part.bytes)).collect(),
        host_bytes: terms.budgeted_bytes(),
        smallest_budget_bytes: terms.smallest_budget_bytes(),
        slots: u64::from(ring.slots),
        slot_bytes: ring.slot_bytes,
        readers: u64::from(ring.readers),
        read_bytes: plan.aligned_read_bytes(),
    }
}

/// Which files are there by now.
fn note_files(convert: &mut Convert, heard: &Heard) {
    for file in &mut convert.files {
        if let Some(state) = heard.files.get(&file.name) {
            file.state = *state;
        }
    }
}

/// The result of a conversion that completed.
fn describe(converted: &ConvertReport, shards: &[PathBuf]) -> Converted {
    let (write_mode, write_mode_reason) = match &converted.write_mode {
        Some(WriteMode::Direct) => (Some("direct"), None),
        Some(WriteMode::DropBehind { reason }) => (Some("drop_behind"), Some(reason.clone())),
        Some(_) => (Some("other"), None),
        None => (None, None),
    };
    let fallback = |fallback: &onelayer::source::Fallback| ReadFallback {
        file: shards
            .get(fallback.shard.index())
            .map_or_else(|| fallback.shard.index().to_string(), |path| path.display().to_string()),
        from: fallback.from.to_string(),
        to: fallback.to.to_string(),
        reason: fallback.reason.clone(),
    };
    Converted {
        complete: converted.is_complete,
        files_written: converted.files_written,
        files_kept: converted.files_kept,
        side_files: converted.side_files,
        written_bytes: converted.written_bytes,
        read_bytes: Some(converted.read_bytes),
        seconds: Some(converted.elapsed.as_secs_f64()),
        write_mode: write_mode.map(str::to_owned),
        write_mode_reason,
        cloned_bytes: converted.kernel_copied.cloned_bytes,
        kernel_copied_bytes: converted.kernel_copied.copied_bytes,
        kernel_copy_reason: converted.kernel_copied.fallback.clone(),
        read_fallbacks: converted.fallbacks.iter().map(fallback).collect(),
        quantised: (converted.quantisation.iter())
            .map(|(name, error)| QuantisedTensor::new(name, error))
            .collect(),
    }
}

/// The result so far of a conversion that ended early.
fn so_far(heard: &Heard) -> Converted {
    Converted {
        complete: heard.is_finished,
        files_written: heard.count(FileState::Written),
        files_kept: heard.count(FileState::Kept),
        side_files: heard.side_files,
        written_bytes: heard.written_bytes,
        ..Converted::default()
    }
}

/// A verification, as a report has it.
pub(super) fn compared(
    directory: String,
    against: Option<String>,
    found: &onelayer::convert::VerifyReport,
) -> Verification {
    let differences = found.differences.iter();
    Verification {
        directory,
        against,
        files: found.files,
        tensors: found.tensors,
        bytes: found.bytes,
        cast: found.cast,
        quantised: found.quantised,
        seconds: None,
        differences: differences
            .map(|found| Difference { place: found.place.clone(), what: found.what.clone() })
            .collect(),
    }
}

/// That something differs, if it does.
pub(super) fn difference_problem(verification: &Verification) -> Option<Problem> {
    let first = verification.differences.first()?;
    let message = match verification.differences.len() {
        1 => format!("{}: {}", first.place, first.what),
        many => format!("{many} differences, the first in {}: {}", first.place, first.what),
    };
    Some(Problem::new(Code::VerifyFailed, message).at(&verification.directory))
}
