//! The CUDA backend on a simulated driver: conformance, and how slots are used again under many schedules.
//!
//! Each test runs this executable once more, as a process of its own that finds the simulated driver; the tests that say
//! `scenario` are what runs there, and do nothing by themselves.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc;

use super::backend::SKIPS_THE_WAIT;
use super::{Context, CudaBackend, Lane, LaneOptions, Registrar};
use crate::budget::MemoryBudget;
use crate::device::conformance::{self, start_copy};
use crate::device::{Backend, PendingCopy, Resident};
use crate::plan::{PlannedLayer, RingShape};
use crate::staging::{Pinning, Ring};
use crate::units::{ByteRange, KIB, MIB};

#[path = "../../../tests/common/cuda_sim.rs"]
mod cuda_sim;

/// The context of device 0, if the driver is the simulated one and nothing else.
fn context() -> Arc<Context> {
    let context = Context::primary(0).unwrap();
    let name = context.name().unwrap();
    assert!(name.contains("simulated"), "{name} is not simulated");
    context
}

fn backend(context: &Arc<Context>, recycle_bytes_max: Option<u64>) -> CudaBackend {
    let options = LaneOptions { recycle_bytes_max, ..LaneOptions::default() };
    CudaBackend::new(Lane::new(context, options).unwrap(), conformance::SLOTS).unwrap()
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

/// One layer through a ring of `slots`, which another thread gives back as its copies are over. True if every byte is
/// right.
fn one_schedule(context: &Arc<Context>, slots: u32) -> bool {
    let shape = RingShape { slots, slot_bytes: SLOT_BYTES, readers: 1 };
    let reservation = MemoryBudget::new(shape.bytes()).reserve("ring", shape.bytes()).unwrap();
    let ring = Ring::new(shape, reservation, Some(&Registrar(Arc::clone(context)))).unwrap();
    let backend = backend(context, None);
    let arena = backend.allocate(&PlannedLayer::of_bytes(COPIES * SLOT_BYTES)).unwrap();
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
    (0..COPIES).all(|number| conformance::differs(&resident, number, place(number)).is_none())
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
