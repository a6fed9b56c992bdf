//! Pictures of a load: where they go, and saved reports that are rendered again.

use std::path::PathBuf;

use clap::Args;

use super::OutputArgs;

/// First line of the help of `report`, what it renders, and its examples.
pub(super) const REPORT_ABOUT: &str =
    "Renders a saved report, or compares two; loads nothing

Takes the reports of every command but `plan` and `inspect`, whose layers are read from headers again faster than from a \
report. A picture (.html, .svg) needs a report of `run`, `compare` or `exec` that was saved with -o or --export-json, or made \
with --timeline: others hold no curve. Exit code 0 if it could be rendered, whatever the report says.

Two reports of `run`, `exec` or `compare`: the peaks, time, rate and settings of both, and what changed in one sentence. A \
picture lays their lines of unreclaimable memory over each other.

Examples:
  loadcheck ./model -o r.json
  loadcheck report r.json -o r.html
  loadcheck report r.json -o r.svg
  loadcheck report r.json -o r.md
  loadcheck report before.json after.json
  loadcheck report before.json after.json -o both.html";

/// Pictures of memory over time.
#[derive(Debug, Args)]
#[command(next_help_heading = "Output")]
pub(crate) struct PictureArgs {
    /// Also draw memory over time, on a page that needs no network
    ///
    /// The answer in one sentence, memory by kind, the layers as bands and as a table, the peaks, the
    /// limits: one file below 512 KiB. A small script in it adds a crosshair and sorts the table; the
    /// page reads without it. Keeps samples as --timeline does, every 5 ms unless that says
    /// otherwise.
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub(crate) export_html: Option<PathBuf>,
    /// Also draw memory over time, as a picture
    ///
    /// The drawing of --export-html alone, for a page or a pull request.
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub(crate) export_svg: Option<PathBuf>,
}

/// `loadcheck report`
#[derive(Debug, Args)]
pub(crate) struct ReportArgs {
    /// A report, as --json or --export-json writes it
    #[arg(value_name = "REPORT.json")]
    pub(crate) file: PathBuf,
    /// A later one of the same command: says what changed
    #[arg(value_name = "LATER.json")]
    pub(crate) later: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}
