//! `run` and `exec`: peaks of memory, time, and how the run ended.

use super::document::{Align, Document, Part, Table, Text, View, fact, name};
use super::facts;
use super::terminal::Role;
use crate::numbers::{bytes, container, growth, mean, rate, seconds};
use crate::report::{CommandName, Exec, Outcome, Place, Report, Run};

/// The document of `run` and `exec`.
pub(super) fn document(report: &Report, view: View) -> Document {
    let mut document = Document::default();
    let Some((first, last)) = report.runs.first().zip(report.runs.last()) else { return document };
    if !view.is_page {
        let hash = |hash: &crate::report::TensorHash| format!("{}  {}", hash.blake3, hash.name);
        let hashes: Vec<String> = report.hashes.iter().map(hash).collect();
        document.extend((!hashes.is_empty()).then_some(Part::Verbatim(hashes)));
    }
    document.extend(report.source.as_ref().map(|source| facts::source(source, view)));
    if let Some(exec) = &report.exec {
        document.fact("command", name(exec.command.join(" ")));
        document.extend(exec.pid.map(|pid| fact("process", pid.to_string())));
        document.fact("ended", how_it_ended(exec));
    }
    if view.shows_how() {
        document.extend(first.params.as_ref().map(facts::strategy));
        document.extend(facts::reading(&last.io.files));
        document.extend(facts::moved(&last.io));
    }
    document.extend(facts::device(report));
    document.extend(facts::cache(&report.runs));
    document.table(peaks(report, view));
    document.extend(last.passes.iter().flat_map(|passes| facts::passes(passes, &last.io)));
    document.extend(facts::quantised(&last.quantised));
    document.extend(last.places.iter().map(facts::place_share));
    document.extend(facts::verified(report));
    document.extend(facts::broken_promises(report));
    if !view.is_page {
        document.extend(report.limits.iter().map(|limit| Part::Line(facts::limit(limit))));
    }
    document.extend(facts::not_measured(report, view));
    let partial = facts::partial(report);
    let peak = worst(&report.runs, |run| run.peak.host_bytes).and_then(|run| run.peak.host_bytes);
    if let Some(peak) = peak.filter(|_| partial.is_none() && !report.is_attached()) {
        let (request, limit) = container(peak);
        document.line(format!("Container: request {request}, limit {limit}."));
    }
    document.extend(partial);
    document
}

fn how_it_ended(exec: &Exec) -> String {
    let mut text = match (exec.exit_code, exec.signal, exec.line_seen) {
        _ if exec.has_ended == Some(true) => "by itself".to_owned(),
        _ if exec.has_ended == Some(false) => "it still runs".to_owned(),
        (_, _, Some(true)) => "stopped by loadcheck: the line was seen".to_owned(),
        (Some(code), ..) => format!("exit code {code}"),
        (None, Some(signal), _) => format!("killed by signal {signal}"),
        (None, None, _) => "unknown".to_owned(),
    };
    if let Some(processes) = exec.processes.filter(|processes| *processes > 0) {
        let processes =
            if processes == 1 { "1 process".to_owned() } else { format!("{processes} processes") };
        text.push_str(&format!(", at most {processes} at once"));
    }
    text
}

/// The run in which a metric was highest.
fn worst(runs: &[Run], metric: impl Fn(&Run) -> Option<u64>) -> Option<&Run> {
    runs.iter().max_by_key(|run| metric(run))
}

/// On a terminal the highest values over all runs; on a page a row for each run.
pub(super) fn peaks(report: &Report, view: View) -> Table {
    if view.is_page {
        return each_run(&report.runs);
    }
    let header = [
        ("", Align::Left),
        ("peak", Align::Right),
        ("over start", Align::Right),
        ("at", Align::Left),
        ("", Align::Left),
    ];
    let rows = peak_rows(report, view.is_narrow).into_iter().map(|row| row.map(Text::from));
    Table::of_rows(header, rows.collect()).emphasise(Some(0), Role::Strong)
}

fn each_run(runs: &[Run]) -> Table {
    Table::of(runs.iter().enumerate())
        .right("run", |(index, _)| (index + 1).to_string())
        .right("unreclaimable", |(_, run)| bytes(run.peak.host_bytes))
        .right("over start", |(_, run)| growth(run.peak.host_bytes, run.baseline.host_bytes))
        .right("RSS peak", |(_, run)| bytes(run.peak.rss_bytes))
        .right("over start", |(_, run)| growth(run.peak.rss_bytes, run.baseline.rss_bytes))
        .left("at", |(_, run)| run.peak.at.as_ref().map(|at| name(facts::place(at))))
        .right("time", |(_, run)| run.seconds.map(seconds))
        .table()
}

/// A row of the table of peaks: name, peak, growth, place, note.
type PeakRow = [String; 5];

/// The rows. A narrow terminal gets short notes, so that each row stays on one line.
fn peak_rows(report: &Report, is_narrow: bool) -> Vec<PeakRow> {
    let runs = &report.runs;
    let pick = |wide: &str, narrow: &str| if is_narrow { narrow.to_owned() } else { wide.to_owned() };
    let row = |name: &str, peak: Option<u64>, start: Option<u64>, at: Option<&Place>, note: String| {
        let metric = if name == "unreclaimable" { "host" } else { name }.to_lowercase();
        let metric = format!("peak.{metric}_bytes");
        let missing = report.unavailable.iter().find(|entry| peak.is_none() && entry.metric == metric);
        let note = missing.map_or(note, |entry| format!("not measured: {}", entry.reason));
        let at = match at {
            // Headers are read and the plan is made before the first layer.
            Some(at) if report.command == CommandName::Run && at.layer.is_none() => "headers".to_owned(),
            at => at.map(facts::place).unwrap_or_default(),
        };
        [name.to_owned(), bytes(peak), growth(peak, start), at, note]
    };
    let mut rows = Vec::new();
    if let Some(run) = worst(runs, |run| run.peak.host_bytes) {
        // Where it was stopped, or measured in part, more may be needed.
        let is_whole = report.error.is_none() && !report.is_attached();
        let note = match is_whole {
            true => pick("a container's limit has to hold this", "sizes a container"),
            false => "so far".to_owned(),
        };
        rows.push(row(
            "unreclaimable",
            run.peak.host_bytes,
            run.baseline.host_bytes,
            run.peak.at.as_ref(),
            note,
        ));
    }
    if let Some(run) = worst(runs, |run| run.peak.rss_bytes) {
        let (peak, note) = (&run.peak, rss_note(report, is_narrow));
        rows.push(row("RSS", peak.rss_bytes, run.baseline.rss_bytes, peak.rss_at.as_ref(), note));
    }
    if let Some(resident) = runs.iter().filter_map(|run| run.resident_bytes).max().filter(|most| *most > 0) {
        let is_on_host = runs.iter().any(|run| run.resident_host_bytes > Some(0));
        let note = if is_on_host {
            pick("part of both, beside the budget", "part of both")
        } else {
            pick("on the device: part of VRAM", "on the device")
        };
        rows.push(row("resident layers", Some(resident), Some(0), None, note));
    }
    if let Some(run) = worst(runs, |run| run.peak.pinned_bytes).filter(|run| run.peak.pinned_bytes > Some(0))
    {
        let note = match run.ring.as_ref().map(|ring| ring.pinning.as_str()) {
            Some("slot_by_slot") => "part of unreclaimable; slot by slot",
            Some("fewer_slots") => "part of unreclaimable; not all slots",
            _ => "part of unreclaimable",
        };
        rows.push(row("pinned", run.peak.pinned_bytes, Some(0), None, note.to_owned()));
    }
    let has_gpu = report.host.as_ref().is_some_and(|host| !host.gpus.is_empty());
    if let Some(run) = worst(runs, |run| run.peak.vram_bytes).filter(|_| has_gpu) {
        let (peak, note) = (&run.peak, vram_note(run, is_narrow));
        rows.push(row("VRAM", peak.vram_bytes, run.baseline.vram_bytes, peak.vram_at.as_ref(), note));
    }
    if let Some((run, after)) = runs.last().and_then(|run| Some((run, run.after_unload.as_ref()?))) {
        let note = pick("RSS once everything was given back", "all given back");
        rows.push(row("after", after.rss_bytes, run.baseline.rss_bytes, None, note));
    }
    rows.extend(time_row(report, is_narrow));
    rows
}

/// How device memory was measured, and what was left after unload.
fn vram_note(run: &Run, is_narrow: bool) -> String {
    let mut note = match (run.peak.vram_method.as_deref(), is_narrow) {
        (Some("nvml_process"), false) => "NVML, this process".to_owned(),
        (Some("nvml_device"), false) => "NVML, whole device".to_owned(),
        (Some("driver"), false) => "driver, whole device".to_owned(),
        (method, _) => method.unwrap_or_default().to_owned(),
    };
    let after = run.after_unload.as_ref().and_then(|after| after.vram_bytes);
    if let Some((after, start)) = after.zip(run.baseline.vram_bytes) {
        note.push_str(&match after.saturating_sub(start) {
            0 => format!("; back at {} after unload", bytes(after)),
            more => format!("; {} more than at the start after unload", bytes(more)),
        });
    }
    note
}

/// The promise about RSS, if there is one.
fn rss_note(report: &Report, is_narrow: bool) -> String {
    let promises = report.runs.iter().filter_map(|run| run.promise.as_ref());
    let Some(promise) = promises.max_by_key(|promise| promise.growth_bytes) else {
        return "with file pages".to_owned();
    };
    let most = bytes(promise.limit_bytes);
    let word = if promise.kept { "ok" } else { "BROKEN" };
    if is_narrow {
        format!("+{most} max, {word}")
    } else {
        format!("with file pages; promise: at most {most} over start, {word}")
    }
}

fn time_row(report: &Report, is_narrow: bool) -> Option<PeakRow> {
    // Times of runs that ended early count only if there are no others.
    let is_whole = |run: &&Run| matches!(run.outcome, Outcome::Completed | Outcome::Stopped);
    let whole: Vec<&Run> = report.runs.iter().filter(is_whole).collect();
    let runs = if whole.is_empty() { report.runs.iter().collect() } else { whole };
    let times: Vec<f64> = runs.iter().filter_map(|run| run.seconds).collect();
    if times.is_empty() {
        return None;
    }
    let average = mean(&times);
    let io = &runs.last()?.io;
    let speed = io.read_bytes.and_then(|moved| rate(moved, average)).unwrap_or_default();
    let mut note = Vec::new();
    if times.len() > 1 {
        let deviation = mean(&times.iter().map(|time| (time - average).powi(2)).collect::<Vec<_>>()).sqrt();
        note.push(format!("± {} ({} runs)", seconds(deviation), times.len()));
    }
    if let Some((cached, read)) = io.from_cache_bytes.zip(io.read_bytes).filter(|(_, read)| *read > 0) {
        let cache = if is_narrow { "cache" } else { "page cache" };
        note.push(format!("{} % from {cache}", u128::from(cached) * 100 / u128::from(read)));
    }
    Some(["time".to_owned(), seconds(average), String::new(), speed, note.join(", ")])
}
