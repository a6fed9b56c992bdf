//! A load happens in a fresh process, so that what it costs is not mixed with what its parent held
//! before.
//!
//! ```text
//! parent  -- Job, one JSON object, stdin -->  worker
//! parent  <-- Message, one JSON object a line, stdout --  worker
//! ```
//!
//! The worker is this program again, started through `/proc/self/exe` with a hidden first argument.
//! It measures itself and prints nothing for people; it dies with its parent. The parent renders,
//! judges and writes.

mod cache;
mod child;
mod cycles;
mod deliveries;
mod device;
mod failure;
mod loaded;
mod measure;
mod measure_simple;
mod measure_tiers;
mod monitor;
mod parent;
mod preparation;
mod prepare;
mod protocol;
mod tiers;
mod tracker;
mod verify;
mod vram;

pub(crate) use cache::NOT_AS_ASKED;
pub(crate) use child::{ARGUMENT, main};
pub(crate) use parent::{Ending, carry_out};
pub(crate) use preparation::{Stop, ask_to_prepare};
pub(crate) use prepare::{can_be_used, decide_for_plan};
pub(crate) use protocol::{Checked, Crossing, CycleLoad, Finished, MeasureTask, Message, Task, Watch};
