//! `loadcheck plan` and `loadcheck inspect`: what the headers tell. Nothing is measured, no weight
//! is read.

use std::path::PathBuf;

use crate::args::{FitsArgs, InspectArgs, LoadArgs, Next, PlaceArgs, PlanArgs};
use crate::config::LoadConfig;
use crate::inputs::{self, open_checkpoint};
use crate::listing::Listing;
use crate::output::Output;
use crate::planned::{Planned, plan_of};
use crate::problem::Problem;
use crate::report::{CommandName, Report, Verdict};
use crate::room::room;
use crate::sizes::Size;
use crate::source::{self, Resolved};
use crate::worker::{can_be_used, decide_for_plan};

use super::place::place;
use super::{Outcome, new_report};

/// Predicts.
pub(crate) fn plan(args: &PlanArgs, output: &Output) -> Outcome {
    let mut report = new_report(CommandName::Plan);
    let mut problems = output.check();
    problems.extend(args.place.export_device_map.iter().filter_map(|path| output.check_beside(path)));
    let resolved = resolved(&args.load.source, &mut problems);
    let (config, more) = LoadConfig::new(&args.load, path_of(resolved.as_ref()));
    let config = LoadConfig { ranks: args.ranks.clone(), passes: args.passes.clone(), ..config };
    problems.extend(more);
    let Some(resolved) = resolved else {
        problems.extend(config.below_floor(&problems));
        return Outcome::refused(report, problems);
    };
    let place = Some((&args.place, output)).filter(|(place, _)| place.is_asked() && problems.is_empty());
    let wanted = Wanted { place, room: Some(args.max_memory), for_smallest_budget: false };
    match describe(&config, &wanted, &mut report, &resolved) {
        Ok(()) if problems.is_empty() => {}
        Ok(()) => return Outcome::refused(report, problems),
        Err(more) => {
            problems.extend(more);
            problems.extend(config.below_floor(&problems));
            return Outcome::refused(report, problems);
        }
    }
    let next = Next { command: "run", why: "measures what is predicted here", ..Next::default() };
    held_against(report, args.max_memory.is_some(), next)
}

/// Predicts, and answers whether that fits.
pub(crate) fn fits(args: &FitsArgs, output: &Output) -> Outcome {
    let mut report = new_report(CommandName::Fits);
    let mut problems = output.check();
    let resolved = resolved(&args.load.source, &mut problems);
    let (config, more) = LoadConfig::new(&args.load, path_of(resolved.as_ref()));
    problems.extend(more);
    let wanted = Wanted { place: None, room: Some(args.limit), for_smallest_budget: false };
    if let Some(resolved) = resolved {
        problems.extend(describe(&config, &wanted, &mut report, &resolved).err().unwrap_or_default());
    }
    if !problems.is_empty() {
        problems.extend(config.below_floor(&problems));
        return Outcome::refused(report, problems);
    }
    report.layers = Listing::default();
    let places = vec![args.load.source.to_string_lossy().into_owned()];
    let next = Next { command: "run", places, why: "measures it", ..Next::default() };
    held_against(report, true, next)
}

/// What does not fit fails if that `decides`, and is not recommended to be tried. Nor is a device
/// that is not there.
fn held_against(mut report: Report, decides: bool, next: Next) -> Outcome {
    let fits = report.room.as_ref().is_none_or(|room| room.fits);
    if !fits && decides {
        report.verdict = Verdict::Fail;
    }
    let device = report.plan.as_ref().and_then(|plan| plan.params.device.parse().ok());
    let is_there = device.is_none_or(can_be_used);
    Outcome { next: (fits && is_there).then_some(next), ..Outcome::of(report) }
}

/// Describes.
pub(crate) fn inspect(args: &InspectArgs, output: &Output) -> Outcome {
    let mut report = new_report(CommandName::Inspect);
    let mut problems = output.check();
    let Some(resolved) = resolved(&args.source, &mut problems) else {
        return Outcome::refused(report, problems);
    };
    let (config, more) = LoadConfig::new(&LoadArgs::of_inspect(args), resolved.path.clone());
    problems.extend(more);
    let wanted = Wanted { place: None, room: None, for_smallest_budget: true };
    problems.extend(describe(&config, &wanted, &mut report, &resolved).err().unwrap_or_default());
    if !problems.is_empty() {
        return Outcome::refused(report, problems);
    }
    let next = Next { command: "plan", ..Next::default() };
    Outcome { next: Some(next), ..Outcome::of(report) }
}

fn resolved(given: &std::ffi::OsStr, problems: &mut Vec<Problem>) -> Option<Resolved> {
    source::resolve(given).map_err(|more| problems.extend(more)).ok()
}

fn path_of(resolved: Option<&Resolved>) -> PathBuf {
    resolved.map(|resolved| resolved.path.clone()).unwrap_or_default()
}

/// The parts of a description.
struct Wanted<'a> {
    /// Which layer fits where.
    place: Option<(&'a PlaceArgs, &'a Output)>,
    /// Whether the load fits in this limit, or else in the memory that is free.
    room: Option<Option<Size>>,
    /// The plan is for the smallest budget, not for the configured one.
    for_smallest_budget: bool,
}

/// Puts source, plan and layers into the report.
fn describe(
    config: &LoadConfig,
    wanted: &Wanted<'_>,
    report: &mut Report,
    resolved: &Resolved,
) -> Result<(), Vec<Problem>> {
    let checkpoint = open_checkpoint(&config.path.0, &config.opening)?;
    let (device, device_bytes, note) = decide_for_plan(config.device).map_err(|problem| vec![problem])?;
    let config = LoadConfig { device, ..config.clone() };
    let Planned { mut layers, mut plan, context, .. } = plan_of(&checkpoint, &config, device_bytes)?;
    if let Some(smallest_bytes) = plan.smallest_budget_bytes.filter(|_| wanted.for_smallest_budget) {
        let smallest = LoadConfig { budget: Size::Bytes(smallest_bytes), ..config.clone() };
        // A million tensors take their time, but never two groupings at once.
        drop(layers);
        Planned { layers, plan, .. } = plan_of(&checkpoint, &smallest, device_bytes)?;
    }
    let mut source = inputs::describe(&checkpoint, &layers);
    source.given = resolved.given.clone();
    source.resolved = Some(resolved.path.display().to_string());
    source.revision = resolved.revision.clone();
    if let Some(stated) = wanted.room {
        let stated = stated.map(|size| context.resolve("--max-memory", size)).transpose();
        report.room = room(&checkpoint, &config, &plan, stated.map_err(|problem| vec![problem])?);
    }
    report.source = Some(source);
    report.plan = Some(plan);
    report.notes = note.into_iter().chain(checkpoint.notes().iter().cloned()).collect();
    if let Some((args, output)) = wanted.place {
        place(args, &config, (&checkpoint, &layers), output, report)?;
    }
    report.layers = Listing::new(&checkpoint, layers);
    Ok(())
}
