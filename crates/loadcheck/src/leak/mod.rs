//! Does memory grow from cycle to cycle? Measured memory, slopes, and the verdict.
//!
//! ```text
//! held (bytes of each kind after a cycle) -> slope (robust, with its confidence) -> verdict -> report
//! ```

mod held;
mod remaining;
mod verdict;

pub(crate) use held::{CyclePoint, Held};
pub(crate) use remaining::{RemainingMemory, settle_vram};
pub(crate) use verdict::{Stated, gaps_of, limits_of, slopes_of, stated};
