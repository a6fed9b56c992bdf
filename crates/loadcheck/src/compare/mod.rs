//! The parts of `loadcheck compare`: the order of its runs, their summary, and notes on it. And of
//! `loadcheck report a.json b.json`: what changed.
//!
//! ```text
//! -s, --cmd -> entries (one row each) -> order of a round -> runs (commands/compare.rs) -> summary -> report
//! ```
//!
//! Nothing here starts a process or prints.

mod changes;
mod notes;
mod summary;

pub(crate) use self::changes::changes;
pub(crate) use self::notes::{Facts, add_notes, cpu_note};
pub(crate) use self::summary::{order, summarise};
