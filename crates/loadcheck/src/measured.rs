//! What the probe measured of this very process, in the report's words. For a worker that measures
//! a load, and for a conversion, which measures itself.

use onelayer::live::{self, MemoryKind};
use onelayer::units::MIB;
use onelayer_probe::{Measured, ProcessMemory, Summary};

use crate::report::{Peak, Place, Point, Promise, Report, Split, Unavailable};

/// What is promised beside the budget: thread stacks and the allocator's slack.
pub(crate) const SLACK_BYTES: u64 = 16 * MIB;

/// Memory at one moment.
pub(crate) fn point(memory: &ProcessMemory) -> Point {
    Point { host_bytes: memory.host_bytes.value(), rss_bytes: memory.rss_bytes.value(), ..Point::default() }
}

/// The same moment, with what our own loads have allocated told from everything else.
pub(crate) fn split(point: Point) -> Point {
    let live = live::snapshot();
    let ours_host_bytes = live.bytes(MemoryKind::Host);
    let all_bytes: u64 = live.allocations().iter().map(|one| one.bytes).sum();
    let ours_vram_bytes = all_bytes - ours_host_bytes;
    let split = Split {
        ours_host_bytes,
        other_host_bytes: point.host_bytes.map(|all| all.saturating_sub(ours_host_bytes)),
        ours_vram_bytes,
        other_vram_bytes: point.vram_bytes.map(|all| all.saturating_sub(ours_vram_bytes)),
    };
    Point { split: Some(split), ..point }
}

/// Where a peak was.
pub(crate) fn place_of(peak: &Measured<onelayer_probe::Peak>) -> Option<Place> {
    let Measured::Value(peak) = peak else { return None };
    Some(Place {
        layer: peak.at.layer.as_deref().map(str::to_owned),
        tensor: peak.at.tensor.as_deref().map(str::to_owned),
        seconds: peak.at.seconds,
    })
}

/// The highest values of host memory.
pub(crate) fn peak(summary: &Summary) -> Peak {
    let peak = &summary.peak;
    Peak {
        host_bytes: peak.host.bytes().value(),
        rss_bytes: peak.rss.bytes().value(),
        anon_bytes: peak.anon.bytes().value(),
        file_bytes: peak.file.bytes().value(),
        pinned_bytes: peak.pinned.bytes().value(),
        at: place_of(&peak.host),
        rss_at: place_of(&peak.rss),
        ..Peak::default()
    }
}

/// Growth of resident memory against the budget and what stands beside it, if it was measured.
pub(crate) fn promise(summary: &Summary, budget_bytes: u64, resident_host_bytes: u64) -> Option<Promise> {
    promise_of(summary, budget_bytes.saturating_add(SLACK_BYTES).saturating_add(resident_host_bytes))
}

/// Growth of resident memory against what it may be, if it was measured.
pub(crate) fn promise_of(summary: &Summary, limit_bytes: u64) -> Option<Promise> {
    let growth_bytes = summary.rss_growth_bytes().value()?;
    Some(Promise { limit_bytes, growth_bytes, kept: growth_bytes <= limit_bytes })
}

/// What could not be measured, and why.
pub(crate) fn unavailable(summary: &Summary) -> Vec<Unavailable> {
    let entries = summary.unavailable.iter();
    entries.map(|entry| Unavailable { metric: entry.metric.clone(), reason: entry.reason.clone() }).collect()
}

/// The same, as entries of a report.
pub(crate) fn note_unavailable(summary: &Summary, report: &mut Report) {
    unavailable(summary).iter().for_each(|entry| report.missing(&entry.metric, &entry.reason));
}
