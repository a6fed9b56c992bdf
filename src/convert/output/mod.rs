//! Files as a device: bytes that a load copies into an arena become the data of a file.
//!
//! ```text
//! allocate: make the unfinished file, reserve its space
//! copy:     slots --> packer (one thread: order, hashes, buffers) --> writers (direct writes)
//! seal:     all written, cut to length --> FinishedFile, which the conversion publishes
//! ```
//!
//! Control loop, readers, ring and plan are those of a load to any other device. Packer and writers
//! are plain threads, since they wait for the disk.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};

use self::kernel_copy::{CopiedRanges, KernelCopier, stretches};
use self::packer::{Failure, Message, Packer};
use self::writer::{ModeCell, OutputFile, Writers};
use super::hash::Hashes;
use super::header::Header;
use super::target_directory::{PartialFile, TargetDirectory};
use super::{ConvertError, KernelCopied, KernelCopy, WriteMode};
use crate::budget::MemoryBudget;
use crate::checkpoint::Checkpoint;
use crate::device::{ArenaPlace, Backend, DeviceError, PendingCopy, Resident};
use crate::load::LoadError;
use crate::plan::{Copies, LoadPlan, MoveOp, Placement, PlannedLayer, RingShape};
use crate::staging::{Empty, Filled, Ring, Slot};

mod kernel_copy;
mod packer;
mod writer;

/// The files of one run.
#[derive(Debug)]
pub(super) struct FileSet {
    pub(super) plan: Arc<LoadPlan>,
    pub(super) directory: TargetDirectory,
    pub(super) checkpoint: Checkpoint,
    /// Of each component: the prefix that is removed from names, and the text of `__metadata__`.
    pub(super) components: Vec<(Box<str>, BTreeMap<String, String>)>,
    /// The component of each file.
    pub(super) component_of: Vec<usize>,
}

impl FileSet {
    /// The tensors of a file, in its order.
    pub(super) fn placements(&self, index: usize) -> &[Placement] {
        self.plan.placements(&self.plan.layers()[index])
    }

    /// The header of a file.
    fn header(&self, index: usize) -> Header<'_> {
        let (name_prefix, metadata) = &self.components[self.component_of[index]];
        let (checkpoint, plan) = (&self.checkpoint, &self.plan);
        Header { checkpoint, name_prefix, metadata, placements: self.placements(index), plan }
    }

    /// The position of a file in the plan.
    fn index_of(&self, planned: &PlannedLayer) -> usize {
        self.plan.layers().partition_point(|layer| layer.placements.start < planned.placements.start)
    }
}

/// A file that is whole, without its final name.
#[derive(Debug)]
pub(super) struct FinishedFile {
    /// Its position in the plan.
    pub(super) index: usize,
    pub(super) partial: PartialFile,
    pub(super) hashes: Hashes,
    /// Of each tensor, in its order.
    pub(super) tensors: Vec<Hashes>,
}

/// The number and size of the writers' buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WriteBuffers {
    pub(super) writers: u32,
    pub(super) buffer_bytes: u64,
}

impl WriteBuffers {
    /// Shorter writes cost more than they save.
    const BUFFER_BYTES_MIN: u64 = 256 << 10;

    /// Buffers for a host budget: one for each writer and one that is being filled, together at
    /// most a quarter of the budget.
    pub(super) fn for_budget(budget_bytes: u64, writers: u32) -> Self {
        const BUFFER_BYTES_MAX: u64 = 4 << 20;
        let most = budget_bytes / 4 / u64::from(writers + 1);
        let power = 1 << most.max(1).ilog2();
        Self { writers, buffer_bytes: u64::clamp(power, Self::BUFFER_BYTES_MIN, BUFFER_BYTES_MAX) }
    }

    /// Buffers of half the size, if they are not too short.
    pub(super) fn halved(self) -> Option<Self> {
        let buffer_bytes = self.buffer_bytes / 2;
        (buffer_bytes >= Self::BUFFER_BYTES_MIN).then_some(Self { buffer_bytes, ..self })
    }

    fn shape(self) -> RingShape {
        RingShape { slots: self.writers + 1, slot_bytes: self.buffer_bytes, readers: self.writers }
    }

    /// Bytes of all buffers.
    pub(super) fn bytes(self) -> u64 {
        self.shape().bytes()
    }
}

/// The end of the output at which the conversion takes finished files.
#[derive(Debug)]
pub(super) struct OutputEnd {
    /// Files in the order of the plan. Each is there once the load has its layer ready.
    pub(super) finished: Receiver<FinishedFile>,
    failure: Arc<Failure>,
    mode: Arc<ModeCell>,
    copier: Arc<KernelCopier>,
}

impl OutputEnd {
    /// The error of the output if that failed first, else the error of the load.
    pub(super) fn explain(&self, error: LoadError) -> ConvertError {
        match error {
            LoadError::Device(DeviceError::Output) => {
                self.failure.take().unwrap_or(ConvertError::Load(error))
            }
            error => ConvertError::Load(error),
        }
    }

    pub(super) fn kernel_copied(&self) -> KernelCopied {
        self.copier.copied()
    }

    pub(super) fn write_mode(&self) -> WriteMode {
        self.mode.mode()
    }
}

/// Writes layers to files.
#[derive(Debug)]
pub(super) struct FileBackend {
    files: Arc<FileSet>,
    /// `None` while being dropped.
    messages: Option<Sender<Message>>,
    packer: Option<JoinHandle<()>>,
    failure: Arc<Failure>,
    mode: Arc<ModeCell>,
    copier: Arc<KernelCopier>,
}

impl FileBackend {
    /// Starts the threads.
    pub(super) fn start(
        files: FileSet,
        buffers: WriteBuffers,
        kernel_copy: KernelCopy,
        with_sha256: bool,
    ) -> Result<(Self, OutputEnd), LoadError> {
        let files = Arc::new(files);
        let (failure, mode) = (Arc::<Failure>::default(), Arc::<ModeCell>::default());
        let reservation = MemoryBudget::new(buffers.bytes()).reserve("write buffers", buffers.bytes())?;
        let ring = Ring::new(buffers.shape(), reservation, None)?;
        let idle = std::iter::from_fn(|| ring.try_take()).collect();
        let thread_error = |source| LoadError::Thread { source };
        let writers = Writers::start(buffers.writers).map_err(thread_error)?;
        let (messages, message_receiver) = unbounded();
        let (finished_sender, finished) = unbounded();
        let packer = Packer {
            files: Arc::clone(&files),
            writers,
            idle,
            finished: finished_sender,
            failure: Arc::clone(&failure),
            with_sha256,
        };
        let thread = thread::Builder::new().name("onelayer-pack".to_owned());
        let packer = thread.spawn(move || packer.run(&message_receiver)).map_err(thread_error)?;
        let copier = Arc::new(KernelCopier::new(kernel_copy));
        let end = OutputEnd {
            finished,
            failure: Arc::clone(&failure),
            mode: Arc::clone(&mode),
            copier: Arc::clone(&copier),
        };
        Ok((Self { files, messages: Some(messages), packer: Some(packer), failure, mode, copier }, end))
    }

    fn send(&self, message: Message) -> Result<(), DeviceError> {
        let messages = self.messages.as_ref().expect("only dropping takes it");
        messages.send(message).map_err(|_| DeviceError::Output)
    }

    /// Makes an unfinished file, lets the kernel copy what it can, and reserves space for the rest.
    fn make(&self, index: usize, planned: &PlannedLayer) -> Result<(OutputFile, CopiedRanges), ConvertError> {
        let partial = self.files.directory.create_file(planned.id.as_str())?;
        let (checkpoint, placements) = (&self.files.checkpoint, self.files.placements(index));
        let data_start = self.files.header(index).data_start();
        let ranges =
            self.copier.copy(checkpoint, &stretches(checkpoint, placements, data_start), partial.file());
        let file = OutputFile::new(partial, data_start + planned.arena_bytes, &self.mode)?;
        Ok((file, CopiedRanges::new(ranges)))
    }
}

impl Drop for FileBackend {
    fn drop(&mut self) {
        drop(self.messages.take());
        if let Some(packer) = self.packer.take() {
            // A panic was printed already.
            let _ = packer.join();
        }
    }
}

/// A file that is being filled; the packer has it.
#[derive(Debug)]
pub(super) struct FileArena {
    len_bytes: u64,
}

/// A file whose bytes have all been sent to the packer.
#[derive(Debug)]
pub(super) struct FileResident {
    len_bytes: u64,
    written: Receiver<()>,
}

impl Resident for FileResident {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn host_bytes(&self) -> Option<&[u8]> {
        None
    }

    fn is_somewhere(&self) -> bool {
        false
    }

    fn read(&self, _offset_bytes: u64, _target: &mut [u8]) -> Result<bool, DeviceError> {
        Ok(false)
    }

    fn wait_ready(&self) -> Result<(), DeviceError> {
        self.written.recv().map_err(|_| DeviceError::Output)
    }
}

/// Bytes on their way into a file.
#[derive(Debug)]
pub(super) struct PendingPack(Receiver<Slot<Empty>>);

impl PendingCopy for PendingPack {
    fn wait(self) -> Result<Slot<Empty>, DeviceError> {
        self.0.recv().map_err(|_| DeviceError::Output)
    }
}

impl Backend for FileBackend {
    type Arena = FileArena;
    type Resident = FileResident;
    type Pending = PendingPack;

    const IS_ASYNCHRONOUS: bool = true;

    fn allocate(&self, planned: &PlannedLayer, _place: ArenaPlace) -> Result<Arc<FileArena>, DeviceError> {
        let index = self.files.index_of(planned);
        let (file, copied) = self.make(index, planned).map_err(|error| {
            self.failure.set(error);
            DeviceError::Output
        })?;
        let len_bytes = file.len_bytes;
        self.send(Message::Begin { index, file: Arc::new(file), copied })?;
        Ok(Arc::new(FileArena { len_bytes }))
    }

    fn copy_async(
        &self,
        _arena: &Arc<FileArena>,
        slot: Slot<Filled>,
        copies: Copies<'_>,
    ) -> Result<PendingPack, DeviceError> {
        let (done, receiver) = bounded(1);
        self.send(Message::Copy { slot, copies: copies.collect(), done })?;
        Ok(PendingPack(receiver))
    }

    fn seal(&self, arena: Arc<FileArena>, _moves: &[MoveOp]) -> Result<Arc<FileResident>, DeviceError> {
        let (done, written) = bounded(1);
        self.send(Message::End { done })?;
        Ok(Arc::new(FileResident { len_bytes: arena.len_bytes, written }))
    }

    fn give_up(&self) {
        // A packer that has ended has nothing to give up.
        let _ = self.send(Message::GiveUp);
    }

    fn trim(&self) {}
}
