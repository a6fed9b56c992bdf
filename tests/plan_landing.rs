//! Plans for devices: whatever way tensors land, and whatever is narrowed, copies and moves bring every byte to its place.
//!
//! Each plan is carried out on an arena of tags: a cell says which byte of which tensor it holds. Copies run in the reverse
//! order, since nothing promises theirs; moves run when all of them are over.
#![allow(clippy::unwrap_used, clippy::as_conversions, reason = "a test that cannot go on panics")]
#![allow(clippy::cast_possible_truncation, reason = "sizes of small checkpoints")]

mod common;

use std::path::Path;

use common::{TestTensor, write_file, write_sharded};
use onelayer::plan::{
    FloatType, Landing, LoadPlan, Placement, PlanLimits, PlannedLayer, ReadOp, ResidentKind,
};
use onelayer::units::{Alignment, KIB, MIB};
use onelayer::{Checkpoint, DType, Layers};
use proptest::prelude::*;

/// A byte of a tensor: which tensor, which byte of what is delivered.
type Tag = (u32, u32);
const NOTHING: Tag = (u32::MAX, u32::MAX);

const LANDINGS: [Landing; 2] = [Landing::Exact, Landing::InPhase];
const DTYPES: [(&str, usize); 5] = [("U8", 1), ("BF16", 2), ("F32", 4), ("F64", 8), ("I64", 8)];

fn limits(landing: Landing, dtype: Option<FloatType>) -> PlanLimits {
    let mut limits = PlanLimits::new(9 * MIB);
    (limits.landing, limits.dtype, limits.resident) = (landing, dtype, ResidentKind::Device);
    limits
}

/// A plan of everything that is not said to be left out.
fn plan(checkpoint: &Checkpoint, limits: &PlanLimits) -> LoadPlan {
    let layers = Layers::group(checkpoint).unwrap();
    let is_wanted = |tensor| !checkpoint.tensor(tensor).name.contains("left_out");
    LoadPlan::build(checkpoint, &layers, limits, is_wanted).unwrap()
}

fn tags(placement: &Placement, range: std::ops::Range<u64>) -> impl Iterator<Item = Tag> {
    let tensor = placement.tensor.index() as u32;
    range.map(move |byte| (tensor, byte as u32))
}

/// What a slot holds after the read and after what is cast in it.
fn filled_slot(checkpoint: &Checkpoint, plan: &LoadPlan, layer: &PlannedLayer, read: &ReadOp) -> Vec<Tag> {
    let request = &read.request;
    let mut slot = vec![NOTHING; request.extent.len_bytes() as usize];
    let mut casts = plan.casts(read);
    for placement in plan.placements(layer) {
        let entry = checkpoint.tensor(placement.tensor);
        let Some(piece) = entry.extent.intersect(request.payload).filter(|_| entry.shard == request.shard)
        else {
            continue;
        };
        let start = (piece.start() - request.extent.start()) as usize;
        let inside = piece.start() - entry.extent.start();
        let Some(cast) = placement.cast else {
            let cells = &mut slot[start..start + piece.len_bytes() as usize];
            cells.iter_mut().zip(tags(placement, inside..u64::MAX)).for_each(|(cell, tag)| *cell = tag);
            continue;
        };
        let step = casts.next().expect("what is cast is listed, in file order");
        assert_eq!((step.slot_offset_bytes as usize, step.cast), (start, cast));
        assert_eq!(step.source_len_bytes, piece.len_bytes());
        let (from_bytes, to_bytes) = (cast.source_element_bytes(), cast.to().bytes());
        assert_eq!((inside % from_bytes, piece.len_bytes() % from_bytes), (0, 0), "whole elements");
        let elements = inside / from_bytes..(inside + piece.len_bytes()) / from_bytes;
        let narrowed = tags(placement, elements.start * to_bytes..elements.end * to_bytes);
        slot[start..].iter_mut().zip(narrowed).for_each(|(cell, tag)| *cell = tag);
        // Behind it is what is left of the elements: nobody may copy that.
        let rest = start + ((elements.end - elements.start) * to_bytes) as usize;
        slot[rest..start + piece.len_bytes() as usize].fill(NOTHING);
    }
    assert_eq!(casts.next(), None);
    slot
}

/// Copies and moves of a layer. Returns the arena and where the last byte lies that was written.
fn carry_out(checkpoint: &Checkpoint, plan: &LoadPlan, layer: &PlannedLayer) -> (Vec<Tag>, u64) {
    let mut arena = vec![NOTHING; layer.arena_bytes as usize];
    let mut end = 0;
    for read in layer.reads.clone().rev().map(|index| plan.read(index)) {
        let slot = filled_slot(checkpoint, plan, layer, &read);
        assert!(slot.len() as u64 <= plan.memory().ring().slot_bytes);
        for copy in plan.copies(&read) {
            let (from, to) = (copy.slot_offset_bytes as usize, copy.arena_offset_bytes as usize);
            let len = copy.len_bytes as usize;
            assert!(len > 0 && slot[from..from + len].iter().all(|tag| *tag != NOTHING));
            assert!(arena[to..to + len].iter().all(|tag| *tag == NOTHING), "each cell once");
            arena[to..to + len].copy_from_slice(&slot[from..from + len]);
            end = end.max(copy.arena_offset_bytes + copy.len_bytes);
        }
    }
    let landed = arena.clone();
    for step in plan.moves(layer).iter().rev() {
        let (from, to) = (step.source_arena_offset_bytes as usize, step.target_arena_offset_bytes as usize);
        let len = step.len_bytes as usize;
        assert!(!Alignment::TENSOR.divides(step.source_arena_offset_bytes), "no move for nothing");
        assert!(arena[to..to + len].iter().all(|tag| *tag == NOTHING), "nothing is overwritten");
        assert!(landed[from..from + len].iter().all(|tag| *tag != NOTHING), "what a copy brought is moved");
        arena[to..to + len].copy_from_slice(&landed[from..from + len]);
        end = end.max(step.target_arena_offset_bytes + step.len_bytes);
    }
    (arena, end)
}

fn copy_count(plan: &LoadPlan, layer: &PlannedLayer) -> u64 {
    layer.reads.clone().map(|index| plan.copies(&plan.read(index)).count() as u64).sum()
}

/// Carries out a plan. Returns where the last byte lies in each arena.
fn check(checkpoint: &Checkpoint, plan: &LoadPlan) -> Vec<u64> {
    let (mut delivered_bytes, mut ends) = (0, Vec::new());
    for layer in plan.layers() {
        let (arena, end) = carry_out(checkpoint, plan, layer);
        let placements = plan.placements(layer);
        for placement in placements.iter().filter(|placement| placement.len_bytes() > 0) {
            assert!(Alignment::TENSOR.divides(placement.arena_offset_bytes));
            let start = placement.arena_offset_bytes as usize;
            let cells = &arena[start..start + placement.len_bytes() as usize];
            assert!(cells.iter().copied().eq(tags(placement, 0..placement.len_bytes())));
        }
        let unit = if end < 2 * MIB { Alignment::PAGE } else { Alignment::HUGE_PAGE };
        assert_eq!(layer.arena_bytes, unit.up(end).unwrap());
        let tensor_bytes: u64 = placements.iter().map(Placement::len_bytes).sum();
        assert_eq!(layer.tensor_bytes, tensor_bytes);
        delivered_bytes += tensor_bytes;
        ends.push(end);
    }
    assert_eq!(plan.tensor_bytes(), delivered_bytes);
    let wanted = checkpoint.tensors().filter(|tensor| !tensor.name.contains("left_out"));
    let source_bytes: u64 = wanted.map(|tensor| tensor.extent.len_bytes()).sum();
    assert_eq!(plan.source_bytes(), source_bytes);
    assert_eq!(plan.over_read_bytes(), plan.aligned_read_bytes() - source_bytes);
    ends
}

/// Carries out both plans: what landing in phase may cost, and what it has to save.
fn compare(checkpoint: &Checkpoint, dtype: Option<FloatType>) -> [LoadPlan; 2] {
    let [exact, in_phase] = LANDINGS.map(|landing| plan(checkpoint, &limits(landing, dtype)));
    assert_eq!(exact.memory().ring(), in_phase.memory().ring(), "the budget leaves room for the moves");
    assert_eq!(exact.reads().len(), in_phase.reads().len());
    let ends = check(checkpoint, &exact).into_iter().zip(check(checkpoint, &in_phase));
    for ((before, after), (exact_end, end)) in exact.layers().iter().zip(in_phase.layers()).zip(ends) {
        assert_eq!(exact.moves(before), []);
        let copies = copy_count(&in_phase, after);
        assert!(copies <= copy_count(&exact, before), "never more copies");
        let appendix_bytes = (64 * KIB).max(after.tensor_bytes / 64);
        // There are as many copies as segments at least.
        assert!(end <= exact_end + 256 * (copies + 1) + appendix_bytes, "{end}, not {exact_end}");
        assert!(in_phase.moves(after).iter().all(|step| step.len_bytes <= 64 * KIB));
    }
    [exact, in_phase]
}

/// Shards of tensors (type, elements): many small ones of odd lengths between large ones.
fn shards() -> impl Strategy<Value = Vec<Vec<(usize, usize)>>> {
    let elements = prop_oneof![
        1 => Just(0_usize),
        4 => 1..40_usize,
        4 => 40..4000_usize,
        3 => (1..60_usize).prop_map(|count| count * 128),
        2 => 9_000..120_000_usize,
        1 => 140_000..200_000_usize,
    ];
    prop::collection::vec(prop::collection::vec((0..DTYPES.len(), elements), 0..30), 1..3)
}

fn checkpoint(folder: &Path, shards: &[Vec<(usize, usize)>]) -> Checkpoint {
    let mut number = 0;
    let tensor = |&(dtype, elements): &(usize, usize)| {
        number += 1;
        let (dtype, element_bytes) = DTYPES[dtype];
        TestTensor {
            // Stretches of neighbours, and now and then a tensor that is not wanted between them.
            name: match number % 13 {
                7 => format!("model.layers.{}.left_out.n{number}", number / 11 % 3),
                _ => format!("model.layers.{}.part.n{number}.weight", number / 11 % 3),
            },
            dtype,
            shape: vec![elements as u64],
            bytes: vec![1; elements * element_bytes],
        }
    };
    let mut tensor = tensor;
    let shards: Vec<Vec<TestTensor>> =
        shards.iter().map(|shard| shard.iter().map(&mut tensor).collect()).collect();
    write_sharded(folder, &shards);
    Checkpoint::open(folder).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(30))]

    #[test]
    fn every_byte_reaches_its_place(shards in shards(), dtype in 0..4_usize) {
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = checkpoint(folder.path(), &shards);
        let dtype = [None, Some(FloatType::Bf16), Some(FloatType::F16), Some(FloatType::F32)][dtype];
        let [_, in_phase] = compare(&checkpoint, dtype);
        for tensor in checkpoint.tensors().filter(|tensor| !tensor.name.contains("left_out")) {
            let wide = match dtype {
                None => false,
                Some(FloatType::F32) => tensor.dtype == DType::F64,
                Some(_) => matches!(tensor.dtype, DType::F32 | DType::F64),
            };
            let mut placements = in_phase.layers().iter().flat_map(|layer| in_phase.placements(layer));
            let placement = placements.find(|placement| placement.tensor == tensor.id).unwrap();
            let expected = if wide { dtype.unwrap().into() } else { tensor.dtype };
            prop_assert_eq!(placement.delivered_dtype(tensor.dtype), expected);
            prop_assert_eq!(placement.len_bytes() * 8, tensor.shape[0] * expected.bits().unwrap());
        }
    }
}

/// One file with these tensors of a layer: name, type, elements.
fn one_layer(path: &Path, tensors: &[(String, &'static str, usize)]) -> Checkpoint {
    let tensor = |(name, dtype, elements): &(String, &'static str, usize)| {
        let element_bytes = DType::bits(dtype.parse().unwrap()).unwrap() as usize / 8;
        let name = format!("model.layers.0.{name}");
        TestTensor { name, dtype, shape: vec![*elements as u64], bytes: vec![1; elements * element_bytes] }
    };
    write_file(path, &tensors.iter().map(tensor).collect::<Vec<_>>(), 0);
    Checkpoint::open(path).unwrap()
}

/// Weights of one byte per element, each with two scales of four bytes behind it: every weight has another phase.
fn quantized(path: &Path, weights: usize) -> Checkpoint {
    let linear = |number| {
        let tensor = |name: &str, dtype, elements| (format!("part{number}.{name}"), dtype, elements);
        [
            tensor("weight", "F8_E4M3", 1 << 17),
            tensor("weight_scale", "F32", 1),
            tensor("input_scale", "F32", 1),
        ]
    };
    one_layer(path, &(0..weights).flat_map(linear).collect::<Vec<_>>())
}

#[test]
fn scales_travel_with_their_weights() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = quantized(&folder.path().join("model.safetensors"), 7);
    let [exact, in_phase] = compare(&checkpoint, None);
    let count = |plan: &LoadPlan| (copy_count(plan, &plan.layers()[0]), plan.moves(&plan.layers()[0]).len());
    assert_eq!((count(&exact), count(&in_phase)), ((14, 0), (7, 7)));
    insta::assert_snapshot!(format!("{exact:#}\n{in_phase:#}"));
}

#[test]
fn what_belongs_to_a_quantized_weight_keeps_its_type() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = [
        ("down.weight", "F8_E4M3", 256),
        ("down.weight_scale", "F32", 2),
        ("down.bias", "F32", 16),
        ("up.weight", "BF16", 256),
        ("up.weight_scale", "F32", 2),
        ("steps", "I64", 4),
        ("wide", "F64", 4),
    ];
    let tensors = tensors.map(|(name, dtype, elements)| (name.to_owned(), dtype, elements));
    let checkpoint = one_layer(&folder.path().join("model.safetensors"), &tensors);
    let plan = plan(&checkpoint, &limits(Landing::InPhase, Some(FloatType::F16)));
    check(&checkpoint, &plan);
    let placements = plan.layers().iter().flat_map(|layer| plan.placements(layer));
    let narrowed = placements.filter(|placement| placement.cast.is_some());
    let names: Vec<&str> = narrowed.map(|placement| checkpoint.tensor(placement.tensor).name).collect();
    let expected = ["down.bias", "up.weight_scale", "wide"].map(|name| format!("model.layers.0.{name}"));
    assert_eq!(names, expected);
}

/// Moving everything would double the arena: only as many are moved as the appendix may hold.
#[test]
fn a_layer_of_small_tensors_stays_small() {
    let folder = tempfile::tempdir().unwrap();
    let tensors: Vec<_> = (0..300).map(|n| (format!("part{n}.x"), "U8", 20_001 - n % 7 * 3000)).collect();
    let checkpoint = one_layer(&folder.path().join("model.safetensors"), &tensors);
    compare(&checkpoint, None);
}

/// Only what follows in the same file keeps the file's spacing: nothing is gained where it does not.
#[test]
fn neighbours_are_those_of_one_file_without_a_gap() {
    let folder = tempfile::tempdir().unwrap();
    let tensor = |name: &str, len: usize| TestTensor::random(format!("model.layers.{name}"), len, 1);
    // The second file's data begins where the first one's end. A small tensor there is no neighbour of a large one here.
    let (large, small) = (tensor("0.a", 100_001), tensor("0.b", 300));
    let file = |number: u32| folder.path().join(format!("model-0000{number}-of-00002.safetensors"));
    let end = |path: &Path, tensors: &[TestTensor], padding| {
        write_file(path, tensors, padding);
        std::fs::metadata(path).unwrap().len()
    };
    let first_end = end(&file(1), std::slice::from_ref(&large), 0);
    let second_start = end(&file(2), std::slice::from_ref(&small), 0) - 300;
    end(&file(2), std::slice::from_ref(&small), (first_end - second_start) as usize);
    let index = serde_json::json!({ "weight_map": {
        large.name.clone(): "model-00001-of-00002.safetensors", small.name.clone(): "model-00002-of-00002.safetensors",
    }});
    std::fs::write(folder.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert_eq!(
        checkpoint.find(&large.name).unwrap().extent.end(),
        checkpoint.find(&small.name).unwrap().extent.start()
    );
    let [_, in_phase] = compare(&checkpoint, None);
    assert!(in_phase.layers().iter().all(|layer| in_phase.moves(layer).is_empty()));

    // A tensor between them that is not wanted takes no room in the arena.
    let path = folder.path().join("gap.safetensors");
    write_file(&path, &[tensor("0.a", 1024), tensor("0.left_out", 900_000), tensor("0.b", 1024)], 0);
    compare(&Checkpoint::open(&path).unwrap(), None);
}

#[test]
fn only_what_is_small_is_moved() {
    let folder = tempfile::tempdir().unwrap();
    for (len, moves) in [(65_536, 1), (65_537, 0)] {
        let tensors =
            [("a", 9_000_001), ("b", len), ("c", 3)].map(|(name, len)| (name.to_owned(), "U8", len));
        let checkpoint = one_layer(&folder.path().join("model.safetensors"), &tensors);
        let [_, in_phase] = compare(&checkpoint, None);
        let sizes: Vec<u64> =
            in_phase.moves(&in_phase.layers()[0]).iter().map(|step| step.len_bytes).collect();
        assert_eq!(sizes.iter().filter(|&&size| size == len as u64).count(), moves, "{sizes:?}");
    }
}

/// A cut of a read that would fall into an element goes down to its start, and every read still fits its slot.
#[test]
fn elements_at_odd_places_are_not_cut() {
    let folder = tempfile::tempdir().unwrap();
    for (dtype, odd) in [("F32", 3), ("F64", 5), ("F64", 8)] {
        let tensors = [("odd", "U8", odd), ("wide.weight", dtype, 1_600_000)];
        let tensors = tensors.map(|(name, dtype, elements)| (name.to_owned(), dtype, elements));
        let checkpoint = one_layer(&folder.path().join("model.safetensors"), &tensors);
        for landing in LANDINGS {
            for alignment_bytes in [4 * KIB, 256 * KIB] {
                let narrower = if dtype == "F32" { FloatType::Bf16 } else { FloatType::F32 };
                let mut limits = limits(landing, Some(narrower));
                limits.alignment = Alignment::new(alignment_bytes).unwrap();
                let plan = plan(&checkpoint, &limits);
                assert!(plan.reads().len() > 3);
                check(&checkpoint, &plan);
            }
        }
    }
}

#[test]
fn layers_on_a_device_are_no_host_memory() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = quantized(&folder.path().join("model.safetensors"), 7);
    let mut limits = limits(Landing::InPhase, None);
    let plan_of = |limits: &PlanLimits| plan(&checkpoint, limits);
    let on_device = plan_of(&limits);
    let memory = on_device.memory();
    assert_eq!(
        (memory.resident_bytes(), memory.resident_host_bytes()),
        (on_device.layers()[0].arena_bytes, 0)
    );
    limits.resident = ResidentKind::Host;
    let on_host = plan_of(&limits);
    assert_eq!(on_host.memory().resident_host_bytes(), on_host.layers()[0].arena_bytes);
    assert_eq!(on_host.memory().terms(), memory.terms());
    // Moves are held, so they are counted.
    limits.landing = Landing::Exact;
    let plan_bytes =
        |plan: &LoadPlan| plan.memory().terms().iter().find(|term| term.name == "plan").unwrap().bytes;
    let difference = plan_bytes(&on_host) - plan_bytes(&plan_of(&limits));
    let moves = on_host.moves(&on_host.layers()[0]);
    assert_eq!(difference, size_of_val(moves) as u64);
    assert!(difference > 0);
}
