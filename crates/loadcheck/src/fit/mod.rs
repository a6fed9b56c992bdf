//! The parts of `loadcheck fit`: the search itself knows neither groups nor processes, and a run
//! knows nothing of the search.
//!
//! ```text
//! commands::fit -> search -> trial -> (ours | command) in a control group, watched by guard
//!               -> emit
//! ```

mod command;
mod emit;
mod guard;
mod ours;
mod search;
mod session;
mod trial;

pub(crate) use self::emit::lines as emitted_lines;
pub(crate) use self::session::{Loader, Session};
pub(crate) use self::trial::no_group;
