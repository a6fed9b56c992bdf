//! One measured run: memory before, at the peak and after, bytes read, and the promised limit.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{IoCounters, Passes};
use crate::args::CacheArg;

/// One measured run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Run {
    /// `stream` for this library, `exec` for a command; in a comparison, the name of the row.
    pub(crate) strategy: String,
    /// The round of a comparison, from 1. Failed warm-ups are in round 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) round: Option<u64>,
    /// Its settings; `null` for `exec`.
    pub(crate) params: Option<Params>,
    /// The outcome.
    pub(crate) outcome: Outcome,
    /// In a comparison: why it did not complete.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) reason: Option<String>,
    /// The exit code of a compared command.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) exit_code: Option<i32>,
    /// The signal that ended a compared command.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) signal: Option<i32>,
    /// Wall time of the load, without the time of `--verify`.
    pub(crate) seconds: Option<f64>,
    /// CPU time in user and kernel mode of all threads until everything was loaded. For a command:
    /// of all its processes until they ended. Includes the time of `--verify` between layers.
    /// Counted in steps of 10 ms on most machines.
    pub(crate) cpu_seconds: Option<f64>,
    /// State of the page cache before the run: the requested one, and the one that was found.
    pub(crate) cache: CacheState,
    /// Memory before the source was opened.
    pub(crate) baseline: Point,
    /// The highest values during the load.
    pub(crate) peak: Peak,
    /// Memory when everything was loaded and nothing had been freed.
    pub(crate) after_load: Option<Point>,
    /// Memory after everything was freed.
    pub(crate) after_unload: Option<Point>,
    /// Device memory by every method that gave a number. The first method is the one in `peak` and
    /// the other fields.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) vram: Vec<Vram>,
    /// `--verify`: the result of the comparison; `null` without it, or if it did not complete.
    pub(crate) verified: Option<Verified>,
    /// Quantisation errors of each tensor; of those that were loaded, if the run did not complete.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) quantised: Vec<QuantisedTensor>,
    /// Bytes that were read.
    pub(crate) io: IoCounters,
    /// Memory pressure of the whole machine during the run.
    pub(crate) pressure: Pressure,
    /// The most bytes of layers that were resident at once. Staging memory does not count.
    pub(crate) resident_bytes: Option<u64>,
    /// Bytes of these in host memory: 0 if the device has its own memory.
    pub(crate) resident_host_bytes: Option<u64>,
    /// Each pass. Absent without `--passes`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) passes: Option<Passes>,
    /// With `--device-map`: the share of each place.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) places: Vec<PlaceShare>,
    /// The staging ring; `null` for `exec` and for a load that did not start.
    pub(crate) ring: Option<Ring>,
    /// Growth of RSS and its promised limit; `null` if nothing is promised or growth could not be
    /// measured.
    pub(crate) promise: Option<Promise>,
    /// Memory over time.
    pub(crate) samples: Option<Samples>,
    /// When layers were delivered, if a timeline was kept. Commands do not report their layers.
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
    /// It was not started: it would not fit into memory.
    Refused,
    /// Ctrl-C or SIGTERM.
    Interrupted,
}

/// Settings of a load.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Params {
    /// Host budget.
    pub(crate) budget_bytes: u64,
    /// Layers that are read ahead.
    pub(crate) prefetch: u64,
    /// Layers that are resident at once; `null` means all, or as many as fit into `window_bytes`.
    pub(crate) window: Option<u64>,
    /// Bytes of layers that are resident at once. Absent unless `--window` is a size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) window_bytes: Option<u64>,
    /// Passes through all layers. Absent if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) passes: Option<u64>,
    /// The way files are read, as `--io` spells it.
    pub(crate) io: String,
    /// Where layers go: `host`, `none` or `cuda:N`, with `auto` resolved; `map` with
    /// `--device-map`.
    pub(crate) device: String,
    /// Number of reading threads.
    pub(crate) readers: Option<u64>,
    /// Tensors were hashed as they were delivered.
    pub(crate) hash: bool,
    /// Tensors were read back and compared with their files.
    pub(crate) verify: bool,
    /// The type that wider floats were narrowed to; `null` without `--dtype`.
    pub(crate) dtype: Option<String>,
    /// The form that weights were quantised to. Absent without `--quantise`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) quantise: Option<String>,
    /// The rank whose part of each tensor was loaded, and the number of ranks: `1/4`. Absent
    /// without `--tp`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tp: Option<String>,
    /// Limit on device memory for layers; `null` is no limit.
    pub(crate) device_budget_bytes: Option<u64>,
    /// Device memory that has to stay free; `null` without a device.
    pub(crate) device_reserve_bytes: Option<u64>,
}

/// Device memory, measured by one method.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Vram {
    /// The method, as in `peak.vram_method`.
    pub(crate) method: String,
    /// Before the load, with the device's context open.
    pub(crate) baseline_bytes: Option<u64>,
    /// The highest sample.
    pub(crate) peak_bytes: Option<u64>,
    /// When everything was loaded.
    pub(crate) after_load_bytes: Option<u64>,
    /// After everything was freed, with the context still open.
    pub(crate) after_unload_bytes: Option<u64>,
    /// `after_unload_bytes` minus `baseline_bytes`; should be 0.
    pub(crate) after_unload_growth_bytes: Option<i64>,
}

/// The share of one place, in the order of loading.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct PlaceShare {
    /// A GPU's number, `cpu` or `disk`.
    pub(crate) tier: String,
    /// Number of layers.
    pub(crate) layers: u64,
    /// Bytes of their tensors: as delivered, or for the disk as in the files.
    pub(crate) tensor_bytes: u64,
    /// Bytes that they take there; 0 for the disk, which is not read.
    pub(crate) resident_bytes: u64,
    /// Bytes that are read for them, alignment included.
    pub(crate) read_bytes: u64,
    /// Time to load them; `null` in a plan and for the disk.
    pub(crate) seconds: Option<f64>,
    /// Memory of the GPU, by every method that gave a number.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) vram: Vec<Vram>,
}

/// Quantisation error of one tensor.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct QuantisedTensor {
    /// Full name.
    pub(crate) name: String,
    /// Number of elements.
    pub(crate) elements: u64,
    /// The largest magnitude of an element.
    pub(crate) max_abs: f32,
    /// The largest difference between an element and `value * scale`.
    pub(crate) max_abs_error: f32,
    /// Root of the mean of the squares of these differences.
    pub(crate) rms_error: f32,
}

impl QuantisedTensor {
    /// The error of a tensor, as a load or a conversion reports it.
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

/// Delivered tensors compared with their files.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Verified {
    /// Tensors that were compared.
    pub(crate) tensors: u64,
    /// Delivered bytes that were compared.
    pub(crate) bytes: u64,
    /// Tensors that differ.
    pub(crate) mismatches: u64,
    /// The first tensor that differs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) first_mismatch: Option<Mismatch>,
    /// Time of the comparison, which is not part of the run's `seconds`.
    pub(crate) seconds: f64,
}

/// A tensor that differs from its file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Mismatch {
    /// Full name.
    pub(crate) tensor: String,
    /// Position of the first difference in the delivered tensor.
    pub(crate) offset_bytes: u64,
    /// The expected bytes, up to 8, in hexadecimal.
    pub(crate) expected: String,
    /// The bytes that were found.
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
    /// How it is page-locked: `not_needed`, `whole`, `slot_by_slot`, `fewer_slots` or `pageable`.
    /// In a plan, the request.
    pub(crate) pinning: String,
    /// The driver's answer, if it refused something.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) pinning_reason: Option<String>,
    /// Bytes that are page-locked.
    pub(crate) pinned_bytes: u64,
}

/// State of the page cache before a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct CacheState {
    /// The requested state.
    pub(crate) asked: CacheArg,
    /// Share of the source that was cached when the run started, 0 to 1; `null` is unchecked.
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
    /// Memory that the kernel cannot reclaim.
    pub(crate) host_bytes: Option<u64>,
    /// All resident pages.
    pub(crate) rss_bytes: Option<u64>,
    /// Device memory.
    pub(crate) vram_bytes: Option<u64>,
    /// The load's own allocations, and the rest. Only for loads of this library, after the load and
    /// after the unload.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) split: Option<Split>,
}

/// Memory at one moment: the load's own allocations, and the rest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Split {
    /// Host memory of arenas, ring and scratch, as the library counts it, touched or not.
    pub(crate) ours_host_bytes: u64,
    /// `host_bytes` minus `ours_host_bytes`.
    pub(crate) other_host_bytes: Option<u64>,
    /// Device memory of arenas.
    pub(crate) ours_vram_bytes: u64,
    /// `vram_bytes` minus `ours_vram_bytes`: contexts, pools, other processes.
    pub(crate) other_vram_bytes: Option<u64>,
}

/// The highest values during a run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Peak {
    /// Memory that the kernel cannot reclaim: anonymous, shared, swapped, locked. Sampled.
    pub(crate) host_bytes: Option<u64>,
    /// All resident pages, by the kernel's own high-water mark.
    pub(crate) rss_bytes: Option<u64>,
    /// Anonymous pages. Sampled.
    pub(crate) anon_bytes: Option<u64>,
    /// Mapped file pages. Sampled.
    pub(crate) file_bytes: Option<u64>,
    /// Page-locked memory: the pinned bytes of the ring, or the kernel's count if that is larger.
    pub(crate) pinned_bytes: Option<u64>,
    /// The memory cgroup's peak, page cache included.
    pub(crate) cgroup_bytes: Option<u64>,
    /// Device memory. Sampled.
    pub(crate) vram_bytes: Option<u64>,
    /// How device memory was measured: `nvml_process` (this process), `nvml_device` or `driver`
    /// (every process on the device).
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

/// Memory pressure on the whole machine during a run, other processes included.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Pressure {
    /// Microseconds in which at least one task waited for memory.
    pub(crate) memory_some_us: Option<u64>,
    /// Pages that were read again after they had been reclaimed.
    pub(crate) refaults: Option<u64>,
}

/// Growth of RSS and its promised limit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Promise {
    /// Budget + 16 MiB + resident layers in host memory.
    pub(crate) limit_bytes: u64,
    /// Peak RSS minus RSS before the load.
    pub(crate) growth_bytes: u64,
    /// Whether it was kept.
    pub(crate) kept: bool,
}

/// Memory over time.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Samples {
    /// Time between samples.
    pub(crate) interval_ms: f64,
    /// Names of the columns. If the device has its own memory, the last is `vram_bytes`, measured
    /// like `peak.vram_bytes`.
    pub(crate) columns: Vec<String>,
    /// One row for each sample. Empty unless `--timeline` is given or a picture is drawn.
    pub(crate) rows: Vec<Vec<Option<u64>>>,
}

/// When layers were delivered.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Deliveries {
    /// Number of layers.
    pub(crate) layers: u64,
    /// Consecutive layers that each row stands for; the last row may stand for fewer.
    pub(crate) layers_per_row: u64,
    /// In the order of delivery; about a thousand rows at most.
    pub(crate) rows: Vec<Delivery>,
}

/// The last layer of a row.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Delivery {
    /// Its name.
    pub(crate) layer: String,
    /// When it was delivered, by the clock of `samples`.
    pub(crate) elapsed_us: u64,
    /// Bytes of the row's layers, as delivered.
    #[serde(default)]
    pub(crate) bytes: Option<u64>,
    /// Bytes that were read from files since the row before: of these layers, and of those that are
    /// read ahead.
    #[serde(default)]
    pub(crate) read_bytes: Option<u64>,
    /// The part of `read_bytes` that came from the page cache; `null` if the kernel does not count
    /// reads. Reads that are on their way count as the disk's.
    #[serde(default)]
    pub(crate) from_cache_bytes: Option<u64>,
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
    /// The samples of a timeline, with rows only if `keep` is set.
    pub(crate) fn new(interval_ms: f64, timeline: &onelayer_probe::Timeline, keep: bool) -> Self {
        let columns = ["elapsed_us", "host_bytes", "rss_bytes", "anon_bytes", "file_bytes", "shmem_bytes"];
        let rows = timeline.rows().filter(|_| keep).map(|row| {
            let elapsed_us = u64::try_from(row.elapsed.as_micros()).ok();
            vec![elapsed_us, row.host_bytes, row.rss_bytes, row.anon_bytes, row.file_bytes, row.shmem_bytes]
        });
        Self { interval_ms, columns: columns.map(str::to_owned).to_vec(), rows: rows.collect() }
    }

    /// Adds a column of device memory. `steps` are its changes in order of time: the time by the
    /// clock of the samples, and the new value.
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
