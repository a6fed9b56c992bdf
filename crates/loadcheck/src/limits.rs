//! Holds runs against the limits that were asked for.
//!
//! Memory is judged by the maximum over the runs, time by the mean. A metric that was asked for and
//! could not be measured is a problem (exit code 4), never a silent pass.

use std::time::Duration;

use crate::args::{Bound, Device, Gate, Metric, name_of};
use crate::numbers::mean;
use crate::problem::{Code, Problem};
use crate::report::{Limit, Place, Run, Unavailable};
use crate::sizes::SizeContext;

/// Gates that cannot be checked on a device, known before anything runs. `None` as the device is a
/// command, measured from outside.
pub(crate) fn unmeasurable(gates: &[Gate], device: Option<Device>) -> Vec<Problem> {
    gates.iter().filter_map(|gate| unmeasurable_gate(gate, device)).collect()
}

fn unmeasurable_gate(gate: &Gate, device: Option<Device>) -> Option<Problem> {
    let (reason, help) = match (gate.metric, device) {
        (Metric::Uma, _) => (
            "loadcheck knows no machine yet whose host and device memory are one pool".to_owned(),
            "gate on --max-memory and --max-vram",
        ),
        (Metric::Vram, None) => (
            "the device memory of a command is not measured".to_owned(),
            "gate on --max-memory and --max-peak-rss",
        ),
        (Metric::Vram, Some(Device::Cuda(ordinal))) if gate.gpu.is_some_and(|gpu| gpu != ordinal) => (
            format!("the load goes to cuda:{ordinal}, and no other device is measured"),
            "--device and the GPU after @ have to agree",
        ),
        (Metric::Vram, Some(device @ (Device::Host | Device::None))) => (
            format!("a load with --device {} takes no device memory", device.target()),
            "--device cuda:0 needs a CUDA driver and device; or gate on --max-memory and --max-peak-rss",
        ),
        _ => return None,
    };
    Some(cannot_check(gate, &reason).help(help))
}

fn cannot_check(gate: &Gate, reason: &str) -> Problem {
    Problem::new(Code::CannotMeasure, format!("cannot check {}: {reason}", gate.flag))
}

/// A gate in bytes, for a worker that notes where it is first exceeded; `None` for time.
///
/// # Errors
/// The size relates to something that is not known.
pub(crate) fn limit_bytes(gate: &Gate, context: &SizeContext) -> Result<Option<u64>, Problem> {
    let Bound::Size(size) = gate.bound else { return Ok(None) };
    // A percentage of device memory is of the device.
    let context = if gate.metric == Metric::Vram { context.of_device() } else { *context };
    context.resolve(&gate.flag, size).map(Some)
}

/// Where in a run a metric first exceeded a limit.
pub(crate) type FirstExceeded<'a> = &'a dyn Fn(Metric, u64) -> Option<Place>;

/// Holds the runs against the gates.
///
/// # Errors
/// One problem for each gate that cannot be resolved or whose metric was not measured in some run.
pub(crate) fn judge(
    gates: &[Gate],
    runs: &[Run],
    context: &SizeContext,
    unavailable: &[Unavailable],
    first_exceeded: FirstExceeded<'_>,
) -> (Vec<Limit>, Vec<Problem>) {
    let (mut limits, mut problems) = (Vec::new(), Vec::new());
    for gate in gates {
        let judged = match gate.bound {
            Bound::Time(limit) => judge_time(gate, limit, runs),
            Bound::Size(_) => judge_size(gate, runs, context, unavailable, first_exceeded),
        };
        match judged {
            Ok(limit) => limits.push(limit),
            Err(problem) => problems.push(problem),
        }
    }
    (limits, problems)
}

/// The peak of a metric in one run, in bytes; `None` if it was not measured, and for time.
fn peak_bytes(metric: Metric, run: &Run) -> Option<u64> {
    match metric {
        Metric::Host => run.peak.host_bytes,
        Metric::Rss => run.peak.rss_bytes,
        Metric::Pinned => run.peak.pinned_bytes,
        Metric::Vram => run.peak.vram_bytes,
        Metric::File => run.peak.file_bytes,
        Metric::Cgroup => run.peak.cgroup_bytes,
        Metric::Uma | Metric::Time => None,
    }
}

fn judge_size(
    gate: &Gate,
    runs: &[Run],
    context: &SizeContext,
    unavailable: &[Unavailable],
    first_exceeded: FirstExceeded<'_>,
) -> Result<Limit, Problem> {
    let limit_bytes = limit_bytes(gate, context)?.unwrap_or(u64::MAX);
    let values: Option<Vec<u64>> = runs.iter().map(|run| peak_bytes(gate.metric, run)).collect();
    let metric = name_of(gate.metric);
    let Some(values) = values.filter(|values| !values.is_empty()) else {
        let field = format!("peak.{metric}_bytes");
        let reason = unavailable.iter().find(|entry| entry.metric == field);
        return Err(cannot_check(gate, reason.map_or("it was not measured", |entry| &entry.reason)));
    };
    let actual_bytes = values.iter().copied().max();
    let passed = actual_bytes <= Some(limit_bytes);
    Ok(Limit {
        metric,
        limit_bytes: Some(limit_bytes),
        actual_bytes,
        passed,
        inside_spread: !passed && values.iter().any(|value| *value <= limit_bytes),
        first_exceeded_at: if passed { None } else { first_exceeded(gate.metric, limit_bytes) },
        ..Limit::default()
    })
}

fn judge_time(gate: &Gate, limit: Duration, runs: &[Run]) -> Result<Limit, Problem> {
    let values: Option<Vec<f64>> = runs.iter().map(|run| run.seconds).collect();
    let Some(values) = values.filter(|values| !values.is_empty()) else {
        return Err(cannot_check(gate, "no run ended"));
    };
    let limit_seconds = limit.as_secs_f64();
    let actual_seconds = mean(&values);
    Ok(Limit {
        metric: name_of(gate.metric),
        limit_seconds: Some(limit_seconds),
        actual_seconds: Some(actual_seconds),
        passed: actual_seconds <= limit_seconds,
        inside_spread: values.iter().any(|value| *value <= limit_seconds)
            && values.iter().any(|value| *value > limit_seconds),
        ..Limit::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(host_bytes: Option<u64>, seconds: f64) -> Run {
        let mut run = Run { seconds: Some(seconds), ..Run::default() };
        run.peak.host_bytes = host_bytes;
        run
    }

    fn gate(text: &str) -> Gate {
        text.parse().unwrap()
    }

    fn verdicts(text: &str, runs: &[Run]) -> (Vec<(bool, bool)>, usize) {
        let (limits, problems) = judge(&[gate(text)], runs, &SizeContext::default(), &[], &|_, _| None);
        (limits.iter().map(|limit| (limit.passed, limit.inside_spread)).collect(), problems.len())
    }

    #[test]
    fn memory_is_judged_by_the_maximum() {
        let runs = [run(Some(10), 1.0), run(Some(30), 1.0)];
        assert_eq!(verdicts("30B", &runs), (vec![(true, false)], 0));
        assert_eq!(verdicts("29B", &runs), (vec![(false, true)], 0));
        assert_eq!(verdicts("9B", &runs), (vec![(false, false)], 0));
    }

    #[test]
    fn time_is_judged_by_the_mean() {
        let runs = [run(None, 1.0), run(None, 3.0)];
        assert_eq!(verdicts("time=2s", &runs), (vec![(true, true)], 0));
        assert_eq!(verdicts("time=1900ms", &runs), (vec![(false, true)], 0));
        assert_eq!(verdicts("time=500ms", &runs), (vec![(false, false)], 0));
    }

    #[test]
    fn what_was_not_measured_never_passes() {
        assert_eq!(verdicts("1TiB", &[run(Some(1), 1.0), run(None, 1.0)]), (vec![], 1));
        assert_eq!(verdicts("1TiB", &[]), (vec![], 1));
    }

    #[test]
    fn device_memory_is_measured_where_there_is_some() {
        let refused = |text: &str, gpu, device| {
            let gate = Gate { gpu, ..gate(text) };
            unmeasurable(&[gate, self::gate("host=1GiB")], device).pop().map(|problem| problem.message)
        };
        let says = |refused: Option<String>, what: &str| refused.is_some_and(|text| text.contains(what));
        assert_eq!(refused("vram=1GiB", None, Some(Device::Cuda(1))), None);
        assert_eq!(refused("vram=1GiB", Some(1), Some(Device::Cuda(1))), None);
        assert_eq!(refused("vram=1GiB", Some(1), Some(Device::Auto)), None, "not decided yet");
        assert!(says(refused("vram=1GiB", Some(0), Some(Device::Cuda(1))), "goes to cuda:1"));
        assert!(says(refused("vram=1GiB", None, Some(Device::Host)), "--device host"));
        assert!(says(refused("vram=1GiB", None, Some(Device::None)), "--device none"));
        assert!(says(refused("vram=1GiB", None, None), "a command"));
        assert!(says(refused("uma=1GiB", None, Some(Device::Cuda(0))), "one pool"));
    }
}
