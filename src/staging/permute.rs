//! Puts the elements of a slot in row-major order, right after they were read.
//!
//! Each unit is copied to the free end of the slot, and comes back in its new order.

use crate::plan::PermuteOp;
use crate::slices::Runs;
use crate::units::to_usize;

/// Permutes one stretch, unit by unit. The bytes at its scratch are undefined then.
///
/// # Panics
/// If the stretch or its scratch goes beyond the slot.
pub(crate) fn permute_step(slot: &mut [u8], step: &PermuteOp<'_>) {
    let unit_bytes = to_usize(step.permutation.unit_bytes());
    let (bytes, scratch) = slot.split_at_mut(to_usize(step.scratch_offset_bytes));
    let bytes = &mut bytes[to_usize(step.slot_offset_bytes)..][..to_usize(step.len_bytes)];
    let scratch = &mut scratch[..unit_bytes];
    let runs = step.permutation.runs();
    for unit in bytes.chunks_exact_mut(unit_bytes) {
        scratch.copy_from_slice(unit);
        match runs.run_bytes() {
            1 => copy_elements::<1>(unit, scratch, runs),
            2 => copy_elements::<2>(unit, scratch, runs),
            4 => copy_elements::<4>(unit, scratch, runs),
            8 => copy_elements::<8>(unit, scratch, runs),
            run_bytes => {
                for (start, run) in runs.starts().zip(unit.chunks_exact_mut(to_usize(run_bytes))) {
                    run.copy_from_slice(&scratch[to_usize(start)..][..run.len()]);
                }
            }
        }
    }
}

/// The same for runs of a length that the compiler knows.
fn copy_elements<const LEN: usize>(unit: &mut [u8], scratch: &[u8], runs: &Runs) {
    let (unit, _) = unit.as_chunks_mut::<LEN>();
    for (start, element) in runs.starts().zip(unit) {
        *element = *scratch[to_usize(start)..].first_chunk().expect("runs lie inside the unit");
    }
}
