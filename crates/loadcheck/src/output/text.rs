//! The report for people: what `table` and `plain` print. This file has the commands that measure
//! (`run`, `exec`); [`super::described`] has those that describe, [`super::converted`] those that
//! write and check checkpoints.

use super::grid::{Align, grid};
use super::terminal::{Paint, Role};
use super::{
    compared, converted, described, escape::escape, examined, fitted, leaked, passes, places, quantised,
    reading,
};
use crate::args::CacheArg;
use crate::numbers::mean;
use crate::numbers::{bytes, container, count, grouped, growth, rate, seconds};
use crate::report::{CommandName, Limit, Outcome, Params, Place, Report, Run, Source};

/// How text is to look.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Look {
    /// Colours.
    pub(crate) paint: Paint,
    /// Columns to stay inside, if there is such a limit.
    pub(crate) width: Option<u16>,
    /// More detail.
    pub(crate) verbose: bool,
}

/// The report as text; ends with a newline unless it is empty.
pub(crate) fn render(report: &Report, look: &Look) -> String {
    let mut lines = match report.command {
        CommandName::Run | CommandName::Exec => measured(report, look),
        CommandName::Compare => compared::table(report, look),
        CommandName::Plan => described::plan(report, look),
        CommandName::Inspect => described::inspect(report, look),
        CommandName::Synth => described::synth(report),
        CommandName::Convert => converted::convert(report, look),
        CommandName::Verify => converted::verify(report, look),
        CommandName::Fit => fitted::fit(report, look),
        CommandName::Leak => leaked::leak(report, look),
        CommandName::Doctor => examined::doctor(report, look),
        CommandName::Unknown => Vec::new(),
    };
    let is_emitted = report.fit.as_ref().is_some_and(|fit| fit.emit.is_some());
    if !lines.is_empty() && is_emitted {
        lines.push(String::new());
    } else if !lines.is_empty() {
        lines.extend(report.notes.iter().map(|note| wrapped(&format!("note: {}", escape(note)), look.width)));
        lines.push(String::new());
    }
    lines.join("\n")
}

/// Text, broken between words where a line would be wider than the terminal; the rest is indented.
fn wrapped(text: &str, width: Option<u16>) -> String {
    let Some(width) = width.map(usize::from) else { return text.to_owned() };
    let (mut done, mut column) = (String::with_capacity(text.len()), 0);
    for word in text.split(' ') {
        let len = word.chars().count();
        if column > 0 && column + 1 + len > width {
            done.push_str("\n      ");
            column = 6;
        } else if column > 0 {
            done.push(' ');
            column += 1;
        }
        done.push_str(word);
        column += len;
    }
    done
}

/// `source   ./model (4 files, 291 tensors, 15 GiB BF16)`
pub(crate) fn source_line(source: &Source) -> String {
    let mut facts = Vec::new();
    if source.revision.is_some() {
        facts.push("local cache".to_owned());
    }
    facts.extend(source.files.map(|files| count(files, "file")));
    facts.extend(source.tensors.map(|tensors| count(tensors, "tensor")));
    facts.extend(source.layers.map(|layers| count(layers, "layer")));
    if let Some(total) = source.bytes {
        let dtypes: Vec<&str> = source.dtypes.iter().take(3).map(|share| share.dtype.as_str()).collect();
        let more = if source.dtypes.len() > 3 { ", ..." } else { "" };
        facts.push(
            format!("{} {}{more}", bytes(Some(total)), escape(&dtypes.join(", "))).trim_end().to_owned(),
        );
    }
    let revision = source.revision.as_deref().map(|revision| format!(" @ {}", shorten(revision)));
    let facts = if facts.is_empty() { String::new() } else { format!(" ({})", facts.join(", ")) };
    format!("source    {}{}{facts}", escape(&source.given), escape(&revision.unwrap_or_default()))
}

/// The first seven characters of a commit.
fn shorten(revision: &str) -> &str {
    let is_commit = revision.len() == 40 && revision.bytes().all(|byte| byte.is_ascii_hexdigit());
    if is_commit { &revision[..7] } else { revision }
}

/// `strategy  stream · buffered, 2 readers · budget 64 MiB · device host, window all`
pub(crate) fn strategy_line(params: &Params) -> String {
    let readers = params.readers.map(|readers| format!(", {}", count(readers, "reader"))).unwrap_or_default();
    let window = match (params.window, params.window_bytes) {
        _ if matches!(params.device.as_str(), "none" | "map") => String::new(),
        (Some(window), _) => format!(", window {window}, prefetch {}", params.prefetch),
        (None, Some(window)) => format!(", window {}, prefetch {}", bytes(Some(window)), params.prefetch),
        (None, None) => ", window all".to_owned(),
    };
    format!(
        "strategy  stream · {}{readers} · budget {} · device {}{window}{}{}{}{}{}",
        params.io,
        bytes(Some(params.budget_bytes)),
        params.device,
        params.dtype.as_ref().map(|dtype| format!(" · narrowed to {dtype}")).unwrap_or_default(),
        params.quantise.as_ref().map(|form| format!(" · quantised to {form}")).unwrap_or_default(),
        params.tp.as_ref().map(|tp| format!(" · rank {tp}")).unwrap_or_default(),
        if params.hash { " · hash" } else { "" },
        if params.verify { " · verify" } else { "" }
    )
}

/// `device    cuda:0 is NVIDIA H200 (139.8 GiB, CUDA 12.8, 0000:18:00.0, GPU-...)`
pub(crate) fn device_line(report: &Report) -> Option<String> {
    let gpu = report.host.as_ref()?.gpus.first()?;
    let mut facts = vec![bytes(gpu.memory_total_bytes)];
    facts.extend(gpu.cuda_version.as_ref().map(|version| format!("CUDA {version}")));
    facts.extend(gpu.pci_bus_id.clone());
    facts.extend(gpu.uuid.clone());
    Some(format!("device    cuda:{} is {} ({})", gpu.index, escape(&gpu.name), escape(&facts.join(", "))))
}

fn measured(report: &Report, look: &Look) -> Vec<String> {
    let mut lines = Vec::new();
    if report.runs.is_empty() {
        return lines;
    }
    lines.extend(report.hashes.iter().map(|hash| format!("{}  {}", hash.blake3, escape(&hash.name))));
    lines.extend(report.source.as_ref().map(source_line));
    if let Some(exec) = &report.exec {
        lines.push(format!("command   {}", escape(&exec.command.join(" "))));
        lines.push(format!("ended     {}", how_it_ended(report)));
    }
    if let Some(params) = report.runs.first().and_then(|run| run.params.as_ref()) {
        lines.push(strategy_line(params));
    }
    if let Some(run) = report.runs.last() {
        lines.extend(reading::lines(&run.io.files));
        lines.extend(reading::moved_line(&run.io));
    }
    lines.extend(device_line(report));
    lines.extend(cache_line(&report.runs));
    lines.extend(peak_table(report, look));
    lines.extend(
        report
            .runs
            .last()
            .and_then(|run| run.passes.as_ref())
            .iter()
            .flat_map(|passes| passes::lines(passes)),
    );
    lines.extend(report.runs.last().into_iter().flat_map(|run| quantised::lines(&run.quantised)));
    lines.extend(report.runs.last().map(|run| places::lines(&run.places)).unwrap_or_default());
    lines.extend(verified_line(report));
    lines.extend(promise_lines(report, look));
    lines.extend(report.limits.iter().map(|limit| limit_line(limit, look.paint)));
    if look.verbose {
        lines.extend(
            report
                .unavailable
                .iter()
                .map(|missing| format!("  {:<8}  not measured: {}", missing.metric, escape(&missing.reason))),
        );
    }
    let partial = partial_line(report, look);
    if partial.is_none() {
        lines.extend(worst(&report.runs, |run| run.peak.host_bytes).and_then(|run| run.peak.host_bytes).map(
            |peak| {
                let (request, limit) = container(peak);
                format!("Container: request {request}, limit {limit}.")
            },
        ));
    }
    lines.extend(partial);
    lines
}

/// The highest values, as a table under a dim header.
pub(super) fn peak_table(report: &Report, look: &Look) -> Vec<String> {
    let header = [
        ("", Align::Left),
        ("peak", Align::Right),
        ("over start", Align::Right),
        ("at", Align::Left),
        ("", Align::Left),
    ];
    let is_narrow = look.width.is_some_and(|width| width < 100);
    let mut lines = grid(&header, &rows(report, is_narrow), look.width);
    for (line, role) in lines.iter_mut().zip([Role::Dim, Role::Strong]) {
        *line = look.paint.paint(role, line);
    }
    lines
}

/// That a run did not come to its end, if so.
pub(super) fn partial_line(report: &Report, look: &Look) -> Option<String> {
    let is_partial = |run: &&Run| !matches!(run.outcome, Outcome::Completed | Outcome::Stopped);
    let run = report.runs.iter().find(is_partial)?;
    let what = format!(
        "partial: the run {} after {}",
        outcome_verb(run.outcome),
        run.seconds.map_or_else(|| "an unknown time".to_owned(), seconds)
    );
    Some(look.paint.paint(Role::Warning, &what))
}

fn outcome_verb(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Completed => "completed",
        Outcome::Stopped => "was stopped",
        Outcome::Failed => "failed",
        Outcome::Killed => "was killed",
        Outcome::Refused => "was refused",
        Outcome::Interrupted => "was interrupted",
    }
}

fn how_it_ended(report: &Report) -> String {
    let Some(exec) = &report.exec else { return String::new() };
    let mut text = match (exec.exit_code, exec.signal, exec.line_seen) {
        (_, _, Some(true)) => "stopped by loadcheck: the line was seen".to_owned(),
        (Some(code), ..) => format!("exit code {code}"),
        (None, Some(signal), _) => format!("killed by signal {signal}"),
        (None, None, _) => "unknown".to_owned(),
    };
    if let Some(processes) = exec.processes.filter(|processes| *processes > 0) {
        text.push_str(&format!(
            ", at most {} at once",
            if processes == 1 { "1 process".to_owned() } else { format!("{processes} processes") }
        ));
    }
    text
}

/// `cache     cold before each run (checked: 0 % cached)`. Runs that were refused were not begun.
pub(super) fn cache_line(runs: &[Run]) -> Option<String> {
    let begun: Vec<&Run> = runs.iter().filter(|run| run.outcome != Outcome::Refused).collect();
    let asked = begun.first()?.cache.asked;
    let text = cache_text(asked, begun.iter().map(|run| run.cache.cached_share))?;
    Some(format!("cache     {text}"))
}

/// `cold before each run (checked: 0 % cached)`: the share of the run that began least as it was
/// asked to.
pub(super) fn cache_text(asked: CacheArg, shares: impl Iterator<Item = Option<f64>>) -> Option<String> {
    let (name, worse): (&str, fn(f64, f64) -> f64) = match asked {
        CacheArg::Cold => ("cold", f64::max),
        CacheArg::Warm => ("warm", f64::min),
        CacheArg::Asis => return None,
    };
    let worst = shares.collect::<Option<Vec<f64>>>().and_then(|shares| shares.into_iter().reduce(worse));
    let check = match worst {
        None => "unchecked".to_owned(),
        Some(share) if share > 0.0 && share < 0.01 => "checked: < 1 % cached".to_owned(),
        Some(share) => format!("checked: {:.0} % cached", (100.0 * share).floor()),
    };
    Some(format!("{name} before each run ({check})"))
}

/// The run in which a metric was highest.
pub(crate) fn worst(runs: &[Run], metric: impl Fn(&Run) -> Option<u64>) -> Option<&Run> {
    runs.iter().max_by_key(|run| metric(run))
}

/// The table's rows. In a narrow terminal the notes are short, so that a row stays a line.
fn rows(report: &Report, is_narrow: bool) -> Vec<Vec<String>> {
    let runs = &report.runs;
    let pick = |wide: &str, narrow: &str| if is_narrow { narrow.to_owned() } else { wide.to_owned() };
    let row = |name: &str, peak: Option<u64>, start: Option<u64>, at: Option<&Place>, note: String| {
        let metric = format!("peak.{}_bytes", name.to_lowercase());
        let missing = report.unavailable.iter().find(|entry| peak.is_none() && entry.metric == metric);
        let note = missing.map_or(note, |entry| format!("not measured: {}", entry.reason));
        let at = match at {
            // Before the first layer, the headers are read and the plan is made.
            Some(at) if report.command == CommandName::Run && at.layer.is_none() => "headers".to_owned(),
            at => at.map(place).unwrap_or_default(),
        };
        vec![name.to_owned(), bytes(peak), growth(peak, start), at, note]
    };
    let mut rows = Vec::new();
    if let Some(run) = worst(runs, |run| run.peak.host_bytes) {
        let note = pick("cannot be reclaimed: size the container on this", "size the container on this");
        rows.push(row("host", run.peak.host_bytes, run.baseline.host_bytes, run.peak.at.as_ref(), note));
    }
    if let Some(run) = worst(runs, |run| run.peak.rss_bytes) {
        rows.push(row(
            "RSS",
            run.peak.rss_bytes,
            run.baseline.rss_bytes,
            run.peak.rss_at.as_ref(),
            rss_note(report, is_narrow),
        ));
    }
    if let Some(resident) =
        worst(runs, |run| run.resident_bytes).and_then(|run| run.resident_bytes).filter(|most| *most > 0)
    {
        let is_on_host = runs.iter().any(|run| run.resident_host_bytes > Some(0));
        let note = if is_on_host {
            pick("part of both: the layers that are kept, beside the budget", "part of both: kept layers")
        } else {
            pick("the layers that are kept, on the device: part of VRAM", "on the device")
        };
        rows.push(row("layers", Some(resident), Some(0), None, note));
    }
    if let Some(run) = worst(runs, |run| run.peak.pinned_bytes).filter(|run| run.peak.pinned_bytes > Some(0))
    {
        let note = match run.ring.as_ref().map(|ring| ring.pinning.as_str()) {
            Some("slot_by_slot") => "part of host; slot by slot",
            Some("fewer_slots") => "part of host; not all slots",
            _ => "part of host",
        };
        rows.push(row("pinned", run.peak.pinned_bytes, Some(0), None, note.to_owned()));
    }
    rows.extend(
        vram_row(report, is_narrow).map(|(peak, start, at, note)| row("VRAM", peak, start, at, note)),
    );
    if let Some((run, after)) = runs.last().and_then(|run| Some((run, run.after_unload.as_ref()?))) {
        let note = pick("RSS once everything was given back", "RSS, all given back");
        rows.push(row("after", after.rss_bytes, run.baseline.rss_bytes, None, note));
    }
    rows.extend(time_row(report));
    rows
}

/// Device memory, if the load takes some: peak, start, place, and what became of it.
type VramRow<'a> = (Option<u64>, Option<u64>, Option<&'a Place>, String);

fn vram_row(report: &Report, is_narrow: bool) -> Option<VramRow<'_>> {
    if report.host.as_ref()?.gpus.is_empty() {
        return None;
    }
    let run = worst(&report.runs, |run| run.peak.vram_bytes)?;
    let mut note = match (run.peak.vram_method.as_deref(), is_narrow) {
        (Some("nvml_process"), false) => "NVML, this process".to_owned(),
        (Some("nvml_device"), false) => "NVML, whole device".to_owned(),
        (Some("driver"), false) => "driver, whole device".to_owned(),
        (method, _) => method.unwrap_or_default().to_owned(),
    };
    let after = run.after_unload.as_ref().and_then(|after| after.vram_bytes);
    if let Some((after, start)) = after.zip(run.baseline.vram_bytes) {
        let more = after.saturating_sub(start);
        let back = if more == 0 {
            format!("; back at {} after unload", bytes(Some(after)))
        } else {
            format!("; {} more than at the start after unload", bytes(Some(more)))
        };
        note.push_str(&back);
    }
    Some((run.peak.vram_bytes, run.baseline.vram_bytes, run.peak.vram_at.as_ref(), note))
}

/// `verified  75 of 75 tensors equal their files, 4.8 MiB in 3 ms`
pub(crate) fn verified_line(report: &Report) -> Option<String> {
    let verified = report.runs.iter().filter_map(|run| run.verified.as_ref());
    let verified = verified.max_by_key(|verified| verified.mismatches)?;
    let equal = verified.tensors.saturating_sub(verified.mismatches);
    Some(format!(
        "verified  {} of {} equal their files, {} read back in {}",
        grouped(equal),
        count(verified.tensors, "tensor"),
        bytes(Some(verified.bytes)),
        seconds(verified.seconds)
    ))
}

/// What stands beside RSS: the promise, if there is one.
fn rss_note(report: &Report, is_narrow: bool) -> String {
    let promise =
        report.runs.iter().filter_map(|run| run.promise.as_ref()).max_by_key(|promise| promise.growth_bytes);
    let Some(promise) = promise else { return "with file pages".to_owned() };
    let most = bytes(Some(promise.limit_bytes));
    let word = if promise.kept { "kept" } else { "BROKEN" };
    if is_narrow {
        format!("promised: +{most}, {word}")
    } else {
        format!("with file pages; promise: at most {most} over start, {word}")
    }
}

fn time_row(report: &Report) -> Option<Vec<String>> {
    // A run that was cut short says nothing about time, unless there is no other.
    let is_whole = |run: &&Run| matches!(run.outcome, Outcome::Completed | Outcome::Stopped);
    let whole: Vec<&Run> = report.runs.iter().filter(is_whole).collect();
    let runs = if whole.is_empty() { report.runs.iter().collect() } else { whole };
    let times: Vec<f64> = runs.iter().filter_map(|run| run.seconds).collect();
    if times.is_empty() {
        return None;
    }
    let average = mean(&times);
    let moved = runs.last().and_then(|run| run.io.read_bytes);
    let speed = moved.and_then(|moved| rate(moved, average)).unwrap_or_default();
    let mut note = Vec::new();
    if times.len() > 1 {
        let deviation = mean(&times.iter().map(|time| (time - average).powi(2)).collect::<Vec<_>>()).sqrt();
        note.push(format!("± {} ({} runs)", seconds(deviation), times.len()));
    }
    if let Some((cached, read)) =
        runs.last().and_then(|run| Some((run.io.from_cache_bytes?, run.io.read_bytes?)))
        && read > 0
    {
        note.push(format!("{} % from page cache", u128::from(cached) * 100 / u128::from(read)));
    }
    Some(vec!["time".to_owned(), seconds(average), String::new(), speed, note.join(", ")])
}

/// A layer, or what else is known of the moment.
pub(crate) fn place(place: &Place) -> String {
    match (&place.layer, &place.tensor) {
        (Some(layer), _) => layer.clone(),
        (None, Some(tensor)) => tensor.clone(),
        (None, None) => format!("{:.2} s", place.seconds),
    }
}

pub(super) fn promise_lines(report: &Report, look: &Look) -> Vec<String> {
    let broken = report.runs.iter().enumerate().filter_map(|(index, run)| {
        let promise = run.promise.as_ref().filter(|promise| !promise.kept)?;
        Some(format!(
            "{}  run {}: RSS grew by {}, promised were at most {}",
            look.paint.paint(Role::Bad, "FAIL"),
            index + 1,
            bytes(Some(promise.growth_bytes)),
            bytes(Some(promise.limit_bytes))
        ))
    });
    broken.collect()
}

/// `FAIL  rss    412 MiB  limit 200 MiB  first exceeded at ...`
pub(crate) fn limit_line(limit: &Limit, paint: Paint) -> String {
    let word = if limit.passed { paint.paint(Role::Good, "PASS") } else { paint.paint(Role::Bad, "FAIL") };
    let (actual, most) = limit_values(limit);
    let mut line = format!("{word}  {:<6}  {actual:>8}  limit {most}", limit.metric);
    if let Some(at) = &limit.first_exceeded_at {
        line.push_str(&format!("  first exceeded at {}", escape(&exceeded_at(at))));
    }
    if limit.inside_spread {
        line.push_str("  (inside the spread of the runs)");
    }
    line
}

/// The two sides of a limit, as text.
pub(crate) fn limit_values(limit: &Limit) -> (String, String) {
    match limit.limit_seconds {
        Some(most) => (limit.actual_seconds.map_or_else(|| "-".to_owned(), seconds), seconds(most)),
        None => (bytes(limit.actual_bytes), bytes(limit.limit_bytes)),
    }
}

/// Layer and tensor, or the time.
pub(crate) fn exceeded_at(at: &Place) -> String {
    match (&at.layer, &at.tensor) {
        (Some(layer), Some(tensor)) => format!("{layer}, `{tensor}`"),
        _ => place(at),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::CacheState;

    #[test]
    fn the_run_that_began_least_as_asked_is_told() {
        let run = |cached_share| Run {
            outcome: Outcome::Completed,
            cache: CacheState { asked: CacheArg::Cold, cached_share },
            ..Run::default()
        };
        let refused = || Run { outcome: Outcome::Refused, ..Run::default() };
        assert_eq!(
            cache_line(&[refused(), run(Some(0.0)), run(Some(0.5))]).unwrap(),
            "cache     cold before each run (checked: 50 % cached)"
        );
        assert_eq!(cache_line(&[refused()]), None);
        let text = |asked, shares: &[Option<f64>]| cache_text(asked, shares.iter().copied()).unwrap();
        assert_eq!(
            text(CacheArg::Warm, &[Some(1.0), Some(0.996)]),
            "warm before each run (checked: 99 % cached)"
        );
        assert_eq!(text(CacheArg::Cold, &[Some(0.0001)]), "cold before each run (checked: < 1 % cached)");
        assert_eq!(text(CacheArg::Cold, &[Some(0.0), None]), "cold before each run (unchecked)");
        assert_eq!(text(CacheArg::Cold, &[]), "cold before each run (unchecked)");
    }

    #[test]
    fn notes_break_between_words_inside_the_width() {
        let text = "note: pages of files may be taken back while they are clean";
        assert_eq!(wrapped(text, None), text);
        let lines = wrapped(text, Some(24));
        assert!(lines.lines().all(|line| line.len() <= 24), "{lines}");
        assert_eq!(lines.split_whitespace().collect::<Vec<_>>().join(" "), text);
        assert!(
            lines.lines().nth(1).is_some_and(|line| line.starts_with("      ") && line.len() > 6),
            "{lines}"
        );
        assert_eq!(wrapped("note: averylongword", Some(8)), "note:\n      averylongword");
    }
}
