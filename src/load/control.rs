//! The control loop: which read gets a slot, when a layer gets its arena, when it is complete.
//!
//! It makes every decision of a running load and does no blocking work itself. The states of a
//! layer:
//!
//! ```text
//! waiting --(within prefetch)--> open --(window permit)--> has arena --(last copy queued)--> sealed
//!         sealed --(every byte in its place, or at once if the caller wants that)--> handed out
//! ```
//!
//! Why it cannot hang, however small the ring is: reads are issued strictly in the plan's order,
//! and each claims a slot first, so the oldest read always has one. In [`ReadOrder::Layers`], every
//! slot that waits for an arena belongs to one of the oldest layers without one. So the load moves
//! on whenever the caller drops a layer.
//!
//! In [`ReadOrder::Files`], all layers are open from the beginning, and any of them may be sealed
//! next. A layer gets its permit, and requests its arena, before its first read is issued. Such a
//! plan exists only if the window has room for every layer and the device budget for all bytes. So
//! no arena waits for the caller, for another arena or for a slot. Every waiting slot therefore
//! gets its arena, is copied and becomes free, and the next read has it.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use crossbeam_channel::{Receiver, never, select};

use super::channels::layers_ahead_max;
use super::completion::{CompletionThreads, DeviceEvent, DeviceWait};
use super::depth::Observation;
use super::error::{LoadError, panic_message};
use super::hash::LayerHasher;
use super::layer::{LayerMaker, LoadedLayer};
use super::open_layers::{OpenLayers, SealedLayer, Turns, WaitingSlot};
use super::permits::{WindowPermits, layers_at_once};
use super::progress::Progress;
use super::reader::{Done, Job, JobResult};
use super::setup::{Channels, Delivery, LoadSetup, Resources};
use super::times::{Meter, Phase, SharedTotals};
use crate::device::{ArenaPlace, Backend, PendingCopy};
use crate::plan::{HandOut, ReadOrder};
use crate::staging::{Filled, Slot};
use crate::units::{to_u64, to_usize};

/// The end of a wait of the control loop.
enum Wakeup<B: Backend> {
    Result(JobResult<B>),
    Device(DeviceEvent<B>),
    Signal,
}

/// The control loop of one load.
pub(super) struct Control<B: Backend> {
    setup: LoadSetup,
    resources: Resources<B>,
    channels: Channels<B>,
    device_events: Receiver<DeviceEvent<B>>,
    permits: Arc<WindowPermits>,
    progress: Progress,
    /// The next read to issue.
    turns: Turns,
    meter: Meter,
    layers: LayerMaker,
    /// Filled slots that wait for the arena of their layer.
    waiting_slots: Vec<WaitingSlot>,
    /// Turns that have ended and were not reported yet. Empty between two looks.
    ended: Vec<(usize, Instant)>,
    open: OpenLayers<B>,
    /// Layers that are with the caller, or on their way there.
    handed_out: usize,
    /// Layers that have or had a permit.
    placed: usize,
    /// Layers read ahead of the last one the caller asked for.
    prefetch: usize,
    /// Layers that the caller asked for so far.
    wanted: usize,
    /// Finished reads.
    reads_done: u64,
    /// Reads that the readers have or will take next.
    jobs_running: usize,
    /// Copies and layers that the completion threads wait for.
    waits_running: usize,
    /// Filled slots that wait for an earlier read to be hashed, by sequence.
    unhashed: BTreeMap<u64, (usize, u32, Slot<Filled>)>,
    /// Reads that were issued.
    reads_issued: u64,
    /// Reads that were hashed. The next one has this sequence.
    reads_hashed: u64,
    hasher: LayerHasher,
}

impl<B: Backend> Control<B> {
    pub(super) fn new(
        setup: LoadSetup,
        resources: Resources<B>,
        channels: Channels<B>,
        permits: Arc<WindowPermits>,
        progress: Progress,
        totals: SharedTotals,
    ) -> Self {
        let plan = &setup.plan;
        let prefetch = to_usize(u64::from(setup.options.prefetch_layers)).min(layers_ahead_max(plan));
        let turns = Turns::new(plan);
        let meter = Meter::new(plan, setup.hooks.clone(), setup.started, totals);
        let layers = LayerMaker::new(&setup.checkpoint, plan, layers_at_once(plan));
        if meter.follows_layers() {
            permits.record_ends();
        }
        let device_events = channels.completion.as_ref().map_or_else(never, CompletionThreads::events);
        // Over many passes nothing may be allocated later, so lists start with all the room they
        // need.
        let most = (to_usize(u64::from(plan.memory().ring().slots)), prefetch + 1);
        let (slots_room, open_room) = if plan.passes().is_one() { (0, 0) } else { most };
        let open = OpenLayers::new(plan.order(), open_room);
        Self {
            setup,
            resources,
            channels,
            device_events,
            permits,
            progress,
            turns,
            meter,
            layers,
            waiting_slots: Vec::with_capacity(slots_room),
            ended: Vec::new(),
            open,
            handed_out: 0,
            placed: 0,
            prefetch,
            wanted: 0,
            reads_done: 0,
            jobs_running: 0,
            waits_running: 0,
            unhashed: BTreeMap::new(),
            reads_issued: 0,
            reads_hashed: 0,
            hasher: LayerHasher::default(),
        }
    }

    /// Runs until every layer is handed out and nothing is in flight any more, or until something
    /// fails.
    pub(super) fn run(mut self) {
        // A panic is an error of this load: it must leave neither readers nor arenas behind.
        let outcome = catch_unwind(AssertUnwindSafe(|| self.drive()))
            .unwrap_or_else(|panic| Err(LoadError::Panicked { message: panic_message(&*panic) }));
        if let Err(error) = outcome {
            self.resources.backend.give_up();
            // The stream may be gone.
            let _ = self.channels.deliveries.send(Delivery::Failed(Box::new(error)));
        }
        // A panic of a hook at the end has no error to become.
        let _ = catch_unwind(AssertUnwindSafe(|| self.report_remaining_layers()));
        self.wind_down();
    }

    fn drive(&mut self) -> Result<(), LoadError> {
        while self.open.sealed() < self.turns.total() || self.waits_running > 0 {
            self.read_signals()?;
            self.open_layers();
            self.place_layers()?;
            self.issue_reads()?;
            self.adapt_depth();
            // A sealed layer may open another one, so it waits only if there was none to seal.
            if !self.seal_next()? {
                self.wait()?;
            }
        }
        Ok(())
    }

    /// Opens the layers that may be read: those up to `prefetch` beyond the last one the caller
    /// asked for.
    fn open_layers(&mut self) {
        let plan = &self.setup.plan;
        let end = match plan.order() {
            ReadOrder::Layers => self.wanted.saturating_add(self.prefetch).min(self.turns.total()),
            ReadOrder::Files => self.turns.total(),
        };
        self.open.open_until(end, &self.turns);
    }

    /// Places open layers, oldest first, as long as the window has room. In the order of files, a
    /// layer with reads is placed with its first read instead.
    fn place_layers(&mut self) -> Result<(), LoadError> {
        while self.placed < self.open.end() {
            let waits_for_read = self.setup.plan.order() == ReadOrder::Files
                && !self.turns.layer(self.placed).reads.is_empty();
            if !waits_for_read && !self.place(self.placed)? {
                return Ok(());
            }
            self.placed += 1;
        }
        Ok(())
    }

    /// Gets a permit for an open layer and requests its arena. False if the window has no room.
    fn place(&mut self, turn: usize) -> Result<bool, LoadError> {
        let layer = self.turns.layer(turn);
        let open = self.open.get_mut(turn);
        let place = if open.is_there {
            return Ok(true);
        } else if layer.is_kept {
            ArenaPlace::Own
        } else {
            let Some(permit) = self.permits.try_issue(turn, layer.arena_bytes) else { return Ok(false) };
            open.permit.insert(permit).place()
        };
        open.is_placed = true;
        match &mut self.channels.completion {
            Some(completion) => completion.allocate(turn, place),
            None => {
                let arena = self.resources.backend.allocate(layer, place)?;
                self.on_arena(turn, arena)?;
            }
        }
        Ok(true)
    }

    /// Starts the copies that waited for the arena.
    fn on_arena(&mut self, turn: usize, arena: Arc<B::Arena>) -> Result<(), LoadError> {
        self.open.get_mut(turn).arena = Some(arena);
        while let Some(next) = self.waiting_slots.iter().position(|waiting| waiting.turn == turn) {
            let WaitingSlot { read, slot, .. } = self.waiting_slots.remove(next);
            self.start_copy(turn, read, slot)?;
        }
        self.open.note_if_whole(turn);
        Ok(())
    }

    /// Starts the copy of a filled slot. Without an arena, the slot waits.
    fn start_copy(&mut self, turn: usize, read: u32, slot: Slot<Filled>) -> Result<(), LoadError> {
        let layer = self.open.get_mut(turn);
        let Some(arena) = &layer.arena else {
            self.waiting_slots.push(WaitingSlot { turn, read, slot });
            return Ok(());
        };
        let plan = &self.setup.plan;
        let start = Instant::now();
        let copy = self.resources.backend.copy_async(arena, slot, plan.copies(&plan.read(read)))?;
        layer.timer.work.filling += start.elapsed();
        self.on_copying(turn, read, copy)
    }

    /// Records a queued copy. On an asynchronous device a completion thread waits for it.
    fn on_copying(&mut self, turn: usize, read: u32, copy: B::Pending) -> Result<(), LoadError> {
        let layer = self.open.get_mut(turn);
        layer.reads_left -= 1;
        match &self.channels.completion {
            Some(completion) => {
                let permit = layer.permit.clone();
                self.waits_running += 1;
                completion.wait(DeviceWait::Copy { read, copy, permit });
            }
            None => {
                drop(copy.wait()?);
                self.count_tensor_bytes(read);
            }
        }
        self.open.note_if_whole(turn);
        Ok(())
    }

    /// Records a finished copy.
    fn on_copied(&mut self, turn: usize, read: u32) {
        self.open.get_mut(turn).reads_left -= 1;
        self.count_tensor_bytes(read);
        self.open.note_if_whole(turn);
    }

    fn count_tensor_bytes(&self, read: u32) {
        let plan = &self.setup.plan;
        self.progress.add_tensor_bytes(plan.copies(&plan.read(read)).map(|copy| copy.len_bytes).sum());
    }

    /// Adapts the number of reads in flight to the progress of reading.
    fn adapt_depth(&mut self) {
        let depth = &mut self.channels.depth;
        if depth.is_fixed() {
            return;
        }
        let now_ns = u64::try_from(self.setup.started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let is_starved = self.jobs_running < to_usize(u64::from(depth.limit()));
        let limit_before = depth.limit();
        depth.observe(Observation {
            now_ns,
            read_bytes: self.progress.read_bytes(),
            reads: self.reads_done,
            is_starved,
        });
        if depth.limit() != limit_before {
            self.channels.reader_limit.set(depth.limit());
        }
    }

    /// Issues reads of open layers while there are free slots.
    fn issue_reads(&mut self) -> Result<(), LoadError> {
        // Two jobs for each read in flight, so that no reader waits for this loop.
        let jobs_most = 2 * to_usize(u64::from(self.channels.depth.limit()));
        while let Some((turn, read)) = self.turns.next_read() {
            if turn >= self.open.end() || self.jobs_running >= jobs_most {
                return Ok(());
            }
            let Some(claim) = self.resources.ring.try_claim() else { return Ok(()) };
            if self.setup.plan.order() == ReadOrder::Files && self.open.get(turn).permit.is_none() {
                let is_placed = self.place(turn)?;
                assert!(is_placed, "a window of all layers has a place for each");
            }
            let arena = match self.setup.is_in_order() {
                true => None, // the bytes are hashed or observed first, in order
                false => self.open.get(turn).arena.clone(),
            };
            let job = Job { turn, sequence: self.reads_issued, read, claim, arena };
            self.channels.jobs.send(job);
            self.jobs_running += 1;
            self.reads_issued += 1;
            self.turns.advance();
        }
        Ok(())
    }

    /// Seals the next layer whose copies are all queued, and hands it out or has it waited for.
    /// False if there is none.
    fn seal_next(&mut self) -> Result<bool, LoadError> {
        let Some(turn) = self.open.next_whole() else { return Ok(false) };
        let sealed = self.open.seal(turn);
        self.meter.on_sealed(sealed.timer);
        let index = self.turns.index(turn);
        let mut layer = match self.layers.kept(index) {
            Some(layer) => layer,
            None => self.seal(index, sealed)?,
        };
        layer.pass = to_u64(self.turns.pass(turn));
        match &self.channels.completion {
            Some(completion) if self.setup.options.hand_out == HandOut::WhenComplete => {
                self.waits_running += 1;
                completion.wait(DeviceWait::Ready(layer));
            }
            _ => self.hand_out(layer),
        }
        Ok(true)
    }

    /// Makes a layer of a filled arena.
    fn seal(&mut self, index: usize, sealed: SealedLayer<B>) -> Result<LoadedLayer, LoadError> {
        let SealedLayer { arena, permit, mut hashes, .. } = sealed;
        let arena = arena.expect("a whole layer has an arena");
        let plan = &self.setup.plan;
        let planned = &plan.layers()[index];
        let resident = self.resources.backend.seal(arena, plan.moves(planned))?;
        if self.setup.options.hash && hashes.is_empty() {
            // A layer without bytes has no read to hash.
            hashes = LayerHasher::default().finish_layer(plan.placements(planned));
        }
        Ok(self.layers.make(index, resident, permit, hashes))
    }

    fn hand_out(&mut self, layer: LoadedLayer) {
        self.handed_out += 1;
        self.progress.add_layer();
        self.meter.on_handed_out(self.progress.read_bytes());
        // If the stream is gone, the layer is dropped, and the next signal ends the load.
        let _ = self.channels.deliveries.send(Delivery::Layer(layer));
    }

    /// Waits until something has changed.
    fn wait(&mut self) -> Result<(), LoadError> {
        let phase = self.phase();
        self.meter.count(Phase::Nothing);
        let wakeup = select! {
            recv(self.channels.results) -> result => {
                Wakeup::Result(result.expect("readers outlive the control loop"))
            }
            recv(self.device_events) -> event => {
                Wakeup::Device(event.expect("the completion threads outlive the control loop"))
            }
            recv(self.channels.woken) -> message => {
                message.expect("this loop holds the signals");
                Wakeup::Signal
            }
        };
        self.meter.count(phase);
        match wakeup {
            Wakeup::Result(result) => self.on_result(result),
            Wakeup::Device(event) => self.on_device_event(event),
            Wakeup::Signal => Ok(()),
        }
    }

    /// The current reason for waiting.
    fn phase(&self) -> Phase {
        let is_idle = self.jobs_running == 0 && self.waits_running == 0 && !self.open.await_an_arena();
        if is_idle {
            return Phase::EngineMoves;
        }
        if self.wanted <= self.handed_out {
            return Phase::Nothing;
        }
        // Without a read in progress there is no free slot, and the slots are on the link.
        match self.open.first() {
            Some(layer) if layer.reads_left > 0 && self.jobs_running > 0 => Phase::Reading,
            _ => Phase::Linking,
        }
    }

    /// Reads the signals of the caller.
    fn read_signals(&mut self) -> Result<(), LoadError> {
        let signals = &self.channels.signals;
        self.wanted = signals.wanted();
        // Once all layers are handed out, only copies are left to wait for.
        if signals.is_cancelled() && self.handed_out < self.turns.total() {
            return Err(LoadError::Cancelled);
        }
        self.permits.take_ended(&mut self.ended);
        self.meter.on_released(&mut self.ended);
        Ok(())
    }

    /// Calls the hook for layers that were handed out and not reported yet.
    fn report_remaining_layers(&mut self) {
        self.permits.take_ended(&mut self.ended);
        self.meter.on_released(&mut self.ended);
        self.meter.on_end();
    }

    fn on_device_event(&mut self, event: DeviceEvent<B>) -> Result<(), LoadError> {
        match event {
            DeviceEvent::Allocated { turn, arena } => self.on_arena(turn, arena?)?,
            DeviceEvent::Copied { read, outcome } => {
                self.waits_running -= 1;
                outcome?;
                self.count_tensor_bytes(read);
            }
            DeviceEvent::Ready(layer) => {
                self.waits_running -= 1;
                self.hand_out(layer?);
            }
        }
        Ok(())
    }

    fn on_result(&mut self, result: JobResult<B>) -> Result<(), LoadError> {
        self.jobs_running -= 1;
        self.reads_done += 1;
        let JobResult { turn, sequence, read, work, outcome } = result;
        let done = outcome?;
        self.open.get_mut(turn).timer.work.add(work);
        match done {
            Done::Copying(copy) => self.on_copying(turn, read, copy),
            Done::Copied => {
                self.on_copied(turn, read);
                Ok(())
            }
            Done::Filled(slot) if self.setup.is_in_order() => {
                self.unhashed.insert(sequence, (turn, read, slot));
                self.hash_in_order()
            }
            Done::Filled(slot) => self.start_copy(turn, read, slot),
        }
    }

    /// Hashes the slots that are next in order, shows them to the observer, and frees them.
    fn hash_in_order(&mut self) -> Result<(), LoadError> {
        while let Some((turn, number, slot)) = self.unhashed.remove(&self.reads_hashed) {
            let plan = &self.setup.plan;
            let read = plan.read(number);
            let planned = self.turns.layer(turn);
            let placements = plan.placements(planned);
            if self.setup.options.hash {
                let first = planned.placements.start;
                self.hasher.update(&self.setup.checkpoint, (first, placements), &read, &slot);
            }
            if let Some(observer) = &mut self.setup.observer {
                observer(&read, &slot)?;
            }
            drop(slot);
            self.count_tensor_bytes(number);
            let open = self.open.get_mut(turn);
            open.reads_left -= 1;
            if open.reads_left == 0 && self.setup.options.hash {
                open.hashes = self.hasher.finish_layer(placements);
            }
            self.reads_hashed += 1;
        }
        Ok(())
    }

    /// Ends the threads, waits for the work in flight and gives everything back.
    fn wind_down(self) {
        let Self { resources, channels, device_events, open, waiting_slots, unhashed, layers, .. } = self;
        drop(device_events);
        channels.close();
        drop((unhashed, waiting_slots, open));
        layers.close();
        resources.backend.trim();
        drop(resources.reservations);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::HostBackend;
    use crate::load::layer_data::LayerData;
    use crate::load::open_layers::OpenLayer;
    use crate::plan::LAYER_STATE_BYTES;

    #[test]
    fn a_layer_costs_what_the_plan_counts() {
        check::<HostBackend>();
        #[cfg(feature = "cuda")]
        check::<crate::device::cuda::CudaBackend>();
    }

    fn check<B: Backend>() {
        /// Overhead of the allocator for a block, and the two counts of an `Arc`.
        const BLOCK_BYTES: usize = 16;
        const COUNTS_BYTES: usize = 16;
        let parts = [
            // While it is filled ...
            size_of::<OpenLayer<B>>(),
            size_of::<B::Arena>() + COUNTS_BYTES + BLOCK_BYTES,
            // ... and when it is handed out: its place in the window, in the channel, in a model.
            size_of::<LayerData>() + COUNTS_BYTES + BLOCK_BYTES,
            size_of::<B::Resident>() + COUNTS_BYTES + BLOCK_BYTES,
            3 * size_of::<usize>(),
            size_of::<Option<LoadedLayer>>(),
        ];
        let bytes = to_u64(parts.iter().sum());
        assert!(bytes <= LAYER_STATE_BYTES && bytes > LAYER_STATE_BYTES / 2, "{bytes}: {parts:?}");
    }
}
