//! The mathematics of a comparison: the order of its rounds, medians, spreads, ratios.
//!
//! Memory is the maximum over the runs, time the median. Times are compared within a round and not
//! across: what slows the machine for a while slows all rows of a round.

use crate::args::CacheArg;
use crate::entries::{Entry, What};
use crate::numbers::{median, to_f64};
use crate::report::{CacheState, Compared, ComparedPeak, Outcome, Run, Spread};
use crate::shell::as_text;
use crate::strategies::{SimpleStrategy, Strategy};
use onelayer_system::units::to_u64;

/// A share of cached pages that still counts as none, or as all: a page or two that another process
/// looked at.
const CACHE_TOLERANCE: f64 = 0.001;

/// The rows in the order of a round, from 0: each round begins with the next row, so that none is
/// always first.
pub(crate) fn order(entry_count: usize, round: u32) -> impl Iterator<Item = usize> {
    let first = usize::try_from(round).unwrap_or(0) % entry_count.max(1);
    (first..entry_count).chain(0..first)
}

/// The summary of all runs, a row for each entry. Each loads `tensor_bytes`.
pub(crate) fn summarise(entries: &[Entry], runs: &[Run], tensor_bytes: Option<u64>) -> Vec<Compared> {
    let of = |entry: &Entry| runs.iter().filter(|run| run.strategy == entry.name).collect::<Vec<&Run>>();
    let mut rows: Vec<Compared> = entries.iter().map(|entry| row(entry, &of(entry), tensor_bytes)).collect();
    let typical = |row: &Compared| row.seconds.as_ref().map(|seconds| seconds.median);
    let fastest = (0..rows.len()).filter(|index| typical(&rows[*index]).is_some()).min_by(|left, right| {
        typical(&rows[*left]).unwrap_or(0.0).total_cmp(&typical(&rows[*right]).unwrap_or(0.0))
    });
    if let Some(fastest) = fastest {
        let fastest = of(&entries[fastest]);
        for (row, entry) in rows.iter_mut().zip(entries) {
            row.time_ratio = time_ratio(&of(entry), &fastest);
        }
    }
    add_host_ratios(&mut rows, entries, tensor_bytes);
    rows
}

fn row(entry: &Entry, runs: &[&Run], tensor_bytes: Option<u64>) -> Compared {
    let counted: Vec<&Run> = runs.iter().copied().filter(|run| run.round != Some(0)).collect();
    let completed: Vec<&Run> = counted.iter().copied().filter(|run| is_complete(run)).collect();
    let other = runs.iter().find(|run| !is_complete(run));
    let seconds = spread(&completed.iter().filter_map(|run| run.seconds).collect::<Vec<f64>>());
    let cpu_seconds = spread(&completed.iter().filter_map(|run| run.cpu_seconds).collect::<Vec<f64>>());
    let command = match &entry.what {
        What::Strategy(_) => None,
        What::Command(words) => Some(as_text(words)),
    };
    Compared {
        strategy: entry.name.clone(),
        command,
        outcome: other.map_or(Outcome::Completed, |run| run.outcome),
        reason: other.and_then(|run| run.reason.clone()),
        runs: to_u64(counted.len()),
        completed: to_u64(completed.len()),
        cache_not_as_asked: to_u64(counted.iter().filter(|run| !is_as_asked(&run.cache)).count()),
        bytes_per_second: tensor_bytes
            .zip(seconds.as_ref())
            .and_then(|(bytes, time)| rate(bytes, time.median)),
        seconds,
        cpu_seconds: cpu_seconds.map(|spread| spread.median),
        peak: peak(runs),
        ..Compared::default()
    }
}

fn is_complete(run: &Run) -> bool {
    run.outcome == Outcome::Completed
}

/// Whether the page cache was as it was asked for when the run began; what could not be looked at
/// was not.
pub(crate) fn is_as_asked(cache: &CacheState) -> bool {
    match (cache.asked, cache.cached_share) {
        (CacheArg::Asis, _) => true,
        (CacheArg::Cold, Some(share)) => share <= CACHE_TOLERANCE,
        (CacheArg::Warm, Some(share)) => share >= 1.0 - CACHE_TOLERANCE,
        (CacheArg::Cold | CacheArg::Warm, None) => false,
    }
}

fn peak(runs: &[&Run]) -> ComparedPeak {
    let most = |pick: fn(&Run) -> Option<u64>| runs.iter().filter_map(|run| pick(run)).max();
    ComparedPeak {
        host_bytes: most(|run| run.peak.host_bytes),
        host_growth_bytes: most(|run| Some(run.peak.host_bytes?.saturating_sub(run.baseline.host_bytes?))),
        rss_bytes: most(|run| run.peak.rss_bytes),
        rss_growth_bytes: most(|run| Some(run.peak.rss_bytes?.saturating_sub(run.baseline.rss_bytes?))),
        file_bytes: most(|run| run.peak.file_bytes),
        cgroup_bytes: most(|run| run.peak.cgroup_bytes),
        pinned_bytes: most(|run| run.peak.pinned_bytes),
        vram_bytes: most(|run| run.peak.vram_bytes),
    }
}

/// Below so many bytes of tensors, the file pages of a command may as well be its own code.
const TELLING_BYTES: u64 = 256 << 20;

/// True if a row holds its weights as pages of files: those of a command are told by how many there
/// are.
pub(crate) fn maps(entry: &Entry, peak: &ComparedPeak, tensor_bytes: Option<u64>) -> bool {
    match &entry.what {
        What::Strategy(strategy) => *strategy == Strategy::Simple(SimpleStrategy::Mmap),
        What::Command(_) => peak
            .file_bytes
            .zip(tensor_bytes)
            .is_some_and(|(file_bytes, bytes)| bytes >= TELLING_BYTES && file_bytes >= bytes / 10 * 9),
    }
}

fn add_host_ratios(rows: &mut [Compared], entries: &[Entry], tensor_bytes: Option<u64>) {
    let owns = |row: &Compared, entry: &Entry| row.completed > 0 && !maps(entry, &row.peak, tensor_bytes);
    let smallest = rows
        .iter()
        .zip(entries)
        .filter(|(row, entry)| owns(row, entry))
        .filter_map(|(row, _)| row.peak.host_bytes)
        .min()
        .filter(|bytes| *bytes > 0);
    let Some(smallest) = smallest else { return };
    for (row, entry) in rows.iter_mut().zip(entries) {
        if owns(row, entry) {
            row.host_ratio = row.peak.host_bytes.map(|bytes| to_f64(bytes) / to_f64(smallest));
        }
    }
}

/// Median over the rounds in which both completed.
fn time_ratio(runs: &[&Run], fastest: &[&Run]) -> Option<f64> {
    let time = |run: &Run| run.seconds.filter(|seconds| is_complete(run) && *seconds > 0.0);
    let ratios: Vec<f64> = runs
        .iter()
        .filter_map(|run| {
            let beside = fastest.iter().find(|beside| beside.round == run.round && run.round != Some(0))?;
            Some(time(run)? / time(beside)?)
        })
        .collect();
    spread(&ratios).map(|spread| spread.median)
}

/// Median, extremes and the median deviation; `None` of nothing.
fn spread(values: &[f64]) -> Option<Spread> {
    if values.is_empty() {
        return None;
    }
    let center = median(values);
    let distances: Vec<f64> = values.iter().map(|value| (value - center).abs()).collect();
    Some(Spread {
        median: center,
        min: values.iter().copied().fold(f64::INFINITY, f64::min),
        max: values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        deviation: median(&distances),
    })
}

/// Bytes a second, for times long enough to divide by.
fn rate(bytes: u64, seconds: f64) -> Option<u64> {
    let nanoseconds = std::time::Duration::try_from_secs_f64(seconds).ok()?.as_nanos();
    u64::try_from((u128::from(bytes) * 1_000_000_000).checked_div(nanoseconds)?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{Peak, Point};

    const MIB: u64 = 1 << 20;

    fn entry(name: &str) -> Entry {
        let what = Strategy::parse(name).map_or_else(|_| What::Command(vec![name.into()]), What::Strategy);
        Entry { name: name.to_owned(), what }
    }

    fn run(name: &str, round: u64, seconds: f64, host_mib: u64, file_mib: u64) -> Run {
        Run {
            strategy: name.to_owned(),
            round: Some(round),
            outcome: Outcome::Completed,
            seconds: Some(seconds),
            cpu_seconds: Some(seconds / 2.0),
            baseline: Point { host_bytes: Some(MIB), ..Point::default() },
            peak: Peak {
                host_bytes: Some(host_mib * MIB),
                file_bytes: Some(file_mib * MIB),
                ..Peak::default()
            },
            ..Run::default()
        }
    }

    #[test]
    fn each_round_begins_with_another_row() {
        let rounds: Vec<Vec<usize>> = (0..4).map(|round| order(3, round).collect()).collect();
        assert_eq!(rounds, [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2]]);
        assert_eq!(order(0, 5).count(), 0);
    }

    #[test]
    fn medians_and_spreads() {
        assert_eq!(spread(&[]), None);
        let expected = Spread { median: 2.0, min: 1.0, max: 9.0, deviation: 1.0 };
        assert_eq!(spread(&[9.0, 1.0, 2.0]), Some(expected));
        assert_eq!(spread(&[4.0, 1.0]).map(|spread| (spread.median, spread.deviation)), Some((2.5, 1.5)));
        assert_eq!((rate(3_000_000_000, 1.5), rate(1, 0.0)), (Some(2_000_000_000), None));
    }

    #[test]
    fn times_are_compared_within_their_round() {
        // The machine is slower in round 1, and something else disturbs round 3: neither the medians' ratio
        // nor that of any other pairs is the answer.
        let runs = [
            run("stream", 1, 2.0, 10, 0),
            run("read", 1, 6.0, 40, 0),
            run("stream", 2, 1.0, 20, 0),
            run("read", 2, 3.0, 30, 0),
            run("stream", 3, 10.0, 10, 0),
            run("read", 3, 2.0, 30, 0),
        ];
        let rows = summarise(&[entry("stream"), entry("read")], &runs, Some(8 * MIB));
        assert_eq!((rows[0].time_ratio, rows[1].time_ratio), (Some(1.0), Some(3.0)));
        assert_eq!(rows[0].seconds.as_ref().map(|seconds| seconds.median), Some(2.0));
        assert_eq!(rows[0].bytes_per_second, Some(4 * MIB));
        assert_eq!(rows[0].cpu_seconds, Some(1.0));
        assert_eq!(rows[0].peak.host_bytes, Some(20 * MIB), "memory is the maximum");
        assert_eq!(rows[1].peak.host_growth_bytes, Some(39 * MIB));
        assert_eq!((rows[0].host_ratio, rows[1].host_ratio), (Some(1.0), Some(2.0)));
    }

    #[test]
    fn what_maps_is_no_measure_for_what_owns() {
        let runs = [
            run("mmap", 1, 1.0, 2, 1000),
            run("stream", 1, 2.0, 10, 0),
            run("python", 1, 2.0, 5, 1100),
            run("other", 1, 2.0, 20, 300),
        ];
        let entries = ["mmap", "stream", "python", "other"].map(entry);
        let rows = summarise(&entries, &runs, Some(1000 * MIB));
        let ratios: Vec<Option<f64>> = rows.iter().map(|row| row.host_ratio).collect();
        assert_eq!(ratios, [None, Some(1.0), None, Some(2.0)]);
        let small = summarise(&entries, &runs, Some(100 * MIB));
        assert_eq!(small[2].host_ratio, Some(1.0), "of a small checkpoint nobody can tell");
        assert_eq!(rows[2].command.as_deref(), Some(["python".to_owned()].as_slice()));
    }

    #[test]
    fn runs_that_did_not_complete_have_memory_and_no_time() {
        let killed = Run {
            outcome: Outcome::Killed,
            reason: Some("killed by SIGKILL".to_owned()),
            ..run("read", 2, 9.0, 90, 0)
        };
        let warmup = Run { round: Some(0), outcome: Outcome::Failed, ..run("pread", 0, 9.0, 9, 0) };
        let runs = [run("read", 1, 3.0, 40, 0), killed, warmup, run("stream", 1, 1.0, 1, 0)];
        let rows = summarise(&["read", "pread", "stream", "direct"].map(entry), &runs, None);
        assert_eq!((rows[0].runs, rows[0].completed, rows[0].outcome), (2, 1, Outcome::Killed));
        assert_eq!(rows[0].seconds.as_ref().map(|seconds| (seconds.median, seconds.max)), Some((3.0, 3.0)));
        assert_eq!(rows[0].peak.host_bytes, Some(90 * MIB), "what was seen of it counts");
        assert_eq!(rows[0].reason.as_deref(), Some("killed by SIGKILL"));
        assert_eq!((rows[1].runs, rows[1].outcome, rows[1].time_ratio), (0, Outcome::Failed, None));
        assert_eq!((rows[1].host_ratio, rows[3].runs), (None, 0));
        assert_eq!(rows[2].bytes_per_second, None);
    }

    #[test]
    fn a_run_that_was_not_cold_is_counted() {
        let with = |asked, cached_share| CacheState { asked, cached_share };
        for (cache, expected) in [
            (with(CacheArg::Cold, Some(0.0)), true),
            (with(CacheArg::Cold, Some(0.01)), false),
            (with(CacheArg::Cold, None), false),
            (with(CacheArg::Warm, Some(1.0)), true),
            (with(CacheArg::Warm, Some(0.9)), false),
            (with(CacheArg::Asis, None), true),
        ] {
            assert_eq!(is_as_asked(&cache), expected, "{cache:?}");
        }
        let mut second = run("read", 2, 1.0, 1, 0);
        second.cache = with(CacheArg::Cold, Some(0.5));
        let rows = summarise(&[entry("read")], &[run("read", 1, 1.0, 1, 0), second], None);
        assert_eq!(rows[0].cache_not_as_asked, 1);
    }
}
