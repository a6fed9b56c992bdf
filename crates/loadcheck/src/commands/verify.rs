//! `loadcheck verify`: a checkpoint against its manifest, and against what it was made of.

use std::path::PathBuf;
use std::time::Instant;

use onelayer::convert::{ConvertEvent, Verification};

use crate::args::{Next, VerifyArgs};
use crate::config::Opening;
use crate::convert::blobs;
use crate::convert::interruptible::{Ended, OnSignal, run_interruptible};
use crate::convert::observer::Observer;
use crate::convert::translate::{self, Stage};
use crate::output::Output;
use crate::output::terminal::Terminal;
use crate::problem::{Code, Problem};
use crate::report::{CommandName, Report, Source};
use crate::signals::Interrupts;
use crate::source::{self, Resolved};

use super::convert::{compared, difference_problem};
use super::{Outcome, new_report};

/// Checks.
pub(crate) fn run(args: &VerifyArgs, output: &Output, terminal: &Terminal) -> Outcome {
    let mut report = new_report(CommandName::Verify);
    let mut problems = output.check();
    let mut resolved =
        |given: &std::ffi::OsStr| source::resolve(given).map_err(|more| problems.extend(more)).ok();
    let directory = resolved(&args.directory);
    let against = args.against.as_deref().map(&mut resolved);
    let interrupts = Interrupts::listen().map_err(|problem| problems.push(problem)).ok();
    let (Some(directory), Some(interrupts), true) = (directory, interrupts, problems.is_empty()) else {
        return Outcome::refused(report, problems);
    };
    let against = against.flatten();
    report.source = Some(directory.named(Source::default()));
    let (prefix, hf_names) = (args.prefix.clone(), args.names.is_some());
    let opening = Opening { prefix, hf_names, ..Opening::default() };
    let verification = Verification::default().open_options(opening.options());
    let mut outcome = verify(report, &directory, against.as_ref(), verification, &interrupts, terminal);
    let is_unchecked = outcome.report.verification.as_ref().is_some_and(|found| found.bytes == 0);
    if args.require_hashes && is_unchecked && outcome.report.error.is_none() {
        let problem = Problem::new(Code::VerifyFailed, "there is no hash to check the weights by")
            .at(&directory.given)
            .help("--against SOURCE compares with another copy; `loadcheck convert` writes a manifest of hashes");
        outcome.report.fail(vec![problem]);
    }
    outcome
}

fn verify(
    mut report: Report,
    directory: &Resolved,
    against: Option<&Resolved>,
    verification: Verification,
    interrupts: &Interrupts,
    terminal: &Terminal,
) -> Outcome {
    let observer = Observer::new();
    observer.show(terminal.progress, 0);
    let listener = observer.clone();
    let (path, other): (PathBuf, Option<PathBuf>) =
        (directory.path.clone(), against.map(|against| against.path.clone()));
    let start = Instant::now();
    let done = run_interruptible(interrupts, OnSignal::Leave, move || {
        let mut observe = |event: &ConvertEvent<'_>| listener.hear(event);
        let found = verification.run(&path, other.as_deref(), &mut observe);
        let found = found.map_err(|error| translate::problems(&error, Stage::Running, None))?;
        Ok((found, blobs::verify(&path)))
    });
    let elapsed = start.elapsed();
    observer.finish();
    let found = match done {
        Ok(Ended::With(found, _)) => found,
        Ok(Ended::Left(signal)) => return Outcome::interrupted(report, Vec::new(), signal),
        Err(problem) => return Outcome::refused(report, vec![problem]),
    };
    match found {
        Ok((found, in_cache)) => {
            let mut verification =
                compared(directory.given.clone(), against.map(|against| against.given.clone()), &found);
            let in_cache_files = in_cache.files;
            verification.files += in_cache_files;
            verification.bytes += in_cache.bytes;
            verification.differences.extend(in_cache.differences);
            verification.seconds = Some(elapsed.as_secs_f64());
            // That there is no manifest matters where nothing else has hashes.
            let is_checked = in_cache_files > 0;
            let notes = found.notes.into_iter();
            report.notes.extend(
                notes.filter(|note| !is_checked || !note.starts_with("there is no onelayer.manifest")),
            );
            report.fail(difference_problem(&verification).into_iter().collect());
            report.verification = Some(verification);
            let flags = vec![("device", Some("none".to_owned()))];
            let next = Next { command: "run", flags, ..Next::default() };
            Outcome { next: Some(next), ..Outcome::of(report) }
        }
        Err(problems) => Outcome::refused(report, problems),
    }
}
