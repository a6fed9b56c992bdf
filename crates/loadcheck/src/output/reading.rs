//! Text about reading: how files are read and why, and what went which way.

use super::escape::escape;
use crate::numbers::{bytes, count};
use crate::report::{FileReading, IoCounters};

/// More lines than this help nobody: the rest is in the JSON.
const LINES_MAX: usize = 4;

/// `reading   direct: 4 files, 15.9 GiB on ext4: not in the page cache; page cache untouched`, a
/// line for files that are alike.
pub(super) fn lines(files: &[FileReading]) -> Vec<String> {
    let mut groups: Vec<(&FileReading, u64, u64)> = Vec::new();
    for file in files {
        match groups.iter_mut().find(|(first, ..)| is_alike(first, file)) {
            Some((_, number, sum_bytes)) => {
                *number += 1;
                *sum_bytes += file.bytes;
            }
            None => groups.push((file, 1, file.bytes)),
        }
    }
    let hidden: u64 = groups.iter().skip(LINES_MAX).map(|(_, number, _)| number).sum();
    let mut lines: Vec<String> = groups.iter().take(LINES_MAX).map(line).collect();
    if hidden > 0 {
        lines.push(format!("reading   {} more (all of them: --json)", count(hidden, "file")));
    }
    lines
}

fn is_alike(one: &FileReading, other: &FileReading) -> bool {
    (&one.mode, &one.reason, &one.file_system, &one.new_pages)
        == (&other.mode, &other.reason, &other.file_system, &other.new_pages)
}

fn line((first, number, sum_bytes): &(&FileReading, u64, u64)) -> String {
    let held_by = first.file_system.as_ref().map(|kind| format!(" on {}", escape(kind))).unwrap_or_default();
    let share = match first.resident_share {
        Some(share) if *number == 1 && first.reason == "partly_resident" => {
            format!(" ({:.0} %)", 100.0 * share)
        }
        _ => String::new(),
    };
    let new_pages = match first.new_pages.as_str() {
        "uncached" => "; new pages are forgotten by the kernel",
        "dropped_behind" => "; new pages are dropped behind",
        "kept" => "; new pages stay in the page cache",
        _ => "",
    };
    format!(
        "reading   {}: {}, {}{held_by}: {}{share}{new_pages}",
        first.mode,
        count(*number, "file"),
        bytes(Some(*sum_bytes)),
        first.why
    )
}

/// `read      1.9 GiB direct, 2 GiB buffered (12 MiB of it corrected); 1.002 x the tensors`
pub(super) fn moved_line(io: &IoCounters) -> Option<String> {
    let ways = [(io.direct_bytes, "direct"), (io.buffered_bytes, "buffered"), (io.mapped_bytes, "mapped")];
    let ways: Vec<String> = ways
        .iter()
        .filter(|(moved, _)| moved.is_some_and(|moved| moved > 0))
        .map(|(moved, way)| format!("{} {way}", bytes(*moved)))
        .collect();
    if ways.is_empty() {
        return None;
    }
    let mut text = format!("read      {}", ways.join(", "));
    if let Some(ratio) = io.read_amplification {
        text.push_str(&format!("; {ratio:.3} x the tensors"));
    }
    if let Some(corrected) = io.corrected_bytes.filter(|corrected| *corrected > 0) {
        text.push_str(&format!("; {} another way than planned, corrected", bytes(Some(corrected))));
    }
    if let Some(dropped) = io.dropped_behind_bytes.filter(|dropped| *dropped > 0) {
        text.push_str(&format!("; {} dropped behind", bytes(Some(dropped))));
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

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
            lines(&files),
            [
                "reading   direct: 2 files, 2 MiB on ext4: cold",
                "reading   buffered: 1 file, 1 MiB on ext4: partly resident (52 %); new pages are forgotten by the kernel",
            ]
        );
        let many: Vec<FileReading> =
            (0..6).map(|index| file("direct", &format!("reason {index}"), "kept")).collect();
        let lines = lines(&many);
        assert_eq!(lines.len(), LINES_MAX + 1);
        assert_eq!(lines[LINES_MAX], "reading   2 files more (all of them: --json)");
    }

    #[test]
    fn what_did_not_happen_is_not_mentioned() {
        assert_eq!(moved_line(&IoCounters::default()), None);
        let io = IoCounters {
            direct_bytes: Some(3 << 30),
            buffered_bytes: Some(0),
            read_amplification: Some(1.0004),
            corrected_bytes: Some(0),
            ..IoCounters::default()
        };
        assert_eq!(moved_line(&io).unwrap(), "read      3 GiB direct; 1.000 x the tensors");
        let io = IoCounters {
            buffered_bytes: Some(1 << 30),
            corrected_bytes: Some(12 << 20),
            dropped_behind_bytes: Some(5 << 20),
            ..io
        };
        assert_eq!(
            moved_line(&io).unwrap(),
            "read      3 GiB direct, 1 GiB buffered; 1.000 x the tensors; 12 MiB another way than planned, corrected; \
             5 MiB dropped behind"
        );
    }
}
