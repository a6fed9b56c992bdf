//! The converter.
#![allow(clippy::unwrap_used, clippy::as_conversions, reason = "a test that cannot go on panics")]

mod at_once;
mod files;
mod layouts;
mod round_trip;
mod verify;
