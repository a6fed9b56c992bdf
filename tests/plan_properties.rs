//! Plans of random checkpoints under random limits: every byte is delivered exactly once, to a place of its own,
//! and no read goes beyond a slot.
#![allow(clippy::unwrap_used, clippy::as_conversions, reason = "a test that cannot go on panics")]

mod common;

use common::{TestTensor, write_sharded};
use onelayer::plan::{LoadPlan, PlanError, PlanLimits};
use onelayer::units::{Alignment, MIB};
use onelayer::{Checkpoint, IoMode, Layers, ReadOrder, Window};
use proptest::prelude::*;

#[derive(Debug, Clone)]
struct Limits {
    budget_bytes: u64,
    readers: u32,
    window: u32,
    mmap: bool,
    alignment_log2: u32,
}

fn limits() -> impl Strategy<Value = Limits> {
    (0..80 * MIB, 1..10_u32, 0..5_u32, any::<bool>(), 12..17_u32).prop_map(
        |(budget_bytes, readers, window, mmap, alignment_log2)| Limits {
            budget_bytes,
            readers,
            window,
            mmap,
            alignment_log2,
        },
    )
}

/// Shards of tensors: mostly small, some larger than a slot, some without bytes; names in and out of stacks.
fn shards() -> impl Strategy<Value = Vec<Vec<usize>>> {
    let len = prop_oneof![3 => 0..5000_usize, 3 => Just(4096_usize), 2 => 5000..400_000_usize, 1 => 900_000..1_500_000_usize];
    prop::collection::vec(prop::collection::vec(len, 0..12), 1..4)
}

fn checkpoint(folder: &std::path::Path, shards: &[Vec<usize>]) -> Checkpoint {
    let mut number = 0;
    let shards: Vec<Vec<TestTensor>> = shards
        .iter()
        .map(|lens| {
            let tensors = lens.iter().map(|&len| {
                number += 1;
                let name = match number % 4 {
                    0 => format!("head.{number}"),
                    kind => format!("model.layers.{}.part{kind}.inner.weight", number % 5),
                };
                TestTensor {
                    name: format!("{name}.n{number}"),
                    dtype: "U8",
                    shape: vec![len as u64],
                    bytes: vec![1; len],
                }
            });
            tensors.collect()
        })
        .collect();
    write_sharded(folder, &shards);
    Checkpoint::open(folder).unwrap()
}

/// The order of the files is that of the layers, sorted: the same reads, each once.
fn check_order(checkpoint: &Checkpoint, by_layer: &LoadPlan, by_file: &LoadPlan) {
    let place = |read: &onelayer::plan::ReadOp| (read.request.shard, read.request.payload.start());
    assert_eq!(by_layer.order(), ReadOrder::Layers);
    assert!(by_layer.reads_in_order().eq(by_layer.reads()));
    // With a few bytes more for the plan, a slot fewer: the same cuts nevertheless.
    let mut expected: Vec<_> = by_file.reads().map(|read| place(&read)).collect();
    expected.sort();
    let found: Vec<_> = by_file.reads_in_order().map(|read| place(&read)).collect();
    // A stretch that reads through a hole goes on behind what lies in the hole: that comes after it.
    if found.is_sorted() {
        assert!(by_file.jumps() <= by_layer.jumps() || by_file.reads().len() != by_layer.reads().len());
    }
    let mut sorted = found.clone();
    sorted.sort();
    assert_eq!(sorted, expected, "each read once");
    let mut starts: Vec<_> = by_file
        .layers()
        .iter()
        .filter_map(|layer| layer.reads.clone().map(|index| place(&by_file.read(index))).min())
        .collect();
    starts.sort();
    assert!(
        found.iter().filter(|place| starts.contains(place)).is_sorted(),
        "first reads as the file has them"
    );
    for plan in [by_layer, by_file] {
        let arrived: Vec<_> = plan.arrivals().filter(|(_, place)| place.len_bytes() > 0).collect();
        let mut ids: Vec<_> = arrived.iter().map(|(_, place)| place.tensor).collect();
        ids.sort();
        let with_bytes = checkpoint.tensors().filter(|tensor| !tensor.extent.is_empty());
        assert!(ids.into_iter().eq(with_bytes.map(|tensor| tensor.id)), "each tensor once");
        for (layer, place) in arrived {
            assert!(plan.placements(&plan.layers()[layer]).contains(place));
        }
    }
}

fn check(checkpoint: &Checkpoint, plan: &LoadPlan, limits: &PlanLimits) {
    let memory = plan.memory();
    let slot_bytes = memory.ring().slot_bytes;
    assert!(memory.budgeted_bytes() <= limits.host_budget_bytes);
    assert!(memory.ring().bytes() >= u64::from(memory.ring().slots) * slot_bytes);
    let (readers, slots) = (memory.ring().readers, memory.ring().slots);
    assert!(
        readers * 2 <= slots || readers + 4 <= slots,
        "{readers} readers leave no slot of {slots} for copies"
    );
    // Per tensor: the pieces (offset in the tensor, length) that arrived, found through the arena.
    let mut arrived = vec![0_u64; checkpoint.tensor_count()];
    for layer in plan.layers() {
        let places = plan.placements(layer);
        let mut end = 0;
        for place in places {
            assert!(Alignment::TENSOR.divides(place.arena_offset_bytes));
            assert!(place.arena_offset_bytes >= end, "places do not overlap");
            end = place.arena_offset_bytes + checkpoint.tensor(place.tensor).extent.len_bytes();
        }
        let unit = if end < 2 * MIB { Alignment::PAGE } else { Alignment::HUGE_PAGE };
        assert_eq!(layer.arena_bytes, unit.up(end).unwrap());
        for read in layer.reads.clone().map(|index| plan.read(index)) {
            let request = &read.request;
            assert!(request.extent.contains(request.payload) && !request.payload.is_empty());
            assert!(
                limits.alignment.divides(request.extent.start())
                    && limits.alignment.divides(request.extent.end())
            );
            assert!(request.extent.len_bytes() <= slot_bytes, "a read fits a slot");
            assert!(request.payload.end() <= checkpoint.shard(request.shard).data.end());
            for copy in plan.copies(&read) {
                let file_start = request.extent.start() + copy.slot_offset_bytes;
                assert!(
                    file_start >= request.payload.start()
                        && file_start + copy.len_bytes <= request.payload.end()
                );
                // A copy may carry several neighbours: walk through them.
                let mut done = 0;
                while done < copy.len_bytes {
                    let at = copy.arena_offset_bytes + done;
                    let place = places
                        .iter()
                        .rfind(|place| {
                            place.arena_offset_bytes <= at
                                && !checkpoint.tensor(place.tensor).extent.is_empty()
                        })
                        .expect("every copied byte belongs to a tensor");
                    let tensor = checkpoint.tensor(place.tensor);
                    assert_eq!(tensor.shard, request.shard);
                    let inside = at - place.arena_offset_bytes;
                    assert_eq!(file_start + done, tensor.extent.start() + inside, "the byte of this place");
                    assert_eq!(arrived[tensor.id.index()], inside, "in order, each byte once");
                    let len = (copy.len_bytes - done).min(tensor.extent.len_bytes() - inside);
                    assert!(len > 0);
                    arrived[tensor.id.index()] += len;
                    done += len;
                }
            }
        }
    }
    for tensor in checkpoint.tensors() {
        assert_eq!(arrived[tensor.id.index()], tensor.extent.len_bytes(), "{} is complete", tensor.name);
    }
    assert_eq!(plan.tensor_bytes(), checkpoint.tensor_bytes());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn every_byte_once_and_no_read_beyond_a_slot(shards in shards(), limits in limits()) {
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = checkpoint(folder.path(), &shards);
        let layers = Layers::group(&checkpoint).unwrap();
        let mut plan_limits = PlanLimits::new(limits.budget_bytes);
        plan_limits.readers = limits.readers;
        plan_limits.io = if limits.mmap { IoMode::Mmap } else { IoMode::Direct };
        plan_limits.window = if limits.window == 0 { Window::All } else { Window::Layers(limits.window) };
        plan_limits.alignment = Alignment::new(1 << limits.alignment_log2).unwrap();
        match LoadPlan::build(&checkpoint, &layers, &plan_limits, |_| true) {
            Ok(plan) => {
                check(&checkpoint, &plan, &plan_limits);
                prop_assert!(plan.memory().smallest_budget_bytes() <= limits.budget_bytes);
                // The same input gives the same plan, to the letter.
                let again = LoadPlan::build(&checkpoint, &layers, &plan_limits, |_| true).unwrap();
                prop_assert_eq!(format!("{again:#}"), format!("{plan:#}"));
                plan_limits.order = ReadOrder::Files;
                match LoadPlan::build(&checkpoint, &layers, &plan_limits, |_| true) {
                    Ok(by_file) if limits.window == 0 => check_order(&checkpoint, &plan, &by_file),
                    Ok(by_file) => prop_assert_eq!(by_file, plan),
                    // The permutation takes a few bytes.
                    Err(error) => prop_assert!(error.is_over_budget()),
                }
            }
            Err(PlanError::BudgetTooSmall { smallest_bytes, .. }) => {
                prop_assert!(smallest_bytes > limits.budget_bytes);
                plan_limits.host_budget_bytes = smallest_bytes;
                let plan = LoadPlan::build(&checkpoint, &layers, &plan_limits, |_| true).unwrap();
                check(&checkpoint, &plan, &plan_limits);
            }
            Err(error) => return Err(TestCaseError::fail(error.to_string())),
        }
    }
}

/// The promise does not depend on the model: nor does the plan, which is a part of it.
#[test]
fn a_plan_grows_with_tensors_and_not_with_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let open = |bytes: u64| {
        let header =
            format!("{{\"x\":{{\"dtype\":\"U8\",\"shape\":[{bytes}],\"data_offsets\":[0,{bytes}]}}}}");
        let path = folder.path().join(format!("{bytes}.safetensors"));
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend_from_slice(header.as_bytes());
        std::fs::write(&path, &file).unwrap();
        // Sparse: no disk holds this.
        std::fs::OpenOptions::new()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(file.len() as u64 + bytes)
            .unwrap();
        Checkpoint::open(path).unwrap()
    };
    let plan = |checkpoint: &Checkpoint| {
        let layers = Layers::group(checkpoint).unwrap();
        LoadPlan::build(checkpoint, &layers, &PlanLimits::new(5 * MIB), |_| true).unwrap()
    };
    let (small, large) = (plan(&open(1)), plan(&open(4 << 40)));
    let term = |plan: &LoadPlan| plan.memory().terms().iter().find(|term| term.name == "plan").unwrap().bytes;
    assert_eq!(term(&small), term(&large));
    assert_eq!(large.memory().smallest_budget_bytes(), 5 * MIB);
    assert_eq!(large.reads().len() as u64, (4 << 40) / MIB + 1);
    assert_eq!(large.reads().map(|read| read.request.payload.len_bytes()).sum::<u64>(), 4 << 40);
}

/// What a disk moves in the time of one more request is read through, and more is not.
#[test]
fn small_gaps_are_read_through() {
    let folder = tempfile::tempdir().unwrap();
    for (gap_bytes, read_count) in [(0, 1), (100, 1), (64 << 10, 1), ((64 << 10) + 1, 2)] {
        let tensor = |name: &str, len: usize| TestTensor::random(format!("layer.{name}"), len, 1);
        let path = folder.path().join(format!("{gap_bytes}.safetensors"));
        let tensors = [tensor("a", 5000), tensor("left_out", gap_bytes), tensor("b", 700)];
        common::write_file(&path, &tensors, 0);
        let checkpoint = Checkpoint::open(&path).unwrap();
        let layers = Layers::group(&checkpoint).unwrap();
        let left_out = checkpoint.find("layer.left_out").unwrap().id;
        let limits = PlanLimits::new(5 * MIB);
        let plan = LoadPlan::build(&checkpoint, &layers, &limits, |tensor| tensor != left_out).unwrap();
        assert_eq!(plan.layers().len(), 1);
        assert_eq!(plan.reads().count(), read_count, "{gap_bytes}");
        let copies: u64 =
            plan.reads().flat_map(|read| plan.copies(&read).collect::<Vec<_>>()).map(|c| c.len_bytes).sum();
        assert_eq!(copies, 5700, "what lies in the gap goes nowhere");
    }
}
