//! The converter.
#![allow(clippy::unwrap_used, clippy::as_conversions, reason = "a test that cannot go on panics")]

mod at_once;
mod files;
mod layouts;
mod names;
mod round_trip;
mod verify;
