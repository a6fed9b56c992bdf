//! The CUDA backend on a simulated driver: conformance, and the reuse of slots under many
//! schedules.
//!
//! Each test runs this executable again, as a process that finds the simulated driver. The tests
//! named `scenario` run there, and do nothing by themselves.
#![allow(clippy::print_stdout, reason = "a scenario tells its parent")]

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc;

use super::backend::SKIPS_THE_WAIT;
use super::{Context, CudaBackend, CudaSession, Registrar, SessionOptions};
use crate::budget::MemoryBudget;
use crate::device::conformance::{self, start_copy};
use crate::device::{ArenaPlace, Backend, PendingCopy};
use crate::plan::{PlannedLayer, RingShape};
use crate::staging::{Pinning, Ring};
use crate::units::{ByteRange, KIB};

use onelayer_testing::all_or;
use onelayer_testing::cuda_sim::{MODES, SimOutcome, SimRun};

fn run(scenario: &str, mode: &str, seed: u64, change: impl FnOnce(SimRun) -> SimRun) -> SimOutcome {
    let run = SimRun::again(module_path!(), scenario).set("MODE", mode).set("SEED", seed);
    let outcome = change(run).run();
    outcome.assert_success();
    outcome
}

#[test]
fn cuda_conforms() {
    for mode in MODES {
        for seed in 1..4 {
            run("scenario_conformance", mode, seed, |run| run).report().assert_clean();
            let plain = run("scenario_conformance", mode, seed, |run| run.set("POOLS", 0));
            plain.report().assert_clean();
        }
    }
}

fn schedules(mode: &str, seed: u64, count: u32, is_broken: bool) -> SimOutcome {
    run("scenario_schedules", mode, seed, |run| {
        let run = run.env("ONELAYER_SCHEDULES", count.to_string()).set("DELAY_US", 20);
        run.env("ONELAYER_BROKEN", if is_broken { "1" } else { "0" })
    })
}

/// Many layers through rings of two to four slots: no slot is filled again before the device has
/// read it. `ONELAYER_SCHEDULES` sets the number of layers of each of the 48 kinds.
#[test]
fn slots_are_never_used_again_too_early() {
    let count: u32 =
        std::env::var("ONELAYER_SCHEDULES").map_or(all_or(250, 25), |text| text.parse().unwrap());
    let explore = |mode: &str| {
        for seed in 1..=24 {
            let outcome = schedules(mode, seed, count, false);
            assert!(outcome.stdout.contains("wrong schedules: 0"), "{}", outcome.stdout);
            outcome.report().assert_clean();
            assert_eq!(outcome.report().calls("cuMemHostRegister_v2"), u64::from(count));
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| explore("thread"));
        explore("lazy");
    });
}

/// The same with a ring that returns slots too early: shows that the test above can fail.
#[test]
fn a_broken_ring_is_caught() {
    let runs = all_or(100, 20);
    // A copy that runs after the next filling of its slot shows the fault. On a busy processor
    // every copy of one layer may be in time, but not of ten.
    const SCHEDULES: u32 = 10;
    for mode in ["lazy", "thread"] {
        for seed in 1..=runs {
            let outcome = schedules(mode, seed, SCHEDULES, true);
            let is_caught =
                !outcome.stdout.contains("wrong schedules: 0") || !outcome.report().violations().is_empty();
            assert!(is_caught, "{mode}, seed {seed}: {}", outcome.stdout);
        }
    }
}

/// The context of device 0, if the driver is the simulated one and nothing else.
fn context() -> Arc<Context> {
    let context = Context::primary(0).unwrap();
    let name = context.name().unwrap();
    assert!(name.contains("simulated"), "{name} is not simulated");
    context
}

fn backend(context: &Arc<Context>, recycle_bytes_max: Option<u64>) -> CudaBackend {
    let options = SessionOptions { recycle_bytes_max, ..SessionOptions::default() };
    CudaBackend::new(CudaSession::new(context, options).unwrap(), conformance::SLOTS).unwrap()
}

#[test]
#[ignore = "scenario"]
fn scenario_conformance() {
    let context = context();
    let ring = conformance::ring(Some(&Registrar(Arc::clone(&context))));
    assert_eq!(*ring.pinning(), Pinning::Whole);
    conformance::suite(|recycled| backend(&context, recycled), &ring);
    conformance::moves_come_after_all_copies(&backend(&context, None), &ring);
}

/// Copies of one schedule.
const COPIES: u64 = 24;
const SLOT_BYTES: u64 = 4 * KIB;

/// One layer through a ring of `slots`; another thread returns the slots as their copies finish.
/// True if every byte is right.
fn one_schedule(context: &Arc<Context>, slots: u32) -> bool {
    let shape = RingShape { slots, slot_bytes: SLOT_BYTES, readers: 1 };
    let reservation = MemoryBudget::new(shape.bytes()).reserve("ring", shape.bytes()).unwrap();
    let ring = Ring::new(shape, reservation, Some(&Registrar(Arc::clone(context)))).unwrap();
    let backend = backend(context, None);
    let arena = backend.allocate(&PlannedLayer::of_bytes(COPIES * SLOT_BYTES), ArenaPlace::Own).unwrap();
    let place = |number| ByteRange::with_len(number * SLOT_BYTES, SLOT_BYTES).unwrap();
    let (sender, receiver) = mpsc::channel::<super::backend::CudaCopy>();
    std::thread::scope(|scope| {
        scope.spawn(move || receiver.iter().for_each(|copy| drop(copy.wait().unwrap())));
        for number in 0..COPIES {
            while ring.free_slots() == 0 {
                std::thread::yield_now();
            }
            sender.send(start_copy(&backend, &ring, &arena, number, place(number))).unwrap();
        }
        drop(sender);
    });
    let resident = backend.seal(arena, &[]).unwrap();
    conformance::first_wrong(&*resident, SLOT_BYTES, COPIES).is_none()
}

#[test]
#[ignore = "scenario"]
fn scenario_schedules() {
    let number = |name: &str| std::env::var(name).unwrap().parse::<u32>().unwrap();
    SKIPS_THE_WAIT.store(number("ONELAYER_BROKEN") == 1, Ordering::Relaxed);
    let context = context();
    let wrong =
        (0..number("ONELAYER_SCHEDULES")).filter(|index| !one_schedule(&context, 2 + index % 3)).count();
    println!("wrong schedules: {wrong}");
}
