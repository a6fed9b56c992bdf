//! Where the time of a stream goes: what each layer and each pass took, reported to the caller's
//! hooks and summed for the report.
//!
//! ```text
//! opened --(reading, filling)--> all bytes on their way --(link)--> ready --> handed out --(the engine)--> released
//! ```
//!
//! While the engine waits for its next layer, it waits for the disk, for filling (casts, and copies
//! on the host) or for the link to the device. Otherwise the loader may wait for the engine to ask
//! or to drop a layer. If neither waits, nothing limits the stream.

use std::collections::VecDeque;
use std::fmt;
use std::ops::AddAssign;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::layers::LayerId;
use crate::plan::LoadPlan;
use crate::units::to_u64;

/// A limit of the speed of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Binding {
    /// The engine waited while files were read.
    Disk,
    /// The engine waited while bytes were cast, gathered, or copied by the host.
    Fill,
    /// The engine waited while bytes were on their way to the device.
    Link,
    /// The loader waited: the engine held the window, or had not asked for more.
    Engine,
}

impl Binding {
    /// Every variant.
    pub const ALL: [Self; 4] = [Self::Disk, Self::Fill, Self::Link, Self::Engine];
}

impl fmt::Display for Binding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Disk => "disk",
            Self::Fill => "fill",
            Self::Link => "link",
            Self::Engine => "engine",
        })
    }
}

/// Waiting times, by cause. Time in which the engine waits while its layer is read and filled is
/// divided between `disk` and `fill` as the readers divided their work on that layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Waits {
    /// The engine waited for the disk.
    pub disk: Duration,
    /// The engine waited for casts and copies.
    pub fill: Duration,
    /// The engine waited for the link to the device.
    pub link: Duration,
    /// The loader waited for the engine.
    pub engine: Duration,
}

impl Waits {
    /// The waiting time with this cause.
    #[must_use]
    pub fn of(&self, binding: Binding) -> Duration {
        match binding {
            Binding::Disk => self.disk,
            Binding::Fill => self.fill,
            Binding::Link => self.link,
            Binding::Engine => self.engine,
        }
    }

    /// The cause with the longest waiting time. `None` if nothing waited.
    #[must_use]
    pub fn longest(&self) -> Option<Binding> {
        let longest = Binding::ALL.into_iter().max_by_key(|&binding| self.of(binding))?;
        (self.of(longest) > Duration::ZERO).then_some(longest)
    }

    /// The total waiting time of the engine.
    #[must_use]
    pub fn of_engine(&self) -> Duration {
        self.disk.saturating_add(self.fill).saturating_add(self.link)
    }
}

impl AddAssign for Waits {
    fn add_assign(&mut self, other: Self) {
        self.disk = self.disk.saturating_add(other.disk);
        self.fill = self.fill.saturating_add(other.fill);
        self.link = self.link.saturating_add(other.link);
        self.engine = self.engine.saturating_add(other.engine);
    }
}

/// The times of one layer in one pass. Moments are counted from the start of the load.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct LayerTimes<'a> {
    /// The layer.
    pub id: &'a LayerId,
    /// Its place in the order of the stream.
    pub index: usize,
    /// The pass, from 0.
    pub pass: u64,
    /// True if it stays resident from the first pass to the last. It is read only in the first.
    pub is_kept: bool,
    /// Time that all readers together spent reading it.
    pub reading: Duration,
    /// Time that all threads together spent casting, gathering, or copying it on the host.
    pub filling: Duration,
    /// Time from when all its bytes were on their way to the device until they were known to be
    /// there. Almost zero on the host.
    pub linking: Duration,
    /// Waiting times since the layer before it was handed out.
    pub waits: Waits,
    /// When it could first be read.
    pub opened: Duration,
    /// When the engine could take it.
    pub handed_out: Duration,
    /// When its memory was free again, after the layer and all its tensors were dropped. `None` for
    /// a kept layer, and if the stream ended before.
    pub released: Option<Duration>,
}

/// The times of one pass: from when the last layer of the pass before it was handed out, or from
/// the start, until its own last layer was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PassReport {
    /// The pass, from 0.
    pub pass: u64,
    /// How long it took.
    pub elapsed: Duration,
    /// Waiting times.
    pub waits: Waits,
    /// Bytes that were read from files meanwhile, including layers of the next pass that were read
    /// ahead.
    pub read_bytes: u64,
}

/// Called with the times of a layer once it was released.
type OnLayer = dyn Fn(&LayerTimes<'_>) + Send + Sync;
/// Called with the times of a pass once its last layer was handed out.
type OnPass = dyn Fn(&PassReport) + Send + Sync;

/// The hooks of the caller.
#[derive(Clone, Default)]
pub(crate) struct Hooks {
    pub(super) on_layer: Option<Arc<OnLayer>>,
    pub(super) on_pass: Option<Arc<OnPass>>,
}

impl fmt::Debug for Hooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hooks")
            .field("on_layer", &self.on_layer.is_some())
            .field("on_pass", &self.on_pass.is_some())
            .finish()
    }
}

/// A reason why the control loop waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// The engine waits for a layer that is being read and filled.
    Reading,
    /// The engine waits for bytes on their way to the device.
    Linking,
    /// The loader waits for the engine to ask for a layer or drop one.
    EngineMoves,
    /// Nothing waits.
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

/// The times of a layer until it is handed out.
#[derive(Clone, Copy, Debug)]
pub(super) struct LayerTimer {
    pub(super) turn: usize,
    pub(super) opened: Instant,
    pub(super) work: Work,
    /// When the last copy was queued.
    pub(super) sealed: Option<Instant>,
}

impl LayerTimer {
    /// Starts when the layer may be read.
    pub(super) fn start(turn: usize) -> Self {
        Self { turn, opened: Instant::now(), work: Work::default(), sealed: None }
    }
}

/// A layer that was handed out and is not released.
#[derive(Clone, Copy, Debug)]
struct HeldLayer {
    timer: LayerTimer,
    linking: Duration,
    waits: Waits,
    handed_out: Instant,
}

/// Sums that the stream reads as well.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Totals {
    pub(super) passes: u64,
    pub(super) waits: Waits,
}

/// The sums, shared with the stream.
pub(super) type SharedTotals = Arc<Mutex<Totals>>;

/// The sums so far.
pub(super) fn read_totals(totals: &SharedTotals) -> Totals {
    // Assignments cannot leave it half done.
    *totals.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Measures the times of one stream, for the control loop.
pub(super) struct Meter {
    plan: Arc<LoadPlan>,
    hooks: Hooks,
    started: Instant,
    /// Time before this moment is counted.
    counted: Instant,
    /// Time waited for the reading and filling of the next layer.
    reading: Duration,
    waits: Waits,
    /// Layers that are sealed, in the order in which they are handed out.
    sealed: VecDeque<LayerTimer>,
    handed_out: usize,
    /// Layers that were handed out, if there is a hook for layers.
    held: Vec<HeldLayer>,
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

    /// True if there is a hook for layers.
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

    /// Records a layer whose copies are all queued.
    pub(super) fn on_sealed(&mut self, timer: LayerTimer) {
        self.sealed.push_back(LayerTimer { sealed: Some(Instant::now()), ..timer });
    }

    /// Records that the layer that was sealed first is handed out. `read_bytes` were read since the
    /// start.
    pub(super) fn on_handed_out(&mut self, read_bytes: u64) {
        let Some(timer) = self.sealed.pop_front() else { return };
        let handed_out = Instant::now();
        let mut waits = std::mem::take(&mut self.waits);
        let reading = std::mem::take(&mut self.reading);
        let work = timer.work;
        let share = match (work.reading + work.filling).as_secs_f64() {
            all if all > 0.0 => work.filling.as_secs_f64() / all,
            _ => 0.0,
        };
        waits.fill = reading.mul_f64(share.clamp(0.0, 1.0));
        waits.disk = reading.saturating_sub(waits.fill);
        self.pass_waits += waits;
        let index = timer.turn % self.plan.layers().len();
        let linking = timer.sealed.map_or(Duration::ZERO, |sealed| handed_out - sealed);
        if self.follows_layers() {
            let held = HeldLayer { timer, linking, waits, handed_out };
            match self.plan.layers()[index].is_kept {
                true => self.call_hook(&held, None),
                false => self.held.push(held),
            }
        }
        self.handed_out += 1;
        let is_last = self.handed_out.is_multiple_of(self.plan.layers().len());
        self.note_totals(waits, is_last);
        if is_last {
            self.end_pass(timer.turn, handed_out, read_bytes);
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

    /// Calls the hook for layers that were released.
    pub(super) fn on_released(&mut self, ended: &mut Vec<(usize, Instant)>) {
        for (turn, when) in ended.drain(..) {
            if let Some(at) = self.held.iter().position(|held| held.timer.turn == turn) {
                let held = self.held.remove(at);
                self.call_hook(&held, Some(when));
            }
        }
    }

    /// Calls the hook for layers that are still held.
    pub(super) fn on_end(&mut self) {
        for held in std::mem::take(&mut self.held) {
            self.call_hook(&held, None);
        }
    }

    fn call_hook(&self, held: &HeldLayer, released: Option<Instant>) {
        let Some(on_layer) = &self.hooks.on_layer else { return };
        let layers = self.plan.layers();
        let index = held.timer.turn % layers.len();
        let from_start = |moment: Instant| moment.saturating_duration_since(self.started);
        on_layer(&LayerTimes {
            id: &layers[index].id,
            index,
            pass: to_u64(held.timer.turn / layers.len()),
            is_kept: layers[index].is_kept,
            reading: held.timer.work.reading,
            filling: held.timer.work.filling,
            linking: held.linking,
            waits: held.waits,
            opened: from_start(held.timer.opened),
            handed_out: from_start(held.handed_out),
            released: released.map(from_start),
        });
    }
}
