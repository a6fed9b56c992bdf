//! The report as comma-separated values: for each command its rows, with fixed columns.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::{Value, json};

use super::escape::escape;
use super::facts::as_typed;
use crate::listing::Layer;
use crate::report::{
    Change, Check, CommandName, Compared, ConvertFile, Difference, Fitted, KindSlope, Params, Report, Room,
    Run, Synth, Try,
};

/// A row: the name of each column, and its cell.
type Row<const N: usize> = [(&'static str, String); N];

/// Writes a row for each run (`run`, `exec`), row of a comparison, layer (`plan`, `inspect`),
/// answer (`fits`), checkpoint (`synth`), file (`convert`), difference (`verify`), try (`fit`),
/// slope (`leak`), check (`doctor`) or metric (`report` with two files). An empty cell is "not
/// measured".
pub(super) fn write(report: &Report, to: &mut dyn Write) -> io::Result<()> {
    match report.command {
        CommandName::Run | CommandName::Exec => write_rows(to, report.runs.iter().enumerate().map(run)),
        CommandName::Compare => write_rows(to, report.comparison.iter().map(compared)),
        CommandName::Plan | CommandName::Inspect => write_rows(to, report.layers.iter().map(layer)),
        CommandName::Fits => write_rows(to, report.room.iter().map(room)),
        CommandName::Synth => write_rows(to, report.synth.iter().map(synth)),
        CommandName::Convert => {
            write_rows(to, report.convert.iter().flat_map(|convert| &convert.files).map(file))
        }
        CommandName::Verify => {
            write_rows(to, report.verification.iter().flat_map(|found| &found.differences).map(difference))
        }
        CommandName::Fit => {
            let loaders = report.fit.iter().flat_map(|fit| &fit.loaders);
            write_rows(to, loaders.flat_map(|fitted| fitted.tries.iter().map(|tried| a_try(fitted, tried))))
        }
        CommandName::Leak => write_rows(to, report.leak.iter().flat_map(|leak| &leak.slopes).map(slope)),
        CommandName::Doctor => write_rows(to, report.doctor.iter().map(check)),
        CommandName::Report => {
            write_rows(to, report.changes.iter().flat_map(|changes| &changes.metrics).map(change))
        }
        CommandName::Unknown => Ok(()),
    }
}

fn write_rows<const N: usize>(to: &mut dyn Write, rows: impl Iterator<Item = Row<N>>) -> io::Result<()> {
    for (index, row) in rows.enumerate() {
        if index == 0 {
            writeln!(to, "{}", row.each_ref().map(|(name, _)| *name).join(","))?;
        }
        writeln!(to, "{}", row.map(|(_, cell)| quoted(cell)).join(","))?;
    }
    Ok(())
}

/// A value as a cell: nothing is empty, an enum is its name in the JSON.
fn cell(value: impl Serialize) -> String {
    match json!(value) {
        Value::Null => String::new(),
        Value::String(text) => escape(&text).into_owned(),
        Value::Number(number) if number.is_f64() => number.as_f64().unwrap_or_default().to_string(),
        other => other.to_string(),
    }
}

/// Quotes as RFC 4180 asks.
fn quoted(cell: String) -> String {
    if cell.contains([',', '"', '\n', '\r']) { format!("\"{}\"", cell.replace('"', "\"\"")) } else { cell }
}

fn change(change: &Change) -> Row<8> {
    [
        ("strategy", cell(&change.strategy)),
        ("metric", cell(&change.metric)),
        ("before_bytes", cell(change.before_bytes)),
        ("after_bytes", cell(change.after_bytes)),
        ("before_seconds", cell(change.before_seconds)),
        ("after_seconds", cell(change.after_seconds)),
        ("before_bytes_per_second", cell(change.before_bytes_per_second)),
        ("after_bytes_per_second", cell(change.after_bytes_per_second)),
    ]
}

fn room(room: &Room) -> Row<4> {
    [
        ("needed_bytes", cell(room.needed_bytes)),
        ("limit_bytes", cell(room.limit_bytes)),
        ("limit_of", cell(room.limit_of)),
        ("fits", cell(room.fits)),
    ]
}

fn run((index, run): (usize, &Run)) -> Row<25> {
    fn of<T: Serialize>(run: &Run, value: impl Fn(&Params) -> T) -> String {
        cell(run.params.as_ref().map(value))
    }
    [
        ("run", cell(index + 1)),
        ("strategy", cell(&run.strategy)),
        ("outcome", cell(run.outcome)),
        ("io", of(run, |params| params.io.clone())),
        ("device", of(run, |params| params.device.clone())),
        ("budget_bytes", of(run, |params| params.budget_bytes)),
        ("window", of(run, |params| params.window.map_or_else(|| json!("all"), |window| json!(window)))),
        ("prefetch", of(run, |params| params.prefetch)),
        ("seconds", cell(run.seconds)),
        ("start_host_bytes", cell(run.baseline.host_bytes)),
        ("peak_host_bytes", cell(run.peak.host_bytes)),
        ("start_rss_bytes", cell(run.baseline.rss_bytes)),
        ("peak_rss_bytes", cell(run.peak.rss_bytes)),
        ("peak_file_bytes", cell(run.peak.file_bytes)),
        ("peak_pinned_bytes", cell(run.peak.pinned_bytes)),
        ("resident_bytes", cell(run.resident_bytes)),
        ("read_bytes", cell(run.io.read_bytes)),
        ("promise_kept", cell(run.promise.as_ref().map(|promise| promise.kept))),
        ("dtype", of(run, |params| params.dtype.clone())),
        ("pinning", cell(run.ring.as_ref().map(|ring| &ring.pinning))),
        ("start_vram_bytes", cell(run.baseline.vram_bytes)),
        ("peak_vram_bytes", cell(run.peak.vram_bytes)),
        ("vram_method", cell(&run.peak.vram_method)),
        ("mismatches", cell(run.verified.as_ref().map(|verified| verified.mismatches))),
        ("cpu_seconds", cell(run.cpu_seconds)),
    ]
}

fn compared(row: &Compared) -> Row<18> {
    let time = row.seconds.as_ref();
    [
        ("strategy", cell(&row.strategy)),
        ("command", cell(row.command.as_deref().map(as_typed))),
        ("outcome", cell(row.outcome)),
        ("runs", cell(row.runs)),
        ("completed", cell(row.completed)),
        ("cache_not_as_asked", cell(row.cache_not_as_asked)),
        ("median_seconds", cell(time.map(|time| time.median))),
        ("min_seconds", cell(time.map(|time| time.min))),
        ("max_seconds", cell(time.map(|time| time.max))),
        ("bytes_per_second", cell(row.bytes_per_second)),
        ("cpu_seconds", cell(row.cpu_seconds)),
        ("time_ratio", cell(row.time_ratio)),
        ("peak_host_bytes", cell(row.peak.host_bytes)),
        ("peak_rss_bytes", cell(row.peak.rss_bytes)),
        ("peak_file_bytes", cell(row.peak.file_bytes)),
        ("peak_cgroup_bytes", cell(row.peak.cgroup_bytes)),
        ("host_ratio", cell(row.host_ratio)),
        ("note", cell(&row.note)),
    ]
}

fn layer(layer: Layer<'_>) -> Row<4> {
    [
        ("layer", cell(layer.id)),
        ("stack", cell(layer.stack)),
        ("tensors", cell(layer.tensors.len())),
        ("bytes", cell(layer.bytes)),
    ]
}

fn synth(synth: &Synth) -> Row<6> {
    [
        ("model", cell(&synth.model)),
        ("target", cell(&synth.target)),
        ("bytes", cell(synth.bytes)),
        ("files", cell(synth.files)),
        ("tensors", cell(synth.tensors)),
        ("seconds", cell(synth.seconds)),
    ]
}

fn file(file: &ConvertFile) -> Row<5> {
    [
        ("file", cell(&file.name)),
        ("state", cell(file.state)),
        ("layers", cell(file.layers.join(" "))),
        ("tensors", cell(file.tensors)),
        ("bytes", cell(file.bytes)),
    ]
}

fn difference(difference: &Difference) -> Row<2> {
    [("place", cell(&difference.place)), ("difference", cell(&difference.what))]
}

fn a_try(fitted: &Fitted, tried: &Try) -> Row<10> {
    [
        ("strategy", cell(&fitted.strategy)),
        ("limit_bytes", cell(tried.limit_bytes)),
        ("outcome", cell(tried.outcome)),
        ("seconds", cell(tried.seconds)),
        ("slowdown", cell(tried.slowdown)),
        ("peak_host_bytes", cell(tried.peak_host_bytes)),
        ("peak_cgroup_bytes", cell(tried.peak_cgroup_bytes)),
        ("limit_hits", cell(tried.limit_hits)),
        ("refault_bytes", cell(tried.refault_bytes)),
        ("cached_share", cell(tried.cached_share)),
    ]
}

fn slope(slope: &KindSlope) -> Row<11> {
    [
        ("kind", cell(&slope.kind)),
        ("bytes_per_cycle", cell(slope.bytes_per_cycle)),
        ("low_bytes_per_cycle", cell(slope.low_bytes_per_cycle)),
        ("high_bytes_per_cycle", cell(slope.high_bytes_per_cycle)),
        ("max_bytes_per_cycle", cell(slope.max_bytes_per_cycle)),
        ("spread_bytes", cell(slope.spread_bytes)),
        ("floor_bytes", cell(slope.floor_bytes)),
        ("start_bytes", cell(slope.start_bytes)),
        ("most_growth_bytes", cell(slope.most_growth_bytes)),
        ("cycles", cell(slope.points_bytes.len())),
        ("verdict", cell(slope.verdict)),
    ]
}

fn check(check: &Check) -> Row<5> {
    [
        ("check", cell(&check.check)),
        ("state", cell(check.state)),
        ("found", cell(&check.found)),
        ("consequence", cell(&check.consequence)),
        ("fix", cell(&check.fix)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_are_quoted_only_where_they_must() {
        assert_eq!(quoted("a.b".to_owned()), "a.b");
        assert_eq!(quoted("a,\"b\"".to_owned()), "\"a,\"\"b\"\"\"");
    }

    #[test]
    fn values_are_cells() {
        assert_eq!((cell(None::<u64>), cell(2.0), cell(1e-7)), ("".into(), "2".into(), "0.0000001".into()));
        assert_eq!((cell("a\u{1b}"), cell(true)), ("a\\u{1b}".into(), "true".into()));
        assert_eq!(run((0, &Run::default())).map(|(_, cell)| cell)[..3], ["1", "", "failed"]);
    }
}
