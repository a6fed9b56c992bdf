//! Helpers of `loadcheck convert` and `loadcheck verify`: patterns and rule files from the command
//! line, a description of the source, an estimate of the time, errors as problems.
//!
//! The library does the conversion; the commands are in [`crate::commands`].

pub(crate) mod blobs;
pub(crate) mod estimate;
pub(crate) mod interruptible;
pub(crate) mod measurement;
pub(crate) mod observer;
pub(crate) mod options;
pub(crate) mod patterns;
pub(crate) mod rules;
pub(crate) mod summary;
pub(crate) mod survey;
pub(crate) mod translate;
