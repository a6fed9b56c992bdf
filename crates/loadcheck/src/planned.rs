//! From a configuration to the library's loader and plan, and the plan as a report has it.

use onelayer::checkpoint::Checkpoint;
use onelayer::layers::Layers;
use onelayer::load::{Loader, LoaderBuilder};
use onelayer::plan::{IoDecision, Window};
use onelayer::{LoadOptions, LoadPlan, Passes, Pinning, Rank, ReadOrder};
use onelayer_system::units::to_u64;

use crate::config::{Budgets, LoadConfig, bad_pattern};
use crate::inputs::{context_of, group, layer_map};
use crate::library_errors;
use crate::problem::Problem;
use crate::report::{FileReading, MemoryTerm, Plan, PlannedRank, Ring};
use crate::sizes::SizeContext;

/// The loader that a configuration asks for, its device not yet open.
pub(crate) fn builder(config: &LoadConfig, budgets: &Budgets) -> Result<LoaderBuilder, Problem> {
    let mut builder = Loader::builder(config.device.target())
        .options(load_options(config, budgets))
        .keep(config.passes.keep.keep())
        .layer_map(layer_map(config.layers_path())?);
    if let Some(pattern) = &config.quantise_only {
        let only = regex::Regex::new(pattern).map_err(|error| bad_pattern("--quantise-only", &error))?;
        builder = builder.quantise_only(move |tensor| only.is_match(tensor.name));
    }
    if let Some(select) = &config.select {
        let select = regex::Regex::new(select).map_err(|error| bad_pattern("--select", &error))?;
        builder = builder.select(move |tensor| select.is_match(tensor.name));
    }
    if let Some((rank, rules)) = config.ranks.shard() {
        builder = builder.shard(rank, rules);
    }
    Ok(builder)
}

/// The plain options that a configuration asks for.
fn load_options(config: &LoadConfig, budgets: &Budgets) -> LoadOptions {
    let mut options = LoadOptions::default();
    options.host_budget_bytes = budgets.host_bytes;
    options.device_budget_bytes = budgets.device_bytes;
    options.device_reserve_bytes = budgets.device_reserve_bytes;
    options.window = window(config);
    options.prefetch_layers = config.prefetch;
    options.passes = Passes::Times(u64::from(config.passes.passes));
    // Hashes are listed in the order of layers. Otherwise any order will do.
    options.order = if config.hash { ReadOrder::Layers } else { ReadOrder::Files };
    options.io = config.io.mode();
    options.readers = config.readers.map(|readers| readers.max(1));
    options.dtype = config.dtype;
    options.quantise = config.quantise.map(|form| form.0);
    options.hole_bytes_max = config.ranks.read_through.unwrap_or(options.hole_bytes_max);
    options.hash = config.hash;
    options
}

fn window(config: &LoadConfig) -> Window {
    match (config.window, config.window_bytes) {
        (Some(layers), _) => Window::Layers(layers),
        (None, Some(bytes)) => Window::Bytes(bytes),
        (None, None) => Window::All,
    }
}

/// A checkpoint, grouped and planned.
pub(crate) struct Planned {
    /// Its layers.
    pub(crate) layers: Layers,
    /// The plan, as a report has it.
    pub(crate) plan: Plan,
    /// The quantities that relative sizes refer to.
    pub(crate) context: SizeContext,
    /// The most that the load may hold.
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
    let one = |problem| vec![problem];
    let layers = group(checkpoint, config.layers_path()).map_err(one)?;
    let context = SizeContext { device_bytes, ..context_of(checkpoint, &layers) };
    let budgets = config.budgets(&context).map_err(one)?;
    let plan = builder(config, &budgets)
        .map_err(one)?
        .plan(checkpoint)
        .map_err(|error| one(library_errors::load(&error, config.layers_path())))?;
    let plan = derived(checkpoint, &plan, config, &budgets);
    Ok(Planned { layers, plan, context, budgets })
}

/// The plan as a report has it.
pub(crate) fn derived(
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
        reads: to_u64(plan.reads().len()),
        read_bytes: plan.aligned_read_bytes(),
        over_read_bytes: plan.over_read_bytes(),
        rank: plan.rank().map(|rank| planned_rank(plan, rank)),
        places: Vec::new(),
        order: plan.order().to_string(),
        jumps: plan.jumps(),
        files: files(checkpoint, plan),
    }
}

fn planned_rank(plan: &LoadPlan, rank: Rank) -> PlannedRank {
    let tensors: usize = plan.layers().iter().map(|layer| layer.placements.len()).sum();
    PlannedRank {
        rank: u64::from(rank.rank()),
        world: u64::from(rank.world()),
        part_tensors: to_u64(plan.part_count()),
        whole_tensors: to_u64(tensors - plan.part_count()),
        wanted_bytes: plan.source_bytes(),
        gap_bytes: plan.gap_bytes(),
    }
}

/// How each file is to be read, where that was decided.
pub(crate) fn files(checkpoint: &Checkpoint, plan: &LoadPlan) -> Vec<FileReading> {
    plan.decisions().iter().map(|decision| file(checkpoint, decision)).collect()
}

fn file(checkpoint: &Checkpoint, decision: &IoDecision) -> FileReading {
    FileReading {
        file: checkpoint.shard(decision.shard).path.display().to_string(),
        bytes: decision.file_bytes,
        mode: decision.mode.to_string(),
        reason: decision.reason.name().to_owned(),
        why: decision.reason.to_string(),
        file_system: decision.file_system.map(|kind| kind.to_string()),
        resident_share: decision.resident_share(),
        residency_by: decision.residency_by.map(|by| by.name().to_owned()),
        new_pages: decision.cache_effect.name().to_owned(),
    }
}
