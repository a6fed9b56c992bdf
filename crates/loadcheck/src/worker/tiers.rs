//! Loads by a device map, onto several devices, host and disk: the checks before a load, and what
//! the load itself needs of them.

use onelayer::LoadPlan;
use onelayer::checkpoint::Checkpoint;
use onelayer_fit::{DeviceMap, PlacedError, PlacedLoader, PlacedPlan, Tier};
use onelayer_system::units::to_u64;

use super::device;
use super::protocol::{Message, tell};
use crate::args::Device;
use crate::config::{Budgets, LoadConfig};
use crate::inputs::{config_beside, context_of, group, open_checkpoint, tier_name};
use crate::library_errors;
use crate::machine::shortage;
use crate::planned::{Planned, builder, derived};
use crate::problem::{Code, Problem};
use crate::report::{PlaceShare, Plan};

/// Where problems of a map are reported.
const FLAG: &str = "--device-map";

/// Checks devices, map and checkpoint against each other.
///
/// # Errors
/// Missing devices, a map that does not fit the checkpoint, tiers that are too small: everything
/// that can be found together.
pub(super) fn prepare(
    config: &LoadConfig,
    map: &DeviceMap,
    has_source: bool,
    looks_at_devices: bool,
) -> Result<(Checkpoint, Planned, Vec<String>), Vec<Problem>> {
    let mut problems = Vec::new();
    if looks_at_devices {
        let looked = gpus_of(map).into_iter().map(|gpu| device::look_at(gpu).map_err(|error| (gpu, error)));
        let (there, missing): (Vec<_>, Vec<_>) = looked.partition(Result::is_ok);
        let gpus = there.into_iter().flatten().filter_map(|decided| decided.gpu).collect();
        tell(&Message::Decided { device: Device::Host, gpus });
        problems
            .extend(missing.into_iter().filter_map(Result::err).map(|(gpu, error)| no_device(gpu, &error)));
    }
    if !has_source {
        return Err(problems);
    }
    let one = |problem| vec![problem];
    let opened = open_checkpoint(&config.path.0, &config.opening).and_then(|checkpoint| {
        let layers = group(&checkpoint, config.layers_path()).map_err(one)?;
        let context = context_of(&checkpoint, &layers);
        let budgets = config.budgets(&context).map_err(one)?;
        let loader = loader(config, map, &budgets, &checkpoint)?;
        let plan = loader.plan().map_err(|error| problems_of(&error, config))?;
        Ok((checkpoint, layers, context, budgets, loader, plan))
    });
    let (checkpoint, layers, context, budgets, loader, plan) = match (opened, problems.is_empty()) {
        (Ok(opened), true) => opened,
        (opened, _) => {
            problems.extend(opened.err().unwrap_or_default());
            return Err(problems);
        }
    };
    let plan = derived_of_all(&checkpoint, &plan, config, &budgets).map_err(one)?;
    if looks_at_devices {
        loader.open().map_err(|error| problems_of(&error, config))?;
    }
    fits_the_host(&plan).map_err(one)?;
    Ok((checkpoint, Planned { layers, plan, context, budgets }, Vec::new()))
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
    let message = format!("cannot use GPU {gpu} of the device map: {}", library_errors::chain(error));
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
    let settings = builder(config, budgets).map_err(one)?;
    let model = config_beside(&config.path.0).map_err(one)?.map(|(_, model)| model);
    PlacedLoader::new(settings, map, checkpoint, model.as_ref()).map_err(|error| problems_of(&error, config))
}

pub(super) fn problems_of(error: &PlacedError, config: &LoadConfig) -> Vec<Problem> {
    match error {
        PlacedError::Map { faults } => {
            faults.iter().map(|fault| Problem::new(Code::DeviceMap, fault.to_string()).at(FLAG)).collect()
        }
        PlacedError::NoDevice { device, source } => vec![no_device(*device, source)],
        PlacedError::DeviceTooSmall { .. } => {
            vec![Problem::new(Code::CannotBeMet, error.to_string()).at(FLAG)]
        }
        PlacedError::Load { source, .. } | PlacedError::Checkpoint(source) => {
            vec![library_errors::load(source, config.layers_path())]
        }
        other => vec![Problem::new(Code::LoadFailed, library_errors::chain(other))],
    }
}

/// The plan as a report has it: that of the first tier, with the sums of all.
fn derived_of_all(
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
    let shares = plan.steps().iter().map(|step| planned_share(step.tier, &step.plan));
    Ok(Plan {
        host_bytes: plan.budgeted_bytes(),
        resident_bytes: Some(sum(&|plan| plan.memory().resident_bytes())),
        resident_host_bytes: Some(plan.resident_host_bytes()),
        tensor_bytes: plan.tensor_bytes(),
        reads: sum(&|plan| to_u64(plan.reads().len())),
        read_bytes: plan.read_bytes(),
        over_read_bytes: sum(&LoadPlan::over_read_bytes),
        jumps: sum(&LoadPlan::jumps),
        places: shares.chain(on_disk(plan)).collect(),
        ..derived(checkpoint, &first.plan, config, budgets)
    })
}

pub(super) fn planned_share(tier: Tier, plan: &LoadPlan) -> PlaceShare {
    PlaceShare {
        tier: tier_name(tier),
        layers: to_u64(plan.layers().len()),
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
        layers: to_u64(disk.layers.len()),
        tensor_bytes: disk.tensor_bytes,
        ..PlaceShare::default()
    })
}

/// Refuses host layers that the machine cannot hold: the kernel would kill the load halfway.
fn fits_the_host(plan: &Plan) -> Result<(), Problem> {
    let resident_bytes = plan.resident_host_bytes.unwrap_or(0);
    match shortage(resident_bytes.saturating_add(plan.host_bytes)) {
        Some(shortage) if resident_bytes > 0 => {
            let message = format!("the layers on the host need {shortage}");
            Err(Problem::new(Code::CannotBeMet, message).at(FLAG).help("put more on GPUs or on the disk"))
        }
        _ => Ok(()),
    }
}
