//! Plans of random checkpoints under random limits: every byte is delivered exactly once, to a
//! place of its own, and no read goes beyond a slot.
#![allow(clippy::unwrap_used, clippy::as_conversions, reason = "a test that cannot go on panics")]

use crate::plan_check::{check, check_order};
use onelayer::plan::{LoadPlan, PlanError, PlanLimits, TermKind};
use onelayer::units::{Alignment, MIB};
use onelayer::{Checkpoint, IoMode, Layers, ReadOrder, Window};
use onelayer_testing::{TestTensor, write_sharded};
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

/// Shards of tensors: mostly small, some larger than a slot, some without bytes; names in and out
/// of stacks.
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

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn every_byte_once_and_no_read_beyond_a_slot(shards in shards(), limits in limits()) {
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = checkpoint(folder.path(), &shards);
        let layers = Layers::group(&checkpoint).unwrap();
        let mut plan_limits = PlanLimits::new(limits.budget_bytes);
        plan_limits.options.readers = Some(limits.readers);
        plan_limits.options.io = if limits.mmap { IoMode::Mmap } else { IoMode::Direct };
        plan_limits.options.window = if limits.window == 0 { Window::All } else { Window::Layers(limits.window) };
        plan_limits.alignment = Alignment::new(1 << limits.alignment_log2).unwrap();
        match LoadPlan::build(&checkpoint, &layers, &plan_limits, |_| true) {
            Ok(plan) => {
                check(&checkpoint, &plan, &plan_limits, &|_| true);
                prop_assert!(plan.memory().smallest_budget_bytes() <= limits.budget_bytes);
                // The same input gives the same plan, to the letter.
                let again = LoadPlan::build(&checkpoint, &layers, &plan_limits, |_| true).unwrap();
                prop_assert_eq!(format!("{again:#}"), format!("{plan:#}"));
                plan_limits.options.order = ReadOrder::Files;
                match LoadPlan::build(&checkpoint, &layers, &plan_limits, |_| true) {
                    Ok(by_file) if limits.window == 0 => check_order(&checkpoint, &plan, &by_file, &|_| true),
                    Ok(by_file) => prop_assert_eq!(by_file, plan),
                    // The permutation takes a few bytes.
                    Err(error) => prop_assert!(error.is_over_budget()),
                }
            }
            Err(PlanError::BudgetTooSmall { smallest_bytes, .. }) => {
                prop_assert!(smallest_bytes > limits.budget_bytes);
                plan_limits.options.host_budget_bytes = smallest_bytes;
                let plan = LoadPlan::build(&checkpoint, &layers, &plan_limits, |_| true).unwrap();
                check(&checkpoint, &plan, &plan_limits, &|_| true);
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
    let term = |plan: &LoadPlan| plan.memory().bytes_of(TermKind::Plan);
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
        onelayer_testing::write_file(&path, &tensors, 0);
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
