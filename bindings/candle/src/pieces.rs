//! Reads tensors through staging: read a piece, cast it with candle on the host, copy it to its
//! place.
//!
//! ```text
//! file -> stored piece -> piece as a tensor -> cast, if needed -> on the device, if any -> part of the tensor
//! ```
//!
//! The size of a piece is chosen so that all these copies fit into the staging at once, for every
//! thread. Each thread takes the next piece; the order in which pieces arrive does not matter.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use candle_core::{DType, Device, Result, Tensor};

use crate::pull::Pull;
use crate::types::Taken;
use crate::whole::zeroed;

/// Maximum number of threads per tensor. More hardly help: pieces are copied under the tensor's
/// lock.
const WORKERS_MAX: usize = 4;
/// The smallest piece: a system call for less is not worth it.
const STAGING_BYTES_MIN: u64 = 64 << 10;

/// Reads the tensor piece by piece as elements of `dtype` on `device`.
pub(crate) fn read(pull: &Pull<'_>, dtype: DType, device: &Device) -> Result<Tensor> {
    let target = Tensor::zeros(pull.count, dtype, device)?;
    let pieces = Pieces::new(pull, dtype);
    let next = AtomicUsize::new(0);
    let work = || -> Result<()> {
        // Until no piece is left. After an error of another thread, at most one more piece each.
        while let Some(elements) = pieces.piece(next.fetch_add(1, Ordering::Relaxed)) {
            let start = elements.start;
            let piece = cast(&piece(pull, elements)?, dtype)?.to_device(device)?;
            target.slice_set(&piece, 0, start)?;
        }
        Ok(())
    };
    let stopping = || work().inspect_err(|_| next.store(pieces.count(), Ordering::Relaxed));
    thread::scope(|scope| {
        let others: Vec<_> = (1..pieces.workers).map(|_| scope.spawn(stopping)).collect();
        let mine = stopping();
        let join = |worker: thread::ScopedJoinHandle<'_, Result<()>>| {
            worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        // All threads have ended before the first error is returned.
        let results: Vec<_> = others.into_iter().map(join).collect();
        results.into_iter().fold(mine, Result::and)
    })?;
    target.reshape(pull.shape.clone())
}

/// The division of a tensor into pieces.
#[derive(Debug, PartialEq, Eq)]
struct Pieces {
    /// Elements of the tensor.
    total: usize,
    /// Elements per piece, except the last.
    each: usize,
    workers: usize,
}

impl Pieces {
    fn new(pull: &Pull<'_>, dtype: DType) -> Self {
        // Rounded up; elements of every type here are whole bytes.
        let stored_bytes =
            usize::try_from(pull.len_bytes()).unwrap_or(usize::MAX).div_ceil(pull.count.max(1));
        let taken_bytes = pull.taken.dtype().size_in_bytes();
        // Stored, as a candle tensor, and cast.
        let element_bytes = stored_bytes + taken_bytes + dtype.size_in_bytes();
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let staging_bytes = usize::try_from(pull.staging_bytes.max(STAGING_BYTES_MIN)).unwrap_or(usize::MAX);
        Self::cut(pull.count, element_bytes, staging_bytes, cores.min(WORKERS_MAX))
    }

    /// Pieces for which all workers together stay within the staging, with at most one worker per
    /// piece.
    fn cut(total: usize, element_bytes: usize, staging_bytes: usize, workers: usize) -> Self {
        let each = (staging_bytes / workers / element_bytes).max(1);
        Self { total, each, workers: workers.min(total.div_ceil(each)).max(1) }
    }

    fn count(&self) -> usize {
        self.total.div_ceil(self.each)
    }

    fn piece(&self, index: usize) -> Option<Range<usize>> {
        let start = index.checked_mul(self.each).filter(|&start| start < self.total)?;
        Some(start..self.total.min(start.saturating_add(self.each)))
    }
}

/// Elements of the tensor on the host, in candle's type for them.
fn piece(pull: &Pull<'_>, elements: Range<usize>) -> Result<Tensor> {
    let count = elements.len();
    match pull.taken {
        Taken::AsIs(dtype) | Taken::Opaque(dtype) => {
            let bytes = bytes(pull, elements, dtype.size_in_bytes())?;
            Tensor::from_raw_buffer(&bytes, dtype, &[count], &Device::Cpu)
        }
        Taken::WidenedU16 => {
            let bytes = bytes(pull, elements, size_of::<u16>())?;
            let (pairs, _) = bytes.as_chunks();
            let widened: Vec<_> = pairs.iter().map(|&pair| u32::from(u16::from_le_bytes(pair))).collect();
            Tensor::from_vec(widened, count, &Device::Cpu)
        }
    }
}

/// Candle's cast. For one pair of types candle 0.11.1 recurses forever; the detour used here is
/// exact.
fn cast(piece: &Tensor, dtype: DType) -> Result<Tensor> {
    match (piece.dtype(), dtype) {
        (DType::F8E4M3, DType::F64) => piece.to_dtype(DType::F32)?.to_dtype(dtype),
        _ => piece.to_dtype(dtype),
    }
}

fn bytes(pull: &Pull<'_>, elements: Range<usize>, element_bytes: usize) -> Result<Vec<u8>> {
    let mut bytes = zeroed::<u8>(pull, elements.len() * element_bytes)?;
    let offset_bytes =
        elements.start.checked_mul(element_bytes).and_then(|offset| u64::try_from(offset).ok());
    pull.read(offset_bytes.expect("inside the tensor, whose length has 64 bits"), &mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_everything_once_and_stay_within_the_staging() {
        for total in [0, 1, 7, 4096, 100_003] {
            for (element_bytes, staging_bytes, workers) in
                [(10, 4096, 1), (6, 4096, 4), (24, 1 << 20, 3), (9, 8, 2)]
            {
                let pieces = Pieces::cut(total, element_bytes, staging_bytes, workers);
                let cut: Vec<_> = (0..pieces.count()).map(|index| pieces.piece(index).unwrap()).collect();
                assert_eq!(cut.iter().flat_map(Clone::clone).count(), total);
                assert!(cut.windows(2).all(|pair| pair[0].end == pair[1].start), "{pieces:?}");
                assert_eq!(pieces.piece(pieces.count()), None);
                assert!((1..=workers).contains(&pieces.workers));
                let held_bytes = pieces.workers * pieces.each * element_bytes;
                assert!(held_bytes <= staging_bytes || pieces.each == 1, "{pieces:?}: {held_bytes}");
            }
        }
    }

    #[test]
    fn the_last_index_is_no_piece() {
        assert_eq!(Pieces::cut(10, 1, 4, 1).piece(usize::MAX), None);
    }
}
