//! Workflow commands for GitHub Actions, which become annotations of a step. The job summary is
//! Markdown.

use super::document::Document;
use super::terminal::Paint;
use super::{escape::escape, facts, text};
use crate::numbers::bytes;
use crate::problem::Problem;
use crate::report::{CommandName, Report, metric_name};

/// Failures as annotations. `document` is printed for commands whose result is a table.
pub(super) fn draw(report: &Report, document: &Document) -> String {
    let mut lines = String::new();
    for limit in &report.limits {
        let line = facts::limit(limit).plain();
        lines.push_str(&match limit.passed {
            true => format!("{}\n", escape(&line)),
            false => error(&format!(": {} over its limit", metric_name(&limit.metric)), &line),
        });
    }
    for promise in report.runs.iter().filter_map(|run| run.promise.as_ref()).filter(|promise| !promise.kept) {
        let (grown, most) = (bytes(promise.growth_bytes), bytes(promise.limit_bytes));
        lines.push_str(&error(
            ": promise broken",
            &format!("RSS grew by {grown}, promised were at most {most}"),
        ));
    }
    lines.extend(report.errors.iter().map(annotation));
    let is_table = matches!(
        report.command,
        CommandName::Compare | CommandName::Fit | CommandName::Leak | CommandName::Doctor
    );
    if is_table {
        lines.push_str(&text::draw(document, Paint::NONE, None));
    } else if let Some(run) = report.runs.last()
        && report.limits.is_empty()
        && report.errors.is_empty()
    {
        lines.push_str(&format!(
            "unreclaimable {}  RSS {}\n",
            bytes(run.peak.host_bytes),
            bytes(run.peak.rss_bytes)
        ));
    }
    lines
}

fn annotation(problem: &Problem) -> String {
    let place = problem.place.as_deref().map(|place| format!(" ({place})")).unwrap_or_default();
    error(&format!(" {}", problem.code.as_str()), &format!("{}{place}", problem.message))
}

/// An annotation. A line break or a per cent sign would end or change the command.
fn error(title: &str, text: &str) -> String {
    let data = escape(&text.replace('\n', " ")).replace('%', "%25");
    format!("::error title=loadcheck{title}::{data}\n")
}
