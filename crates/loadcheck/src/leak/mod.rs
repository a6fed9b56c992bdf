//! Whether memory grows from cycle to cycle: what is measured, and what follows from it.
//!
//! ```text
//! held (bytes of each kind after a cycle) -> slope (robust, with its confidence) -> verdict -> report
//! ```

mod family;
mod held;
mod remains;
mod slope;
mod verdict;

pub(crate) use held::{CyclePoint, Held};
pub(crate) use remains::{Remains, settle_vram};
pub(crate) use slope::CONFIDENCE;
pub(crate) use verdict::{Stated, gaps_of, limits_of, slopes_of, stated};
