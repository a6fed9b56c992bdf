//! How much a quantity grows from one cycle to the next: a robust slope with its confidence.
//!
//! The slope is the median of the slopes between all pairs of points, and the confidence comes from how many pairs rise and how
//! many fall: H. Theil, "A rank-invariant method of linear and polynomial regression analysis" (1950); P. K. Sen,
//! "Estimates of the regression coefficient based on Kendall's tau" (1968). Nothing is assumed about how the noise is
//! distributed, and a quarter of the points may be anywhere without moving the slope far: page reclaim, a neighbour's
//! load, one cycle that went wrong. A single step, however high, leaves the lower end of the confidence at 0.

use crate::output::numbers::to_f64;

/// The confidence that [`Slope::low`] and [`Slope::high`] are for.
pub(crate) const CONFIDENCE: f64 = 0.99;
/// The normal distribution's quantile for it, both sides.
const Z: f64 = 2.575_829_303_548_901;
/// Fewer points have no confidence of that kind: even if each is above the one before it, chance may have done it.
pub(crate) const POINTS_MIN: u32 = 8;
/// All pairs are looked at: more points would take too long, and too much memory.
pub(crate) const POINTS_MAX: u32 = 2000;

/// Growth from one cycle to the next.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Slope {
    /// The median of all slopes between two points, in bytes a cycle.
    pub(crate) value: f64,
    /// The lower end of the confidence; `None` with too few points.
    pub(crate) low: Option<f64>,
    /// The upper end.
    pub(crate) high: Option<f64>,
    /// How far a point lies from the line, in bytes: the median.
    pub(crate) spread: f64,
}

/// The slope of these bytes, one a cycle; `None` for fewer than two.
pub(crate) fn slope(points: &[u64]) -> Option<Slope> {
    let mut slopes = pair_slopes(points);
    slopes.sort_by(f64::total_cmp);
    let value = median(&slopes)?;
    let margin = Z * variance_of_rises(points).sqrt();
    let last = slopes.len() - 1;
    let rank = Some(lower_rank(slopes.len(), margin)).filter(|rank| *rank > 0);
    let enough = rank.filter(|_| points.len() >= usize::try_from(POINTS_MIN).unwrap_or(usize::MAX));
    Some(Slope {
        value,
        low: enough.map(|rank| slopes[rank - 1]),
        high: enough.map(|rank| slopes[last + 1 - rank]),
        spread: spread(points, value),
    })
}

fn pair_slopes(points: &[u64]) -> Vec<f64> {
    let mut slopes = Vec::with_capacity(points.len() * points.len().saturating_sub(1) / 2);
    for (first, start) in points.iter().enumerate() {
        for (end, distance) in points[first + 1..].iter().zip(1_u32..) {
            slopes.push((to_f64(*end) - to_f64(*start)) / f64::from(distance));
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

/// The variance of Kendall's S, the number of pairs that rise less that of pairs that fall, if there is no trend; points that are
/// equal among themselves make it smaller.
fn variance_of_rises(points: &[u64]) -> f64 {
    let mut sorted = points.to_vec();
    sorted.sort_unstable();
    let term = |count: usize| {
        let count = to_f64(u64::try_from(count).unwrap_or(u64::MAX));
        count * (count - 1.0) * (2.0 * count + 5.0)
    };
    let equal: f64 = sorted.chunk_by(|one, next| one == next).map(|ties| term(ties.len())).sum();
    (term(points.len()) - equal).max(0.0) / 18.0
}

/// The rank, from 1, of the slope that the confidence begins at, of so many; 0 if it begins below all of them. Sen: the integer
/// part of `(count - margin) / 2`.
fn lower_rank(count: usize, margin: f64) -> usize {
    let left = |rank: usize| to_f64(u64::try_from(count - 2 * rank).unwrap_or(u64::MAX));
    let (mut low, mut high) = (0, count / 2);
    while low < high {
        let middle = (low + high).div_ceil(2);
        if left(middle) >= margin { low = middle } else { high = middle - 1 }
    }
    low
}

/// The median distance of the points from the line with this slope.
fn spread(points: &[u64], slope: f64) -> f64 {
    let level = |index: u32, bytes: &u64| to_f64(*bytes) - slope * f64::from(index);
    let mut levels: Vec<f64> = (0_u32..).zip(points).map(|(index, bytes)| level(index, bytes)).collect();
    levels.sort_by(f64::total_cmp);
    let Some(middle) = median(&levels) else { return 0.0 };
    let mut distances: Vec<f64> = levels.iter().map(|level| (level - middle).abs()).collect();
    distances.sort_by(f64::total_cmp);
    median(&distances).unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Numbers that look random and are the same each time.
    struct Noise(u64);

    impl Noise {
        fn below(&mut self, bound: u64) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            self.0 % bound
        }
    }

    fn ends(points: &[u64]) -> (f64, f64) {
        let found = slope(points).unwrap();
        (found.low.unwrap(), found.high.unwrap())
    }

    #[test]
    fn what_is_flat_has_a_slope_of_nothing_and_no_doubt() {
        let found = slope(&[7 * MIB; 30]).unwrap();
        assert_eq!(found, Slope { value: 0.0, low: Some(0.0), high: Some(0.0), spread: 0.0 });
        assert_eq!(slope(&[5]), None);
        assert_eq!(slope(&[]), None);
    }

    #[test]
    fn a_straight_line_is_found_exactly() {
        let points: Vec<u64> = (0..8).map(|cycle| MIB * (100 + cycle)).collect();
        let found = slope(&points).unwrap();
        let mib = to_f64(MIB);
        assert_eq!((found.value, found.low, found.high), (mib, Some(mib), Some(mib)));
        let falls: Vec<u64> = points.iter().rev().copied().collect();
        assert_eq!(slope(&falls).unwrap().value, -mib);
    }

    /// Sen's own numbers are not to be had; these are worked out by hand: of the 28 slopes of 8 points without ties the
    /// variance of S is 8 * 7 * 21 / 18 = 65.3, so the margin is 20.8, and the confidence goes from the 3rd to the 26th.
    #[test]
    fn the_confidence_is_cut_where_sen_says() {
        let points = [10, 21, 29, 42, 48, 61, 73, 79].map(|value: u64| value * 1000);
        let mut slopes = pair_slopes(&points);
        slopes.sort_by(f64::total_cmp);
        assert_eq!((slopes.len(), lower_rank(28, Z * variance_of_rises(&points).sqrt())), (28, 3));
        assert_eq!(ends(&points), (slopes[2], slopes[25]));
        assert_eq!(lower_rank(21, 17.2), 1);
        assert_eq!(lower_rank(10, 10.5), 0);
        assert_eq!(lower_rank(10, 0.0), 5);
    }

    #[test]
    fn too_few_points_have_no_confidence() {
        let found = slope(&[1, 2, 3, 4, 5, 6, 7]).unwrap();
        assert_eq!((found.value, found.low, found.high), (1.0, None, None));
    }

    #[test]
    fn a_leak_shows_under_noise_and_noise_alone_does_not() {
        let mut noise = Noise(0x9e37_79b9_7f4a_7c15);
        for _ in 0..200 {
            let clean: Vec<u64> = (0..30).map(|_| 500 * MIB + noise.below(MIB / 4)).collect();
            assert!(ends(&clean).0 <= 4096.0, "{clean:?}");
            let leaks: Vec<u64> =
                (0..30).map(|cycle| 500 * MIB + cycle * MIB + noise.below(4 * MIB)).collect();
            let (low, high) = ends(&leaks);
            assert!(low > to_f64(MIB / 2) && high < to_f64(2 * MIB), "{low} {high}");
        }
    }

    #[test]
    fn a_step_is_no_slope() {
        for at in 0..30 {
            let points: Vec<u64> =
                (0..30).map(|cycle| if cycle < at { 10 * MIB } else { 74 * MIB }).collect();
            assert_eq!(ends(&points).0, 0.0, "a step before cycle {at}");
        }
    }

    #[test]
    fn a_quarter_of_the_points_may_be_anywhere() {
        let mut noise = Noise(42);
        let mut points: Vec<u64> = (0..40).map(|cycle| 100 * MIB + cycle * MIB).collect();
        for place in [3, 9, 14, 15, 22, 28, 31, 37] {
            points[place] = noise.below(900 * MIB);
        }
        let found = slope(&points).unwrap();
        assert!((found.value - to_f64(MIB)).abs() < to_f64(MIB / 10), "{found:?}");
        assert!(found.low.unwrap() > to_f64(MIB / 2), "{found:?}");
    }

    /// Memory of a device is handed out in pages of 2 MiB: a leak of less shows as a step now and then.
    #[test]
    fn a_leak_in_steps_is_found() {
        let points: Vec<u64> = (0..30).map(|cycle| (cycle / 2) * 2 * MIB).collect();
        let found = slope(&points).unwrap();
        assert!(found.low.unwrap() > 0.9 * to_f64(MIB) && (found.value / to_f64(MIB) - 1.0).abs() < 0.05);
    }
}
