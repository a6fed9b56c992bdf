//! The control loop: who gets a slot, when a layer gets its arena, when it is complete.
//!
//! It owns every decision of a running load and does no blocking work itself. A layer goes through
//!
//! ```text
//! waiting --(within prefetch)--> open --(a place in the window)--> has arena --(last copy queued)--> sealed
//!         sealed --(every byte in its place, or at once if the caller wants it so)--> handed out
//! ```
//!
//! Reads are issued strictly in the plan's order and each claims a slot first, so the oldest read
//! always has one. In the order of layers, every slot that waits for an arena belongs to the oldest
//! layers without one. Therefore the load moves on whenever the caller drops a layer, however small
//! the ring is.
//!
//! In the order of files all layers are open from the beginning, and any of them may be the next
//! that is sealed. A layer is given its place and asks for its arena no later than its first read
//! is issued. The window has a place for every layer, and the device budget bytes for all, or there
//! is no such plan: so no arena waits for the caller, none for another, and none for a slot. Hence
//! every slot that waits for an arena gets it, whatever the caller does and in whatever order
//! arenas come; it is copied and free again; and the next read has it.

use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use crossbeam_channel::{Receiver, never, select};

use super::attend::{Attendants, Notice, Wait};
use super::channels::ahead_most;
use super::depth::Observation;
use super::hash::{LayerHasher, TensorHash};
use super::layer::{Content, LayerData};
use super::meter::{Course, Meter, Phase, SharedTotals};
use super::open::{OpenLayer, Parked};
use super::reader::{self, Done, Job, JobResult};
use super::setup::{Setup, Wires};
use super::shelf::Shelf;
use super::stream::Delivery;
use super::turns::Turns;
use super::window::{Permit, PermitOffice, layers_at_once};
use super::{LoadError, LoadedLayer, Progress};
use crate::device::{ArenaPlace, Backend, PendingCopy};
use crate::plan::{HandOut, ReadOrder, Turn};
use crate::staging::{Filled, Slot};
use crate::units::{to_u64, to_usize};

/// What the control loop waited for.
enum Heard<B: Backend> {
    Result(JobResult<B>),
    Notice(Notice<B>),
    Bell,
}

/// The control loop of one load.
pub(super) struct Control<B: Backend> {
    setup: Setup<B>,
    wires: Wires<B>,
    notices: Receiver<Notice<B>>,
    office: Arc<PermitOffice>,
    progress: Progress,
    /// Whose turn it is, and the next read to issue.
    turns: Turns,
    meter: Meter,
    /// Layers that stay, by index, once they are sealed. Empty if none do.
    kept: Vec<Option<LoadedLayer>>,
    /// What layers are made of that come again and again. `None` in one pass.
    shelf: Option<Arc<Shelf>>,
    /// Filled slots that wait for the arena of their layer.
    parked: Vec<Parked>,
    /// Turns that have ended and were not told of: empty between two looks.
    ended: Vec<(usize, Instant)>,
    /// Layers that are open, in order, from the first one that is not sealed, whose turn is
    /// `sealed`.
    open: VecDeque<OpenLayer<B>>,
    /// Layers whose copies are all queued, as are those of all layers before them.
    sealed: usize,
    /// Layers that can be sealed, if they may be in any order.
    whole: VecDeque<usize>,
    /// Layers that are on their way to the caller, or there.
    handed_out: usize,
    /// Layers that have a place in the window, or had one.
    placed: usize,
    /// Layers read ahead of the last one the caller asked for.
    prefetch: usize,
    /// Layers the caller asked for so far.
    wanted: usize,
    /// Reads that are over.
    reads_done: u64,
    /// Reads that the readers have or will take next.
    jobs_running: usize,
    /// Copies and layers that the attendants wait for.
    waits_running: usize,
    /// Filled slots that wait for an earlier read to be hashed.
    unhashed: BTreeMap<u64, (usize, u32, Slot<Filled>)>,
    /// Reads that were issued before the next one.
    reads_issued: u64,
    /// Reads that were hashed: the next one is the one that was issued after so many.
    reads_hashed: u64,
    /// Hashes the reads, and so the layers, one after the other.
    hasher: LayerHasher,
}

impl<B: Backend> Control<B> {
    pub(super) fn new(
        setup: Setup<B>,
        wires: Wires<B>,
        office: Arc<PermitOffice>,
        progress: Progress,
        totals: SharedTotals,
    ) -> Self {
        let plan = &setup.plan;
        let prefetch = setup.prefetch.min(ahead_most(plan));
        let turns = Turns::new(plan);
        let meter = Meter::new(plan, setup.hooks.clone(), setup.started, totals);
        let keeps = plan.layers().iter().any(|layer| layer.is_kept);
        let mut kept = Vec::new();
        kept.resize_with(if keeps { plan.layers().len() } else { 0 }, || None);
        if meter.follows_layers() {
            office.note_ends();
        }
        let notices = wires.attendants.as_ref().map_or_else(never, Attendants::notices);
        let goes_on = !plan.passes().is_one();
        let shelf = goes_on.then(|| Arc::new(Shelf::new(layers_at_once(plan), &setup.checkpoint, plan)));
        // Lists that are used for many passes have room from the beginning for all that can be in
        // them at once.
        let most = (to_usize(u64::from(plan.memory().ring().slots)), prefetch + 1);
        let (parked_room, open_room) = if goes_on { most } else { (0, 0) };
        Self {
            setup,
            wires,
            notices,
            office,
            progress,
            turns,
            meter,
            kept,
            shelf,
            parked: Vec::with_capacity(parked_room),
            ended: Vec::new(),
            open: VecDeque::with_capacity(open_room),
            sealed: 0,
            whole: VecDeque::new(),
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
        // A panic is an error of this load like any other: it must not leave readers behind, nor
        // arenas with the device.
        let outcome = catch_unwind(AssertUnwindSafe(|| self.drive()))
            .unwrap_or_else(|panic| Err(LoadError::Panicked { message: reader::panic_message(&*panic) }));
        if let Err(error) = outcome {
            self.setup.backend.give_up();
            // A caller that has gone does not want to know.
            let _ = self.wires.deliveries.send(Delivery::Failed(Box::new(error)));
        }
        // Nobody is left to be told of a panic in here.
        let _ = catch_unwind(AssertUnwindSafe(|| self.tell_of_the_rest()));
        self.wind_down();
    }

    fn drive(&mut self) -> Result<(), LoadError> {
        while self.sealed < self.turns.total() || self.waits_running > 0 {
            self.hear_signals()?;
            self.open_layers();
            self.place_layers()?;
            self.issue_reads()?;
            self.adapt_depth();
            // Sealing a layer opens another: only when there was none is there nothing left to do
            // but wait.
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
        for turn in self.sealed + self.open.len()..end {
            let reads = &self.turns.layer(turn).reads;
            let (reads, is_there) = (reads.end - reads.start, self.turns.is_there(turn));
            self.open.push_back(OpenLayer::new(Course::open(turn), reads, is_there));
        }
    }

    /// Gives open layers without a place one each, as far as the window allows: the oldest, or
    /// those without reads, where the others are given theirs with their first read.
    fn place_layers(&mut self) -> Result<(), LoadError> {
        while self.placed < self.sealed + self.open.len() {
            let waits_for_read = self.setup.plan.order() == ReadOrder::Files
                && !self.turns.layer(self.placed).reads.is_empty();
            if !waits_for_read && !self.place(self.placed)? {
                return Ok(());
            }
            self.placed += 1;
        }
        Ok(())
    }

    /// Gives an open layer a place, if the window allows, and asks for its arena.
    fn place(&mut self, turn: usize) -> Result<bool, LoadError> {
        let layer = self.turns.layer(turn);
        let open = &mut self.open[turn - self.sealed];
        let place = if open.is_there {
            return Ok(true);
        } else if layer.is_kept {
            ArenaPlace::Own
        } else {
            let Some(permit) = self.office.try_issue(turn, layer.arena_bytes) else { return Ok(false) };
            open.permit.insert(permit).place()
        };
        open.is_placed = true;
        match &mut self.wires.attendants {
            Some(attendants) => attendants.allocate(turn, place),
            None => {
                let arena = self.setup.backend.allocate(layer, place)?;
                self.on_arena(turn, arena)?;
            }
        }
        Ok(true)
    }

    /// Starts the copies that waited for the arena.
    fn on_arena(&mut self, turn: usize, arena: Arc<B::Arena>) -> Result<(), LoadError> {
        self.open[turn - self.sealed].arena = Some(arena);
        while let Some(next) = self.parked.iter().position(|parked| parked.turn == turn) {
            let Parked { read, slot, .. } = self.parked.remove(next);
            self.start_copy(turn, read, slot)?;
        }
        self.note_whole(turn);
        Ok(())
    }

    /// Remembers a layer that has become whole, where it need not wait for those before it.
    fn note_whole(&mut self, turn: usize) {
        // The copies that wait for an arena start with it: then both, the last copy and the arena,
        // find the layer whole.
        let is_first = !self.whole.contains(&turn);
        if self.setup.plan.order() == ReadOrder::Files && is_first && self.open[turn - self.sealed].is_whole()
        {
            self.whole.push_back(turn);
        }
    }

    /// Starts the copy of a filled slot, or parks it until there is an arena.
    fn start_copy(&mut self, turn: usize, read: u32, slot: Slot<Filled>) -> Result<(), LoadError> {
        let layer = &mut self.open[turn - self.sealed];
        let Some(arena) = &layer.arena else {
            self.parked.push(Parked { turn, read, slot });
            return Ok(());
        };
        let plan = &self.setup.plan;
        let start = Instant::now();
        let copy = self.setup.backend.copy_async(arena, slot, plan.copies(&plan.read(read)))?;
        layer.course.work.filling += start.elapsed();
        self.on_copying(turn, read, copy)
    }

    /// Takes note of a copy that is queued: it is somebody else's to wait for, or over already.
    fn on_copying(&mut self, turn: usize, read: u32, copy: B::Pending) -> Result<(), LoadError> {
        let layer = &mut self.open[turn - self.sealed];
        layer.reads_left -= 1;
        match &self.wires.attendants {
            Some(attendants) => {
                let permit = layer.permit.clone();
                self.waits_running += 1;
                attendants.wait(Wait::Copy { read, copy, permit });
            }
            None => {
                drop(copy.wait()?);
                self.count_tensor_bytes(read);
            }
        }
        self.note_whole(turn);
        Ok(())
    }

    /// Takes note of a copy that is over.
    fn on_copied(&mut self, turn: usize, read: u32) {
        self.open[turn - self.sealed].reads_left -= 1;
        self.count_tensor_bytes(read);
        self.note_whole(turn);
    }

    fn count_tensor_bytes(&self, read: u32) {
        let plan = &self.setup.plan;
        self.progress.add_tensor_bytes(plan.copies(&plan.read(read)).map(|copy| copy.len_bytes).sum());
    }

    /// Tells the depth how far reading is, and the readers how many of them may read from now on.
    fn adapt_depth(&mut self) {
        let depth = &mut self.wires.depth;
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
            self.wires.keeper.set(depth.limit());
        }
    }

    /// Issues reads of open layers while there are free slots.
    fn issue_reads(&mut self) -> Result<(), LoadError> {
        // Two for each read in flight, so that no reader waits for this loop.
        let jobs_most = 2 * to_usize(u64::from(self.wires.depth.limit()));
        while let Some(Turn { layer: turn, read }) = self.turns.next_read() {
            if turn >= self.sealed + self.open.len() || self.jobs_running >= jobs_most {
                return Ok(());
            }
            let Some(claim) = self.setup.ring.try_claim() else { return Ok(()) };
            if self.setup.plan.order() == ReadOrder::Files && self.open[turn - self.sealed].permit.is_none() {
                let is_placed = self.place(turn)?;
                assert!(is_placed, "a window of all layers has a place for each");
            }
            let arena = match self.setup.is_in_order() {
                true => None, // whoever hashes sees the bytes first, in order
                false => self.open[turn - self.sealed].arena.clone(),
            };
            let job = Job { turn, sequence: self.reads_issued, read, claim, arena };
            self.wires.jobs.send(job);
            self.jobs_running += 1;
            self.reads_issued += 1;
            self.turns.advance();
        }
        Ok(())
    }

    /// The open layer that can be sealed next.
    fn next_whole(&mut self) -> Option<usize> {
        match self.setup.plan.order() {
            ReadOrder::Layers => self.open.front().is_some_and(OpenLayer::is_whole).then_some(self.sealed),
            ReadOrder::Files => self.whole.pop_front(),
        }
    }

    /// Seals a layer if all its copies are queued, and hands it out or has it waited for. True if
    /// it did.
    fn seal_next(&mut self) -> Result<bool, LoadError> {
        let Some(turn) = self.next_whole() else { return Ok(false) };
        let open = &mut self.open[turn - self.sealed];
        open.is_sealed = true;
        let (arena, permit, hashes) =
            (open.arena.take(), open.permit.take(), std::mem::take(&mut open.hashes));
        self.meter.on_sealed(open.course);
        while self.open.front().is_some_and(|layer| layer.is_sealed) {
            self.open.pop_front();
            self.sealed += 1;
        }
        let index = self.turns.index(turn);
        let there = self.kept.get(index).and_then(Option::as_ref).map(LoadedLayer::share);
        let mut layer = match there {
            Some(layer) => layer,
            None => {
                let arena = arena.expect("a whole layer has an arena");
                self.seal(index, arena, permit, hashes)?
            }
        };
        layer.pass = to_u64(self.turns.pass(turn));
        match &self.wires.attendants {
            Some(attendants) if self.setup.hand_out == HandOut::WhenComplete => {
                self.waits_running += 1;
                attendants.wait(Wait::Ready(layer));
            }
            _ => self.hand_out(layer),
        }
        Ok(true)
    }

    /// Makes a layer of an arena. One that is kept is shared from now on.
    fn seal(
        &mut self,
        index: usize,
        arena: Arc<B::Arena>,
        permit: Option<Permit>,
        mut hashes: Vec<TensorHash>,
    ) -> Result<LoadedLayer, LoadError> {
        let plan = &self.setup.plan;
        let planned = &plan.layers()[index];
        let resident = self.setup.backend.seal(arena, plan.moves(planned))?;
        if self.setup.hash && hashes.is_empty() {
            // A layer without bytes has no read to hash.
            hashes = LayerHasher::default().finish_layer(plan.placements(planned));
        }
        let content = Some(Content { resident, permit });
        let data = LayerData { index, hashes, content, ..LayerData::blank(&self.setup.checkpoint, plan) };
        if planned.is_kept {
            let layer = LoadedLayer::new(data);
            self.kept[index] = Some(layer.share());
            return Ok(layer);
        }
        Ok(match &self.shelf {
            Some(shelf) => LoadedLayer::on(shelf, data),
            None => LoadedLayer::new(data),
        })
    }

    fn hand_out(&mut self, layer: LoadedLayer) {
        self.handed_out += 1;
        self.progress.add_layer();
        self.meter.on_handed_out(self.progress.read_bytes());
        // If the stream is gone, so is the layer; the next signal ends the load.
        let _ = self.wires.deliveries.send(Delivery::Layer(layer));
    }

    /// Waits until something has changed.
    fn wait(&mut self) -> Result<(), LoadError> {
        let phase = self.phase();
        self.meter.count(Phase::Nothing);
        let heard = select! {
            recv(self.wires.results) -> result => {
                Heard::Result(result.expect("readers outlive the control loop"))
            }
            recv(self.notices) -> notice => {
                Heard::Notice(notice.expect("attendants outlive the control loop"))
            }
            recv(self.wires.bell) -> ring => {
                ring.expect("this loop holds the signals");
                Heard::Bell
            }
        };
        self.meter.count(phase);
        match heard {
            Heard::Result(result) => self.on_result(result),
            Heard::Notice(notice) => self.on_notice(notice),
            Heard::Bell => Ok(()),
        }
    }

    /// What is waited for now.
    fn phase(&self) -> Phase {
        let front = self.open.front();
        let has_arena_coming = self.open.iter().any(OpenLayer::awaits_arena);
        let is_idle = self.jobs_running == 0 && self.waits_running == 0 && !has_arena_coming;
        if is_idle {
            return Phase::EngineMoves;
        }
        if self.wanted <= self.handed_out {
            return Phase::Nothing;
        }
        // Without a read under way, it is slots that are missing, and those are on the link.
        match front {
            Some(layer) if layer.reads_left > 0 && self.jobs_running > 0 => Phase::Reading,
            _ => Phase::Linking,
        }
    }

    /// Looks at what the caller has done.
    fn hear_signals(&mut self) -> Result<(), LoadError> {
        let signals = &self.wires.signals;
        self.wanted = signals.wanted();
        // When all is handed out, what is left is to wait for the copies, as after any error.
        if signals.is_cancelled() && self.handed_out < self.turns.total() {
            return Err(LoadError::Cancelled);
        }
        self.office.take_ended(&mut self.ended);
        self.meter.on_released(&mut self.ended);
        Ok(())
    }

    /// Tells of layers that were handed out, released or not.
    fn tell_of_the_rest(&mut self) {
        self.office.take_ended(&mut self.ended);
        self.meter.on_released(&mut self.ended);
        self.meter.on_end();
    }

    fn on_notice(&mut self, notice: Notice<B>) -> Result<(), LoadError> {
        match notice {
            Notice::Allocated { turn, arena } => self.on_arena(turn, arena?)?,
            Notice::Copied { read, outcome } => {
                self.waits_running -= 1;
                outcome?;
                self.count_tensor_bytes(read);
            }
            Notice::Ready(layer) => {
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
        self.open[turn - self.sealed].course.work.add(work);
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

    /// Hashes the slots whose turn it is, shows them to the witness, and frees them.
    fn hash_in_order(&mut self) -> Result<(), LoadError> {
        while let Some((turn, number, slot)) = self.unhashed.remove(&self.reads_hashed) {
            let plan = &self.setup.plan;
            let read = plan.read(number);
            let planned = self.turns.layer(turn);
            let placements = plan.placements(planned);
            if self.setup.hash {
                let first = planned.placements.start;
                self.hasher.update(&self.setup.checkpoint, (first, placements), &read, &slot);
            }
            if let Some(witness) = &mut self.setup.witness {
                witness(&read, &slot)?;
            }
            drop(slot);
            self.count_tensor_bytes(number);
            let open = &mut self.open[turn - self.sealed];
            open.reads_left -= 1;
            if open.reads_left == 0 && self.setup.hash {
                open.hashes = self.hasher.finish_layer(placements);
            }
            self.reads_hashed += 1;
        }
        Ok(())
    }

    /// Ends the threads, waits for what is in flight and gives everything back.
    fn wind_down(self) {
        let Self { setup, wires, notices, open, parked, unhashed, kept, shelf, .. } = self;
        let Wires { jobs, jobs_not_begun, results, attendants, keeper, .. } = wires;
        drop(jobs);
        // What no reader has begun is not read any more: a caller that cancels waits only for the
        // reads in flight.
        while let Some(job) = jobs_not_begun.wait() {
            drop(job);
        }
        // Readers that wait for their turn see that there is nothing left to do; before, they would
        // have taken what was left.
        drop(keeper);
        // Readers finish the job they have and then see the closed channel; until they have gone,
        // slots are theirs.
        for result in results {
            drop(result);
        }
        drop(notices);
        drop(attendants);
        drop((unhashed, parked, open, kept));
        shelf.as_deref().inspect(|shelf| shelf.close());
        setup.backend.trim();
        drop(setup.reservations);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::HostBackend;
    use crate::plan::LAYER_STATE_BYTES;

    #[test]
    fn a_layer_costs_what_the_plan_counts() {
        check::<HostBackend>();
        #[cfg(feature = "cuda")]
        check::<crate::device::cuda::CudaBackend>();
    }

    fn check<B: Backend>() {
        /// What an allocator adds to a block, and the two counts of an `Arc`.
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
