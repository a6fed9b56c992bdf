//! The commands that write and check checkpoints: `convert` and `verify`.

use super::document::{Document, Table, View, fact, name, role};
use super::escape::escape_and_cut;
use super::terminal::Role;
use super::{facts, measured};
use crate::numbers::{bytes, count, grouped, rate, seconds, sum};
use crate::report::{Convert, Converted, Estimate, FileState, Report, Verification};
use onelayer::units::to_u64;

/// Differences that a terminal shows; JSON has all of them.
const DIFFERENCES_MAX: usize = 20;
/// Files that `--verbose` shows.
const FILES_MAX: usize = 1000;
/// Characters of the text about one difference.
const DIFFERENCE_CHARACTERS_MAX: usize = 500;
/// Files that were not read as asked for.
const FALLBACKS_MAX: usize = 3;

/// The document of `convert`.
pub(super) fn convert(report: &Report, view: View) -> Document {
    let mut document = Document::default();
    let Some(convert) = &report.convert else { return document };
    let has_written =
        convert.result.as_ref().is_some_and(|result| result.files_written > 0 || result.files_kept > 0);
    if report.error.is_some() && !has_written && !view.is_page {
        // What went wrong is on stderr, and nothing else happened.
        return document;
    }
    document.extend(report.source.as_ref().map(|source| facts::source(source, view)));
    let part =
        convert.part.as_ref().map(|part| format!(", part {part}: {}", count(convert.part_files, "file")));
    document.fact("target", name(&convert.target) + part);
    add_files(convert, view, &mut document);
    match &convert.result {
        None => add_forecast(report, convert, view, &mut document),
        Some(result) => {
            if view.shows_how() {
                document.fact("strategy", strategy(convert));
            }
            document.table(measured::peaks(report, view));
            document.extend(facts::broken_promises(report));
            add_result(convert, result, &mut document);
            document.extend(facts::partial(report));
        }
    }
    report.verification.iter().for_each(|found| add_verification(found, view, &mut document));
    document
}

/// The document of `verify`.
pub(super) fn verify(report: &Report, view: View) -> Document {
    let mut document = Document::default();
    if let Some(found) = &report.verification {
        document.extend(report.source.as_ref().map(|source| facts::source(source, view)));
        add_verification(found, view, &mut document);
    }
    document
}

/// `files     27 files (24 layers of 29 MiB, lm_head), 821 MiB; data starts on a multiple of 4096
/// bytes`
fn add_files(convert: &Convert, view: View, document: &mut Document) {
    let summary = if convert.summary.is_empty() { String::new() } else { format!(" ({})", convert.summary) };
    let files = count(to_u64(convert.files.len()), "file");
    let size = bytes(sum(convert.files.iter().map(|file| file.bytes)));
    document.fact("files", format!("{files}{summary}, {size}; data starts on a multiple of 4096 bytes"));
    if !convert.side_files.is_empty() {
        let size = bytes(sum(convert.side_files.iter().map(|file| file.bytes)));
        let files = count(to_u64(convert.side_files.len()), "side file");
        document.fact("beside", format!("{files} copied, {size}"));
    }
    if let Some(first) = convert.duplicates.first() {
        let tensors = count(to_u64(convert.duplicates.len()), "tensor");
        let example = format!("{}, which equals {}", first.name, first.same_as);
        document.fact("tied", format!("{tensors} left out, such as {example}"));
    }
    if view.verbose {
        document.table(every_file(convert));
        document.hidden(to_u64(convert.files.len().saturating_sub(FILES_MAX)), "--json");
    }
}

fn every_file(convert: &Convert) -> Table {
    Table::of(convert.files.iter().take(FILES_MAX))
        .left("file", |file| name(&file.name))
        .left("", |file| match file.state {
            FileState::Planned => "",
            FileState::Kept => "kept",
            FileState::Written => "written",
        })
        .right("tensors", |file| grouped(file.tensors))
        .right("bytes", |file| bytes(file.bytes))
        .left("layers", |file| escape_and_cut(&file.layers.join(", "), 200).into_owned())
        .table()
}

/// What a dry run predicts: room, memory, time.
fn add_forecast(report: &Report, convert: &Convert, view: View, document: &mut Document) {
    let done = convert.files.iter().filter(|file| file.state == FileState::Kept).count();
    if done > 0 {
        document.fact("done", format!("{done} of them, by an earlier run"));
    }
    let (needed, free) = (bytes(convert.needed_bytes), bytes(convert.free_bytes));
    document.fact("needs", format!("{needed} of room ({free} are free); the source is not changed"));
    document.fact("time", time(report, convert.estimate.as_ref()));
    if let Some(memory) = &convert.memory {
        let (host, budget) = (bytes(memory.host_bytes), bytes(convert.params.budget_bytes));
        let smallest = bytes(memory.smallest_budget_bytes);
        document.fact("memory", format!("{host} of the budget of {budget} (derived); at least {smallest}"));
        if view.shows_how() {
            document.table(facts::memory_terms(&memory.terms, None));
        }
    }
    document.line("Nothing was written: this was a dry run.");
}

/// `about 4.1 s (estimated): the source is read at 1.9 GiB/s, ...`
fn time(report: &Report, estimate: Option<&Estimate>) -> String {
    let Some((estimate, time)) = estimate.and_then(|estimate| Some((estimate, estimate.seconds?))) else {
        let missing = report.unavailable.iter().find(|entry| entry.metric == "convert.estimate.seconds");
        return format!("not estimated: {}", missing.map_or("", |entry| entry.reason.as_str()));
    };
    let speed = |speed: Option<u64>| speed.and_then(|speed| rate(speed, 1.0)).unwrap_or_default();
    let devices = match estimate.same_device {
        Some(true) => ", on one device",
        Some(false) => ", on two devices",
        None => "",
    };
    format!(
        "about {} (estimated): the source is read at {}, the target is written at {}{devices}",
        seconds(time),
        speed(estimate.read_bytes_per_second),
        speed(estimate.write_bytes_per_second)
    )
}

/// `convert · direct, 4 readers · budget 64 MiB`
fn strategy(convert: &Convert) -> String {
    let readers = convert.memory.as_ref().map(|memory| format!(", {}", count(memory.readers, "reader")));
    let mut parts = vec![
        "convert".to_owned(),
        format!("{}{}", convert.params.io, readers.unwrap_or_default()),
        format!("budget {}", bytes(convert.params.budget_bytes)),
    ];
    parts.extend(convert.params.options.iter().map(|option| escape_and_cut(option, 60).into_owned()));
    parts.join(" · ")
}

fn add_result(convert: &Convert, result: &Converted, document: &mut Document) {
    if result.files_written > 0 || result.files_kept == 0 {
        let (files, size) = (count(result.files_written, "file"), bytes(result.written_bytes));
        let speed = result.seconds.and_then(|time| rate(result.written_bytes, time));
        let speed = speed.map(|speed| format!(", {speed}")).unwrap_or_default();
        document.fact("wrote", format!("{files}, {size}{speed}{}", write_mode(result)));
    }
    if result.files_kept > 0 {
        document.fact("kept", format!("{} of an earlier run", count(result.files_kept, "file")));
    }
    document.extend(kernel_copies(result).map(|text| fact("kernel", text)));
    document.extend(facts::quantised(&result.quantised));
    for fallback in result.read_fallbacks.iter().take(FALLBACKS_MAX) {
        let (file, reason) = (&fallback.file, &fallback.reason);
        let text = format!("{file} was read {} instead of {}: {reason}", fallback.to, fallback.from);
        document.fact("fallback", text);
    }
    let more = result.read_fallbacks.len().saturating_sub(FALLBACKS_MAX);
    if more > 0 {
        document.fact("fallback", format!("{more} more files were read in another way than asked for"));
    }
    match (result.complete, result.seconds) {
        (true, _) => {
            document.fact("complete", readers(convert, result));
        }
        (false, Some(_)) => {
            let part = convert.part.as_deref().unwrap_or("this one");
            document.fact("part", format!("{part} is there; index and manifest come with --finish"));
        }
        (false, None) => document.fact("partial", "the same command continues after the finished files"),
    }
}

/// What can read the result.
fn readers(convert: &Convert, result: &Converted) -> &'static str {
    let is_quantised = !result.quantised.is_empty()
        || convert.params.options.iter().any(|option| option.contains("quantise"));
    if is_quantised && convert.describes_quantisation {
        "opens in what reads compressed-tensors (transformers with that package, vLLM), and in onelayer"
    } else if is_quantised {
        "quantised weights and scales for onelayer's loaders (Rust, Python, C); others would take them for plain weights"
    } else {
        "opens in any loader that reads safetensors files and the standard index"
    }
}

/// `1.2 GiB share their blocks with the source, 3 MiB were copied by the kernel`
fn kernel_copies(result: &Converted) -> Option<String> {
    let reason = result.kernel_copy_reason.as_deref();
    if result.cloned_bytes == 0 && result.kernel_copied_bytes == 0 {
        return reason.map(|reason| format!("copied nothing: {reason}"));
    }
    let (shared, copied) = (bytes(result.cloned_bytes), bytes(result.kernel_copied_bytes));
    let rest = reason.map(|reason| format!("; the rest not: {reason}")).unwrap_or_default();
    Some(format!("{shared} share their blocks with the source, {copied} were copied by the kernel{rest}"))
}

fn write_mode(result: &Converted) -> String {
    match (result.write_mode.as_deref(), &result.write_mode_reason) {
        (Some("direct"), _) => ", past the page cache".to_owned(),
        (Some("drop_behind"), Some(reason)) => {
            format!(", through the page cache, dropped behind: {reason}")
        }
        _ => String::new(),
    }
}

/// `verified  27 files, 219 tensors, 821 MiB in 1.2 s, 684 MiB/s: as it should be`
fn add_verification(found: &Verification, view: View, document: &mut Document) {
    let speed = |time| rate(found.bytes, time).filter(|_| found.bytes > 0).map(|speed| format!(", {speed}"));
    let time = found.seconds.map(|time| format!(" in {}{}", seconds(time), speed(time).unwrap_or_default()));
    let (files, tensors) = (count(found.files, "file"), count(found.tensors, "tensor"));
    let size = bytes(found.bytes);
    let against = found.against.as_ref().map(|against| format!(" and as in {against}")).unwrap_or_default();
    let outcome = match found.differences.len() {
        0 if found.bytes == 0 => {
            format!("headers and index are in order{against}; the weights were not checked").into()
        }
        0 => format!("as it should be{against}").into(),
        number => role(Role::Bad, count(to_u64(number), "difference")),
    };
    let directory = view.is_page.then(|| name(&found.directory) + ": ");
    let facts = super::document::Text::from(directory);
    let what = format!("{files}, {tensors}, {size}{}: ", time.unwrap_or_default());
    document.fact("verified", facts + what + outcome);
    if view.is_page {
        document.table(
            Table::of(&found.differences)
                .left("place", |difference| name(&difference.place))
                .left("difference", |difference| difference.what.clone())
                .table(),
        );
        return;
    }
    for difference in found.differences.iter().take(DIFFERENCES_MAX) {
        let [place, what] = [&difference.place, &difference.what]
            .map(|text| escape_and_cut(text, DIFFERENCE_CHARACTERS_MAX).into_owned());
        document.line(role(Role::Bad, "DIFFERS") + format!("  {place}: {what}"));
    }
    document.hidden(to_u64(found.differences.len().saturating_sub(DIFFERENCES_MAX)), "--json");
}
