//! Loads and conversions of the program when calls fail, files change, processes are killed and
//! memory ends.
#![allow(clippy::unwrap_used, clippy::as_conversions, reason = "a test that cannot go on panics")]

mod convert_faults;
mod convert_file_systems;
mod convert_folders;
mod convert_hostile;
mod convert_resume;
mod convert_support;
mod hostile_corpus;
mod load_interrupts;
mod load_limits;
mod load_support;
mod load_syscall_faults;
#[path = "../support/mod.rs"]
mod support;
