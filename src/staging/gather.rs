//! Moves the wanted bytes of a slot together, in place, right after they were read.
//!
//! Runs only move towards the front, the first one first, so no wanted byte is overwritten.

use crate::plan::GatherOp;
use crate::units::to_usize;

/// Moves the runs of one stretch to its front. The bytes behind them, up to the end of the stretch,
/// are undefined then.
///
/// # Panics
/// If the stretch goes beyond the slot.
pub(crate) fn gather_step(slot: &mut [u8], step: &GatherOp) {
    let bytes = &mut slot[to_usize(step.slot_offset_bytes)..][..to_usize(step.source_len_bytes)];
    let (run, stride) = (to_usize(step.gather.run_bytes()), to_usize(step.gather.stride_bytes()));
    let phase = to_usize(step.phase_bytes);
    // The rest of the run in which the stretch begins is in place.
    let mut gathered = run.saturating_sub(phase).min(bytes.len());
    let mut start = stride - phase;
    while start < bytes.len() {
        let end = (start + run).min(bytes.len());
        bytes.copy_within(start..end, gathered);
        gathered += end - start;
        start += stride;
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::TensorId;
    use crate::plan::Gather;
    use crate::slices::Strided;
    use crate::units::to_u64;

    /// Every cut of a small stretch into two reads gives the runs and nothing else, each byte once.
    #[test]
    fn what_is_wanted_comes_together_wherever_a_read_begins_and_ends() {
        for (run_bytes, stride_bytes, count) in [(1, 2, 7), (5, 8, 4), (3, 3, 4), (4, 20, 3), (7, 9, 1)] {
            let runs = Strided { start_bytes: 0, run_bytes, stride_bytes, count };
            let Some((stretch, Some(gather))) = Gather::of_runs(runs) else {
                assert_eq!(count, 1);
                continue;
            };
            let file: Vec<u8> = (0..).take(to_usize(stretch.len_bytes())).collect();
            let wanted: Vec<u8> =
                file.iter().copied().filter(|&at| u64::from(at) % stride_bytes < run_bytes).collect();
            for cut in 0..=file.len() {
                let mut found = Vec::new();
                for (start, end) in [(0, cut), (cut, file.len())] {
                    let mut slot = vec![0xA5; 3];
                    slot.extend_from_slice(&file[start..end]);
                    slot.extend([0xA5; 3]);
                    let step = GatherOp {
                        tensor: TensorId(0),
                        slot_offset_bytes: 3,
                        source_len_bytes: to_u64(end - start),
                        phase_bytes: to_u64(start) % stride_bytes,
                        gather,
                    };
                    gather_step(&mut slot, &step);
                    found.extend_from_slice(&slot[3..][..to_usize(step.wanted_bytes())]);
                    let beside = slot[..3].iter().chain(&slot[3 + end - start..]);
                    assert!(
                        beside.copied().all(|byte| byte == 0xA5),
                        "nothing beside the stretch is written"
                    );
                }
                assert_eq!(found, wanted, "{run_bytes} of {stride_bytes}, cut at {cut}");
            }
        }
    }
}
