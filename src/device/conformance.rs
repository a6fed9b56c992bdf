//! The conformance suite of all devices.
//!
//! The host runs it here. A CUDA device runs it on a simulated driver, in a separate process.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::{ArenaPlace, Backend, HostBackend, PendingCopy, Resident};
use crate::budget::MemoryBudget;
use crate::checkpoint::TensorId;
#[cfg(feature = "cuda")]
use crate::plan::MoveOp;
use crate::plan::{Copies, Placement, PlannedLayer, RingShape};
use crate::staging::{Pinner, Ring};
use crate::units::{ByteRange, KIB, MIB, to_u64, to_usize};

/// Slots of the ring that the suite runs with.
pub(crate) const SLOTS: u32 = 4;
const SLOT_BYTES: u64 = 8 * KIB;

/// A ring for the suite.
pub(crate) fn ring(pinner: Option<&dyn Pinner>) -> Arc<Ring> {
    let shape = RingShape { slots: SLOTS, slot_bytes: SLOT_BYTES, readers: 2 };
    let reservation = MemoryBudget::new(shape.bytes()).reserve("ring", shape.bytes()).unwrap();
    Ring::new(shape, reservation, pinner).unwrap()
}

/// Fills `bytes` with the contents of slot `number`: words that hardly ever repeat, in this slot or
/// another.
fn fill(number: u64, bytes: &mut [u8]) {
    let number = (number + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    for (index, word) in (1_u64..).zip(bytes.chunks_mut(8)) {
        let filling = (number ^ index.wrapping_mul(0xBF58_476D_1CE4_E5B9)).to_le_bytes();
        word.copy_from_slice(&filling[..word.len()]);
    }
}

/// The contents of slot `number`.
fn filled(number: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fill(number, &mut bytes);
    bytes
}

/// Fills a slot and starts its copy to `arena_offset_bytes`.
pub(crate) fn start_copy<B: Backend>(
    backend: &B,
    ring: &Arc<Ring>,
    arena: &Arc<B::Arena>,
    number: u64,
    place: ByteRange,
) -> B::Pending {
    let mut slot = ring.try_take().expect("a slot is free");
    fill(number, &mut slot.bytes_mut()[..to_usize(place.len_bytes())]);
    let extent = ByteRange::with_len(0, place.len_bytes()).unwrap();
    let placement = Placement {
        tensor: TensorId(0),
        extent,
        arena_offset_bytes: place.start(),
        cast: None,
        gather: None,
        permuted_unit_bytes: None,
        quantised: None,
    };
    backend.copy_async(arena, slot.into_filled(), Copies::of_one_tensor(&placement)).unwrap()
}

/// Offset of the first wrong byte of copy `number` at `place`.
fn differs<R: Resident>(resident: &R, number: u64, place: ByteRange) -> Option<u64> {
    let mut found = vec![0; to_usize(place.len_bytes())];
    assert!(resident.read(place.start(), &mut found).unwrap());
    let expected = filled(number, found.len());
    let wrong = found.iter().zip(&expected).position(|(found, expected)| found != expected);
    wrong.map(|offset| place.start() + to_u64(offset))
}

/// The first wrong one of `copies` copies that lie one behind the other.
#[cfg(feature = "cuda")]
pub(crate) fn first_wrong<R: Resident>(resident: &R, len_bytes: u64, copies: u64) -> Option<u64> {
    let mut found = vec![0; to_usize(copies * len_bytes)];
    assert!(resident.read(0, &mut found).unwrap());
    let mut copies = (0..copies).zip(found.chunks(to_usize(len_bytes)));
    copies.find(|&(number, copy)| copy != filled(number, copy.len())).map(|(number, _)| number)
}

fn check<R: Resident>(resident: &R, number: u64, place: ByteRange) {
    assert_eq!(differs(resident, number, place), None, "copy {number} at {place:?}");
}

fn bytes(start: u64, len: u64) -> ByteRange {
    ByteRange::with_len(start, len).unwrap()
}

/// The whole suite. `backend(Some(n))` keeps arenas of `n` bytes for their next layer,
/// `backend(None)` keeps none.
pub(crate) fn suite<B: Backend>(backend: impl Fn(Option<u64>) -> B, ring: &Arc<Ring>) {
    every_byte_arrives(&backend(None), ring);
    a_copy_that_nobody_waits_for_is_made(&backend(None), ring);
    slots_are_used_again_and_again(&backend(None), ring);
    a_layer_without_bytes_is_a_layer(&backend(None), ring);
    arenas_are_apart_and_are_used_again(&backend(Some(2 * MIB)), ring);
    a_layer_outlives_its_backend(backend(None), ring);
    reading_beyond_the_end_panics(&backend(None), ring);
    memory_that_no_machine_has_is_refused(&backend(None), ring);
    assert_eq!(ring.free_slots(), to_usize(u64::from(SLOTS)), "a slot is missing");
}

fn every_byte_arrives<B: Backend>(backend: &B, ring: &Arc<Ring>) {
    let arena = backend.allocate(&PlannedLayer::of_bytes(64 * KIB), ArenaPlace::Own).unwrap();
    let places = [bytes(0, SLOT_BYTES), bytes(SLOT_BYTES, 1), bytes(12_345, 777), bytes(64 * KIB - 300, 300)];
    let mut pending: Vec<_> =
        (0..).zip(places).map(|(number, place)| start_copy(backend, ring, &arena, number, place)).collect();
    assert_eq!(ring.free_slots(), 0);
    // In any order.
    while let Some(copy) = pending.pop() {
        drop(copy.wait().unwrap());
    }
    assert_eq!(ring.free_slots(), places.len());
    let resident = backend.seal(arena, &[]).unwrap();
    resident.wait_ready().unwrap();
    assert!(resident.is_ready().unwrap() && resident.is_somewhere());
    assert_eq!(resident.len_bytes(), 64 * KIB);
    (0..).zip(places).for_each(|(number, place)| check(&*resident, number, place));
    backend.trim();
}

fn a_copy_that_nobody_waits_for_is_made<B: Backend>(backend: &B, ring: &Arc<Ring>) {
    let arena = backend.allocate(&PlannedLayer::of_bytes(16 * KIB), ArenaPlace::Own).unwrap();
    drop(start_copy(backend, ring, &arena, 7, bytes(100, 5000)));
    assert_eq!(ring.free_slots(), to_usize(u64::from(SLOTS)));
    check(&*backend.seal(arena, &[]).unwrap(), 7, bytes(100, 5000));
}

/// Slots come back in any order and are filled again at once: no copy may see the next bytes of its
/// slot.
fn slots_are_used_again_and_again<B: Backend>(backend: &B, ring: &Arc<Ring>) {
    const COPIES: u64 = 32;
    let arena = backend.allocate(&PlannedLayer::of_bytes(COPIES * SLOT_BYTES), ArenaPlace::Own).unwrap();
    let place = |number| bytes(number * SLOT_BYTES, SLOT_BYTES - number);
    let mut pending = Vec::new();
    for number in 0..COPIES {
        pending.push(start_copy(backend, ring, &arena, number, place(number)));
        if ring.free_slots() == 0 {
            let next = to_usize(number * 7) % pending.len();
            drop(pending.swap_remove(next).wait().unwrap());
        }
    }
    drop(pending);
    let resident = backend.seal(arena, &[]).unwrap();
    (0..COPIES).for_each(|number| check(&*resident, number, place(number)));
}

fn a_layer_without_bytes_is_a_layer<B: Backend>(backend: &B, _ring: &Arc<Ring>) {
    let arena = backend.allocate(&PlannedLayer::of_bytes(0), ArenaPlace::Own).unwrap();
    let resident = backend.seal(arena, &[]).unwrap();
    resident.wait_ready().unwrap();
    assert_eq!(resident.len_bytes(), 0);
    assert!(resident.read(0, &mut []).unwrap());
}

fn arenas_are_apart_and_are_used_again<B: Backend>(backend: &B, ring: &Arc<Ring>) {
    for round in 0..5 {
        let layer = PlannedLayer::of_bytes(MIB);
        let arenas = [
            backend.allocate(&layer, ArenaPlace::Own).unwrap(),
            backend.allocate(&layer, ArenaPlace::Own).unwrap(),
        ];
        for (number, arena) in (round..).zip(&arenas) {
            let copy = start_copy(backend, ring, arena, number, bytes(500_000, SLOT_BYTES));
            drop(copy.wait().unwrap());
        }
        let residents = arenas.map(|arena| backend.seal(arena, &[]).unwrap());
        (round..).zip(&residents).for_each(|(number, resident)| {
            check(&**resident, number, bytes(500_000, SLOT_BYTES));
        });
    }
    backend.trim();
}

fn a_layer_outlives_its_backend<B: Backend>(backend: B, ring: &Arc<Ring>) {
    let arena = backend.allocate(&PlannedLayer::of_bytes(16 * KIB), ArenaPlace::Own).unwrap();
    let copy = start_copy(&backend, ring, &arena, 3, bytes(0, SLOT_BYTES));
    let resident = backend.seal(arena, &[]).unwrap();
    drop(copy);
    backend.trim();
    drop(backend);
    check(&*resident, 3, bytes(0, SLOT_BYTES));
}

fn reading_beyond_the_end_panics<B: Backend>(backend: &B, _ring: &Arc<Ring>) {
    let arena = backend.allocate(&PlannedLayer::of_bytes(4 * KIB), ArenaPlace::Own).unwrap();
    let resident = backend.seal(arena, &[]).unwrap();
    for (offset, len) in [(4096, 1), (4000, 97), (u64::MAX, 1)] {
        let read = AssertUnwindSafe(|| resident.read(offset, &mut vec![0; len]));
        assert!(catch_unwind(read).is_err(), "{len} bytes at {offset}");
    }
    assert!(resident.read(4096, &mut []).unwrap(), "nothing can be read from anywhere");
}

fn memory_that_no_machine_has_is_refused<B: Backend>(backend: &B, ring: &Arc<Ring>) {
    let refused = backend.allocate(&PlannedLayer::of_bytes(1 << 62), ArenaPlace::Own);
    let error = refused.err().expect("that much is refused").to_string();
    assert!(error.starts_with("cannot allocate an arena of 4194304 TiB"), "{error}");
    a_copy_that_nobody_waits_for_is_made(backend, ring);
}

/// For devices that make moves.
#[cfg(feature = "cuda")]
pub(crate) fn moves_come_after_all_copies<B: Backend>(backend: &B, ring: &Arc<Ring>) {
    let arena = backend.allocate(&PlannedLayer::of_bytes(64 * KIB), ArenaPlace::Own).unwrap();
    let landed = [bytes(101, 300), bytes(20_001, 5000)];
    let copies: Vec<_> =
        (0..).zip(landed).map(|(number, place)| start_copy(backend, ring, &arena, number, place)).collect();
    let places = [bytes(40 * KIB, 300), bytes(48 * KIB, 5000)];
    let moves = [0, 1].map(|index| MoveOp {
        source_arena_offset_bytes: landed[index].start(),
        target_arena_offset_bytes: places[index].start(),
        len_bytes: landed[index].len_bytes(),
    });
    let resident = backend.seal(arena, &moves).unwrap();
    drop(copies);
    resident.wait_ready().unwrap();
    (0..).zip(places).for_each(|(number, place)| check(&*resident, number, place));
}

#[test]
#[cfg(not(miri))] // miri ends when memory does
fn the_host_conforms() {
    let backend = |recycled: Option<u64>| recycled.map_or_else(HostBackend::new, HostBackend::recycling);
    suite(backend, &ring(None));
}
