//! Extents of a layer -> reads of at most one slot each, and the copies out of them.

use std::ops::Range;

use super::layout::{LaidOutLayer, Layout};
use super::{CopyOp, Placement, PlanError, ReadOp, ReadRequest, index_range};
use crate::checkpoint::{Checkpoint, ShardId};
use crate::units::{Alignment, ByteRange, KIB};

/// A hole between two wanted extents that is cheaper to read through than to seek over: what a disk moves in
/// the time of one more request.
const GAP_BYTES_MAX: u64 = 64 * KIB;

/// Reads and copies of all layers.
#[derive(Default)]
pub(super) struct ReadList {
    pub(super) reads: Vec<ReadOp>,
    pub(super) copies: Vec<CopyOp>,
    pub(super) reads_of_layer: Vec<Range<u32>>,
}

/// Cuts every layer into reads. A read never spans two layers: files often hold `layers.10` next to
/// `layers.1`, and a slot that waits for a layer outside the window would never be freed.
pub(super) fn cut(
    checkpoint: &Checkpoint,
    layout: &Layout,
    slot_bytes: u64,
    alignment: Alignment,
) -> Result<ReadList, PlanError> {
    let mut list = ReadList::default();
    for layer in &layout.layers {
        let overflow = || PlanError::Overflow { what: "the reads", layer: layer.id.to_string() };
        let first = index_of(list.reads.len()).ok_or_else(overflow)?;
        list.cut_layer(checkpoint, layout, layer, slot_bytes, alignment).ok_or_else(overflow)?;
        list.reads_of_layer.push(first..index_of(list.reads.len()).ok_or_else(overflow)?);
    }
    list.reads.shrink_to_fit();
    list.copies.shrink_to_fit();
    Ok(list)
}

/// A stretch of one file that is wanted as a whole, and the tensors in it.
struct Run<'a> {
    shard: ShardId,
    bytes: ByteRange,
    placements: &'a [Placement],
}

impl ReadList {
    /// `None` if a count or an aligned end does not fit.
    fn cut_layer(
        &mut self,
        checkpoint: &Checkpoint,
        layout: &Layout,
        layer: &LaidOutLayer,
        slot_bytes: u64,
        alignment: Alignment,
    ) -> Option<()> {
        let mut rest = &layout.placements[index_range(&layer.placements)];
        while let Some(run) = next_run(checkpoint, &mut rest) {
            let mut placements = run.placements;
            let mut start = run.bytes.start();
            while start < run.bytes.end() {
                let slot_end = alignment.down(start).checked_add(slot_bytes)?;
                let payload = ByteRange::new(start, run.bytes.end().min(slot_end))?;
                let extent = payload.align_outward(alignment)?;
                let first_copy = self.copies.len();
                self.copy_out(checkpoint, extent, payload, &mut placements)?;
                self.reads.push(ReadOp {
                    request: ReadRequest { shard: run.shard, extent, payload },
                    copies: index_of(first_copy)?..index_of(self.copies.len())?,
                });
                start = payload.end();
            }
        }
        Some(())
    }

    /// Adds the copies of one read, joining neighbours. `placements` loses the tensors that are complete.
    fn copy_out(
        &mut self,
        checkpoint: &Checkpoint,
        extent: ByteRange,
        payload: ByteRange,
        placements: &mut &[Placement],
    ) -> Option<()> {
        let first_copy = self.copies.len();
        while let Some(placement) = placements.first() {
            let tensor = checkpoint.tensor(placement.tensor).extent;
            if let Some(piece) = tensor.intersect(payload) {
                let copy = CopyOp {
                    slot_offset_bytes: piece.start() - extent.start(),
                    arena_offset_bytes: placement
                        .arena_offset_bytes
                        .checked_add(piece.start() - tensor.start())?,
                    len_bytes: piece.len_bytes(),
                };
                let open = &mut self.copies[first_copy..];
                match open.last_mut().filter(|last| last.is_continued_by(&copy)) {
                    Some(last) => last.len_bytes += copy.len_bytes,
                    None => self.copies.push(copy),
                }
            }
            if tensor.end() > payload.end() {
                break;
            }
            *placements = &placements[1..];
        }
        Some(())
    }
}

impl CopyOp {
    fn is_continued_by(&self, next: &Self) -> bool {
        self.slot_offset_bytes + self.len_bytes == next.slot_offset_bytes
            && self.arena_offset_bytes + self.len_bytes == next.arena_offset_bytes
    }
}

/// Takes the next run off `rest`: neighbours in one file with at most [`GAP_BYTES_MAX`] between them. Tensors
/// without bytes need no read.
fn next_run<'a>(checkpoint: &Checkpoint, rest: &mut &'a [Placement]) -> Option<Run<'a>> {
    let empty = |placement: &&Placement| checkpoint.tensor(placement.tensor).extent.is_empty();
    let skipped = rest.iter().take_while(empty).count();
    *rest = &rest[skipped..];
    let first = checkpoint.tensor(rest.first()?.tensor);
    let mut end = first.extent.end();
    let len = rest
        .iter()
        .take_while(|placement| {
            let tensor = checkpoint.tensor(placement.tensor);
            let near =
                tensor.shard == first.shard && tensor.extent.start() <= end.saturating_add(GAP_BYTES_MAX);
            if near {
                end = end.max(tensor.extent.end());
            }
            near
        })
        .count();
    let (placements, after) = rest.split_at(len);
    *rest = after;
    let bytes = ByteRange::new(first.extent.start(), end)?;
    Some(Run { shard: first.shard, bytes, placements })
}

fn index_of(len: usize) -> Option<u32> {
    u32::try_from(len).ok()
}
