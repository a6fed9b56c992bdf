//! Tests of the probe against the running kernel.
#![allow(clippy::unwrap_used, clippy::as_conversions, reason = "a test that cannot go on panics")]

mod cache;
mod cgroup;
#[path = "../../../../tests/support/group.rs"]
mod group;
mod memory;
mod tree;
