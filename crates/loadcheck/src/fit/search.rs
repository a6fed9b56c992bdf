//! The search for the smallest limit, apart from how a limit is tried.
//!
//! ```text
//! fails                                   works
//! |------ lo ----------- ? ----------- hi ------|     halved until hi - lo <= precision
//!          ^ tried again                ^ tried `runs` times, each has to work
//! ```
//!
//! A limit counts as one that works if every run under it does; after the first failure it never
//! counts again. So what is found lies above every limit that was ever seen to fail, however the
//! border flickers.

use std::collections::BTreeMap;

use crate::numbers::median;
use crate::sizes::{Size, SizeContext};

/// How much longer than without a limit a comfortable run may take, in per cent.
const COMFORT_PERCENT: f64 = 110.0;
/// And so much more: very short runs differ by more than a tenth by themselves.
const COMFORT_SLACK_SECONDS: f64 = 0.02;
/// Limits are whole numbers of this, so that they can be written down; finer if the precision asks
/// for it.
const GRAIN_BYTES: u64 = 1 << 20;
/// The precision that per cent of a small limit come to at least.
const PRECISION_BYTES_MIN: u64 = 4 << 20;
/// Limits are whole pages, of the largest kind that Linux has by default.
const GRAIN_BYTES_MIN: u64 = 64 << 10;

/// Where to look, and how carefully.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    /// The smallest limit to try.
    pub(crate) lo_bytes: u64,
    /// Nothing below `lo_bytes` is tried, even if it works.
    pub(crate) lo_is_stated: bool,
    /// The largest limit to try first.
    pub(crate) hi_bytes: u64,
    /// The largest limit that can be tried at all.
    pub(crate) ceiling_bytes: u64,
    /// How far the answer may be above the true one: bytes, or per cent of it.
    pub(crate) precision: Size,
    /// Runs that have to work.
    pub(crate) runs: u32,
}

impl Range {
    /// How far the answer may be above the true one, near a limit.
    pub(crate) fn precision_bytes(&self, limit_bytes: u64) -> u64 {
        let context = SizeContext { limit_bytes: Some(limit_bytes), ..SizeContext::default() };
        let least =
            if matches!(self.precision, Size::Bytes(_)) { GRAIN_BYTES_MIN } else { PRECISION_BYTES_MIN };
        self.precision.resolve(&context).unwrap_or(least).max(least)
    }
}

/// The result of a run under a limit: how long it took, if it worked.
pub(crate) type Tried = Option<f64>;

/// The runs under one limit.
#[derive(Clone, Debug, Default, PartialEq)]
struct Known {
    seconds: Vec<f64>,
    failures: u32,
}

/// A search in progress. `run` runs once, under a limit or, with `None`, without one.
pub(crate) struct Search<F> {
    range: Range,
    run: F,
    known: BTreeMap<u64, Known>,
    unlimited: Vec<f64>,
}

impl<E, F: FnMut(Option<u64>) -> Result<Tried, E>> Search<F> {
    /// Begins, with the times of runs without a limit.
    pub(crate) fn new(range: Range, unlimited: Vec<f64>, run: F) -> Self {
        Self { range, run, known: BTreeMap::new(), unlimited }
    }

    /// The smallest limit under which every run works, or `None` if there is none.
    ///
    /// # Errors
    /// Whatever `run` returns.
    pub(crate) fn smallest(&mut self) -> Result<Option<u64>, E> {
        let Some(mut hi) = self.something_that_works(self.up(self.range.hi_bytes))? else { return Ok(None) };
        let mut lo = match self.largest_failure_below(hi) {
            Some(lo) => lo,
            // 0: nothing fails that may be tried.
            None => self.something_that_fails(&mut hi)?.unwrap_or(0),
        };
        loop {
            while lo > 0 && hi - lo > self.range.precision_bytes(hi) {
                let Some(middle) = self.between(lo, hi) else { break };
                if self.works(middle)? { hi = middle } else { lo = middle }
            }
            if self.always_works(hi)? {
                break;
            }
            lo = hi;
            match self.something_that_works(self.next_above(hi))? {
                Some(above) => hi = above,
                None => return Ok(None),
            }
        }
        // A failure that does not repeat says something, too.
        if lo > 0 {
            while self.count(lo) < self.range.runs
                && self.known.get(&lo).is_none_or(|known| known.seconds.is_empty())
            {
                self.try_once(lo)?;
            }
        }
        Ok(Some(hi))
    }

    /// The smallest limit from `smallest` on under which runs take hardly longer than without one.
    ///
    /// # Errors
    /// Whatever `run` returns.
    pub(crate) fn comfortable(&mut self, smallest: u64) -> Result<Option<u64>, E> {
        if self.is_comfortable(smallest)? {
            return Ok(Some(smallest));
        }
        let (mut lo, mut hi) = (smallest, self.up(self.range.hi_bytes).max(smallest));
        if hi == smallest || !self.is_comfortable(hi)? {
            return Ok(None);
        }
        while hi - lo > self.range.precision_bytes(hi) {
            let Some(middle) = self.between(lo, hi) else { break };
            if self.is_comfortable(middle)? { hi = middle } else { lo = middle }
        }
        Ok(Some(hi))
    }

    /// True if a limit from `smallest` on was seen to fail: then `smallest` is not the border.
    pub(crate) fn is_shaken(&self, smallest: u64) -> bool {
        self.known.range(smallest..).any(|(_, known)| known.failures > 0)
    }

    /// The times without a limit, those of [`Search::comfortable`] too.
    pub(crate) fn unlimited(&self) -> &[f64] {
        &self.unlimited
    }

    /// Limits under which some runs worked and others did not.
    pub(crate) fn flaky(&self) -> Vec<u64> {
        let mixed = |known: &Known| known.failures > 0 && !known.seconds.is_empty();
        self.known.iter().filter(|(_, known)| mixed(known)).map(|(limit, _)| *limit).collect()
    }

    /// The first limit from `limit` on that works, going up in doubles to what can be tried at all.
    fn something_that_works(&mut self, mut limit: u64) -> Result<Option<u64>, E> {
        loop {
            if self.works(limit)? {
                return Ok(Some(limit));
            }
            let next = self.next_above(limit);
            if next <= limit {
                return Ok(None);
            }
            limit = next;
        }
    }

    /// A limit that fails, going down in halves; `hi` follows. `None` if everything that may be
    /// tried works.
    fn something_that_fails(&mut self, hi: &mut u64) -> Result<Option<u64>, E> {
        let mut limit = self.down(self.range.lo_bytes).min(*hi);
        loop {
            if limit < *hi && !self.works(limit)? {
                return Ok(Some(limit));
            }
            *hi = limit;
            let next = self.down(limit / 2);
            if self.range.lo_is_stated || next >= limit {
                return Ok(None);
            }
            limit = next;
        }
    }

    /// A limit above one that failed: the next one that never did, or else twice as much.
    fn next_above(&self, limit: u64) -> u64 {
        let mut above = self.known.range(limit + 1..);
        let known = above.find(|(_, known)| known.failures == 0).map(|(limit, _)| *limit);
        known.unwrap_or_else(|| self.up(limit.saturating_mul(2)))
    }

    fn largest_failure_below(&self, limit: u64) -> Option<u64> {
        let mut below = self.known.range(..limit).rev();
        below.find(|(_, known)| known.failures > 0).map(|(limit, _)| *limit)
    }

    /// True if the limit has never failed; tried if nothing is known of it.
    fn works(&mut self, limit: u64) -> Result<bool, E> {
        if self.count(limit) == 0 {
            self.try_once(limit)?;
        }
        Ok(self.known.get(&limit).is_some_and(|known| known.failures == 0))
    }

    fn always_works(&mut self, limit: u64) -> Result<bool, E> {
        while self.works(limit)? && self.count(limit) < self.range.runs {
            self.try_once(limit)?;
        }
        self.works(limit)
    }

    /// As many runs as it takes to know on which side their median is; between them, runs without a
    /// limit, since a machine's mood changes.
    fn is_comfortable(&mut self, limit: u64) -> Result<bool, E> {
        if !self.works(limit)? {
            return Ok(false);
        }
        if let Some(seconds) = (self.run)(None)? {
            self.unlimited.push(seconds);
        }
        loop {
            let most = median(&self.unlimited) * COMFORT_PERCENT / 100.0 + COMFORT_SLACK_SECONDS;
            let Some(known) = self.known.get(&limit).filter(|known| known.failures == 0) else {
                return Ok(false);
            };
            let quick = known.seconds.iter().filter(|seconds| **seconds <= most).count();
            let slow = known.seconds.len() - quick;
            let majority = usize::try_from(self.range.runs / 2 + 1).unwrap_or(usize::MAX);
            if quick >= majority || slow >= majority {
                return Ok(quick > slow);
            }
            self.try_once(limit)?;
        }
    }

    fn try_once(&mut self, limit: u64) -> Result<(), E> {
        let tried = (self.run)(Some(limit))?;
        let known = self.known.entry(limit).or_default();
        match tried {
            Some(seconds) => known.seconds.push(seconds),
            None => known.failures += 1,
        }
        Ok(())
    }

    fn count(&self, limit: u64) -> u32 {
        let known = self.known.get(&limit);
        known.map_or(0, |known| {
            known.failures.saturating_add(u32::try_from(known.seconds.len()).unwrap_or(u32::MAX))
        })
    }

    fn grain(&self) -> u64 {
        if self.range.precision_bytes(0) >= 2 * GRAIN_BYTES { GRAIN_BYTES } else { GRAIN_BYTES_MIN }
    }

    /// `limit` as one that can be tried, rounded up.
    fn up(&self, limit: u64) -> u64 {
        let rounded = limit.div_ceil(self.grain()).saturating_mul(self.grain());
        rounded.min(self.range.ceiling_bytes).max(self.grain())
    }

    fn down(&self, limit: u64) -> u64 {
        (limit / self.grain() * self.grain()).max(self.grain())
    }

    /// The middle, if there is one: as many times `lo` as `hi` is of it, since what matters is a
    /// share of the answer.
    fn between(&self, lo: u64, hi: u64) -> Option<u64> {
        let product = u128::from(lo) * u128::from(hi);
        let middle = self.down(u64::try_from(product.isqrt()).unwrap_or(lo)).max(lo + self.grain());
        (middle > lo && middle < hi).then_some(middle)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn range(lo_mib: u64, hi_mib: u64) -> Range {
        Range {
            lo_bytes: lo_mib * MIB,
            lo_is_stated: false,
            hi_bytes: hi_mib * MIB,
            ceiling_bytes: 4096 * MIB,
            precision: Size::Bytes(4 * MIB),
            runs: 3,
        }
    }

    /// Needs so much, and takes 1 s; below `fast` 2 s.
    fn needs(need_mib: u64, fast_mib: u64) -> impl FnMut(Option<u64>) -> Result<Tried, ()> {
        move |limit| {
            let limit_mib = limit.map_or(u64::MAX, |limit| limit / MIB);
            Ok((limit_mib >= need_mib).then_some(if limit_mib >= fast_mib { 1.0 } else { 2.0 }))
        }
    }

    #[test]
    fn the_border_is_found_from_wherever_the_search_begins() {
        for need in [1, 3, 64, 100, 777, 4096] {
            for (lo, hi) in [(1, 2), (50, 100), (50, 4000), (3000, 4000), (4096, 4096), (100, 50)] {
                let mut search = Search::new(range(lo, hi), vec![1.0], needs(need, 0));
                let found = search.smallest().unwrap().unwrap() / MIB;
                assert!((need..need + 4).contains(&found), "{need} from {lo} to {hi}: {found}");
                assert!(search.flaky().is_empty());
            }
        }
        let mut search = Search::new(range(50, 100), vec![1.0], needs(5000, 0));
        assert_eq!(search.smallest(), Ok(None), "more than there is");
    }

    #[test]
    fn a_stated_range_is_not_left() {
        let stated = Range { lo_is_stated: true, ceiling_bytes: 200 * MIB, ..range(100, 200) };
        assert_eq!(Search::new(stated, vec![1.0], needs(20, 0)).smallest(), Ok(Some(100 * MIB)));
        assert_eq!(Search::new(stated, vec![1.0], needs(201, 0)).smallest(), Ok(None));
    }

    #[test]
    fn precision_is_kept_down_to_pages() {
        let fine = Range { precision: Size::Bytes(GRAIN_BYTES_MIN), ..range(10, 20) };
        let need = 15 * MIB + 100_000;
        let mut search = Search::new(fine, vec![1.0], |limit: Option<u64>| -> Result<Tried, ()> {
            Ok((limit.unwrap_or(u64::MAX) >= need).then_some(1.0))
        });
        let found = search.smallest().unwrap().unwrap();
        assert!((need..need + GRAIN_BYTES_MIN).contains(&found), "{found}");
    }

    #[test]
    fn what_works_only_sometimes_does_not_count_and_is_told() {
        // Between 100 and 120 MiB, every other run fails.
        let mut turn = 0;
        let tries = RefCell::new(Vec::new());
        let mut search = Search::new(range(50, 400), vec![1.0], |limit: Option<u64>| -> Result<Tried, ()> {
            let limit_mib = limit.unwrap_or(u64::MAX) / MIB;
            turn += 1;
            let works = limit_mib >= 120 || (limit_mib >= 100 && turn % 2 == 0);
            tries.borrow_mut().push((limit_mib, works));
            Ok(works.then_some(1.0))
        });
        let found = search.smallest().unwrap().unwrap() / MIB;
        let flaky = search.flaky();
        drop(search);
        let tries = tries.into_inner();
        assert!((100..126).contains(&found), "{found}");
        let at = |limit: u64| tries.iter().filter(move |(tried, _)| *tried == limit);
        assert!(at(found).all(|(_, works)| *works) && at(found).count() == 3, "{tries:?}");
        let failed = tries.iter().filter(|(_, works)| !works).map(|(limit, _)| *limit).max().unwrap();
        assert!(failed < found, "{tries:?}");
        for limit in flaky {
            let works = at(limit / MIB).filter(|(_, works)| *works).count();
            assert!(works > 0 && works < at(limit / MIB).count());
        }
    }

    #[test]
    fn one_that_fails_every_time_but_the_first_is_left_behind() {
        let mut seen = BTreeMap::<u64, u32>::new();
        let mut search = Search::new(range(50, 400), vec![1.0], |limit: Option<u64>| -> Result<Tried, ()> {
            let limit_mib = limit.unwrap_or(u64::MAX) / MIB;
            let count = seen.entry(limit_mib).or_default();
            *count += 1;
            Ok((limit_mib >= 200 || (limit_mib >= 60 && *count == 1)).then_some(1.0))
        });
        let found = search.smallest().unwrap().unwrap() / MIB;
        assert!((200..=400).contains(&found), "{found}");
        assert!(!search.flaky().is_empty());
    }

    #[test]
    fn comfort_is_about_time() {
        let mut search = Search::new(range(50, 1000), vec![1.0, 1.0, 1.0], needs(100, 300));
        let smallest = search.smallest().unwrap().unwrap();
        let comfortable = search.comfortable(smallest).unwrap().unwrap() / MIB;
        assert!((100..104).contains(&(smallest / MIB)) && (300..304).contains(&comfortable), "{comfortable}");
        let mut search = Search::new(range(50, 1000), vec![1.0; 3], needs(100, 0));
        let smallest = search.smallest().unwrap().unwrap();
        assert_eq!(search.comfortable(smallest), Ok(Some(smallest)));
        let mut search = Search::new(range(50, 1000), vec![1.0; 3], needs(100, 5000));
        let smallest = search.smallest().unwrap().unwrap();
        assert_eq!(search.comfortable(smallest), Ok(None), "slow wherever it was tried");
    }

    #[test]
    fn an_error_ends_the_search() {
        let mut count = 0;
        let mut search = Search::new(range(50, 100), vec![1.0], |_| {
            count += 1;
            if count == 3 { Err("gone") } else { Ok(Some(1.0)) }
        });
        assert_eq!(search.smallest(), Err("gone"));
    }
}
