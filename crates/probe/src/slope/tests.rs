//! Seeded noise, steps and leaks: what is growth, and what is not.

use super::*;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// The program's own limit.
const LIMIT: f64 = 16_384.0;
/// Lists of each kind.
const SEEDS: u64 = 60;

/// Numbers that look random and are the same each time.
struct Noise(u64);

impl Noise {
    fn of(seed: u64) -> Self {
        Self(0x9e37_79b9_7f4a_7c15 ^ (seed + 1).wrapping_mul(0xbf58_476d_1ce4_e5b9))
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

/// After each cycle from 0 on.
fn levels(bytes: impl IntoIterator<Item = u64>) -> Vec<Level> {
    (0..).zip(bytes).map(|(cycle, bytes)| Level { cycle, bytes }).collect()
}

fn slope_of(bytes: impl IntoIterator<Item = u64>) -> Slope {
    slope(&levels(bytes)).unwrap()
}

fn ends(bytes: impl IntoIterator<Item = u64>) -> (f64, f64) {
    let found = slope_of(bytes);
    (found.low.unwrap(), found.high.unwrap())
}

/// How many of [`SEEDS`] lists of so many cycles are leaks.
fn leaks(cycles: u64, bytes: impl Fn(u64, &mut Noise) -> u64) -> u64 {
    let is_leak = |seed: &u64| {
        let mut noise = Noise::of(*seed);
        ends((0..cycles).map(|cycle| bytes(cycle, &mut noise))).0 > LIMIT
    };
    to_u64((0..SEEDS).filter(is_leak).count())
}

fn to_u64(count: usize) -> u64 {
    u64::try_from(count).unwrap()
}

#[test]
fn what_is_flat_has_a_slope_of_nothing_and_no_doubt() {
    let flat = Slope { value: 0.0, low: Some(0.0), high: Some(0.0), spread: 0.0 };
    assert_eq!(slope_of([7 * MIB; 30]), flat);
    assert_eq!(slope(&levels([5])), None);
    assert_eq!(slope(&[]), None);
}

#[test]
fn a_straight_line_is_found_exactly() {
    let points: Vec<u64> = (0..8).map(|cycle| MIB * (100 + cycle)).collect();
    let found = slope_of(points.iter().copied());
    let mib = to_f64(MIB);
    assert_eq!((found.value, found.low, found.high, found.spread), (mib, Some(mib), Some(mib), 0.0));
    assert_eq!(slope_of(points.into_iter().rev()).value, -mib);
}

/// Worked out by hand. The largest rise is the one before 42, so there are blocks of three and of
/// five points with 3 + 10 slopes, and the variance of S is `3 x 2 x 11 / 18 + 5 x 4 x 15 / 18 =
/// 20.3`: the margin is 11.6, and the confidence goes from the first to the last. Of 28 slopes of
/// eight points in one block the margin is 20.8, and it would go from the 3rd to the 26th.
#[test]
fn the_confidence_is_cut_where_sen_says() {
    let points = levels([10, 21, 29, 42, 48, 61, 73, 79].map(|value: u64| value * 1000));
    assert_eq!(largest_rise(&points), 3);
    let blocks = [&points[..3], &points[3..]];
    let variances = blocks.map(variance_of_rises);
    assert!((variances[0] - 66.0 / 18.0).abs() < 1e-9 && (variances[1] - 300.0 / 18.0).abs() < 1e-9);
    assert_eq!(confidence_ranks(13, blocks), Some(0..13));
    assert_eq!(lower_rank(28, Z * variance_of_rises(&points).sqrt()), 3);
    let slopes = sorted_slopes(blocks);
    let found = slope(&points).unwrap();
    assert_eq!((slopes.len(), found.low, found.high), (13, Some(slopes[0]), Some(slopes[12])));
    assert_eq!(lower_rank(21, 17.2), 1);
    assert_eq!(lower_rank(10, 10.5), 0);
    assert_eq!(lower_rank(10, 0.0), 5);
}

#[test]
fn too_few_points_have_no_confidence() {
    let found = slope_of(1..=7);
    assert_eq!((found.value, found.low, found.high), (1.0, None, None));
}

#[test]
fn a_leak_shows_under_noise_and_noise_alone_does_not() {
    for seed in 0..200 {
        let mut noise = Noise::of(seed);
        let clean: Vec<u64> = (0..30).map(|_| 500 * MIB + noise.below(MIB / 4)).collect();
        assert!(ends(clean.iter().copied()).0 <= LIMIT, "{clean:?}");
        let (low, high) = ends((0..30).map(|cycle| 500 * MIB + cycle * MIB + noise.below(4 * MIB)));
        assert!(low > to_f64(MIB / 2) && high < to_f64(2 * MIB), "{low} {high}");
    }
    assert_eq!(leaks(30, |cycle, noise| cycle * 64 * KIB + noise.below(256 * KIB)), SEEDS);
    assert_eq!(leaks(30, |_, noise| 500 * MIB + noise.below(MIB)), 0);
    assert_eq!(leaks(8, |_, noise| 500 * MIB + noise.below(MIB)), 0);
}

#[test]
fn a_step_is_no_slope() {
    for at in 0..30 {
        let points = (0..30).map(|cycle| if cycle < at { 10 * MIB } else { 74 * MIB });
        assert_eq!(slope_of(points), slope_of([0; 30]), "a step before cycle {at}");
    }
}

/// A cache that fills once, in a program whose memory goes up and down.
#[test]
fn a_step_under_noise_is_no_slope() {
    for cycles in [8, 12, 30] {
        for at in 1..cycles {
            for height in [4 * MIB, 64 * MIB] {
                let step = |cycle| if cycle < at { 0 } else { height };
                let found = leaks(cycles, |cycle, noise| 500 * MIB + step(cycle) + noise.below(MIB));
                // One in two hundred is what the confidence leaves to chance.
                assert!(found <= 2, "{found} of {SEEDS}: {height} bytes before cycle {at} of {cycles}");
                let falls = leaks(cycles, |cycle, noise| 500 * MIB - step(cycle) + noise.below(MIB));
                assert!(falls <= 2, "{falls} of {SEEDS}: {height} bytes less from cycle {at} of {cycles} on");
            }
        }
    }
}

#[test]
fn a_leak_with_one_large_jump_is_found() {
    for at in [1, 3, 15, 27, 29] {
        let jump = |cycle| if cycle < at { 0 } else { 64 * MIB };
        let found = leaks(30, |cycle, noise| cycle * MIB + jump(cycle) + noise.below(MIB));
        assert_eq!(found, SEEDS, "a jump before cycle {at}");
    }
}

#[test]
fn a_leak_under_a_sawtooth_is_found() {
    for teeth in [3, 5, 7, 10] {
        let found = leaks(30, |cycle, noise| cycle * MIB + cycle % teeth * 3 * MIB + noise.below(MIB / 4));
        assert_eq!(found, SEEDS, "a sawtooth of {teeth} cycles");
        let clean = leaks(30, |cycle, noise| cycle % teeth * 3 * MIB + noise.below(MIB / 4));
        assert_eq!(clean, 0, "a sawtooth of {teeth} cycles, without a leak");
    }
}

#[test]
fn a_quarter_of_the_points_may_be_anywhere() {
    let mut noise = Noise::of(42);
    let mut points: Vec<u64> = (0..40).map(|cycle| 100 * MIB + cycle * MIB).collect();
    for place in [3, 9, 14, 15, 22, 28, 31, 37] {
        points[place] = noise.below(900 * MIB);
    }
    let found = slope_of(points);
    assert!((found.value - to_f64(MIB)).abs() < to_f64(MIB / 10), "{found:?}");
    assert!(found.low.unwrap() > to_f64(MIB / 4), "{found:?}");
}

/// Memory of a device is handed out in pages of 2 MiB: a leak of less shows as a step now and then.
#[test]
fn a_leak_in_steps_is_found() {
    let found = slope_of((0..30).map(|cycle| (cycle / 2) * 2 * MIB));
    assert!(found.low.unwrap() > 0.9 * to_f64(MIB) && (found.value / to_f64(MIB) - 1.0).abs() < 0.05);
    assert_eq!(leaks(30, |cycle, noise| (cycle / 2) * 2 * MIB + noise.below(MIB)), SEEDS);
}

/// Cycles that were not measured take time too.
#[test]
fn what_is_missing_counts_as_distance() {
    let mut points = levels((0..30).map(|cycle| cycle * MIB));
    points.retain(|point| point.cycle % 3 != 1);
    let found = slope(&points).unwrap();
    let mib = to_f64(MIB);
    assert_eq!((found.value, found.low, found.high, found.spread), (mib, Some(mib), Some(mib), 0.0));
}
