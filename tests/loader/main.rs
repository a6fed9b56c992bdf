//! The library as its users call it: checkpoints, layers, plans, loads.
#![allow(clippy::unwrap_used, clippy::as_conversions, reason = "a test that cannot go on panics")]
#![allow(clippy::duplicate_mod, reason = "the fuzz targets, which are a library elsewhere, bring their own")]

mod checkpoint_hostile;
mod checkpoint_legal;
mod checkpoint_limits;
mod checkpoint_million;
mod checkpoint_oracle;
mod checkpoint_sets;
#[allow(dead_code, unreachable_pub, reason = "a program elsewhere")]
#[path = "../../examples/describe.rs"]
mod describe;
mod examples;
#[cfg(feature = "convert")]
mod fuzz_corpus;
#[path = "../support/gguf_corpus.rs"]
mod gguf_corpus;
mod gguf_hostile;
mod gguf_load;
#[path = "../support/header_structure.rs"]
mod header_structure;
mod layers_golden;
mod layers_hostile;
mod layers_inventories;
mod layers_map;
mod layers_rule;
mod load_bytes;
mod load_changes;
mod load_faults;
mod load_queued;
mod load_stress;
mod load_waits;
#[path = "../support/oracle.rs"]
mod oracle;
mod passes;
#[path = "../support/plan_arena.rs"]
mod plan_arena;
#[path = "../support/plan_check.rs"]
mod plan_check;
mod plan_golden;
mod plan_landing;
mod plan_properties;
mod public_api;
mod public_types;
#[cfg(feature = "convert")]
mod quantise;
mod ranks;
#[path = "../../examples/inventories/read.rs"]
mod read;
mod read_order;
mod residency;
#[path = "../../examples/inventories/score.rs"]
mod score;
mod source_checkpoint;
mod tensors;
#[path = "../support/torch_corpus/mod.rs"]
mod torch_corpus;
mod torch_files;
mod torch_hostile;
mod torch_million;
