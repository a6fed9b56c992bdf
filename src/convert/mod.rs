//! The same reads as a load, written to per-layer files instead of a device.
//!
//! A [`Conversion`] holds the settings. [`Conversion::prepare`] opens the source, decides which
//! tensor goes to which file and checks the target without writing anything; the
//! [`PreparedConversion`] can be shown, and run.

mod clearing;
mod digest;
mod duplicates;
mod ending;
mod error;
mod event;
mod files;
#[cfg(test)]
mod for_tests;
mod header;
mod journal;
mod manifest;
mod manifest_reader;
mod manifest_writer;
mod output;
mod pieces;
mod prepared;
mod reading;
mod report;
mod run;
mod scope;
mod settings;
mod side_files;
mod source_guard;
mod target;
mod verify;

pub use self::error::ConvertError;
pub use self::event::ConvertEvent;
pub use self::manifest::{MANIFEST_NAME, Manifest, ManifestFile, ManifestTensor, SideFileRecord};
pub use self::prepared::{ConvertCancel, PlannedFile, PreparedConversion};
pub use self::report::{ConvertReport, KernelCopied, WriteMode};
pub use self::settings::{Casting, Conversion, Experts, Grouping, KernelCopy, Part};
pub use self::verify::{Difference, Verification, VerifyReport};
