//! Estimates the memory that a model needs on each device, and assigns each layer to a tier: GPUs
//! first, then the host, then the disk.
//!
//! ```text
//! checkpoint + layers ─┐
//! config.json ─ cache ─┴─> Demand ── limits, workload ──> FitPlan ──> DeviceMap ──> PlacedLoader
//!                                                            ^─ check ─────┘
//! ```
//! Headers and `config.json` decide: every number is computed, none is measured. Numbers that the
//! configuration does not determine are reported as unknown. docs/fit-plan.md has the formulas and
//! their sources.
//!
//! A file here uses only files further down this list:
//!
//! | file | does |
//! |---|---|
//! | `placed` | loads a checkpoint by a device map |
//! | `check`, `capacity` | a device map against a model; the largest context and batch |
//! | `device_map` | device maps as JSON |
//! | `place` | a tier for each layer |
//! | `demand` | the needs of each layer |
//! | `weights`, `activation` | bytes of weights; bytes of intermediate results |
//! | `attention`, `recurrent` | the cache of each layer, by architecture |
//! | `dimensions`, `config`, `cache` | sizes in `config.json`; arithmetic of caches |
//! | `error`, `tier` | used by the files above |

pub use self::activation::Activation;
pub use self::cache::{CacheKind, CacheModel, CacheType, LayerCache, Workload};
pub(crate) use self::check::unknown_keys;
pub use self::config::ModelConfig;
pub use self::demand::{Demand, Tie, Unit};
pub use self::device_map::DeviceMap;
pub use self::error::FitError;
pub use self::place::{FitPlan, Limits, TierUse};
pub use self::placed::{
    DiskPlan, DiskTensor, PlacedError, PlacedLoader, PlacedModel, PlacedPlan, PlacedTensor, TierLoader,
    TierPlan, TierReport,
};
pub use self::tier::Tier;
pub use self::weights::{Precision, Weights};

mod activation;
mod attention;
mod cache;
mod capacity;
mod check;
mod config;
mod demand;
mod device_map;
mod dimensions;
mod error;
mod place;
mod placed;
mod recurrent;
mod tier;
mod weights;
