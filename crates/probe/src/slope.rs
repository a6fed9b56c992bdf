//! How much a quantity grows from one cycle to the next: a robust slope with its confidence.
//!
//! The slope is the median of the slopes between pairs of points, and the confidence comes from how
//! many pairs rise and how many fall: H. Theil, "A rank-invariant method of linear and polynomial
//! regression analysis" (1950); P. K. Sen, "Estimates of the regression coefficient based on
//! Kendall's tau" (1968). Nothing is assumed about how the noise is distributed, and a quarter of
//! the points may be anywhere without moving the slope far: page reclaim, a neighbour's
//! load, one cycle that went wrong.
//!
//! ```text
//! bytes |            . .. .
//!       |  . ... .  |             pairs inside each block count, pairs across the cut do not
//!       +-----------+--------- cycles
//!          block    ^ block       the cut is the largest rise from one cycle to the next
//! ```
//! Pairs across the largest rise are left out: a single step, however high, would make each of them
//! rise, and growth that happened once is no growth from cycle to cycle. What is left are two
//! blocks that are counted together, as for strata: R. M. Hirsch, J. R. Slack, R. A. Smith,
//! "Techniques of trend analysis for monthly water quality data" (1982). The lower end is that of
//! the blocks or of all pairs, whichever is lower: only what grows inside the blocks *and* from one
//! to the other grows from cycle to cycle. A sawtooth of a few long teeth rises in the blocks
//! alone.

use std::ops::Range;

/// The confidence that [`Slope::low`] and [`Slope::high`] are for.
pub const SLOPE_CONFIDENCE: f64 = 0.99;
/// Fewer points give a slope without a confidence.
pub const SLOPE_POINTS_MIN: u32 = 8;
/// The normal distribution's quantile for it, both sides.
const Z: f64 = 2.575_829_303_548_901;

/// Memory after a cycle. Cycles that were not measured are left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Level {
    /// The cycle's number; each is above the one before it.
    pub cycle: u64,
    /// Memory after it, in bytes.
    pub bytes: u64,
}

/// Growth from one cycle to the next.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slope {
    /// The median of the slopes between two points, in bytes a cycle.
    pub value: f64,
    /// The lower end of the confidence; `None` with too few points.
    pub low: Option<f64>,
    /// The upper end.
    pub high: Option<f64>,
    /// How far a point lies from the line of its block, in bytes: the median.
    pub spread: f64,
}

impl Slope {
    /// Whether memory grows by more than `max_bytes` a cycle. `None` with too few points.
    #[must_use]
    pub fn against(&self, max_bytes: u64) -> Option<SlopeLimit> {
        let max = to_f64(max_bytes);
        match (self.low, self.high) {
            (Some(low), _) if low > max => Some(SlopeLimit::Above),
            (Some(_), Some(high)) if high > max => Some(SlopeLimit::Around),
            (Some(_), Some(_)) => Some(SlopeLimit::Within),
            _ => None,
        }
    }
}

/// A slope against a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlopeLimit {
    /// The whole confidence interval is within the limit.
    Within,
    /// The limit is inside the confidence interval: more cycles would decide.
    Around,
    /// The whole confidence interval is above the limit.
    Above,
}

/// The slope of these points; `None` for fewer than two.
#[must_use]
pub fn slope(points: &[Level]) -> Option<Slope> {
    let is_enough = points.len() >= usize::try_from(SLOPE_POINTS_MIN).unwrap_or(usize::MAX);
    let cut = if is_enough { largest_rise(points) } else { 0 };
    let blocks = [&points[..cut], &points[cut..]];
    let slopes = sorted_slopes(blocks);
    let value = median(&slopes)?;
    let ends = confidence(&slopes, blocks).filter(|_| is_enough);
    let whole = [points, &[]];
    let of_all = ends.and_then(|_| confidence(&sorted_slopes(whole), whole));
    Some(Slope {
        value,
        low: ends.zip(of_all).map(|((low, _), (of_all, _))| low.min(of_all)),
        high: ends.map(|(_, high)| high),
        spread: spread(blocks, value),
    })
}

/// The point that is furthest above the one before it; the first of several.
fn largest_rise(points: &[Level]) -> usize {
    let rises = points.windows(2).map(|pair| i128::from(pair[1].bytes) - i128::from(pair[0].bytes));
    let largest = rises.enumerate().max_by_key(|(place, rise)| (*rise, std::cmp::Reverse(*place)));
    largest.map_or(0, |(place, _)| place + 1)
}

/// The slopes of the pairs inside each block.
fn sorted_slopes(blocks: [&[Level]; 2]) -> Vec<f64> {
    let mut slopes: Vec<f64> = blocks.into_iter().flat_map(pair_slopes).collect();
    slopes.sort_by(f64::total_cmp);
    slopes
}

/// Both ends of the confidence; `None` without slopes.
fn confidence(slopes: &[f64], blocks: [&[Level]; 2]) -> Option<(f64, f64)> {
    let ends = confidence_ranks(slopes.len(), blocks)?;
    Some((slopes[ends.start], slopes[ends.end - 1]))
}

fn pair_slopes(points: &[Level]) -> Vec<f64> {
    let mut slopes = Vec::with_capacity(points.len() * points.len().saturating_sub(1) / 2);
    for (first, start) in points.iter().enumerate() {
        for end in &points[first + 1..] {
            slopes.push((to_f64(end.bytes) - to_f64(start.bytes)) / to_f64(end.cycle - start.cycle));
        }
    }
    slopes
}

/// The middle of what is sorted.
fn median(sorted: &[f64]) -> Option<f64> {
    let middle = sorted.len() / 2;
    let upper = *sorted.get(middle)?;
    Some(if sorted.len() % 2 == 1 { upper } else { f64::midpoint(sorted[middle - 1], upper) })
}

/// Where the confidence lies among so many sorted slopes.
///
/// The normal distribution would take in all slopes, and more, of eight points in two blocks of
/// four. But if there is no trend, all pairs rise in one of `4! x 4! = 576` orders, and in fewer
/// for any other two blocks: so the smallest slope is below the true one with more than 99.5 %
/// anyway.
fn confidence_ranks(count: usize, blocks: [&[Level]; 2]) -> Option<Range<usize>> {
    let margin = Z * blocks.map(variance_of_rises).iter().sum::<f64>().sqrt();
    let skipped = lower_rank(count, margin).max(1) - 1;
    (skipped < count - skipped).then(|| skipped..count - skipped)
}

/// The variance of Kendall's S, the number of pairs that rise less that of pairs that fall, if
/// there is no trend; points that are equal among themselves make it smaller.
fn variance_of_rises(points: &[Level]) -> f64 {
    let mut sorted: Vec<u64> = points.iter().map(|point| point.bytes).collect();
    sorted.sort_unstable();
    let term = |count: usize| {
        let count = to_f64(u64::try_from(count).unwrap_or(u64::MAX));
        count * (count - 1.0) * (2.0 * count + 5.0)
    };
    let equal: f64 = sorted.chunk_by(|one, next| one == next).map(|ties| term(ties.len())).sum();
    (term(points.len()) - equal).max(0.0) / 18.0
}

/// The rank, from 1, of the slope that the confidence begins at, of so many; 0 if it begins below
/// all of them. Sen: the integer part of `(count - margin) / 2`.
fn lower_rank(count: usize, margin: f64) -> usize {
    let left = |rank: usize| to_f64(u64::try_from(count - 2 * rank).unwrap_or(u64::MAX));
    let (mut low, mut high) = (0, count / 2);
    while low < high {
        let middle = (low + high).div_ceil(2);
        if left(middle) >= margin { low = middle } else { high = middle - 1 }
    }
    low
}

/// The median distance of the points from the lines with this slope, one through each block.
fn spread(blocks: [&[Level]; 2], slope: f64) -> f64 {
    let mut distances: Vec<f64> = Vec::new();
    for block in blocks {
        let level = |point: &Level| to_f64(point.bytes) - slope * to_f64(point.cycle);
        let mut levels: Vec<f64> = block.iter().map(level).collect();
        levels.sort_by(f64::total_cmp);
        let Some(middle) = median(&levels) else { continue };
        distances.extend(levels.iter().map(|level| (level - middle).abs()));
    }
    distances.sort_by(f64::total_cmp);
    median(&distances).unwrap_or(0.0)
}

/// Bytes and cycles are far below 2^53.
#[allow(clippy::as_conversions, clippy::cast_precision_loss, reason = "exact below 2^53")]
fn to_f64(value: u64) -> f64 {
    value as f64
}

#[cfg(test)]
mod tests;
