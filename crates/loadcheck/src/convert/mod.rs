//! What `loadcheck convert` and `loadcheck verify` need beside the library: patterns and rule files
//! read from the command line, the source described before it is converted, a time estimated from a
//! short measurement, errors put into words.
//!
//! The conversion itself is the library's; the commands are in [`crate::commands`].

pub(crate) mod beside;
pub(crate) mod estimate;
pub(crate) mod meter;
pub(crate) mod observer;
pub(crate) mod options;
pub(crate) mod patterns;
pub(crate) mod rules;
pub(crate) mod summary;
pub(crate) mod survey;
pub(crate) mod translate;
