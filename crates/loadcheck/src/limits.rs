//! Gates: what `--limit` and its kin ask for, and how the runs came out against it.
//!
//! Memory is judged by the maximum over the runs, time by the mean. A metric that was asked for and
//! could not be measured is a problem (exit code 4), never a silent pass.

use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::args::{Device, LimitArgs};
use crate::problem::{Code, Problem};
use crate::report::{Limit, Place, Run, Unavailable};
use crate::sizes::{Size, SizeContext, parse_duration};

/// What can be limited.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Metric {
    /// Memory that the kernel cannot take back.
    Host,
    /// All resident pages.
    Rss,
    /// Page-locked memory.
    Pinned,
    /// Device memory.
    Vram,
    /// Host and device memory where they are one pool.
    Uma,
    /// Mapped file pages.
    File,
    /// The memory cgroup's own peak.
    Cgroup,
    /// Wall time.
    Time,
}

impl Metric {
    /// All of them, as spelled on the command line and in the report.
    pub(crate) const ALL: [(Self, &'static str); 8] = [
        (Self::Host, "host"),
        (Self::Rss, "rss"),
        (Self::Pinned, "pinned"),
        (Self::Vram, "vram"),
        (Self::Uma, "uma"),
        (Self::File, "file"),
        (Self::Cgroup, "cgroup"),
        (Self::Time, "time"),
    ];

    /// Its name.
    pub(crate) fn name(self) -> &'static str {
        Self::ALL.iter().find(|(metric, _)| *metric == self).map_or("", |(_, name)| name)
    }

    /// Its peak in one run, in bytes; `None` if it was not measured (and always for time).
    fn of(self, run: &Run) -> Option<u64> {
        match self {
            Self::Host => run.peak.host_bytes,
            Self::Rss => run.peak.rss_bytes,
            Self::Pinned => run.peak.pinned_bytes,
            Self::Vram => run.peak.vram_bytes,
            Self::File => run.peak.file_bytes,
            Self::Cgroup => run.peak.cgroup_bytes,
            Self::Uma | Self::Time => None,
        }
    }
}

/// `--limit METRIC=SIZE`
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LimitArg {
    metric: Metric,
    bound: Bound,
}

/// The value of a limit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Bound {
    /// Memory.
    Size(Size),
    /// Time.
    Time(Duration),
}

impl FromStr for LimitArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, value) = text.split_once('=').unwrap_or(("host", text));
        let Some((metric, _)) = Metric::ALL.iter().find(|(_, known)| *known == name) else {
            let known: Vec<&str> = Metric::ALL.iter().map(|(_, name)| *name).collect();
            return Err(format!("no metric is called `{name}`; there are {}", known.join(", ")));
        };
        let bound = match metric {
            Metric::Time => Bound::Time(parse_duration(value).map_err(|error| error.to_string())?),
            _ => Bound::Size(value.parse().map_err(|error: crate::sizes::SizeError| error.to_string())?),
        };
        Ok(Self { metric: *metric, bound })
    }
}

/// `--max-vram SIZE[@GPU]`
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct VramArg {
    size: Size,
    gpu: Option<u32>,
}

impl FromStr for VramArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (size, gpu) = text.split_once('@').map_or((text, None), |(size, gpu)| (size, Some(gpu)));
        let gpu = gpu.map(str::parse::<u32>).transpose();
        let gpu = gpu.map_err(|_| "write the GPU as a number, as in 12GiB@0".to_owned())?;
        size.parse()
            .map(|size| Self { size, gpu })
            .map_err(|error: crate::sizes::SizeError| error.to_string())
    }
}

/// A gate, with the flag that asked for it.
#[derive(Clone, Debug)]
pub(crate) struct Gate {
    /// What is limited.
    pub(crate) metric: Metric,
    /// The most it may be.
    pub(crate) bound: Bound,
    /// The GPU it is about, if it names one.
    pub(crate) gpu: Option<u32>,
    /// For messages.
    pub(crate) flag: String,
}

impl LimitArgs {
    /// All gates that were asked for; the `--max-...` flags are sugar for `--limit`.
    pub(crate) fn gates(&self) -> Vec<Gate> {
        let listed = self.limits.iter().map(|limit| Gate {
            metric: limit.metric,
            bound: limit.bound,
            gpu: None,
            flag: format!("--limit {}", limit.metric.name()),
        });
        let sugar = [
            (Metric::Host, self.max_host, "--max-host"),
            (Metric::Rss, self.max_peak_rss, "--max-peak-rss"),
            (Metric::Pinned, self.max_pinned, "--max-pinned"),
            (Metric::Vram, self.max_vram.map(|limit| limit.size), "--max-vram"),
        ];
        let sizes = sugar.into_iter().filter_map(|(metric, size, flag)| {
            let gpu = self.max_vram.and_then(|limit| limit.gpu).filter(|_| metric == Metric::Vram);
            size.map(|size| Gate { metric, bound: Bound::Size(size), gpu, flag: flag.to_owned() })
        });
        let time = self.max_time.map(|limit| Gate {
            metric: Metric::Time,
            bound: Bound::Time(limit),
            gpu: None,
            flag: "--max-time".to_owned(),
        });
        listed.chain(sizes).chain(time).collect()
    }
}

/// Gates that cannot be checked on a device, known before anything runs; `None` is a command that
/// is measured from outside.
pub(crate) fn unmeasurable(gates: &[Gate], device: Option<Device>) -> Vec<Problem> {
    gates.iter().filter_map(|gate| unmeasurable_gate(gate, device)).collect()
}

fn unmeasurable_gate(gate: &Gate, device: Option<Device>) -> Option<Problem> {
    let (reason, help) = match (gate.metric, device) {
        (Metric::Uma, _) => (
            "loadcheck knows no machine yet whose host and device memory are one pool".to_owned(),
            "gate on --max-host and --max-vram",
        ),
        (Metric::Vram, None) => (
            "the device memory of a command is not measured".to_owned(),
            "gate on --max-host and --max-peak-rss",
        ),
        (Metric::Vram, Some(Device::Cuda(ordinal))) if gate.gpu.is_some_and(|gpu| gpu != ordinal) => (
            format!("the load goes to cuda:{ordinal}, and no other device is measured"),
            "--device and the GPU after @ have to agree",
        ),
        (Metric::Vram, Some(device @ (Device::Host | Device::None))) => (
            format!("a load with --device {} takes no device memory", device.target()),
            "--device cuda:0 needs a CUDA driver and device; or gate on --max-host and --max-peak-rss",
        ),
        _ => return None,
    };
    Some(Problem::new(Code::CannotMeasure, format!("cannot check {}: {reason}", gate.flag)).help(help))
}

/// A gate in bytes, for a worker that has to notice where it is first exceeded.
pub(crate) fn limit_bytes(gate: &Gate, context: &SizeContext) -> Result<Option<u64>, Problem> {
    match gate.bound {
        Bound::Time(_) => Ok(None),
        Bound::Size(size) => size.resolve(&context_of(gate, context)).map(Some).map_err(|error| {
            Problem::new(Code::SizeUnresolved, error.to_string()).at(format!("{} {size}", gate.flag))
        }),
    }
}

/// Per cent of device memory are of the device.
fn context_of(gate: &Gate, context: &SizeContext) -> SizeContext {
    if gate.metric == Metric::Vram { context.of_device() } else { *context }
}

/// Where in a run a metric first exceeded a limit: asked of whoever keeps the samples.
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

fn judge_size(
    gate: &Gate,
    runs: &[Run],
    context: &SizeContext,
    unavailable: &[Unavailable],
    first_exceeded: FirstExceeded<'_>,
) -> Result<Limit, Problem> {
    let limit_bytes = limit_bytes(gate, context)?.unwrap_or(u64::MAX);
    let values: Option<Vec<u64>> = runs.iter().map(|run| gate.metric.of(run)).collect();
    let Some(values) = values.filter(|values| !values.is_empty()) else {
        let name = gate.metric.name();
        let field = format!("peak.{name}_bytes");
        let reason = unavailable.iter().find(|entry| entry.metric == field);
        let reason = reason.map_or("it was not measured", |entry| &entry.reason);
        return Err(Problem::new(Code::CannotMeasure, format!("cannot check {}: {reason}", gate.flag)));
    };
    let actual_bytes = values.iter().copied().max();
    let passed = actual_bytes <= Some(limit_bytes);
    Ok(Limit {
        metric: gate.metric.name().to_owned(),
        limit_bytes: Some(limit_bytes),
        actual_bytes,
        limit_seconds: None,
        actual_seconds: None,
        passed,
        inside_spread: !passed && values.iter().any(|value| *value <= limit_bytes),
        first_exceeded_at: if passed { None } else { first_exceeded(gate.metric, limit_bytes) },
    })
}

fn judge_time(gate: &Gate, limit: Duration, runs: &[Run]) -> Result<Limit, Problem> {
    let values: Option<Vec<f64>> = runs.iter().map(|run| run.seconds).collect();
    let Some(values) = values.filter(|values| !values.is_empty()) else {
        return Err(Problem::new(Code::CannotMeasure, format!("cannot check {}: no run ended", gate.flag)));
    };
    let limit_seconds = limit.as_secs_f64();
    let actual_seconds = mean(&values);
    Ok(Limit {
        metric: gate.metric.name().to_owned(),
        limit_bytes: None,
        actual_bytes: None,
        limit_seconds: Some(limit_seconds),
        actual_seconds: Some(actual_seconds),
        passed: actual_seconds <= limit_seconds,
        inside_spread: values.iter().any(|value| *value <= limit_seconds)
            && values.iter().any(|value| *value > limit_seconds),
        first_exceeded_at: None,
    })
}

/// Arithmetic mean; 0 for nothing.
pub(crate) fn mean(values: &[f64]) -> f64 {
    let count = f64::from(u32::try_from(values.len()).unwrap_or(u32::MAX));
    if values.is_empty() { 0.0 } else { values.iter().sum::<f64>() / count }
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
        let LimitArg { metric, bound } = text.parse().unwrap();
        Gate { metric, bound, gpu: None, flag: "--limit".to_owned() }
    }

    fn verdicts(text: &str, runs: &[Run]) -> (Vec<(bool, bool)>, usize) {
        let (limits, problems) = judge(&[gate(text)], runs, &SizeContext::default(), &[], &|_, _| None);
        (limits.iter().map(|limit| (limit.passed, limit.inside_spread)).collect(), problems.len())
    }

    #[test]
    fn a_bare_size_means_host() {
        assert_eq!("200MiB".parse::<LimitArg>(), "host=200MiB".parse());
        assert!("memory=1GiB".parse::<LimitArg>().unwrap_err().contains("host, rss"));
        assert!("time=10MiB".parse::<LimitArg>().is_err());
        assert!("12GiB@x".parse::<VramArg>().is_err());
    }

    #[test]
    fn memory_is_judged_by_the_maximum() {
        let runs = [run(Some(10), 1.0), run(Some(30), 1.0)];
        assert_eq!(verdicts("30", &runs), (vec![(true, false)], 0));
        assert_eq!(verdicts("29", &runs), (vec![(false, true)], 0));
        assert_eq!(verdicts("9", &runs), (vec![(false, false)], 0));
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
