//! Converts a checkpoint: the reads of a load, written to one file per layer instead of to a
//! device.
//!
//! A [`Conversion`] holds the settings. [`Conversion::prepare`] opens the source, plans every file
//! and checks the target without writing anything. The [`PreparedConversion`] can be shown, and
//! run.
//!
//! The modules, each of which uses only those above it:
//!
//! ```text
//! report, error, settings       for callers: events, reports, errors, options
//! cancel                        a handle that cancels from any thread
//! hash, read_file               BLAKE3 and SHA-256 on a pool of threads; reads without the ring
//! manifest, manifest_read       the manifest: its types and how it is written; how it is read
//! target_directory, journal     files get their names once they are whole; records of runs
//! header, layout                the header of a file; which tensor goes to which file
//! output                        a device that writes layers to files
//! hash_pass, duplicates         hashes of a checkpoint's bytes; tied weights
//! side_files, source_overlap    files beside the weights; a target that overlaps the source
//! file_plan                     every file of a conversion, from headers and settings alone
//! config_file                   the configuration of a model whose types change
//! target_state                  which of these files the target has; room for a new conversion
//! verify                        compares a target with its manifest and its source
//! prepare, finish, run          a conversion that is planned; its index and manifest; its run
//! ```

mod cancel;
mod config_file;
mod duplicates;
mod error;
mod file_plan;
mod finish;
mod hash;
mod hash_pass;
mod header;
mod journal;
mod layout;
mod manifest;
mod manifest_read;
mod output;
mod prepare;
mod read_file;
mod report;
mod run;
mod settings;
mod side_files;
mod source_overlap;
mod target_directory;
mod target_state;
#[cfg(test)]
mod test_files;
mod verify;

pub use self::cancel::ConvertCancel;
pub use self::error::ConvertError;
pub use self::manifest::{MANIFEST_NAME, Manifest, ManifestFile, ManifestTensor, SideFileRecord};
pub use self::prepare::{PlannedFile, PreparedConversion};
pub use self::report::{ConvertEvent, ConvertReport, Difference, KernelCopied, VerifyReport, WriteMode};
pub use self::settings::{Casting, Conversion, Experts, Grouping, KernelCopy, Part};
pub use self::verify::Verification;
