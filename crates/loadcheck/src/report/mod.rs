//! The report: the types behind the JSON schema `loadcheck/1`.
//!
//! Every output format is made from a [`Report`]. The schema is only extended: fields are added,
//! never renamed or given another unit. `null` with an entry in `unavailable` means "not measured";
//! `0` is a measured zero. A test generates `docs/loadcheck.schema.json` from these types and
//! compares the two.

use serde::{Deserialize, Serialize};

pub(crate) use self::answer::{Alternative, Answer, Finding, LimitOf, Room};
pub(crate) use self::changes::{Change, ChangedSetting, Changes};
pub(crate) use self::compare::{Compared, ComparedPeak, Spread};
pub(crate) use self::convert::{
    Convert, ConvertFile, ConvertMemory, ConvertParams, Converted, Difference, Duplicate, Estimate,
    FileState, ReadFallback, SideFile, Verification,
};
pub(crate) use self::doctor::{Check, State};
pub(crate) use self::fit::{Fit, Fitted, Try, TryOutcome};
pub(crate) use self::leak::{CycledLoad, KindSlope, Leak, LeakMode, SlopeVerdict};
pub(crate) use self::passes::{Pass, Passes, Shares};
pub(crate) use self::placement::{LargestFit, PlacedLayer, Placement, PrecisionNeed, TiedPair, TierShare};
pub(crate) use self::reading::{FileReading, IoCounters};
pub(crate) use self::run::{
    CacheState, Deliveries, Delivery, Mismatch, Outcome, Params, Peak, Place, PlaceShare, Point, Pressure,
    Promise, QuantisedTensor, Ring, Run, Samples, Split, TensorHash, Verified, Vram,
};
use crate::listing::Listing;
use crate::problem::Problem;

mod answer;
mod changes;
mod compare;
mod convert;
mod doctor;
mod fit;
mod leak;
mod passes;
mod placement;
mod reading;
mod run;

/// The version of the schema.
pub(crate) const SCHEMA: &str = "loadcheck/1";

/// The whole document.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Report {
    /// Always `loadcheck/1`.
    pub(crate) schema: String,
    /// The program that wrote it.
    pub(crate) tool: Tool,
    /// The command that wrote it.
    pub(crate) command: CommandName,
    /// The outcome.
    pub(crate) verdict: Verdict,
    /// The answer in one sentence, and in one word for programs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) answer: Option<Answer>,
    /// The first problem, if there is one: it decides the exit code.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<Problem>,
    /// All problems, most basic first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) errors: Vec<Problem>,
    /// The machine.
    pub(crate) host: Option<Host>,
    /// The checkpoint.
    pub(crate) source: Option<Source>,
    /// One entry for each measured run. `report` with two files: two for each row, see `changes`.
    pub(crate) runs: Vec<Run>,
    /// `compare`: a row for each way of loading.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) comparison: Vec<Compared>,
    /// `plan`, `run` and `compare`: the prediction for `stream`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) plan: Option<Plan>,
    /// `plan` and `fits`: whether the host memory of the load fits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) room: Option<Room>,
    /// `plan --vram`: the place of each layer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) placement: Option<Placement>,
    /// `exec`: the command.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) exec: Option<Exec>,
    /// `synth`: the files that were written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) synth: Option<Synth>,
    /// `convert`: the plan and the result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) convert: Option<Convert>,
    /// `verify` and `convert --verify`: the comparison and its differences.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) verification: Option<Verification>,
    /// `fit`: every limit that was tried, and the smallest that work.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) fit: Option<Fit>,
    /// `leak`: how each kind of memory grew from cycle to cycle.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) leak: Option<Leak>,
    /// `report` with two files: what changed from one to the other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) changes: Option<Changes>,
    /// `doctor`: every check.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) doctor: Vec<Check>,
    /// Metrics that could not be measured, and why.
    pub(crate) unavailable: Vec<Unavailable>,
    /// The limits from the command line, and whether they were met.
    pub(crate) limits: Vec<Limit>,
    /// `inspect` and `plan`: every layer, in execution order; every tensor is in exactly one.
    #[serde(default, skip_serializing_if = "Listing::is_empty")]
    #[cfg_attr(test, schemars(with = "Vec<crate::listing::Layer>"))]
    pub(crate) layers: Listing,
    /// `run --hash`: a BLAKE3 hash for each tensor, in the order of delivery.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) hashes: Vec<TensorHash>,
    /// Remarks for people.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) notes: Vec<String>,
}

/// A metric as people read it: the reports call unreclaimable memory `host`.
pub(crate) fn metric_name(metric: &str) -> &str {
    if metric == "host" { "unreclaimable" } else { metric }
}

/// Name and version of the program.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Tool {
    /// `loadcheck`.
    pub(crate) name: String,
    /// Semantic version.
    pub(crate) version: String,
}

/// Which command wrote the report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub(crate) enum CommandName {
    /// One load, measured.
    Run,
    /// One load, predicted.
    Plan,
    /// One load, predicted and held against a limit of memory.
    Fits,
    /// A checkpoint, described.
    Inspect,
    /// Several ways of loading, measured side by side.
    Compare,
    /// A command, measured.
    Exec,
    /// A checkpoint, made.
    Synth,
    /// A checkpoint, rewritten.
    Convert,
    /// A checkpoint, checked.
    Verify,
    /// A memory limit, searched for.
    Fit,
    /// Repeated loads, measured.
    Leak,
    /// A machine, examined.
    Doctor,
    /// Two saved reports, compared.
    Report,
    /// The command line could not be parsed.
    #[default]
    Unknown,
}

impl CommandName {
    /// As on the command line.
    pub(crate) fn name(self) -> String {
        serde_json::json!(self).as_str().unwrap_or_default().to_owned()
    }
}

/// The outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub(crate) enum Verdict {
    /// All limits met.
    #[default]
    Pass,
    /// A limit or the promise was exceeded.
    Fail,
    /// A limit lies inside the spread of the runs.
    Inconclusive,
    /// An error ended the command.
    Error,
}

/// The machine.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Host {
    /// Kernel release.
    pub(crate) kernel: Option<String>,
    /// Memory of the machine.
    pub(crate) ram_bytes: Option<u64>,
    /// The memory cgroup that the program runs in.
    pub(crate) cgroup: Option<Cgroup>,
    /// The CUDA device that was used, if any.
    pub(crate) gpus: Vec<Gpu>,
    /// Host and device memory are one pool.
    pub(crate) unified_memory: bool,
}

/// A CUDA device, as its driver describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Gpu {
    /// The driver's number of the device: the N of `cuda:N`.
    pub(crate) index: u32,
    /// Its name. A simulated device says so in its name.
    pub(crate) name: String,
    /// Its UUID: `GPU-` and 32 hexadecimal digits in five groups.
    pub(crate) uuid: Option<String>,
    /// `domain:bus:device.function`.
    pub(crate) pci_bus_id: Option<String>,
    /// The newest CUDA version that the driver supports, such as `12.8`.
    pub(crate) cuda_version: Option<String>,
    /// Its memory, according to the driver.
    pub(crate) memory_total_bytes: Option<u64>,
}

/// A memory cgroup.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Cgroup {
    /// 1 or 2.
    pub(crate) version: u32,
    /// The smallest limit from this cgroup up to the root; `null` if there is none.
    pub(crate) limit_bytes: Option<u64>,
}

/// The checkpoint.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Source {
    /// As on the command line.
    pub(crate) given: String,
    /// The path that was opened.
    pub(crate) resolved: Option<String>,
    /// The commit, if it is a repository in the local cache.
    pub(crate) revision: Option<String>,
    /// Bytes of all tensors.
    pub(crate) bytes: Option<u64>,
    /// Number of files.
    pub(crate) files: Option<u64>,
    /// Formats of the files: `safetensors`, `PyTorch zip`, `GGUF`, ...
    #[serde(default)]
    pub(crate) formats: Vec<String>,
    /// Number of tensors.
    pub(crate) tensors: Option<u64>,
    /// Number of layers.
    pub(crate) layers: Option<u64>,
    /// Bytes for each dtype, largest share first.
    pub(crate) dtypes: Vec<DtypeShare>,
    /// The largest tensor.
    pub(crate) largest_tensor: Option<Largest>,
    /// The largest layer.
    pub(crate) largest_layer: Option<Largest>,
}

/// The share of one dtype in a checkpoint.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct DtypeShare {
    /// As the file spells it.
    pub(crate) dtype: String,
    /// Number of tensors.
    pub(crate) tensors: u64,
    /// Their bytes.
    pub(crate) bytes: u64,
}

/// A name and its bytes.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Largest {
    /// Tensor or layer.
    pub(crate) name: String,
    /// Its bytes.
    pub(crate) bytes: u64,
}

/// Memory and reads of a load, derived from headers.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Plan {
    /// Always `derived`: nothing here was measured.
    pub(crate) source: String,
    /// The settings of the load.
    pub(crate) params: Params,
    /// The host budget's terms.
    pub(crate) memory: Vec<MemoryTerm>,
    /// Their sum.
    pub(crate) host_bytes: u64,
    /// The requested staging ring. The driver may refuse to pin it; a run reports the result.
    pub(crate) ring: Ring,
    /// Slots of the ring.
    pub(crate) slots: u64,
    /// Bytes of one slot.
    pub(crate) slot_bytes: u64,
    /// The smallest budget that would be accepted.
    pub(crate) smallest_budget_bytes: Option<u64>,
    /// The most bytes of layers that are resident at once, beside the budget.
    pub(crate) resident_bytes: Option<u64>,
    /// Bytes of these in host memory: 0 if the device has its own memory.
    pub(crate) resident_host_bytes: Option<u64>,
    /// The terms of `resident_bytes` if there are several passes: the window, and layers that stay.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) resident: Vec<MemoryTerm>,
    /// Bytes of the tensors that are loaded.
    pub(crate) tensor_bytes: u64,
    /// Number of reads.
    pub(crate) reads: u64,
    /// Bytes that are read.
    pub(crate) read_bytes: u64,
    /// Bytes that are read and that no tensor needs.
    pub(crate) over_read_bytes: u64,
    /// With `--tp`: this rank's part of the checkpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) rank: Option<PlannedRank>,
    /// With `--device-map`: the share of each place. The other numbers are sums, except that `ring`
    /// and `memory` are those of the first place.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) places: Vec<PlaceShare>,
    /// The order of reads: `layers` (execution order) or `files` (order in the files).
    pub(crate) order: String,
    /// Reads that do not start at the end of the previous one.
    pub(crate) jumps: u64,
    /// `--io auto`: how each file would be read. A load decides again when it starts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) files: Vec<FileReading>,
}

/// The part of a checkpoint that one of several ranks loads.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct PlannedRank {
    /// Its number, from 0.
    pub(crate) rank: u64,
    /// Number of ranks.
    pub(crate) world: u64,
    /// Tensors of which it loads a part.
    pub(crate) part_tensors: u64,
    /// Tensors that it loads whole.
    pub(crate) whole_tensors: u64,
    /// Bytes of the files that it needs.
    pub(crate) wanted_bytes: u64,
    /// Bytes between these that are read too.
    pub(crate) gap_bytes: u64,
}

/// One term of the host budget.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct MemoryTerm {
    /// Its purpose.
    pub(crate) name: String,
    /// Its size.
    pub(crate) bytes: u64,
}

/// A command that was measured.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Exec {
    /// The command and its arguments.
    pub(crate) command: Vec<String>,
    /// The process that was measured while it ran; `null` for a command that was started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) pid: Option<u32>,
    /// Whether that process has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) has_ended: Option<bool>,
    /// Its exit code; `null` if a signal ended it.
    pub(crate) exit_code: Option<i32>,
    /// The signal that ended it.
    pub(crate) signal: Option<i32>,
    /// Processes that the kernel killed for want of memory; `null` without a count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) oom_kills: Option<u64>,
    /// The most processes at once.
    pub(crate) processes: Option<u64>,
    /// Whether the line that `--until-line` waits for was seen.
    pub(crate) line_seen: Option<bool>,
}

/// A checkpoint that was made.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Synth {
    /// Preset or file.
    pub(crate) model: String,
    /// Where it was written.
    pub(crate) target: String,
    /// Bytes of all tensors.
    pub(crate) bytes: u64,
    /// Number of files with tensors.
    pub(crate) files: u64,
    /// Number of tensors.
    pub(crate) tensors: u64,
    /// The element type of all tensors.
    pub(crate) dtype: String,
    /// The seed of the random bytes.
    pub(crate) seed: u64,
    /// Wall time.
    pub(crate) seconds: f64,
}

/// A metric that was not measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Unavailable {
    /// Name of the metric, as in `limits`.
    pub(crate) metric: String,
    /// Why.
    pub(crate) reason: String,
}

/// A limit and its outcome.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Limit {
    /// The metric.
    pub(crate) metric: String,
    /// The limit, for memory.
    pub(crate) limit_bytes: Option<u64>,
    /// The maximum over the runs, for memory.
    pub(crate) actual_bytes: Option<u64>,
    /// The limit, for time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) limit_seconds: Option<f64>,
    /// The mean over the runs, for time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) actual_seconds: Option<f64>,
    /// Whether it was met.
    pub(crate) passed: bool,
    /// Some runs met it and others did not.
    pub(crate) inside_spread: bool,
    /// Where a run first exceeded it.
    pub(crate) first_exceeded_at: Option<Place>,
}

impl Report {
    /// A report with nothing in it yet.
    pub(crate) fn new(command: CommandName) -> Self {
        Self {
            schema: SCHEMA.to_owned(),
            tool: Tool { name: "loadcheck".to_owned(), version: env!("CARGO_PKG_VERSION").to_owned() },
            command,
            ..Self::default()
        }
    }

    /// True for the report on a process that ran already: it has peaks of a part of its life.
    pub(crate) fn is_attached(&self) -> bool {
        self.exec.as_ref().is_some_and(|exec| exec.pid.is_some())
    }

    /// Records problems, most basic first; the first becomes `error`.
    pub(crate) fn fail(&mut self, mut problems: Vec<Problem>) {
        if problems.is_empty() {
            return;
        }
        crate::problem::most_basic_first(&mut problems);
        self.verdict = Verdict::Error;
        self.error = problems.first().cloned();
        self.errors = problems;
    }

    /// Adds a note, once.
    pub(crate) fn note(&mut self, note: String) {
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    /// Notes that `metric` was not measured, once.
    pub(crate) fn missing(&mut self, metric: &str, reason: &str) {
        if !self.unavailable.iter().any(|entry| entry.metric == metric) {
            self.unavailable.push(Unavailable { metric: metric.to_owned(), reason: reason.to_owned() });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Run with `UPDATE_SCHEMA=1` after a field was added.
    #[test]
    fn the_published_schema_is_the_one_of_these_types() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/loadcheck.schema.json");
        let schema = schemars::schema_for!(Report);
        let text = serde_json::to_string_pretty(&schema).unwrap() + "\n";
        if std::env::var_os("UPDATE_SCHEMA").is_some() {
            std::fs::create_dir_all(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs")).unwrap();
            std::fs::write(path, &text).unwrap();
        }
        let published = std::fs::read_to_string(path).unwrap();
        assert_eq!(published, text, "run the test with UPDATE_SCHEMA=1 and commit {path}");
    }
}
