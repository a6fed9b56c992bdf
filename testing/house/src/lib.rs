//! Looks at the sources of a workspace, parsed: lines of code, files that import each other, the
//! order of packages and stages, public items, unsafe code, widths of lines.
//!
//! ```text
//! folder ─> tree: packages, files, modules ─> lines    code, longest functions
//!                                          ├> imports  which file uses which; circles
//!                                          └> public   the public items of a library
//! text: widths of lines; links: links and headings of Markdown
//! ```
//! `cargo run -p house` prints the table of sizes, `-- FOLDER` that of another checkout.
#![allow(clippy::unwrap_used, reason = "a check that cannot read the sources has to stop")]
#![allow(clippy::missing_panics_doc, reason = "as above")]

pub mod imports;
pub mod lines;
pub mod links;
pub mod public;
pub mod text;
pub mod tree;

use std::path::Path;

/// The top of this repository.
#[must_use]
pub fn repository() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}
