//! Text of the commands that write and check checkpoints: `convert` and `verify`.

use super::escape::{escape, escape_and_cut};
use super::grid::{Align, grid};
use super::quantised;
use super::terminal::Role;
use super::text::{Look, partial_line, peak_table, promise_lines, source_line};
use crate::numbers::{bytes, count, grouped, rate, seconds};
use crate::report::{Convert, Converted, Estimate, FileState, Report, Verification};

/// Differences that are listed; JSON has all of them.
const DIFFERENCES_MAX: usize = 20;
/// Files that are listed with `--verbose`.
const FILES_MAX: usize = 1000;
/// Characters of what is said about one difference.
const DIFFERENCE_CHARACTERS_MAX: usize = 500;

/// `loadcheck convert`
pub(crate) fn convert(report: &Report, look: &Look) -> Vec<String> {
    let Some(convert) = &report.convert else { return Vec::new() };
    let mut lines: Vec<String> = report.source.iter().map(source_line).collect();
    lines.push(target_line(convert));
    lines.extend(file_lines(convert));
    if look.verbose {
        lines.extend(every_file(convert, look));
    }
    match &convert.result {
        None => lines.extend(dry(report, convert, look)),
        Some(result) => {
            lines.push(strategy_line(convert));
            lines.extend(peak_table(report, look));
            lines.extend(promise_lines(report, look));
            lines.extend(result_lines(convert, result));
            lines.extend(partial_line(report, look));
        }
    }
    lines.extend(report.verification.iter().flat_map(|found| verified(found, look)));
    lines
}

/// `loadcheck verify`
pub(crate) fn verify(report: &Report, look: &Look) -> Vec<String> {
    let Some(found) = &report.verification else { return Vec::new() };
    let mut lines: Vec<String> = report.source.iter().map(source_line).collect();
    lines.extend(verified(found, look));
    lines
}

/// `target    ./layers, part 1/8`
fn target_line(convert: &Convert) -> String {
    let part = match &convert.part {
        Some(part) => format!(", part {part}: {}", count(convert.part_files, "file")),
        None => String::new(),
    };
    format!("target    {}{part}", escape(&convert.target))
}

/// `files     27 files (24 layers of 29 MiB, lm_head), 821 MiB; data starts on a multiple of 4096
/// bytes`
fn file_lines(convert: &Convert) -> Vec<String> {
    let summary =
        if convert.summary.is_empty() { String::new() } else { format!(" ({})", escape(&convert.summary)) };
    let mut lines = vec![format!(
        "files     {}{summary}, {}; data starts on a multiple of 4096 bytes",
        count(length(&convert.files), "file"),
        bytes(Some(convert.files.iter().map(|file| file.bytes).sum()))
    )];
    if !convert.side_files.is_empty() {
        let sum = convert.side_files.iter().map(|file| file.bytes).sum();
        let number = count(length(&convert.side_files), "side file");
        lines.push(format!("beside    {number} copied, {}", bytes(Some(sum))));
    }
    if let Some(first) = convert.duplicates.first() {
        lines.push(format!(
            "tied      {} left out, such as {}, which equals {}",
            count(length(&convert.duplicates), "tensor"),
            escape(&first.name),
            escape(&first.same_as)
        ));
    }
    lines
}

fn every_file(convert: &Convert, look: &Look) -> Vec<String> {
    let header = [
        ("file", Align::Left),
        ("", Align::Left),
        ("tensors", Align::Right),
        ("bytes", Align::Right),
        ("layers", Align::Left),
    ];
    let rows: Vec<Vec<String>> = convert
        .files
        .iter()
        .take(FILES_MAX)
        .map(|file| {
            let layers = escape_and_cut(&file.layers.join(", "), 200).into_owned();
            let state = match file.state {
                FileState::Planned => "",
                FileState::Kept => "kept",
                FileState::Written => "written",
            };
            vec![file.name.clone(), state.to_owned(), grouped(file.tensors), bytes(Some(file.bytes)), layers]
        })
        .collect();
    let mut lines = grid(&header, &rows, look.width);
    if let Some(first) = lines.first_mut() {
        *first = look.paint.paint(Role::Dim, first);
    }
    let hidden = convert.files.len().saturating_sub(FILES_MAX);
    if hidden > 0 {
        lines.push(format!("  ... and {hidden} more (all of them: --json)"));
    }
    lines
}

/// What a dry run adds: room, memory, time.
fn dry(report: &Report, convert: &Convert, look: &Look) -> Vec<String> {
    let mut lines = Vec::new();
    let done = convert.files.iter().filter(|file| file.state == FileState::Kept).count();
    if done > 0 {
        lines.push(format!("done      {done} of them, by an earlier run"));
    }
    lines.push(format!(
        "needs     {} of room ({} are free); the source is not changed",
        bytes(Some(convert.needed_bytes)),
        bytes(Some(convert.free_bytes))
    ));
    lines.push(time_line(report, convert.estimate.as_ref()));
    if let Some(memory) = &convert.memory {
        lines.push(format!(
            "memory    {} of the budget of {} (derived); at least {}",
            bytes(Some(memory.host_bytes)),
            bytes(Some(convert.params.budget_bytes)),
            bytes(Some(memory.smallest_budget_bytes))
        ));
        let rows: Vec<Vec<String>> =
            memory.terms.iter().map(|term| vec![bytes(Some(term.bytes)), term.name.clone()]).collect();
        lines.extend(grid(&[("", Align::Right), ("", Align::Left)], &rows, look.width));
    }
    lines.push("Nothing was written: this was a dry run.".to_owned());
    lines
}

/// `time      about 4.1 s (estimated): read at 1.9 GiB/s, written at 1.1 GiB/s, one device`
fn time_line(report: &Report, estimate: Option<&Estimate>) -> String {
    let missing = report.unavailable.iter().find(|entry| entry.metric == "convert.estimate.seconds");
    let Some((estimate, time)) = estimate.and_then(|estimate| Some((estimate, estimate.seconds?))) else {
        let reason = missing.map_or("", |entry| entry.reason.as_str());
        return format!("time      not estimated: {}", escape(reason));
    };
    let speed = |speed: Option<u64>| speed.and_then(|speed| rate(speed, 1.0)).unwrap_or_default();
    let devices = match estimate.same_device {
        Some(true) => ", on one device",
        Some(false) => ", on two devices",
        None => "",
    };
    format!(
        "time      about {} (estimated): the source is read at {}, the target is written at {}{devices}",
        seconds(time),
        speed(estimate.read_bytes_per_second),
        speed(estimate.write_bytes_per_second)
    )
}

/// `strategy  convert · direct, 4 readers · budget 64 MiB`
fn strategy_line(convert: &Convert) -> String {
    let readers = convert.memory.as_ref().map(|memory| format!(", {}", count(memory.readers, "reader")));
    let mut parts = vec![
        format!("{}{}", convert.params.io, readers.unwrap_or_default()),
        format!("budget {}", bytes(Some(convert.params.budget_bytes))),
    ];
    parts.extend(convert.params.options.iter().map(|option| escape_and_cut(option, 60).into_owned()));
    format!("strategy  convert · {}", parts.join(" · "))
}

/// What was done.
fn result_lines(convert: &Convert, result: &Converted) -> Vec<String> {
    let mut lines = Vec::new();
    if result.files_written > 0 || result.files_kept == 0 {
        let speed = result.seconds.and_then(|time| rate(result.written_bytes, time));
        lines.push(format!(
            "wrote     {}, {}{}{}",
            count(result.files_written, "file"),
            bytes(Some(result.written_bytes)),
            speed.map(|speed| format!(", {speed}")).unwrap_or_default(),
            write_mode(result)
        ));
    }
    if result.files_kept > 0 {
        lines.push(format!("kept      {} of an earlier run", count(result.files_kept, "file")));
    }
    lines.extend(kernel_line(result));
    lines.extend(quantised::lines(&result.quantised));
    lines.extend(result.read_fallbacks.iter().take(3).map(|fallback| {
        format!(
            "fallback  {} was read {} instead of {}: {}",
            escape(&fallback.file),
            fallback.to,
            fallback.from,
            escape(&fallback.reason)
        )
    }));
    let more = result.read_fallbacks.len().saturating_sub(3);
    if more > 0 {
        lines.push(format!("fallback  {more} more files were read in another way than asked for"));
    }
    lines.push(match (result.complete, result.seconds) {
        (true, _) => {
            "complete  opens in any loader that reads safetensors files and the standard index".to_owned()
        }
        (false, Some(_)) => format!(
            "part      {} is there; index and manifest come with --finish",
            convert.part.as_deref().unwrap_or("this one")
        ),
        (false, None) => "partial   the same command goes on behind the files that are finished".to_owned(),
    });
    lines
}

/// `kernel    1.2 GiB share their blocks with the source, 3 MiB were copied by the kernel`
fn kernel_line(result: &Converted) -> Option<String> {
    let reason = result.kernel_copy_reason.as_deref().map(escape);
    if result.cloned_bytes == 0 && result.kernel_copied_bytes == 0 {
        return reason.map(|reason| format!("kernel    copied nothing: {reason}"));
    }
    Some(format!(
        "kernel    {} share their blocks with the source, {} were copied by the kernel{}",
        bytes(Some(result.cloned_bytes)),
        bytes(Some(result.kernel_copied_bytes)),
        reason.map(|reason| format!("; the rest not: {reason}")).unwrap_or_default()
    ))
}

fn write_mode(result: &Converted) -> String {
    match (result.write_mode.as_deref(), &result.write_mode_reason) {
        (Some("direct"), _) => ", past the page cache".to_owned(),
        (Some("drop_behind"), Some(reason)) => {
            format!(", through the page cache, dropped behind: {}", escape(reason))
        }
        _ => String::new(),
    }
}

/// `verified  27 files, 219 tensors, 821 MiB in 1.2 s, 684 MiB/s: all as it should be`
fn verified(found: &Verification, look: &Look) -> Vec<String> {
    let time = found.seconds.map(|time| {
        let speed = rate(found.bytes, time)
            .filter(|_| found.bytes > 0)
            .map(|speed| format!(", {speed}"))
            .unwrap_or_default();
        format!(" in {}{speed}", seconds(time))
    });
    let facts = format!(
        "{}, {}, {}{}",
        count(found.files, "file"),
        count(found.tensors, "tensor"),
        bytes(Some(found.bytes)),
        time.unwrap_or_default()
    );
    let against = match &found.against {
        Some(against) => format!(" and as in {}", escape(against)),
        None => String::new(),
    };
    let number = found.differences.len();
    let outcome = match number {
        0 if found.bytes == 0 => format!("headers and index are as they should be{against}"),
        0 => format!("as it should be{against}"),
        _ => look.paint.paint(Role::Bad, &count(length(&found.differences), "difference")),
    };
    let mut lines = vec![format!("verified  {facts}: {outcome}")];
    lines.extend(found.differences.iter().take(DIFFERENCES_MAX).map(|difference| {
        format!(
            "{}  {}: {}",
            look.paint.paint(Role::Bad, "DIFFERS"),
            escape_and_cut(&difference.place, DIFFERENCE_CHARACTERS_MAX),
            escape_and_cut(&difference.what, DIFFERENCE_CHARACTERS_MAX)
        )
    }));
    let hidden = number.saturating_sub(DIFFERENCES_MAX);
    if hidden > 0 {
        lines.push(format!("  ... and {hidden} more (all of them: --json)"));
    }
    lines
}

fn length<T>(list: &[T]) -> u64 {
    u64::try_from(list.len()).unwrap_or(u64::MAX)
}
