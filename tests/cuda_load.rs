//! Whole loads onto CUDA devices, on a simulated driver that copies as late as CUDA allows.
//!
//! Each test runs this executable once more, as a process of its own that finds the simulated driver; the tests that say
//! `scenario` are what runs there, and do nothing by themselves. A run passes if its scenario does, and if the driver
//! has seen no misuse and nothing was left behind.
#![allow(
    clippy::cast_possible_truncation,
    clippy::multiple_unsafe_ops_per_block,
    reason = "handles of an engine"
)]
#![allow(clippy::print_stdout, reason = "a scenario tells its parent")]
#![allow(unsafe_code, clippy::unwrap_used, clippy::as_conversions, reason = "an engine's promises; panics")]

mod common;
#[path = "common/cuda_sim.rs"]
mod cuda_sim;
#[path = "common/driver.rs"]
mod driver;

use common::{TestTensor, random_bytes, small_decoder, write_file, write_sharded};
use cuda_sim::{MODES, SimRun, driver_without};
use driver::Engine;
use onelayer::load::{LoadError, LoadedLayer, LoadedTensor};
use onelayer::plan::FloatType;
use onelayer::{After, Checkpoint, Device, DeviceRegion, HandOut, Loader, LoaderBuilder, Target, Window};

/// Runs a scenario under every mode of the driver and some seeds. Clean means: no misuse, nothing left behind.
fn runs_clean(scenario: &str, seeds: std::ops::Range<u64>, change: impl Fn(SimRun) -> SimRun) {
    for mode in MODES {
        for seed in seeds.clone() {
            let run = SimRun::again(scenario).set("MODE", mode).set("SEED", seed);
            let outcome = change(run).run();
            outcome.assert_success();
            outcome.report().assert_clean();
        }
    }
}

#[test]
fn loads_and_unloads_ten_times() {
    runs_clean("scenario_load_unload", 1..4, |run| run);
    runs_clean("scenario_load_unload", 1..2, |run| run.set("POOLS", 0));
}

#[test]
fn streams_within_its_window() {
    runs_clean("scenario_stream", 1..6, |run| run);
    runs_clean("scenario_stream", 1..2, |run| run.set("POOLS", 0));
}

#[test]
fn layers_are_not_freed_under_the_kernels_that_read_them() {
    runs_clean("scenario_engine", 1..6, |run| run);
    runs_clean("scenario_engine", 1..2, |run| run.set("POOLS", 0));
}

#[test]
fn uses_context_stream_and_memory_of_the_caller() {
    runs_clean("scenario_borrowed", 1..4, |run| run);
}

/// Layers of ours and of the caller's in turn, in a window and handed out at once: what is idle of ours is not mistaken for
/// the caller's, which is the caller's again as soon as its layer is dropped.
#[test]
fn memory_of_the_caller_is_free_when_its_layer_is_dropped() {
    runs_clean("scenario_memory_of_the_caller", 1..4, |run| run);
}

/// A move that fails leaves one before it in the stream: the load ends only when that is over too.
#[test]
fn a_load_that_fails_leaves_memory_of_the_caller_alone() {
    for rule in ["cuMemcpyDtoDAsync_v2:2:999", "cuEventRecord:2:999"] {
        runs_clean("scenario_failing_into_memory_of_the_caller", 1..3, |run| run.fail(rule));
    }
}

#[test]
fn two_devices_and_two_loads_at_once() {
    runs_clean("scenario_two_devices", 1..4, |run| run.set("DEVICES", 2));
}

#[test]
fn loads_that_are_given_up_leave_nothing() {
    runs_clean("scenario_cancel", 1..5, |run| run);
}

#[test]
fn narrows_on_the_way() {
    runs_clean("scenario_narrowing", 1..2, |run| run);
}

/// A thousand loads, each under another schedule.
#[test]
fn many_loads_deliver_the_right_bytes() {
    runs_clean("scenario_many_loads", 1..14, |run| run.set("DELAY_US", 50));
}

#[test]
fn refused_pinning_has_a_name() {
    // The ring has 8 slots of 1 MiB.
    for (limit, expected) in [
        ("8M", "whole 8388608"),
        ("6M", "fewer_slots 6291456"),
        ("4M", "fewer_slots 4194304"),
        ("3M", "pageable 0"),
        ("0", "pageable 0"),
    ] {
        for mode in MODES {
            let outcome = SimRun::again("scenario_pinning").set("MODE", mode).set("PINNED", limit).run();
            outcome.assert_success();
            outcome.report().assert_clean();
            assert!(outcome.stdout.contains(&format!("pinning: {expected}")), "{limit}: {}", outcome.stdout);
        }
    }
    // One piece is refused, eight are not.
    let outcome = SimRun::again("scenario_pinning").fail("cuMemHostRegister_v2:1:801").run();
    outcome.assert_success();
    outcome.report().assert_clean();
    assert!(outcome.stdout.contains("pinning: slot_by_slot 8388608"), "{}", outcome.stdout);
}

#[test]
fn what_does_not_fit_is_refused_before_it_is_loaded() {
    let outcome = SimRun::again("scenario_too_large").set("MEM", "23M").set("CONTEXT", "16M").run();
    outcome.assert_success();
    outcome.report().assert_clean();
    let refused = outcome.stdout.lines().find(|line| line.contains("refused: ")).unwrap();
    assert!(refused.contains("7 MiB are free, 1 MiB of them reserved: "), "{refused}");
}

/// What a machine can have in place of a driver. No panic, and a message that says what was looked for and what to do.
#[test]
fn a_driver_that_cannot_be_used_is_an_error_that_says_why() {
    let empty = tempfile::tempdir().unwrap();
    let junk = tempfile::tempdir().unwrap();
    std::fs::write(junk.path().join("libcuda.so.1"), b"not a library").unwrap();
    let run = || SimRun::again("scenario_open");
    let old = driver_without(&["cuMemAllocFromPoolAsync"]);
    let cases = [
        (run().on_driver(empty.path()), "no CUDA driver: looked for libcuda.so, libcuda.so.1 ("),
        (run().on_driver(junk.path()), "no CUDA driver: looked for libcuda.so, libcuda.so.1 ("),
        (run().on_stub(), "CUDA_ERROR_STUB_LIBRARY (34); this is the toolkit's stub, not a driver"),
        (run().set("INIT", 803), "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803); "),
        (run().set("INIT", 100), "CUDA_ERROR_NO_DEVICE (100); no device is visible"),
        (
            run().on_driver(&old),
            "has no cuMemAllocFromPoolAsync: it is no CUDA driver, or one older than 11.4",
        ),
        (run().set("DEVICES", 0), "CUDA_ERROR_NO_DEVICE (100)"),
    ];
    for (run, expected) in cases {
        let outcome = run.run();
        outcome.assert_success();
        let line = outcome.stdout.lines().find(|line| line.contains("unavailable=true "));
        assert!(line.is_some_and(|line| line.contains(expected)), "{expected}\n{}", outcome.stdout);
    }
    let outcome = run().set("DRIVER_VERSION", 13_000).run();
    assert!(outcome.stdout.contains("opened: simulated CUDA device"), "{}", outcome.stdout);
}

/// A checkpoint that takes several rounds of the smallest ring, and its tensors.
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

    fn bytes(&self, name: &str) -> &[u8] {
        &self.tensors.iter().find(|tensor| tensor.name == name).unwrap().bytes
    }

    /// Reads a tensor back and compares it.
    fn check(&self, tensor: &LoadedTensor) {
        let mut found = vec![0; self.bytes(tensor.name()).len()];
        assert!(tensor.read(0, &mut found).unwrap());
        assert!(found == self.bytes(tensor.name()), "{} is wrong", tensor.name());
        if found.len() > 1000 {
            let mut part = [0; 333];
            assert!(tensor.read(501, &mut part).unwrap());
            assert_eq!(part[..], found[501..834]);
        }
    }

    fn check_layer(&self, layer: &LoadedLayer) {
        layer.tensors().for_each(|tensor| self.check(&tensor));
    }
}

/// A loader for a device that is a simulated one.
fn loader(ordinal: u32, change: impl FnOnce(LoaderBuilder) -> LoaderBuilder) -> Loader {
    let builder = Loader::builder(Target::Cuda(ordinal)).host_budget(6 << 20);
    let loader = change(builder).build().unwrap();
    let info = loader.device().info().unwrap();
    assert!(info.name.contains("simulated"), "{info:?}");
    loader
}

fn free_bytes(loader: &Loader) -> u64 {
    loader.device().memory().unwrap().unwrap().free_bytes
}

#[test]
#[ignore = "scenario"]
fn scenario_load_unload() {
    let case = Case::new(3, 200_000);
    let loader = loader(0, |builder| builder);
    let before = free_bytes(&loader);
    for _ in 0..10 {
        let mut model = loader.load(&case.checkpoint).unwrap();
        model.layers().for_each(|layer| case.check_layer(layer));
        assert!(before - free_bytes(&loader) >= model.resident_bytes());
        let tensor = model.tensor("lm_head.weight").unwrap();
        assert!(tensor.as_bytes().is_none());
        let hash = tensor.hash().unwrap().unwrap();
        assert_eq!(hash.as_bytes(), blake3::hash(case.bytes("lm_head.weight")).as_bytes());
        assert_eq!(tensor.device_pointer().unwrap() % 256, 0);
        drop(tensor);
        assert_eq!(model.report().pinning, onelayer::Pinning::Whole);
        let receipt = model.unload_all();
        assert_eq!(receipt.returned_bytes, receipt.asked_bytes);
        assert_eq!(free_bytes(&loader), before, "all of it came back");
    }
}

#[test]
#[ignore = "scenario"]
fn scenario_stream() {
    let case = Case::new(4, 150_000);
    for (window, prefetch, hand_out) in [
        (1, 0, HandOut::WhenComplete),
        (1, 2, HandOut::AtOnce),
        (2, 2, HandOut::WhenComplete),
        (3, 9, HandOut::AtOnce),
    ] {
        let loader =
            loader(0, |builder| builder.window(Window::Layers(window)).prefetch(prefetch).hand_out(hand_out));
        let before = free_bytes(&loader);
        let mut stream = loader.stream(&case.checkpoint).unwrap();
        let planned_bytes = stream.plan().memory().resident_bytes();
        let mut tensors = 0;
        for layer in &mut stream {
            let layer = layer.unwrap();
            assert!(hand_out == HandOut::AtOnce || layer.is_ready().unwrap());
            case.check_layer(&layer);
            assert!(layer.is_ready().unwrap(), "what was read is ready");
            layer.wait_ready().unwrap();
            tensors += layer.tensors().len();
            // Each arena takes whole pages of 2 MiB from the device, that of a norm too, which waits for its next layer.
            let used_bytes = before - free_bytes(&loader);
            assert!(
                used_bytes <= planned_bytes + ((u64::from(window) + 1) << 21),
                "{used_bytes}, {}",
                layer.id()
            );
        }
        assert_eq!(tensors, case.tensors.len());
        drop(stream);
        assert_eq!(free_bytes(&loader), before);
    }
}

/// What an engine does: kernels in a stream of its own that wait for each layer's event, read it, and go on after the layer
/// was dropped. Were its memory freed or filled anew before they are over, they would read something else.
#[test]
#[ignore = "scenario"]
fn scenario_engine() {
    let case = Case::new(4, 150_000);
    let engine = Engine::new(0);
    let stream = engine.stream();
    for way in 0..6 {
        let loader = loader(0, |builder| {
            builder.window(Window::Layers(1 + way % 2)).prefetch(2).hand_out(HandOut::AtOnce)
        });
        let mut results = Vec::new();
        let mut events = Vec::new();
        for layer in loader.stream(&case.checkpoint).unwrap() {
            let layer = layer.unwrap();
            if way % 2 == 0 {
                engine.wait_event(stream, layer.ready_event().unwrap());
            } else {
                // SAFETY: a live stream of the primary context.
                unsafe { layer.let_wait(stream) }.unwrap();
            }
            for tensor in layer.tensors() {
                let len = case.bytes(tensor.name()).len();
                if len > 0 {
                    let result = engine.allocate(len);
                    engine.kernel(tensor.device_pointer().unwrap(), result, len, stream);
                    results.push((tensor.name().to_owned(), result, len));
                }
            }
            match way / 2 {
                // SAFETY: a live stream of the primary context; the kernels above are all that uses the layer.
                0 => unsafe { layer.release_after(After::Stream(stream)) }.unwrap(),
                1 => {
                    let event = engine.record(stream);
                    // SAFETY: a live event behind all kernels that use the layer.
                    unsafe { layer.release_after(After::Event(event)) }.unwrap();
                    events.push(event);
                }
                // Nothing said: dropping the layer waits for the kernels.
                _ => {}
            }
        }
        for (name, result, len) in results {
            assert!(engine.read(result, len, stream) == case.bytes(&name), "{name}, way {way}");
            engine.free(result);
        }
        events.into_iter().for_each(|event| engine.destroy_event(event));
    }
    engine.destroy_stream(stream);
}

/// The caller's context, stream and memory.
#[test]
#[ignore = "scenario"]
fn scenario_borrowed() {
    let case = Case::new(3, 150_000);
    let engine = Engine::new(0);
    let stream = engine.stream();
    let free_before = engine.free_bytes();
    // SAFETY: context and stream outlive the loader and its layers.
    let loader = loader(0, |builder| unsafe { builder.cuda_context(engine.context).cuda_stream(stream) });
    let model = loader.load(&case.checkpoint).unwrap();
    let name = "model.layers.1.mlp.up_proj.weight";
    let tensor = model.tensor(name).unwrap();
    let len = case.bytes(name).len();
    let copy = engine.allocate(len);
    engine.kernel(tensor.device_pointer().unwrap(), copy, len, stream);
    assert!(engine.read(copy, len, stream) == case.bytes(name), "ordered by the stream alone");
    engine.free(copy);
    drop((tensor, model));

    let plan = loader.plan(&case.checkpoint).unwrap();
    let regions: Vec<(String, u64, u64)> = plan
        .layers()
        .iter()
        .filter(|layer| layer.id.as_str().contains("layers"))
        .map(|layer| (layer.id.to_string(), engine.allocate(layer.arena_bytes as usize), layer.arena_bytes))
        .collect();
    let given = regions.clone();
    let destination = move |layer: &onelayer::plan::PlannedLayer| {
        let (_, address, len_bytes) = given.iter().find(|(id, ..)| id == layer.id.as_str())?.clone();
        Some(DeviceRegion { address, len_bytes })
    };
    // SAFETY: the regions live until they are freed below, after the model is gone.
    let into_ours = self::loader(0, |builder| unsafe { builder.destinations(destination) });
    let mut model = into_ours.load(&case.checkpoint).unwrap();
    model.layers().for_each(|layer| case.check_layer(layer));
    let tensor = model.tensor(name).unwrap();
    let region = &regions[1];
    assert!((region.1..region.1 + region.2).contains(&tensor.device_pointer().unwrap()));
    drop(tensor);
    model.unload_all();
    drop((model, into_ours, loader));
    for (_, address, _) in &regions {
        engine.free(*address);
    }
    // Too small, or at an odd place: refused before anything is written.
    for (shift, cut) in [(0, 4096), (64, 0)] {
        let address = engine.allocate(32 << 20);
        let destination = move |layer: &onelayer::plan::PlannedLayer| {
            Some(DeviceRegion { address: address + shift, len_bytes: layer.arena_bytes - cut })
        };
        // SAFETY: as above.
        let into_ours = self::loader(0, |builder| unsafe { builder.destinations(destination) });
        let error = into_ours.load(&case.checkpoint).unwrap_err().to_string();
        assert!(error.starts_with("the caller's memory for layer "), "{error}");
        engine.free(address);
    }
    engine.destroy_stream(stream);
    assert_eq!(engine.free_bytes(), free_before);
}

#[test]
#[ignore = "scenario"]
fn scenario_memory_of_the_caller() {
    let case = Case::new(6, 150_000);
    let engine = Engine::new(0);
    let plan = loader(0, |builder| builder).plan(&case.checkpoint).unwrap();
    let second = |layer: &&onelayer::plan::PlannedLayer| {
        layer
            .id
            .as_str()
            .rsplit('.')
            .next()
            .and_then(|last| last.parse::<u32>().ok())
            .is_some_and(|n| n % 2 == 1)
    };
    let regions: Vec<(String, DeviceRegion)> = plan
        .layers()
        .iter()
        .filter(second)
        .map(|layer| {
            let address = engine.allocate(layer.arena_bytes as usize);
            (layer.id.to_string(), DeviceRegion { address, len_bytes: layer.arena_bytes })
        })
        .collect();
    assert_eq!(regions.len(), 3);
    let given = regions.clone();
    let destination = move |layer: &onelayer::plan::PlannedLayer| {
        given.iter().find(|(id, _)| id == layer.id.as_str()).map(|&(_, region)| region)
    };
    // SAFETY: each region lives until its layer is dropped, and has no other use.
    let loader = loader(0, |builder| unsafe {
        builder.destinations(destination).window(Window::Layers(1)).hand_out(HandOut::AtOnce)
    });
    let mut freed = 0;
    for layer in loader.stream(&case.checkpoint).unwrap() {
        let layer = layer.unwrap();
        let region = regions.iter().find(|(id, _)| id == layer.id().as_str());
        if region.is_none() {
            case.check_layer(&layer);
        }
        drop(layer);
        if let Some((_, region)) = region {
            engine.free(region.address);
            freed += 1;
        }
    }
    assert_eq!(freed, regions.len());
}

#[test]
#[ignore = "scenario"]
fn scenario_failing_into_memory_of_the_caller() {
    let folder = tempfile::tempdir().unwrap();
    // The large tensor says which phase the layer has, so that the small ones before it are moved.
    let tensors =
        [("layers.0.a", 3), ("layers.0.b", 5), ("layers.0.c", 200_000)].map(|(name, len)| TestTensor {
            name: name.to_owned(),
            dtype: "U8",
            shape: vec![len as u64],
            bytes: random_bytes(len, 1),
        });
    write_file(&folder.path().join("model.safetensors"), &tensors, 5);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let engine = Engine::new(0);
    let address = engine.allocate(1 << 20);
    let destination =
        move |_: &onelayer::plan::PlannedLayer| Some(DeviceRegion { address, len_bytes: 1 << 20 });
    // SAFETY: the memory is freed when the load has ended, and has no other use.
    let loader = loader(0, |builder| unsafe { builder.destinations(destination) });
    let plan = loader.plan(&checkpoint).unwrap();
    assert_eq!((plan.reads().len(), plan.moves(&plan.layers()[0]).len()), (1, 2));
    let error = loader.load(&checkpoint).unwrap_err();
    assert!(matches!(error, LoadError::Device(_)), "{error}");
    engine.free(address);
}

/// Two devices, and two loads at once on each.
#[test]
#[ignore = "scenario"]
fn scenario_two_devices() {
    let case = Case::new(3, 150_000);
    let loaders = [0, 1].map(|ordinal| loader(ordinal, |builder| builder));
    let [first, second] = [0, 1].map(|index: usize| loaders[index].device().info().unwrap());
    assert!(first.uuid != second.uuid && first.pci_bus_id != second.pci_bus_id);
    std::thread::scope(|scope| {
        for number in 0..4 {
            let (case, loader) = (&case, &loaders[number % 2]);
            scope.spawn(move || {
                if number < 2 {
                    loader.load(&case.checkpoint).unwrap().layers().for_each(|layer| case.check_layer(layer));
                } else {
                    for layer in loader.stream(&case.checkpoint).unwrap() {
                        case.check_layer(&layer.unwrap());
                    }
                }
            });
        }
    });
    assert!(
        Device::open(Target::Cuda(2))
            .unwrap_err()
            .to_string()
            .starts_with("no CUDA device 2: the driver shows 2")
    );
}

/// Loads that are given up at random points: by a handle, by dropping the stream, with layers kept.
#[test]
#[ignore = "scenario"]
fn scenario_cancel() {
    let seed: usize = std::env::var("CUDA_SIM_SEED").unwrap().parse().unwrap();
    let case = Case::new(4, 150_000);
    let loader = loader(0, |builder| builder.window(Window::Layers(3)).hand_out(HandOut::AtOnce));
    let before = free_bytes(&loader);
    let mut random = random_bytes(400, seed as u64).into_iter().map(usize::from);
    for round in 0..40 {
        let mut stream = loader.stream(&case.checkpoint).unwrap();
        let handle = stream.cancel_handle();
        let (taken, pause_us, way) = (random.next().unwrap() % 7, random.next().unwrap() * 8, round % 3);
        std::thread::scope(|scope| {
            let thread = scope.spawn(move || {
                std::thread::sleep(std::time::Duration::from_micros(pause_us as u64));
                if way == 0 {
                    handle.cancel();
                }
            });
            let mut kept = Vec::new();
            for layer in stream.by_ref().take(taken) {
                match layer {
                    Ok(layer) => kept.push(layer),
                    Err(error) => assert!(matches!(error, LoadError::Cancelled), "{error}"),
                }
                if kept.len() == 3 {
                    kept.remove(0);
                }
            }
            if way == 1 {
                thread.join().unwrap();
            }
            drop(stream);
            // What was handed out stays right, whatever became of the load.
            kept.iter().for_each(|layer| case.check_layer(layer));
        });
        assert_eq!(free_bytes(&loader), before, "round {round}");
    }
}

/// Prints how the ring was pinned.
#[test]
#[ignore = "scenario"]
fn scenario_pinning() {
    let case = Case::new(3, 200_000);
    let loader = loader(0, |builder| builder.host_budget(9 << 20));
    let model = loader.load(&case.checkpoint).unwrap();
    model.layers().for_each(|layer| case.check_layer(layer));
    println!("pinning: {} {}", model.report().pinning.name(), model.report().pinned_bytes);
}

/// Floats of several widths, of odd counts and phases, narrowed on the way.
#[test]
#[ignore = "scenario"]
fn scenario_narrowing() {
    let folder = tempfile::tempdir().unwrap();
    let floats = |len: usize, seed| -> Vec<f32> {
        let word = |bytes: &[u8]| f32::from(i16::from_le_bytes([bytes[0], bytes[1]])) / 1024.0;
        random_bytes(2 * len, seed).chunks_exact(2).map(word).collect()
    };
    let wide = floats(700_001, 1);
    let small = floats(333, 2);
    let tensor = |name: &str, dtype, len: usize, bytes| TestTensor {
        name: name.to_owned(),
        dtype,
        shape: vec![len as u64],
        bytes,
    };
    let tensors = [
        tensor("layers.0.odd", "U8", 3, vec![1, 2, 3]),
        tensor("layers.0.wide", "F32", wide.len(), wide.iter().flat_map(|x| x.to_le_bytes()).collect()),
        tensor("layers.0.bf16", "BF16", 777, random_bytes(1554, 3)),
        tensor(
            "layers.1.small",
            "F64",
            small.len(),
            small.iter().flat_map(|&x| f64::from(x).to_le_bytes()).collect(),
        ),
        tensor("layers.1.int", "I64", 2, random_bytes(16, 4)),
    ];
    write_file(&folder.path().join("model.safetensors"), &tensors, 5);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let loader = loader(0, |builder| builder.dtype(FloatType::Bf16));
    let model = loader.load(&checkpoint).unwrap();
    let bf16 = |values: &[f32]| -> Vec<u8> {
        values.iter().flat_map(|&x| half::bf16::from_f32(x).to_le_bytes()).collect()
    };
    let expected = [
        ("layers.0.odd", vec![1, 2, 3]),
        ("layers.0.wide", bf16(&wide)),
        ("layers.0.bf16", random_bytes(1554, 3)),
        ("layers.1.small", bf16(&small)),
        ("layers.1.int", random_bytes(16, 4)),
    ];
    for (name, bytes) in expected {
        let tensor = model.tensor(name).unwrap();
        assert_eq!(tensor.len_bytes(), bytes.len() as u64, "{name}");
        let mut found = vec![0; bytes.len()];
        assert!(tensor.read(0, &mut found).unwrap());
        assert!(found == bytes, "{name}");
    }
}

#[test]
#[ignore = "scenario"]
fn scenario_too_large() {
    let case = Case::new(3, 200_000);
    let loader = loader(0, |builder| builder.device_reserve(1 << 20));
    let before = free_bytes(&loader);
    let error = loader.load(&case.checkpoint).unwrap_err();
    assert!(error.is_out_of_device_memory());
    println!("refused: {error}");
    assert_eq!(free_bytes(&loader), before);
    // One layer at a time fits.
    let streaming = self::loader(0, |builder| builder.device_reserve(1 << 20).window(Window::Layers(1)));
    for layer in streaming.stream(&case.checkpoint).unwrap() {
        case.check_layer(&layer.unwrap());
    }
}

/// Prints what opening device 0 says.
#[test]
#[ignore = "scenario"]
fn scenario_open() {
    match Device::open(Target::Cuda(0)) {
        Ok(device) => println!("opened: {}", device.info().unwrap().name),
        Err(error) => println!("unavailable={} {error}", error.is_unavailable()),
    }
}

/// Many small loads, each another schedule.
#[test]
#[ignore = "scenario"]
fn scenario_many_loads() {
    let case = Case::new(2, 90_000);
    let loader = loader(0, |builder| builder.host_budget(5 << 20).window(Window::Layers(2)));
    for _ in 0..25 {
        for layer in loader.stream(&case.checkpoint).unwrap() {
            case.check_layer(&layer.unwrap());
        }
    }
}
