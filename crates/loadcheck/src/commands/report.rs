//! `loadcheck report`: renders a saved report again, or says what changed between two. Measures
//! nothing, loads nothing.

use std::path::Path;

use serde::Deserialize;

use crate::answers::answer;
use crate::args::ReportArgs;
use crate::compare::changes;
use crate::exit::Exit;
use crate::output::terminal::Terminal;
use crate::output::{Output, json, print_problems, to_stdout};
use crate::problem::{Code, Problem, most_basic_first};
use crate::report::{CommandName, Report, SCHEMA};
use onelayer_system::small_file;

/// The most that is read: a report with the hashes of a million tensors has a quarter of it.
const FILE_BYTES_MAX: u64 = 512 << 20;

/// Renders. What the report says about its run is no failure of this command.
pub(crate) fn run(args: &ReportArgs, output: &Output, terminal: &Terminal) -> Exit {
    let mut problems = output.check();
    let rendered = match &args.later {
        Some(later) => both(&args.file, later, output),
        None => one(&args.file, output),
    };
    match rendered {
        Ok(report) if problems.is_empty() => problems = output.write(&report, terminal),
        Ok(_) => {}
        Err(problem) => problems.push(problem),
    }
    most_basic_first(&mut problems);
    let exit = problems.first().map_or(Exit::Ok, |problem| problem.code.exit());
    print_problems(&problems, terminal.stderr_paint);
    if !problems.is_empty() && output.owns_stdout() {
        let mut report = Report::new(CommandName::Unknown);
        report.fail(problems);
        let _ = to_stdout(&json(&report));
    }
    exit
}

/// The report of a file. One without an answer was written by an earlier version.
fn one(file: &Path, output: &Output) -> Result<Report, Problem> {
    let mut report = read(file)?;
    if let Some(problem) = refusal(&report, output) {
        return Err(problem.at(file.display().to_string()));
    }
    report.answer = report.answer.take().or_else(|| answer(&report));
    Ok(report)
}

/// What changed from one file to the other.
fn both(before: &Path, after: &Path, output: &Output) -> Result<Report, Problem> {
    let names = [before, after].map(|file| file.display().to_string());
    let mut report = changes(one(before, output)?, one(after, output)?, names)?;
    report.answer = answer(&report);
    Ok(report)
}

/// The part of a document that says what the rest is.
#[derive(Deserialize)]
struct Head {
    schema: String,
}

fn read(file: &Path) -> Result<Report, Problem> {
    let at = |problem: Problem| problem.at(file.display().to_string());
    let text = small_file::read(file, FILE_BYTES_MAX).map_err(|error| {
        let code = match &error {
            small_file::SmallFileError::Io(error) if error.kind() == std::io::ErrorKind::NotFound => {
                Code::SourceMissing
            }
            _ => Code::SourceUnreadable,
        };
        at(Problem::new(code, format!("cannot read the report: {error}")))
    })?;
    let no_report = |error: serde_json::Error| {
        at(Problem::new(Code::SourceInvalid, format!("not a report of loadcheck: {error}")))
            .help("a report is what --json or --export-json writes")
    };
    let head: Head = serde_json::from_slice(&text).map_err(no_report)?;
    if head.schema != SCHEMA {
        let message = format!("a report of the schema `{}`, and this version knows `{SCHEMA}`", head.schema);
        return Err(at(Problem::new(Code::SourceInvalid, message)));
    }
    serde_json::from_slice(&text).map_err(no_report)
}

/// Why this report cannot be rendered in the form that is wanted, if so.
fn refusal(report: &Report, output: &Output) -> Option<Problem> {
    let cannot = |message: String, help: &str| Some(Problem::new(Code::CannotBeMet, message).help(help));
    match report.command {
        CommandName::Plan | CommandName::Inspect => cannot(
            format!("reports of `{}` are not rendered again", report.command.name()),
            "they read headers only: run the command again",
        ),
        CommandName::Run | CommandName::Compare | CommandName::Exec | CommandName::Report => {
            let has_curve = report
                .runs
                .iter()
                .any(|run| run.samples.as_ref().is_some_and(|samples| !samples.rows.is_empty()));
            if !output.format.is_picture() || has_curve {
                return None;
            }
            cannot(
                "the report holds no memory over time".to_owned(),
                "measure again with --timeline MS, or with --export-html or --export-svg at once",
            )
        }
        _ if output.format.is_picture() => cannot(
            format!("there is no picture of a report of `{}`", report.command.name()),
            "-o FILE.md renders it as Markdown",
        ),
        _ => None,
    }
}
