//! Markdown, and GitHub Actions (workflow commands on stdout, Markdown in the job summary).

use super::compared;
use super::escape::escape;
use super::fitted::limit_text;
use super::leaked;
use super::reading::{self, moved_line};
use super::terminal::Paint;
use super::text::{Look, device_line, exceeded_at, limit_line, limit_values, place, render, verified_line};
use crate::numbers::{bytes, count, growth, seconds};
use crate::problem::Problem;
use crate::report::{Check, CommandName, Convert, Fit, Fitted, Report, Run, Verification};

/// The report as Markdown.
pub(crate) fn markdown(report: &Report) -> String {
    let mut text = String::new();
    if let Some(source) = &report.source {
        let facts = [
            source.tensors.map(|tensors| count(tensors, "tensor")),
            source.bytes.map(|size| bytes(Some(size))),
        ];
        let facts: Vec<String> = facts.into_iter().flatten().collect();
        text.push_str(&format!("`{}`: {}\n\n", code(&source.given), facts.join(", ")));
    }
    if let Some(exec) = &report.exec {
        text.push_str(&format!("`{}`\n\n", code(&exec.command.join(" "))));
    }
    let (header, rows) = table(report);
    if !rows.is_empty() {
        text.push_str(header);
        rows.iter().for_each(|row| text.push_str(row));
    }
    if let Some(plan) = report.plan.as_ref().filter(|_| report.command == CommandName::Plan) {
        text.push_str("\n| host memory (derived) | bytes |\n|---|---:|\n");
        for term in &plan.memory {
            text.push_str(&format!("| {} | {} |\n", cell(&term.name), bytes(Some(term.bytes))));
        }
        text.push_str(&format!("| **sum** | **{}** |\n", bytes(Some(plan.host_bytes))));
    }
    if let Some(synth) = &report.synth {
        let what =
            [count(synth.files, "file"), count(synth.tensors, "tensor"), bytes(Some(synth.bytes))].join(", ");
        text.push_str(&format!("`{}`: {what} in {}\n", code(&synth.target), seconds(synth.seconds)));
    }
    report.fit.iter().for_each(|fit| text.push_str(&emitted(fit)));
    report.convert.iter().for_each(|convert| text.push_str(&converted(convert)));
    report.verification.iter().for_each(|found| text.push_str(&verified(found)));
    // Of a comparison, the runs that are ours.
    let told = report.runs.iter().rfind(|run| !run.io.files.is_empty()).or(report.runs.last());
    let reads = told.map(|run| (&run.io.files, moved_line(&run.io)));
    let (files, moved) = match (reads, &report.plan) {
        (Some((files, moved)), _) => (files.as_slice(), moved),
        (None, Some(plan)) => (plan.files.as_slice(), None),
        (None, None) => (&[][..], None),
    };
    let reading = reading::lines(files).into_iter().chain(moved);
    let facts = device_line(report).into_iter().chain(reading).chain(verified_line(report));
    // Columns of text are aligned by blanks, which mean nothing here.
    facts.for_each(|line| text.push_str(&format!("\n{}\n", cell(&words(&line)))));
    text.push_str(&vram(report));
    text.push_str(&limits(report));
    report.notes.iter().for_each(|note| text.push_str(&format!("\nnote: {}\n", cell(note))));
    for problem in &report.errors {
        text.push_str(&format!("\n**error[{}]**: {}\n", problem.code.as_str(), cell(&problem.message)));
    }
    text
}

/// The command's table: its head, and its rows.
fn table(report: &Report) -> (&'static str, Vec<String>) {
    match report.command {
        CommandName::Run | CommandName::Exec | CommandName::Convert => (
            "| run | host peak | over start | RSS peak | over start | at | time |\n|---:|---:|---:|---:|---:|---|---:|\n",
            report.runs.iter().enumerate().map(run_row).collect(),
        ),
        CommandName::Compare => {
            (compared::MARKDOWN_HEADER, report.comparison.iter().map(compared::markdown_row).collect())
        }
        CommandName::Plan | CommandName::Inspect => (
            "| layer | tensors | bytes |\n|---|---:|---:|\n",
            report.layers.iter().map(|layer| layer_row(&layer)).collect(),
        ),
        CommandName::Fit => (
            "| loader | smallest that works | smallest comfortable | without a limit |\n|---|---:|---:|---:|\n",
            report.fit.iter().flat_map(|fit| &fit.loaders).map(fitted_row).collect(),
        ),
        CommandName::Leak => {
            (leaked::MARKDOWN_HEADER, leaked::slopes(report).map(leaked::markdown_row).collect())
        }
        CommandName::Doctor => (
            "| | check | found | consequence | fix |\n|---|---|---|---|---|\n",
            report.doctor.iter().map(check_row).collect(),
        ),
        CommandName::Synth | CommandName::Verify | CommandName::Unknown => ("", Vec::<String>::new()),
    }
}

/// `--emit`: the lines that were asked for.
fn emitted(fit: &Fit) -> String {
    if fit.emitted.is_empty() {
        return String::new();
    }
    let lines: String =
        fit.emitted.iter().map(|line| format!("{}\n", escape(line).replace('`', "'"))).collect();
    format!("\n```\n{lines}```\n")
}

fn run_row((index, run): (usize, &Run)) -> String {
    format!(
        "| {} | {} | {} | {} | {} | {} | {} |\n",
        index + 1,
        bytes(run.peak.host_bytes),
        growth(run.peak.host_bytes, run.baseline.host_bytes),
        bytes(run.peak.rss_bytes),
        growth(run.peak.rss_bytes, run.baseline.rss_bytes),
        run.peak.at.as_ref().map(|at| format!("`{}`", code(&place(at)))).unwrap_or_default(),
        run.seconds.map(seconds).unwrap_or_default(),
    )
}

fn check_row(check: &Check) -> String {
    let text = |text: &Option<String>| text.as_deref().map(cell).unwrap_or_default();
    let fix = check.fix.as_deref().map(|fix| format!("`{}`", code(fix))).unwrap_or_default();
    let state = super::examined::word(check.state);
    format!("| {state} | {} | {} | {} | {fix} |\n", check.check, cell(&check.found), text(&check.consequence))
}

fn fitted_row(fitted: &Fitted) -> String {
    // Neighbours differ, and a limit that is rounded down does not work.
    let limit = |bytes: Option<u64>| bytes.map_or_else(|| "-".to_owned(), limit_text);
    format!(
        "| `{}` | {} | {} | {} |\n",
        code(&fitted.strategy),
        limit(fitted.smallest_bytes),
        limit(fitted.comfortable_bytes),
        fitted.unlimited_seconds.map(seconds).unwrap_or_default(),
    )
}

/// Where it went, and as how many files.
fn converted(convert: &Convert) -> String {
    let files = u64::try_from(convert.files.len()).unwrap_or(u64::MAX);
    let sum = convert.files.iter().map(|file| file.bytes).sum();
    let outcome = match &convert.result {
        None => "planned",
        Some(result) if result.complete => "complete",
        Some(_) => "not complete",
    };
    format!(
        "\n`{}`: {} ({}), {}, {outcome}\n",
        code(&convert.target),
        count(files, "file"),
        cell(&convert.summary),
        bytes(Some(sum))
    )
}

/// What a verification compared, and every difference.
fn verified(found: &Verification) -> String {
    let mut text = format!(
        "\n`{}`: {}, {}, {} compared\n",
        code(&found.directory),
        count(found.files, "file"),
        count(found.tensors, "tensor"),
        bytes(Some(found.bytes))
    );
    if !found.differences.is_empty() {
        text.push_str("\n| place | difference |\n|---|---|\n");
    }
    for difference in &found.differences {
        text.push_str(&format!("| `{}` | {} |\n", code(&difference.place), cell(&difference.what)));
    }
    text
}

/// Device memory, in a table of its own: most runs take none.
fn vram(report: &Report) -> String {
    let runs = report.runs.iter().enumerate();
    let rows = runs.flat_map(|(index, run)| run.vram.iter().map(move |vram| (index, vram)));
    let rows: String = rows
        .map(|(index, vram)| {
            format!(
                "| {} | {} | {} | {} | {} |\n",
                index + 1,
                cell(&vram.method),
                bytes(vram.peak_bytes),
                growth(vram.peak_bytes, vram.baseline_bytes),
                growth(vram.after_unload_bytes, vram.baseline_bytes),
            )
        })
        .collect();
    if rows.is_empty() {
        return rows;
    }
    let header =
        "\n| run | VRAM by | peak | over start | after unload, over start |\n|---:|---|---:|---:|---:|\n";
    format!("{header}{rows}")
}

fn layer_row(layer: &crate::listing::Layer<'_>) -> String {
    format!("| `{}` | {} | {} |\n", code(layer.id), layer.tensors.len(), bytes(Some(layer.bytes)))
}

fn limits(report: &Report) -> String {
    if report.limits.is_empty() {
        return String::new();
    }
    let mut text =
        String::from("\n| | limit on | actual | limit | first exceeded at |\n|---|---|---:|---:|---|\n");
    for limit in &report.limits {
        let (actual, most) = limit_values(limit);
        let at = limit
            .first_exceeded_at
            .as_ref()
            .map(|at| format!("`{}`", code(&exceeded_at(at)).replace('`', "")));
        let word = if limit.passed { "pass" } else { "**FAIL**" };
        text.push_str(&format!(
            "| {word} | {} | {actual} | {most} | {} |\n",
            limit.metric,
            at.unwrap_or_default()
        ));
    }
    text
}

/// The words of a line, one blank between two of them.
fn words(line: &str) -> String {
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Text inside back quotes in a table.
pub(super) fn code(text: &str) -> String {
    super::escape::cell(text).replace('`', "'").replace('|', "\\|")
}

/// Text in a table.
pub(super) fn cell(text: &str) -> String {
    super::escape::cell(text).replace('|', "\\|").replace('<', "&lt;")
}

/// What a GitHub Actions step prints: failures as workflow commands, so that they become
/// annotations.
pub(crate) fn github(report: &Report) -> String {
    let mut text = String::new();
    for limit in &report.limits {
        let line = limit_line(limit, Paint::NONE);
        if limit.passed {
            text.push_str(&format!("{line}\n"));
        } else {
            text.push_str(&format!(
                "::error title=loadcheck: {} over its limit::{}\n",
                limit.metric,
                data(&line)
            ));
        }
    }
    for promise in report.runs.iter().filter_map(|run| run.promise.as_ref()).filter(|promise| !promise.kept) {
        text.push_str(&format!(
            "::error title=loadcheck: promise broken::RSS grew by {}, promised were at most {}\n",
            bytes(Some(promise.growth_bytes)),
            bytes(Some(promise.limit_bytes))
        ));
    }
    for problem in &report.errors {
        text.push_str(&annotation(problem));
    }
    if matches!(
        report.command,
        CommandName::Compare | CommandName::Fit | CommandName::Leak | CommandName::Doctor
    ) {
        let look = Look { paint: Paint::NONE, width: None, verbose: false };
        text.push_str(&render(report, &look));
        return text;
    }
    if let Some(run) = report.runs.last().filter(|_| report.limits.is_empty() && report.errors.is_empty()) {
        text.push_str(&format!("host {}  RSS {}\n", bytes(run.peak.host_bytes), bytes(run.peak.rss_bytes)));
    }
    text
}

fn annotation(problem: &Problem) -> String {
    let place = problem.place.as_deref().map(|place| format!(" ({place})")).unwrap_or_default();
    let message = format!("{}{place}", problem.message);
    format!("::error title=loadcheck {}::{}\n", problem.code.as_str(), data(&message))
}

/// The data part of a workflow command: a line break or a per cent sign would end or change it.
fn data(text: &str) -> String {
    escape(&text.replace('\n', " ")).replace('%', "%25")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::Code;
    use crate::report::Limit;

    #[test]
    fn names_cannot_break_out() {
        assert_eq!(code("a`|`b"), "a'\\|'b");
        let problem = Problem::new(Code::SourceInvalid, "50 %\n::set-output name=x::y").at("f\u{1b}");
        let line = annotation(&problem);
        assert_eq!(line, "::error title=loadcheck LC0302::50 %25 ::set-output name=x::y (f\\u{1b})\n");
    }

    #[test]
    fn failures_become_annotations() {
        let mut report = Report::new(CommandName::Run);
        let limit = |passed| Limit {
            metric: "rss".to_owned(),
            limit_bytes: Some(1),
            actual_bytes: Some(2),
            limit_seconds: None,
            actual_seconds: None,
            passed,
            inside_spread: false,
            first_exceeded_at: None,
        };
        report.limits = vec![limit(true), limit(false)];
        let text = github(&report);
        assert!(text.starts_with("PASS  rss"), "{text}");
        assert!(text.contains("\n::error title=loadcheck: rss over its limit::FAIL  rss"), "{text}");
        assert!(markdown(&report).contains("| **FAIL** | rss | 2 B | 1 B |"));
    }

    #[test]
    fn limits_and_the_lines_that_were_asked_for_are_on_the_page() {
        let mut report = Report::new(CommandName::Fit);
        let fitted = Fitted {
            strategy: "stream".to_owned(),
            smallest_bytes: Some(1377 << 20),
            tries: vec![crate::report::Try::default()],
            ..Fitted::default()
        };
        report.fit = Some(Fit { loaders: vec![fitted], ..Fit::default() });
        assert!(github(&report).contains("smallest that works   1 377 MiB"), "{}", github(&report));
        report.fit.as_mut().unwrap().emit = Some("docker".to_owned());
        report.fit.as_mut().unwrap().emitted = vec!["--memory=1722m".to_owned()];
        let page = markdown(&report);
        assert!(page.contains("| `stream` | 1 377 MiB | - |"), "{page}");
        assert!(page.contains("\n```\n--memory=1722m\n```\n"), "{page}");
        assert_eq!(github(&report), "--memory=1722m\n");
    }
}
