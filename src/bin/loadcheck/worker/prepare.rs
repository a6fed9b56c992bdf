//! Before a load: what the headers say, what the plan needs, and the state of the page cache.
//!
//! Called by a worker for `run`, and directly by `plan` and `inspect`, which measure nothing. Reads no weights, unless
//! the page cache is to be warmed.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use onelayer::LoadPlan;
use onelayer::Target;
use onelayer::checkpoint::{Checkpoint, OpenOptions};
use onelayer::layers::{LayerMap, Layers};
use onelayer::load::{LoadError, Loader};
use onelayer::plan::{IoMode, Window};
use onelayer::units::HumanBytes;

use super::protocol::Checked;
use super::translate;
use crate::args::{CacheArg, Io};
use crate::config::{LoadConfig, TargetChoice};
use crate::problem::{Code, Problem};
use crate::report::{DtypeShare, Largest, MemoryTerm, Plan, Source};
use crate::sizes::SizeContext;
use crate::small_file;

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
pub(super) fn layer_map(path: Option<&Path>) -> Result<LayerMap, Problem> {
    let Some(path) = path else { return Ok(LayerMap::default()) };
    let failed = |error: &dyn std::fmt::Display| {
        Problem::new(Code::LayerMap, format!("cannot use the layer rules: {error}"))
            .at(path.display().to_string())
    };
    let text = small_file::read(path, LAYER_MAP_BYTES_MAX).map_err(|error| failed(&error))?;
    let text = String::from_utf8(text).map_err(|error| failed(&error))?;
    LayerMap::parse(&text).map_err(|error| failed(&error))
}

/// The loader that a configuration asks for.
pub(super) fn loader(config: &LoadConfig, budget_bytes: u64) -> Result<Loader, Problem> {
    let map_path = config.layers.as_ref().map(|path| path.0.as_path());
    let target = match config.target {
        TargetChoice::Host => Target::Host,
        TargetChoice::None => Target::None,
    };
    let io = match config.io {
        Io::Buffered => IoMode::Buffered,
        Io::Mmap => IoMode::Mmap,
        Io::Direct => IoMode::Direct,
    };
    let mut builder = Loader::builder(target)
        .host_budget(budget_bytes)
        .window(config.window.map_or(Window::All, Window::Layers))
        .prefetch(config.prefetch)
        .io(io)
        .hash(config.hash)
        .layer_map(layer_map(map_path)?);
    if let Some(readers) = config.readers {
        builder = builder.readers(readers);
    }
    if let Some(select) = &config.select {
        let select =
            regex::Regex::new(select).map_err(|error| crate::config::bad_pattern("--select", &error))?;
        builder = builder.select(move |tensor| select.is_match(tensor.name));
    }
    builder.build().map_err(|error| translate::load(&error, map_path))
}

/// The task `Prepare`.
pub(super) fn prepare(
    config: &LoadConfig,
    cache: Option<CacheArg>,
    cancel: &AtomicBool,
) -> Result<Checked, Vec<Problem>> {
    let checkpoint = open_checkpoint(&config.path.0, config.opaque_dtypes)?;
    let (layers, plan, context) = plan_of(&checkpoint, config)?;
    if let Some(available_bytes) = crate::machine::memory_available_bytes() {
        fits(&plan, available_bytes).map_err(|problem| vec![problem])?;
    }
    let mut notes = checkpoint.notes().to_vec();
    let cached_share = match cache {
        None | Some(CacheArg::Asis) => None,
        Some(state) => super::cache::bring_about(&checkpoint, state, cancel, &mut notes),
    };
    Ok(Checked { source: describe(&checkpoint, &layers), plan, context, cached_share, notes })
}

/// Refuses a load whose kept layers the machine cannot hold: the kernel would end it halfway.
fn fits(plan: &Plan, available_bytes: u64) -> Result<(), Problem> {
    let resident_bytes = plan.resident_bytes.unwrap_or(0);
    let needed_bytes = resident_bytes.saturating_add(plan.host_bytes);
    if resident_bytes == 0 || needed_bytes <= available_bytes {
        return Ok(());
    }
    let message = format!(
        "the layers that stay resident need {}, and {} of memory are available",
        HumanBytes(needed_bytes),
        HumanBytes(available_bytes)
    );
    let kept = plan.params.window.map_or("all".to_owned(), |count| count.to_string());
    Err(Problem::new(Code::CannotBeMet, message)
        .at(format!("--window {kept}"))
        .help("--window 1 keeps one layer at a time, --device none keeps nothing"))
}

/// Groups, resolves the budget, plans.
///
/// # Errors
/// One problem: what comes first is what the rest builds on.
pub(crate) fn plan_of(
    checkpoint: &Checkpoint,
    config: &LoadConfig,
) -> Result<(Layers, Plan, SizeContext), Vec<Problem>> {
    let map_path = config.layers.as_ref().map(|path| path.0.as_path());
    let one = |problem| vec![problem];
    let map = layer_map(map_path).map_err(one)?;
    let layers =
        Layers::group_with(checkpoint, &map).map_err(|error| one(translate::layers(&error, map_path)))?;
    let context = context_of(checkpoint, &layers);
    let budget_bytes = config.budget.resolve(&context).map_err(|error| {
        one(Problem::new(Code::SizeUnresolved, error.to_string()).at(format!("--budget {}", config.budget)))
    })?;
    let plan = loader(config, budget_bytes)
        .map_err(one)?
        .plan(checkpoint)
        .map_err(|error: LoadError| one(translate::load(&error, map_path)))?;
    let derived = derived(&plan, config);
    Ok((layers, derived, context))
}

/// What relative sizes relate to.
fn context_of(checkpoint: &Checkpoint, layers: &Layers) -> SizeContext {
    SizeContext {
        limit_bytes: crate::machine::memory_limit_bytes(),
        layer_bytes: layer_sizes(checkpoint, layers).map(|(_, bytes)| bytes).max(),
        tensor_bytes: checkpoint.tensors().map(|tensor| tensor.extent.len_bytes()).max(),
    }
}

fn layer_sizes<'a>(checkpoint: &'a Checkpoint, layers: &'a Layers) -> impl Iterator<Item = (&'a str, u64)> {
    layers.as_slice().iter().map(|layer| {
        let bytes = layer.tensors.iter().map(|tensor| checkpoint.tensor(*tensor).extent.len_bytes()).sum();
        (layer.id.as_str(), bytes)
    })
}

/// The plan as a report has it.
fn derived(plan: &LoadPlan, config: &LoadConfig) -> Plan {
    let memory = plan.memory();
    let term = |name: &str, bytes| MemoryTerm { name: name.to_owned(), bytes };
    Plan {
        source: "derived".to_owned(),
        params: config.params(memory.budget_bytes(), Some(u64::from(memory.ring().readers))),
        memory: memory.terms().iter().map(|part| term(part.name, part.bytes)).collect(),
        host_bytes: memory.budgeted_bytes(),
        slots: u64::from(memory.ring().slots),
        slot_bytes: memory.ring().slot_bytes,
        smallest_budget_bytes: Some(memory.smallest_budget_bytes()),
        resident_bytes: Some(memory.resident_bytes()),
        tensor_bytes: plan.tensor_bytes(),
        reads: count(plan.reads().len()),
        read_bytes: plan.aligned_read_bytes(),
        over_read_bytes: plan.over_read_bytes(),
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
