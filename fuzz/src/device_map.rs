//! A device map is accepted or refused. An accepted one is the same after writing and reading it.
//! The device of a tensor is that of its longest matching entry, and a plan places each layer
//! accordingly.
//!
//! Input: JSON.

#![allow(clippy::unwrap_used, reason = "a check that cannot go on panics")]

use onelayer::{Checkpoint, Layers};
use onelayer_fit::{CacheType, Demand, DeviceMap, Limits, Tier, Weights, Workload};

use super::scratch::Scratch;
use onelayer_testing::safetensors_file::FileBuilder;

/// The checkpoint of the maps.
struct Model {
    checkpoint: Checkpoint,
    layers: Layers,
    demand: Demand,
}

impl Model {
    fn new() -> Self {
        let mut file = FileBuilder::new().bytes_tensor("a.embed.weight", 40);
        for layer in 0..3 {
            for part in ["x", "y.z", "norm"] {
                file = file.bytes_tensor(&format!("a.b.{layer}.{part}.weight"), 16);
            }
        }
        let file = file.bytes_tensor("head", 40);
        let checkpoint = Checkpoint::open(Scratch::new().holding(&file.build())).unwrap();
        let layers = Layers::group(&checkpoint).unwrap();
        let demand = Demand::of(&checkpoint, &layers, None, Weights::AsStored);
        Self { checkpoint, layers, demand }
    }
}

/// Checks one input.
pub fn check(data: &[u8]) {
    thread_local!(static MODEL: Model = Model::new());
    let map = match DeviceMap::parse(data) {
        Ok(map) => map,
        Err(error) => return assert!(error.is_bad_map(), "{error}"),
    };
    assert!(serde_json::from_slice::<serde_json::Value>(data).is_ok(), "what is no JSON is no map");
    assert_eq!(DeviceMap::parse(map.to_json().as_bytes()).unwrap(), map);
    assert_eq!(DeviceMap::of_entries(map.entries().to_vec()).unwrap(), map, "no name twice");
    for (name, tier) in map.entries() {
        assert_eq!(map.tier_of(name), Some(*tier));
        check_tier(&map, &format!("{name}.weight"));
        check_tier(&map, &name.replace('.', ""));
    }
    MODEL.with(|model| check_plan(model, &map));
}

/// Finds the longest matching entry by trying all.
fn check_tier(map: &DeviceMap, tensor: &str) {
    let is_around = |key: &str| {
        key.is_empty() || tensor == key || tensor.strip_prefix(key).is_some_and(|rest| rest.starts_with('.'))
    };
    let around = map.entries().iter().filter(|(key, _)| is_around(key));
    let expected = around.max_by_key(|(key, _)| key.len()).map(|entry| entry.1);
    assert_eq!(map.tier_of(tensor), expected, "{tensor:?}");
}

/// Checks the map with a checkpoint.
fn check_plan(model: &Model, map: &DeviceMap) {
    let Model { checkpoint, layers, demand } = model;
    let workload = Workload { context_tokens: 0, batch: 1, cache_type: CacheType::Half };
    let limits = [
        Limits::default(),
        Limits { device_bytes: vec![150, 100], host_bytes: Some(120), staging_bytes: 10 },
    ];
    for limits in &limits {
        let plan = match demand.check(map, checkpoint, layers, limits, &workload) {
            Ok(plan) => plan,
            Err(errors) => {
                assert!(!errors.is_empty());
                errors.iter().for_each(|error| assert!(!error.to_string().is_empty()));
                continue;
            }
        };
        assert_eq!(plan.tiers.len(), layers.as_slice().len());
        for tensor in checkpoint.tensors() {
            assert_eq!(map.tier_of(tensor.name), Some(plan.tiers[layers.position_of(tensor.id)]));
        }
        for (layer, tier) in layers.as_slice().iter().zip(&plan.tiers) {
            let is_there =
                |device: u32| limits.device_bytes.is_empty() || usize::try_from(device).unwrap() < 2;
            assert!(!matches!(tier, Tier::Device(device) if !is_there(*device)), "{}", layer.id);
        }
        let written = DeviceMap::of(&plan, demand, checkpoint, layers);
        let again = demand.check(&written, checkpoint, layers, limits, &workload).unwrap();
        assert_eq!(again.tiers, plan.tiers, "the map of a plan says what the plan says");
    }
}
