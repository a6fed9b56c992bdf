//! Carries out plans on arenas of tags: a cell says which byte of which tensor it holds.
//!
//! Copies run in the reverse order, since nothing promises theirs; moves run when all of them are
//! over. For small checkpoints: a cell is larger than a byte.

#![allow(clippy::as_conversions, clippy::cast_possible_truncation, reason = "sizes of small checkpoints")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use onelayer::Checkpoint;
use onelayer::checkpoint::TensorId;
use onelayer::plan::{LoadPlan, Placement, PlannedLayer, ReadOp};
use onelayer::units::{Alignment, MIB};

/// A byte of a tensor: which tensor, which byte of what is delivered.
type Tag = (u32, u32);
const NOTHING: Tag = (u32::MAX, u32::MAX);

fn tags(placement: &Placement, range: std::ops::Range<u64>) -> impl Iterator<Item = Tag> {
    let tensor = placement.tensor.index() as u32;
    range.map(move |byte| (tensor, byte as u32))
}

/// What a slot holds after the read and after what is cast in it.
fn filled_slot(checkpoint: &Checkpoint, plan: &LoadPlan, layer: &PlannedLayer, read: &ReadOp) -> Vec<Tag> {
    let request = &read.request;
    let mut slot = vec![NOTHING; request.extent.len_bytes() as usize];
    let mut casts = plan.casts(read);
    for placement in plan.placements(layer) {
        let entry = checkpoint.tensor(placement.tensor);
        let Some(piece) = entry.extent.intersect(request.payload).filter(|_| entry.shard == request.shard)
        else {
            continue;
        };
        let start = (piece.start() - request.extent.start()) as usize;
        let inside = piece.start() - entry.extent.start();
        let Some(cast) = placement.cast else {
            let cells = &mut slot[start..start + piece.len_bytes() as usize];
            cells.iter_mut().zip(tags(placement, inside..u64::MAX)).for_each(|(cell, tag)| *cell = tag);
            continue;
        };
        let step = casts.next().expect("what is cast is listed, in file order");
        assert_eq!((step.slot_offset_bytes as usize, step.cast), (start, cast));
        assert_eq!(step.source_len_bytes, piece.len_bytes());
        let (from_bytes, to_bytes) = (cast.source_unit_bytes(), cast.target_unit_bytes());
        assert_eq!((inside % from_bytes, piece.len_bytes() % from_bytes), (0, 0), "whole elements");
        let elements = inside / from_bytes..(inside + piece.len_bytes()) / from_bytes;
        let narrowed = tags(placement, elements.start * to_bytes..elements.end * to_bytes);
        slot[start..].iter_mut().zip(narrowed).for_each(|(cell, tag)| *cell = tag);
        // Behind it is what is left of the elements: nobody may copy that.
        let rest = start + ((elements.end - elements.start) * to_bytes) as usize;
        slot[rest..start + piece.len_bytes() as usize].fill(NOTHING);
    }
    assert_eq!(casts.next(), None);
    slot
}

/// Copies and moves of a layer. Returns the arena and where the last byte lies that was written.
fn carry_out(checkpoint: &Checkpoint, plan: &LoadPlan, layer: &PlannedLayer) -> (Vec<Tag>, u64) {
    let mut arena = vec![NOTHING; layer.arena_bytes as usize];
    let mut end = 0;
    for read in layer.reads.clone().rev().map(|index| plan.read(index)) {
        let slot = filled_slot(checkpoint, plan, layer, &read);
        assert!(slot.len() as u64 <= plan.memory().ring().slot_bytes);
        for copy in plan.copies(&read) {
            let (from, to) = (copy.slot_offset_bytes as usize, copy.arena_offset_bytes as usize);
            let len = copy.len_bytes as usize;
            assert!(len > 0 && slot[from..from + len].iter().all(|tag| *tag != NOTHING));
            assert!(arena[to..to + len].iter().all(|tag| *tag == NOTHING), "each cell once");
            arena[to..to + len].copy_from_slice(&slot[from..from + len]);
            end = end.max(copy.arena_offset_bytes + copy.len_bytes);
        }
    }
    let landed = arena.clone();
    for step in plan.moves(layer).iter().rev() {
        let (from, to) = (step.source_arena_offset_bytes as usize, step.target_arena_offset_bytes as usize);
        let len = step.len_bytes as usize;
        assert!(!Alignment::TENSOR.divides(step.source_arena_offset_bytes), "no move for nothing");
        assert!(arena[to..to + len].iter().all(|tag| *tag == NOTHING), "nothing is overwritten");
        assert!(landed[from..from + len].iter().all(|tag| *tag != NOTHING), "what a copy brought is moved");
        arena[to..to + len].copy_from_slice(&landed[from..from + len]);
        end = end.max(step.target_arena_offset_bytes + step.len_bytes);
    }
    (arena, end)
}

/// Carries out a plan. Returns where the last byte lies in each arena.
pub(crate) fn check(
    checkpoint: &Checkpoint,
    plan: &LoadPlan,
    is_wanted: &dyn Fn(TensorId) -> bool,
) -> Vec<u64> {
    let (mut delivered_bytes, mut ends) = (0, Vec::new());
    for layer in plan.layers() {
        let (arena, end) = carry_out(checkpoint, plan, layer);
        let placements = plan.placements(layer);
        for placement in placements.iter().filter(|placement| placement.len_bytes() > 0) {
            assert!(Alignment::TENSOR.divides(placement.arena_offset_bytes));
            let start = placement.arena_offset_bytes as usize;
            let cells = &arena[start..start + placement.len_bytes() as usize];
            assert!(cells.iter().copied().eq(tags(placement, 0..placement.len_bytes())));
        }
        let unit = if end < 2 * MIB { Alignment::PAGE } else { Alignment::HUGE_PAGE };
        assert_eq!(layer.arena_bytes, unit.up(end).unwrap());
        let tensor_bytes: u64 = placements.iter().map(Placement::len_bytes).sum();
        assert_eq!(layer.tensor_bytes, tensor_bytes);
        delivered_bytes += tensor_bytes;
        ends.push(end);
    }
    assert_eq!(plan.tensor_bytes(), delivered_bytes);
    let wanted = checkpoint.tensors().filter(|tensor| is_wanted(tensor.id));
    let source_bytes: u64 = wanted.map(|tensor| tensor.extent.len_bytes()).sum();
    assert_eq!(plan.source_bytes(), source_bytes);
    assert_eq!(plan.over_read_bytes(), plan.aligned_read_bytes() - source_bytes);
    ends
}
