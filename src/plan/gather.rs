//! The wanted part of a stretch of a file: runs of equal length at equal distances.
//!
//! A stretch with short gaps is read as a whole, and its runs are moved to its front in the slot:
//!
//! ```text
//! slot    |..|run|gap|run|gap|run|gap|..|       after the read
//!         |..|run|run|run|.........  |..|       gathered: one copy from here on
//! ```

use std::num::NonZeroU32;

use crate::checkpoint::TensorId;
use crate::slices::Strided;
use crate::units::ByteRange;

/// The runs of a stretch. The first run begins with it, and the last run ends with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gather {
    run_bytes: NonZeroU32,
    stride_bytes: u32,
}

impl Gather {
    /// The stretch of the file that holds these runs of a tensor starting at `start`, and the runs
    /// if there are several. `None` on overflow, and for runs more than 4 GiB apart.
    pub(super) fn of(start: u64, bytes: Strided) -> Option<(ByteRange, Option<Self>)> {
        let Strided { start_bytes, run_bytes, stride_bytes, count } = bytes;
        let start = start.checked_add(start_bytes)?;
        let Some(last) = count.checked_sub(1).filter(|_| run_bytes > 0) else {
            return Some((ByteRange::with_len(start, 0)?, None));
        };
        let stretch = ByteRange::with_len(start, last.checked_mul(stride_bytes)?.checked_add(run_bytes)?)?;
        if last == 0 {
            return Some((stretch, None));
        }
        let run_bytes = NonZeroU32::new(u32::try_from(run_bytes).ok()?)?;
        let stride_bytes = u32::try_from(stride_bytes).ok().filter(|&bytes| bytes >= run_bytes.get())?;
        Some((stretch, Some(Self { run_bytes, stride_bytes })))
    }

    /// Runs of a tensor at the start of a file, for tests.
    #[cfg(test)]
    pub(crate) fn of_runs(bytes: Strided) -> Option<(ByteRange, Option<Self>)> {
        Self::of(0, bytes)
    }

    /// Bytes of a run.
    #[must_use]
    pub fn run_bytes(self) -> u64 {
        u64::from(self.run_bytes.get())
    }

    /// Bytes from the start of one run to the start of the next.
    #[must_use]
    pub fn stride_bytes(self) -> u64 {
        u64::from(self.stride_bytes)
    }

    /// Wanted bytes among the first `len_bytes` of the stretch.
    #[must_use]
    pub fn wanted_bytes(self, len_bytes: u64) -> u64 {
        let (run_bytes, stride_bytes) = (self.run_bytes(), self.stride_bytes());
        len_bytes / stride_bytes * run_bytes + (len_bytes % stride_bytes).min(run_bytes)
    }

    /// Bytes between two runs.
    fn gap_bytes(self) -> u64 {
        self.stride_bytes() - self.run_bytes()
    }
}

/// The parts of a tensor's stretch that are read on their own: the whole stretch, or each run if
/// the gaps are longer than `hole_bytes_max`.
pub(super) fn stretches(
    extent: ByteRange,
    gather: Option<Gather>,
    hole_bytes_max: u64,
) -> impl Iterator<Item = ByteRange> {
    let apart = gather.filter(|gather| gather.gap_bytes() > hole_bytes_max);
    let (stride_bytes, len_bytes) = apart.map_or((extent.len_bytes(), extent.len_bytes()), |gather| {
        (gather.stride_bytes(), gather.run_bytes())
    });
    let mut start = extent.start();
    std::iter::from_fn(move || {
        let stretch = ByteRange::with_len(start, len_bytes).filter(|stretch| extent.contains(*stretch))?;
        if stretch.is_empty() {
            return None;
        }
        start = start.saturating_add(stride_bytes);
        Some(stretch)
    })
}

/// One stretch of a slot whose wanted bytes are moved to its front, before casts and copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatherOp {
    /// The tensor.
    pub tensor: TensorId,
    /// Where the stretch starts in the slot, and where the gathered bytes go.
    pub slot_offset_bytes: u64,
    /// Its length.
    pub source_len_bytes: u64,
    /// Bytes from the start of a run to the start of the stretch, which is inside the run or in the
    /// gap behind it.
    pub phase_bytes: u64,
    /// The runs.
    pub gather: Gather,
}

impl GatherOp {
    /// Wanted bytes.
    #[must_use]
    pub fn wanted_bytes(&self) -> u64 {
        self.gather.wanted_bytes(self.phase_bytes + self.source_len_bytes)
            - self.gather.wanted_bytes(self.phase_bytes)
    }

    /// True if the stretch is inside one run: nothing has to be moved.
    pub(super) fn is_one_run(&self) -> bool {
        self.phase_bytes + self.source_len_bytes <= self.gather.run_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(start_bytes: u64, run_bytes: u64, stride_bytes: u64, count: u64) -> Strided {
        Strided { start_bytes, run_bytes, stride_bytes, count }
    }

    #[test]
    fn wanted_bytes_are_those_of_the_runs() {
        let (stretch, gather) = Gather::of(1000, runs(3, 5, 12, 4)).unwrap();
        let gather = gather.unwrap();
        assert_eq!((stretch.start(), stretch.len_bytes()), (1003, 41));
        let mut wanted = 0;
        for at in 0..stretch.len_bytes() {
            assert_eq!(gather.wanted_bytes(at), wanted, "{at}");
            wanted += u64::from(at % 12 < 5);
        }
        assert_eq!((gather.wanted_bytes(41), wanted), (20, 20));
    }

    #[test]
    fn one_run_is_a_stretch_and_none_is_empty() {
        assert_eq!(Gather::of(10, runs(3, 7, 7, 1)), Some((ByteRange::new(13, 20).unwrap(), None)));
        assert_eq!(Gather::of(10, runs(3, 0, 9, 4)), Some((ByteRange::new(13, 13).unwrap(), None)));
        assert_eq!(Gather::of(10, runs(3, 7, 1 << 32, 2)), None, "further apart than is counted");
        assert_eq!(Gather::of(10, runs(u64::MAX, 7, 9, 2)), None);
    }

    #[test]
    fn runs_far_apart_are_read_one_by_one() {
        let all = |run_bytes: u64, gap_bytes: u64| {
            let (extent, gather) = Gather::of(0, runs(0, run_bytes, run_bytes + gap_bytes, 3)).unwrap();
            stretches(extent, gather, 1000)
                .map(|stretch| (stretch.start(), stretch.len_bytes()))
                .collect::<Vec<_>>()
        };
        let near = 1000;
        assert_eq!(all(10, near), [(0, 30 + 2 * near)]);
        assert_eq!(all(10, near + 1), [(0, 10), (near + 11, 10), (2 * (near + 11), 10)]);
        assert_eq!(stretches(ByteRange::new(5, 5).unwrap(), None, 0).count(), 0);
    }
}
