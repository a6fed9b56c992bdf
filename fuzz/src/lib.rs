//! The checks of fuzz inputs: each target has a function `check`, which panics if a promise is
//! broken.
//!
//! The targets in `fuzz_targets` call them with coverage-guided inputs.
//! `tests/loader/fuzz_corpus.rs` calls them in ordinary tests, with the committed inputs and
//! mutations of them. The oracles are those of the tests.

#![allow(unreachable_pub, reason = "a library here, a module of a test there")]

#[path = "../../tests/support/header_structure.rs"]
mod header_structure;
#[path = "../../tests/support/oracle.rs"]
mod oracle;
#[path = "../../tests/support/plan_arena.rs"]
mod plan_arena;
#[path = "../../tests/support/plan_check.rs"]
mod plan_check;

pub mod device_map;
pub mod gguf;
pub mod header;
pub mod index;
pub mod layer_map;
pub mod layers;
pub mod manifest;
mod memory;
pub mod plan;
mod scratch;
pub mod structure;
pub mod torch;

/// A target: its name and its check.
pub type Target = (&'static str, fn(&[u8]));

/// All targets, by the names of their corpora.
pub const TARGETS: [Target; 10] = [
    ("device_map", device_map::check),
    ("gguf", gguf::check),
    ("header", header::check),
    ("header_structure", structure::check),
    ("index", index::check),
    ("layer_map", layer_map::check),
    ("layers", layers::check),
    ("manifest", manifest::check),
    ("plan", plan::check),
    ("torch", torch::check),
];
