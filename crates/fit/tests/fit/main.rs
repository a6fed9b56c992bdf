//! Fits and loads by device maps.
#![allow(clippy::unwrap_used, clippy::as_conversions, reason = "a test that cannot go on panics")]

mod inventories;
mod placed;
#[path = "../../../../examples/inventories/read.rs"]
#[allow(dead_code, reason = "shared with examples and other tests, which use the rest")]
mod read;
