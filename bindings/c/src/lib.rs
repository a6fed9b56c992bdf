//! The C library: opaque handles, statuses, and tensors by DLPack. `include/onelayer.h` is
//! generated from these files.
//!
//! ```text
//! status      return values of functions   failure    a status with its text; catches panics
//! foreign     pointers of the caller       sized      structures with a size field
//! options     options of a load
//! checkpoint  open, look up                stream     start, next layer, cancel, report
//! layer       names, tensors, CUDA streams read       single tensors into memory of the caller
//! ```
//!
//! Every function with pointers relies on one promise of its caller: each pointer is null, or
//! points to a valid value of its type that is not freed during the call, and strings end with NUL.
//! A null pointer returns a status. A handle may be used on several threads at once, but must be
//! freed only once and not while it is used.
//!
//! A panic becomes a status. Only functions whose names begin with `ol_` are exported.
#![allow(clippy::missing_safety_doc, reason = "one promise, stated above, covers every pointer")]

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
