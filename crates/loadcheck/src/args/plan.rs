//! The flags of `plan`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::{LoadArgs, OutputArgs, PassesArgs, RankArgs};
use crate::sizes::Size;

pub(super) const PLAN_ABOUT: &str = "Predicts what a load costs, from the headers; reads no weights\n\n\
    Every number is derived, none is measured, and the output says so. With --vram, --host, --context or --device-map also: \
    which layer fits on which GPU, on the host and on the disk, from headers and config.json.\n\n\
    Examples:\n  loadcheck plan ./model --budget 64MiB\n  loadcheck plan ./model --json | jq .plan.memory\n  \
    loadcheck plan ./model --vram 24GiB,24GiB --host 32GiB --context 8192 --batch 4\n  \
    loadcheck plan ./model --vram 8GiB --export-device-map map.json   # for accelerate's device_map\n  \
    loadcheck plan ./model --vram 8GiB --device-map map.json          # after editing: is it right?";

/// `loadcheck plan`
#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    pub(crate) load: LoadArgs,
    #[command(flatten)]
    pub(crate) ranks: RankArgs,
    #[command(flatten)]
    pub(crate) passes: PassesArgs,
    #[command(flatten)]
    pub(crate) place: PlaceArgs,
    /// Memory that the load has to fit in
    ///
    /// Exit code 1 if the prediction is more. Without it, the prediction is held against the memory
    /// that is free here, in the control group that loadcheck runs in, and the exit code is 0.
    #[arg(long, value_name = "SIZE", alias = "max-host", help_heading = MAX_HEADING)]
    pub(crate) max_memory: Option<Size>,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// The section of limits.
const MAX_HEADING: &str = "Limits (exit code 1 when exceeded)";

pub(super) const FITS_ABOUT: &str = "Says whether a load of SOURCE fits in LIMIT, from the headers; reads no weights\n\n\
    Exit code 0: it fits. Exit code 1: it does not; the shortfall is named, and flags with which it would fit. What is \
    counted is unreclaimable memory: the budget, the layers that stay on the host, and the program. All layers stay unless \
    --window says otherwise. The number is derived, an upper bound; `loadcheck run` measures, `loadcheck fit` tries real limits.\n\n\
    Examples:\n  loadcheck fits ./model 8GB\n  loadcheck fits ./model 8GB --window 1\n  \
    loadcheck fits ./model                      # in the memory that is free here\n  \
    loadcheck fits ./model 8GB -q || exit 1     # in a script";

/// `loadcheck fits`
#[derive(Debug, Args)]
pub(crate) struct FitsArgs {
    #[command(flatten)]
    pub(crate) load: LoadArgs,
    /// Memory, such as 8GB [default: what is free here]
    #[arg(index = 2, value_name = "LIMIT", help_heading = None::<&str>)]
    pub(crate) limit: Option<Size>,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// What fits where.
#[derive(Debug, Args)]
#[command(next_help_heading = "Placement")]
pub(crate) struct PlaceArgs {
    /// Memory that layers may use on each GPU
    ///
    /// In the order of the GPUs. What the driver keeps for itself is not in it.
    #[arg(long, value_name = "SIZE,...", value_delimiter = ',')]
    pub(crate) vram: Vec<Size>,
    /// Host memory for what no GPU holds [default: no limit]
    ///
    /// What is left goes to the disk. The staging of a load (--budget) is part of it. Per cent are
    /// of the memory limit.
    #[arg(long, value_name = "SIZE")]
    pub(crate) host: Option<Size>,
    /// Tokens of a sequence to keep room for
    ///
    /// Prompt and answer together. Without it, no room is kept for caches and intermediate results.
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) context: Option<u64>,
    /// Sequences at once
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) batch: u64,
    /// Type of the cache: bf16, f16, f32, fp8
    #[arg(
        long,
        value_name = "DTYPE",
        default_value = "bf16",
        hide_possible_values = true,
        hide_short_help = true
    )]
    pub(crate) kv_dtype: CacheDtype,
    /// Check this map instead of finding one
    ///
    /// A JSON object of modules and places, as accelerate's device_map: every tensor once, no layer
    /// split, limits kept.
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub(crate) device_map: Option<PathBuf>,
    /// Write the map as JSON for accelerate
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub(crate) export_device_map: Option<PathBuf>,
}

impl PlaceArgs {
    /// True if it was asked what fits where.
    pub(crate) fn is_asked(&self) -> bool {
        let is_named = self.device_map.is_some() || self.export_device_map.is_some();
        is_named || !self.vram.is_empty() || self.host.is_some() || self.context.is_some()
    }
}

/// How caches are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum CacheDtype {
    /// Two bytes.
    Bf16,
    /// Two bytes.
    F16,
    /// Four bytes.
    F32,
    /// One byte.
    Fp8,
}
