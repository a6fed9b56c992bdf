//! The program as its users call it.
#![allow(clippy::unwrap_used, clippy::as_conversions, reason = "a test that cannot go on panics")]

mod compare;
mod convert;
mod convert_read_by_others;
mod convert_ready_files;
mod cuda;
mod device;
mod doctor;
mod door;
mod exec;
mod exit_codes;
mod fit;
mod formats;
#[path = "../../../../tests/support/gguf_corpus.rs"]
mod gguf_corpus;
mod gpu_check;
mod hints;
mod leak;
mod manual;
mod output;
mod passes;
mod peers;
mod place;
mod places;
mod ranks;
mod sources;
#[path = "../support/mod.rs"]
mod support;
mod synth;
mod timeline;
#[path = "../../../../tests/support/torch_corpus/mod.rs"]
mod torch_corpus;
mod transformers;
mod verify;
mod worker;
