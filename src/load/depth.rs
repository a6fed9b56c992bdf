//! How many reads should be in flight, found out while loading from nothing but bytes and time.
//!
//! The best number depends on the machine. A virtual disk is fastest with one or two, because few
//! slots are in use and stay in the cache. An array of flash disks wants many. So the search starts
//! low and doubles the number as long as that pays.
//!
//! ```text
//! resting --(time is up)--> a pair of measurements --> ... --> the other number won: move there, try on
//!    ^                      here, there; there, here      |
//!    +---- for so long that trying was cheap -------------+ it did not: try the other direction next
//! ```
//!
//! Measurements in which readers were idle are thrown away. The search is pure: time comes from the
//! control loop, which obeys [`Depth::limit`].

/// The fewest reads in flight that are tried. A reader takes its next read from a queue, so a disk
/// hardly waits even with one.
pub(super) const READS_LEAST: u32 = 1;
/// More reads in flight must gain this much, because the memory they use displaces cache.
const GAIN_PERCENT_MIN: u64 = 5;
/// The first, short pair decides alone if one number is better by this much.
const FAR_PERCENT: u64 = 40;
/// Otherwise, this many pairs of measurements have to agree.
const VOTES: u32 = 3;
/// Measurements of one trial that may be thrown away before the trial is given up.
const SPOILT_MAX: u32 = 3;
/// After a trial, the search rests this many times as long as was spent away from the better
/// number. So trials cost at most 2.5 %.
const REST_FACTOR: u64 = 40;
/// The shortest rest.
const REST_NS_MIN: u64 = 500_000_000;

/// The shortest measurement: long enough that a hiccup of the system does not decide.
const MEASURE_NS_MIN: u64 = 32_000_000;
/// The shortest first look, which only a large difference can decide.
const GLANCE_NS_MIN: u64 = 8_000_000;
/// The fewest reads in a measurement.
const MEASURE_READS_MIN: u64 = 16;
/// A measurement that was idle for more than one part in this many is thrown away.
const IDLE_PART_MAX: u64 = 10;

/// The progress of reading at one moment.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Observation {
    /// Time since the load began.
    pub(super) now_ns: u64,
    /// Bytes read since then.
    pub(super) read_bytes: u64,
    /// Finished reads.
    pub(super) reads: u64,
    /// True if fewer reads could be issued than allowed, because no slot was free or no layer may
    /// be read.
    pub(super) is_starved: bool,
}

/// How many reads may be in flight.
#[derive(Clone, Debug)]
pub(super) struct Depth {
    /// The best number so far.
    best: u32,
    /// The upper limit.
    most: u32,
    /// `None` if the number is fixed.
    search: Option<Search>,
}

/// The search for a better number.
#[derive(Clone, Debug)]
struct Search {
    /// The last observation.
    last: Observation,
    /// The direction of the next trial.
    direction: Direction,
    /// The search started above the fewest and has not tried fewer yet.
    looks_down_first: bool,
    /// No trial starts before this time.
    rests_until_ns: u64,
    trial: Option<Trial>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Up,
    Down,
}

impl Direction {
    fn turned(self) -> Self {
        match self {
            Self::Up => Self::Down,
            Self::Down => Self::Up,
        }
    }
}

/// A comparison of the best number with another one.
#[derive(Clone, Debug)]
struct Trial {
    other: u32,
    /// Finished measurements.
    measurements: u32,
    /// The one in progress.
    current: Option<Measurement>,
    /// Bytes per millisecond in the first measurement of the open pair.
    first_rate: Option<u64>,
    wins: u32,
    losses: u32,
    spoilt: u32,
    /// Time spent with the other number.
    there_ns: u64,
}

impl Trial {
    fn new(other: u32) -> Self {
        Self {
            other,
            measurements: 0,
            current: None,
            first_rate: None,
            wins: 0,
            losses: 0,
            spoilt: 0,
            there_ns: 0,
        }
    }

    /// True if the current measurement is of the other number. The order is here, there, there,
    /// here, and so on, so that a disk that changes its speed by itself favours neither.
    fn is_there(&self) -> bool {
        matches!(self.measurements % 4, 1 | 2)
    }

    /// True for the first two measurements, which are short.
    fn is_glance(&self) -> bool {
        self.measurements < 2
    }

    /// Counts a finished measurement.
    fn on_measured(&mut self, measured: Measured, direction: Direction) {
        let is_there = self.is_there();
        self.there_ns += if is_there { measured.busy_ns } else { 0 };
        let Some(rate) = measured.rate else {
            self.spoilt += 1;
            return;
        };
        let is_glance = self.is_glance();
        self.measurements += 1;
        let Some(first_rate) = self.first_rate.take() else {
            self.first_rate = Some(rate);
            return;
        };
        let (here, there) = if is_there { (first_rate, rate) } else { (rate, first_rate) };
        let is_above = |one: u64, other: u64, percent: u64| {
            one.saturating_mul(100) > other.saturating_mul(100 + percent)
        };
        let is_better = match direction {
            Direction::Up => is_above(there, here, GAIN_PERCENT_MIN),
            // Fewer reads that are as fast are better.
            Direction::Down => !is_above(here, there, 0),
        };
        match is_glance {
            true if is_above(there, here, FAR_PERCENT) => self.wins = VOTES,
            true if is_above(here, there, FAR_PERCENT) => self.losses = VOTES,
            true => {}
            false if is_better => self.wins += 1,
            false => self.losses += 1,
        }
    }

    fn is_over(&self) -> bool {
        self.wins >= VOTES || self.losses >= VOTES || self.spoilt > SPOILT_MAX
    }
}

impl Depth {
    /// A fixed number.
    pub(super) fn fixed(reads: u32) -> Self {
        Self { best: reads.max(1), most: reads.max(1), search: None }
    }

    /// Searches for the best number, from `start` on and up to `most`.
    pub(super) fn adaptive(start: u32, most: u32) -> Self {
        if most <= READS_LEAST {
            return Self::fixed(most);
        }
        let best = start.clamp(READS_LEAST, most);
        let search = Search {
            last: Observation::default(),
            direction: Direction::Up,
            looks_down_first: best > READS_LEAST,
            rests_until_ns: 0,
            trial: None,
        };
        Self { best, most, search: Some(search) }
    }

    /// True if it never changes.
    pub(super) fn is_fixed(&self) -> bool {
        self.search.is_none()
    }

    /// How many reads may be in flight.
    pub(super) fn limit(&self) -> u32 {
        let trial = self.search.as_ref().and_then(|search| search.trial.as_ref());
        trial.filter(|trial| trial.is_there()).map_or(self.best, |trial| trial.other)
    }

    /// Records the progress of reading. May be called at any time, the more often the better.
    pub(super) fn observe(&mut self, now: Observation) {
        let limit = self.limit();
        let Some(search) = &mut self.search else { return };
        let last = std::mem::replace(&mut search.last, now);
        if search.trial.is_none() && now.now_ns >= search.rests_until_ns {
            search.trial = next_trial(self.best, self.most, &mut search.direction);
        }
        let Some(trial) = &mut search.trial else { return };
        let is_glance = trial.is_glance();
        let current = trial.current.get_or_insert_with(|| Measurement::new(now, limit, is_glance));
        let Some(measured) = current.observe(last, now) else { return };
        trial.current = None;
        trial.on_measured(measured, search.direction);
        if trial.is_over() {
            self.end_trial(now.now_ns);
        }
    }

    /// Moves to the other number if it won, else stays and rests.
    fn end_trial(&mut self, now_ns: u64) {
        let Some(search) = &mut self.search else { return };
        let Some(trial) = search.trial.take() else { return };
        if trial.wins >= VOTES {
            self.best = trial.other;
            search.rests_until_ns = now_ns;
            return;
        }
        let looks_down = std::mem::replace(&mut search.looks_down_first, false);
        let rest_ns = match search.direction {
            Direction::Up if looks_down => 0,
            _ => trial.there_ns.saturating_mul(REST_FACTOR).max(REST_NS_MIN),
        };
        search.rests_until_ns = now_ns.saturating_add(rest_ns);
        search.direction = search.direction.turned();
    }
}

/// The next number to try: in the given direction, or in the other one if there is none.
fn next_trial(best: u32, most: u32, direction: &mut Direction) -> Option<Trial> {
    let other = |direction| match direction {
        Direction::Up => Some(best.saturating_mul(2).min(most)).filter(|&other| other != best),
        // The upper limit need not be a power of two.
        Direction::Down => Some(best.next_power_of_two() / 2).filter(|&other| other >= READS_LEAST),
    };
    let (next, other) = other(*direction)
        .map(|number| (*direction, number))
        .or_else(|| Some((direction.turned(), other(direction.turned())?)))?;
    *direction = next;
    Some(Trial::new(other))
}

/// A stretch of time in which reading is measured.
#[derive(Clone, Debug)]
struct Measurement {
    /// The measurement starts at this number of finished reads. Before that, reads of an earlier
    /// limit are among them, and slots are used for the first time.
    settled_at_reads: u64,
    ns_min: u64,
    start: Option<Observation>,
    /// Time with reads in flight, from the beginning.
    busy_ns: u64,
    /// Time without, since the measurement started.
    idle_ns: u64,
}

/// The result of a measurement.
#[derive(Clone, Copy, Debug)]
struct Measured {
    /// Bytes per millisecond, or `None` if readers had nothing to do for too long.
    rate: Option<u64>,
    /// Time with reads that it took.
    busy_ns: u64,
}

impl Measurement {
    /// A measurement that starts once no read of an earlier limit is in flight.
    fn new(now: Observation, limit: u32, is_glance: bool) -> Self {
        Self {
            settled_at_reads: now.reads.saturating_add(2 * u64::from(limit)),
            ns_min: if is_glance { GLANCE_NS_MIN } else { MEASURE_NS_MIN },
            start: None,
            busy_ns: 0,
            idle_ns: 0,
        }
    }

    /// Records the progress of reading. Returns the result once the measurement is over.
    fn observe(&mut self, last: Observation, now: Observation) -> Option<Measured> {
        let passed_ns = now.now_ns.saturating_sub(last.now_ns);
        *(if last.is_starved { &mut self.idle_ns } else { &mut self.busy_ns }) += passed_ns;
        let Some(start) = self.start else {
            if now.reads >= self.settled_at_reads {
                (self.start, self.idle_ns) = (Some(now), 0);
            }
            return None;
        };
        let elapsed_ns = now.now_ns.saturating_sub(start.now_ns);
        let is_spoilt = self.idle_ns.saturating_mul(IDLE_PART_MAX) > elapsed_ns;
        let is_over = elapsed_ns >= self.ns_min
            && (now.reads.saturating_sub(start.reads) >= MEASURE_READS_MIN || self.idle_ns > self.ns_min);
        is_over.then(|| {
            let read_bytes = now.read_bytes.saturating_sub(start.read_bytes);
            let rate = read_bytes.saturating_mul(1_000) / (elapsed_ns / 1_000).max(1);
            Measured { rate: Some(rate).filter(|_| !is_spoilt), busy_ns: self.busy_ns }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::MIB;

    /// What a disk delivers with this many reads in flight, in bytes per millisecond.
    type Disk = fn(u32) -> u64;

    /// Twice as much with twice as many, up to sixteen; nothing more beyond.
    fn flash(reads: u32) -> u64 {
        700_000 * u64::from(reads.min(16))
    }

    /// Best with one; the more memory is in use, the slower.
    fn virtual_disk(reads: u32) -> u64 {
        2_800_000 - 60_000 * u64::from(reads)
    }

    /// The same, whatever is asked of it.
    fn flat(_: u32) -> u64 {
        2_000_000
    }

    /// A load of so many reads of 2 MiB.
    struct Simulation {
        depth: Depth,
        now: Observation,
        /// Percent by which the speed of ten milliseconds may differ from the disk's, either way.
        noise_percent: u64,
        seed: u64,
        /// Time spent with each number, by number.
        ns_with: [u64; 64],
    }

    impl Simulation {
        fn new(depth: Depth, noise_percent: u64, seed: u64) -> Self {
            Self { depth, now: Observation::default(), noise_percent, seed, ns_with: [0; 64] }
        }

        fn random(&mut self) -> u64 {
            // xorshift64
            self.seed ^= self.seed << 13;
            self.seed ^= self.seed >> 7;
            self.seed ^= self.seed << 17;
            self.seed >> 20
        }

        fn run(&mut self, disk: Disk, for_ms: u64) -> &mut Self {
            let end_ns = self.now.now_ns + for_ms * 1_000_000;
            let (mut percent, mut percent_until_ns) = (100, 0);
            while self.now.now_ns < end_ns {
                if self.now.now_ns >= percent_until_ns {
                    percent = 100 - self.noise_percent + self.random() % (2 * self.noise_percent + 1);
                    percent_until_ns = self.now.now_ns + 10_000_000;
                }
                let limit = self.depth.limit();
                let read_ns = 2 * MIB * 100_000_000 / (disk(limit) * percent);
                self.ns_with[crate::units::to_usize(u64::from(limit))] += read_ns;
                self.now.now_ns += read_ns;
                self.now.reads += 1;
                self.now.read_bytes += 2 * MIB;
                self.depth.observe(self.now);
            }
            self
        }

        /// What was delivered, in parts of a thousand of what the best number would have delivered
        /// without noise.
        fn yield_permille(&self, disk: Disk) -> u64 {
            let best = (READS_LEAST..=32).map(disk).max().unwrap();
            self.now.read_bytes * 1_000 / (self.now.now_ns / 1_000_000 * best)
        }
    }

    fn adaptive() -> Depth {
        Depth::adaptive(READS_LEAST, 32)
    }

    #[test]
    fn a_fixed_number_stays() {
        for depth in [Depth::fixed(5), Depth::adaptive(2, 1), Depth::adaptive(9, 1)] {
            let limit = depth.limit();
            assert!(depth.is_fixed() && (1..=5).contains(&limit));
            assert_eq!(Simulation::new(depth, 0, 1).run(flash, 1000).depth.limit(), limit);
        }
        assert_eq!(Depth::adaptive(9, 1).limit(), 1);
    }

    #[test]
    fn climbs_as_far_as_it_pays_and_soon() {
        let mut simulation = Simulation::new(adaptive(), 0, 1);
        simulation.run(flash, 300);
        assert_eq!(simulation.depth.best, 16, "{:?}", simulation.ns_with);
        simulation.run(flash, 4_700);
        assert_eq!(simulation.depth.best, 16);
        // Half of the climb's 300 ms, and what is tried later.
        assert!(simulation.yield_permille(flash) >= 940, "{}", simulation.yield_permille(flash));
        assert_eq!(simulation.ns_with[33..].iter().sum::<u64>(), 0);
    }

    #[test]
    fn stays_with_few_where_few_are_best() {
        let mut simulation = Simulation::new(adaptive(), 0, 1);
        simulation.run(virtual_disk, 6_000);
        assert_eq!(simulation.depth.best, 1);
        let away_ns: u64 = simulation.ns_with[2..].iter().sum();
        assert!(away_ns > 0 && away_ns < 6_000_000_000 * 5 / 100, "{away_ns}");
        assert!(simulation.yield_permille(virtual_disk) >= 995);
    }

    #[test]
    fn comes_down_from_a_start_that_was_too_high() {
        let mut simulation = Simulation::new(Depth::adaptive(16, 32), 0, 1);
        simulation.run(virtual_disk, 2_000);
        assert_eq!(simulation.depth.best, 1, "{:?}", simulation.ns_with);
        let mut simulation = Simulation::new(Depth::adaptive(24, 32), 0, 1);
        simulation.run(flat, 5_000);
        assert_eq!(simulation.depth.best, 1, "as few as serve: {:?}", simulation.ns_with);
    }

    #[test]
    fn notices_that_the_disk_has_changed() {
        let mut simulation = Simulation::new(adaptive(), 0, 1);
        assert_eq!(simulation.run(virtual_disk, 3_000).depth.best, 1);
        assert_eq!(simulation.run(flash, 6_000).depth.best, 16);
    }

    /// Whatever the noise, hardly more is lost than the trials cost.
    #[test]
    fn noise_costs_little() {
        let disks: [Disk; 3] = [flash, virtual_disk, flat];
        let mut lowest = [u64::MAX; 3];
        for seed in 1..200 {
            for (lowest, disk) in lowest.iter_mut().zip(disks) {
                let mut simulation =
                    Simulation::new(adaptive(), 30, u64::wrapping_mul(seed, 0x9E37_79B9_7F4A_7C15));
                let delivered = simulation.run(disk, 6_000).yield_permille(disk);
                // What the noise itself took or gave: the same noise with a disk on which the
                // number changes nothing.
                let mut same =
                    Simulation::new(Depth::fixed(2), 30, u64::wrapping_mul(seed, 0x9E37_79B9_7F4A_7C15));
                let expected = same.run(flat, 6_000).yield_permille(flat);
                *lowest = (*lowest).min(delivered * 1_000 / expected);
            }
        }
        println!("lowest yields, in parts of a thousand: {lowest:?}");
        // The second disk is slower by 6.5 % with four than with one: noise may lead as far as that
        // for a while.
        assert!(lowest[0] >= 850 && lowest[1] >= 925 && lowest[2] >= 970, "{lowest:?}");
    }

    /// A trial in which readers were mostly idle decides nothing, and does not go on for ever.
    #[test]
    fn what_starves_is_not_measured() {
        let mut depth = adaptive();
        let mut now = Observation::default();
        let (mut there_ns, mut tried) = (0, 0);
        for turn in 0..20_000_u64 {
            // Two reads quickly after one another, and then nothing for longer than both took.
            now.now_ns += if turn % 2 == 0 { 4_000_000 } else { 1_000_000 };
            now.reads += 1;
            now.read_bytes += 2 * MIB;
            now.is_starved = turn % 2 == 1;
            let before = depth.limit();
            depth.observe(now);
            assert_eq!(depth.best, 1);
            tried += u64::from(before == 1 && depth.limit() != 1);
            there_ns += if depth.limit() == 1 { 0 } else { 2_500_000 };
        }
        assert_eq!((tried, there_ns), (0, 0), "the first measurement of every trial was spoilt");
    }
}
