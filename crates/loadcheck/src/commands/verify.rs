//! `loadcheck verify`: a checkpoint against its manifest, and against what it was made of.

use std::path::PathBuf;
use std::time::Instant;

use onelayer::convert::{ConvertEvent, Verification};

use crate::args::{Next, VerifyArgs};
use crate::convert::interruptible::{Ended, OnSignal, run_interruptible};
use crate::convert::observer::Observer;
use crate::convert::translate::{self, Stage};
use crate::output::Output;
use crate::output::terminal::Terminal;
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
    verify(report, &directory, against.as_ref(), &interrupts, terminal)
}

fn verify(
    mut report: Report,
    directory: &Resolved,
    against: Option<&Resolved>,
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
        let found = Verification::default().run(&path, other.as_deref(), &mut observe);
        found.map_err(|error| translate::problems(&error, Stage::Running, None))
    });
    let elapsed = start.elapsed();
    observer.finish();
    let found = match done {
        Ok(Ended::With(found, _)) => found,
        Ok(Ended::Left(signal)) => return Outcome::interrupted(report, Vec::new(), signal),
        Err(problem) => return Outcome::refused(report, vec![problem]),
    };
    match found {
        Ok(found) => {
            let mut verification =
                compared(directory.given.clone(), against.map(|against| against.given.clone()), &found);
            verification.seconds = Some(elapsed.as_secs_f64());
            report.notes.extend(found.notes);
            report.fail(difference_problem(&verification).into_iter().collect());
            report.verification = Some(verification);
            let flags = vec![("device", Some("none".to_owned()))];
            let next = Next { command: "run", flags, ..Next::default() };
            Outcome { next: Some(next), ..Outcome::of(report) }
        }
        Err(problems) => Outcome::refused(report, problems),
    }
}
