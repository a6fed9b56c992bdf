//! Pass after pass onto a simulated CUDA device: one window, one arena for each kept layer, and
//! nothing allocated after that.
#![allow(clippy::unwrap_used, clippy::as_conversions, reason = "a test that cannot go on panics")]

use crate::cuda_case::{Case, free_bytes, loader, runs_clean};
use onelayer::{HandOut, Keep, LoadError, Passes, Window, live};
use onelayer_testing::cuda_sim::{MODES, SimReport, SimRun};

#[test]
fn every_pass_is_right_and_leaves_nothing() {
    runs_clean(module_path!(), "scenario_passes", 1..3, |run| run);
    runs_clean(module_path!(), "scenario_passes", 1..2, |run| run.set("POOLS", 0));
}

#[test]
fn streams_that_are_given_up_in_a_later_pass_leave_nothing() {
    runs_clean(module_path!(), "scenario_given_up", 1..3, |run| run);
}

/// What the driver was asked for in so many passes.
fn report_of(passes: u64, mode: &str) -> SimReport {
    let run = SimRun::again(module_path!(), "scenario_counted")
        .set("MODE", mode)
        .env("ONELAYER_PASSES", passes.to_string());
    let outcome = run.run();
    outcome.assert_success();
    outcome.report().assert_clean();
    outcome.report().clone()
}

/// Counted by the driver: twenty passes allocate, free, pin and make streams exactly as often as
/// two.
#[test]
fn no_memory_is_asked_for_after_the_first_pass() {
    for mode in MODES {
        let (few, many) = (report_of(2, mode), report_of(20, mode));
        let memory = |report: &SimReport| {
            let calls = report.calls_of_all().into_iter();
            let is_memory = |name: &str| {
                ["Alloc", "Free", "HostRegister", "HostUnregister", "PoolCreate", "StreamCreate"]
                    .iter()
                    .any(|part| name.contains(part))
            };
            calls.filter(|(name, _)| is_memory(name)).collect::<Vec<_>>()
        };
        assert_eq!(memory(&few), memory(&many), "{mode}");
        assert!(
            few.calls("cuMemAllocFromPoolAsync") == 1 + 3,
            "a window, and three kept layers: {:?}",
            memory(&few)
        );
        assert!(many.calls("cuMemcpyHtoDAsync_v2") > 5 * few.calls("cuMemcpyHtoDAsync_v2"));
    }
}

#[test]
#[ignore = "scenario"]
fn scenario_passes() {
    let case = Case::new(4, 150_000);
    for (window, prefetch, hand_out, keep) in [
        (Window::Layers(1), 0, HandOut::WhenComplete, Keep::Nothing),
        (Window::Layers(1), 2, HandOut::AtOnce, Keep::OutsideStacks),
        (Window::Layers(2), 2, HandOut::WhenComplete, Keep::OutsideStacks),
        (Window::Layers(3), 9, HandOut::AtOnce, Keep::Nothing),
        (Window::Bytes(6 << 20), 9, HandOut::WhenComplete, Keep::OutsideStacks),
        (Window::All, 2, HandOut::WhenComplete, Keep::Nothing),
    ] {
        let loader = loader(0, |builder| {
            builder.window(window).prefetch(prefetch).hand_out(hand_out).keep(keep).passes(Passes::Times(4))
        });
        let before = free_bytes(&loader);
        let mut stream = loader.stream(&case.checkpoint).unwrap();
        let planned_bytes = stream.plan().memory().resident_bytes();
        let mut tensors = 0;
        let mut used = None;
        for layer in &mut stream {
            let layer = layer.unwrap();
            case.check_layer(&layer);
            tensors += layer.tensors().len();
            let used_bytes = before - free_bytes(&loader);
            // Each arena takes whole pages of 2 MiB from the device.
            assert!(used_bytes <= planned_bytes + (4 << 21), "{used_bytes} of {planned_bytes}");
            // In the last pass what is not needed any more goes as soon as the load is over.
            if (1..3).contains(&layer.pass()) {
                let first = *used.get_or_insert(used_bytes);
                assert_eq!(
                    first, used_bytes,
                    "{window} {prefetch} {hand_out:?}: what is taken stays as it is"
                );
            }
        }
        assert_eq!(tensors, 4 * case.tensors.len());
        drop(stream);
        assert_eq!(free_bytes(&loader), before);
        assert!(live::snapshot().allocations().is_empty());
    }
}

#[test]
#[ignore = "scenario"]
fn scenario_given_up() {
    let case = Case::new(3, 150_000);
    let loader = loader(0, |builder| {
        builder.window(Window::Layers(2)).keep(Keep::OutsideStacks).passes(Passes::Endless)
    });
    let before = free_bytes(&loader);
    let count = loader.plan(&case.checkpoint).unwrap().layers().len();
    for taken in [0, 1, count, 2 * count + 2] {
        let mut stream = loader.stream(&case.checkpoint).unwrap();
        let mut last = None;
        for _ in 0..taken {
            drop(last.take());
            last = Some(stream.next().unwrap().unwrap());
        }
        if taken > count {
            stream.cancel_handle().cancel();
            assert!(matches!(stream.next(), Some(Err(LoadError::Cancelled))));
        }
        drop(stream);
        if let Some(layer) = last {
            case.check_layer(&layer);
        }
        assert_eq!(free_bytes(&loader), before, "after {taken} layers");
        assert!(live::snapshot().allocations().is_empty());
    }
}

#[test]
#[ignore = "scenario"]
fn scenario_counted() {
    let case = Case::new(4, 150_000);
    let passes = std::env::var("ONELAYER_PASSES").unwrap().parse().unwrap();
    let loader = loader(0, |builder| {
        builder.window(Window::Layers(2)).keep(Keep::OutsideStacks).passes(Passes::Times(passes))
    });
    for layer in loader.stream(&case.checkpoint).unwrap() {
        layer.unwrap();
    }
}
