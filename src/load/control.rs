//! The control loop: who gets a slot, when a layer gets its arena, when it is complete.
//!
//! It owns every decision of a running load and does no blocking work itself. A layer goes through
//!
//! ```text
//! waiting --(within prefetch)--> open --(a place in the window)--> has arena --(last copy queued)--> sealed
//!         sealed --(every byte in its place, or at once if the caller wants it so)--> handed out
//! ```
//!
//! Reads are issued strictly in the plan's order and each claims a slot first, so the oldest read always has one. In the order
//! of layers, every slot that waits for an arena belongs to the oldest layers without one. Therefore the load moves on
//! whenever the caller drops a layer, however small the ring is.
//!
//! In the order of files all layers are open from the beginning, and any of them may be the next that is sealed. A layer is given
//! its place and asks for its arena no later than its first read is issued. The window has a place for every layer, and
//! the device budget bytes for all, or there is no such plan: so no arena waits for the caller, none for another, and none for a
//! slot. Hence every slot that waits for an arena gets it, whatever the caller does and in whatever order arenas come; it is
//! copied and free again; and the next read has it.

use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender, never, select};

use super::attend::{Attendants, Notice, Wait};
use super::depth::{Depth, Observation};
use super::gate::GateKeeper;
use super::hash::{LayerHasher, TensorHash};
use super::layer::LayerData;
use super::owners::Owners;
use super::reader::{self, Done, Job, JobResult};
use super::stream::{Delivery, Signal};
use super::window::{Permit, PermitOffice};
use super::{HandOut, LoadError, LoadedLayer, Progress, Witness};
use crate::budget::Reservation;
use crate::checkpoint::Checkpoint;
use crate::device::{Backend, PendingCopy};
use crate::plan::{IssuePlace, LoadPlan, ReadOrder, Turn};
use crate::source::Source;
use crate::staging::{Filled, Ring, Slot};
use crate::units::to_usize;

/// What a load is made of, before its threads run.
pub(super) struct Setup<B: Backend> {
    pub(super) checkpoint: Checkpoint,
    pub(super) plan: Arc<LoadPlan>,
    pub(super) ring: Arc<Ring>,
    pub(super) source: Arc<dyn Source>,
    pub(super) backend: Arc<B>,
    /// Layers read ahead of the one the caller has or waits for.
    pub(super) prefetch: usize,
    /// When the caller gets a layer.
    pub(super) hand_out: HandOut,
    /// Find out how many reads in flight are best, up to the readers there are.
    pub(super) adapts: bool,
    /// Threads with a queue of reads each, if reads go through queues.
    pub(super) queues: u32,
    /// Hash every tensor on the way.
    pub(super) hash: bool,
    /// Sees every byte on the way.
    pub(super) witness: Option<Witness>,
    /// When the load began.
    pub(super) started: Instant,
    /// What the load holds of the budget beside the ring.
    pub(super) reservations: Vec<Reservation>,
}

impl<B: Backend> Setup<B> {
    /// True if somebody has to see the bytes in the order of the plan, and the target keeps none.
    fn is_in_order(&self) -> bool {
        self.hash || self.witness.is_some()
    }
}

/// The channels of the control loop.
pub(super) struct Wires<B: Backend> {
    pub(super) jobs: Sender<Job<B>>,
    /// The readers' end of `jobs`: to take back what none of them has begun.
    pub(super) jobs_not_begun: Receiver<Job<B>>,
    pub(super) results: Receiver<JobResult<B>>,
    pub(super) signals: Receiver<Signal>,
    pub(super) deliveries: Sender<Delivery>,
    /// Who waits for the device, if it is one to wait for.
    pub(super) attendants: Option<Attendants<B>>,
    /// How many reads may be in flight.
    pub(super) depth: Depth,
    /// Who tells the readers.
    pub(super) keeper: GateKeeper,
}

/// The control loop of one load.
pub(super) struct Control<B: Backend> {
    setup: Setup<B>,
    wires: Wires<B>,
    notices: Receiver<Notice<B>>,
    office: Arc<PermitOffice>,
    progress: Progress,
    /// Layers that are open, in order, from the first one that is not sealed, which has index `sealed`.
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
    /// Where the next read to issue is.
    next_read: IssuePlace,
    /// Reads that are over.
    reads_done: u64,
    /// Reads that the readers have or will take next.
    jobs_running: usize,
    /// Copies and layers that the attendants wait for.
    waits_running: usize,
    /// Filled slots that wait for an earlier read to be hashed.
    unhashed: BTreeMap<u32, (usize, Slot<Filled>)>,
    /// The next read to hash.
    next_hash: u32,
    /// Hashes the reads, and so the layers, one after the other.
    hasher: LayerHasher,
}

/// A layer on its way.
struct OpenLayer<B: Backend> {
    permit: Option<Arc<Permit>>,
    arena: Option<Arc<B::Arena>>,
    /// Reads whose copies have not been queued.
    reads_left: u32,
    /// Filled slots that wait for the arena.
    parked: Vec<(u32, Slot<Filled>)>,
    /// Complete with the last read, if the load hashes.
    hashes: Vec<TensorHash>,
    is_sealed: bool,
}

impl<B: Backend> OpenLayer<B> {
    fn is_whole(&self) -> bool {
        self.reads_left == 0 && self.arena.is_some()
    }
}

impl<B: Backend> Control<B> {
    pub(super) fn new(
        setup: Setup<B>,
        wires: Wires<B>,
        office: Arc<PermitOffice>,
        progress: Progress,
    ) -> Self {
        let plan = &setup.plan;
        let ring = plan.memory().ring();
        // A layer that is read ahead of the window holds a slot at least, so that more cannot be ahead. The memory
        // of open layers, a term of the plan, counts on this.
        let window = plan.window().over(plan.layers().len());
        let prefetch = setup.prefetch.min(window.saturating_add(to_usize(u64::from(ring.slots))));
        let notices = wires.attendants.as_ref().map_or_else(never, Attendants::notices);
        Self {
            setup,
            wires,
            notices,
            office,
            progress,
            open: VecDeque::new(),
            sealed: 0,
            whole: VecDeque::new(),
            handed_out: 0,
            placed: 0,
            prefetch,
            wanted: 0,
            next_read: IssuePlace::default(),
            reads_done: 0,
            jobs_running: 0,
            waits_running: 0,
            unhashed: BTreeMap::new(),
            next_hash: 0,
            hasher: LayerHasher::default(),
        }
    }

    /// Runs until every layer is handed out and nothing is in flight any more, or until something fails.
    pub(super) fn run(mut self) {
        // A panic is an error of this load like any other: it must not leave readers behind, nor arenas with the device.
        let outcome = catch_unwind(AssertUnwindSafe(|| self.drive()))
            .unwrap_or_else(|panic| Err(LoadError::Panicked { message: reader::panic_message(&*panic) }));
        if let Err(error) = outcome {
            self.setup.backend.give_up();
            // A caller that has gone does not want to know.
            let _ = self.wires.deliveries.send(Delivery::Failed(error));
        }
        self.wind_down();
    }

    fn drive(&mut self) -> Result<(), LoadError> {
        while self.sealed < self.setup.plan.layers().len() || self.waits_running > 0 {
            self.open_layers();
            self.place_layers()?;
            self.issue_reads()?;
            self.adapt_depth();
            // Sealing a layer opens another: only when there was none is there nothing left to do but wait.
            if !self.seal_next()? {
                self.wait()?;
            }
        }
        Ok(())
    }

    /// Opens the layers that may be read: those up to `prefetch` beyond the last one the caller asked for.
    fn open_layers(&mut self) {
        let plan = &self.setup.plan;
        let end = match plan.order() {
            ReadOrder::Layers => self.wanted.saturating_add(self.prefetch).min(plan.layers().len()),
            ReadOrder::Files => plan.layers().len(),
        };
        for index in self.sealed + self.open.len()..end {
            let layer = &plan.layers()[index];
            self.open.push_back(OpenLayer {
                permit: None,
                arena: None,
                reads_left: layer.reads.end - layer.reads.start,
                parked: Vec::new(),
                hashes: Vec::new(),
                is_sealed: false,
            });
        }
    }

    /// Gives open layers without a place one each, as far as the window allows: the oldest, or those without reads, where the
    /// others are given theirs with their first read.
    fn place_layers(&mut self) -> Result<(), LoadError> {
        let plan = Arc::clone(&self.setup.plan);
        while self.placed < self.sealed + self.open.len() {
            let waits_for_read =
                plan.order() == ReadOrder::Files && !plan.layers()[self.placed].reads.is_empty();
            if !waits_for_read && !self.place(self.placed)? {
                return Ok(());
            }
            self.placed += 1;
        }
        Ok(())
    }

    /// Gives an open layer a place, if the window allows, and asks for its arena.
    fn place(&mut self, index: usize) -> Result<bool, LoadError> {
        let layer = &self.setup.plan.layers()[index];
        let Some(permit) = self.office.try_issue(index, layer.arena_bytes) else { return Ok(false) };
        self.open[index - self.sealed].permit = Some(Arc::new(permit));
        match &mut self.wires.attendants {
            Some(attendants) => attendants.allocate(index),
            None => {
                let arena = self.setup.backend.allocate(layer)?;
                self.on_arena(index, arena)?;
            }
        }
        Ok(true)
    }

    /// Starts the copies that waited for the arena.
    fn on_arena(&mut self, index: usize, arena: Arc<B::Arena>) -> Result<(), LoadError> {
        let layer = &mut self.open[index - self.sealed];
        layer.arena = Some(arena);
        for (read, slot) in std::mem::take(&mut layer.parked) {
            self.start_copy(index, read, slot)?;
        }
        self.note_whole(index);
        Ok(())
    }

    /// Remembers a layer that has become whole, where it need not wait for those before it.
    fn note_whole(&mut self, index: usize) {
        // The copies that wait for an arena start with it: then both, the last copy and the arena, find the layer whole.
        let is_first = !self.whole.contains(&index);
        if self.setup.plan.order() == ReadOrder::Files
            && is_first
            && self.open[index - self.sealed].is_whole()
        {
            self.whole.push_back(index);
        }
    }

    /// Starts the copy of a filled slot, or parks it until there is an arena.
    fn start_copy(&mut self, index: usize, read: u32, slot: Slot<Filled>) -> Result<(), LoadError> {
        let layer = &mut self.open[index - self.sealed];
        let Some(arena) = &layer.arena else {
            layer.parked.push((read, slot));
            return Ok(());
        };
        let plan = &self.setup.plan;
        let copy = self.setup.backend.copy_async(arena, slot, plan.copies(&plan.read(read)))?;
        self.on_copying(index, read, copy)
    }

    /// Takes note of a copy that is queued: it is somebody else's to wait for, or over already.
    fn on_copying(&mut self, index: usize, read: u32, copy: B::Pending) -> Result<(), LoadError> {
        let layer = &mut self.open[index - self.sealed];
        layer.reads_left -= 1;
        match &self.wires.attendants {
            Some(attendants) => {
                let permit = layer.permit.clone().expect("a layer with an arena has a place");
                self.waits_running += 1;
                attendants.wait(Wait::Copy { read, copy, permit });
            }
            None => {
                drop(copy.wait()?);
                self.count_tensor_bytes(read);
            }
        }
        self.note_whole(index);
        Ok(())
    }

    /// Takes note of a copy that is over.
    fn on_copied(&mut self, index: usize, read: u32) {
        self.open[index - self.sealed].reads_left -= 1;
        self.count_tensor_bytes(read);
        self.note_whole(index);
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
        while let Some(Turn { layer: index, read }) = self.setup.plan.turn(self.next_read) {
            if index >= self.sealed + self.open.len() || self.jobs_running >= jobs_most {
                return Ok(());
            }
            let Some(claim) = self.setup.ring.try_claim() else { return Ok(()) };
            if self.setup.plan.order() == ReadOrder::Files && self.open[index - self.sealed].permit.is_none()
            {
                let is_placed = self.place(index)?;
                assert!(is_placed, "a window of all layers has a place for each");
            }
            let arena = match self.setup.is_in_order() {
                true => None, // whoever hashes sees the bytes first, in order
                false => self.open[index - self.sealed].arena.clone(),
            };
            let job = Job { layer: index, read, claim, arena };
            self.wires.jobs.send(job).expect("a receiver of the jobs is kept here");
            self.jobs_running += 1;
            self.next_read = self.setup.plan.behind(self.next_read);
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

    /// Seals a layer if all its copies are queued, and hands it out or has it waited for. True if it did.
    fn seal_next(&mut self) -> Result<bool, LoadError> {
        let Some(index) = self.next_whole() else { return Ok(false) };
        let layer = &mut self.open[index - self.sealed];
        layer.is_sealed = true;
        let (arena, permit, hashes) =
            (layer.arena.take(), layer.permit.take(), std::mem::take(&mut layer.hashes));
        while self.open.front().is_some_and(|layer| layer.is_sealed) {
            self.open.pop_front();
            self.sealed += 1;
        }
        let plan = &self.setup.plan;
        let planned = &plan.layers()[index];
        let arena = arena.expect("a whole layer has an arena");
        let resident = self.setup.backend.seal(arena, plan.moves(planned))?;
        let mut hashes = hashes;
        if self.setup.hash && hashes.is_empty() {
            // A layer without bytes has no read to hash.
            hashes = LayerHasher::default().finish_layer(plan.placements(planned));
        }
        let data = LayerData {
            checkpoint: self.setup.checkpoint.clone(),
            plan: Arc::clone(plan),
            index,
            hashes,
            owners: Owners::default(),
            resident: Box::new(resident),
            _permit: Some(permit.expect("a layer with an arena has a place")),
        };
        let layer = LoadedLayer::new(data);
        match &self.wires.attendants {
            Some(attendants) if self.setup.hand_out == HandOut::WhenComplete => {
                self.waits_running += 1;
                attendants.wait(Wait::Ready(layer));
            }
            _ => self.hand_out(layer),
        }
        Ok(true)
    }

    fn hand_out(&mut self, layer: LoadedLayer) {
        self.handed_out += 1;
        self.progress.add_layer();
        // If the stream is gone, so is the layer; the next signal ends the load.
        let _ = self.wires.deliveries.send(Delivery::Layer(layer));
    }

    /// Waits until something has changed.
    fn wait(&mut self) -> Result<(), LoadError> {
        select! {
            recv(self.wires.results) -> result => {
                self.on_result(result.expect("readers outlive the control loop"))
            }
            recv(self.notices) -> notice => {
                self.on_notice(notice.expect("attendants outlive the control loop"))
            }
            recv(self.wires.signals) -> signal => {
                self.on_signal(signal.expect("the office of this loop holds a sender"))
            }
        }
    }

    fn on_signal(&mut self, signal: Signal) -> Result<(), LoadError> {
        match signal {
            Signal::Wanted => self.wanted += 1,
            Signal::Dropped => {}
            // What is left is to wait for the copies, as after any error.
            Signal::Cancel if self.handed_out == self.setup.plan.layers().len() => {}
            Signal::Cancel => return Err(LoadError::Cancelled),
        }
        Ok(())
    }

    fn on_notice(&mut self, notice: Notice<B>) -> Result<(), LoadError> {
        match notice {
            Notice::Allocated { layer, arena } => self.on_arena(layer, arena?)?,
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
        match result.outcome? {
            Done::Copying(copy) => self.on_copying(result.layer, result.read, copy),
            Done::Copied => {
                self.on_copied(result.layer, result.read);
                Ok(())
            }
            Done::Filled(slot) if self.setup.is_in_order() => {
                self.unhashed.insert(result.read, (result.layer, slot));
                self.hash_in_order()
            }
            Done::Filled(slot) => self.start_copy(result.layer, result.read, slot),
        }
    }

    /// Hashes the slots whose turn it is, shows them to the witness, and frees them.
    fn hash_in_order(&mut self) -> Result<(), LoadError> {
        while let Some((layer, slot)) = self.unhashed.remove(&self.next_hash) {
            let plan = &self.setup.plan;
            let read = plan.read(self.next_hash);
            let planned = &plan.layers()[layer];
            let placements = plan.placements(planned);
            if self.setup.hash {
                let first = planned.placements.start;
                self.hasher.update(&self.setup.checkpoint, (first, placements), &read, &slot);
            }
            if let Some(witness) = &mut self.setup.witness {
                witness(&read, &slot)?;
            }
            drop(slot);
            self.count_tensor_bytes(self.next_hash);
            let open = &mut self.open[layer - self.sealed];
            open.reads_left -= 1;
            if open.reads_left == 0 && self.setup.hash {
                open.hashes = self.hasher.finish_layer(placements);
            }
            self.next_hash += 1;
        }
        Ok(())
    }

    /// Ends the threads, waits for what is in flight and gives everything back.
    fn wind_down(self) {
        let Self { setup, wires, notices, open, unhashed, .. } = self;
        let Wires { jobs, jobs_not_begun, results, attendants, keeper, .. } = wires;
        drop(jobs);
        // What no reader has begun is not read any more: a caller that cancels waits only for the reads in flight.
        for job in jobs_not_begun {
            drop(job);
        }
        // Readers that wait for their turn see that there is nothing left to do; before, they would have taken what was left.
        drop(keeper);
        // Readers finish the job they have and then see the closed channel; until they have gone, slots are theirs.
        for result in results {
            drop(result);
        }
        drop(notices);
        drop(attendants);
        drop((unhashed, open));
        setup.backend.trim();
        drop(setup.reservations);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::HostBackend;
    use crate::plan::LAYER_STATE_BYTES;
    use crate::units::to_u64;

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
            size_of::<Permit>() + COUNTS_BYTES + BLOCK_BYTES,
            size_of::<B::Arena>() + COUNTS_BYTES + BLOCK_BYTES,
            // ... and when it is handed out: its place in the window, in the channel, in a model.
            size_of::<LayerData>() + COUNTS_BYTES + BLOCK_BYTES,
            size_of::<B::Resident>() + BLOCK_BYTES,
            3 * size_of::<usize>(),
            size_of::<Option<LoadedLayer>>(),
        ];
        let bytes = to_u64(parts.iter().sum());
        assert!(bytes <= LAYER_STATE_BYTES && bytes > LAYER_STATE_BYTES / 2, "{bytes}: {parts:?}");
    }
}
