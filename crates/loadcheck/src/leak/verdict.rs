//! From what was held after each cycle to slopes, and from slopes to limits that are kept or not.

use clap::ValueEnum as _;
use onelayer_probe::{Level, SlopeLimit, slope};

use crate::args::{MaxSlope, MemoryKind, POINTS_MIN, name_of};
use crate::numbers::whole;
use crate::problem::{Code, Problem};
use crate::report::{KindSlope, Limit, Report, SlopeVerdict, Unavailable};
use crate::sizes::SizeContext;

use super::held::CyclePoint;

/// Growth a cycle that is no leak by default: a thousand cycles grow by 16 MiB, as much as a load
/// may take beside its budget.
const DEFAULT_BYTES: u64 = 16 << 10;

/// The most that a kind may grow a cycle: what names it beats what is for all, and the last one
/// counts.
#[derive(Clone, Debug)]
pub(crate) struct Stated(Vec<(Option<MemoryKind>, u64)>);

/// Resolves `--max-slope`.
///
/// # Errors
/// A size that relates to something: there is nothing it could be a share of.
pub(crate) fn stated(args: &[MaxSlope]) -> Result<Stated, Problem> {
    let resolve = |arg: &MaxSlope| Ok((arg.kind, SizeContext::default().resolve("--max-slope", arg.size)?));
    args.iter().map(resolve).collect::<Result<_, _>>().map(Stated)
}

impl Stated {
    fn of(&self, kind: MemoryKind) -> u64 {
        let last = |wanted: Option<MemoryKind>| {
            self.0.iter().rfind(|(of, _)| *of == wanted).map(|(_, bytes)| *bytes)
        };
        last(Some(kind)).or_else(|| last(None)).unwrap_or(DEFAULT_BYTES)
    }

    /// Kinds that are named and were not measured, or were there and could not be measured often
    /// enough: never a silent pass.
    pub(crate) fn unmeasured(
        &self,
        slopes: &[KindSlope],
        gaps: &[Gap],
        unavailable: &[Unavailable],
    ) -> Vec<Problem> {
        let is_named = |kind: MemoryKind| self.0.iter().any(|(of, _)| *of == Some(kind));
        let is_lost = |kind: MemoryKind| gaps.iter().any(|gap| gap.kind == kind && gap.is_a_loss());
        let asked = MemoryKind::value_variants().iter().filter(|kind| is_named(**kind) || is_lost(**kind));
        let missing = asked.filter(|kind| !slopes.iter().any(|slope| slope.kind == name_of(**kind)));
        let problem = |kind: &MemoryKind| {
            let name = name_of(*kind);
            let metric = format!("slope.{name}");
            let reason = unavailable.iter().find(|entry| entry.metric == metric);
            let reason = reason.map_or("it was not measured", |entry| entry.reason.as_str());
            let what = if is_named(*kind) { "check --max-slope" } else { "tell the slope of" };
            Problem::new(Code::CannotMeasure, format!("cannot {what} {name}: {reason}"))
        };
        missing.map(problem).collect()
    }
}

/// A kind that was measured after some of the cycles that count, and not after others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gap {
    kind: MemoryKind,
    /// Cycles after which it was measured.
    measured: usize,
    counted: usize,
    has_floor: bool,
}

impl Gap {
    /// True if there are enough cycles, and too few of this kind.
    fn is_too_wide(&self) -> bool {
        self.measured < points_min() && self.counted >= points_min()
    }

    /// True if the kind was there to be measured, so that to say nothing of it would look like a
    /// pass.
    fn is_a_loss(&self) -> bool {
        self.is_too_wide() && self.has_floor
    }

    /// Puts into the report what is not known.
    pub(crate) fn tell(&self, report: &mut Report) {
        let Self { measured, counted, .. } = *self;
        let name = name_of(self.kind);
        if self.is_too_wide() {
            let reason = format!(
                "it was measured after {measured} of {counted} cycles, and a slope needs {POINTS_MIN}"
            );
            report.missing(&format!("slope.{name}"), &reason);
        } else {
            report.note(format!("{name} was measured after {measured} of {counted} cycles"));
        }
    }
}

fn points_min() -> usize {
    usize::try_from(POINTS_MIN).unwrap_or(usize::MAX)
}

/// The kinds that lack cycles. What was never measured lacks none.
pub(crate) fn gaps_of(points: &[CyclePoint], warmup: u64) -> Vec<Gap> {
    let counted = points.iter().filter(|point| point.number > warmup).count();
    let gap = |kind: &MemoryKind| {
        let has_floor = points.iter().any(|point| point.number == 0 && point.held.get(*kind).is_some());
        let measured = levels(*kind, points, warmup).len();
        let was_measured = has_floor || measured > 0;
        (was_measured && measured < counted).then_some(Gap { kind: *kind, measured, counted, has_floor })
    };
    MemoryKind::value_variants().iter().filter_map(gap).collect()
}

/// Memory of a kind after each cycle that counts, where it was measured.
fn levels(kind: MemoryKind, points: &[CyclePoint], warmup: u64) -> Vec<Level> {
    let counted = points.iter().filter(|point| point.number > warmup);
    let level = |point: &CyclePoint| Some(Level { cycle: point.number, bytes: point.held.get(kind)? });
    counted.filter_map(level).collect()
}

/// The slope of each kind that was measured.
///
/// `points` begin with the floor; `warmup` cycles come before those that count. A cycle after which
/// a kind could not be measured is left out; if too few are left, there is no slope.
pub(crate) fn slopes_of(points: &[CyclePoint], warmup: u64, stated: &Stated) -> Vec<KindSlope> {
    let gaps = gaps_of(points, warmup);
    let is_told = |kind: MemoryKind| !gaps.iter().any(|gap| gap.kind == kind && gap.is_too_wide());
    let kinds = MemoryKind::value_variants().iter().filter(|kind| is_told(**kind));
    kinds.filter_map(|kind| slope_of(*kind, points, warmup, stated.of(*kind))).collect()
}

fn slope_of(kind: MemoryKind, points: &[CyclePoint], warmup: u64, max_bytes: u64) -> Option<KindSlope> {
    let at = |number: u64| points.iter().find(|point| point.number == number)?.held.get(kind);
    let levels = levels(kind, points, warmup);
    let points_bytes: Vec<u64> = levels.iter().map(|level| level.bytes).collect();
    let start_bytes = at(warmup).or_else(|| points_bytes.first().copied())?;
    let found = slope(&levels);
    let (low, high) = (found.and_then(|found| found.low), found.and_then(|found| found.high));
    Some(KindSlope {
        kind: name_of(kind),
        floor_bytes: at(0),
        start_bytes: Some(start_bytes),
        most_growth_bytes: points_bytes.iter().max()?.saturating_sub(start_bytes),
        bytes_per_cycle: found.map(|found| found.value),
        low_bytes_per_cycle: low,
        high_bytes_per_cycle: high,
        spread_bytes: found.map(|found| found.spread),
        max_bytes_per_cycle: max_bytes,
        verdict: verdict(found.and_then(|found| found.against(max_bytes))),
        points_bytes,
    })
}

fn verdict(limit: Option<SlopeLimit>) -> SlopeVerdict {
    match limit {
        Some(SlopeLimit::Above) => SlopeVerdict::Leak,
        Some(SlopeLimit::Around) => SlopeVerdict::Unclear,
        Some(SlopeLimit::Within) => SlopeVerdict::Flat,
        None => SlopeVerdict::Unknown,
    }
}

/// The gates, one for each slope.
pub(crate) fn limits_of(slopes: &[KindSlope]) -> Vec<Limit> {
    let known = slopes.iter().filter(|slope| slope.verdict != SlopeVerdict::Unknown);
    let limit = |slope: &KindSlope| Limit {
        metric: format!("slope.{}", slope.kind),
        limit_bytes: Some(slope.max_bytes_per_cycle),
        actual_bytes: slope.bytes_per_cycle.map(whole),
        passed: slope.verdict != SlopeVerdict::Leak,
        inside_spread: slope.verdict == SlopeVerdict::Unclear,
        ..Limit::default()
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
        assert_eq!(stated_of(&["vram=0", "host=0"]).unmeasured(&found, &[], &[]).len(), 1);
        assert!(stated_of(&["0"]).unmeasured(&found, &[], &[]).is_empty());
        assert!(stated(&["10%".parse().unwrap()]).is_err());
    }

    /// NVML fails once in a hundred cycles: the leak of the other ninety-nine is found, and the
    /// distances are those of the cycles.
    #[test]
    fn a_kind_that_is_missing_once_has_the_slope_of_the_rest() {
        let mut points = points(20, |number| number * MIB);
        points[7].held.host_bytes = None;
        let slopes = slopes_of(&points, 3, &stated_of(&[]));
        let [host] = &slopes[..] else { panic!("host was measured") };
        assert_eq!((host.points_bytes.len(), host.verdict), (16, SlopeVerdict::Leak));
        assert_eq!((host.bytes_per_cycle, host.spread_bytes), (Some(1_048_576.0), Some(0.0)));
        let gaps = gaps_of(&points, 3);
        assert_eq!(gaps, [Gap { kind: MemoryKind::Host, measured: 16, counted: 17, has_floor: true }]);
        assert!(stated_of(&[]).unmeasured(&slopes, &gaps, &[]).is_empty());
        let mut report = Report::new(crate::report::CommandName::Leak);
        gaps[0].tell(&mut report);
        assert!(report.unavailable.is_empty() && report.notes[0].contains("16 of 17"), "{:?}", report.notes);
    }

    #[test]
    fn a_kind_that_is_mostly_missing_is_no_pass() {
        let mut points = points(20, |_| MIB);
        points[11..].iter_mut().for_each(|point| point.held.host_bytes = None);
        let slopes = slopes_of(&points, 3, &stated_of(&[]));
        assert!(slopes.is_empty(), "seven are too few: {slopes:?}");
        let gaps = gaps_of(&points, 3);
        let mut report = Report::new(crate::report::CommandName::Leak);
        gaps.iter().for_each(|gap| gap.tell(&mut report));
        let problems = stated_of(&[]).unmeasured(&slopes, &gaps, &report.unavailable);
        let [problem] = &problems[..] else { panic!("one kind is missing: {problems:?}") };
        assert!(problem.message.contains("the slope of host: it was measured after 7 of 17"), "{problem:?}");
        // What was not there before the first cycle was not to be had.
        points[0].held.host_bytes = None;
        assert!(stated_of(&[]).unmeasured(&slopes, &gaps_of(&points, 3), &report.unavailable).is_empty());
    }
}
