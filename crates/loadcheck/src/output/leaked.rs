//! `leak`: how much each kind of memory grows from cycle to cycle.

use super::document::{Document, Table, View, name, role};
use super::facts::{self, as_typed};
use super::measured;
use super::terminal::Role;
use crate::numbers::{bytes, grouped, seconds, signed};
use crate::report::{KindSlope, Leak, LeakMode, Report, SlopeVerdict, metric_name};

/// The document of `leak`.
pub(super) fn document(report: &Report, view: View) -> Document {
    let mut document = Document::default();
    let Some(leak) = report.leak.as_ref().filter(|leak| leak.counted > 0) else { return document };
    match &leak.command {
        None => document.extend(report.source.as_ref().map(|source| facts::source(source, view))),
        Some(words) => document.fact("command", name(as_typed(words))),
    }
    if leak.loads.len() > 1 {
        for load in &leak.loads {
            document.fact("loads", format!("{} ({})", load.name, bytes(load.tensor_bytes)));
        }
    }
    let params = report.runs.first().and_then(|run| run.params.as_ref());
    document.extend(params.filter(|_| view.shows_how()).map(facts::strategy));
    document.extend(facts::device(report));
    document.fact("cycles", cycles(report, leak));
    document.gap();
    document.table(slopes(leak, view));
    document.gap();
    if leak.command.is_none() && !view.is_page {
        document.table(measured::peaks(report, view));
    }
    add_verdict(leak, &mut document);
    document.extend(facts::broken_promises(report));
    document.extend(facts::not_measured(report, view));
    document.extend(facts::partial(report));
    document
}

/// `30, after 3 to warm up: load, use, unload in one process, 12.3 s`
fn cycles(report: &Report, leak: &Leak) -> String {
    let place = match leak.mode {
        LeakMode::Process => "load, use, unload in one process",
        LeakMode::Isolated => "each in a process of its own; what stays after its end",
        LeakMode::Command => "each a run of the command; what stays after its end",
        LeakMode::Lines => "each a line of the command's output; what its processes hold",
        LeakMode::Times => "each a span of time, at whose end the process and its descendants are measured",
    };
    let warmup = match leak.warmup {
        0 => String::new(),
        warmup => format!(", after {warmup} to warm up"),
    };
    let time: f64 = report.runs.iter().filter_map(|run| run.seconds).sum();
    let time = if time > 0.0 { format!(", {}", seconds(time)) } else { String::new() };
    format!("{}{warmup}: {place}{time}", grouped(leak.counted))
}

/// A row for each kind of memory; on a page with its limit.
fn slopes(leak: &Leak, view: View) -> Table {
    let mut table = Table::of(&leak.slopes)
        .left("", |slope| metric_name(&slope.kind).to_owned())
        .right("a cycle", |slope| slope.bytes_per_cycle.map_or_else(|| "-".to_owned(), signed))
        .right("99 % confidence", |slope| confidence(slope))
        .right("limit", move |slope| view.is_page.then(|| bytes(slope.max_bytes_per_cycle)))
        .right("floor", |slope| bytes(slope.floor_bytes))
        .right("start", |slope| bytes(slope.start_bytes))
        .right("end", |slope| bytes(slope.points_bytes.last().copied()))
        .left("", |slope| match slope.verdict {
            SlopeVerdict::Flat => "flat",
            SlopeVerdict::Unclear => "unclear: the limit is inside",
            SlopeVerdict::Leak => "leak",
            SlopeVerdict::Unknown => "too few cycles",
        })
        .table();
    for (row, slope) in leak.slopes.iter().enumerate() {
        match slope.verdict {
            SlopeVerdict::Leak => table = table.emphasise(Some(row), Role::Bad),
            SlopeVerdict::Unclear | SlopeVerdict::Unknown => {
                table = table.emphasise(Some(row), Role::Warning)
            }
            SlopeVerdict::Flat => {}
        }
    }
    table
}

/// `0 B to 4 KiB`
fn confidence(slope: &KindSlope) -> String {
    match (slope.low_bytes_per_cycle, slope.high_bytes_per_cycle) {
        (Some(low), Some(high)) => format!("{} to {}", signed(low), signed(high)),
        _ => "-".to_owned(),
    }
}

/// `FAIL  host grows by 1 MiB a cycle (...), the limit is 16 KiB`, or that nothing grows.
fn add_verdict(leak: &Leak, document: &mut Document) {
    let leaks = leak.slopes.iter().filter(|slope| slope.verdict == SlopeVerdict::Leak);
    let mut has_leak = false;
    for slope in leaks {
        has_leak = true;
        let growth = signed(slope.bytes_per_cycle.unwrap_or_default());
        let (range, most) = (confidence(slope), bytes(slope.max_bytes_per_cycle));
        let text = format!(
            "  {} grows by {growth} a cycle ({range}), the limit is {most}",
            metric_name(&slope.kind)
        );
        document.line(role(Role::Bad, "FAIL") + text);
    }
    let is_known = leak.slopes.iter().any(|slope| slope.verdict != SlopeVerdict::Unknown);
    if !has_leak && is_known {
        let most = leak.slopes.iter().map(|slope| slope.max_bytes_per_cycle).max();
        let text = format!("  nothing grows by more than {} a cycle", bytes(most.unwrap_or_default()));
        document.line(role(Role::Good, "PASS") + text);
    }
    match leak.left_behind {
        None | Some(0) => {}
        Some(1) => document.line("the command left 1 process behind"),
        Some(left) => document.line(format!("the command left {left} processes behind")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_has_a_range() {
        let known = KindSlope {
            low_bytes_per_cycle: Some(-1024.0),
            high_bytes_per_cycle: Some(3.0 * 1024.0 * 1024.0),
            ..KindSlope::default()
        };
        assert_eq!(confidence(&known), "-1 KiB to 3 MiB");
        assert_eq!(confidence(&KindSlope::default()), "-");
    }

    #[test]
    fn a_page_shows_the_limit() {
        let mut report = Report::new(crate::report::CommandName::Leak);
        let slope = KindSlope { kind: "host".to_owned(), max_bytes_per_cycle: 9, ..KindSlope::default() };
        report.leak = Some(Leak { counted: 1, slopes: vec![slope], ..Leak::default() });
        let page = crate::output::markdown::draw(&document(&report, View::PAGE));
        assert!(page.contains("| | a cycle | 99 % confidence | limit | floor | start | end | |\n"), "{page}");
        assert!(page.contains("\n| unreclaimable | - | - | 9 B | - | - | - | too few cycles |\n"), "{page}");
    }
}
