//! Small cases worked out by hand; `tests/fit/inventories.rs` has the large ones.

use super::super::cache::{CacheKind, CacheModel, CacheType, LayerCache};
use super::*;
use onelayer::layers::LayerId;

const NO_CONTEXT: Workload = Workload { context_tokens: 0, batch: 1, cache_type: CacheType::Half };

/// Layers of such weights, each of which keeps one byte a token of fp8.
fn demand(weights: &[u64]) -> Demand {
    let unit = |(number, weight_bytes): (usize, &u64)| Unit {
        id: LayerId::new(&format!("layers.{number}")),
        weight_bytes: *weight_bytes,
        landing_bytes: *weight_bytes,
        sub_unit_bytes: 0,
        cache: Some(LayerCache::attention(CacheKind::MultiHead, 1, None)),
        tied_to: None,
    };
    let caches = vec![LayerCache::attention(CacheKind::MultiHead, 1, None); weights.len()];
    Demand {
        units: weights.iter().enumerate().map(unit).collect(),
        cache: CacheModel::Known(caches.into()),
        activation: None,
        ties: Box::default(),
        tied_head: None,
        context_max: None,
    }
}

fn limits(device_bytes: &[u64], host_bytes: Option<u64>) -> Limits {
    Limits { device_bytes: device_bytes.to_vec(), host_bytes, staging_bytes: 0 }
}

/// `0`, `1` for GPUs, `c` and `d` for host and disk.
fn places(plan: &FitPlan) -> String {
    let letter = |tier: &Tier| match tier {
        Tier::Device(device) => device.to_string(),
        Tier::Host => "c".to_owned(),
        Tier::Disk => "d".to_owned(),
    };
    plan.tiers.iter().map(letter).collect()
}

fn placed(weights: &[u64], device_bytes: &[u64], host_bytes: Option<u64>) -> String {
    places(&demand(weights).place(&limits(device_bytes, host_bytes), &NO_CONTEXT).unwrap())
}

#[test]
fn gpus_come_first_in_order_and_nothing_is_reserved_if_all_fits() {
    assert_eq!(placed(&[10, 10, 10, 10], &[20, 20], None), "0011");
    assert_eq!(placed(&[10, 10, 10, 10], &[40], None), "0000");
    assert_eq!(placed(&[10, 10], &[], None), "cc");
}

#[test]
fn the_first_gpu_keeps_room_for_what_passes_through_it() {
    // 39 hold three; with a fourth elsewhere there is room for two and the one on its way.
    assert_eq!(placed(&[10, 10, 10, 10], &[39], None), "00cc");
    assert_eq!(placed(&[10, 10, 10, 30], &[39], None), "cccc");
    assert_eq!(placed(&[10, 10, 10, 30], &[40], None), "0ccc");
    assert_eq!(placed(&[10, 10, 10, 10], &[30, 9], None), "00cc");
}

#[test]
fn a_layer_too_large_for_every_gpu_does_not_take_the_rest_along() {
    assert_eq!(placed(&[10, 60, 10, 10], &[80, 10], None), "0001");
    assert_eq!(placed(&[60, 10, 10, 10], &[59, 59], None), "cccc");
}

#[test]
fn what_the_host_cannot_hold_goes_to_the_disk() {
    assert_eq!(placed(&[10, 10, 10, 10], &[20], Some(20)), "0ccd");
    assert_eq!(placed(&[10, 10, 10, 10], &[20], Some(0)), "0ddd");
    assert_eq!(placed(&[10, 30, 10, 10], &[40], Some(20)), "0dcc");
    // The host computes: it keeps room for a layer from the disk.
    assert_eq!(placed(&[10, 10, 10, 10], &[], Some(30)), "ccdd");
}

#[test]
fn what_layers_keep_of_the_context_is_where_they_compute() {
    let workload = Workload { context_tokens: 5, batch: 1, cache_type: CacheType::Fp8 };
    let plan = demand(&[10, 10, 10, 10]).place(&limits(&[60], None), &workload).unwrap();
    assert_eq!(places(&plan), "0000");
    let plan = demand(&[10, 10, 10, 10]).place(&limits(&[50], None), &workload).unwrap();
    // 10 + 10 of weights, 4 x 5 of caches, and 10 for the layer on its way.
    assert_eq!(places(&plan), "00cc");
    assert_eq!(
        (plan.uses[0].needed_bytes(), plan.uses[0].cache_bytes, plan.uses[1].cache_bytes),
        (50, 20, 0)
    );
}

#[test]
fn room_that_is_left_on_the_first_gpu_is_used() {
    // 100 is left after room for one of 30 that travels: a small one behind those that do not fit
    // stays.
    assert_eq!(placed(&[10, 30, 30, 30, 30, 5], &[110], None), "000cc0");
    // 70 of 100: the one of 15 in front gives up its place, and a third of 25 comes in.
    assert_eq!(placed(&[15, 25, 25, 25, 25, 25], &[105], None), "c000cc");
    // For a gain of next to nothing the order stays.
    assert_eq!(placed(&[100, 101, 101], &[202], None), "0cc");
}

#[test]
fn shared_tensors_stay_together() {
    let mut tied = demand(&[10, 10, 10, 0]);
    tied.units[3].tied_to = Some(0);
    tied.units[3].cache = None;
    assert_eq!(places(&tied.place(&limits(&[10, 20], None), &NO_CONTEXT).unwrap()), "0110");
    assert_eq!(places(&tied.place(&limits(&[20], None), &NO_CONTEXT).unwrap()), "0cc0");
    // The head's own part does not fit beside the embedding: both move.
    tied.units[3].weight_bytes = 11;
    tied.units[3].landing_bytes = 11;
    assert_eq!(places(&tied.place(&limits(&[41], Some(0)), &NO_CONTEXT).unwrap()), "0000");
    let plan = tied.place(&limits(&[20], None), &NO_CONTEXT).unwrap();
    assert_eq!(plan.tiers[0], plan.tiers[3]);
}

/// The last of three that share a tensor does not fit: all three leave the GPU, and what they leave
/// can be used.
#[test]
fn no_tie_is_split_by_what_comes_last() {
    let mut tied = demand(&[100, 0, 50, 10, 5]);
    for alias in [1, 3] {
        tied.units[alias].tied_to = Some(0);
        tied.units[alias].cache = None;
    }
    let needs: Vec<Need> = tied.units.iter().map(|unit| Need::of(unit, &NO_CONTEXT)).collect();
    assert_eq!(fill_rooms(&needs, 0, &[Some(155)]), [None, None, Some(0), None, Some(0)]);
    assert_eq!(fill_rooms(&needs, 2, &[Some(155)]), [None, None, Some(2), None, Some(2)]);
    // In the room that is given back: 155 would not hold all of these behind the tie.
    tied.units[4].weight_bytes = 100;
    let needs: Vec<Need> = tied.units.iter().map(|unit| Need::of(unit, &NO_CONTEXT)).collect();
    assert_eq!(fill_rooms(&needs, 0, &[Some(155)]), [None, None, Some(0), None, Some(0)]);
    tied.units[4].weight_bytes = 5;
    let plan = tied.place(&limits(&[155], None), &NO_CONTEXT).unwrap();
    assert_eq!(places(&plan), "cc0c0");
}

#[test]
fn a_batch_beyond_all_numbers_is_refused() {
    let workload = Workload { context_tokens: u64::MAX / 8, batch: u64::MAX / 8, cache_type: CacheType::F32 };
    let error = demand(&[10, 30]).place(&limits(&[], Some(100)), &workload).unwrap_err();
    assert!(error.is_over_budget(), "{error}");
}

#[test]
fn a_refusal_names_the_place_and_what_it_needs() {
    let error = demand(&[10, 30]).place(&limits(&[5], Some(20)), &NO_CONTEXT).unwrap_err();
    assert!(error.is_over_budget());
    assert!(error.to_string().starts_with("the host needs at least 30 B"), "{error}");
}

#[test]
fn the_largest_context_is_the_last_that_fits() {
    let demand = demand(&[10, 10]);
    let (limits, less) = (limits(&[30], None), limits(&[19], None));
    // 20 of weights leave 10 for two layers.
    assert_eq!(
        demand.largest_context(
            &limits,
            &Workload { batch: 1, cache_type: CacheType::Fp8, ..NO_CONTEXT },
            true
        ),
        Some(5)
    );
    let workload = Workload { context_tokens: 2, batch: 1, cache_type: CacheType::Fp8 };
    assert_eq!(demand.largest_batch(&limits, &workload, true), Some(2));
    assert_eq!(demand.largest_batch(&limits, &NO_CONTEXT, true), None);
    let bounded = Demand { context_max: Some(3), ..demand.clone() };
    assert_eq!(bounded.largest_context(&limits, &workload, true), Some(3));
    assert_eq!(demand.largest_context(&less, &workload, true), None);
}
