//! `compare`: memory, time and a note for each way of loading. A terminal gets a short table for
//! each, memory first, which fit into 80 columns; a page gets one wide table.

use super::document::{Document, Table, TableOf, Text, View, fact, name};
use super::facts::{self, as_typed};
use super::terminal::Role;
use crate::numbers::{bytes, count, rate, seconds};
use crate::report::{Compared, Outcome, Report, Spread};

/// Characters of a row's name in a table, at most.
const NAME_CHARACTERS_MAX: usize = 24;

/// The document of `compare`.
pub(super) fn document(report: &Report, view: View) -> Document {
    let mut document = Document::default();
    if report.comparison.is_empty() && !view.is_page {
        return document;
    }
    document.extend(report.source.as_ref().map(|source| facts::source(source, view)));
    let reading = report.runs.iter().rfind(|run| !run.io.files.is_empty());
    if view.shows_how() {
        document.extend(report.runs.iter().find_map(|run| run.params.as_ref()).map(facts::strategy));
        document.extend(reading.into_iter().flat_map(|run| facts::reading(&run.io.files)));
    }
    if view.is_page {
        document.extend(reading.and_then(|run| facts::moved(&run.io)));
    }
    document.extend(facts::device(report));
    let command = |row: &Compared| Some(fact(&short_name(row), name(as_typed(row.command.as_deref()?))));
    document.extend(report.comparison.iter().filter(|_| !view.is_page).filter_map(command));
    let rounds = report.comparison.iter().map(|row| row.runs).max().unwrap_or(0);
    let rounds = count(rounds, if rounds == 1 { "round" } else { "interleaved round" });
    document.fact("compared", format!("{rounds}, fresh processes · highest memory, median time"));
    document.extend(facts::cache(&report.runs));
    document.extend(facts::not_measured(report, view));
    document.gap();
    let rows = &report.comparison;
    if view.is_page {
        document.table(with_notes(with_time(with_memory(with_commands(rows)))));
    } else {
        let (least, fastest) = (best_by(rows, |row| row.host_ratio), best_by(rows, |row| row.time_ratio));
        document.table(with_memory(labelled(rows)).table().emphasise(least, Role::Strong));
        document.gap();
        document.table(with_time(labelled(rows)).table().emphasise(fastest, Role::Strong));
        document.gap();
        document.table(with_notes(labelled(rows.iter().filter(|row| row.note.is_some()))));
    }
    document.extend(facts::broken_promises(report));
    document
}

/// The row with the smallest ratio, if there is one.
fn best_by(rows: &[Compared], ratio: fn(&Compared) -> Option<f64>) -> Option<usize> {
    let known = rows.iter().enumerate().filter_map(|(index, row)| Some((index, ratio(row)?)));
    known.min_by(|left, right| left.1.total_cmp(&right.1)).map(|(index, _)| index)
}

type Rows<'a> = TableOf<&'a Compared>;

fn labelled<'a>(rows: impl IntoIterator<Item = &'a Compared>) -> Rows<'a> {
    Table::of(rows).left("", |row| short_name(row))
}

/// The rows of a page, which have their commands.
fn with_commands(rows: &[Compared]) -> Rows<'_> {
    let command = |row: &Compared| Some(Text::from(": ") + name(as_typed(row.command.as_deref()?)));
    Table::of(rows).left("", |row| Text::from(row.strategy.as_str()) + command(row))
}

fn with_notes(rows: Rows<'_>) -> Table {
    rows.left("", |row| row.note.clone()).table()
}

fn with_memory(rows: Rows<'_>) -> Rows<'_> {
    rows.right("unreclaimable", |row| bytes(row.peak.host_bytes))
        .right("RSS peak", |row| bytes(row.peak.rss_bytes))
        .right("file peak", |row| bytes(row.peak.file_bytes))
        .right("cgroup peak", |row| bytes(row.peak.cgroup_bytes))
        .right("VRAM peak", |row| row.peak.vram_bytes.map(bytes))
        .right("vs best", |row| ratio(row.host_ratio, 1))
}

fn with_time(rows: Rows<'_>) -> Rows<'_> {
    let median = |row: &Compared| row.seconds.as_ref().map(|time| seconds(time.median));
    rows.right("time", |row| median(row).unwrap_or_else(|| outcome(row.outcome).to_owned()))
        .right("min to max", |row| row.seconds.as_ref().filter(|_| row.completed > 1).map(extremes))
        .right("rate", |row| row.bytes_per_second.and_then(|speed| rate(speed, 1.0)))
        .right("CPU time", |row| row.cpu_seconds.map(cpu))
        .right("vs best", |row| ratio(row.time_ratio, 2))
}

/// A row's name, short enough for a table.
fn short_name(row: &Compared) -> String {
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

/// `4.98 to 5.40 s`; with both units if they differ.
fn extremes(spread: &Spread) -> String {
    let (min, max) = (seconds(spread.min), seconds(spread.max));
    match (min.rsplit_once(' '), max.rsplit_once(' ')) {
        _ if min == max => max,
        (Some((value, unit)), Some((_, other))) if unit == other => format!("{value} to {max}"),
        _ => format!("{min} to {max}"),
    }
}

/// CPU time is counted in steps of 10 ms: 0 is less than one step.
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
    fn a_page_has_one_table_and_names_are_cut() {
        let mut report = Report::new(crate::report::CommandName::Compare);
        let row = Compared {
            strategy: "a|b".to_owned(),
            command: Some(vec!["load".to_owned(), "it's".to_owned()]),
            note: Some("slow".to_owned()),
            ..Compared::default()
        };
        report.comparison = vec![row.clone()];
        let page = crate::output::markdown::draw(&document(&report, View::PAGE));
        assert!(
            page.contains("| | unreclaimable | RSS peak |") && page.contains("| vs best | |\n"),
            "{page}"
        );
        assert!(
            page.contains("\n| a\\|b: `load \"it's\"` | - | - |") && page.contains("| slow |\n"),
            "{page}"
        );
        let long = short_name(&Compared { strategy: "é".repeat(99), ..row });
        assert_eq!(long.chars().count(), NAME_CHARACTERS_MAX);
    }
}
