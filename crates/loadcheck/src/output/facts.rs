//! Facts that several commands show: the source, how it is read, the device, limits, and what a
//! run left behind.

use super::document::{Document, Part, Table, Text, View, fact, name, role};
use super::terminal::Role;
use crate::args::CacheArg;
use crate::numbers::{bytes, count, grouped, growth, percent, rate, seconds, stated};
use crate::report::metric_name;
use crate::report::{
    FileReading, Finding, IoCounters, Limit, MemoryTerm, Outcome, Params, Passes, Place, PlaceShare,
    QuantisedTensor, Report, Run, Shares, Source,
};
use onelayer::units::to_u64;

/// Groups of files that are shown; JSON has every file.
const FILE_GROUPS_MAX: usize = 4;
/// Passes that are shown.
const PASSES_MAX: usize = 8;
/// Quantised tensors that are shown.
const QUANTISED_MAX: usize = 3;

/// The answer. That of an error is on stderr.
pub(super) fn answer(report: &Report) -> Option<Part> {
    let answer = report.answer.as_ref().filter(|answer| answer.outcome != Finding::Error)?;
    let role = match answer.outcome {
        Finding::Ok | Finding::Fits => Role::Good,
        Finding::Unclear => Role::Warning,
        _ => Role::Bad,
    };
    Some(Part::Answer(role, answer.sentence.clone()))
}

/// `source    ./model (4 files, 291 tensors, 15 GiB BF16)`
pub(super) fn source(source: &Source, view: View) -> Part {
    if view.is_page {
        let facts = [source.tensors.map(|tensors| count(tensors, "tensor")), source.bytes.map(bytes)];
        let facts: Vec<String> = facts.into_iter().flatten().collect();
        return Part::Line(name(&source.given) + format!(": {}", facts.join(", ")));
    }
    let mut facts = Vec::new();
    if source.revision.is_some() {
        facts.push("local cache".to_owned());
    }
    let format = source.formats.join(" and ");
    let kind = if matches!(&*format, "" | "safetensors") { "file".to_owned() } else { format + " file" };
    facts.extend(source.files.map(|files| count(files, &kind)));
    facts.extend(source.tensors.map(|tensors| count(tensors, "tensor")));
    facts.extend(source.layers.map(|layers| count(layers, "layer")));
    if let Some(total) = source.bytes {
        let dtypes: Vec<&str> = source.dtypes.iter().take(3).map(|share| share.dtype.as_str()).collect();
        let more = if source.dtypes.len() > 3 { ", ..." } else { "" };
        facts.push(format!("{} {}{more}", bytes(total), dtypes.join(", ")).trim_end().to_owned());
    }
    let revision = source.revision.as_deref().map(|revision| format!(" @ {}", shorten(revision)));
    let facts = if facts.is_empty() { String::new() } else { format!(" ({})", facts.join(", ")) };
    fact("source", format!("{}{}{facts}", source.given, revision.unwrap_or_default()))
}

/// The first seven characters of a commit.
fn shorten(revision: &str) -> &str {
    let is_commit = revision.len() == 40 && revision.bytes().all(|byte| byte.is_ascii_hexdigit());
    if is_commit { &revision[..7] } else { revision }
}

/// `strategy  stream · buffered, 2 readers · budget 64 MiB · device host, window all`
pub(super) fn strategy(params: &Params) -> Part {
    let readers = params.readers.map(|readers| format!(", {}", count(readers, "reader"))).unwrap_or_default();
    let window = match (params.window, params.window_bytes) {
        _ if matches!(params.device.as_str(), "none" | "map") => String::new(),
        (Some(window), _) => format!(", window {window}, prefetch {}", params.prefetch),
        (None, Some(window)) => format!(", window {}, prefetch {}", bytes(window), params.prefetch),
        (None, None) => ", window all".to_owned(),
    };
    let mut parts = vec![
        format!("stream · {}{readers}", params.io),
        format!("budget {}", stated(params.budget_bytes)),
        format!("device {}{window}", params.device),
    ];
    parts.extend(params.dtype.as_ref().map(|dtype| format!("narrowed to {dtype}")));
    parts.extend(params.quantise.as_ref().map(|form| format!("quantised to {form}")));
    parts.extend(params.tp.as_ref().map(|tp| format!("rank {tp}")));
    parts.extend(params.hash.then(|| "hash".to_owned()));
    parts.extend(params.verify.then(|| "verify".to_owned()));
    fact("strategy", parts.join(" · "))
}

/// `device    cuda:0 is NVIDIA H200 (139.8 GiB, CUDA 12.8, 0000:18:00.0, GPU-...)`
pub(super) fn device(report: &Report) -> Option<Part> {
    let gpu = report.host.as_ref()?.gpus.first()?;
    let mut facts = vec![bytes(gpu.memory_total_bytes)];
    facts.extend(gpu.cuda_version.as_ref().map(|version| format!("CUDA {version}")));
    facts.extend(gpu.pci_bus_id.clone());
    facts.extend(gpu.uuid.clone());
    Some(fact("device", format!("cuda:{} is {} ({})", gpu.index, gpu.name, facts.join(", "))))
}

/// `cache     cold before each run (checked: 0 % cached)`. Refused runs never began.
pub(super) fn cache(runs: &[Run]) -> Option<Part> {
    let begun: Vec<&Run> = runs.iter().filter(|run| run.outcome != Outcome::Refused).collect();
    let asked = begun.first()?.cache.asked;
    let text = cache_text(asked, begun.iter().map(|run| run.cache.cached_share))?;
    Some(fact("cache", text))
}

/// `cold before each run (checked: 0 % cached)`: the share of the run that was furthest from what
/// was asked for.
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

/// `reading   direct: 4 files, 15.9 GiB on ext4: not in the page cache; page cache untouched`: a
/// fact for each group of files that are read alike.
pub(super) fn reading(files: &[FileReading]) -> Vec<Part> {
    let mut groups: Vec<(&FileReading, u64, u64)> = Vec::new();
    for file in files {
        match groups.iter_mut().find(|(first, ..)| is_alike(first, file)) {
            Some((_, number, sum_bytes)) => {
                *number += 1;
                *sum_bytes = sum_bytes.saturating_add(file.bytes);
            }
            None => groups.push((file, 1, file.bytes)),
        }
    }
    let hidden: u64 = groups.iter().skip(FILE_GROUPS_MAX).map(|(_, number, _)| number).sum();
    let mut facts: Vec<Part> = groups.iter().take(FILE_GROUPS_MAX).map(read_alike).collect();
    if hidden > 0 {
        facts.push(fact("reading", format!("{} more (all of them: --json)", count(hidden, "file"))));
    }
    facts
}

fn is_alike(one: &FileReading, other: &FileReading) -> bool {
    (&one.mode, &one.reason, &one.file_system, &one.new_pages)
        == (&other.mode, &other.reason, &other.file_system, &other.new_pages)
}

fn read_alike((first, number, sum_bytes): &(&FileReading, u64, u64)) -> Part {
    let file_system = first.file_system.as_ref().map(|kind| format!(" on {kind}")).unwrap_or_default();
    let share = match first.resident_share {
        Some(share) if *number == 1 && first.reason == "partly_resident" => format!(" ({})", percent(share)),
        _ => String::new(),
    };
    let new_pages = match first.new_pages.as_str() {
        "uncached" => "; new pages are forgotten by the kernel",
        "dropped_behind" => "; new pages are dropped behind",
        "kept" => "; new pages stay in the page cache",
        _ => "",
    };
    let files = format!("{}, {}{file_system}", count(*number, "file"), bytes(*sum_bytes));
    fact("reading", format!("{}: {files}: {}{share}{new_pages}", first.mode, first.why))
}

/// `read      1.9 GiB direct, 2 GiB buffered; 1.002 x the tensors`
pub(super) fn moved(io: &IoCounters) -> Option<Part> {
    let ways = [(io.direct_bytes, "direct"), (io.buffered_bytes, "buffered"), (io.mapped_bytes, "mapped")];
    let ways: Vec<String> = ways
        .iter()
        .filter(|(moved, _)| moved.is_some_and(|moved| moved > 0))
        .map(|(moved, way)| format!("{} {way}", bytes(*moved)))
        .collect();
    if ways.is_empty() {
        return None;
    }
    let mut text = ways.join(", ");
    if let Some(ratio) = io.read_amplification {
        text.push_str(&format!("; {ratio:.3} x the tensors"));
    }
    if let Some(corrected) = io.corrected_bytes.filter(|corrected| *corrected > 0) {
        text.push_str(&format!("; {} another way than planned, corrected", bytes(corrected)));
    }
    if let Some(dropped) = io.dropped_behind_bytes.filter(|dropped| *dropped > 0) {
        text.push_str(&format!("; {} dropped behind", bytes(dropped)));
    }
    Some(fact("read", text))
}

/// The words of a command as a shell takes them.
pub(super) fn as_typed(words: &[String]) -> String {
    shlex::try_join(words.iter().map(String::as_str)).unwrap_or_else(|_| words.join(" "))
}

/// The terms of a sum of memory, and the sum itself as `total` calls it.
pub(super) fn memory_terms(terms: &[MemoryTerm], total: Option<(u64, String)>) -> Table {
    let terms = terms.iter().map(|term| (term.bytes, term.name.clone()));
    Table::of(terms.chain(total))
        .right("", |(size, _)| bytes(*size))
        .left("", |(_, term)| term.clone())
        .table()
}

/// How long each pass took, and what the load waited for.
pub(super) fn passes(passes: &Passes, io: &IoCounters) -> Vec<Part> {
    let is_cached = io.read_bytes.is_some_and(|read| read > 0) && io.from_cache_bytes >= io.read_bytes;
    let shares = |shares| self::shares(shares, if is_cached { "page cache" } else { "disk" });
    let kept = match passes.kept_bytes {
        0 => String::new(),
        kept_bytes => format!(", kept layers {}", bytes(kept_bytes)),
    };
    let (number, asked) = (grouped(to_u64(passes.each.len())), grouped(passes.asked));
    let mut parts = vec![fact(
        "steps",
        format!("{number} of {asked} decode steps, window {}{kept}", bytes(passes.window_bytes)),
    )];
    let hidden = passes.each.len().saturating_sub(PASSES_MAX);
    for (index, pass) in passes.each.iter().enumerate() {
        // The last pass is always shown.
        if hidden > 0 && (PASSES_MAX - 1..passes.each.len() - 1).contains(&index) {
            continue;
        }
        let speed = rate(pass.read_bytes, pass.seconds).map(|rate| format!(", {rate} read"));
        let (time, speed) = (seconds(pass.seconds), speed.unwrap_or_default());
        let waited = shares(&pass.shares);
        parts.push(Part::Line(format!("  step {:<4}{time:>9}{speed}; {waited}", index + 1).into()));
    }
    if hidden > 0 {
        parts.push(Part::Line(format!("  {hidden} between are left out (all of them: --json)").into()));
    }
    parts.push(fact("bottleneck", shares(&passes.shares)));
    parts
}

/// `disk 82 %, engine 3 %`: the largest first, none below half a per cent.
fn shares(shares: &Shares, reading: &str) -> String {
    let mut named: Vec<_> = shares.named().into_iter().filter(|(_, share)| *share >= 0.005).collect();
    named.sort_by(|one, other| other.1.total_cmp(&one.1));
    if named.is_empty() {
        return "nothing: no waits".to_owned();
    }
    let name = |name| if name == "disk" { reading } else { name };
    let parts: Vec<_> =
        named.iter().map(|(what, share)| format!("{} {}", name(*what), percent(*share))).collect();
    parts.join(", ")
}

/// Tensors with the largest RMS error, largest first.
pub(super) fn quantised(tensors: &[QuantisedTensor]) -> Vec<Part> {
    if tensors.is_empty() {
        return Vec::new();
    }
    let mut worst: Vec<&QuantisedTensor> = tensors.iter().collect();
    worst.sort_by(|left, right| {
        right.rms_error.total_cmp(&left.rms_error).then_with(|| left.name.cmp(&right.name))
    });
    let number = count(to_u64(tensors.len()), "tensor");
    let head = Part::Line(format!("quantised {number}; RMS and largest error of the worst:").into());
    let line = |tensor: &&QuantisedTensor| {
        let errors = format!("{:.3e}  {:.3e}", tensor.rms_error, tensor.max_abs_error);
        fact("", format!("{errors}  {} (largest element {:.3e})", tensor.name, tensor.max_abs))
    };
    [head].into_iter().chain(worst.iter().take(QUANTISED_MAX).map(line)).collect()
}

/// `place     GPU 0: 12 layers, 3.1 GiB; 1.2 s, 2.6 GiB/s`
pub(super) fn place_share(place: &PlaceShare) -> Part {
    let layers = count(place.layers, "layer");
    let what = format!("{}: {layers}, {}", tier_name(&place.tier), bytes(place.tensor_bytes));
    let Some(took) = place.seconds else { return fact("place", format!("{what}; not read")) };
    let speed = rate(place.read_bytes, took).map(|rate| format!(", {rate}")).unwrap_or_default();
    let back = place.vram.first().and_then(|vram| {
        let more = u64::try_from(vram.after_unload_growth_bytes?).unwrap_or(0);
        Some(match more {
            0 => "; all of it back after unload".to_owned(),
            more => format!("; {} more than at the start after unload", bytes(more)),
        })
    });
    fact("place", format!("{what}; {}{speed}{}", seconds(took), back.unwrap_or_default()))
}

/// `GPU 0`, `host`, `disk`.
pub(super) fn tier_name(tier: &str) -> String {
    match tier {
        "cpu" => "host".to_owned(),
        "disk" => tier.to_owned(),
        device => format!("GPU {device}"),
    }
}

/// `verified  75 of 75 tensors equal their files, 4.8 MiB read back in 3 ms`
pub(super) fn verified(report: &Report) -> Option<Part> {
    let verified = report.runs.iter().filter_map(|run| run.verified.as_ref());
    let verified = verified.max_by_key(|verified| verified.mismatches)?;
    let equal = grouped(verified.tensors.saturating_sub(verified.mismatches));
    let tensors = count(verified.tensors, "tensor");
    let (size, time) = (bytes(verified.bytes), seconds(verified.seconds));
    Some(fact("verified", format!("{equal} of {tensors} equal their files, {size} read back in {time}")))
}

/// Runs that used more memory than promised.
pub(super) fn broken_promises(report: &Report) -> Vec<Part> {
    let broken = report.runs.iter().enumerate().filter_map(|(index, run)| {
        let promise = run.promise.as_ref().filter(|promise| !promise.kept)?;
        let (grown, most) = (bytes(promise.growth_bytes), bytes(promise.limit_bytes));
        let text = format!("  run {}: RSS grew by {grown}, promised were at most {most}", index + 1);
        Some(Part::Line(role(Role::Bad, "FAIL") + text))
    });
    broken.collect()
}

/// With `--verbose`: the metrics that were not measured, and why.
pub(super) fn not_measured(report: &Report, view: View) -> impl Iterator<Item = Part> {
    let missing = report.unavailable.iter().filter(move |_| view.verbose);
    missing
        .map(|missing| fact(&format!("  {:<8}", missing.metric), format!("not measured: {}", missing.reason)))
}

/// The first run that did not finish, if there is one.
pub(super) fn partial(report: &Report) -> Option<Part> {
    let is_partial = |run: &&Run| !matches!(run.outcome, Outcome::Completed | Outcome::Stopped);
    let run = report.runs.iter().find(is_partial)?;
    let verb = match run.outcome {
        Outcome::Completed => "completed",
        Outcome::Stopped => "was stopped",
        Outcome::Failed => "failed",
        Outcome::Killed => "was killed",
        Outcome::Refused => "was refused",
        Outcome::Interrupted => "was interrupted",
    };
    let time = run.seconds.map_or_else(|| "an unknown time".to_owned(), seconds);
    Some(Part::Line(role(Role::Warning, format!("partial: the run {verb} after {time}"))))
}

/// A layer, a tensor, or the time.
pub(super) fn place(place: &Place) -> String {
    match (&place.layer, &place.tensor) {
        (Some(layer), _) => layer.clone(),
        (None, Some(tensor)) => tensor.clone(),
        (None, None) => format!("{:.2} s", place.seconds),
    }
}

/// `FAIL  rss    412 MiB  limit 200 MiB  first exceeded at ...`
pub(super) fn limit(limit: &Limit) -> Text {
    let word = if limit.passed { role(Role::Good, "PASS") } else { role(Role::Bad, "FAIL") };
    let (actual, most) = limit_values(limit);
    let at = limit.first_exceeded_at.as_ref().map(|at| format!("  first exceeded at {}", exceeded_at(at)));
    let spread = if limit.inside_spread { "  (inside the spread of the runs)" } else { "" };
    let metric = metric_name(&limit.metric);
    word + format!("  {metric:<13}  {actual:>8}  limit {most}{}{spread}", at.unwrap_or_default())
}

/// Every limit, for a page.
pub(super) fn limits(report: &Report) -> Table {
    Table::of(&report.limits)
        .left("", |limit| match limit.passed {
            true => Text::from("pass"),
            false => role(Role::Bad, "FAIL"),
        })
        .left("limit on", |limit| metric_name(&limit.metric).to_owned())
        .right("actual", |limit| limit_values(limit).0)
        .right("limit", |limit| limit_values(limit).1)
        .left("first exceeded at", |limit| {
            limit.first_exceeded_at.as_ref().map(|at| name(exceeded_at(at).replace('`', "")))
        })
        .table()
}

/// Both sides of a limit: what was measured, and the most it may be.
fn limit_values(limit: &Limit) -> (String, String) {
    match limit.limit_seconds {
        Some(most) => (limit.actual_seconds.map_or_else(|| "-".to_owned(), seconds), seconds(most)),
        None => (bytes(limit.actual_bytes), limit.limit_bytes.map_or_else(|| "-".to_owned(), stated)),
    }
}

/// Layer and tensor, or the time.
fn exceeded_at(at: &Place) -> String {
    match (&at.layer, &at.tensor) {
        (Some(layer), Some(tensor)) => format!("{layer}, `{tensor}`"),
        _ => place(at),
    }
}

/// Device memory of every run, by every method that measured it: for a page.
pub(super) fn vram(report: &Report) -> Table {
    let runs = report.runs.iter().enumerate();
    let rows = runs.flat_map(|(index, run)| run.vram.iter().map(move |vram| (index + 1, vram)));
    Table::of(rows)
        .right("run", |(number, _)| number.to_string())
        .left("VRAM by", |(_, vram)| vram.method.clone())
        .right("peak", |(_, vram)| bytes(vram.peak_bytes))
        .right("over start", |(_, vram)| growth(vram.peak_bytes, vram.baseline_bytes))
        .right("after unload, over start", |(_, vram)| growth(vram.after_unload_bytes, vram.baseline_bytes))
        .table()
}

/// The notes of a report.
pub(super) fn notes(report: &Report) -> impl Iterator<Item = Part> {
    report.notes.iter().map(|note| Part::Wrapped("note: ".into(), note.clone()))
}

/// Adds the end of every page: device memory, limits, notes, errors.
pub(super) fn add_page_end(report: &Report, document: &mut Document) {
    document.table(vram(report));
    document.table(limits(report));
    document.extend(notes(report));
    for problem in &report.errors {
        let title = role(Role::Bad, format!("error[{}]", problem.code.as_str()));
        document.line(title + format!(": {}", problem.message));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::terminal::Paint;
    use crate::output::text;
    use crate::report::{CacheState, Pass, Vram};

    /// The lines that the parts are on a terminal.
    fn lines(parts: impl IntoIterator<Item = Part>) -> Vec<String> {
        let mut document = Document::default();
        document.extend(parts);
        text::draw(&document, Paint::NONE, None).lines().map(str::to_owned).collect()
    }

    #[test]
    fn the_run_that_began_least_as_asked_is_told() {
        let run = |cached_share| Run {
            outcome: Outcome::Completed,
            cache: CacheState { asked: CacheArg::Cold, cached_share },
            ..Run::default()
        };
        let refused = || Run { outcome: Outcome::Refused, ..Run::default() };
        assert_eq!(
            lines(cache(&[refused(), run(Some(0.0)), run(Some(0.5))])),
            ["cache     cold before each run (checked: 50 % cached)"]
        );
        assert!(cache(&[refused()]).is_none());
        let text = |asked, shares: &[Option<f64>]| cache_text(asked, shares.iter().copied()).unwrap();
        assert_eq!(
            text(CacheArg::Warm, &[Some(1.0), Some(0.996)]),
            "warm before each run (checked: 99 % cached)"
        );
        assert_eq!(text(CacheArg::Cold, &[Some(0.0001)]), "cold before each run (checked: < 1 % cached)");
        assert_eq!(text(CacheArg::Cold, &[Some(0.0), None]), "cold before each run (unchecked)");
        assert_eq!(text(CacheArg::Cold, &[]), "cold before each run (unchecked)");
    }

    fn file(mode: &str, reason: &str, new_pages: &str) -> FileReading {
        FileReading {
            mode: mode.to_owned(),
            reason: reason.to_owned(),
            why: reason.replace('_', " "),
            file_system: Some("ext4".to_owned()),
            resident_share: Some(0.52),
            new_pages: new_pages.to_owned(),
            bytes: 1 << 20,
            ..FileReading::default()
        }
    }

    #[test]
    fn files_that_are_alike_share_a_line() {
        let cold = file("direct", "cold", "untouched");
        let files = [cold.clone(), file("buffered", "partly_resident", "uncached"), cold];
        assert_eq!(
            lines(reading(&files)),
            [
                "reading   direct: 2 files, 2 MiB on ext4: cold",
                "reading   buffered: 1 file, 1 MiB on ext4: partly resident (52 %); new pages are forgotten by the kernel",
            ]
        );
        let many: Vec<FileReading> =
            (0..6).map(|index| file("direct", &format!("reason {index}"), "kept")).collect();
        let lines = lines(reading(&many));
        assert_eq!(lines.len(), FILE_GROUPS_MAX + 1);
        assert_eq!(lines[FILE_GROUPS_MAX], "reading   2 files more (all of them: --json)");
    }

    #[test]
    fn what_did_not_happen_is_not_mentioned() {
        assert!(moved(&IoCounters::default()).is_none());
        let io = IoCounters {
            direct_bytes: Some(3 << 30),
            buffered_bytes: Some(0),
            read_amplification: Some(1.0004),
            corrected_bytes: Some(0),
            ..IoCounters::default()
        };
        assert_eq!(lines(moved(&io)), ["read      3 GiB direct; 1.000 x the tensors"]);
        let io = IoCounters {
            buffered_bytes: Some(1 << 30),
            corrected_bytes: Some(12 << 20),
            dropped_behind_bytes: Some(5 << 20),
            ..io
        };
        assert_eq!(
            lines(moved(&io)),
            [
                "read      3 GiB direct, 1 GiB buffered; 1.000 x the tensors; 12 MiB another way than planned, corrected; \
             5 MiB dropped behind"
            ]
        );
    }

    #[test]
    fn the_worst_come_first_and_nothing_is_said_of_nothing() {
        assert!(quantised(&[]).is_empty());
        let tensor = |name: &str, rms_error: f32| QuantisedTensor {
            name: name.to_owned(),
            elements: 4,
            max_abs: 2.0,
            max_abs_error: 2.0 * rms_error,
            rms_error,
        };
        let tensors = [tensor("a", 0.001), tensor("b", 0.1), tensor("d", 0.01), tensor("c", 0.01)];
        assert_eq!(
            lines(quantised(&tensors)),
            [
                "quantised 4 tensors; RMS and largest error of the worst:",
                "          1.000e-1  2.000e-1  b (largest element 2.000e0)",
                "          1.000e-2  2.000e-2  c (largest element 2.000e0)",
                "          1.000e-2  2.000e-2  d (largest element 2.000e0)",
            ]
        );
    }

    #[test]
    fn each_place_has_a_line() {
        let gpu = PlaceShare {
            tier: "1".to_owned(),
            layers: 2,
            tensor_bytes: 3 << 20,
            resident_bytes: 4 << 20,
            read_bytes: 3 << 20,
            seconds: Some(1.0),
            vram: vec![Vram { after_unload_growth_bytes: Some(0), ..Vram::default() }],
        };
        let left = PlaceShare {
            vram: vec![Vram { after_unload_growth_bytes: Some(1 << 20), ..Vram::default() }],
            ..gpu.clone()
        };
        let disk =
            PlaceShare { tier: "disk".to_owned(), layers: 1, tensor_bytes: 5, ..PlaceShare::default() };
        let lines = lines([gpu, left, disk].iter().map(place_share));
        assert!(lines[0].starts_with("place     GPU 1: 2 layers, 3 MiB; 1"), "{lines:?}");
        assert!(lines[0].ends_with("; all of it back after unload"), "{lines:?}");
        assert!(lines[1].ends_with("; 1 MiB more than at the start after unload"), "{lines:?}");
        assert_eq!(lines[2], "place     disk: 1 layer, 5 B; not read");
    }

    fn pass_after_pass(number: usize) -> Passes {
        let shares = Shares { disk: 0.817, engine: 0.031, fill: 0.004, link: 0.0 };
        let pass = Pass { seconds: 0.5, read_bytes: 1 << 30, shares };
        Passes {
            asked: 20,
            window_bytes: 64 << 20,
            kept_bytes: 1 << 20,
            engine_seconds: 0.0,
            binds: Some("disk".to_owned()),
            shares,
            each: vec![pass; number],
        }
    }

    #[test]
    fn what_binds_is_named_largest_first() {
        let text = lines(passes(&pass_after_pass(2), &IoCounters::default())).join("\n");
        assert!(
            text.starts_with("steps     2 of 20 decode steps, window 64 MiB, kept layers 1 MiB\n"),
            "{text}"
        );
        assert!(text.ends_with("\nbottleneck  disk 82 %, engine 3 %"), "{text}");
        assert_eq!(shares(&Shares::default(), "disk"), "nothing: no waits");
        let cached = IoCounters { read_bytes: Some(9), from_cache_bytes: Some(9), ..IoCounters::default() };
        let text = lines(passes(&pass_after_pass(2), &cached)).join("\n");
        assert!(text.ends_with("page cache 82 %, engine 3 %") && !text.contains("disk"), "{text}");
    }

    #[test]
    fn many_passes_are_a_few_lines() {
        let lines = lines(passes(&pass_after_pass(20), &IoCounters::default()));
        assert_eq!(lines.len(), 1 + PASSES_MAX + 2);
        assert!(lines[PASSES_MAX].starts_with("  step 20 "), "{lines:?}");
        assert!(lines[PASSES_MAX + 1].contains("12 between"), "{lines:?}");
    }
}
