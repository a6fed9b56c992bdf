//! The task `Prepare`: decides on the device, reads the headers, plans, and brings the page cache
//! into the state that was asked for. No weights are read, unless the page cache is to be warmed.

use std::sync::atomic::AtomicBool;

use onelayer::checkpoint::Checkpoint;
use onelayer::units::HumanBytes;

use super::protocol::{Checked, Message, tell};
use super::{cache, device, tiers};
use crate::args::{CacheArg, Device};
use crate::config::LoadConfig;
use crate::inputs::{describe, open_checkpoint};
use crate::machine::shortage;
use crate::planned::{Planned, plan_of};
use crate::problem::{Code, Problem};

/// First the device, then the checkpoint, so that all problems come at once.
///
/// # Errors
/// Everything that can be found wrong together. Without a source, no problem if the device is
/// there.
pub(super) fn prepare(
    config: &LoadConfig,
    has_source: bool,
    cache: Option<CacheArg>,
    cancel: &AtomicBool,
) -> Result<Checked, Vec<Problem>> {
    // Between runs only the page cache is prepared: the device was decided on, and opening it takes
    // time.
    let looks_at_devices = cache.is_none();
    let (checkpoint, planned, mut notes) = match &config.device_map {
        Some(map) => tiers::prepare(config, map, has_source, looks_at_devices)?,
        None => one_device(config, has_source, looks_at_devices)?,
    };
    notes.extend(checkpoint.notes().iter().cloned());
    let cached_share = match cache {
        None | Some(CacheArg::Asis) => None,
        Some(state) => cache::bring_about(&checkpoint, state, cancel, &mut notes),
    };
    let Planned { layers, plan, context, budgets } = planned;
    let source = describe(&checkpoint, &layers);
    Ok(Checked { source, plan, budgets, context, cached_share, notes })
}

/// A load to one device.
fn one_device(
    config: &LoadConfig,
    has_source: bool,
    looks_at_device: bool,
) -> Result<(Checkpoint, Planned, Vec<String>), Vec<Problem>> {
    let asked = if looks_at_device { device::decide(config.device).map(Some) } else { Ok(None) };
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
    let prepared = open_checkpoint(&config.path.0, &config.opening)
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
    Ok((checkpoint, planned, decided.into_iter().filter_map(|decided| decided.note).collect()))
}

/// Refuses a load whose kept layers do not fit the device or the machine: the kernel would kill it
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
    match shortage(resident_bytes.saturating_add(plan.host_bytes)) {
        Some(shortage) if resident_bytes > 0 => {
            let message = format!("the layers that stay resident need {shortage}");
            Err(Problem::new(Code::CannotBeMet, message)
                .at(format!("--window {kept}"))
                .help("--window 1 keeps one layer at a time, --device none keeps nothing"))
        }
        _ => Ok(()),
    }
}

/// The device that a plan is for. `auto` is decided as for a load; any other device need not exist.
///
/// # Errors
/// A device exists and does not open.
pub(crate) fn decide_for_plan(asked: Device) -> Result<(Device, Option<u64>, Option<String>), Problem> {
    if asked != Device::Auto {
        return Ok((asked, None, None));
    }
    let decided = device::decide(asked)?;
    Ok((decided.device, decided.gpu.and_then(|gpu| gpu.memory_total_bytes), decided.note))
}

/// Whether a load to it can begin here.
pub(crate) fn can_be_used(device: Device) -> bool {
    device::decide(device).is_ok()
}
