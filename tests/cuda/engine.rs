//! CUDA loads beside an engine: its kernels, its streams, its context, its memory. On a simulated
//! driver.
//!
//! Each test runs this executable once more, as a process of its own that finds the simulated
//! driver; the tests that say `scenario` are what runs there, and do nothing by themselves. A run
//! passes if its scenario does, and if the driver has seen no misuse and nothing was left behind.
#![allow(
    clippy::cast_possible_truncation,
    clippy::multiple_unsafe_ops_per_block,
    reason = "handles of an engine"
)]
#![allow(unsafe_code, clippy::unwrap_used, clippy::as_conversions, reason = "an engine's promises; panics")]

use crate::cuda_case::{Case, loader, runs_clean};
use onelayer::load::LoadError;
use onelayer::{After, Checkpoint, DeviceRegion, HandOut, Target, Window};
use onelayer_testing::driver::Engine;
use onelayer_testing::{TestTensor, random_bytes, write_file};

#[test]
fn layers_are_not_freed_under_the_kernels_that_read_them() {
    runs_clean(module_path!(), "scenario_engine", 1..6, |run| run);
    runs_clean(module_path!(), "scenario_engine", 1..2, |run| run.set("POOLS", 0));
}

#[test]
fn uses_context_stream_and_memory_of_the_caller() {
    runs_clean(module_path!(), "scenario_borrowed", 1..4, |run| run);
}

/// Layers of ours and of the caller's in turn, in a window and handed out at once: what is idle of
/// ours is not mistaken for the caller's, which is the caller's again as soon as its layer is
/// dropped.
#[test]
fn memory_of_the_caller_is_free_when_its_layer_is_dropped() {
    runs_clean(module_path!(), "scenario_memory_of_the_caller", 1..4, |run| run);
}

/// A move that fails leaves one before it in the stream: the load ends only when that is over too.
#[test]
fn a_load_that_fails_leaves_memory_of_the_caller_alone() {
    for rule in ["cuMemcpyDtoDAsync_v2:2:999", "cuEventRecord:2:999"] {
        runs_clean(module_path!(), "scenario_failing_into_memory_of_the_caller", 1..3, |run| run.fail(rule));
    }
}

/// What an engine does: kernels in a stream of its own that wait for each layer's event, read it,
/// and go on after the layer was dropped. Were its memory freed or filled anew before they are
/// over, they would read something else.
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
                let first = layer.tensors().next().unwrap();
                assert_eq!(first.target(), Target::Cuda(0));
                assert_eq!(first.host_pointer(), None);
                // SAFETY: a live stream of the primary context.
                unsafe { first.let_wait(stream) }.unwrap();
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
                // SAFETY: a live stream of the primary context; the kernels above are all that uses the
                // layer.
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
