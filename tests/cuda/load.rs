//! Whole loads onto CUDA devices, on a simulated driver that copies as late as CUDA allows.
//!
//! Each test runs this executable once more, as a process of its own that finds the simulated
//! driver; the tests that say `scenario` are what runs there, and do nothing by themselves. A run
//! passes if its scenario does, and if the driver has seen no misuse and nothing was left behind.
#![allow(clippy::print_stdout, reason = "a scenario tells its parent")]
#![allow(clippy::unwrap_used, clippy::as_conversions, reason = "a test that cannot go on panics")]
#![allow(clippy::cast_possible_truncation, reason = "lengths of small test files")]

use crate::cuda_case::{Case, free_bytes, loader, runs_clean};
use onelayer::load::LoadError;
use onelayer::plan::FloatType;
use onelayer::{Checkpoint, Device, HandOut, Loader, LoaderBuilder, Rank, SplitRules, Target, Window};
use onelayer_testing::cuda_sim::{MODES, SimRun, driver_without};
use onelayer_testing::{TestTensor, random_bytes, write_file};

#[test]
fn loads_and_unloads_ten_times() {
    runs_clean(module_path!(), "scenario_load_unload", 1..4, |run| run);
    runs_clean(module_path!(), "scenario_load_unload", 1..2, |run| run.set("POOLS", 0));
}

#[test]
fn streams_within_its_window() {
    runs_clean(module_path!(), "scenario_stream", 1..6, |run| run);
    runs_clean(module_path!(), "scenario_stream", 1..2, |run| run.set("POOLS", 0));
}

#[test]
fn two_devices_and_two_loads_at_once() {
    runs_clean(module_path!(), "scenario_two_devices", 1..4, |run| run.set("DEVICES", 2));
}

#[test]
fn loads_that_are_given_up_leave_nothing() {
    runs_clean(module_path!(), "scenario_cancel", 1..5, |run| run);
}

#[test]
fn narrows_on_the_way() {
    runs_clean(module_path!(), "scenario_narrowing", 1..2, |run| run);
}

#[test]
fn parts_of_one_rank_land_in_their_places() {
    runs_clean(module_path!(), "scenario_parts", 1..3, |run| run);
}

/// A thousand loads, each under another schedule.
#[test]
fn many_loads_deliver_the_right_bytes() {
    runs_clean(module_path!(), "scenario_many_loads", 1..14, |run| run.set("DELAY_US", 50));
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
            let outcome = SimRun::again(module_path!(), "scenario_pinning")
                .set("MODE", mode)
                .set("PINNED", limit)
                .run();
            outcome.assert_success();
            outcome.report().assert_clean();
            assert!(outcome.stdout.contains(&format!("pinning: {expected}")), "{limit}: {}", outcome.stdout);
        }
    }
    // One piece is refused, eight are not.
    let outcome = SimRun::again(module_path!(), "scenario_pinning").fail("cuMemHostRegister_v2:1:801").run();
    outcome.assert_success();
    outcome.report().assert_clean();
    assert!(outcome.stdout.contains("pinning: slot_by_slot 8388608"), "{}", outcome.stdout);
}

#[test]
fn what_does_not_fit_is_refused_before_it_is_loaded() {
    let outcome =
        SimRun::again(module_path!(), "scenario_too_large").set("MEM", "23M").set("CONTEXT", "16M").run();
    outcome.assert_success();
    outcome.report().assert_clean();
    let refused = outcome.stdout.lines().find(|line| line.contains("refused: ")).unwrap();
    assert!(refused.contains("7 MiB are free, 1 MiB of them reserved: "), "{refused}");
}

/// What a machine can have in place of a driver. No panic, and a message that says what was looked
/// for and what to do.
#[test]
fn a_driver_that_cannot_be_used_is_an_error_that_says_why() {
    let empty = tempfile::tempdir().unwrap();
    let junk = tempfile::tempdir().unwrap();
    std::fs::write(junk.path().join("libcuda.so.1"), b"not a library").unwrap();
    let run = || SimRun::again(module_path!(), "scenario_open");
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
        assert!(receipt.is_complete(), "{receipt}");
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
            // Each arena takes whole pages of 2 MiB from the device, that of a norm too, which waits for its
            // next layer.
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

/// Columns, rows and wholes of odd phases, as they are and narrowed: what the host has of the same
/// parts.
#[test]
#[ignore = "scenario"]
fn scenario_parts() {
    let folder = tempfile::tempdir().unwrap();
    let tensor = |name: &str, dtype, bytes: usize, shape: &[u64], seed| TestTensor {
        name: format!("layers.{name}"),
        dtype,
        shape: shape.to_vec(),
        bytes: random_bytes(shape.iter().product::<u64>() as usize * bytes, seed),
    };
    let tensors = [
        tensor("0.odd.weight", "U8", 1, &[333], 1),
        tensor("0.o_proj.weight", "BF16", 2, &[700, 1100], 2),
        tensor("0.small.o_proj.weight", "U8", 1, &[7, 26], 3),
        tensor("0.q_proj.weight", "F32", 4, &[600, 333], 4),
        tensor("0.down_proj.weight", "F32", 4, &[333, 600], 5),
        tensor("1.down_proj.weight", "U8", 1, &[6, 400_000], 6),
        tensor("1.q_proj.bias", "BF16", 2, &[26], 7),
    ];
    write_file(&folder.path().join("model.safetensors"), &tensors, 5);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    for dtype in [None, Some(FloatType::Bf16)] {
        let part = |builder: LoaderBuilder| {
            let builder = builder.shard(Rank::new(1, 2).unwrap(), SplitRules::common());
            dtype.map_or_else(|| builder.clone(), |dtype| builder.clone().dtype(dtype))
        };
        let expected = part(Loader::builder(Target::Host)).build().unwrap().load(&checkpoint).unwrap();
        let model = loader(0, part).load(&checkpoint).unwrap();
        for entry in checkpoint.tensors() {
            let (on_device, on_host) =
                (model.tensor(entry.name).unwrap(), expected.tensor(entry.name).unwrap());
            let mut found = vec![0; on_host.len_bytes() as usize];
            assert!(on_device.read(0, &mut found).unwrap());
            assert!(found == on_host.as_bytes().unwrap(), "{}", entry.name);
            assert_eq!((on_device.shape(), on_device.part()), (on_host.shape(), on_host.part()));
        }
    }
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
