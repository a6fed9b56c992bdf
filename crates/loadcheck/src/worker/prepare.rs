//! Before a load: what the headers say, what the plan needs, and the state of the page cache.
//!
//! Called by a worker for `run`, and directly by `plan` and `inspect`, which measure nothing. Reads
//! no weights, unless the page cache is to be warmed.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use onelayer::checkpoint::{Checkpoint, OpenOptions};
use onelayer::layers::{LayerMap, Layers};
use onelayer::load::{LoadError, Loader, LoaderBuilder};
use onelayer::plan::Window;
use onelayer::units::HumanBytes;
use onelayer::{LoadPlan, Passes, Pinning, Rank, ReadOrder};

use super::child::tell;
use super::protocol::{Checked, Message};
use super::{device, reading, translate};
use crate::args::{CacheArg, Device};
use crate::config::{Budgets, LoadConfig};
use crate::problem::{Code, Problem};
use crate::report::{DtypeShare, Largest, MemoryTerm, Plan, PlannedRank, Ring, Source};
use crate::sizes::SizeContext;
use onelayer_system::small_file;

/// Rules for layers are written by hand; more than this is another file, given by mistake.
const LAYER_MAP_BYTES_MAX: u64 = 256 << 10;

/// Opens a checkpoint.
///
/// # Errors
/// Everything that is wrong with it.
pub(crate) fn open_checkpoint(path: &Path, opaque_dtypes: bool) -> Result<Checkpoint, Vec<Problem>> {
    OpenOptions::new()
        .allow_opaque_dtypes(opaque_dtypes)
        .open(path)
        .map_err(|error| translate::checkpoint(&error))
}

/// Reads the override of the grouping, if there is one.
pub(crate) fn layer_map(path: Option<&Path>) -> Result<LayerMap, Problem> {
    let Some(path) = path else { return Ok(LayerMap::default()) };
    let failed = |error: &dyn std::fmt::Display| {
        Problem::new(Code::LayerMap, format!("cannot use the layer rules: {error}"))
            .at(path.display().to_string())
    };
    let text = small_file::read(path, LAYER_MAP_BYTES_MAX).map_err(|error| failed(&error))?;
    let text = String::from_utf8(text).map_err(|error| failed(&error))?;
    LayerMap::parse(&text).map_err(|error| failed(&error))
}

/// The loader that a configuration asks for, its device not yet open.
pub(super) fn builder(config: &LoadConfig, budgets: &Budgets) -> Result<LoaderBuilder, Problem> {
    let map_path = config.layers.as_ref().map(|path| path.0.as_path());
    let mut builder = Loader::builder(config.device.target())
        .host_budget(budgets.host_bytes)
        .device_reserve(budgets.device_reserve_bytes)
        .window(window(config))
        .passes(Passes::Times(u64::from(config.passes.passes)))
        .keep(config.passes.keep.keep())
        // Whoever keeps everything does not mind in which order it comes; a list of hashes has one.
        .read_order(if config.hash { ReadOrder::Layers } else { ReadOrder::Files })
        .prefetch(config.prefetch)
        .io(config.io.mode())
        .hash(config.hash)
        .layer_map(layer_map(map_path)?);
    if let Some(device_budget_bytes) = budgets.device_bytes {
        builder = builder.device_budget(device_budget_bytes);
    }
    if let Some(dtype) = config.dtype {
        builder = builder.dtype(dtype);
    }
    if let Some(form) = config.quantise {
        builder = builder.quantise(form.0);
    }
    if let Some(pattern) = &config.quantise_only {
        let only = regex::Regex::new(pattern)
            .map_err(|error| crate::config::bad_pattern("--quantise-only", &error))?;
        builder = builder.quantise_only(move |tensor| only.is_match(tensor.name));
    }
    if let Some(readers) = config.readers {
        builder = builder.readers(readers);
    }
    if let Some(select) = &config.select {
        let select =
            regex::Regex::new(select).map_err(|error| crate::config::bad_pattern("--select", &error))?;
        builder = builder.select(move |tensor| select.is_match(tensor.name));
    }
    if let Some((rank, rules)) = config.ranks.shard() {
        builder = builder.shard(rank, rules);
    }
    if let Some(hole_bytes_max) = config.ranks.read_through {
        builder = builder.read_through(hole_bytes_max);
    }
    Ok(builder)
}

fn window(config: &LoadConfig) -> Window {
    match (config.window, config.window_bytes) {
        (Some(layers), _) => Window::Layers(layers),
        (None, Some(bytes)) => Window::Bytes(bytes),
        (None, None) => Window::All,
    }
}

/// The task `Prepare`: first the device, then the checkpoint, so that all problems come in one go.
pub(super) fn prepare(
    config: &LoadConfig,
    has_source: bool,
    cache: Option<CacheArg>,
    cancel: &AtomicBool,
) -> Result<Checked, Vec<Problem>> {
    if let Some(map) = &config.device_map {
        return super::places::prepare(config, map, has_source, cache, cancel);
    }
    // Between runs only the page cache is looked after: the device was decided on, and opening it takes
    // its time.
    let asked = if cache.is_none() { device::decide(config.device).map(Some) } else { Ok(None) };
    let (decided, mut problems) = match asked {
        Ok(decided) => (decided, Vec::new()),
        Err(problem) => (None, vec![problem]),
    };
    if let Some(decided) = &decided {
        tell(&Message::Decided { device: decided.device, gpus: decided.gpu.iter().cloned().collect() });
    }
    if !has_source {
        return Err(problems);
    }
    let device = decided.as_ref().map_or(config.device, |decided| decided.device);
    let config = LoadConfig { device, ..config.clone() };
    let gpu = decided.as_ref().and_then(|decided| decided.gpu.as_ref());
    let device_bytes = gpu.and_then(|gpu| gpu.memory_total_bytes);
    let prepared = open_checkpoint(&config.path.0, config.opaque_dtypes)
        .and_then(|checkpoint| Ok((plan_of(&checkpoint, &config, device_bytes)?, checkpoint)));
    let (planned, checkpoint) = match (prepared, problems.is_empty()) {
        (Ok(prepared), true) => prepared,
        (prepared, _) => {
            problems.extend(prepared.err().unwrap_or_default());
            return Err(problems);
        }
    };
    let free_bytes = decided.as_ref().and_then(|decided| decided.free_bytes);
    fits(&planned, free_bytes).map_err(|problem| vec![problem])?;
    let mut notes: Vec<String> = decided.into_iter().filter_map(|decided| decided.note).collect();
    notes.extend(checkpoint.notes().iter().cloned());
    let cached_share = match cache {
        None | Some(CacheArg::Asis) => None,
        Some(state) => super::cache::bring_about(&checkpoint, state, cancel, &mut notes),
    };
    let Planned { layers, plan, context, budgets } = planned;
    let source = describe(&checkpoint, &layers);
    Ok(Checked { source, plan, budgets, context, cached_share, notes })
}

/// Refuses a load whose kept layers the device cannot hold, or the machine: the kernel would end it
/// halfway.
fn fits(planned: &Planned, device_free_bytes: Option<u64>) -> Result<(), Problem> {
    let plan = &planned.plan;
    let kept = match (plan.params.window, plan.params.window_bytes) {
        (Some(count), _) => count.to_string(),
        (None, Some(bytes)) => HumanBytes(bytes).to_string(),
        (None, None) => "all".to_owned(),
    };
    if let Some(free_bytes) = device_free_bytes {
        let needed_bytes = plan.resident_bytes.unwrap_or(0);
        device::fits(needed_bytes, free_bytes, planned.budgets.device_reserve_bytes, &kept)?;
    }
    let resident_bytes = plan.resident_host_bytes.unwrap_or(0);
    let needed_bytes = resident_bytes.saturating_add(plan.host_bytes);
    match crate::machine::memory_available_bytes() {
        Some(available_bytes) if resident_bytes > 0 && needed_bytes > available_bytes => {
            let message = format!(
                "the layers that stay resident need {}, and {} of memory are available",
                HumanBytes(needed_bytes),
                HumanBytes(available_bytes)
            );
            Err(Problem::new(Code::CannotBeMet, message)
                .at(format!("--window {kept}"))
                .help("--window 1 keeps one layer at a time, --device none keeps nothing"))
        }
        _ => Ok(()),
    }
}

/// A checkpoint, grouped and planned.
pub(crate) struct Planned {
    /// Its layers.
    pub(crate) layers: Layers,
    /// What a load will do.
    pub(crate) plan: Plan,
    /// What relative sizes relate to.
    pub(crate) context: SizeContext,
    /// What the load may hold.
    pub(crate) budgets: Budgets,
}

/// Groups, resolves the budgets, plans. The device need not be there; `device_bytes` is its memory,
/// if it is known.
///
/// # Errors
/// One problem: what comes first is what the rest builds on.
pub(crate) fn plan_of(
    checkpoint: &Checkpoint,
    config: &LoadConfig,
    device_bytes: Option<u64>,
) -> Result<Planned, Vec<Problem>> {
    let map_path = config.layers.as_ref().map(|path| path.0.as_path());
    let one = |problem| vec![problem];
    let map = layer_map(map_path).map_err(one)?;
    let layers =
        Layers::group_with(checkpoint, &map).map_err(|error| one(translate::layers(&error, map_path)))?;
    let context = SizeContext { device_bytes, ..context_of(checkpoint, &layers) };
    let budgets = config.budgets(&context).map_err(one)?;
    let plan = builder(config, &budgets)
        .map_err(one)?
        .plan(checkpoint)
        .map_err(|error: LoadError| one(translate::load(&error, map_path)))?;
    let plan = derived(checkpoint, &plan, config, &budgets);
    Ok(Planned { layers, plan, context, budgets })
}

/// The device that a description is for: `auto` is decided as for a load, any other need not be
/// there.
///
/// # Errors
/// A device is there and does not open.
pub(crate) fn decide_for_plan(asked: Device) -> Result<(Device, Option<u64>, Option<String>), Problem> {
    if asked != Device::Auto {
        return Ok((asked, None, None));
    }
    let decided = device::decide(asked)?;
    Ok((decided.device, decided.gpu.and_then(|gpu| gpu.memory_total_bytes), decided.note))
}

/// What relative sizes relate to.
pub(crate) fn context_of(checkpoint: &Checkpoint, layers: &Layers) -> SizeContext {
    SizeContext {
        limit_bytes: crate::machine::memory_limit_bytes(),
        layer_bytes: layer_sizes(checkpoint, layers).map(|(_, bytes)| bytes).max(),
        tensor_bytes: checkpoint.tensors().map(|tensor| tensor.extent.len_bytes()).max(),
        device_bytes: None,
    }
}

fn layer_sizes<'a>(checkpoint: &'a Checkpoint, layers: &'a Layers) -> impl Iterator<Item = (&'a str, u64)> {
    layers.as_slice().iter().map(|layer| {
        let bytes = layer.tensors.iter().map(|tensor| checkpoint.tensor(*tensor).extent.len_bytes()).sum();
        (layer.id.as_str(), bytes)
    })
}

/// The plan as a report has it.
pub(super) fn derived(
    checkpoint: &Checkpoint,
    plan: &LoadPlan,
    config: &LoadConfig,
    budgets: &Budgets,
) -> Plan {
    let memory = plan.memory();
    let ring = memory.ring();
    let is_pinned = config.device.has_own_memory();
    let term = |name: &str, bytes| MemoryTerm { name: name.to_owned(), bytes };
    Plan {
        source: "derived".to_owned(),
        params: config.params(budgets, Some(u64::from(ring.readers))),
        memory: memory.terms().iter().map(|part| term(part.kind.name(), part.bytes)).collect(),
        host_bytes: memory.budgeted_bytes(),
        ring: Ring {
            mode: None,
            slots: u64::from(ring.slots),
            slot_bytes: ring.slot_bytes,
            pinning: if is_pinned { Pinning::Whole } else { Pinning::NotNeeded }.name().to_owned(),
            pinning_reason: None,
            pinned_bytes: if is_pinned { ring.bytes() } else { 0 },
        },
        slots: u64::from(ring.slots),
        slot_bytes: ring.slot_bytes,
        smallest_budget_bytes: Some(memory.smallest_budget_bytes()),
        resident_bytes: Some(memory.resident_bytes()),
        resident_host_bytes: Some(memory.resident_host_bytes()),
        resident: match plan.passes().is_one() {
            true => Vec::new(),
            false => memory.resident_terms().iter().map(|part| term(part.kind.name(), part.bytes)).collect(),
        },
        tensor_bytes: plan.tensor_bytes(),
        reads: count(plan.reads().len()),
        read_bytes: plan.aligned_read_bytes(),
        over_read_bytes: plan.over_read_bytes(),
        rank: plan.rank().map(|rank| planned_rank(plan, rank)),
        places: Vec::new(),
        order: plan.order().to_string(),
        jumps: plan.jumps(),
        files: reading::files(checkpoint, plan),
    }
}

fn planned_rank(plan: &LoadPlan, rank: Rank) -> PlannedRank {
    let tensors: usize = plan.layers().iter().map(|layer| layer.placements.len()).sum();
    PlannedRank {
        rank: u64::from(rank.rank()),
        world: u64::from(rank.world()),
        part_tensors: count(plan.part_count()),
        whole_tensors: count(tensors - plan.part_count()),
        wanted_bytes: plan.source_bytes(),
        gap_bytes: plan.gap_bytes(),
    }
}

/// The checkpoint as a report has it, without who named it.
pub(crate) fn describe(checkpoint: &Checkpoint, layers: &Layers) -> Source {
    let mut shares: HashMap<&str, DtypeShare> = HashMap::new();
    for tensor in checkpoint.tensors() {
        let share = shares.entry(tensor.dtype_name).or_insert_with(|| DtypeShare {
            dtype: tensor.dtype_name.to_owned(),
            tensors: 0,
            bytes: 0,
        });
        share.tensors += 1;
        share.bytes = share.bytes.saturating_add(tensor.extent.len_bytes());
    }
    let mut dtypes: Vec<DtypeShare> = shares.into_values().collect();
    dtypes.sort_by(|left, right| right.bytes.cmp(&left.bytes).then_with(|| left.dtype.cmp(&right.dtype)));
    let largest = |(name, bytes): (&str, u64)| Largest { name: name.to_owned(), bytes };
    let tensors = checkpoint.tensors().map(|tensor| (tensor.name, tensor.extent.len_bytes()));
    Source {
        bytes: Some(checkpoint.tensor_bytes()),
        files: Some(count(checkpoint.shards().len())),
        tensors: Some(count(checkpoint.tensor_count())),
        layers: Some(count(layers.as_slice().len())),
        dtypes,
        largest_tensor: first_largest(tensors).map(largest),
        largest_layer: first_largest(layer_sizes(checkpoint, layers)).map(largest),
        ..Source::default()
    }
}

/// The largest, the first of equals.
fn first_largest<'a>(sizes: impl Iterator<Item = (&'a str, u64)>) -> Option<(&'a str, u64)> {
    sizes.reduce(|best, next| if next.1 > best.1 { next } else { best })
}

fn count(len: usize) -> u64 {
    u64::try_from(len).unwrap_or(u64::MAX)
}
