//! Repeated loads, for people and for pages: how much each kind of memory grows from cycle to
//! cycle.

use super::escape::escape;
use super::grid::{Align, grid};
use super::markup::cell;
use super::terminal::Role;
use super::text::{Look, device_line, partial_line, peak_table, promise_lines, source_line, strategy_line};
use crate::numbers::{bytes, grouped, seconds, signed};
use crate::report::{KindSlope, Leak, LeakMode, Report, SlopeVerdict};

/// The slopes of a report.
pub(super) fn slopes(report: &Report) -> impl Iterator<Item = &KindSlope> {
    report.leak.iter().flat_map(|leak| &leak.slopes)
}

/// The report for people.
pub(super) fn leak(report: &Report, look: &Look) -> Vec<String> {
    let mut lines = Vec::new();
    let Some(leak) = report.leak.as_ref().filter(|leak| leak.counted > 0) else { return lines };
    match &leak.command {
        None => lines.extend(report.source.as_ref().map(source_line)),
        Some(words) => {
            let words = shlex::try_join(words.iter().map(String::as_str)).unwrap_or_else(|_| words.join(" "));
            lines.push(format!("command   {}", escape(&words)));
        }
    }
    if leak.loads.len() > 1 {
        lines.extend(
            leak.loads
                .iter()
                .map(|load| format!("loads     {} ({})", escape(&load.name), bytes(Some(load.tensor_bytes)))),
        );
    }
    lines.extend(report.runs.first().and_then(|run| run.params.as_ref()).map(strategy_line));
    lines.extend(device_line(report));
    lines.push(cycles_line(report, leak));
    lines.push(String::new());
    lines.extend(table(leak, look));
    lines.push(String::new());
    if leak.command.is_none() {
        lines.extend(peak_table(report, look));
    }
    lines.extend(verdict_lines(leak, look));
    lines.extend(promise_lines(report, look));
    if look.verbose {
        let missing = report.unavailable.iter();
        lines
            .extend(missing.map(|one| format!("  {:<8}  not measured: {}", one.metric, escape(&one.reason))));
    }
    lines.extend(partial_line(report, look));
    lines
}

/// `cycles    30, after 3 to warm up, in one process, 12.3 s`
fn cycles_line(report: &Report, leak: &Leak) -> String {
    let place = match leak.mode {
        LeakMode::Process => "load, use, unload in one process",
        LeakMode::Isolated => "each in a process of its own; what stays after its end",
        LeakMode::Command => "each a run of the command; what stays after its end",
        LeakMode::Lines => "each a line of the command's output; what its processes hold",
    };
    let warmup = match leak.warmup {
        0 => String::new(),
        warmup => format!(", after {warmup} to warm up"),
    };
    let time: f64 = report.runs.iter().filter_map(|run| run.seconds).sum();
    let time = if time > 0.0 { format!(", {}", seconds(time)) } else { String::new() };
    format!("cycles    {}{warmup}: {place}{time}", grouped(leak.counted))
}

fn table(leak: &Leak, look: &Look) -> Vec<String> {
    let header = [
        ("", Align::Left),
        ("a cycle", Align::Right),
        ("99 % confidence", Align::Right),
        ("floor", Align::Right),
        ("start", Align::Right),
        ("end", Align::Right),
        ("", Align::Left),
    ];
    let rows: Vec<Vec<String>> = leak.slopes.iter().map(row).collect();
    let mut lines = grid(&header, &rows, look.width);
    for (index, line) in lines.iter_mut().enumerate() {
        let role = match index.checked_sub(1).and_then(|row| leak.slopes.get(row)) {
            None => Some(Role::Dim),
            Some(slope) => match slope.verdict {
                SlopeVerdict::Leak => Some(Role::Bad),
                SlopeVerdict::Unclear | SlopeVerdict::Unknown => Some(Role::Warning),
                SlopeVerdict::Flat => None,
            },
        };
        if let Some(role) = role {
            *line = look.paint.paint(role, line);
        }
    }
    lines
}

fn row(slope: &KindSlope) -> Vec<String> {
    vec![
        slope.kind.clone(),
        slope.bytes_per_cycle.map_or_else(|| "-".to_owned(), signed),
        confidence(slope),
        bytes(slope.floor_bytes),
        bytes(slope.start_bytes),
        bytes(slope.points_bytes.last().copied()),
        word(slope.verdict).to_owned(),
    ]
}

/// `0 B to 4 KiB`
fn confidence(slope: &KindSlope) -> String {
    match (slope.low_bytes_per_cycle, slope.high_bytes_per_cycle) {
        (Some(low), Some(high)) => format!("{} to {}", signed(low), signed(high)),
        _ => "-".to_owned(),
    }
}

fn word(verdict: SlopeVerdict) -> &'static str {
    match verdict {
        SlopeVerdict::Flat => "flat",
        SlopeVerdict::Unclear => "unclear: the limit is inside",
        SlopeVerdict::Leak => "leak",
        SlopeVerdict::Unknown => "too few cycles",
    }
}

/// `FAIL  host grows by 1 MiB a cycle, at most 16 KiB is allowed`, or that nothing does.
fn verdict_lines(leak: &Leak, look: &Look) -> Vec<String> {
    let leaks = leak.slopes.iter().filter(|slope| slope.verdict == SlopeVerdict::Leak);
    let line = |slope: &KindSlope| {
        format!(
            "{}  {} grows by {} a cycle ({}), the limit is {}",
            look.paint.paint(Role::Bad, "FAIL"),
            slope.kind,
            signed(slope.bytes_per_cycle.unwrap_or_default()),
            confidence(slope),
            bytes(Some(slope.max_bytes_per_cycle))
        )
    };
    let mut lines: Vec<String> = leaks.map(line).collect();
    let is_known = leak.slopes.iter().any(|slope| slope.verdict != SlopeVerdict::Unknown);
    if lines.is_empty() && is_known {
        let limits = leak.slopes.iter().map(|slope| slope.max_bytes_per_cycle);
        let most = limits.max().unwrap_or_default();
        let word = look.paint.paint(Role::Good, "PASS");
        lines.push(format!("{word}  nothing grows by more than {} a cycle", bytes(Some(most))));
    }
    if let Some(left) = leak.left_behind.filter(|left| *left > 0) {
        lines.push(format!(
            "the command left {} behind",
            if left == 1 { "1 process".to_owned() } else { format!("{left} processes") }
        ));
    }
    lines
}

/// The head of the table on a page.
pub(super) const MARKDOWN_HEADER: &str = "| memory | a cycle | 99 % confidence | limit | floor | start | end | |\n|---|---:|---:|---:|---:|---:|---:|---|\n";

/// A row of it.
pub(super) fn markdown_row(slope: &KindSlope) -> String {
    let mut cells = row(slope);
    cells.insert(3, bytes(Some(slope.max_bytes_per_cycle)));
    let cells: Vec<String> = cells.iter().map(|text| cell(text)).collect();
    format!("| {} |\n", cells.join(" | "))
}

/// The columns for programs.
pub(super) const CSV_COLUMNS: [&str; 11] = [
    "kind",
    "bytes_per_cycle",
    "low_bytes_per_cycle",
    "high_bytes_per_cycle",
    "max_bytes_per_cycle",
    "spread_bytes",
    "floor_bytes",
    "start_bytes",
    "most_growth_bytes",
    "cycles",
    "verdict",
];

/// A row for programs. Empty is "not measured".
pub(super) fn csv_row(slope: &KindSlope) -> Vec<String> {
    fn number<T: ToString>(value: Option<T>) -> String {
        value.map(|value| value.to_string()).unwrap_or_default()
    }
    vec![
        slope.kind.clone(),
        number(slope.bytes_per_cycle),
        number(slope.low_bytes_per_cycle),
        number(slope.high_bytes_per_cycle),
        slope.max_bytes_per_cycle.to_string(),
        number(slope.spread_bytes),
        number(slope.floor_bytes),
        number(slope.start_bytes),
        slope.most_growth_bytes.to_string(),
        slope.points_bytes.len().to_string(),
        serde_json::json!(slope.verdict).as_str().unwrap_or_default().to_owned(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_has_as_many_cells_as_its_header() {
        let slope = KindSlope { kind: "host".to_owned(), ..KindSlope::default() };
        assert_eq!(csv_row(&slope).len(), CSV_COLUMNS.len());
        let cells = |line: &str| line.matches('|').count();
        assert!(MARKDOWN_HEADER.lines().all(|line| cells(line) == 9));
        assert_eq!(cells(&markdown_row(&slope)), 9);
        let known = KindSlope {
            low_bytes_per_cycle: Some(-1024.0),
            high_bytes_per_cycle: Some(3.0 * 1024.0 * 1024.0),
            ..slope
        };
        assert_eq!(confidence(&known), "-1 KiB to 3 MiB");
    }
}
