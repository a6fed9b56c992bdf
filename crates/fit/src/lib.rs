//! What a model needs on each device, and a place for each of its layers: GPUs first, then the
//! host, then the disk.
//!
//! ```text
//! checkpoint + layers ─┐
//! config.json ─ cache ─┴─> Demand ── limits, workload ──> FitPlan ──> DeviceMap (JSON)
//!                                                            ^─ check ─────┘
//! ```
//! Headers and `config.json` are all that is looked at: every number is derived, none is measured.
//! What the configuration does not tell is said to be unknown; docs/fit-plan.md has the formulas
//! and where they come from.

pub use self::activation::Activation;
pub use self::cache::{CacheKind, CacheModel, CacheType, LayerCache, Workload};
pub(crate) use self::check::unknown_keys;
pub use self::config::ModelConfig;
pub use self::demand::{Demand, Tie, Unit};
pub use self::device_map::DeviceMap;
pub use self::error::FitError;
pub use self::place::{FitPlan, Limits, Tier, TierUse};
pub use self::placed::{
    DiskPlan, DiskTensor, PlacedError, PlacedLoader, PlacedModel, PlacedPlan, PlacedTensor, TierLoader,
    TierPlan, TierReport,
};
pub use self::weights::{Precision, Weights};

mod activation;
mod attention;
mod cache;
mod capacity;
mod check;
mod config;
mod demand;
mod device_map;
mod error;
mod place;
mod placed;
mod recurrent;
mod weights;
