//! The whole loader on a simulated device that copies as late as it may, with sources that fail or
//! panic at every read in turn. What holds here holds for asynchronous devices: a slot that were
//! recycled before its copy is complete would deliver another read's bytes.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::Duration;

use super::completion::CompletionThreads;
use super::setup::{LoadSetup, Resources};
use super::times::Hooks;
use super::{LayerStream, LoadError, loader};
use crate::checkpoint::Checkpoint;
use crate::device::{ArenaPlace, Backend, DeviceError, PendingCopy, Resident};
use crate::layers::Layers;
use crate::plan::{Copies, CopyOp, HandOut, LoadOptions, LoadPlan, MoveOp, PlanLimits, PlannedLayer, Window};
use crate::source::{self, Fallback, IoMode, IoWays, ReadRequest, Source, SourceError};
use crate::staging::{Empty, Filled, Ring, Slot};
use crate::units::{to_u64, to_usize};

mod any_order;
#[cfg(feature = "uring")]
mod corners;

/// What a device may do to the loader.
#[derive(Clone, Copy, Debug, Default)]
struct DeviceFaults {
    /// Fail the allocation, the copy or the wait of this number (from 0).
    allocate_at: Option<u64>,
    copy_at: Option<u64>,
    wait_at: Option<u64>,
    /// Panic instead of failing.
    panics: bool,
}

impl DeviceFaults {
    fn strike(self) -> DeviceError {
        assert!(!self.panics, "injected panic in the device");
        fault()
    }

    /// Each kind of fault at the call of this number.
    fn each_at(at: u64, panics: bool) -> [Self; 3] {
        let none = Self { panics, ..Self::default() };
        [
            Self { allocate_at: Some(at), ..none },
            Self { copy_at: Some(at), ..none },
            Self { wait_at: Some(at), ..none },
        ]
    }
}

/// A device whose copies happen only when somebody waits for them.
#[derive(Debug, Default)]
struct LateBackend {
    faults: DeviceFaults,
    allocations: AtomicU64,
    copies: AtomicU64,
    /// Arenas come late, each by another time that follows from this; at once if zero.
    arena_delay_seed: u64,
    ledger: Arc<Ledger>,
}

#[derive(Debug, Default)]
struct Ledger {
    waits: AtomicU64,
    live_arenas: AtomicU64,
    in_flight: AtomicU64,
    trimmed: AtomicBool,
}

#[derive(Debug)]
struct LateArena {
    bytes: Mutex<Vec<u8>>,
    /// Reads whose copies are queued and not over.
    in_flight: AtomicU64,
    ledger: Arc<Ledger>,
}

/// A sealed arena. Reading it waits for nothing: what is not ready reads wrong.
struct LateResident {
    arena: Arc<LateArena>,
    len_bytes: u64,
    /// The bytes once they are ready.
    bytes: OnceLock<Vec<u8>>,
}

impl Resident for LateResident {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn host_bytes(&self) -> Option<&[u8]> {
        self.bytes.get().map(Vec::as_slice)
    }

    fn read(&self, _offset_bytes: u64, _target: &mut [u8]) -> Result<bool, DeviceError> {
        unreachable!("the host can read it")
    }

    fn wait_ready(&self) -> Result<(), DeviceError> {
        assert_eq!(
            self.arena.in_flight.load(Ordering::SeqCst),
            0,
            "its copies were queued before, and waited for"
        );
        self.bytes.get_or_init(|| std::mem::take(&mut *self.arena.bytes.lock().unwrap()));
        Ok(())
    }
}

impl Drop for LateArena {
    fn drop(&mut self) {
        self.ledger.live_arenas.fetch_sub(1, Ordering::SeqCst);
    }
}

struct LateCopy {
    slot: Option<Slot<Filled>>,
    arena: Arc<LateArena>,
    copies: Vec<CopyOp>,
    faults: DeviceFaults,
    ledger: Arc<Ledger>,
}

impl PendingCopy for LateCopy {
    fn wait(mut self) -> Result<Slot<Empty>, DeviceError> {
        if self.faults.wait_at == Some(self.ledger.waits.fetch_add(1, Ordering::SeqCst)) {
            return Err(self.faults.strike());
        }
        let slot = self.slot.take().unwrap();
        let mut target = self.arena.bytes.lock().unwrap();
        for copy in &self.copies {
            let start = to_usize(copy.arena_offset_bytes);
            let source = slot.part(copy.slot_offset_bytes, copy.len_bytes);
            target[start..start + source.len()].copy_from_slice(source);
        }
        drop(target);
        Ok(slot.into_empty())
    }
}

impl Drop for LateCopy {
    fn drop(&mut self) {
        self.arena.in_flight.fetch_sub(1, Ordering::SeqCst);
        self.ledger.in_flight.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Backend for LateBackend {
    type Arena = LateArena;
    type Resident = LateResident;
    type Pending = LateCopy;

    const IS_ASYNCHRONOUS: bool = true;

    fn allocate(&self, layer: &PlannedLayer, _place: ArenaPlace) -> Result<Arc<LateArena>, DeviceError> {
        let number = self.allocations.fetch_add(1, Ordering::SeqCst);
        if self.faults.allocate_at == Some(number) {
            return Err(self.faults.strike());
        }
        let mixed = self.arena_delay_seed.wrapping_mul(number + 0x9E37_79B9_7F4A_7C15);
        std::thread::sleep(Duration::from_micros((mixed >> 40) % 4000));
        self.ledger.live_arenas.fetch_add(1, Ordering::SeqCst);
        Ok(Arc::new(LateArena {
            bytes: Mutex::new(vec![0xA5; to_usize(layer.arena_bytes)]),
            in_flight: AtomicU64::new(0),
            ledger: Arc::clone(&self.ledger),
        }))
    }

    fn copy_async(
        &self,
        arena: &Arc<LateArena>,
        slot: Slot<Filled>,
        copies: Copies<'_>,
    ) -> Result<LateCopy, DeviceError> {
        if self.faults.copy_at == Some(self.copies.fetch_add(1, Ordering::SeqCst)) {
            return Err(self.faults.strike());
        }
        self.ledger.in_flight.fetch_add(1, Ordering::SeqCst);
        arena.in_flight.fetch_add(1, Ordering::SeqCst);
        Ok(LateCopy {
            slot: Some(slot),
            arena: Arc::clone(arena),
            copies: copies.collect(),
            faults: self.faults,
            ledger: Arc::clone(&self.ledger),
        })
    }

    fn seal(&self, arena: Arc<LateArena>, moves: &[MoveOp]) -> Result<Arc<LateResident>, DeviceError> {
        assert!(moves.is_empty(), "the plan lands everything in its place");
        let len_bytes = to_u64(arena.bytes.lock().unwrap().len());
        Ok(Arc::new(LateResident { arena, len_bytes, bytes: OnceLock::new() }))
    }

    fn trim(&self) {
        assert_eq!(self.ledger.in_flight.load(Ordering::SeqCst), 0, "trimmed with copies in flight");
        assert!(!self.ledger.trimmed.swap(true, Ordering::SeqCst), "trimmed twice");
    }
}

fn fault() -> DeviceError {
    DeviceError::HostAllocation { bytes: 1, source: std::io::Error::other("injected") }
}

/// Reads through another source, and fails, panics or dawdles on the way.
struct FaultySource {
    inner: Box<dyn Source>,
    reads: Arc<AtomicU64>,
    faults: SourceFaults,
}

/// What a source may do to the loader.
#[derive(Clone, Default)]
struct SourceFaults {
    /// Panic in the read of this number (from 0).
    panic_at: Option<u64>,
    /// Every read waits here.
    gate: Option<Arc<Gate>>,
}

/// Holds up reads until it is opened.
#[derive(Default)]
struct Gate {
    is_open: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    fn open(&self) {
        *self.is_open.lock().unwrap() = true;
        self.opened.notify_all();
    }

    fn pass(&self) {
        drop(self.opened.wait_while(self.is_open.lock().unwrap(), |is_open| !*is_open).unwrap());
    }
}

impl source::Sealed for FaultySource {}

impl Source for FaultySource {
    fn mode(&self) -> IoMode {
        self.inner.mode()
    }

    fn read(&self, request: &ReadRequest, buffer: &mut [u8]) -> Result<u64, SourceError> {
        let number = self.reads.fetch_add(1, Ordering::SeqCst);
        assert_ne!(self.faults.panic_at, Some(number), "injected panic at read {number}");
        if let Some(gate) = &self.faults.gate {
            gate.pass();
        }
        // Reads finish out of order.
        std::thread::sleep(Duration::from_micros(200 * (number % 3)));
        self.inner.read(request, buffer)
    }

    fn fallbacks(&self) -> Vec<Fallback> {
        self.inner.fallbacks()
    }

    fn ways(&self) -> IoWays {
        self.inner.ways()
    }
}

/// A checkpoint of one file: eight layers of three tensors of odd sizes.
fn checkpoint(folder: &Path) -> Checkpoint {
    let mut header = String::from("{");
    let mut data = Vec::new();
    for layer in 0..8_u32 {
        for (name, len) in [("a.weight", 700_001), ("b.weight", 300_032), ("c.weight", 99)] {
            let start = data.len();
            data.extend((0..len).map(|i: u32| {
                u8::try_from(i.wrapping_mul(2_654_435_761) >> 24 & 0xFF).unwrap()
                    ^ u8::try_from(layer).unwrap()
            }));
            let comma = if start == 0 { "" } else { "," };
            header.push_str(&format!(
                "{comma}\"layers.{layer}.{name}\":{{\"dtype\":\"U8\",\"shape\":[{len}],\"data_offsets\":[{start},{}]}}",
                data.len()
            ));
        }
    }
    header.push('}');
    let mut file = to_u64(header.len()).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(&data);
    let path = folder.join("model.safetensors");
    std::fs::write(&path, file).unwrap();
    Checkpoint::open(path).unwrap()
}

struct Run {
    checkpoint: Checkpoint,
    ledger: Arc<Ledger>,
    /// Reads that were begun.
    reads: Arc<AtomicU64>,
    stream: LayerStream,
    _folder: tempfile::TempDir,
}

fn start(faults: DeviceFaults, source_faults: &SourceFaults, window: u32) -> Run {
    start_with(faults, source_faults, window, HandOut::WhenComplete)
}

fn start_with(faults: DeviceFaults, source_faults: &SourceFaults, window: u32, hand_out: HandOut) -> Run {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = checkpoint(folder.path());
    let mut limits = PlanLimits::new(6 << 20);
    limits.options.window = Window::Layers(window);
    limits.options.readers = Some(3);
    let backend = LateBackend { faults, ..LateBackend::default() };
    start_on(folder, checkpoint, &limits, backend, source_faults, hand_out)
}

fn start_on(
    folder: tempfile::TempDir,
    checkpoint: Checkpoint,
    limits: &PlanLimits,
    backend: LateBackend,
    source_faults: &SourceFaults,
    hand_out: HandOut,
) -> Run {
    let layers = Layers::group(&checkpoint).unwrap();
    let plan = Arc::new(LoadPlan::build(&checkpoint, &layers, limits, |_| true).unwrap());
    let budget = crate::budget::MemoryBudget::new(limits.options.host_budget_bytes);
    let ring =
        Ring::new(plan.memory().ring(), budget.reserve("ring", plan.memory().ring().bytes()).unwrap(), None)
            .unwrap();
    let inner = source::open(IoMode::Buffered, &checkpoint).unwrap();
    let reads = Arc::new(AtomicU64::new(0));
    let source = Arc::new(FaultySource { inner, reads: Arc::clone(&reads), faults: source_faults.clone() });
    let backend = Arc::new(backend);
    let ledger = Arc::clone(&backend.ledger);
    let setup = LoadSetup {
        checkpoint: checkpoint.clone(),
        plan,
        options: LoadOptions {
            prefetch_layers: 2,
            hand_out,
            stall_timeout: Duration::from_secs(20),
            ..LoadOptions::default()
        },
        adapts: false,
        queues: Some(1),
        observer: None,
        hooks: Hooks::default(),
        started: std::time::Instant::now(),
    };
    let mut completion = CompletionThreads::start(&backend, &setup.plan).unwrap();
    if let Some(completion) = &mut completion {
        completion.allocate_ahead(setup.plan.first_layer(), ArenaPlace::Own);
    }
    let resources = Resources { ring, source, backend, reservations: Vec::new() };
    Run {
        checkpoint,
        ledger,
        reads,
        stream: loader::start_threads(setup, resources, completion).unwrap(),
        _folder: folder,
    }
}

impl Run {
    /// Takes every layer, checks its bytes, and returns how the load ended.
    fn finish(mut self) -> Result<usize, LoadError> {
        let file = std::fs::read(&self.checkpoint.shards()[0].path).unwrap();
        let mut layers = 0;
        let mut outcome = Ok(0);
        for layer in &mut self.stream {
            match layer {
                Ok(layer) => {
                    for tensor in layer.tensors() {
                        let extent = tensor.entry().extent;
                        let expected = &file[to_usize(extent.start())..to_usize(extent.end())];
                        assert!(tensor.as_bytes().unwrap() == expected, "{} is wrong", tensor.name());
                    }
                    layers += 1;
                    outcome = Ok(layers);
                }
                Err(error) => outcome = Err(error),
            }
        }
        drop(self.stream);
        assert!(self.ledger.trimmed.load(Ordering::SeqCst), "the device was trimmed");
        assert_eq!(self.ledger.in_flight.load(Ordering::SeqCst), 0, "copies in flight");
        assert_eq!(self.ledger.live_arenas.load(Ordering::SeqCst), 0, "arenas leaked");
        outcome
    }
}

#[test]
fn late_copies_deliver_the_right_bytes() {
    for window in 1..4 {
        assert_eq!(start(DeviceFaults::default(), &SourceFaults::default(), window).finish().unwrap(), 8);
    }
}

/// Handed out at once, a layer is there before its bytes are; they come.
#[test]
fn layers_that_are_handed_out_at_once_become_ready() {
    let mut run = start_with(DeviceFaults::default(), &SourceFaults::default(), 2, HandOut::AtOnce);
    let file = std::fs::read(&run.checkpoint.shards()[0].path).unwrap();
    for layer in &mut run.stream {
        let layer = layer.unwrap();
        while run.ledger.in_flight.load(Ordering::SeqCst) > 0 {
            std::thread::yield_now();
        }
        layer.wait_ready().unwrap();
        for tensor in layer.tensors() {
            let extent = tensor.entry().extent;
            let expected = &file[to_usize(extent.start())..to_usize(extent.end())];
            assert!(tensor.as_bytes().unwrap() == expected, "{} is wrong", tensor.name());
        }
    }
    assert_eq!(run.finish().unwrap(), 0, "no error after the last layer");
}

/// The last layers are with the caller when the last copy fails: the stream says so after them.
#[test]
fn a_copy_that_fails_after_the_last_layer_was_handed_out_is_an_error() {
    let copies = {
        let run = start(DeviceFaults::default(), &SourceFaults::default(), 8);
        let reads = to_u64(run.stream.plan().reads().len());
        run.finish().unwrap();
        reads
    };
    let faults = DeviceFaults { wait_at: Some(copies - 1), ..DeviceFaults::default() };
    let run = start_with(faults, &SourceFaults::default(), 8, HandOut::AtOnce);
    let items: Vec<_> = run.stream.collect();
    assert!(items.len() > 1 && items.last().unwrap().is_err(), "{} items", items.len());
    drop(items);
    assert_eq!(run.ledger.live_arenas.load(Ordering::SeqCst), 0);
}

#[test]
fn a_device_that_fails_at_any_point_ends_the_load_and_leaks_nothing() {
    for faults in (0..8).flat_map(|at| DeviceFaults::each_at(at, false)) {
        let error = start(faults, &SourceFaults::default(), 2).finish().unwrap_err();
        assert!(matches!(error, LoadError::Device(_)), "{faults:?}: {error}");
    }
}

/// On the control thread as on a reader's: the threads end, and the device gets everything back.
#[test]
fn a_device_that_panics_at_any_point_ends_the_load_and_leaks_nothing() {
    for faults in (0..8).flat_map(|at| DeviceFaults::each_at(at, true)) {
        let error = start(faults, &SourceFaults::default(), 2).finish().unwrap_err();
        let LoadError::Panicked { message } = &error else { panic!("{faults:?}: {error}") };
        assert!(message.contains("injected panic in the device"), "{message}");
    }
}

#[test]
fn a_panic_in_a_reader_is_an_error() {
    for at in 0..8 {
        let faults = SourceFaults { panic_at: Some(at), ..SourceFaults::default() };
        let error = start(DeviceFaults::default(), &faults, 2).finish().unwrap_err();
        let LoadError::Panicked { message } = &error else { panic!("{error}") };
        assert!(message.contains("injected panic"), "{message}");
    }
}

#[test]
fn dropping_the_stream_at_any_layer_leaks_nothing() {
    for taken in 0..8 {
        let mut run = start(DeviceFaults::default(), &SourceFaults::default(), 2);
        for layer in run.stream.by_ref().take(taken) {
            layer.unwrap();
        }
        drop(run.stream);
        assert_eq!(run.ledger.live_arenas.load(Ordering::SeqCst), 0);
        assert_eq!(run.ledger.in_flight.load(Ordering::SeqCst), 0);
    }
}

/// A caller that gives up waits for the reads that have begun, and for none of those that were only
/// issued.
#[test]
fn dropping_the_stream_begins_no_read_any_more() {
    let gate = Arc::new(Gate::default());
    let faults = SourceFaults { gate: Some(Arc::clone(&gate)), ..SourceFaults::default() };
    let run = start(DeviceFaults::default(), &faults, 2);
    let readers = u64::from(run.stream.plan().memory().ring().readers);
    while run.reads.load(Ordering::SeqCst) < readers {
        std::thread::yield_now();
    }
    let dropper = std::thread::spawn(move || drop(run.stream));
    // Time for the control loop to hear of it: were it not enough, more reads would begin and the
    // test would fail.
    std::thread::sleep(Duration::from_millis(300));
    gate.open();
    dropper.join().unwrap();
    assert_eq!(run.reads.load(Ordering::SeqCst), readers);
}
