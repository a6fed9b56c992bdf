//! A stretch of time in which reading is measured.

use super::Observation;

/// What a window lasts at least: long enough that a hiccup of the system does not decide.
const WINDOW_NS_MIN: u64 = 32_000_000;
/// The same of a short one, which only a large difference can decide.
const GLANCE_NS_MIN: u64 = 8_000_000;
/// Reads that a window holds at least.
const WINDOW_READS_MIN: u64 = 16;
/// A window that was idle for more than one part in so many does not count.
const IDLE_PART_MAX: u64 = 10;

/// A stretch of time in which reading is measured.
#[derive(Clone, Debug)]
pub(super) struct Window {
    /// Until so many reads are over, those that were begun before are among them, and slots are
    /// used that were not before.
    settled_at_reads: u64,
    ns_min: u64,
    start: Option<Observation>,
    /// Time with reads, since it began to settle.
    busy_ns: u64,
    /// Time without, since it was settled.
    idle_ns: u64,
}

/// What a window says.
#[derive(Clone, Copy, Debug)]
pub(super) struct Measured {
    /// Bytes per millisecond, or `None` if readers had nothing to do for too long.
    pub(super) rate: Option<u64>,
    /// Time with reads that it took.
    pub(super) busy_ns: u64,
}

impl Window {
    /// One that begins as soon as nothing is left of what was before, with `limit` reads in flight.
    pub(super) fn new(now: Observation, limit: u32, is_glance: bool) -> Self {
        Self {
            settled_at_reads: now.reads.saturating_add(2 * u64::from(limit)),
            ns_min: if is_glance { GLANCE_NS_MIN } else { WINDOW_NS_MIN },
            start: None,
            busy_ns: 0,
            idle_ns: 0,
        }
    }

    /// Takes note of how far reading is. Something if the window is over.
    pub(super) fn observe(&mut self, last: Observation, now: Observation) -> Option<Measured> {
        let passed_ns = now.now_ns.saturating_sub(last.now_ns);
        *(if last.is_starved { &mut self.idle_ns } else { &mut self.busy_ns }) += passed_ns;
        let Some(start) = self.start else {
            if now.reads >= self.settled_at_reads {
                (self.start, self.idle_ns) = (Some(now), 0);
            }
            return None;
        };
        let elapsed_ns = now.now_ns.saturating_sub(start.now_ns);
        let is_spoilt = self.idle_ns.saturating_mul(IDLE_PART_MAX) > elapsed_ns;
        let is_over = elapsed_ns >= self.ns_min
            && (now.reads.saturating_sub(start.reads) >= WINDOW_READS_MIN || self.idle_ns > self.ns_min);
        is_over.then(|| {
            let read_bytes = now.read_bytes.saturating_sub(start.read_bytes);
            let rate = read_bytes.saturating_mul(1_000) / (elapsed_ns / 1_000).max(1);
            Measured { rate: Some(rate).filter(|_| !is_spoilt), busy_ns: self.busy_ns }
        })
    }
}
