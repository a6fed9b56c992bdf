//! The control loop's watch: where the time of a stream goes.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::times::{Hooks, LayerTimes, PassReport, Waits};
use crate::plan::LoadPlan;
use crate::units::to_u64;

/// What happens while the control loop waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// The engine waits for a layer that is not read and filled.
    Reading,
    /// The engine waits for bytes on their way to the device.
    Linking,
    /// Nothing can be done until the engine moves.
    EngineMoves,
    /// Everybody works.
    Nothing,
}

/// Time that threads spent on the bytes of one read, or of one layer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Work {
    pub(super) reading: Duration,
    pub(super) filling: Duration,
}

impl Work {
    pub(super) fn add(&mut self, other: Self) {
        self.reading = self.reading.saturating_add(other.reading);
        self.filling = self.filling.saturating_add(other.filling);
    }
}

/// What is known of a layer until it is handed out.
#[derive(Clone, Copy, Debug)]
pub(super) struct Course {
    pub(super) turn: usize,
    pub(super) opened: Instant,
    pub(super) work: Work,
    /// When the last copy was queued.
    pub(super) sealed: Option<Instant>,
}

impl Course {
    /// That of a layer which may be read from now on.
    pub(super) fn open(turn: usize) -> Self {
        Self { turn, opened: Instant::now(), work: Work::default(), sealed: None }
    }
}

/// A layer that was handed out and is not released.
#[derive(Clone, Copy, Debug)]
struct Held {
    turn: usize,
    course: Course,
    linking: Duration,
    waits: Waits,
    handed_out: Instant,
}

/// Sums that the stream reads too.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Totals {
    pub(super) passes: u64,
    pub(super) waits: Waits,
}

/// The sums, shared.
pub(super) type SharedTotals = Arc<Mutex<Totals>>;

/// The sums so far.
pub(super) fn read_totals(totals: &SharedTotals) -> Totals {
    // It is only ever assigned.
    *totals.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The watch of one stream.
pub(super) struct Meter {
    plan: Arc<LoadPlan>,
    hooks: Hooks,
    started: Instant,
    /// Everything before this is accounted for.
    counted: Instant,
    /// Waited for the layer that is handed out next; `reading` is not divided yet.
    reading: Duration,
    waits: Waits,
    /// Layers that are sealed, in the order in which they are handed out.
    sealed: VecDeque<Course>,
    handed_out: usize,
    /// Layers that were handed out, if somebody wants to hear of them.
    held: Vec<Held>,
    pass_began: Instant,
    pass_waits: Waits,
    /// Bytes read before this pass.
    read_bytes: u64,
    totals: SharedTotals,
}

impl Meter {
    pub(super) fn new(plan: &Arc<LoadPlan>, hooks: Hooks, started: Instant, totals: SharedTotals) -> Self {
        Self {
            plan: Arc::clone(plan),
            hooks,
            started,
            counted: started,
            reading: Duration::ZERO,
            waits: Waits::default(),
            sealed: VecDeque::new(),
            handed_out: 0,
            held: Vec::new(),
            pass_began: started,
            pass_waits: Waits::default(),
            read_bytes: 0,
            totals,
        }
    }

    /// True if somebody wants to hear of every layer.
    pub(super) fn follows_layers(&self) -> bool {
        self.hooks.on_layer.is_some()
    }

    /// Counts the time since the last call.
    pub(super) fn count(&mut self, phase: Phase) {
        let now = Instant::now();
        let since = now.saturating_duration_since(self.counted);
        self.counted = now;
        match phase {
            Phase::Reading => self.reading += since,
            Phase::Linking => self.waits.link += since,
            Phase::EngineMoves => self.waits.engine += since,
            Phase::Nothing => {}
        }
    }

    /// Takes note of a layer whose copies are all queued.
    pub(super) fn on_sealed(&mut self, course: Course) {
        self.sealed.push_back(Course { sealed: Some(Instant::now()), ..course });
    }

    /// Takes note that the layer that was sealed first is handed out. `read_bytes` were read since
    /// the start.
    pub(super) fn on_handed_out(&mut self, read_bytes: u64) {
        let Some(course) = self.sealed.pop_front() else { return };
        let handed_out = Instant::now();
        let mut waits = std::mem::take(&mut self.waits);
        let reading = std::mem::take(&mut self.reading);
        let work = course.work;
        let share = match (work.reading + work.filling).as_secs_f64() {
            all if all > 0.0 => work.filling.as_secs_f64() / all,
            _ => 0.0,
        };
        waits.fill = reading.mul_f64(share.clamp(0.0, 1.0));
        waits.disk = reading.saturating_sub(waits.fill);
        self.pass_waits += waits;
        let index = course.turn % self.plan.layers().len();
        let linking = course.sealed.map_or(Duration::ZERO, |sealed| handed_out - sealed);
        if self.follows_layers() {
            let held = Held { turn: course.turn, course, linking, waits, handed_out };
            match self.plan.layers()[index].is_kept {
                true => self.tell(&held, None),
                false => self.held.push(held),
            }
        }
        self.handed_out += 1;
        let is_last = self.handed_out.is_multiple_of(self.plan.layers().len());
        self.note_totals(waits, is_last);
        if is_last {
            self.end_pass(course.turn, handed_out, read_bytes);
        }
    }

    fn note_totals(&self, waits: Waits, is_last: bool) {
        let mut totals = self.totals.lock().unwrap_or_else(PoisonError::into_inner);
        totals.waits += waits;
        totals.passes += u64::from(is_last);
    }

    fn end_pass(&mut self, turn: usize, now: Instant, read_bytes: u64) {
        let report = PassReport {
            pass: to_u64(turn / self.plan.layers().len()),
            elapsed: now - self.pass_began,
            waits: std::mem::take(&mut self.pass_waits),
            read_bytes: read_bytes - self.read_bytes,
        };
        (self.pass_began, self.read_bytes) = (now, read_bytes);
        if let Some(on_pass) = &self.hooks.on_pass {
            on_pass(&report);
        }
    }

    /// Tells of layers that were released.
    pub(super) fn on_released(&mut self, ended: &mut Vec<(usize, Instant)>) {
        for (turn, when) in ended.drain(..) {
            if let Some(at) = self.held.iter().position(|held| held.turn == turn) {
                let held = self.held.remove(at);
                self.tell(&held, Some(when));
            }
        }
    }

    /// Tells of layers that are still held.
    pub(super) fn on_end(&mut self) {
        for held in std::mem::take(&mut self.held) {
            self.tell(&held, None);
        }
    }

    fn tell(&self, held: &Held, released: Option<Instant>) {
        let Some(on_layer) = &self.hooks.on_layer else { return };
        let layers = self.plan.layers();
        let index = held.turn % layers.len();
        let from_start = |moment: Instant| moment.saturating_duration_since(self.started);
        on_layer(&LayerTimes {
            id: &layers[index].id,
            index,
            pass: to_u64(held.turn / layers.len()),
            is_kept: layers[index].is_kept,
            reading: held.course.work.reading,
            filling: held.course.work.filling,
            linking: held.linking,
            waits: held.waits,
            opened: from_start(held.course.opened),
            handed_out: from_start(held.handed_out),
            released: released.map(from_start),
        });
    }
}
