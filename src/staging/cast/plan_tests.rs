//! Random groups of random tensors with random casts: the plan is carried out, and every byte is
//! compared with a straightforward cast of its tensor. No read and no result exceeds a slot.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use proptest::prelude::*;

use super::cast_step;
use super::reference::{cast_bytes, is_overflow, seeded};
use crate::checkpoint::{Checkpoint, DType, TensorId};
use crate::layers::LayerId;
use crate::plan::{Cast, FloatType, Group, Landing, LoadPlan, PlanLimits, PlannedLayer, ReadOp};
use crate::units::{Alignment, ByteRange, KIB, MIB, to_u64, to_usize};

const TARGETS: [Option<FloatType>; 4] =
    [None, Some(FloatType::Bf16), Some(FloatType::F16), Some(FloatType::F32)];
const GROUPS: usize = 3;

/// A tensor and its cast.
#[derive(Clone, Debug)]
struct TensorCase {
    dtype: DType,
    elements: usize,
    to: Option<FloatType>,
    /// Its group, and its position there if groups are shuffled.
    group: usize,
    place: u32,
}

impl TensorCase {
    fn cast(&self) -> Option<Cast> {
        self.to.and_then(|to| Cast::between(self.dtype, to))
    }
}

fn case() -> impl Strategy<Value = TensorCase> {
    let whole_bytes: Vec<DType> =
        DType::ALL.into_iter().filter(|dtype| dtype.bits().unwrap() % 8 == 0).collect();
    let dtype = prop_oneof![
        3 => prop::sample::select(whole_bytes),
        // Gives the tensors behind it odd phases.
        2 => Just(DType::U8),
        2 => prop::sample::select(vec![DType::Bf16, DType::F16, DType::F32]),
    ];
    let elements = prop_oneof![
        1 => Just(0_usize),
        6 => 1..40_usize,
        4 => 40..3000_usize,
        2 => (1..20_usize).prop_map(|count| count * 2048),
        2 => 30_000..90_000_usize,
        1 => 500_000..700_000_usize,
    ];
    let to = prop::sample::select(TARGETS.to_vec());
    (dtype, elements, to, 0..GROUPS, any::<u32>())
        .prop_map(|(dtype, elements, to, group, place)| TensorCase { dtype, elements, to, group, place })
}

/// Writes tensors of random bytes, named by their index.
fn write(folder: &Path, shards: &[Vec<TensorCase>]) -> BTreeMap<String, Vec<u8>> {
    let mut data = BTreeMap::new();
    let mut words = seeded(usize::MAX);
    for (shard, cases) in shards.iter().enumerate() {
        let (mut header, mut file_data) = (serde_json::Map::new(), Vec::new());
        for case in cases {
            let name = format!("t{:04}", data.len());
            let len = case.elements * to_usize(case.dtype.bits().unwrap() / 8);
            let bytes: Vec<u8> = words.by_ref().flat_map(u64::to_le_bytes).take(len).collect();
            let offsets = [file_data.len(), file_data.len() + len];
            let entry = serde_json::json!({
                "dtype": case.dtype.name(), "shape": [case.elements], "data_offsets": offsets,
            });
            header.insert(name.clone(), entry);
            file_data.extend_from_slice(&bytes);
            data.insert(name, bytes);
        }
        let header = serde_json::Value::from(header).to_string() + &" ".repeat(shard * 3);
        let name = format!("model-{:05}-of-{:05}.safetensors", shard + 1, shards.len());
        let file = [&to_u64(header.len()).to_le_bytes(), header.as_bytes(), &file_data].concat();
        fs::write(folder.join(name), file).unwrap();
    }
    data
}

/// The tensors of each group, in file order or shuffled, empty ones last.
fn groups(checkpoint: &Checkpoint, cases: &[&TensorCase], is_shuffled: bool) -> Vec<Vec<TensorId>> {
    let mut groups = vec![Vec::new(); GROUPS];
    for tensor in checkpoint.tensors() {
        groups[case_of(cases, tensor.name).group].push(tensor.id);
    }
    for group in &mut groups {
        group.sort_by_key(|&tensor| {
            let tensor = checkpoint.tensor(tensor);
            let place = if is_shuffled { case_of(cases, tensor.name).place } else { 0 };
            (tensor.extent.is_empty(), place)
        });
    }
    groups
}

fn case_of<'a>(cases: &[&'a TensorCase], name: &str) -> &'a TensorCase {
    cases[name[1..].parse::<usize>().unwrap()]
}

/// Fills a slot as a read does; all other bytes are garbage.
fn fill(checkpoint: &Checkpoint, read: &ReadOp, slot_bytes: u64, alignment: Alignment) -> Vec<u8> {
    let request = read.request;
    assert!(request.extent.len_bytes() <= slot_bytes && request.extent.contains(request.payload));
    assert!(!request.payload.is_empty());
    assert!([request.extent.start(), request.extent.end()].into_iter().all(|end| alignment.divides(end)));
    let mut slot = vec![0xA5; to_usize(slot_bytes)];
    let start = to_usize(request.payload.start() - request.extent.start());
    let payload = &mut slot[start..][..to_usize(request.payload.len_bytes())];
    let file = fs::File::open(&checkpoint.shard(request.shard).path).unwrap();
    file.read_exact_at(payload, request.payload.start()).unwrap();
    slot
}

/// The arena of a layer, and the number of elements that became infinite.
fn carry_out(
    checkpoint: &Checkpoint,
    plan: &LoadPlan,
    layer: &PlannedLayer,
    limits: &PlanLimits,
) -> (Vec<u8>, u64) {
    let mut arena = vec![0x5A; to_usize(layer.arena_bytes)];
    let mut written: Vec<ByteRange> = Vec::new();
    let mut overflowed = 0;
    for read in layer.reads.clone().map(|index| plan.read(index)) {
        let mut slot = fill(checkpoint, &read, plan.memory().ring().slot_bytes, limits.alignment);
        overflowed += plan.casts(&read).map(|step| cast_step(&mut slot, &step)).sum::<u64>();
        for copy in plan.copies(&read) {
            let source = &slot[to_usize(copy.slot_offset_bytes)..][..to_usize(copy.len_bytes)];
            arena[to_usize(copy.arena_offset_bytes)..][..source.len()].copy_from_slice(source);
            written.push(ByteRange::with_len(copy.arena_offset_bytes, copy.len_bytes).unwrap());
        }
    }
    written.sort();
    assert!(written.windows(2).all(|pair| pair[0].end() <= pair[1].start()), "each byte once");
    assert_eq!(written.iter().map(|range| range.len_bytes()).sum::<u64>(), layer.tensor_bytes);
    for step in plan.moves(layer) {
        let from = to_usize(step.source_arena_offset_bytes);
        arena.copy_within(from..from + to_usize(step.len_bytes), to_usize(step.target_arena_offset_bytes));
    }
    (arena, overflowed)
}

fn check(folder: &Path, shards: &[Vec<TensorCase>], is_shuffled: bool, limits: &PlanLimits) {
    let data = write(folder, shards);
    let checkpoint = Checkpoint::open(folder).unwrap();
    let cases: Vec<&TensorCase> = shards.iter().flatten().collect();
    let ids: Vec<LayerId> = (0..GROUPS).map(|group| LayerId::new(&format!("file{group}"))).collect();
    let groups = groups(&checkpoint, &cases, is_shuffled);
    let named = ids.iter().zip(&groups).map(|(id, tensors)| Group { id, tensors });
    let cast = |tensor| case_of(&cases, checkpoint.tensor(tensor).name).cast().into();
    let plan = LoadPlan::build_groups(&checkpoint, named, limits, cast, 0).unwrap();
    let widenings = plan.reads().flat_map(|read| plan.casts(&read).collect::<Vec<_>>());
    let widening_count = widenings.filter(|step| step.cast.is_widening()).count();
    assert_eq!(format!("{plan:#}").matches("    widen slot+").count(), widening_count);
    let mut tensor_count = 0;
    for layer in plan.layers() {
        let (arena, overflowed) = carry_out(&checkpoint, &plan, layer, limits);
        let (mut expected_end, mut expected_overflows) = (0, 0);
        for placement in plan.placements(layer) {
            let name = checkpoint.tensor(placement.tensor).name;
            let (case, source) = (case_of(&cases, name), &data[name]);
            let expected = match case.cast() {
                None => source.clone(),
                Some(cast) => cast_bytes(source, cast),
            };
            assert_eq!((placement.cast, placement.len_bytes()), (case.cast(), to_u64(expected.len())));
            let found = &arena[to_usize(placement.arena_offset_bytes)..][..expected.len()];
            assert!(found == expected, "{name}: {case:?}");
            if limits.landing == Landing::Packed {
                assert_eq!(placement.arena_offset_bytes, expected_end);
            }
            expected_end += to_u64(expected.len());
            expected_overflows += case.cast().map_or(0, |cast| overflows(source, cast));
            tensor_count += 1;
        }
        assert_eq!(layer.tensor_bytes, expected_end);
        assert!(limits.landing != Landing::Packed || layer.arena_bytes == expected_end);
        assert_eq!(overflowed, expected_overflows);
    }
    assert_eq!(tensor_count, cases.len());
}

fn overflows(bytes: &[u8], cast: Cast) -> u64 {
    let elements = super::reference::elements(bytes, to_usize(cast.source_unit_bytes()));
    to_u64(elements.filter(|&bits| cast.can_overflow() && is_overflow(bits, cast)).count())
}

fn limits(landing: Landing, alignment_bytes: u64) -> PlanLimits {
    // The smallest slots: many reads for few bytes.
    let mut limits = PlanLimits::new(5 * MIB.max(8 * alignment_bytes));
    (limits.landing, limits.alignment) = (landing, Alignment::new(alignment_bytes).unwrap());
    limits
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(onelayer_testing::all_or(30, 10)))]

    #[test]
    fn every_byte_is_cast_and_reaches_its_place(
        shards in prop::collection::vec(prop::collection::vec(case(), 1..14), 1..3),
        is_shuffled in any::<bool>(),
        landing in prop::sample::select(vec![Landing::Packed, Landing::Packed, Landing::Exact, Landing::InPhase]),
        alignment_bytes in prop::sample::select(vec![4 * KIB, 64 * KIB, 256 * KIB]),
    ) {
        let folder = tempfile::tempdir().unwrap();
        check(folder.path(), &shards, is_shuffled, &limits(landing, alignment_bytes));
    }
}

/// Tensors of several reads at every phase of an element, up to the end of a block, in slots of the
/// fewest blocks.
#[test]
fn widened_tensors_fit_their_slots_at_any_phase() {
    let phases = [(4 * KIB, 1_u64), (4 * KIB, 4094), (256 * KIB, 0), (256 * KIB, 262_143)];
    for dtype in [DType::Bf16, DType::F16, DType::I16, DType::U8, DType::F8E4M3] {
        for (alignment_bytes, phase) in onelayer_testing::sample(phases.into(), 3) {
            let case = |dtype, elements, to| TensorCase { dtype, elements, to, group: 0, place: 0 };
            let cases =
                |before| vec![case(DType::U8, before, None), case(dtype, 600_000, Some(FloatType::F32))];
            let folder = tempfile::tempdir().unwrap();
            // With as many digits as later, so that the header keeps its length.
            let before = 500_000;
            write(folder.path(), &[cases(before)]);
            let start = Checkpoint::open(folder.path()).unwrap().find("t0001").unwrap().extent.start();
            let more = to_usize(phase.wrapping_sub(start) % alignment_bytes);
            check(folder.path(), &[cases(before + more)], false, &limits(Landing::Packed, alignment_bytes));
            let checkpoint = Checkpoint::open(folder.path()).unwrap();
            assert_eq!(checkpoint.find("t0001").unwrap().extent.start() % alignment_bytes, phase);
        }
    }
}
