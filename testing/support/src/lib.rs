//! What the tests of all packages share. It depends on none of them, so that a change in one does
//! not rebuild the tests of the others.

mod skipped;

pub use skipped::{skipped, skipped_by_child};
