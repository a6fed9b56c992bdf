//! The control loop: who gets a slot, when a layer gets its arena, when it is complete.
//!
//! It owns every decision of a running load and does no blocking work itself. A layer goes through
//!
//! ```text
//! waiting --(within prefetch)--> open --(a place in the window)--> has arena --(last copy done)--> delivered
//! ```
//!
//! Reads are issued strictly in plan order and each takes a slot first, so the oldest read always has one;
//! every slot that waits for an arena belongs to the oldest layers without one. Therefore the load moves on
//! whenever the caller drops a layer, however small the ring is.

use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender, select};

use super::hash::{LayerHasher, TensorHash};
use super::layer::LayerData;
use super::reader::{self, Done, Job, JobResult};
use super::stream::{Delivery, Signal};
use super::window::{Permit, PermitOffice};
use super::{LoadError, LoadedLayer, Progress};
use crate::budget::Reservation;
use crate::checkpoint::Checkpoint;
use crate::device::{Backend, PendingCopy};
use crate::plan::LoadPlan;
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
    /// Hash every tensor on the way.
    pub(super) hash: bool,
    /// When the load began.
    pub(super) started: Instant,
    /// What the load holds of the budget beside the ring.
    pub(super) reservations: Vec<Reservation>,
}

/// The channels of the control loop.
pub(super) struct Wires<B: Backend> {
    pub(super) jobs: Sender<Job<B>>,
    /// The readers' end of `jobs`: to take back what none of them has begun.
    pub(super) jobs_not_begun: Receiver<Job<B>>,
    pub(super) results: Receiver<JobResult<B>>,
    pub(super) signals: Receiver<Signal>,
    pub(super) deliveries: Sender<Delivery>,
}

/// The control loop of one load.
pub(super) struct Control<B: Backend> {
    setup: Setup<B>,
    wires: Wires<B>,
    office: Arc<PermitOffice>,
    progress: Progress,
    /// Layers that are open and not delivered, in order; the first has index `delivered`.
    open: VecDeque<OpenLayer<B>>,
    /// Layers handed to the stream.
    delivered: usize,
    /// Layers read ahead of the last one the caller asked for.
    prefetch: usize,
    /// Layers the caller asked for so far.
    wanted: usize,
    /// The next read to issue.
    next_read: u32,
    /// Reads that the readers have or will take next.
    jobs_running: usize,
    /// Two for each reader, so that none waits for this loop. Not more: then a load that is not held up by its caller
    /// goes round few slots, and those stay in the cache.
    jobs_most: usize,
    /// Copies in flight, oldest first.
    pending: VecDeque<(usize, u32, B::Pending)>,
    /// Filled slots that wait for an earlier read to be hashed.
    unhashed: BTreeMap<u32, (usize, Slot<Filled>)>,
    /// The next read to hash.
    next_hash: u32,
    /// Hashes the reads, and so the layers, one after the other.
    hasher: LayerHasher,
}

/// A layer on its way.
struct OpenLayer<B: Backend> {
    arena: Option<(Arc<B::Arena>, Permit)>,
    reads_left: u32,
    /// Filled slots that wait for the arena.
    parked: Vec<(u32, Slot<Filled>)>,
    /// Complete with the last read, if the load hashes.
    hashes: Vec<TensorHash>,
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
        let jobs_most = 2 * to_usize(u64::from(ring.readers));
        // A layer that is read ahead of the window holds a slot at least, so that more cannot be ahead. The memory
        // of open layers, a term of the plan, counts on this.
        let window = plan.window().over(plan.layers().len());
        let prefetch = setup.prefetch.min(window.saturating_add(to_usize(u64::from(ring.slots))));
        Self {
            setup,
            wires,
            office,
            progress,
            open: VecDeque::new(),
            delivered: 0,
            prefetch,
            wanted: 0,
            next_read: 0,
            jobs_running: 0,
            jobs_most,
            pending: VecDeque::new(),
            unhashed: BTreeMap::new(),
            next_hash: 0,
            hasher: LayerHasher::default(),
        }
    }

    /// Runs until every layer is delivered or something fails, and returns once nothing is in flight any more.
    pub(super) fn run(mut self) {
        // A panic is an error of this load like any other: it must not leave readers behind, nor arenas with the device.
        let outcome = catch_unwind(AssertUnwindSafe(|| self.drive()))
            .unwrap_or_else(|panic| Err(LoadError::Panicked { message: reader::panic_message(&*panic) }));
        if let Err(error) = outcome {
            // A caller that has gone does not want to know.
            let _ = self.wires.deliveries.send(Delivery::Failed(error));
        }
        self.wind_down();
    }

    fn drive(&mut self) -> Result<(), LoadError> {
        while self.delivered < self.setup.plan.layers().len() {
            self.open_layers();
            self.allocate_arenas()?;
            self.issue_reads();
            // A copy that is complete frees a slot, and a delivery opens a layer: only when neither happened is there
            // nothing left to do but wait.
            if !(self.reap_copies()? || self.deliver()) {
                self.wait()?;
            }
        }
        Ok(())
    }

    /// Opens the layers that may be read: those up to `prefetch` beyond the last one the caller asked for.
    fn open_layers(&mut self) {
        let plan = &self.setup.plan;
        let end = self.wanted.saturating_add(self.prefetch).min(plan.layers().len());
        for index in self.delivered + self.open.len()..end {
            let layer = &plan.layers()[index];
            self.open.push_back(OpenLayer {
                arena: None,
                reads_left: layer.reads.end - layer.reads.start,
                parked: Vec::new(),
                hashes: Vec::new(),
            });
        }
    }

    /// Gives arenas to the oldest layers without one, as far as the window allows, and starts the copies that
    /// waited for them.
    fn allocate_arenas(&mut self) -> Result<(), LoadError> {
        for (index, layer) in (self.delivered..).zip(self.open.iter_mut()) {
            if layer.arena.is_some() {
                continue;
            }
            let plan = &self.setup.plan;
            let arena_bytes = plan.layers()[index].arena_bytes;
            let Some(permit) = self.office.try_issue(index, arena_bytes) else { return Ok(()) };
            let arena = self.setup.backend.allocate(arena_bytes)?;
            for (read, slot) in layer.parked.drain(..) {
                let copies = plan.copies(&plan.read(read));
                self.pending.push_back((index, read, self.setup.backend.copy_async(&arena, slot, copies)?));
            }
            layer.arena = Some((arena, permit));
        }
        Ok(())
    }

    /// Issues reads of open layers while there are free slots.
    fn issue_reads(&mut self) {
        let plan = &self.setup.plan;
        for (index, layer) in (self.delivered..).zip(&self.open) {
            let reads = &plan.layers()[index].reads;
            while reads.contains(&self.next_read) {
                if self.jobs_running == self.jobs_most {
                    return;
                }
                let Some(slot) = self.setup.ring.try_take() else { return };
                let arena = match self.setup.hash {
                    true => None, // hashing sees the bytes first, in order
                    false => layer.arena.as_ref().map(|(arena, _)| Arc::clone(arena)),
                };
                let job = Job { layer: index, read: self.next_read, slot, arena };
                self.wires.jobs.send(job).expect("a receiver of the jobs is kept here");
                self.jobs_running += 1;
                self.next_read += 1;
            }
        }
    }

    /// Takes note of copies that are complete. True if there were any.
    fn reap_copies(&mut self) -> Result<bool, LoadError> {
        let mut reaped = false;
        while let Some((_, _, copy)) = self.pending.front() {
            if !copy.is_complete()? {
                break;
            }
            self.finish_oldest_copy()?;
            reaped = true;
        }
        Ok(reaped)
    }

    /// Waits for the oldest copy.
    fn finish_oldest_copy(&mut self) -> Result<(), LoadError> {
        if let Some((layer, read, copy)) = self.pending.pop_front() {
            drop(copy.wait()?);
            self.finish_read(layer, read);
        }
        Ok(())
    }

    fn finish_read(&mut self, layer: usize, read: u32) {
        let plan = &self.setup.plan;
        let copies = plan.copies(&plan.read(read));
        self.progress.add_tensor_bytes(copies.map(|copy| copy.len_bytes).sum());
        self.open[layer - self.delivered].reads_left -= 1;
    }

    /// Hands out the oldest layer if it is complete.
    fn deliver(&mut self) -> bool {
        let complete = self.open.front().is_some_and(|layer| layer.reads_left == 0 && layer.arena.is_some());
        if !complete {
            return false;
        }
        let layer = self.open.pop_front().expect("a complete layer is open");
        let (arena, permit) = layer.arena.expect("a complete layer has an arena");
        let arena = Arc::into_inner(arena)
            .expect("only copies share an arena, and those of a complete layer are over");
        let plan = &self.setup.plan;
        let mut hashes = layer.hashes;
        if self.setup.hash && hashes.is_empty() {
            // A layer without bytes has no read to hash.
            hashes = LayerHasher::default().finish_layer(plan.placements(&plan.layers()[self.delivered]));
        }
        let data = LayerData {
            checkpoint: self.setup.checkpoint.clone(),
            plan: Arc::clone(plan),
            index: self.delivered,
            hashes,
            resident: Box::new(self.setup.backend.complete(arena)),
            _permit: permit,
        };
        self.delivered += 1;
        self.progress.add_layer();
        // If the stream is gone, so is the layer; the next signal ends the load.
        let _ = self.wires.deliveries.send(Delivery::Layer(LoadedLayer { data: Arc::new(data) }));
        true
    }

    /// Waits until something has changed.
    fn wait(&mut self) -> Result<(), LoadError> {
        if self.jobs_running == 0 && !self.pending.is_empty() {
            return self.finish_oldest_copy();
        }
        select! {
            recv(self.wires.results) -> result => {
                self.on_result(result.expect("readers outlive the control loop"))
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
            Signal::Cancel => return Err(LoadError::Cancelled),
        }
        Ok(())
    }

    fn on_result(&mut self, result: JobResult<B>) -> Result<(), LoadError> {
        self.jobs_running -= 1;
        match result.outcome? {
            Done::Copying(copy) => self.pending.push_back((result.layer, result.read, copy)),
            Done::Filled(slot) if self.setup.hash => {
                self.unhashed.insert(result.read, (result.layer, slot));
                self.hash_in_order();
            }
            Done::Filled(slot) => {
                let backend = &self.setup.backend;
                let layer = &mut self.open[result.layer - self.delivered];
                match &layer.arena {
                    Some((arena, _)) => {
                        let plan = &self.setup.plan;
                        let copies = plan.copies(&plan.read(result.read));
                        let copy = backend.copy_async(arena, slot, copies)?;
                        self.pending.push_back((result.layer, result.read, copy));
                    }
                    None => layer.parked.push((result.read, slot)),
                }
            }
        }
        Ok(())
    }

    /// Hashes the slots whose turn it is and frees them.
    fn hash_in_order(&mut self) {
        while let Some((layer, slot)) = self.unhashed.remove(&self.next_hash) {
            let plan = &self.setup.plan;
            let read = plan.read(self.next_hash);
            let placements = plan.placements(&plan.layers()[layer]);
            self.hasher.update(&self.setup.checkpoint, placements, &read, &slot);
            drop(slot);
            let open = &mut self.open[layer - self.delivered];
            if open.reads_left == 1 {
                open.hashes = self.hasher.finish_layer(placements);
            }
            self.finish_read(layer, self.next_hash);
            self.next_hash += 1;
        }
    }

    /// Ends the readers, waits for what is in flight and gives everything back.
    fn wind_down(self) {
        let Self { setup, wires, open, pending, unhashed, .. } = self;
        let Wires { jobs, jobs_not_begun, results, .. } = wires;
        drop(jobs);
        // What no reader has begun is not read any more: a caller that cancels waits only for the reads in flight.
        for job in jobs_not_begun {
            drop(job);
        }
        // Readers finish the job they have and then see the closed channel; until they have gone, slots are theirs.
        for result in results {
            drop(result);
        }
        drop((pending, unhashed, open));
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
        type Arena = <HostBackend as Backend>::Arena;
        /// What an allocator adds to a block, and the two counts of an `Arc`.
        const BLOCK_BYTES: usize = 16;
        const COUNTS_BYTES: usize = 16;
        let parts = [
            // While it is filled ...
            size_of::<OpenLayer<HostBackend>>(),
            size_of::<Arena>() + COUNTS_BYTES + BLOCK_BYTES,
            // ... and when it is handed out: its place in the window, in the channel, in a model.
            size_of::<LayerData>() + COUNTS_BYTES + BLOCK_BYTES,
            size_of::<<HostBackend as Backend>::Resident>() + BLOCK_BYTES,
            3 * size_of::<usize>(),
            size_of::<Option<LoadedLayer>>(),
        ];
        let bytes = to_u64(parts.iter().sum());
        assert!(bytes <= LAYER_STATE_BYTES && bytes > LAYER_STATE_BYTES / 2, "{bytes}: {parts:?}");
    }
}
