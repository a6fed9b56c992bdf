//! The story: whatever the model, a plan puts every tensor in one place, splits no layer and keeps
//! the limits.
//!
//! The models are those of fixtures/inventories with known shapes, as files of the right length
//! without a byte in them: only headers are read. What counts as a layer is also asked of the
//! authors of the models, who knew nothing of our grouping.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test that cannot go on panics, or says so")]

#[allow(dead_code, reason = "each test file uses its own part")]
use crate::read;

use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::read::Inventory;
use onelayer::checkpoint::TensorId;
use onelayer::layers::{Layer, LayerKind};
use onelayer::{Checkpoint, Layers};
use onelayer_fit::{CacheType, Demand, DeviceMap, FitPlan, Limits, Tier, Weights, Workload};
use onelayer_testing::skipped;

/// Bytes of an element: all are bf16.
const ELEMENT_BYTES: u64 = 2;
/// Nothing but weights, as accelerate sees it.
const WEIGHTS_ONLY: Workload = Workload { context_tokens: 0, batch: 1, cache_type: CacheType::Half };
/// Its author calls a whole stage a layer, we do not; see docs/layers.md.
const FINER_THAN_ITS_AUTHOR: &str = "swinv2";

struct Model {
    name: String,
    /// Numbered ones: those that claim to be layers.
    no_split_paths: Vec<String>,
    checkpoint: Checkpoint,
    layers: Layers,
    demand: Demand,
}

/// All inventories whose shapes are known.
fn models() -> Vec<Model> {
    let path = onelayer_testing::repository().join("fixtures/inventories");
    let folders = read::read_tree(path.as_ref()).unwrap();
    let place = tempfile::tempdir().unwrap();
    let inventories = folders.into_iter().flat_map(|folder| folder.inventories);
    let known = inventories.filter(|inventory| inventory.tensors.iter().all(|(_, shape)| shape.is_some()));
    // The largest say no more than their smaller relatives, and cost most of the time.
    let small = known.filter(|inventory| inventory.tensors.len() < 1500);
    small.map(|inventory| opened(inventory, place.path())).collect()
}

fn opened(inventory: Inventory, place: &Path) -> Model {
    let path = place.join("model.safetensors");
    let (mut header, mut end_bytes) = (serde_json::Map::new(), 0_u64);
    for (name, shape) in &inventory.tensors {
        let shape = shape.as_ref().unwrap();
        let start_bytes = end_bytes;
        end_bytes += shape.iter().product::<u64>() * ELEMENT_BYTES;
        let entry =
            serde_json::json!({ "dtype": "BF16", "shape": shape, "data_offsets": [start_bytes, end_bytes] });
        header.insert(name.clone(), entry);
    }
    let header = serde_json::to_vec(&header).unwrap();
    let header_bytes = u64::try_from(header.len()).unwrap();
    let mut file = File::create(&path).unwrap();
    file.write_all(&header_bytes.to_le_bytes()).unwrap();
    file.write_all(&header).unwrap();
    file.set_len(8 + header_bytes + end_bytes).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let layers = Layers::group(&checkpoint).unwrap();
    let demand = Demand::of(&checkpoint, &layers, None, Weights::AsStored);
    let paths = inventory.indexed_paths().into_iter().map(str::to_owned).collect();
    Model { name: inventory.name, no_split_paths: paths, checkpoint, layers, demand }
}

impl Model {
    /// Two GPUs, a host that is too small, and the disk.
    fn limits(&self, percent_of_weights: u64) -> Limits {
        let share = self.checkpoint.tensor_bytes() / 100 * percent_of_weights;
        let largest_bytes = self.demand.units.iter().map(|unit| unit.weight_bytes).max().unwrap();
        let device_bytes = vec![share, share / 2];
        // Where no GPU can compute, the host has to hold at least one layer.
        Limits {
            device_bytes,
            host_bytes: Some(share / 4 + largest_bytes + (1 << 20)),
            staging_bytes: 1 << 20,
        }
    }

    /// The one entry that each tensor falls under, looked for among all of them.
    fn tiers_by_hand(&self, map: &DeviceMap) -> Vec<Tier> {
        let place = |name: &str| {
            let is_around =
                |key: &str| name == key || name.strip_prefix(key).is_some_and(|rest| rest.starts_with('.'));
            let found: Vec<Tier> =
                map.entries().iter().filter(|(key, _)| is_around(key)).map(|entry| entry.1).collect();
            assert_eq!(found.len(), 1, "{}: {name} is in {} entries", self.name, found.len());
            found[0]
        };
        self.checkpoint.tensors().map(|tensor| place(tensor.name)).collect()
    }

    /// Bytes on each tier, and the largest layer that is on no GPU.
    fn bytes_by_hand(&self, tiers: &[Tier], wanted: Tier) -> u64 {
        let tensors = self.checkpoint.tensors().zip(tiers);
        tensors.filter(|(_, tier)| **tier == wanted).map(|(tensor, _)| tensor.extent.len_bytes()).sum()
    }

    /// What has to be together on the device that computes: an element of a stack; outside of them,
    /// a module.
    fn landing_bytes(&self, layer: &Layer) -> u64 {
        let bytes = |tensor: &TensorId| self.checkpoint.tensor(*tensor).extent.len_bytes();
        if matches!(layer.kind, LayerKind::Member { .. }) {
            return layer.tensors.iter().map(bytes).sum();
        }
        let module = |tensor: &TensorId| {
            let name = self.checkpoint.tensor(*tensor).name;
            name.rsplit_once('.').map_or("", |(module, _)| module)
        };
        let of_module = |wanted: &TensorId| -> u64 {
            layer.tensors.iter().filter(|tensor| module(tensor) == module(wanted)).map(bytes).sum()
        };
        layer.tensors.iter().map(of_module).max().unwrap_or(0)
    }

    fn check(&self, limits: &Limits, plan: &FitPlan) {
        let name = &self.name;
        let map = DeviceMap::of(plan, &self.demand, &self.checkpoint, &self.layers);
        let tiers = self.tiers_by_hand(&map);
        for layer in self.layers.as_slice() {
            let mut of_layer = layer.tensors.iter().map(|tensor| tiers[tensor.index()]);
            let first = of_layer.next();
            assert!(of_layer.all(|tier| Some(tier) == first), "{name}: {} is split", layer.id);
        }
        if name != FINER_THAN_ITS_AUTHOR {
            self.check_authors_layers(&tiers);
        }
        let elsewhere = |layer: &&Layer| {
            layer.tensors.first().is_some_and(|id| !matches!(tiers[id.index()], Tier::Device(_)))
        };
        let largest_elsewhere =
            self.layers.as_slice().iter().filter(elsewhere).map(|layer| self.landing_bytes(layer));
        let largest_elsewhere = largest_elsewhere.max().unwrap_or(0);
        for (device, limit_bytes) in (0_u32..).zip(&limits.device_bytes) {
            let bytes = self.bytes_by_hand(&tiers, Tier::Device(device));
            let landing_bytes = if plan.executor == Tier::Device(device) { largest_elsewhere } else { 0 };
            assert!(
                bytes + landing_bytes <= *limit_bytes,
                "{name}: GPU {device} holds {bytes} of {limit_bytes}"
            );
        }
        let host_bytes = self.bytes_by_hand(&tiers, Tier::Host) + limits.staging_bytes;
        assert!(
            limits.host_bytes.is_none_or(|limit| host_bytes <= limit),
            "{name}: {host_bytes} on the host"
        );
        let returned = DeviceMap::parse(map.to_json().as_bytes()).unwrap();
        let checked = self.demand.check(&returned, &self.checkpoint, &self.layers, limits, &WEIGHTS_ONLY);
        assert_eq!(checked.as_ref(), Ok(plan), "{name}: what is written is what is read");
    }

    fn check_authors_layers(&self, tiers: &[Tier]) {
        for path in &self.no_split_paths {
            let prefix = format!("{path}.");
            let inside = self.checkpoint.tensors().filter(|tensor| tensor.name.starts_with(&prefix));
            let mut of_path = inside.map(|tensor| tiers[tensor.id.index()]);
            let first = of_path.next();
            assert!(of_path.all(|tier| Some(tier) == first), "{}: {path} is split", self.name);
        }
    }
}

#[test]
fn every_tensor_once_no_layer_split_limits_kept() {
    let models = models();
    assert!(models.len() >= 200, "{}", models.len());
    for model in &models {
        for percent in [0, 3, 20, 50, 80, 130] {
            let limits = model.limits(percent);
            let plan = model.demand.place(&limits, &WEIGHTS_ONLY).unwrap();
            model.check(&limits, &plan);
        }
        let all = model.demand.place(&model.limits(130), &WEIGHTS_ONLY).unwrap();
        assert!(all.is_all_on_devices(), "{}: it fits, and is not there", model.name);
    }
}

/// A line for accelerate: a model, and what its first GPU may hold.
fn question(model: &Model, limit_bytes: u64) -> String {
    let tensors: serde_json::Map<String, serde_json::Value> =
        model.checkpoint.tensors().map(|tensor| (tensor.name.to_owned(), tensor.shape.into())).collect();
    // What accelerate is told not to split is what we do not split.
    let members =
        model.layers.as_slice().iter().filter(|layer| matches!(layer.kind, LayerKind::Member { .. }));
    let no_split: Vec<&str> = members.map(|layer| layer.id.as_str()).collect();
    let name = &model.name;
    serde_json::json!({ "name": name, "tensors": tensors, "no_split": no_split, "limit_bytes": limit_bytes })
        .to_string()
}

#[test]
fn the_first_gpu_is_used_as_well_as_by_accelerate() {
    let python = std::env::var("ONELAYER_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let imports = Command::new(&python).args(["-c", "import accelerate, torch"]).output();
    if !imports.is_ok_and(|output| output.status.success()) {
        skipped(format_args!("{python} has no torch and accelerate: no map was compared with theirs"));
        return;
    }
    // Every second: accelerate takes its time.
    let models: Vec<Model> =
        models().into_iter().filter(|model| model.layers.stacks().len() == 1).step_by(2).collect();
    let limits = |model: &Model| [35, 75].map(|percent| model.checkpoint.tensor_bytes() / 100 * percent);
    let mut child = Command::new(&python)
        .arg(onelayer_testing::repository().join("scripts/accelerate_first_gpu.py"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        // It warns of GPUs that are not there, a line for each model.
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let questions: Vec<String> =
        models.iter().flat_map(|model| limits(model).map(|limit| question(model, limit))).collect();
    let mut stdin = child.stdin.take().unwrap();
    let writer = std::thread::spawn(move || stdin.write_all((questions.join("\n") + "\n").as_bytes()));
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap().unwrap();
    assert!(output.status.success(), "accelerate failed");
    let answers: Vec<serde_json::Value> = output
        .stdout
        .split(|byte| *byte == b'\n')
        .filter_map(|line| serde_json::from_slice(line).ok())
        .collect();
    let asked: Vec<(&Model, u64)> =
        models.iter().flat_map(|model| limits(model).map(|limit| (model, limit))).collect();
    assert_eq!(answers.len(), asked.len());
    let (mut worse, mut better) = (Vec::new(), 0);
    for ((model, limit_bytes), answer) in asked.into_iter().zip(answers) {
        let limits = Limits { device_bytes: vec![limit_bytes], host_bytes: None, staging_bytes: 0 };
        let plan = model.demand.place(&limits, &WEIGHTS_ONLY).unwrap();
        let (ours, theirs) = (plan.uses[0].weight_bytes, answer["first_gpu_bytes"].as_u64().unwrap());
        assert_eq!(answer["name"], model.name.as_str());
        better += u32::from(ours > theirs);
        if ours < theirs - theirs / 20 {
            worse.push(format!("{}: {ours} of {limit_bytes}, accelerate {theirs}", model.name));
        }
    }
    println!(
        "{} models, two limits each: more than accelerate on the first GPU {better} times",
        models.len()
    );
    assert!(models.len() >= 50, "{}", models.len());
    assert!(worse.is_empty(), "less than 95 % of accelerate's:\n{}", worse.join("\n"));
}
