//! Hashes the bytes in the files of a checkpoint: reads them once, in file order, within a budget.
//!
//! The reads are those of a load that keeps nothing: the same plan, sources and ring, past the page
//! cache where the file system allows it.
//!
//! ```text
//! files -> plan (a group for each) -> reads, in order -> hash of the file    -> PassEvent::File
//!                                                    \-> hash of each tensor -> PassEvent::Tensor
//! ```
//!
//! Verification hashes files. The comparison with a source and the search for duplicates hash a
//! choice of tensors.

use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};

use super::ConvertError;
use super::cancel::ConvertCancel;
use super::hash::{Digest, FileDigest, Hashes};
use crate::checkpoint::{Checkpoint, Shard, ShardId, TensorId};
use crate::device::{NoneBackend, Target};
use crate::layers::LayerId;
use crate::load::{Hooks, LayerStream, LoadError, LoadSetup, ReadObserver, decide_io};
use crate::plan::{
    Group, IoMode, Landing, LoadOptions, LoadPlan, MemoryTerm, Placement, PlanLimits, Quantised, ReadRequest,
    ResidentKind, Transform, is_mostly_direct,
};
use crate::source::{self, Fallback, Source};
use crate::units::{ByteRange, to_u64, to_usize};

/// Time between two reports of progress.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);
/// Most results that wait in a channel.
const RESULTS_MAX: usize = 256;
/// Bytes of a header that are read at once.
const HEADER_PIECE_BYTES: usize = 64 << 10;

/// A result of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PassEvent {
    /// A file was read to its end.
    File(ShardId, Hashes),
    /// A tensor was read. If it is quantised: its values.
    Tensor(TensorId, Hashes),
    /// The scales of a tensor that is quantised.
    Scales(TensorId, Hashes),
    /// Bytes of tensors that were hashed so far.
    Progress(u64),
}

/// How a tensor is changed before it is hashed.
pub(super) type Transforms<'a> = dyn Fn(TensorId) -> Transform + 'a;

/// One pass over files.
pub(super) struct HashPass<'a> {
    pub(super) checkpoint: &'a Checkpoint,
    /// How files are read: budget, I/O mode and readers.
    pub(super) options: LoadOptions,
    /// Memory that counts against the same budget.
    pub(super) beside: Vec<MemoryTerm>,
    /// Ends the pass early.
    pub(super) cancel: ConvertCancel,
}

impl HashPass<'_> {
    /// Hashes every file, and every tensor in it. A file comes after its tensors.
    ///
    /// # Errors
    /// [`ConvertError::Plan`], mostly for a budget that is too small. [`ConvertError::Load`] for
    /// files that cannot be read.
    pub(super) fn files(
        self,
        with_sha256: bool,
        on_event: &mut dyn FnMut(PassEvent),
    ) -> Result<Vec<Fallback>, ConvertError> {
        let (checkpoint, ids) = (self.checkpoint, all_ids(self.checkpoint));
        // Opening the checkpoint read the headers: they are in the page cache.
        let headers = source::open(IoMode::Buffered, checkpoint).map_err(LoadError::Source)?;
        hash_files_without_data(checkpoint, &ids, &*headers, with_sha256, on_event)?;
        let groups = groups(checkpoint, &ids, |shard| !shard.data.is_empty());
        if groups.is_empty() {
            return Ok(Vec::new());
        }
        let plan = Arc::new(self.plan(&groups, &|_| Transform::Keep, &ids, false)?);
        let (results, events) = bounded(RESULTS_MAX);
        let mut hasher = FilesHasher {
            checkpoint: checkpoint.clone(),
            headers,
            plan: Arc::clone(&plan),
            with_sha256,
            results,
            next_group: 0,
            open: None,
        };
        let observer: ReadObserver = Box::new(move |read, slot| {
            let request = read.request;
            let start = request.payload.start() - request.extent.start();
            hasher.update(request, slot.part(start, request.payload.len_bytes()))
        });
        drop((groups, ids));
        let stream = self.start(plan, false, Some(observer))?;
        pass_on(stream, None, events, on_event)
    }

    /// Fails as [`Self::tensors`] would before it reads anything.
    ///
    /// # Errors
    /// Those of [`Self::files`].
    pub(super) fn check_tensors(
        &self,
        tensors: &[TensorId],
        transforms: &Transforms<'_>,
    ) -> Result<(), ConvertError> {
        self.plan(&groups(self.checkpoint, tensors, |_| true), transforms, tensors, true).map(drop)
    }

    /// Hashes tensors as `transforms` changes them, without SHA-256. `tensors` is ascending.
    ///
    /// # Errors
    /// Those of [`Self::files`].
    pub(super) fn tensors(
        self,
        tensors: &[TensorId],
        transforms: &Transforms<'_>,
        on_event: &mut dyn FnMut(PassEvent),
    ) -> Result<Vec<Fallback>, ConvertError> {
        let groups = groups(self.checkpoint, tensors, |_| true);
        if groups.is_empty() {
            return Ok(Vec::new());
        }
        let plan = Arc::new(self.plan(&groups, transforms, tensors, true)?);
        let (results, events) = bounded(RESULTS_MAX);
        let stream = self.start(plan, true, None)?;
        pass_on(stream, Some(results), events, on_event)
    }

    fn plan(
        &self,
        groups: &[(LayerId, Range<usize>)],
        transforms: &Transforms<'_>,
        ids: &[TensorId],
        keeps_hashes: bool,
    ) -> Result<LoadPlan, ConvertError> {
        let mut limits = PlanLimits::of(self.options.clone());
        decide_io(&mut limits, self.checkpoint, Target::None).map_err(LoadError::Source)?;
        limits.resident = ResidentKind::Nowhere;
        limits.landing = Landing::Packed;
        limits.options.hash = keeps_hashes;
        limits.other_terms.clone_from(&self.beside);
        let grouping_bytes = to_u64(size_of_val(ids) + size_of_val(groups));
        let groups = groups.iter().map(|(id, range)| Group { id, tensors: &ids[range.clone()] });
        Ok(LoadPlan::build_groups(self.checkpoint, groups, &limits, transforms, grouping_bytes)?)
    }

    fn start(
        &self,
        plan: Arc<LoadPlan>,
        hash: bool,
        observer: Option<ReadObserver>,
    ) -> Result<LayerStream, LoadError> {
        let adapts = self.options.readers.is_none() && is_mostly_direct(plan.io(), plan.decisions());
        let queues = (plan.io() == IoMode::Uring).then_some(1);
        let setup = LoadSetup {
            checkpoint: self.checkpoint.clone(),
            plan,
            options: LoadOptions { hash, ..self.options.clone() },
            adapts,
            queues,
            observer,
            hooks: Hooks::default(),
            started: Instant::now(),
        };
        let stream = setup.start_on(NoneBackend, None)?;
        self.cancel.set_load(Some(stream.cancel_handle()));
        Ok(stream)
    }
}

/// Hashes files that have no data: no read covers them.
fn hash_files_without_data(
    checkpoint: &Checkpoint,
    ids: &[TensorId],
    headers: &dyn Source,
    with_sha256: bool,
    on_event: &mut dyn FnMut(PassEvent),
) -> Result<(), LoadError> {
    for (index, shard) in (0..).zip(checkpoint.shards()).filter(|(_, shard)| shard.data.is_empty()) {
        let mut digest = Digest::new(with_sha256);
        let empty = digest.take();
        let tensors = ids.iter().filter(|id| checkpoint.tensor(**id).shard == ShardId(index));
        tensors.for_each(|id| on_event(PassEvent::Tensor(*id, empty)));
        read_header(headers, ShardId(index), shard.data.start(), |piece| digest.update(piece))?;
        on_event(PassEvent::File(ShardId(index), digest.take()));
    }
    Ok(())
}

fn all_ids(checkpoint: &Checkpoint) -> Vec<TensorId> {
    let mut ids = Vec::with_capacity(checkpoint.tensor_count());
    ids.extend(checkpoint.tensors().map(|tensor| tensor.id));
    ids
}

/// A group for each file that has tensors of the list: its name, and their positions in the list.
fn groups(
    checkpoint: &Checkpoint,
    ids: &[TensorId],
    is_wanted: impl Fn(&Shard) -> bool,
) -> Vec<(LayerId, Range<usize>)> {
    let mut groups = Vec::new();
    let mut start = 0;
    for tensors in
        ids.chunk_by(|&left, &right| checkpoint.tensor(left).shard == checkpoint.tensor(right).shard)
    {
        let shard = checkpoint.shard(checkpoint.tensor(tensors[0]).shard);
        let end = start + tensors.len();
        if is_wanted(shard) {
            groups.push((LayerId::new(&shard.path.to_string_lossy()), start..end));
        }
        start = end;
    }
    groups
}

/// Passes results and progress on to `on_event` until the stream ends. If the stream itself hashes
/// tensors, `results` gets their hashes.
///
/// A plain thread reads the stream, since it waits for the disk. `on_event` is called on this
/// thread.
fn pass_on(
    mut stream: LayerStream,
    results: Option<Sender<PassEvent>>,
    events: Receiver<PassEvent>,
    on_event: &mut dyn FnMut(PassEvent),
) -> Result<Vec<Fallback>, ConvertError> {
    let progress = stream.progress();
    let mut reported_bytes = None;
    // The channel belongs to this scope: if `on_event` panics, no sender waits any more.
    thread::scope(move |scope| {
        let reader = scope.spawn(move || read_all(&mut stream, results).map(|()| stream.report().fallbacks));
        let mut due = Instant::now() + PROGRESS_INTERVAL;
        loop {
            match events.recv_deadline(due) {
                Ok(event) => on_event(event),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if Instant::now() >= due {
                due = Instant::now() + PROGRESS_INTERVAL;
                let bytes = progress.tensor_bytes_done();
                if reported_bytes.replace(bytes) != Some(bytes) {
                    on_event(PassEvent::Progress(bytes));
                }
            }
        }
        let outcome = reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        on_event(PassEvent::Progress(progress.tensor_bytes_done()));
        Ok(outcome?)
    })
}

fn read_all(stream: &mut LayerStream, results: Option<Sender<PassEvent>>) -> Result<(), LoadError> {
    for layer in stream {
        let layer = layer?;
        let Some(results) = &results else { continue };
        for tensor in layer.tensors() {
            let hash = tensor.hash()?.expect("this load hashes on the way");
            let hashes = Hashes { blake3: *hash.as_bytes(), sha256: None };
            let (id, is_scales) = (tensor.entry().id, tensor.quantised().is_some_and(Quantised::is_scales));
            let event = if is_scales { PassEvent::Scales } else { PassEvent::Tensor };
            // A receiver that panicked needs no more results.
            let _ = results.send(event(id, hashes));
        }
    }
    Ok(())
}

/// Hashes files and their tensors from reads that come in file order.
struct FilesHasher {
    checkpoint: Checkpoint,
    headers: Box<dyn Source>,
    plan: Arc<LoadPlan>,
    with_sha256: bool,
    results: Sender<PassEvent>,
    /// The group of the next file.
    next_group: usize,
    open: Option<OpenFile>,
}

/// A file that is not read to its end.
struct OpenFile {
    shard: ShardId,
    group: usize,
    digest: FileDigest,
}

impl FilesHasher {
    fn update(&mut self, request: ReadRequest, bytes: &[u8]) -> Result<(), LoadError> {
        let mut open = match self.open.take() {
            Some(open) => open,
            None => self.begin(request.shard)?,
        };
        assert_eq!(open.shard, request.shard, "a file ends before the next one begins");
        let tensors = self.plan.placements(&self.plan.layers()[open.group]);
        let mut on_tensor = |tensor: &Placement, hashes| {
            // A receiver that panicked needs no more results.
            let _ = self.results.send(PassEvent::Tensor(tensor.tensor, hashes));
        };
        open.digest.update(bytes, tensors, &mut on_tensor);
        if request.payload.end() != self.checkpoint.shard(request.shard).data.end() {
            self.open = Some(open);
            return Ok(());
        }
        let hashes = open.digest.finish(tensors, &mut on_tensor);
        let _ = self.results.send(PassEvent::File(open.shard, hashes));
        Ok(())
    }

    fn begin(&mut self, shard: ShardId) -> Result<OpenFile, LoadError> {
        let group = self.next_group;
        self.next_group += 1;
        let header_bytes = self.checkpoint.shard(shard).data.start();
        let mut digest = FileDigest::new(self.with_sha256);
        read_header(&*self.headers, shard, header_bytes, |piece| digest.update_header(piece))?;
        Ok(OpenFile { shard, group, digest })
    }
}

/// Reads the header of a file: all bytes before its data.
fn read_header(
    source: &dyn Source,
    shard: ShardId,
    header_bytes: u64,
    mut consume: impl FnMut(&[u8]),
) -> Result<(), LoadError> {
    let mut buffer = vec![0; HEADER_PIECE_BYTES.min(to_usize(header_bytes))];
    let mut start = 0;
    while start < header_bytes {
        let end = header_bytes.min(start + to_u64(buffer.len()));
        let piece = ByteRange::new(start, end).expect("it begins before the end");
        source.read(&ReadRequest { shard, extent: piece, payload: piece }, &mut buffer)?;
        consume(&buffer[..to_usize(piece.len_bytes())]);
        start = end;
    }
    Ok(())
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;
    use std::path::Path;

    use sha2::{Digest as _, Sha256};

    use super::super::settings::default_options;
    use super::super::test_files::{Tensor, tensor, write_sharded};
    use super::*;
    use crate::checkpoint::DType;
    use crate::plan::{Cast, CastOp, FloatType, TermKind};
    use crate::staging::cast::cast_step;
    use crate::units::MIB;

    /// A file of several slots, one with a tensor without bytes only, and a small one.
    fn shards() -> Vec<(&'static str, Vec<Tensor>)> {
        let large = vec![
            tensor("large", DType::U8, &[2_700_001], 1),
            tensor("none", DType::F32, &[0], 2),
            tensor("wide", DType::F32, &[300_000], 3),
            tensor("last.none", DType::F64, &[2, 0], 4),
        ];
        let small = vec![tensor("small", DType::Bf16, &[3, 5], 5), tensor("tiny", DType::I8, &[1], 6)];
        let empty = vec![tensor("empty", DType::F32, &[0, 3], 7)];
        vec![("a.safetensors", small), ("b.safetensors", empty), ("c.safetensors", large)]
    }

    fn settings() -> LoadOptions {
        LoadOptions { host_budget_bytes: 5 * MIB, ..default_options() }
    }

    #[test]
    fn files_and_tensors_hash_as_their_bytes() {
        let folder = tempfile::tempdir().unwrap();
        write_sharded(folder.path(), &shards());
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let expected: BTreeMap<String, Vec<u8>> = shards()
            .into_iter()
            .flat_map(|(_, list)| list)
            .map(|tensor| (tensor.name, tensor.bytes))
            .collect();
        for (io, with_sha256) in [(IoMode::Direct, true), (IoMode::Buffered, false), (IoMode::Mmap, true)] {
            let mut budget = settings();
            (budget.io, budget.host_budget_bytes) = (io, 8 * MIB);
            let pass = HashPass {
                checkpoint: &checkpoint,
                options: budget,
                beside: Vec::new(),
                cancel: ConvertCancel::default(),
            };
            let (mut files, mut tensors, mut progress) = (Vec::new(), Vec::new(), 0);
            pass.files(with_sha256, &mut |event| match event {
                PassEvent::File(shard, hashes) => files.push((shard, hashes)),
                PassEvent::Tensor(id, hashes) => tensors.push((id, hashes)),
                PassEvent::Scales(..) => panic!("nothing is quantised"),
                PassEvent::Progress(bytes) => {
                    assert!(bytes >= progress);
                    progress = bytes;
                }
            })
            .unwrap();
            assert_eq!((files.len(), tensors.len(), progress), (3, 7, checkpoint.tensor_bytes()));
            let check = |hashes: Hashes, bytes: &[u8]| {
                assert_eq!(hashes.blake3, *blake3::hash(bytes).as_bytes());
                assert_eq!(hashes.sha256, with_sha256.then(|| Sha256::digest(bytes).into()));
            };
            for (shard, hashes) in files {
                check(hashes, &fs::read(&checkpoint.shard(shard).path).unwrap());
            }
            for (id, hashes) in tensors {
                check(hashes, &expected[checkpoint.tensor(id).name]);
            }
        }
    }

    #[test]
    fn a_choice_of_tensors_is_hashed_as_it_is_cast() {
        let folder = tempfile::tempdir().unwrap();
        write_sharded(folder.path(), &shards());
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let mut wanted: Vec<TensorId> =
            ["wide", "tiny", "none"].map(|name| checkpoint.find(name).unwrap().id).to_vec();
        wanted.sort();
        let cast = Cast::between(DType::F32, FloatType::Bf16).unwrap();
        let widen = Cast::between(DType::I8, FloatType::F32).unwrap();
        let casts = |id| match checkpoint.tensor(id).name {
            "wide" => Transform::Cast(cast),
            "tiny" => Transform::Cast(widen),
            _ => Transform::Keep,
        };
        let pass = HashPass {
            checkpoint: &checkpoint,
            options: settings(),
            beside: Vec::new(),
            cancel: ConvertCancel::default(),
        };
        let mut seen = BTreeMap::new();
        pass.tensors(&wanted, &casts, &mut |event| {
            if let PassEvent::Tensor(id, hashes) = event {
                seen.insert(checkpoint.tensor(id).name.to_owned(), hashes.blake3);
            }
        })
        .unwrap();
        let mut wide = shards().pop().unwrap().1.remove(2).bytes;
        let source_len_bytes = to_u64(wide.len());
        cast_step(&mut wide, &CastOp { tensor: wanted[0], slot_offset_bytes: 0, source_len_bytes, cast });
        wide.truncate(to_usize(cast.delivered_bytes(source_len_bytes)));
        let tiny = f32::from(shards()[0].1[1].bytes[0].cast_signed()).to_le_bytes();
        let expected =
            [("none", blake3::hash(b"")), ("tiny", blake3::hash(&tiny)), ("wide", blake3::hash(&wide))];
        assert_eq!(seen, expected.map(|(name, hash)| (name.to_owned(), *hash.as_bytes())).into());
        let pass = HashPass {
            checkpoint: &checkpoint,
            options: settings(),
            beside: Vec::new(),
            cancel: ConvertCancel::default(),
        };
        assert_eq!(pass.tensors(&[], &casts, &mut |seen| panic!("{seen:?}")).unwrap(), []);
    }

    #[test]
    fn what_stands_beside_it_counts_against_the_budget() {
        let folder = tempfile::tempdir().unwrap();
        write_sharded(folder.path(), &shards());
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let pass = |bytes| HashPass {
            checkpoint: &checkpoint,
            options: settings(),
            beside: vec![MemoryTerm::new(TermKind::Files, bytes)],
            cancel: ConvertCancel::default(),
        };
        assert!(pass(0).files(false, &mut |_| {}).is_ok());
        let refused = pass(MIB).files(false, &mut |_| {}).unwrap_err();
        assert!(matches!(&refused, ConvertError::Plan(error) if error.is_over_budget()), "{refused}");
    }

    #[test]
    fn a_file_that_changes_is_refused_and_nobody_waits() {
        let folder = tempfile::tempdir().unwrap();
        write_sharded(folder.path(), &shards());
        let change = |name: &str| {
            let path = folder.path().join(name);
            let mut bytes = fs::read(&path).unwrap();
            *bytes.last_mut().unwrap() ^= 1;
            fs::write(path, bytes).unwrap();
        };
        for name in ["a.safetensors", "b.safetensors", "c.safetensors"] {
            let checkpoint = Checkpoint::open(folder.path()).unwrap();
            if name == "b.safetensors" {
                let path = folder.path().join(Path::new(name));
                fs::write(&path, fs::read(&path).unwrap()).unwrap();
            } else {
                change(name);
            }
            let pass = HashPass {
                checkpoint: &checkpoint,
                options: settings(),
                beside: Vec::new(),
                cancel: ConvertCancel::default(),
            };
            let error = pass.files(false, &mut |_| {}).unwrap_err();
            let ConvertError::Load(load) = &error else { panic!("{error}") };
            assert!(load.is_file_changed(), "{error}");
        }
    }

    #[test]
    fn a_hook_that_refuses_ends_the_load() {
        let folder = tempfile::tempdir().unwrap();
        write_sharded(folder.path(), &shards());
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let pass = HashPass {
            checkpoint: &checkpoint,
            options: settings(),
            beside: Vec::new(),
            cancel: ConvertCancel::default(),
        };
        let ids = all_ids(&checkpoint);
        let plan = Arc::new(
            pass.plan(&groups(&checkpoint, &ids, |_| true), &|_| Transform::Keep, &ids, false).unwrap(),
        );
        let mut seen = 0;
        let observer: ReadObserver = Box::new(move |_, _| {
            seen += 1;
            if seen == 3 { Err(LoadError::Cancelled) } else { Ok(()) }
        });
        let layers: Vec<_> = pass.start(plan, false, Some(observer)).unwrap().collect();
        assert!(matches!(layers.last(), Some(Err(LoadError::Cancelled))), "{layers:?}");
    }

    /// The pass ends if its listener panics, however many results are left.
    #[test]
    fn a_listener_that_panics_ends_the_pass() {
        let folder = tempfile::tempdir().unwrap();
        let names: Vec<String> = (0..2 * RESULTS_MAX).map(|number| format!("t{number}")).collect();
        let tensors = names.iter().zip(0..).map(|(name, seed)| tensor(name, DType::U8, &[3], seed)).collect();
        write_sharded(folder.path(), &[("a.safetensors", tensors)]);
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let pass = HashPass {
            checkpoint: &checkpoint,
            options: settings(),
            beside: Vec::new(),
            cancel: ConvertCancel::default(),
        };
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pass.files(false, &mut |seen| assert!(matches!(seen, PassEvent::Progress(_)), "enough"))
        }));
        assert!(panicked.is_err());
    }
}
