//! The C library: opaque handles, statuses, and tensors by DLPack. `include/onelayer.h` is
//! generated from these files.
//!
//! ```text
//! status      what functions return        failure    a status with its text; panics end here
//! foreign     pointers of the caller's     sized      structures that say how long they are
//! options     what a load shall do
//! checkpoint  open, look up, read          stream     start, next layer, cancel, report
//! layer       names, tensors, streams of CUDA    read       single tensors into memory of the caller's
//! ```
//!
//! Every function that takes a pointer relies on the same promise of its caller: the pointer is
//! null, or it points to what its type says, which nobody frees meanwhile; texts end with a zero.
//! Null is answered with a status. A handle may be used on several threads at once, but freed only
//! once, and by nobody while it is used.
//!
//! No panic leaves a function: it is a status. Only functions whose names begin with `ol_` are
//! exported.
#![allow(clippy::missing_safety_doc, reason = "one promise holds for every pointer: it is stated above")]

mod foreign;
mod names;
mod sized;

// In the order of the header.
pub mod status;

pub mod failure;

pub mod options;

pub mod checkpoint;

pub mod stream;

pub mod layer;

pub mod read;
