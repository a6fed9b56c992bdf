//! What a CUDA device gets back: receipts, on a simulated driver that keeps book of every byte.
//!
//! Each test runs this executable once more, as a process of its own that finds the simulated
//! driver; the tests that say `scenario` are what runs there, and do nothing by themselves.
#![allow(unsafe_code, clippy::unwrap_used, clippy::as_conversions, reason = "an engine's promise; panics")]

use crate::cuda_case::{Case, free_bytes, loader, runs_clean};
use onelayer::live::{self, MemoryKind, MemoryUse};
use onelayer::{After, LayerId, ParkTo, Part, Receipt};
use onelayer_testing::cuda_sim::SimRun;

#[test]
fn parts_are_given_back() {
    runs_clean(module_path!(), "scenario_parts", 1..3, |run| run);
    runs_clean(module_path!(), "scenario_parts", 1..2, |run| run.set("POOLS", 0));
}

#[test]
fn a_hundred_cycles_leave_the_device_as_it_was() {
    runs_clean(module_path!(), "scenario_cycles", 1..2, |run| run);
}

#[test]
fn what_is_parked_comes_back_as_it_was() {
    runs_clean(module_path!(), "scenario_parked", 1..3, |run| run);
    runs_clean(module_path!(), "scenario_parked", 1..2, |run| run.set("POOLS", 0));
}

/// Each call fails once: the model is whole afterwards, in one place or the other, or gone from the
/// device.
#[test]
fn a_park_that_fails_loses_nothing() {
    for call in
        ["cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuMemAllocFromPoolAsync", "cuStreamSynchronize"]
    {
        let plain = SimRun::again(module_path!(), "scenario_park_fails").run();
        plain.assert_success();
        let calls = plain.report().calls(call);
        assert!(calls > 0, "{call}");
        for at in (1..=calls).rev().take(12) {
            let outcome =
                SimRun::again(module_path!(), "scenario_park_fails").fail(&format!("{call}:{at}:999")).run();
            outcome.assert_success();
            outcome.report().assert_clean();
        }
    }
}

/// What the driver has not confirmed is not claimed.
#[test]
fn a_free_that_is_refused_is_not_claimed() {
    for (rule, may_leak) in [
        ("cuMemPoolTrimTo:1+:1", false),
        ("cuMemPoolGetAttribute:1+:1", false),
        ("cuMemPoolGetAttribute:2:999", false),
        ("cuMemFreeAsync:1+:700!", true),
    ] {
        let outcome = SimRun::again(module_path!(), "scenario_refused").fail(rule).run();
        outcome.assert_success();
        assert!(outcome.stdout.contains("1 passed"), "{rule}: {}", outcome.stdout);
        assert!(may_leak || outcome.report().leaks().is_empty(), "{rule}: {:?}", outcome.reports);
    }
}

#[test]
#[ignore = "scenario"]
fn scenario_parts() {
    // Every layer has pages of its own.
    let case = Case::new(4, 2_000_000);
    let loader = loader(0, |builder| builder);
    let before_bytes = free_bytes(&loader);
    let mut model = loader.load(&case.checkpoint).unwrap();
    let held = model.tensor("model.layers.3.mlp.up_proj.weight").unwrap();
    for part in [Part::Layer(&LayerId::new("model.layers.1")), Part::Prefix("model.layers"), Part::All] {
        let free = free_bytes(&loader);
        let layers = model.layers().filter(|layer| part.contains(layer.id()));
        let asked_bytes: u64 = layers.map(|layer| layer.resident_bytes()).sum();
        let receipt = model.unload(part).unwrap();
        assert_eq!(receipt.asked_bytes, asked_bytes, "{part}: {receipt}");
        assert_eq!(receipt.returned_bytes + receipt.held_bytes + receipt.kept_bytes, asked_bytes, "{part}");
        assert!(receipt.kept_bytes < 2 << 20, "{part}: less than a page: {receipt}");
        assert!(free_bytes(&loader) - free >= receipt.returned_bytes, "{part}: {receipt}");
        match part {
            Part::Prefix(_) => assert_eq!(receipt.holders[0].tensor, held.name()),
            _ => assert!(receipt.holders.is_empty(), "{part}: {receipt}"),
        }
        assert_eq!(model.unload(part).unwrap(), Receipt::default(), "{part}: a second time");
    }
    case.check(&held);
    drop(held);
    assert_eq!(free_bytes(&loader), before_bytes);

    // What waits for a stream of the caller's is on its way.
    let model = loader.load(&case.checkpoint).unwrap();
    for layer in model.layers() {
        // SAFETY: the legacy default stream is always there; nothing of ours is queued in it.
        unsafe { layer.release_after(After::Stream(0)) }.unwrap();
    }
    let mut model = model;
    let receipt = model.unload_all();
    let is_plain = std::env::var("CUDA_SIM_POOLS").is_ok_and(|pools| pools == "0");
    let told = if is_plain { receipt.returned_bytes } else { receipt.queued_bytes };
    assert_eq!(told, receipt.asked_bytes, "{receipt}");
    drop(model);
    loader.device().memory().unwrap();
}

#[test]
#[ignore = "scenario"]
fn scenario_cycles() {
    let case = Case::new(3, 100_000);
    let loader = loader(0, |builder| builder);
    let before_bytes = free_bytes(&loader);
    for _ in 0..100 {
        let mut model = loader.load(&case.checkpoint).unwrap();
        let receipt = model.unload(Part::Prefix("model.layers")).unwrap().and(model.unload_all());
        assert!(receipt.returned_bytes + receipt.kept_bytes == receipt.asked_bytes, "{receipt}");
        assert_eq!(free_bytes(&loader), before_bytes);
    }
}

#[test]
#[ignore = "scenario"]
fn scenario_refused() {
    let case = Case::new(2, 500_000);
    let loader = loader(0, |builder| builder);
    let Ok(mut model) = loader.load(&case.checkpoint) else { panic!("the load itself is not disturbed") };
    let receipt = model.unload_all();
    assert_eq!((receipt.returned_bytes, receipt.unconfirmed_bytes), (0, receipt.asked_bytes), "{receipt}");
    assert!(
        !receipt.is_complete() && receipt.to_string().contains("given up without a confirmation"),
        "{receipt}"
    );
}

#[test]
#[ignore = "scenario"]
fn scenario_parked() {
    let case = Case::new(3, 700_000);
    let shelf = tempfile::tempdir().unwrap();
    let loader = loader(0, |builder| builder);
    let before_bytes = free_bytes(&loader);
    let mut model = loader.load(&case.checkpoint).unwrap();
    for to in [ParkTo::Memory, ParkTo::Folder(shelf.path())] {
        let (free, resident_bytes) = (free_bytes(&loader), model.resident_bytes());
        let receipt = model.park(Part::Prefix("model.layers"), to).unwrap();
        assert_eq!(receipt.parked_bytes, receipt.asked_bytes);
        assert!(
            receipt.kept_bytes < 2 << 20 && free_bytes(&loader) - free >= receipt.returned_bytes,
            "{receipt}"
        );
        let rest = model.park(Part::All, to).unwrap();
        assert_eq!((rest.parked_bytes + receipt.parked_bytes, model.resident_bytes()), (resident_bytes, 0));
        assert_eq!(free_bytes(&loader), before_bytes, "the device has everything back");
        let live = live::snapshot();
        assert_eq!(live.bytes(MemoryKind::Cuda(0)), 0);
        let waits_bytes = if to == ParkTo::Memory { resident_bytes } else { 0 };
        assert_eq!(live.bytes(MemoryKind::Host), waits_bytes);
        assert!(
            live.allocations().iter().all(|one| one.used_for == MemoryUse::Parked && one.layer.is_some())
        );
        assert_eq!(model.restore(Part::All).unwrap(), resident_bytes);
        assert_eq!(model.live().bytes(MemoryKind::Cuda(0)), resident_bytes);
        model.layers().for_each(|layer| case.check_layer(layer));
    }
    model.park(Part::All, ParkTo::Memory).unwrap();
    let receipt = model.unload(Part::All).unwrap();
    assert!(receipt.is_complete() && receipt.asked_bytes > 0, "host memory goes back too: {receipt}");
}

#[test]
#[ignore = "scenario"]
fn scenario_park_fails() {
    let case = Case::new(1, 400_000);
    let loader = loader(0, |builder| builder);
    let Ok(mut model) = loader.load(&case.checkpoint) else { return };
    let held_bytes = model.resident_bytes();
    let _ = model.park(Part::All, ParkTo::Memory);
    assert_eq!(model.resident_bytes() + model.parked_bytes(), held_bytes, "nothing is lost on the way");
    let _ = model.restore(Part::All);
    assert_eq!(model.resident_bytes() + model.parked_bytes(), held_bytes, "nothing is lost on the way back");
    // At most one call fails, so that this time it works.
    model.restore(Part::All).unwrap();
    for layer in model.layers() {
        for tensor in layer.tensors() {
            let mut found = vec![0; case.bytes(tensor.name()).len()];
            // The call that fails may be this one.
            if tensor.read(0, &mut found).is_ok() {
                assert!(found == case.bytes(tensor.name()), "{} is wrong", tensor.name());
            }
        }
    }
}
