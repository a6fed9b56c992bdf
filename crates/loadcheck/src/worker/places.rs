//! `--device-map`, before a load: the devices, the map and the checkpoint are held against each
//! other. `measure_places` loads.

use std::sync::atomic::AtomicBool;

use onelayer::LoadPlan;
use onelayer::checkpoint::Checkpoint;
use onelayer::layers::Layers;
use onelayer::units::HumanBytes;
use onelayer_fit::{DeviceMap, Tier};
use onelayer_fit::{PlacedError, PlacedLoader, PlacedPlan};

use super::child::tell;
use super::protocol::{Checked, Message};
use super::{device, prepare, translate};
use crate::args::{CacheArg, Device as Asked};
use crate::config::{Budgets, LoadConfig};
use crate::device_map::{config_beside, tier_name};
use crate::problem::{Code, Problem};
use crate::report::{PlaceShare, Plan};

/// What is wrong is found at the flag.
const FLAG: &str = "--device-map";

/// The task `Prepare` for a load by a map.
///
/// # Errors
/// Devices that are not there, a map that does not fit the checkpoint, places that are too small:
/// as far as they can be told together.
pub(super) fn prepare(
    config: &LoadConfig,
    map: &DeviceMap,
    has_source: bool,
    cache: Option<CacheArg>,
    cancel: &AtomicBool,
) -> Result<Checked, Vec<Problem>> {
    let mut problems = Vec::new();
    if cache.is_none() {
        let looked = gpus_of(map).into_iter().map(|gpu| device::look_at(gpu).map_err(|error| (gpu, error)));
        let (there, missing): (Vec<_>, Vec<_>) = looked.partition(Result::is_ok);
        let gpus = there.into_iter().flatten().filter_map(|decided| decided.gpu).collect();
        tell(&Message::Decided { device: Asked::Host, gpus });
        problems
            .extend(missing.into_iter().filter_map(Result::err).map(|(gpu, error)| no_device(gpu, &error)));
    }
    if !has_source {
        return Err(problems);
    }
    let map_path = config.layers.as_ref().map(|path| path.0.as_path());
    let one = |problem| vec![problem];
    let planned = prepare::open_checkpoint(&config.path.0, config.opaque_dtypes).and_then(|checkpoint| {
        let rules = prepare::layer_map(map_path).map_err(one)?;
        let layers = Layers::group_with(&checkpoint, &rules)
            .map_err(|error| one(translate::layers(&error, map_path)))?;
        let context = prepare::context_of(&checkpoint, &layers);
        let budgets = config.budgets(&context).map_err(one)?;
        let loader = loader(config, map, &budgets, &checkpoint)?;
        let plan = loader.plan().map_err(|error| problems_of(&error, config))?;
        Ok((checkpoint, layers, context, budgets, loader, plan))
    });
    let (checkpoint, layers, context, budgets, loader, plan) = match (planned, problems.is_empty()) {
        (Ok(planned), true) => planned,
        (planned, _) => {
            problems.extend(planned.err().unwrap_or_default());
            return Err(problems);
        }
    };
    let plan = derived(&checkpoint, &plan, config, &budgets).map_err(one)?;
    if cache.is_none() {
        loader.open().map_err(|error| problems_of(&error, config))?;
    }
    fits_the_host(&plan).map_err(one)?;
    let mut notes = checkpoint.notes().to_vec();
    let cached_share = match cache {
        None | Some(CacheArg::Asis) => None,
        Some(state) => super::cache::bring_about(&checkpoint, state, cancel, &mut notes),
    };
    let source = prepare::describe(&checkpoint, &layers);
    Ok(Checked { source, plan, budgets, context, cached_share, notes })
}

/// The GPUs that a map names, by number.
pub(super) fn gpus_of(map: &DeviceMap) -> Vec<u32> {
    let gpu = |(_, tier): &(String, Tier)| match tier {
        Tier::Device(gpu) => Some(*gpu),
        _ => None,
    };
    let mut gpus: Vec<u32> = map.entries().iter().filter_map(gpu).collect();
    gpus.sort_unstable();
    gpus.dedup();
    gpus
}

pub(super) fn no_device(gpu: u32, error: &dyn std::error::Error) -> Problem {
    let message = format!("cannot use GPU {gpu} of the device map: {}", translate::chain(error));
    Problem::new(Code::NoDevice, message)
        .at(FLAG)
        .help("`loadcheck plan --vram` finds places on the GPUs that there are")
}

/// The loader, its devices not yet open.
pub(super) fn loader(
    config: &LoadConfig,
    map: &DeviceMap,
    budgets: &Budgets,
    checkpoint: &Checkpoint,
) -> Result<PlacedLoader, Vec<Problem>> {
    let one = |problem| vec![problem];
    let settings = prepare::builder(config, budgets).map_err(one)?;
    let model = config_beside(&config.path.0).map_err(one)?.map(|(_, model)| model);
    PlacedLoader::new(settings, map, checkpoint, model.as_ref()).map_err(|error| problems_of(&error, config))
}

pub(super) fn problems_of(error: &PlacedError, config: &LoadConfig) -> Vec<Problem> {
    let rules = config.layers.as_ref().map(|path| path.0.as_path());
    match error {
        PlacedError::Map { faults } => {
            faults.iter().map(|fault| Problem::new(Code::DeviceMap, fault.to_string()).at(FLAG)).collect()
        }
        PlacedError::NoDevice { device, source } => vec![no_device(*device, source)],
        PlacedError::DeviceTooSmall { .. } => {
            vec![Problem::new(Code::CannotBeMet, error.to_string()).at(FLAG)]
        }
        PlacedError::Load { source, .. } | PlacedError::Checkpoint(source) => {
            vec![translate::load(source, rules)]
        }
        other => vec![Problem::new(Code::LoadFailed, translate::chain(other))],
    }
}

/// The plan as a report has it: the first place's, with the sums of all.
fn derived(
    checkpoint: &Checkpoint,
    plan: &PlacedPlan,
    config: &LoadConfig,
    budgets: &Budgets,
) -> Result<Plan, Problem> {
    let Some(first) = plan.steps().first() else {
        let message = "the device map leaves everything on the disk: there is nothing to load";
        return Err(Problem::new(Code::CannotBeMet, message).at(FLAG));
    };
    let sum = |of: &dyn Fn(&LoadPlan) -> u64| plan.steps().iter().map(|step| of(&step.plan)).sum::<u64>();
    Ok(Plan {
        host_bytes: plan.budgeted_bytes(),
        resident_bytes: Some(sum(&|plan| plan.memory().resident_bytes())),
        resident_host_bytes: Some(plan.resident_host_bytes()),
        tensor_bytes: plan.tensor_bytes(),
        reads: sum(&|plan| count(plan.reads().len())),
        read_bytes: plan.read_bytes(),
        over_read_bytes: sum(&LoadPlan::over_read_bytes),
        jumps: sum(&LoadPlan::jumps),
        places: plan
            .steps()
            .iter()
            .map(|step| planned_place(step.tier, &step.plan))
            .chain(on_disk(plan))
            .collect(),
        ..prepare::derived(checkpoint, &first.plan, config, budgets)
    })
}

pub(super) fn planned_place(tier: Tier, plan: &LoadPlan) -> PlaceShare {
    PlaceShare {
        tier: tier_name(tier),
        layers: count(plan.layers().len()),
        tensor_bytes: plan.tensor_bytes(),
        resident_bytes: plan.memory().resident_bytes(),
        read_bytes: plan.aligned_read_bytes(),
        ..PlaceShare::default()
    }
}

pub(super) fn on_disk(plan: &PlacedPlan) -> Option<PlaceShare> {
    let disk = plan.disk();
    (disk.tensors > 0).then(|| PlaceShare {
        tier: tier_name(Tier::Disk),
        layers: count(disk.layers.len()),
        tensor_bytes: disk.tensor_bytes,
        ..PlaceShare::default()
    })
}

/// Refuses what the machine cannot hold: the kernel would end it halfway.
fn fits_the_host(plan: &Plan) -> Result<(), Problem> {
    let resident_bytes = plan.resident_host_bytes.unwrap_or(0);
    let needed_bytes = resident_bytes.saturating_add(plan.host_bytes);
    match crate::machine::memory_available_bytes() {
        Some(available_bytes) if resident_bytes > 0 && needed_bytes > available_bytes => {
            let (needed, available) = (HumanBytes(needed_bytes), HumanBytes(available_bytes));
            let message =
                format!("the layers on the host need {needed}, and {available} of memory are available");
            Err(Problem::new(Code::CannotBeMet, message).at(FLAG).help("put more on GPUs or on the disk"))
        }
        _ => Ok(()),
    }
}

fn count(len: usize) -> u64 {
    u64::try_from(len).unwrap_or(u64::MAX)
}
