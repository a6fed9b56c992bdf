//! A comparison, for people and for pages: what each way of loading holds, how long it takes, what
//! to know about it.
//!
//! On the terminal it is three short tables, memory first, so that eighty columns are enough; on a
//! page it is one.

use super::escape::escape;
use super::grid::{Align, grid};
use super::markup::{cell, code};
use super::reading;
use super::terminal::Role;
use super::text::{Look, cache_line, device_line, promise_lines, source_line, strategy_line};
use crate::numbers::{bytes, count, rate, seconds};
use crate::report::{Compared, Outcome, Report, Spread};

/// Characters of a row's name in a table, at most.
const NAME_CHARACTERS_MAX: usize = 24;

/// The report for people.
pub(super) fn table(report: &Report, look: &Look) -> Vec<String> {
    let mut lines = Vec::new();
    if report.comparison.is_empty() {
        return lines;
    }
    lines.extend(report.source.as_ref().map(source_line));
    let of_stream = report.runs.iter().find_map(|run| run.params.as_ref());
    lines.extend(of_stream.map(strategy_line));
    let reading = report.runs.iter().rfind(|run| !run.io.files.is_empty());
    lines.extend(reading.into_iter().flat_map(|run| reading::lines(&run.io.files)));
    lines.extend(device_line(report));
    for row in &report.comparison {
        let words = row.command.as_deref().map(as_typed);
        lines.extend(words.map(|words| format!("{:<8}  {}", escape(&name(row)), escape(&words))));
    }
    lines.push(rounds_line(report));
    lines.extend(cache_line(&report.runs));
    if look.verbose {
        let missing = report.unavailable.iter();
        lines
            .extend(missing.map(|missing| {
                format!("  {:<8}  not measured: {}", missing.metric, escape(&missing.reason))
            }));
    }
    lines.push(String::new());
    let best = [best_by(report, |row| row.host_ratio), best_by(report, |row| row.time_ratio)];
    for (table, best) in [memory(report, look), time(report, look)].into_iter().zip(best) {
        for (index, line) in table.into_iter().enumerate() {
            let role =
                if index == 0 { Some(Role::Dim) } else { (best == Some(index - 1)).then_some(Role::Strong) };
            lines.push(role.map_or_else(|| line.clone(), |role| look.paint.paint(role, &line)));
        }
        lines.push(String::new());
    }
    lines.extend(notes(report, look));
    lines.extend(promise_lines(report, look));
    lines
}

/// `compared  5 interleaved rounds, fresh processes · highest memory, median time`
fn rounds_line(report: &Report) -> String {
    let rounds = report.comparison.iter().map(|row| row.runs).max().unwrap_or(0);
    let rounds = count(rounds, if rounds == 1 { "round" } else { "interleaved round" });
    format!("compared  {rounds}, fresh processes · highest memory, median time")
}

/// The row with the smallest ratio, if some row has one.
fn best_by(report: &Report, ratio: fn(&Compared) -> Option<f64>) -> Option<usize> {
    let rows = report.comparison.iter().enumerate();
    let known = rows.filter_map(|(index, row)| ratio(row).map(|ratio| (index, ratio)));
    known.min_by(|left, right| left.1.total_cmp(&right.1)).map(|(index, _)| index)
}

fn memory(report: &Report, look: &Look) -> Vec<String> {
    let header = [
        ("", Align::Left),
        ("host peak", Align::Right),
        ("RSS peak", Align::Right),
        ("file peak", Align::Right),
        ("cgroup peak", Align::Right),
        ("VRAM peak", Align::Right),
        ("host ratio", Align::Right),
    ];
    let has_vram = report.comparison.iter().any(|row| row.peak.vram_bytes.is_some());
    let row = |row: &Compared| {
        let peak = &row.peak;
        vec![
            name(row),
            bytes(peak.host_bytes),
            bytes(peak.rss_bytes),
            bytes(peak.file_bytes),
            bytes(peak.cgroup_bytes),
            if has_vram { bytes(peak.vram_bytes) } else { String::new() },
            ratio(row.host_ratio, 1),
        ]
    };
    grid(&header, &report.comparison.iter().map(row).collect::<Vec<_>>(), look.width)
}

fn time(report: &Report, look: &Look) -> Vec<String> {
    let header = [
        ("", Align::Left),
        ("time", Align::Right),
        ("min to max", Align::Right),
        ("rate", Align::Right),
        ("CPU time", Align::Right),
        ("time ratio", Align::Right),
    ];
    let row = |row: &Compared| {
        vec![
            name(row),
            row.seconds.as_ref().map_or_else(|| outcome(row.outcome).to_owned(), |time| seconds(time.median)),
            row.seconds.as_ref().filter(|_| row.completed > 1).map(extremes).unwrap_or_default(),
            row.bytes_per_second.and_then(|speed| rate(speed, 1.0)).unwrap_or_default(),
            row.cpu_seconds.map(cpu).unwrap_or_default(),
            ratio(row.time_ratio, 2),
        ]
    };
    grid(&header, &report.comparison.iter().map(row).collect::<Vec<_>>(), look.width)
}

fn notes(report: &Report, look: &Look) -> Vec<String> {
    let with_note = report.comparison.iter().filter_map(|row| Some((row, row.note.as_ref()?)));
    let rows: Vec<Vec<String>> = with_note.map(|(row, note)| vec![name(row), note.clone()]).collect();
    if rows.is_empty() {
        return Vec::new();
    }
    grid(&[("", Align::Left), ("", Align::Left)], &rows, look.width)
}

/// The words of a command as a shell would take them.
fn as_typed(words: &[String]) -> String {
    shlex::try_join(words.iter().map(String::as_str)).unwrap_or_else(|_| words.join(" "))
}

/// A row's name, short enough for a table.
fn name(row: &Compared) -> String {
    if row.strategy.chars().count() <= NAME_CHARACTERS_MAX {
        return row.strategy.clone();
    }
    let start: String = row.strategy.chars().take(NAME_CHARACTERS_MAX - 1).collect();
    format!("{start}…")
}

fn outcome(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Completed | Outcome::Stopped => "-",
        Outcome::Failed => "failed",
        Outcome::Killed => "killed",
        Outcome::Refused => "refused",
        Outcome::Interrupted => "interrupted",
    }
}

/// `4.98 to 5.40 s`; both units where they differ.
fn extremes(spread: &Spread) -> String {
    let (min, max) = (seconds(spread.min), seconds(spread.max));
    match (min.rsplit_once(' '), max.rsplit_once(' ')) {
        _ if min == max => max,
        (Some((value, unit)), Some((_, other))) if unit == other => format!("{value} to {max}"),
        _ => format!("{min} to {max}"),
    }
}

/// CPU time is counted in steps: less than one is not none.
fn cpu(value: f64) -> String {
    if value < 0.01 { "< 10 ms".to_owned() } else { seconds(value) }
}

fn ratio(value: Option<f64>, digits: usize) -> String {
    match value {
        None => "-".to_owned(),
        Some(value) if value >= 100.0 => format!("{value:.0}x"),
        Some(value) => format!("{value:.digits$}x"),
    }
}

/// The head of the table on a page.
pub(super) const MARKDOWN_HEADER: &str = "| | host peak | RSS peak | file peak | cgroup peak | host ratio | time | min to max | rate | CPU time | time ratio | |\n|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|\n";

/// A row of it.
pub(super) fn markdown_row(row: &Compared) -> String {
    let named = match &row.command {
        None => cell(&row.strategy),
        Some(words) => format!("{}: `{}`", cell(&row.strategy), code(&as_typed(words))),
    };
    let peak = &row.peak;
    let time =
        row.seconds.as_ref().map_or_else(|| outcome(row.outcome).to_owned(), |time| seconds(time.median));
    let cells = [
        named,
        bytes(peak.host_bytes),
        bytes(peak.rss_bytes),
        bytes(peak.file_bytes),
        bytes(peak.cgroup_bytes),
        ratio(row.host_ratio, 1),
        time,
        row.seconds.as_ref().filter(|_| row.completed > 1).map(extremes).unwrap_or_default(),
        row.bytes_per_second.and_then(|speed| rate(speed, 1.0)).unwrap_or_default(),
        row.cpu_seconds.map(cpu).unwrap_or_default(),
        ratio(row.time_ratio, 2),
        row.note.as_deref().map(cell).unwrap_or_default(),
    ];
    format!("| {} |\n", cells.join(" | "))
}

/// The columns for programs.
pub(super) const CSV_COLUMNS: [&str; 18] = [
    "strategy",
    "command",
    "outcome",
    "runs",
    "completed",
    "cache_not_as_asked",
    "median_seconds",
    "min_seconds",
    "max_seconds",
    "bytes_per_second",
    "cpu_seconds",
    "time_ratio",
    "peak_host_bytes",
    "peak_rss_bytes",
    "peak_file_bytes",
    "peak_cgroup_bytes",
    "host_ratio",
    "note",
];

/// A row for programs. Empty is "not measured".
pub(super) fn csv_row(row: &Compared) -> Vec<String> {
    fn number<T: ToString>(value: Option<T>) -> String {
        value.map(|value| value.to_string()).unwrap_or_default()
    }
    let words = row.command.as_deref().map(as_typed).unwrap_or_default();
    let peak = &row.peak;
    vec![
        escape(&row.strategy).into_owned(),
        escape(&words).into_owned(),
        serde_json::json!(row.outcome).as_str().unwrap_or_default().to_owned(),
        row.runs.to_string(),
        row.completed.to_string(),
        row.cache_not_as_asked.to_string(),
        number(row.seconds.as_ref().map(|time| time.median)),
        number(row.seconds.as_ref().map(|time| time.min)),
        number(row.seconds.as_ref().map(|time| time.max)),
        number(row.bytes_per_second),
        number(row.cpu_seconds),
        number(row.time_ratio),
        number(peak.host_bytes),
        number(peak.rss_bytes),
        number(peak.file_bytes),
        number(peak.cgroup_bytes),
        number(row.host_ratio),
        escape(row.note.as_deref().unwrap_or_default()).into_owned(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spreads_and_ratios_read_well() {
        let spread = |min, max| Spread { min, max, ..Spread::default() };
        assert_eq!(extremes(&spread(4.98, 5.4)), "4.98 to 5.40 s");
        assert_eq!(extremes(&spread(0.98, 1.02)), "980 ms to 1.02 s");
        assert_eq!(extremes(&spread(0.0, 0.005)), "< 1 to 5 ms");
        assert_eq!(extremes(&spread(0.0, 0.0001)), "< 1 ms");
        assert_eq!((cpu(0.0), cpu(0.45)), ("< 10 ms".to_owned(), "450 ms".to_owned()));
        assert_eq!(
            (ratio(None, 2), ratio(Some(9.06), 1), ratio(Some(250.4), 2)),
            ("-".into(), "9.1x".into(), "250x".into())
        );
    }

    #[test]
    fn a_row_has_as_many_cells_as_its_header() {
        let row = Compared { strategy: "a|b".to_owned(), ..Compared::default() };
        assert_eq!(csv_row(&row).len(), CSV_COLUMNS.len());
        let cells = |line: &str| line.replace("\\|", "").matches('|').count();
        let widths: Vec<usize> = MARKDOWN_HEADER.lines().map(cells).collect();
        assert_eq!(widths, [13, 13]);
        assert_eq!(cells(&markdown_row(&row)), 13);
        assert!(name(&Compared { strategy: "é".repeat(99), ..row }).chars().count() == NAME_CHARACTERS_MAX);
    }
}
