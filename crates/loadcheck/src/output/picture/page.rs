//! The page: the verdict, the picture for wide and for narrow screens, and the numbers as tables.

use std::fmt::Write as _;

use super::drawing::{Shape, inline};
use super::panel::{Panel, panels};
use super::{bytes, circumstances, growth, style, title, xml};
use crate::numbers::{rate, seconds};
use crate::output::document::{Align, Part};
use crate::output::facts::{self, place};
use crate::report::{CommandName, Report, Run, Verdict};

/// Notes and errors on a page, at most.
const LINES_MAX: usize = 10;

const LAYOUT: &str = "\
*{box-sizing:border-box}
body{margin:0 auto;padding:18px 16px 28px;max-width:1100px;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,\"Segoe UI\",Roboto,\"DejaVu Sans\",sans-serif}
h1{font-size:22px;line-height:1.25;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:16px;margin:22px 0 6px}
p{margin:4px 0;overflow-wrap:anywhere}
.dim,caption{color:var(--soft)}
.word{display:inline-block;padding:0 9px;margin-right:8px;border:1.5px solid;border-radius:5px;font-weight:600}
.pass{color:var(--good)}.fail{color:var(--bad)}.open{color:var(--limit)}
svg{display:block;width:100%;height:auto}
.narrow{display:none;max-width:560px}
@media (max-width:700px){.wide{display:none}.narrow{display:block}}
.scroll{overflow-x:auto}
table{border-collapse:collapse;margin:4px 0;font-variant-numeric:tabular-nums}
th,td{padding:4px 14px 4px 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--grid)}
th{font-weight:600}
td.n{text-align:right}
td{overflow-wrap:anywhere}
ul{margin:4px 0;padding-left:20px}
";

/// The whole page.
pub(super) fn html(report: &Report) -> String {
    let name = xml(&title(report));
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<title>Memory over time: {name}</title>\n\
         <style>\n{}{LAYOUT}</style>\n</head>\n<body>\n<h1>{name}</h1>\n",
        style()
    );
    let (class, word) = verdict(report.verdict);
    let facts: Vec<String> = circumstances(report).iter().map(|fact| xml(fact)).collect();
    let _ = writeln!(
        page,
        "<p><span class=\"word {class}\">{word}</span><span class=\"dim\">{}</span></p>",
        facts.join(" · ")
    );
    problems(report, &mut page);
    let (panels, said) = panels(report);
    if !panels.is_empty() {
        for (class, shape) in [("wide", Shape::Wide), ("narrow", Shape::Narrow)] {
            let _ = write!(page, "<div class=\"{class}\">\n{}</div>\n", inline(report, shape));
        }
        captions(&panels, said, &mut page);
        numbers(report, &panels, &mut page);
    }
    limits(report, &mut page);
    notes(report, &mut page);
    let _ = writeln!(page, "<p class=\"dim\">{}</p>\n</body>\n</html>", xml(&origin(report)));
    page
}

fn verdict(verdict: Verdict) -> (&'static str, &'static str) {
    match verdict {
        Verdict::Pass => ("pass", "PASS"),
        Verdict::Fail => ("fail", "FAIL"),
        Verdict::Inconclusive => ("open", "INCONCLUSIVE"),
        Verdict::Error => ("fail", "ERROR"),
    }
}

fn problems(report: &Report, page: &mut String) {
    for problem in report.errors.iter().take(LINES_MAX) {
        let place = problem.place.as_ref().map(|place| format!(" ({})", xml(place))).unwrap_or_default();
        let code = problem.code.as_str();
        let _ = writeln!(page, "<p class=\"fail\"><b>{code}</b> {}{place}</p>", xml(&problem.message));
    }
}

fn captions(panels: &[Panel<'_>], said: Option<String>, page: &mut String) {
    let mut lines: Vec<String> = said.into_iter().collect();
    if panels.iter().any(|panel| !panel.ends.is_empty()) {
        lines.push("Hover over the plot to see the layer that was delivered at that time.".to_owned());
    }
    let interval =
        panels.iter().find_map(|panel| panel.run.samples.as_ref()).map(|samples| samples.interval_ms);
    lines.extend(interval.map(|ms| {
        format!("Memory of the process, a sample every {ms} ms; the RSS peak is the kernel's own.")
    }));
    let is_drawn = |panel: &Panel<'_>| panel.top_vram_bytes().is_some();
    if panels.iter().any(|panel| panel.run.peak.vram_bytes.is_some() && !is_drawn(panel)) {
        lines.push("Device memory is not drawn: its peak is in the table.".to_owned());
    }
    let _ = writeln!(
        page,
        "<p class=\"dim\">{}</p>",
        lines.iter().map(|line| xml(line)).collect::<Vec<_>>().join(" ")
    );
}

/// The rows of the table of numbers: their names, and their values for a run.
fn values(command: CommandName, run: &Run) -> [(&'static str, Option<String>); 13] {
    let at = run.peak.at.as_ref().map(|at| match (&at.layer, &at.tensor) {
        (None, None) => seconds(at.seconds),
        _ => format!("{}, {}", seconds(at.seconds), place(at)),
    });
    let promise = run.promise.as_ref().map(|promise| {
        let word = if promise.kept { "kept" } else { "BROKEN" };
        format!("{}, {word}", bytes(promise.limit_bytes))
    });
    let (peak, start) = (&run.peak, &run.baseline);
    let speed = run.io.read_bytes.zip(run.seconds).filter(|_| command != CommandName::Exec);
    [
        ("host peak", peak.host_bytes.map(bytes)),
        ("over the start", growth(peak.host_bytes, start.host_bytes)),
        ("reached at", at),
        ("RSS peak", peak.rss_bytes.map(bytes)),
        ("over the start", growth(peak.rss_bytes, start.rss_bytes)),
        ("promised at most", promise),
        ("budget", run.params.as_ref().map(|params| bytes(params.budget_bytes))),
        ("layers kept in host memory", run.resident_host_bytes.filter(|kept| *kept > 0).map(bytes)),
        ("page-locked", peak.pinned_bytes.filter(|pinned| *pinned > 0).map(bytes)),
        ("device memory, peak", peak.vram_bytes.map(bytes)),
        ("time", run.seconds.map(seconds)),
        ("speed", speed.and_then(|(moved, time)| rate(moved, time))),
        ("layers delivered", run.deliveries.as_ref().map(|all| all.layers.to_string())),
    ]
}

fn numbers(report: &Report, panels: &[Panel<'_>], page: &mut String) {
    page.push_str("<h2>Numbers</h2>\n<div class=\"scroll\"><table>\n");
    if panels.len() > 1 {
        let headings: String =
            panels.iter().map(|panel| format!("<th>{}</th>", xml(&panel.heading))).collect();
        let _ = writeln!(page, "<tr><th></th>{headings}</tr>");
    }
    let columns: Vec<_> = panels.iter().map(|panel| values(report.command, panel.run)).collect();
    for (row, (name, _)) in values(report.command, &Run::default()).iter().enumerate() {
        let cells = columns.iter().map(|column| column[row].1.as_deref());
        if cells.clone().any(|cell| cell.is_some()) {
            let cells = cells.map(|cell| format!("<td>{}</td>", cell.map_or_else(|| "-".to_owned(), xml)));
            let _ = writeln!(page, "<tr><th>{name}</th>{}</tr>", cells.collect::<String>());
        }
    }
    page.push_str("</table></div>\n");
    if report.runs.len() > panels.len() {
        let highest = |value: &dyn Fn(&Run) -> Option<u64>| bytes(report.runs.iter().filter_map(value).max());
        let text = format!(
            "Over all {} runs: host peak at most {}, RSS peak at most {}.",
            report.runs.len(),
            highest(&|run| run.peak.host_bytes),
            highest(&|run| run.peak.rss_bytes)
        );
        let _ = writeln!(page, "<p>{text}</p>");
    }
    let moved = report.runs.last().and_then(|run| facts::moved(&run.io));
    let facts = facts::device(report).into_iter().chain(moved).chain(facts::verified(report));
    for fact in facts {
        if let Part::Fact(label, value) = fact {
            let _ = writeln!(page, "<p>{label} {}</p>", xml(&value.plain()));
        }
    }
}

fn limits(report: &Report, page: &mut String) {
    let table = facts::limits(report);
    let header = table.header();
    if header.is_empty() {
        return;
    }
    let titles: String = header.iter().map(|(title, _)| format!("<th>{}</th>", xml(title))).collect();
    let _ = writeln!(page, "<h2>Limits</h2>\n<div class=\"scroll\"><table>\n<tr>{titles}</tr>");
    for (limit, (_, cells)) in report.limits.iter().zip(table.rows()).take(LINES_MAX) {
        let class = if limit.passed { "pass" } else { "fail" };
        let cells = cells.iter().zip(&header).enumerate().map(|(column, (cell, (_, align)))| {
            let text = xml(&cell.plain());
            match (column, align) {
                (0, _) => format!("<td class=\"{class}\"><b>{text}</b></td>"),
                (_, Align::Right) => format!("<td class=\"n\">{text}</td>"),
                (_, Align::Left) => format!("<td>{text}</td>"),
            }
        });
        let _ = writeln!(page, "<tr>{}</tr>", cells.collect::<String>());
    }
    page.push_str("</table></div>\n");
}

fn notes(report: &Report, page: &mut String) {
    if report.notes.is_empty() {
        return;
    }
    page.push_str("<h2>Notes</h2>\n<ul>\n");
    for note in report.notes.iter().take(LINES_MAX) {
        let _ = writeln!(page, "<li>{}</li>", xml(note));
    }
    page.push_str("</ul>\n");
}

/// Which program measured, and where.
fn origin(report: &Report) -> String {
    let host = report.host.as_ref();
    let kernel = host.and_then(|host| host.kernel.as_ref()).map(|kernel| format!(" · kernel {kernel}"));
    let memory = host.and_then(|host| host.ram_bytes).map(|size| format!(" · {} of memory", bytes(size)));
    format!(
        "{} {}{}{}",
        report.tool.name,
        report.tool.version,
        kernel.unwrap_or_default(),
        memory.unwrap_or_default()
    )
}
