//! Loads by a device map: every tensor where the map says, one budget, one receipt; and maps that
//! cannot be kept.
//!
//! What needs GPUs runs on the simulated driver, in a process of its own: the tests that say
//! `scenario` do nothing by themselves. The measurement of memory is a process of its own too.
#![allow(clippy::print_stdout, reason = "a scenario tells its parent")]
#![allow(clippy::unwrap_used, clippy::as_conversions, reason = "a test that cannot go on panics")]

use onelayer::load::LoadError;
use onelayer::plan::PlanError;
use onelayer::{Checkpoint, DType, IoMode, LayerId, Loader, LoaderBuilder, Part, Quantisation, Target};
use onelayer_fit::{DeviceMap, FitError, ModelConfig, Tier};
use onelayer_fit::{PlacedError, PlacedLoader, PlacedModel};
use onelayer_probe::Procfs;
use onelayer_testing::{TestTensor, small_decoder, write_file, write_sharded};

const MIB: u64 = 1 << 20;

/// A checkpoint of a small decoder, and what is in it.
struct Case {
    _folder: tempfile::TempDir,
    checkpoint: Checkpoint,
    tensors: Vec<TestTensor>,
}

impl Case {
    fn new(layers: usize, unit: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let shards = small_decoder(layers, unit);
        write_sharded(folder.path(), &shards);
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        Self { _folder: folder, checkpoint, tensors: shards.concat() }
    }

    fn placed(&self, map: &str) -> Result<PlacedLoader, PlacedError> {
        PlacedLoader::new(settings(), &DeviceMap::parse(map.as_bytes()).unwrap(), &self.checkpoint, None)
    }

    fn faults(&self, map: &str) -> Vec<FitError> {
        match self.placed(map).unwrap_err() {
            PlacedError::Map { faults } => faults,
            other => panic!("{other}"),
        }
    }

    /// Every tensor, byte by byte, wherever it is.
    fn check(&self, model: &PlacedModel) {
        for tensor in &self.tensors {
            let found = model.tensor(&tensor.name).unwrap();
            assert_eq!((found.name(), found.shape()), (&*tensor.name, &*tensor.shape));
            let mut bytes = vec![0; usize::try_from(found.len_bytes()).unwrap()];
            found.read(0, &mut bytes).unwrap();
            assert!(bytes == tensor.bytes, "{} on {} is wrong", tensor.name, found.tier());
            assert!(found.read(1, &mut bytes).is_err() || bytes.is_empty(), "beyond its end");
        }
    }

    fn bytes_below(&self, prefix: &str) -> u64 {
        let below = self.tensors.iter().filter(|tensor| tensor.name.starts_with(prefix));
        below.map(|tensor| tensor.bytes.len() as u64).sum()
    }
}

fn settings() -> LoaderBuilder {
    Loader::builder(Target::Host).host_budget(6 * MIB)
}

const HOST_AND_DISK: &str = r#"{"model.layers": "cpu", "model.layers.1": "disk", "": "disk"}"#;

#[test]
fn host_and_disk_have_the_bytes_of_the_files() {
    let case = Case::new(3, 100_000);
    let loader = case.placed(HOST_AND_DISK).unwrap();
    let plan = loader.plan().unwrap();
    let mut model = loader.load().unwrap();
    case.check(&model);

    let on_host = case.bytes_below("model.layers.0.") + case.bytes_below("model.layers.2.");
    assert_eq!((plan.steps().len(), plan.tensor_bytes()), (1, on_host));
    assert_eq!(plan.of(Tier::Host).unwrap().tensor_bytes(), on_host);
    assert!(plan.of(Tier::Device(0)).is_none());
    assert_eq!(plan.disk().tensor_bytes, case.bytes_below("") - on_host);
    assert_eq!(model.resident_bytes(), plan.resident_host_bytes());
    let report = model.report();
    assert_eq!((report.len(), report[0].tier, report[0].load.tensor_bytes), (1, Tier::Host, on_host));
    assert!(report[0].load.read_bytes >= on_host && report[0].load.read_bytes <= plan.read_bytes());

    let tensor = model.tensor("model.layers.0.mlp.up_proj.weight").unwrap();
    assert!(tensor.resident().unwrap().as_bytes().is_some());
    drop(tensor);
    assert!(model.tensor("lm_head.weight").unwrap().resident().is_none());
    assert_eq!(model.tier_of(&LayerId::new("model.layers.1")), Some(Tier::Disk));
    let near = model.tensor("model.layers.0.mlp.up_proj.weigh").unwrap_err().to_string();
    assert!(near.contains("did you mean"), "{near}");

    // A layer on the disk takes nothing, one that never was is an error.
    let nothing = model.unload(Part::Prefix("model.layers.1")).unwrap();
    assert_eq!(nothing.asked_bytes, 0);
    assert!(matches!(model.unload(Part::Prefix("model.layer")), Err(LoadError::NotFound { .. })));
    let first = model.unload(Part::Prefix("model.layers.0")).unwrap();
    assert!(first.layers == 1 && first.is_complete(), "{first}");
    assert!(model.tensor("model.layers.0.mlp.up_proj.weight").is_err());
    let rest = model.unload(Part::All).unwrap();
    assert!(rest.layers == 1 && rest.is_complete() && model.resident_bytes() == 0, "{rest}");
    assert!(model.unload_all().asked_bytes == 0);
    assert!(model.tensor("model.layers.1.mlp.up_proj.weight").is_ok(), "the disk still has it");
}

/// A small decoder whose weights have rows to quantise.
fn decoder_with_rows() -> Vec<TestTensor> {
    let mut tensors = vec![bf16("model.embed_tokens.weight".to_owned(), &[40, 64])];
    for layer in 0..2 {
        for (rest, shape) in
            [("self_attn.q_proj", &[64, 64][..]), ("mlp.up_proj", &[96, 64]), ("norm", &[64])]
        {
            tensors.push(bf16(format!("model.layers.{layer}.{rest}.weight"), shape));
        }
    }
    tensors.push(bf16("lm_head.weight".to_owned(), &[40, 64]));
    tensors
}

fn bf16(name: String, shape: &[u64]) -> TestTensor {
    // Ones, which every form keeps.
    let count = usize::try_from(shape.iter().product::<u64>()).unwrap();
    TestTensor { name, dtype: "BF16", shape: shape.to_vec(), bytes: [0x80, 0x3F].repeat(count) }
}

/// One place has the layers and the other has none: what is quantised is found, with its scales,
/// and the rest is as it was.
#[test]
fn places_with_and_without_weights_are_quantised() {
    let folder = tempfile::tempdir().unwrap();
    write_file(&folder.path().join("model.safetensors"), &decoder_with_rows(), 0);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let placed = |map: &str| {
        let map = DeviceMap::parse(map.as_bytes()).unwrap();
        let settings = settings().quantise(Quantisation::Int8);
        PlacedLoader::new(settings, &map, &checkpoint, None).unwrap()
    };
    let model = placed(r#"{"model.layers.0": "cpu", "": "disk"}"#).load().unwrap();
    let weight = "model.layers.0.mlp.up_proj.weight";
    let values = model.tensor(weight).unwrap();
    assert_eq!((values.tier(), values.dtype(), values.len_bytes()), (Tier::Host, DType::I8, 96 * 64));
    let scales = model.tensor(&format!("{weight}_scale")).unwrap();
    assert_eq!((scales.tier(), scales.dtype(), scales.shape()), (Tier::Host, DType::F32, &[96, 1][..]));
    let mut scale = [0; 4];
    scales.read(4, &mut scale).unwrap();
    assert_eq!(f32::from_le_bytes(scale), 1.0 / 127.0);
    // On the disk it is as stored, and has no scales; nor has what is nowhere.
    let stored = model.tensor("model.layers.1.mlp.up_proj.weight").unwrap();
    assert_eq!((stored.tier(), stored.dtype()), (Tier::Disk, DType::Bf16));
    for name in ["model.layers.1.mlp.up_proj.weight_scale", "model.layers.0.norm.weight_scale"] {
        assert!(matches!(model.tensor(name), Err(LoadError::NotFound { .. })), "{name}");
    }

    // Embedding and head alone: there is nothing to quantise in that place.
    let beside = placed(r#"{"model.embed_tokens": "cpu", "lm_head": "cpu", "": "disk"}"#);
    let model = beside.load().unwrap();
    assert_eq!(model.tensor("lm_head.weight").unwrap().dtype(), DType::Bf16);
    // Of the map of two places, GPUs need not be there to plan.
    let plan = placed(r#"{"model.layers": 0, "": "cpu"}"#).plan().unwrap();
    let quantised: Vec<(Tier, usize)> =
        plan.steps().iter().map(|step| (step.tier, step.plan.quantised().len())).collect();
    assert_eq!(quantised, [(Tier::Device(0), 4), (Tier::Host, 0)]);
}

/// Tensors of layers that take turns in a file: a load of one place reads nothing of what belongs
/// elsewhere.
#[test]
fn what_lies_between_is_not_read() {
    let folder = tempfile::tempdir().unwrap();
    let tensors: Vec<TestTensor> = (0..24)
        .map(|number| {
            let name = format!("model.layers.{}.part_{}.weight", number % 4, number / 4);
            TestTensor::random(name, 3001, number)
        })
        .collect();
    write_file(&folder.path().join("model.safetensors"), &tensors, 0);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let map = DeviceMap::parse(br#"{"": "disk", "model.layers.1": "cpu", "model.layers.2": "cpu"}"#).unwrap();
    for io in [IoMode::Buffered, IoMode::Mmap] {
        let settings = settings().io(io).read_through(1 << 20);
        let loader = PlacedLoader::new(settings, &map, &checkpoint, None).unwrap();
        let model = loader.load().unwrap();
        assert_eq!(model.layers().count(), 2);
        for tensor in &tensors {
            let mut bytes = vec![0; tensor.bytes.len()];
            model.tensor(&tensor.name).unwrap().read(0, &mut bytes).unwrap();
            assert!(bytes == tensor.bytes, "{}", tensor.name);
        }
        assert_eq!(model.report()[0].load.read_bytes, 12 * 3001, "{io}");
    }
}

/// What is on the disk is read when it is asked for, with the checks of a load: not before.
#[test]
fn the_disk_is_read_when_it_is_asked_for() {
    let case = Case::new(2, 50_000);
    let model = case.placed(r#"{"": "disk"}"#).unwrap().load().unwrap();
    assert!(model.report().is_empty() && model.resident_bytes() == 0);
    case.check(&model);
    let tensor = model.tensor("lm_head.weight").unwrap();
    let shard = case.checkpoint.shard(case.checkpoint.find("lm_head.weight").unwrap().shard).path.clone();
    std::fs::OpenOptions::new().write(true).open(shard).unwrap().set_len(1000).unwrap();
    let error = tensor.read(0, &mut [0; 8]).unwrap_err();
    assert!(error.is_file_changed(), "{error}");
}

#[test]
fn maps_that_cannot_be_kept_are_refused_with_names() {
    let case = Case::new(2, 1000);
    let faults =
        case.faults(r#"{"": "cpu", "model.layer": 0, "model.layers.1": "disk", "model.layers.10": 1}"#);
    let [FitError::UnknownKey { key, count: 2 }] = &faults[..] else { panic!("{faults:?}") };
    assert_eq!(key, "model.layer", "whole words");

    let faults = case.faults(r#"{"model": "cpu"}"#);
    let [FitError::Unplaced { tensor, count: 1 }] = &faults[..] else { panic!("{faults:?}") };
    assert_eq!(tensor, "lm_head.weight");
    assert_eq!(case.faults("{}").len(), 1);

    let faults = case.faults(r#"{"": "cpu", "model.layers.0.mlp": "disk", "nothing": 3}"#);
    let [FitError::UnknownKey { .. }, FitError::SplitLayer { layer, first, second, .. }] = &faults[..] else {
        panic!("{faults:?}")
    };
    assert_eq!(layer, "model.layers.0");
    assert!(first.starts_with("model.layers.0.") && second.starts_with("model.layers.0."));

    // Entries within entries are none: the longest decides, and one that decides nothing is still a
    // module.
    let shadowed = r#"{"": "cpu", "model": "disk", "model.layers": 5, "model.layers.0": "cpu", "model.layers.1": "cpu",
        "model.layers.1.mlp": "cpu"}"#;
    let plan = case.placed(shadowed).unwrap().plan().unwrap();
    assert_eq!(plan.steps().iter().map(|step| step.tier).collect::<Vec<_>>(), [Tier::Host]);

    let twice = DeviceMap::of_entries([("a".to_owned(), Tier::Host), ("a".to_owned(), Tier::Disk)]);
    assert!(twice.unwrap_err().is_bad_map());
}

#[test]
fn tied_tensors_stay_together() {
    let folder = tempfile::tempdir().unwrap();
    let tensor = |name: &str, seed| TestTensor {
        name: name.to_owned(),
        dtype: "F32",
        shape: vec![64, 16],
        bytes: onelayer_testing::random_bytes(4 * 64 * 16, seed),
    };
    let tensors = [
        tensor("model.embed_tokens.weight", 1),
        tensor("model.layers.0.mlp.weight", 2),
        tensor("model.layers.1.mlp.weight", 3),
        tensor("lm_head.weight", 1),
    ];
    write_file(&folder.path().join("model.safetensors"), &tensors, 0);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let config = ModelConfig::parse(
        "config.json",
        br#"{"model_type": "llama", "hidden_size": 16, "vocab_size": 64, "num_hidden_layers": 2,
             "num_attention_heads": 2, "intermediate_size": 16, "tie_word_embeddings": true}"#,
    );
    let config = config.unwrap();
    let refused = |map: &str, config: Option<&ModelConfig>| {
        let map = DeviceMap::parse(map.as_bytes()).unwrap();
        PlacedLoader::new(settings(), &map, &checkpoint, config).map(drop)
    };
    let apart = r#"{"": "cpu", "lm_head": "disk"}"#;
    let Err(PlacedError::Map { faults }) = refused(apart, Some(&config)) else { panic!("not refused") };
    assert!(matches!(&faults[..], [FitError::SeparatedTie { .. }]), "{faults:?}");
    // Nobody says that they are one.
    assert!(refused(apart, None).is_ok());
    assert!(refused(r#"{"": "cpu", "lm_head": "cpu"}"#, Some(&config)).is_ok());
}

#[test]
fn what_is_not_selected_is_nowhere() {
    let case = Case::new(3, 1000);
    let map = DeviceMap::parse(HOST_AND_DISK.as_bytes()).unwrap();
    let loader = |wanted: &'static str| {
        let settings = settings().select(move |tensor| tensor.name.contains(wanted));
        PlacedLoader::new(settings, &map, &case.checkpoint, None).unwrap()
    };
    let model = loader("mlp").load().unwrap();
    assert_eq!(model.layers().count(), 2);
    assert_eq!((model.disk().layers.len(), model.disk().tensors), (1, 2));
    assert!(model.tensor("model.layers.1.mlp.up_proj.weight").is_ok());
    for name in ["lm_head.weight", "model.layers.0.self_attn.q_proj.weight"] {
        assert!(matches!(model.tensor(name), Err(LoadError::NotFound { .. })), "{name}");
    }
    let only_disk = loader("lm_head").load().unwrap();
    assert!(only_disk.resident_bytes() == 0 && only_disk.tensor("lm_head.weight").is_ok());
    let nothing = loader("no such name").load().unwrap_err();
    assert!(
        matches!(nothing, PlacedError::Checkpoint(LoadError::Plan(PlanError::NothingSelected { .. }))),
        "{nothing}"
    );
}

#[test]
fn a_budget_that_cannot_work_is_refused_with_the_place() {
    let case = Case::new(2, 1000);
    let map = DeviceMap::parse(br#"{"": "cpu"}"#).unwrap();
    let settings = Loader::builder(Target::Host).host_budget(MIB);
    let error = PlacedLoader::new(settings, &map, &case.checkpoint, None).unwrap().load().unwrap_err();
    let PlacedError::Load { tier: Tier::Host, source } = error else { panic!("{error}") };
    assert!(source.is_over_budget());
}

/// The measured process. Does nothing unless started by the test below.
#[test]
fn measured_child() {
    let Ok(setting) = std::env::var("ONELAYER_PLACED_MEMORY") else { return };
    let (path, budget_mib) = setting.split_once(' ').unwrap();
    let map =
        DeviceMap::parse(br#"{"": "cpu", "model.embed_tokens": "disk", "model.layers.0": "disk"}"#).unwrap();
    // Warm-up: the first touch of code and of the allocator is not the load's.
    drop(Checkpoint::open(onelayer_testing::fixture("llama")).unwrap());
    Procfs::default().myself().reset_peak().unwrap();
    let usage = || {
        let memory = Procfs::default().myself().memory();
        (memory.rss_bytes.value().unwrap(), memory.rss_peak_bytes.value().unwrap())
    };
    let (before, _) = usage();
    let checkpoint = Checkpoint::open(path).unwrap();
    let budget_bytes = budget_mib.parse::<u64>().unwrap() * MIB;
    let settings = Loader::builder(Target::Host).host_budget(budget_bytes).io(IoMode::Auto);
    let mut model = PlacedLoader::new(settings, &map, &checkpoint, None).unwrap().load().unwrap();
    let resident = model.resident_bytes();
    let receipt = model.unload_all();
    assert_eq!(receipt.returned_bytes, resident);
    drop((model, checkpoint));
    let (after, peak) = usage();
    println!("measured {} {} {resident}", peak - before, after.saturating_sub(before));
}

#[test]
fn the_peak_is_the_budget_and_what_stays_on_the_host() {
    let folder = tempfile::tempdir().unwrap();
    write_sharded(folder.path(), &small_decoder(6, 3 << 20));
    for budget_mib in [8, 32] {
        let line = onelayer_testing::measured(
            module_path!(),
            "ONELAYER_PLACED_MEMORY",
            &format!("{} {budget_mib}", folder.path().display()),
        );
        let [peak, stayed, resident] =
            line.split(' ').map(|word| word.parse::<u64>().unwrap()).collect::<Vec<_>>()[..]
        else {
            panic!("{line}")
        };
        println!("budget {budget_mib} MiB: peak +{} KiB, resident {} KiB", peak >> 10, resident >> 10);
        assert!((120 * MIB..=128 * MIB).contains(&resident), "five layers and the head: {resident}");
        assert!(peak <= budget_mib * MIB + 16 * MIB + resident, "peak growth {peak}, resident {resident}");
        // Where pages are small, the unused end of an arena is not touched.
        assert!(peak >= resident - resident / 16, "what stays must show: {peak}");
        assert!(stayed <= 4 * MIB, "{stayed} bytes stayed");
    }
}

#[cfg(not(feature = "cuda"))]
#[test]
fn gpus_need_the_feature() {
    let error = Case::new(2, 1000).placed(r#"{"": 1}"#).unwrap().load().unwrap_err();
    assert!(matches!(error, PlacedError::NoDevice { device: 1, .. }), "{error}");
}

#[cfg(feature = "cuda")]
#[cfg(feature = "cuda")]
mod on_gpus {
    use onelayer::{Device, DeviceError};

    use super::*;
    use onelayer_testing::cuda_sim::{MODES, SimRun};

    const FOUR_PLACES: &str = r#"{"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1, "model.layers.2": "cpu",
        "model.layers.3": "disk", "model.norm": 1, "lm_head": 0}"#;

    fn runs_clean(scenario: &str, change: impl Fn(SimRun) -> SimRun) {
        for (mode, seed) in MODES.into_iter().flat_map(|mode| (1..3).map(move |seed| (mode, seed))) {
            let run = SimRun::again(module_path!(), scenario).set("MODE", mode).set("SEED", seed);
            let outcome = change(run).run();
            outcome.assert_success();
            outcome.report().assert_clean();
        }
    }

    #[test]
    fn two_gpus_host_and_disk() {
        runs_clean("scenario_four_places", |run| run.set("DEVICES", 2));
        runs_clean("scenario_four_places", |run| run.set("DEVICES", 3).set("POOLS", 0));
    }

    #[test]
    fn a_gpu_that_is_too_small_is_named_before_anything_is_read() {
        runs_clean("scenario_too_small", |run| {
            run.set("DEVICES", 2).set("MEM", "4G,18M").set("CONTEXT", "16M")
        });
    }

    #[test]
    fn a_gpu_that_is_not_there_is_named() {
        runs_clean("scenario_missing", |run| run.set("DEVICES", 2));
    }

    /// The second device refuses a copy: what the first has got is given back.
    #[test]
    fn a_load_that_fails_on_the_way_leaves_nothing() {
        let run = SimRun::again(module_path!(), "scenario_fails").set("DEVICES", 2);
        let outcome = run.run();
        outcome.assert_success();
        outcome.report().assert_clean();
    }

    fn free_bytes(devices: &[Device]) -> Vec<u64> {
        devices.iter().map(|device| device.memory().unwrap().unwrap().free_bytes).collect()
    }

    fn devices() -> Vec<Device> {
        let devices = [0, 1].map(|ordinal| Device::open(Target::Cuda(ordinal)).unwrap());
        assert!(devices.iter().all(|device| device.info().unwrap().name.contains("simulated")));
        devices.into()
    }

    #[test]
    #[ignore = "scenario"]
    fn scenario_four_places() {
        let case = Case::new(4, 150_000);
        let devices = devices();
        let before = free_bytes(&devices);
        let loader = case.placed(FOUR_PLACES).unwrap();
        let plan = loader.plan().unwrap();
        let order: Vec<Tier> = plan.steps().iter().map(|step| step.tier).collect();
        assert_eq!(order, [Tier::Device(0), Tier::Device(1), Tier::Host]);
        let budgets: Vec<u64> = plan.steps().iter().map(|step| step.plan.memory().budget_bytes()).collect();
        assert!(
            budgets[0] == 6 * MIB && budgets.is_sorted_by(|one, next| one > next),
            "plans stay: {budgets:?}"
        );
        assert!(plan.budgeted_bytes() <= 6 * MIB);
        for _ in 0..3 {
            let mut seen = Vec::new();
            let mut model = loader
                .load_while(|tier, _| {
                    seen.push(tier);
                    true
                })
                .unwrap();
            seen.dedup();
            assert_eq!(seen, order, "one after the other");
            case.check(&model);
            assert!(model.tensor("lm_head.weight").unwrap().resident().unwrap().device_pointer().is_some());

            let during = free_bytes(&devices);
            for (step, report) in plan.steps().iter().zip(model.report()) {
                assert_eq!(report.resident_bytes, step.plan.memory().resident_bytes());
                let Tier::Device(device) = step.tier else { continue };
                let taken = before[device as usize] - during[device as usize];
                // The driver gives memory in pages of 2 MiB, to a pool or to each arena.
                assert!(taken >= report.resident_bytes, "GPU {device}: {taken}");
                let arenas = step.plan.layers().len() as u64;
                assert!(taken <= report.resident_bytes + (arenas + 1) * 2 * MIB, "GPU {device}: {taken}");
            }
            let read: u64 = model.report().iter().map(|report| report.load.read_bytes).sum();
            let tensors: u64 = model.report().iter().map(|report| report.load.tensor_bytes).sum();
            assert!(read <= plan.read_bytes() && tensors == plan.tensor_bytes());
            assert!(
                read <= tensors + 64 * 1024,
                "each byte once, but for blocks at borders: {read} of {tensors}"
            );

            let held = model.tensor("model.layers.1.mlp.up_proj.weight").unwrap();
            let receipt = model.unload(Part::Prefix("model.layers")).unwrap();
            assert_eq!((receipt.layers, receipt.holders.len()), (3, 1), "{receipt}");
            drop(held);
            let receipt = model.unload(Part::All).unwrap();
            assert_eq!(receipt.held_bytes + receipt.unconfirmed_bytes, 0, "{receipt}");
            assert_eq!(free_bytes(&devices), before, "all of it came back");
        }
    }

    #[test]
    #[ignore = "scenario"]
    fn scenario_too_small() {
        let case = Case::new(4, 150_000);
        let loader = {
            let map = DeviceMap::parse(FOUR_PLACES.as_bytes()).unwrap();
            let settings = settings().device_reserve(MIB + MIB / 2);
            PlacedLoader::new(settings, &map, &case.checkpoint, None).unwrap()
        };
        let devices = devices();
        let before = free_bytes(&devices);
        let error = loader.load_while(|tier, _| panic!("{tier} has got a layer")).unwrap_err();
        let PlacedError::DeviceTooSmall { device: 1, free_bytes: free, needed_bytes, .. } = error else {
            panic!("{error}")
        };
        assert_eq!(free, before[1]);
        let planned = loader.plan().unwrap().of(Tier::Device(1)).unwrap().memory().resident_bytes();
        assert_eq!(needed_bytes, planned);
        assert!(
            error.shortfall_bytes() > 0 && error.to_string().contains("on GPU 1, where 2 MiB are free"),
            "{error}"
        );
        assert_eq!(free_bytes(&devices), before);
    }

    #[test]
    #[ignore = "scenario"]
    fn scenario_missing() {
        let case = Case::new(2, 1000);
        let loader = case.placed(r#"{"": 0, "model.layers.1": 2}"#).unwrap();
        assert_eq!(loader.plan().unwrap().steps().len(), 2, "a plan needs no device");
        let error = loader.load().unwrap_err();
        assert!(error.is_device_unavailable() && error.to_string().contains("GPU 2"), "{error}");
        let PlacedError::NoDevice { device: 2, source } = error else { panic!("{error}") };
        assert!(matches!(source, DeviceError::NoSuchDevice { ordinal: 2, devices: 2 }), "{source}");
    }

    #[test]
    #[ignore = "scenario"]
    fn scenario_fails() {
        let case = Case::new(4, 150_000);
        let devices = devices();
        let before = free_bytes(&devices);
        let loader = case.placed(FOUR_PLACES).unwrap();
        // The file of the second device's layers is cut once the first device has its own.
        let tensor = case.checkpoint.find("model.norm.weight").unwrap();
        let shard = case.checkpoint.shard(tensor.shard).path.clone();
        let mut is_cut = false;
        let error = loader.load_while(|tier, layer| {
            if !is_cut && tier == Tier::Device(0) && layer.tensor("lm_head.weight").is_some() {
                is_cut = true;
                std::fs::OpenOptions::new().write(true).open(&shard).unwrap().set_len(100).unwrap();
            }
            true
        });
        let error = error.unwrap_err();
        let PlacedError::Load { tier, source } = error else { panic!("{error}") };
        assert!(matches!(tier, Tier::Device(_)) && source.is_file_changed(), "{tier}: {source}");
        assert!(is_cut);
        assert_eq!(free_bytes(&devices), before);
    }
}
