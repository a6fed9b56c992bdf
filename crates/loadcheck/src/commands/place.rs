//! `loadcheck plan --vram …`: which layer fits where, into the report. A device map comes from a
//! file, or goes to one.

use std::path::{Path, PathBuf};

use onelayer::{Checkpoint, Layers};
use onelayer_fit::{
    CacheType, Demand, DeviceMap, FitError, FitPlan, Limits, ModelConfig, Precision, Tier, Weights, Workload,
};

use crate::args::{CacheDtype, PlaceArgs};
use crate::config::LoadConfig;
use crate::inputs::{config_beside, context_of, device_map, tier_name};
use crate::output::Output;
use crate::problem::{Code, Problem};
use crate::report::{LargestFit, PlacedLayer, Placement, PrecisionNeed, Report, TiedPair, TierShare};

/// The flags, with the headers.
struct Asked<'a> {
    args: &'a PlaceArgs,
    checkpoint: &'a Checkpoint,
    layers: &'a Layers,
    config: Option<(PathBuf, ModelConfig)>,
    weights: Weights,
    limits: Limits,
    workload: Workload,
}

/// Puts into the report what fits where, and writes the map if that is asked for.
pub(crate) fn place(
    args: &PlaceArgs,
    load: &LoadConfig,
    (checkpoint, layers): (&Checkpoint, &Layers),
    output: &Output,
    report: &mut Report,
) -> Result<(), Vec<Problem>> {
    let one = |problem| vec![problem];
    if load.select.is_some() || load.ranks.tp.is_some() {
        let message = "placement is planned for whole checkpoints: leave out --select and --tp";
        return Err(vec![Problem::new(Code::Usage, message)]);
    }
    if load.quantise_only.is_some() {
        let message = "placement is planned with the default rule for quantising: leave out --quantise-only";
        return Err(vec![Problem::new(Code::Usage, message)]);
    }
    let asked = Asked::new(args, load, checkpoint, layers).map_err(one)?;
    let config = asked.config.as_ref().map(|(_, config)| config);
    let demand = Demand::of(checkpoint, layers, config, asked.weights);
    let plan = match &args.device_map {
        Some(path) => asked.check(&demand, path)?,
        None => demand.place(&asked.limits, &asked.workload).map_err(|error| one(problem(&error)))?,
    };
    let map = DeviceMap::of(&plan, &demand, checkpoint, layers);
    report.placement = Some(asked.placement(&demand, &plan));
    asked.note(&demand, report);
    if let Some(path) = &args.export_device_map {
        output.write_beside(path, &map.to_json()).map_err(one)?;
    }
    Ok(())
}

impl<'a> Asked<'a> {
    fn new(
        args: &'a PlaceArgs,
        load: &LoadConfig,
        checkpoint: &'a Checkpoint,
        layers: &'a Layers,
    ) -> Result<Self, Problem> {
        let context = context_of(checkpoint, layers);
        let on_device = context.of_device();
        let device_bytes = args.vram.iter().map(|size| on_device.resolve("--vram", *size));
        let limits = Limits {
            device_bytes: device_bytes.collect::<Result<_, _>>()?,
            host_bytes: args.host.map(|size| context.resolve("--host", size)).transpose()?,
            staging_bytes: load.budgets(&context)?.host_bytes,
        };
        let cache_type = match args.kv_dtype {
            CacheDtype::Bf16 | CacheDtype::F16 => CacheType::Half,
            CacheDtype::F32 => CacheType::F32,
            CacheDtype::Fp8 => CacheType::Fp8,
        };
        Ok(Self {
            args,
            checkpoint,
            layers,
            config: config_beside(&load.path.0)?,
            weights: weights_of(load),
            limits,
            workload: Workload { context_tokens: args.context.unwrap_or(0), batch: args.batch, cache_type },
        })
    }

    /// The plan that a map stands for.
    fn check(&self, demand: &Demand, path: &Path) -> Result<FitPlan, Vec<Problem>> {
        let at = |problem: Problem| problem.at(path.display().to_string());
        let map = device_map(path).map_err(|problem| vec![problem])?;
        let checked = demand.check(&map, self.checkpoint, self.layers, &self.limits, &self.workload);
        checked.map_err(|errors| errors.iter().map(|error| at(problem(error))).collect())
    }

    fn placement(&self, demand: &Demand, plan: &FitPlan) -> Placement {
        let workload = &self.workload;
        let ties = demand.ties.iter().map(|tie| TiedPair {
            owner: self.checkpoint.tensor(tie.owner).name.to_owned(),
            alias: self.checkpoint.tensor(tie.alias).name.to_owned(),
        });
        Placement {
            source: "derived".to_owned(),
            origin: if self.args.device_map.is_some() { "given" } else { "found" }.to_owned(),
            context_tokens: workload.context_tokens,
            batch: workload.batch,
            cache_element_bytes: workload.cache_type.bytes(),
            config: self.config.as_ref().map(|(path, _)| path.display().to_string()),
            model_type: self.config.as_ref().and_then(|(_, config)| config.model_type()).map(str::to_owned),
            model_context_tokens: demand.context_max,
            weight_bytes: demand.weight_bytes(),
            cache_bytes: demand.cache.bytes(workload),
            cache_unknown: match &demand.cache {
                onelayer_fit::CacheModel::Unknown { why } => Some(why.clone()),
                _ => None,
            },
            activation_estimate_bytes: demand.activation.map(|activation| activation.bytes(workload)),
            computes_on: tier_name(plan.executor),
            tiers: plan.uses.iter().map(tier_share).collect(),
            layers: placed_layers(demand, plan, workload),
            ties: ties.collect(),
            largest: LargestFit {
                context_tokens_on_gpus: demand.largest_context(&self.limits, workload, true),
                context_tokens: demand.largest_context(&self.limits, workload, false),
                batch_on_gpus: demand.largest_batch(&self.limits, workload, true),
                batch: demand.largest_batch(&self.limits, workload, false),
            },
            precisions: Precision::ALL.iter().map(|precision| self.precision(*precision)).collect(),
        }
    }

    fn precision(&self, precision: Precision) -> PrecisionNeed {
        let config = self.config.as_ref().map(|(_, config)| config);
        let demand = Demand::of(self.checkpoint, self.layers, config, Weights::Derived(precision));
        let plan = demand.place(&self.limits, &self.workload);
        PrecisionNeed {
            precision: precision.name().to_owned(),
            weight_bytes: demand.weight_bytes(),
            on_gpus: plan.is_ok_and(|plan| plan.is_all_on_devices()),
            context_tokens_on_gpus: demand.largest_context(&self.limits, &self.workload, true),
        }
    }

    /// Notes gaps in the estimate, and decisions that nobody asked for.
    fn note(&self, demand: &Demand, report: &mut Report) {
        if let onelayer_fit::CacheModel::Unknown { why } = &demand.cache {
            report.note(format!("no room is kept for the cache of a context: {why}"));
        } else if self.args.context.is_none() {
            report.note("no room is kept for a context: --context says how long it is to be".to_owned());
        }
        if demand.activation.is_none() && self.args.context.is_some() {
            report.note(
                "no room is kept for intermediate results: config.json does not tell the widths".to_owned(),
            );
        }
        for tie in &demand.ties {
            let [owner, alias] = [tie.owner, tie.alias].map(|tensor| self.checkpoint.tensor(tensor).name);
            report.note(format!("`{alias}` is not counted: config.json says that it is `{owner}`"));
        }
    }
}

/// As the load would deliver them.
fn weights_of(load: &LoadConfig) -> Weights {
    let dtype = load.dtype;
    match (load.quantise, dtype) {
        (Some(form), dtype) => Weights::Quantised { to: form.0, dtype },
        (None, Some(dtype)) => Weights::Narrowed(dtype),
        (None, None) => Weights::AsStored,
    }
}

fn problem(error: &FitError) -> Problem {
    if error.is_bad_map() {
        return Problem::new(Code::DeviceMap, error.to_string());
    }
    let help =
        "a shorter --context, a smaller --batch, --kv-dtype fp8, --dtype bf16 or --quantise int8 takes less";
    Problem::new(Code::CannotBeMet, error.to_string()).help(help)
}

fn tier_share(share: &onelayer_fit::TierUse) -> TierShare {
    TierShare {
        tier: tier_name(share.tier),
        limit_bytes: share.limit_bytes,
        layers: share.layers,
        weight_bytes: share.weight_bytes,
        cache_bytes: share.cache_bytes,
        activation_estimate_bytes: share.activation_bytes,
        landing_bytes: share.landing_bytes,
        needed_bytes: share.needed_bytes(),
        free_bytes: share.free_bytes(),
    }
}

fn placed_layers(demand: &Demand, plan: &FitPlan, workload: &Workload) -> Vec<PlacedLayer> {
    let layer = |(unit, tier): (&onelayer_fit::Unit, &Tier)| PlacedLayer {
        id: unit.id.to_string(),
        tier: tier_name(*tier),
        weight_bytes: unit.weight_bytes,
        sub_unit_bytes: unit.sub_unit_bytes,
        cache_bytes: unit.cache.map(|cache| cache.bytes(workload)),
        attention: unit.cache.map(|cache| cache.kind.name().to_owned()),
        window_tokens: unit.cache.and_then(|cache| cache.window_tokens),
    };
    demand.units.iter().zip(&plan.tiers).map(layer).collect()
}
