//! One file a command: configuration -> library call -> report. What they share is here.

pub(crate) mod compare;
pub(crate) mod convert;
pub(crate) mod describe;
pub(crate) mod doctor;
pub(crate) mod exec;
pub(crate) mod fit;
mod group;
pub(crate) mod leak;
mod place;
pub(crate) mod report;
pub(crate) mod run;
pub(crate) mod shell;
pub(crate) mod synth;
pub(crate) mod verify;
mod worker_run;

use crate::answers::answer;
use crate::args::{Given, Next};
use crate::exit::Exit;
use crate::machine;
use crate::output::terminal::{Role, Terminal};
use crate::output::{Output, print_problems, to_stderr};
use crate::problem::{Code, Problem};
use crate::report::{CommandName, Finding, Report, Verdict};
use crate::shell::shell_word;
use crate::signals::{self, interrupted};
use crate::worker::Stop;

/// How a command ended: its report, and the signal that interrupted it, if one did.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// The report to write.
    pub(crate) report: Report,
    /// The exit code of an interruption; else the report decides.
    pub(crate) interrupted: Option<Exit>,
    /// The next useful command, for people.
    pub(crate) next: Option<Next>,
}

impl Outcome {
    /// A command that ended by itself.
    pub(crate) fn of(report: Report) -> Self {
        Self { report, interrupted: None, next: None }
    }

    /// A command that could not begin.
    pub(crate) fn refused(mut report: Report, problems: Vec<Problem>) -> Self {
        report.fail(problems);
        Self::of(report)
    }

    /// A command that a signal ended, with what is known.
    pub(crate) fn interrupted(report: Report, mut problems: Vec<Problem>, signal: i32) -> Self {
        problems.push(interrupted(signal));
        Self { interrupted: Some(signals::exit_of(signal)), ..Self::refused(report, problems) }
    }

    /// A command that cannot go on, with what is known.
    pub(crate) fn stopped(report: Report, mut problems: Vec<Problem>, stop: Stop) -> Self {
        match stop {
            Stop::Signal(signal) => Self::interrupted(report, problems, signal),
            Stop::Problems(more) => {
                problems.extend(more);
                Self::refused(report, problems)
            }
        }
    }
}

/// A report of this command on this machine.
fn new_report(command: CommandName) -> Report {
    Report { host: Some(machine::host()), ..Report::new(command) }
}

/// Writes the report, prints the problems, and decides the exit code.
pub(crate) fn conclude(mut outcome: Outcome, output: &Output, terminal: &Terminal, given: &Given) -> Exit {
    let mut problems = outcome.report.errors.clone();
    outcome.report.answer = answer(&outcome.report);
    let failed_to_write = output.write(&outcome.report, terminal);
    // What was refused before anything was measured is not told twice.
    let was_refused = |failed: &&Problem| {
        let errors = &outcome.report.errors;
        errors.iter().any(|known| known.code == Code::OutputRefused && known.place == failed.place)
    };
    problems.extend(failed_to_write.iter().filter(|failed| !was_refused(failed)).cloned());
    print_problems(&problems, terminal.stderr_paint);
    // The report is out of sight: its answer is not.
    let answer = outcome.report.answer.as_ref().filter(|answer| answer.outcome != Finding::Error);
    if let Some(answer) = answer.filter(|_| output.is_file() && !terminal.quiet) {
        to_stderr(&answer.sentence);
    }
    if outcome.report.error.is_none() {
        outcome.report.fail(failed_to_write);
    }
    let exit = outcome.interrupted.unwrap_or_else(|| exit_of(&outcome.report));
    let hints = !terminal.quiet && !output.format.is_machine() && exit == Exit::Ok;
    if let Some(next) = outcome.next.filter(|_| hints) {
        let words =
            given.words(&next).iter().map(|word| shell_word(&word.to_string_lossy())).collect::<Vec<_>>();
        let why = if next.why.is_empty() { String::new() } else { format!("   ({})", next.why) };
        let line = format!("Next: {}{why}", words.join(" "));
        to_stderr(&terminal.stderr_paint.paint(Role::Dim, &line));
    }
    exit
}

fn exit_of(report: &Report) -> Exit {
    match (&report.error, report.verdict) {
        (Some(problem), _) => problem.code.exit(),
        (None, Verdict::Pass) => Exit::Ok,
        (None, Verdict::Fail) => Exit::LimitExceeded,
        (None, Verdict::Inconclusive) => Exit::Inconclusive,
        (None, Verdict::Error) => Exit::LoadFailed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_problem_decides() {
        let problems = vec![Problem::new(Code::BudgetTooSmall, "b"), Problem::new(Code::SourceInvalid, "s")];
        let outcome = Outcome::refused(Report::new(CommandName::Run), problems);
        assert_eq!(exit_of(&outcome.report), Exit::Source);
        assert_eq!(outcome.report.error.map(|problem| problem.code), Some(Code::SourceInvalid));
    }
}
