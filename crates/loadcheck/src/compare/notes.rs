//! Notes for people on a row of a comparison, and on the comparison as a whole.

use onelayer::units::HumanBytes;

use super::summary::maps;
use crate::args::{CacheArg, Device};
use crate::entries::{Entry, What};
use crate::numbers::count;
use crate::report::{Compared, Outcome};
use crate::strategies::{SimpleStrategy, Strategy};

/// Facts that all rows share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts {
    /// Where `stream` puts layers, as it was asked for; `auto` decided.
    pub(crate) device: Device,
    /// Layers resident at once; `None` is all.
    pub(crate) window: Option<u32>,
    /// True if `stream`, and only it, narrows floats.
    pub(crate) narrows: bool,
    /// Bytes of the tensors that are loaded.
    pub(crate) tensor_bytes: Option<u64>,
    /// The state of the page cache that was asked for.
    pub(crate) cache: CacheArg,
}

/// Adds a note to every row that needs one.
pub(crate) fn add_notes(rows: &mut [Compared], entries: &[Entry], facts: &Facts) {
    for (row, entry) in rows.iter_mut().zip(entries) {
        let parts: Vec<String> = [how_it_ended(row), what_it_keeps(row, entry, facts), cache(row, facts)]
            .into_iter()
            .flatten()
            .collect();
        row.note = (!parts.is_empty()).then(|| parts.join("; "));
    }
}

/// A note on mappings, for comparisons in which weights stay on the CPU.
pub(crate) fn cpu_note(rows: &[Compared], entries: &[Entry], facts: &Facts) -> Option<String> {
    let does_map = |(row, entry): (&Compared, &Entry)| maps(entry, &row.peak, facts.tensor_bytes);
    let is_on_cpu = !facts.device.has_own_memory() && rows.iter().zip(entries).any(does_map);
    is_on_cpu.then(|| {
        "for weights that stay on the CPU a mapping is nearly free: its pages are the page cache's, and the kernel may take \
         them back while they are clean. Keeping every streamed layer costs what `read` costs. For a device, compare \
         again with --device cuda:0"
            .to_owned()
    })
}

fn how_it_ended(row: &Compared) -> Option<String> {
    let verb = match row.outcome {
        Outcome::Completed | Outcome::Stopped => return None,
        Outcome::Failed => "failed",
        Outcome::Killed => "killed",
        Outcome::Refused => "refused",
        Outcome::Interrupted => "interrupted",
    };
    let is_who = row.outcome == Outcome::Killed;
    let reason =
        row.reason.as_ref().map(|reason| if is_who { format!(" {reason}") } else { format!(": {reason}") });
    let reason = reason.unwrap_or_default();
    let completed =
        if row.completed > 0 { format!(" after {}", count(row.completed, "run")) } else { String::new() };
    Some(if is_who { format!("{verb}{reason}{completed}") } else { format!("{verb}{completed}{reason}") })
}

fn what_it_keeps(row: &Compared, entry: &Entry, facts: &Facts) -> Option<String> {
    if row.completed == 0 {
        return None;
    }
    let on_files = || {
        // The code of the program is file pages as well.
        let bytes = row.peak.file_bytes.min(facts.tensor_bytes).map(|bytes| HumanBytes(bytes).to_string());
        format!("{} stay as file pages, which the kernel may drop", bytes.unwrap_or_else(|| "all".to_owned()))
    };
    let keeps = facts.device != Device::None;
    Some(match &entry.what {
        What::Strategy(Strategy::Stream) => {
            let text = match facts.device {
                Device::None => "every tensor read and dropped".to_owned(),
                Device::Cuda(ordinal) => format!("layers are memory of cuda:{ordinal}"),
                Device::Auto | Device::Host => facts.window.map_or_else(
                    || "every layer kept".to_owned(),
                    |window| {
                        if window == 1 {
                            "each layer dropped after use".to_owned()
                        } else {
                            format!("{window} layers kept at once")
                        }
                    },
                ),
            };
            if facts.narrows { format!("{text}; narrowed on the way") } else { text }
        }
        What::Strategy(Strategy::Simple(SimpleStrategy::Mmap)) => on_files(),
        What::Strategy(Strategy::Simple(SimpleStrategy::Read)) => "whole files kept".to_owned(),
        What::Strategy(Strategy::Simple(SimpleStrategy::Pread)) if keeps => "every tensor kept".to_owned(),
        What::Strategy(Strategy::Simple(SimpleStrategy::Direct)) if keeps => {
            "every tensor kept, no page cache".to_owned()
        }
        What::Strategy(Strategy::Simple(SimpleStrategy::Pread)) => {
            "one tensor at a time, then dropped".to_owned()
        }
        What::Strategy(Strategy::Simple(SimpleStrategy::Direct)) => {
            "one tensor at a time, then dropped, no page cache".to_owned()
        }
        What::Command(_) if maps(entry, &row.peak, facts.tensor_bytes) => on_files(),
        What::Command(_) => return None,
    })
}

fn cache(row: &Compared, facts: &Facts) -> Option<String> {
    let state = match facts.cache {
        CacheArg::Cold => "cold",
        CacheArg::Warm => "warm",
        CacheArg::Asis => return None,
    };
    (row.cache_not_as_asked > 0).then(|| {
        format!(
            "{} of {} runs did not begin {state}, or it could not be checked",
            row.cache_not_as_asked, row.runs
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::ComparedPeak;

    const FACTS: Facts = Facts {
        device: Device::Host,
        window: None,
        narrows: false,
        tensor_bytes: Some(1 << 30),
        cache: CacheArg::Cold,
    };

    fn note(name: &str, row: Compared, facts: &Facts) -> Option<String> {
        let what = Strategy::parse(name).map_or_else(|_| What::Command(vec![]), What::Strategy);
        let mut rows = [row];
        add_notes(&mut rows, &[Entry { name: name.to_owned(), what }], facts);
        rows[0].note.clone()
    }

    fn done() -> Compared {
        let peak = ComparedPeak { file_bytes: Some(3 << 30), ..ComparedPeak::default() };
        Compared { outcome: Outcome::Completed, runs: 3, completed: 3, peak, ..Compared::default() }
    }

    #[test]
    fn rows_say_what_they_keep() {
        let text = |name: &str, facts: &Facts| note(name, done(), facts).unwrap_or_default();
        assert_eq!(text("stream", &FACTS), "every layer kept");
        assert_eq!(
            text("stream", &Facts { window: Some(1), narrows: true, ..FACTS }),
            "each layer dropped after use; narrowed on the way"
        );
        assert_eq!(
            text("stream", &Facts { device: Device::Cuda(1), ..FACTS }),
            "layers are memory of cuda:1"
        );
        assert_eq!(text("mmap", &FACTS), "1 GiB stay as file pages, which the kernel may drop");
        assert_eq!(text("python", &FACTS), "1 GiB stay as file pages, which the kernel may drop");
        assert_eq!(text("python", &Facts { tensor_bytes: Some(4 << 30), ..FACTS }), "");
        assert_eq!(
            text("pread", &Facts { device: Device::None, ..FACTS }),
            "one tensor at a time, then dropped"
        );
    }

    #[test]
    fn rows_say_how_they_ended_and_that_the_cache_was_not_as_asked() {
        let row = Compared {
            outcome: Outcome::Killed,
            reason: Some("by SIGKILL".to_owned()),
            completed: 0,
            ..done()
        };
        assert_eq!(note("read", row, &FACTS).unwrap(), "killed by SIGKILL");
        let row = Compared { cache_not_as_asked: 2, ..done() };
        assert_eq!(
            note("read", row.clone(), &FACTS).unwrap(),
            "whole files kept; 2 of 3 runs did not begin cold, or it could not be checked"
        );
        assert_eq!(note("read", row, &Facts { cache: CacheArg::Asis, ..FACTS }).unwrap(), "whole files kept");
    }

    #[test]
    fn the_note_about_mappings_stands_where_something_maps_for_the_cpu() {
        let rows = [done()];
        let entries = |name: &str| {
            [Entry { name: name.to_owned(), what: What::Strategy(Strategy::parse(name).unwrap()) }]
        };
        assert!(cpu_note(&rows, &entries("mmap"), &FACTS).unwrap().contains("nearly free"));
        assert_eq!(cpu_note(&rows, &entries("stream"), &FACTS), None);
        assert_eq!(cpu_note(&rows, &entries("mmap"), &Facts { device: Device::Cuda(0), ..FACTS }), None);
    }
}
