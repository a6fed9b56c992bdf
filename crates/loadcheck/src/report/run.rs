//! What is reported of one run: memory before, at most and after, what was read, and what was
//! promised.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{IoCounters, Passes, PlaceShare};
use crate::args::CacheArg;

/// One measured run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Run {
    /// `stream` is ours; `exec` is somebody else's command; in a comparison, the name of its row.
    pub(crate) strategy: String,
    /// The round of a comparison, from 1; warm-ups that failed are in round 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) round: Option<u64>,
    /// What it ran with; `null` for `exec`.
    pub(crate) params: Option<Params>,
    /// How it ended.
    pub(crate) outcome: Outcome,
    /// Why it did not come to its end, in a comparison.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) reason: Option<String>,
    /// The exit code of a compared command.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) exit_code: Option<i32>,
    /// The signal that ended a compared command.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) signal: Option<i32>,
    /// Wall time of the load. What `--verify` took is left out.
    pub(crate) seconds: Option<f64>,
    /// CPU time in user and kernel mode until everything was loaded, all threads. Of a command: of
    /// all its processes, until they ended. What `--verify` took between layers is in it; in
    /// steps of 10 ms on most machines.
    pub(crate) cpu_seconds: Option<f64>,
    /// State of the page cache before the run, as far as it was brought about and checked.
    pub(crate) cache: CacheState,
    /// Before the source was opened.
    pub(crate) baseline: Point,
    /// The highest values during the load.
    pub(crate) peak: Peak,
    /// When everything was loaded, before anything was given back.
    pub(crate) after_load: Option<Point>,
    /// When everything was given back.
    pub(crate) after_unload: Option<Point>,
    /// Device memory, by every method that gave a number; the first one is the headline of `peak`
    /// and the others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) vram: Vec<Vram>,
    /// `--verify`: how the comparison came out; `null` if it was not asked for or did not get to
    /// its end.
    pub(crate) verified: Option<Verified>,
    /// What quantising lost, tensor by tensor; as far as it got, if the run did not come to its
    /// end.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) quantised: Vec<QuantisedTensor>,
    /// What was read.
    pub(crate) io: IoCounters,
    /// What the system suffered meanwhile.
    pub(crate) pressure: Pressure,
    /// The most bytes of layers that were resident at once; the caller's memory, not staging.
    pub(crate) resident_bytes: Option<u64>,
    /// Of these, bytes of host memory: none on a device with memory of its own.
    pub(crate) resident_host_bytes: Option<u64>,
    /// Pass after pass. Not there without `--passes`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) passes: Option<Passes>,
    /// With `--device-map`: what each place got.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) places: Vec<PlaceShare>,
    /// The staging ring as it was had; `null` for `exec` and for a load that did not begin.
    pub(crate) ring: Option<Ring>,
    /// Growth of RSS against what was promised; `null` where nothing is promised or it could not be
    /// measured.
    pub(crate) promise: Option<Promise>,
    /// Memory over time.
    pub(crate) samples: Option<Samples>,
    /// When layers were handed out, where a timeline was kept; nobody tells of the layers of
    /// others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) deliveries: Option<Deliveries>,
}

/// How a run ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub(crate) enum Outcome {
    /// Everything was loaded.
    Completed,
    /// `exec --until-line`: the line was seen and the command stopped.
    Stopped,
    /// It failed.
    #[default]
    Failed,
    /// It was killed.
    Killed,
    /// It was not begun: memory could not have held it.
    Refused,
    /// Ctrl-C or SIGTERM.
    Interrupted,
}

/// What a load ran with.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Params {
    /// Host budget.
    pub(crate) budget_bytes: u64,
    /// Layers read ahead.
    pub(crate) prefetch: u64,
    /// Layers resident at once; `null` is all, or as many as fit `window_bytes`.
    pub(crate) window: Option<u64>,
    /// Bytes of layers resident at once. Not there unless `--window` is a size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) window_bytes: Option<u64>,
    /// Times through all layers. Not there where it is once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) passes: Option<u64>,
    /// How files are read.
    pub(crate) io: String,
    /// Where layers go: `host`, `none` or `cuda:N`, whatever `auto` came to; `map` with
    /// `--device-map`.
    pub(crate) device: String,
    /// Threads that read.
    pub(crate) readers: Option<u64>,
    /// Tensors were hashed as they were delivered.
    pub(crate) hash: bool,
    /// Tensors were read back and compared with their files.
    pub(crate) verify: bool,
    /// What wider floats were narrowed to; `null` if nothing was asked for.
    pub(crate) dtype: Option<String>,
    /// What weights were quantised to. Not there without `--quantise`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) quantise: Option<String>,
    /// The rank whose part of each tensor was loaded, of how many: `1/4`. Not there without `--tp`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tp: Option<String>,
    /// Most device memory for layers; `null` is no such limit.
    pub(crate) device_budget_bytes: Option<u64>,
    /// Device memory that has to stay free; `null` where it does not matter.
    pub(crate) device_reserve_bytes: Option<u64>,
}

/// Device memory, counted in one way.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Vram {
    /// As in `peak.vram_method`.
    pub(crate) method: String,
    /// Before the load, the device's context already open.
    pub(crate) baseline_bytes: Option<u64>,
    /// The highest sample.
    pub(crate) peak_bytes: Option<u64>,
    /// When everything was loaded.
    pub(crate) after_load_bytes: Option<u64>,
    /// When everything was given back, the context still open.
    pub(crate) after_unload_bytes: Option<u64>,
    /// `after_unload_bytes` less `baseline_bytes`; 0 is what should be.
    pub(crate) after_unload_growth_bytes: Option<i64>,
}

/// What quantising lost of one tensor.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct QuantisedTensor {
    /// Full name.
    pub(crate) name: String,
    /// Its elements.
    pub(crate) elements: u64,
    /// The largest magnitude of an element.
    pub(crate) max_abs: f32,
    /// The largest difference between an element and `value * scale`.
    pub(crate) max_abs_error: f32,
    /// Root of the mean of the squares of these differences.
    pub(crate) rms_error: f32,
}

impl QuantisedTensor {
    /// What a load or a conversion tells of a tensor.
    pub(crate) fn new(name: &str, error: &onelayer::QuantisationError) -> Self {
        Self {
            name: name.to_owned(),
            elements: error.elements,
            max_abs: error.max_abs,
            max_abs_error: error.max_abs_error,
            rms_error: error.rms_error,
        }
    }
}

/// What was delivered, compared with what is in the files.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Verified {
    /// Tensors that were compared.
    pub(crate) tensors: u64,
    /// Bytes that were compared, as they were delivered.
    pub(crate) bytes: u64,
    /// Tensors that differ.
    pub(crate) mismatches: u64,
    /// The first of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) first_mismatch: Option<Mismatch>,
    /// Time it took, which is not part of the run's `seconds`.
    pub(crate) seconds: f64,
}

/// A tensor that was not delivered as it is in its file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Mismatch {
    /// Full name.
    pub(crate) tensor: String,
    /// Where in the delivered tensor the first difference is.
    pub(crate) offset_bytes: u64,
    /// What should be there, up to 8 bytes in hexadecimal.
    pub(crate) expected: String,
    /// What is there.
    pub(crate) found: String,
}

/// The staging ring.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Ring {
    /// `huge_pages` or `small_pages`; `null` in a plan.
    pub(crate) mode: Option<String>,
    /// Number of slots that were used.
    pub(crate) slots: u64,
    /// Bytes of one slot.
    pub(crate) slot_bytes: u64,
    /// How much is page-locked: `not_needed`, `whole`, `slot_by_slot`, `fewer_slots` or `pageable`.
    /// In a plan, what is asked for.
    pub(crate) pinning: String,
    /// The driver's answer, where it refused something.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) pinning_reason: Option<String>,
    /// Bytes that are page-locked.
    pub(crate) pinned_bytes: u64,
}

/// State of the page cache before a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct CacheState {
    /// What was asked for.
    pub(crate) asked: CacheArg,
    /// Share of the source that was cached when the run began, 0 to 1; `null` is unchecked.
    pub(crate) cached_share: Option<f64>,
}

impl Default for CacheState {
    fn default() -> Self {
        Self { asked: CacheArg::Asis, cached_share: None }
    }
}

/// Memory at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Point {
    /// What the kernel cannot take back.
    pub(crate) host_bytes: Option<u64>,
    /// All resident pages.
    pub(crate) rss_bytes: Option<u64>,
    /// Device memory.
    pub(crate) vram_bytes: Option<u64>,
    /// What of it the load has allocated, and what is everything else; only of our own loads, after
    /// the load and after the unload.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) split: Option<Split>,
}

/// Memory at one moment, in ours and everything else.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Split {
    /// Host memory of arenas, ring and scratch, as the load's own list has it, touched or not.
    pub(crate) ours_host_bytes: u64,
    /// `host_bytes` less that.
    pub(crate) other_host_bytes: Option<u64>,
    /// Device memory of arenas.
    pub(crate) ours_vram_bytes: u64,
    /// `vram_bytes` less that: contexts, pools, other processes.
    pub(crate) other_vram_bytes: Option<u64>,
}

/// The highest values during a run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Peak {
    /// What the kernel cannot take back: anonymous, shared, swapped, locked. Sampled.
    pub(crate) host_bytes: Option<u64>,
    /// All resident pages, by the kernel's own high-water mark.
    pub(crate) rss_bytes: Option<u64>,
    /// Anonymous pages. Sampled.
    pub(crate) anon_bytes: Option<u64>,
    /// Mapped file pages. Sampled.
    pub(crate) file_bytes: Option<u64>,
    /// Page-locked for a device: the ring's pinned bytes, counted, or what the kernel counts if
    /// that is more.
    pub(crate) pinned_bytes: Option<u64>,
    /// The memory cgroup's peak, page cache included.
    pub(crate) cgroup_bytes: Option<u64>,
    /// Device memory. Sampled.
    pub(crate) vram_bytes: Option<u64>,
    /// How device memory was measured: `nvml_process` (this process), `nvml_device` or `driver`
    /// (everybody on the device).
    pub(crate) vram_method: Option<String>,
    /// Where `host_bytes` was reached.
    pub(crate) at: Option<Place>,
    /// Where `rss_bytes` was reached.
    pub(crate) rss_at: Option<Place>,
    /// Where `vram_bytes` was reached.
    pub(crate) vram_at: Option<Place>,
}

/// A moment of a load.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Place {
    /// The layer that was being delivered.
    pub(crate) layer: Option<String>,
    /// The largest tensor of that layer.
    pub(crate) tensor: Option<String>,
    /// Since the start of the load.
    pub(crate) seconds: f64,
}

/// What the whole machine suffered during a run, others on it included.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Pressure {
    /// Microseconds in which some task waited for memory.
    pub(crate) memory_some_us: Option<u64>,
    /// Pages that were read again after they had been reclaimed.
    pub(crate) refaults: Option<u64>,
}

/// Growth of RSS against what was promised.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Promise {
    /// Budget + 16 MiB + resident layers in host memory.
    pub(crate) limit_bytes: u64,
    /// Peak RSS less RSS before the load.
    pub(crate) growth_bytes: u64,
    /// Whether it was kept.
    pub(crate) kept: bool,
}

/// Memory over time.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Samples {
    /// Distance of the samples.
    pub(crate) interval_ms: f64,
    /// Names of the columns; `vram_bytes` is the last of a load to a device with memory of its own,
    /// counted as `peak.vram_bytes` is.
    pub(crate) columns: Vec<String>,
    /// One row a sample; empty unless `--timeline` is given, or a picture of it is wanted.
    pub(crate) rows: Vec<Vec<Option<u64>>>,
}

/// When layers were handed out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Deliveries {
    /// How many there were.
    pub(crate) layers: u64,
    /// How many layers each row stands for, one after the other; the last row for as many or fewer.
    pub(crate) layers_per_row: u64,
    /// In the order in which they were handed out; about a thousand rows at most.
    pub(crate) rows: Vec<Delivery>,
}

/// The last layer of a row.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Delivery {
    /// Its name.
    pub(crate) layer: String,
    /// When it was handed out, by the clock of `samples`.
    pub(crate) elapsed_us: u64,
}

/// A tensor's hash.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct TensorHash {
    /// Full name.
    pub(crate) name: String,
    /// BLAKE3 of its bytes, in hexadecimal.
    pub(crate) blake3: String,
}

impl Samples {
    /// The samples of a timeline; without its rows unless `keep` is set.
    pub(crate) fn new(interval_ms: f64, timeline: &onelayer_probe::Timeline, keep: bool) -> Self {
        let columns = ["elapsed_us", "host_bytes", "rss_bytes", "anon_bytes", "file_bytes", "shmem_bytes"];
        let rows = timeline.rows().filter(|_| keep).map(|row| {
            let elapsed_us = u64::try_from(row.elapsed.as_micros()).ok();
            vec![elapsed_us, row.host_bytes, row.rss_bytes, row.anon_bytes, row.file_bytes, row.shmem_bytes]
        });
        Self { interval_ms, columns: columns.map(str::to_owned).to_vec(), rows: rows.collect() }
    }

    /// Adds a column of device memory, from its changes: when, by the clock of the samples, and to
    /// what. By time.
    pub(crate) fn with_vram(mut self, steps: &[(Duration, u64)]) -> Self {
        self.columns.push("vram_bytes".to_owned());
        for row in &mut self.rows {
            let elapsed = row.first().copied().flatten().map(Duration::from_micros);
            let before = elapsed.map(|elapsed| steps.partition_point(|(at, _)| *at <= elapsed));
            row.push(before.and_then(|before| steps[..before].last()).map(|(_, bytes)| *bytes));
        }
        self
    }
}
