//! From what was held after each cycle to slopes, and from slopes to limits that are kept or not.

use crate::args::MaxSlope;
use crate::output::numbers::whole;
use crate::problem::{Code, Problem};
use crate::report::{KindSlope, Limit, SlopeVerdict, Unavailable};
use crate::sizes::SizeContext;

use super::held::{CyclePoint, Kind};
use super::slope::slope;

/// What is no leak if nothing is said: a thousand cycles would grow by 16 MiB, which is what a load may take beside its budget.
const DEFAULT_BYTES: u64 = 16 << 10;

/// The most that a kind may grow a cycle: what names it beats what is for all, and the last one counts.
#[derive(Clone, Debug)]
pub(crate) struct Stated(Vec<(Option<Kind>, u64)>);

/// Resolves `--max-slope`.
///
/// # Errors
/// A size that relates to something: there is nothing it could be a share of.
pub(crate) fn stated(args: &[MaxSlope]) -> Result<Stated, Problem> {
    let resolve = |arg: &MaxSlope| {
        let bytes = arg.size.resolve(&SizeContext::default()).map_err(|error| {
            Problem::new(Code::SizeUnresolved, error.to_string()).at(format!("--max-slope {}", arg.size))
        });
        bytes.map(|bytes| (arg.kind, bytes))
    };
    args.iter().map(resolve).collect::<Result<_, _>>().map(Stated)
}

impl Stated {
    fn of(&self, kind: Kind) -> u64 {
        let last =
            |wanted: Option<Kind>| self.0.iter().rfind(|(of, _)| *of == wanted).map(|(_, bytes)| *bytes);
        last(Some(kind)).or_else(|| last(None)).unwrap_or(DEFAULT_BYTES)
    }

    /// Kinds that are named and were not measured: never a silent pass.
    pub(crate) fn unmeasured(&self, slopes: &[KindSlope], unavailable: &[Unavailable]) -> Vec<Problem> {
        let named = Kind::ALL.iter().filter(|(kind, _)| self.0.iter().any(|(of, _)| *of == Some(*kind)));
        let missing = named.filter(|(_, name)| !slopes.iter().any(|slope| slope.kind == *name));
        let problem = |(_, name): &(Kind, &str)| {
            let metric = format!("slope.{name}");
            let reason = unavailable.iter().find(|entry| entry.metric == metric);
            let reason = reason.map_or("it was not measured", |entry| entry.reason.as_str());
            Problem::new(Code::CannotMeasure, format!("cannot check --max-slope {name}: {reason}"))
        };
        missing.map(problem).collect()
    }
}

/// The slope of each kind that was measured after every cycle.
///
/// `points` begin with the floor; `warmup` cycles come before those that count.
pub(crate) fn slopes_of(points: &[CyclePoint], warmup: u64, stated: &Stated) -> Vec<KindSlope> {
    let kinds = Kind::ALL.iter();
    kinds.filter_map(|(kind, _)| slope_of(*kind, points, warmup, stated.of(*kind))).collect()
}

fn slope_of(kind: Kind, points: &[CyclePoint], warmup: u64, max_bytes: u64) -> Option<KindSlope> {
    let at = |number: u64| points.iter().find(|point| point.number == number)?.held.get(kind);
    let counted = points.iter().filter(|point| point.number > warmup);
    let points_bytes: Vec<u64> = counted.map(|point| point.held.get(kind)).collect::<Option<_>>()?;
    let start_bytes = at(warmup).or_else(|| points_bytes.first().copied())?;
    let found = slope(&points_bytes);
    let (low, high) = (found.and_then(|found| found.low), found.and_then(|found| found.high));
    Some(KindSlope {
        kind: kind.name().to_owned(),
        floor_bytes: at(0),
        start_bytes: Some(start_bytes),
        most_growth_bytes: points_bytes.iter().max()?.saturating_sub(start_bytes),
        bytes_per_cycle: found.map(|found| found.value),
        low_bytes_per_cycle: low,
        high_bytes_per_cycle: high,
        spread_bytes: found.map(|found| found.spread),
        max_bytes_per_cycle: max_bytes,
        verdict: verdict(low, high, max_bytes),
        points_bytes,
    })
}

fn verdict(low: Option<f64>, high: Option<f64>, max_bytes: u64) -> SlopeVerdict {
    let max = crate::output::numbers::to_f64(max_bytes);
    match (low, high) {
        (Some(low), _) if low > max => SlopeVerdict::Leak,
        (Some(_), Some(high)) if high > max => SlopeVerdict::Unclear,
        (Some(_), Some(_)) => SlopeVerdict::Flat,
        _ => SlopeVerdict::Unknown,
    }
}

/// The gates, one for each slope.
pub(crate) fn limits_of(slopes: &[KindSlope]) -> Vec<Limit> {
    let known = slopes.iter().filter(|slope| slope.verdict != SlopeVerdict::Unknown);
    let limit = |slope: &KindSlope| Limit {
        metric: format!("slope.{}", slope.kind),
        limit_bytes: Some(slope.max_bytes_per_cycle),
        actual_bytes: slope.bytes_per_cycle.map(whole),
        limit_seconds: None,
        actual_seconds: None,
        passed: slope.verdict != SlopeVerdict::Leak,
        inside_spread: slope.verdict == SlopeVerdict::Unclear,
        first_exceeded_at: None,
    };
    known.map(limit).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::leak::Held;

    const MIB: u64 = 1 << 20;

    fn points(count: u64, host: impl Fn(u64) -> u64) -> Vec<CyclePoint> {
        let held = |number| Held { host_bytes: Some(host(number)), ..Held::default() };
        (0..=count).map(|number| CyclePoint { number, held: held(number) }).collect()
    }

    fn stated_of(texts: &[&str]) -> Stated {
        let args: Vec<MaxSlope> = texts.iter().map(|text| text.parse().unwrap()).collect();
        stated(&args).unwrap()
    }

    #[test]
    fn growth_that_ends_with_the_warm_up_is_no_leak() {
        let found = slopes_of(&points(33, |number| 10 * MIB + 64 * MIB * number.min(3)), 3, &stated_of(&[]));
        let [host] = &found[..] else { panic!("only host was measured: {found:?}") };
        assert_eq!((host.floor_bytes, host.start_bytes), (Some(10 * MIB), Some(202 * MIB)));
        assert_eq!((host.points_bytes.len(), host.most_growth_bytes), (30, 0));
        assert_eq!((host.bytes_per_cycle, host.verdict), (Some(0.0), SlopeVerdict::Flat));
        assert!(limits_of(&found)[0].passed);
    }

    #[test]
    fn limits_decide_what_a_leak_is() {
        let leaks = points(33, |number| number * MIB);
        for (texts, expected) in [
            (&[][..], SlopeVerdict::Leak),
            (&["2MiB"], SlopeVerdict::Flat),
            (&["2MiB", "host=512KiB"], SlopeVerdict::Leak),
            (&["host=1MiB", "512KiB"], SlopeVerdict::Flat),
            (&["vram=1GiB"], SlopeVerdict::Leak),
        ] {
            assert_eq!(slopes_of(&leaks, 3, &stated_of(texts))[0].verdict, expected, "{texts:?}");
        }
        let unclear = points(20, |number| if number % 2 == 0 { 0 } else { number * MIB });
        let found = slopes_of(&unclear, 0, &stated_of(&[]));
        assert_eq!(found[0].verdict, SlopeVerdict::Unclear, "{found:?}");
        let limit = &limits_of(&found)[0];
        assert!(limit.passed && limit.inside_spread);
        assert_eq!(slopes_of(&points(5, |_| 0), 3, &stated_of(&[]))[0].verdict, SlopeVerdict::Unknown);
    }

    #[test]
    fn what_is_named_and_not_measured_is_a_problem() {
        let found = slopes_of(&points(20, |_| MIB), 3, &stated_of(&[]));
        assert_eq!(stated_of(&["vram=0", "host=0"]).unmeasured(&found, &[]).len(), 1);
        assert!(stated_of(&["0"]).unmeasured(&found, &[]).is_empty());
        assert!(stated(&["10%".parse().unwrap()]).is_err());
    }

    #[test]
    fn a_kind_that_is_missing_once_has_no_slope() {
        let mut gap = points(20, |_| MIB);
        gap[7].held.host_bytes = None;
        assert!(slopes_of(&gap, 3, &stated_of(&[])).is_empty());
    }
}
