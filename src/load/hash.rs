//! BLAKE3 of tensors.
//!
//! On targets that keep no bytes, [`LayerHasher`] hashes the delivered bytes of each layer from
//! slots that arrive in plan order. Where bytes are kept,
//! [`LoadedTensor::hash`](crate::LoadedTensor::hash) hashes those.
//!
//! Long inputs are hashed on several cores, by a thread pool of this library and not by rayon's
//! global one: the global pool has a thread for each core of the machine, however many there are,
//! and their stacks would count against the memory promise.

use std::fmt;
use std::num::NonZero;
use std::sync::OnceLock;
use std::thread;

use blake3::Hasher;
#[cfg(feature = "convert")]
use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::checkpoint::Checkpoint;
use crate::plan::{Placement, ReadOp};
use crate::staging::{Filled, Slot};

/// Inputs of at least this many bytes are split over several cores.
pub(crate) const PARALLEL_BYTES_MIN: usize = 256 << 10;

/// BLAKE3 of a tensor's bytes. Shown as 64 hexadecimal digits, as `b3sum` shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorHash([u8; 32]);

impl TensorHash {
    /// The hash of these bytes. Long inputs are hashed on several cores.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        let mut hasher = PieceHasher::default();
        hasher.update(bytes);
        hasher.finish()
    }

    /// The 32 bytes of the hash.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The hash as 64 lower-case hexadecimal digits.
    #[must_use]
    pub fn to_hex(&self) -> String {
        self.to_string()
    }
}

impl fmt::Display for TensorHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&blake3::Hash::from_bytes(self.0).to_hex())
    }
}

/// Hashes the tensors of one layer after the other. Reads must arrive in the order of the plan.
#[derive(Debug, Default)]
pub(super) struct LayerHasher {
    open: Hasher,
    /// The hashes of the layer's first placements, in file order.
    hashes: Vec<TensorHash>,
}

impl LayerHasher {
    /// Adds the bytes of one read of the layer with these placements, the first of which has the
    /// index `first` in the plan.
    pub(super) fn update(
        &mut self,
        checkpoint: &Checkpoint,
        (first, placements): (u32, &[Placement]),
        read: &ReadOp,
        slot: &Slot<Filled>,
    ) {
        let request = &read.request;
        while let Some(placement) = placements.get(self.hashes.len()) {
            if placement.extent.is_empty() {
                self.close(placements);
                continue;
            }
            let shard = checkpoint.tensor(placement.tensor).shard;
            // Values and scales that are read separately come from the same bytes of the file.
            let is_of_read = (first..).nth(self.hashes.len()).is_some_and(|index| read.is_of(index));
            let piece = placement.extent.intersect(request.payload);
            let piece = piece.filter(|_| shard == request.shard && is_of_read);
            let Some(piece) = piece else { return };
            // Gathered and cast bytes begin where the bytes of the file began.
            let len_bytes = placement.delivered_bytes_in(piece);
            update_hash(&mut self.open, slot.part(piece.start() - request.extent.start(), len_bytes));
            if placement.extent.end() > request.payload.end() {
                return;
            }
            self.close(placements);
        }
    }

    /// The hashes of the layer, in the order of the placements. Tensors without bytes that no read
    /// reached are closed here. The next read may be of the next layer.
    pub(super) fn finish_layer(&mut self, placements: &[Placement]) -> Vec<TensorHash> {
        while self.hashes.len() < placements.len() {
            self.close(placements);
        }
        std::mem::take(&mut self.hashes)
    }

    fn close(&mut self, placements: &[Placement]) {
        // One exact allocation for a layer: the plan counts 32 bytes for each tensor.
        self.hashes.reserve_exact(placements.len() - self.hashes.len());
        self.hashes.push(TensorHash(*self.open.finalize().as_bytes()));
        self.open.reset();
    }
}

/// BLAKE3 of bytes that arrive piece by piece.
#[derive(Default)]
pub(super) struct PieceHasher(Hasher);

impl PieceHasher {
    pub(super) fn update(&mut self, piece: &[u8]) {
        update_hash(&mut self.0, piece);
    }

    pub(super) fn finish(&self) -> TensorHash {
        TensorHash(*self.0.finalize().as_bytes())
    }
}

/// Adds the next bytes. A long input is hashed by several threads: those of the rayon pool that
/// this is called on, otherwise those of [`hash_pool`].
pub(crate) fn update_hash(hasher: &mut Hasher, bytes: &[u8]) {
    if bytes.len() < PARALLEL_BYTES_MIN {
        hasher.update(bytes);
    } else if rayon::current_thread_index().is_some() {
        hasher.update_rayon(bytes);
    } else {
        match hash_pool() {
            Some(pool) => pool.install(|| hasher.update_rayon(bytes)),
            None => hasher.update(bytes),
        };
    }
}

/// Does both at a time: `pooled` on a thread of [`hash_pool`], if there are any, and `here` on the
/// calling thread, so that it may wait for other threads.
#[cfg(feature = "convert")]
pub(crate) fn hash_both(pooled: impl FnOnce() + Send, here: impl FnOnce()) {
    match hash_pool() {
        Some(pool) => pool.in_place_scope(|scope| {
            scope.spawn(|_| pooled());
            here();
        }),
        None => {
            pooled();
            here();
        }
    }
}

/// Hashes several inputs at a time, on the threads of [`hash_pool`] if there are any. The results
/// have the order of the inputs.
#[cfg(feature = "convert")]
pub(crate) fn hash_each<T: Sync, R: Send>(inputs: &[T], hash: impl Fn(&T) -> R + Send + Sync) -> Vec<R> {
    match hash_pool() {
        Some(pool) => pool.install(|| inputs.par_iter().map(hash).collect()),
        None => inputs.iter().map(hash).collect(),
    }
}

/// Most threads that hash. Memory cannot feed more of them.
const HASH_THREADS_MAX: usize = 16;

/// The threads that hash long inputs. They start with the first long input and stay. `None` on one
/// core, and if the system refuses threads: then the caller's thread hashes alone.
fn hash_pool() -> Option<&'static ThreadPool> {
    static POOL: OnceLock<Option<ThreadPool>> = OnceLock::new();
    let start = || {
        let cores = thread::available_parallelism().map_or(1, NonZero::get);
        let builder = ThreadPoolBuilder::new()
            .num_threads(cores.min(HASH_THREADS_MAX))
            .thread_name(|number| format!("blake3-{number}"));
        Some(builder).filter(|_| cores > 1)?.build().ok()
    };
    POOL.get_or_init(start).as_ref()
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;

    use super::*;
    use crate::budget::MemoryBudget;
    use crate::checkpoint::DType;
    use crate::layers::Layers;
    use crate::plan::{FloatType, LoadPlan, PlanLimits};
    use crate::source;
    use crate::staging::{Ring, cast};
    use crate::units::{MIB, to_u64, to_usize};

    /// A checkpoint of two layers in the order and with the types given, and what is delivered of
    /// each tensor as `bf16`.
    fn mixed(folder: &std::path::Path) -> (Checkpoint, BTreeMap<String, Vec<u8>>) {
        let tensors = [
            ("layers.0.odd", DType::U8, 3),
            ("layers.0.wide", DType::F32, 700_001),
            ("layers.0.none", DType::F32, 0),
            ("layers.0.half", DType::Bf16, 1000),
            ("layers.1.double", DType::F64, 400_000),
            ("layers.1.small", DType::F32, 1),
            ("layers.1.count", DType::I64, 5),
        ];
        let (mut header, mut data, mut delivered) = (String::from("{"), Vec::new(), BTreeMap::new());
        for (name, dtype, count) in tensors {
            let start = data.len();
            let mut expected = Vec::new();
            for element in 0..count {
                let number = f32::from_bits(0x3F00_0000 ^ u32::try_from(element).unwrap() << 3);
                let narrow = half::bf16::from_f32(number).to_le_bytes();
                let (bytes, kept) = match dtype {
                    DType::F32 => (number.to_le_bytes().to_vec(), narrow.to_vec()),
                    DType::F64 => (f64::from(number).to_le_bytes().to_vec(), narrow.to_vec()),
                    _ => {
                        let len = to_usize(dtype.bits().unwrap() / 8);
                        let bytes = number.to_be_bytes().into_iter().cycle().take(len).collect::<Vec<u8>>();
                        (bytes.clone(), bytes)
                    }
                };
                data.extend(bytes);
                expected.extend(kept);
            }
            let end = data.len();
            let comma = if header.len() > 1 { "," } else { "" };
            header.push_str(&format!(
                r#"{comma}"{name}":{{"dtype":"{dtype}","shape":[{count}],"data_offsets":[{start},{end}]}}"#
            ));
            delivered.insert(name.to_owned(), expected);
        }
        header.push('}');
        let path = folder.join("model.safetensors");
        let file = [&to_u64(header.len()).to_le_bytes(), header.as_bytes(), &data].concat();
        fs::write(&path, file).unwrap();
        (Checkpoint::open(path).unwrap(), delivered)
    }

    #[test]
    fn what_is_hashed_and_copied_is_what_is_delivered() {
        let folder = tempfile::tempdir().unwrap();
        let (checkpoint, delivered) = mixed(folder.path());
        let layers = Layers::group(&checkpoint).unwrap();
        let mut limits = PlanLimits::new(6 * MIB);
        limits.options.dtype = Some(FloatType::Bf16);
        let plan = LoadPlan::build(&checkpoint, &layers, &limits, |_| true).unwrap();
        let shape = plan.memory().ring();
        let ring =
            Ring::new(shape, MemoryBudget::new(shape.bytes()).reserve("ring", shape.bytes()).unwrap(), None);
        let mut slot = ring.unwrap().try_take().unwrap();
        let source = source::open(plan.io(), &checkpoint).unwrap();
        let mut hasher = LayerHasher::default();
        assert!(plan.reads().len() > 5, "tensors in several pieces");
        for layer in plan.layers() {
            let placements = plan.placements(layer);
            let mut arena = vec![0; to_usize(layer.arena_bytes)];
            for read in layer.reads.clone().map(|index| plan.read(index)) {
                source.read(&read.request, slot.bytes_mut()).unwrap();
                for step in plan.casts(&read) {
                    cast::cast_step(slot.bytes_mut(), &step);
                }
                let filled = slot.into_filled();
                hasher.update(&checkpoint, (layer.placements.start, placements), &read, &filled);
                for copy in plan.copies(&read) {
                    let target = &mut arena[to_usize(copy.arena_offset_bytes)..][..to_usize(copy.len_bytes)];
                    target.copy_from_slice(filled.part(copy.slot_offset_bytes, copy.len_bytes));
                }
                slot = filled.into_empty();
            }
            for (placement, hash) in placements.iter().zip(hasher.finish_layer(placements)) {
                let name = checkpoint.tensor(placement.tensor).name;
                let expected = &delivered[name];
                assert_eq!(placement.len_bytes(), to_u64(expected.len()));
                let found = &arena[to_usize(placement.arena_offset_bytes)..][..expected.len()];
                assert!(found == expected, "the bytes of {name}");
                assert_eq!(hash.as_bytes(), blake3::hash(expected).as_bytes(), "the hash of {name}");
            }
        }
    }

    #[test]
    fn a_hash_reads_as_b3sum_writes_it() {
        // The test vector of the algorithm for an empty input.
        let empty = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262";
        let hash = TensorHash::of(b"");
        assert_eq!((hash.to_string().as_str(), hash.to_hex().as_str()), (empty, empty));
        assert_eq!(hash.as_bytes()[0], 0xaf);
    }

    #[test]
    fn large_inputs_hash_alike_on_all_cores() {
        let bytes = vec![3; PARALLEL_BYTES_MIN];
        assert_eq!(TensorHash::of(&bytes).as_bytes(), blake3::hash(&bytes).as_bytes());
    }
}
