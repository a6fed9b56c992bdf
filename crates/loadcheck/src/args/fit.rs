//! The flags of `fit` and `doctor`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::{CacheArg, ExportArgs, LoadArgs, OutputArgs};
use crate::sizes::Size;

pub(super) const FIT_ABOUT: &str = "Finds the smallest memory limit under which a load really works\n\n\
    The load is run again and again, each time in a fresh process inside a control group with another limit. Being killed \
    by that limit is a result; any other failure ends the search (exit code 5). Exit code 1: no limit of the range works. Exit \
    code 4: no control group can be made here; the message says how to get one.\n\n\
    Examples:\n  \
      loadcheck fit ./model --window 1 --budget 64MiB\n  \
      loadcheck fit ./model --emit k8s > resources.yaml\n  \
      docker run $(loadcheck fit ./model --emit docker) ...\n  \
      loadcheck fit ./model --cmd 'python load.py {strategy} {source}' -s load_file -s copy --lo 400Mi --hi 2Gi";

pub(super) const DOCTOR_ABOUT: &str = "Shows what can be measured and used here, and how to enable the rest\n\n\
    Everything is tried, not only looked up: a control group is made, a file is read past the page cache, a ring of io_uring is \
    set up, a huge page is touched. What is missing is no failure: the exit code is 0.\n\n\
    Examples:\n  loadcheck doctor\n  loadcheck doctor ./model\n  loadcheck doctor --json | jq '.doctor[] | select(.state != \"ok\")'";

/// `loadcheck fit`
#[derive(Debug, Args)]
pub(crate) struct FitArgs {
    #[command(flatten)]
    pub(crate) load: LoadArgs,
    /// Another loader: a command, {source} in it
    ///
    /// Split into words as a shell would, and run without one. With {strategy} in it, it is run for
    /// each -s NAME, which is put there. May be repeated.
    #[arg(long, value_name = "COMMAND", help_heading = "Search")]
    pub(crate) cmd: Vec<String>,
    /// Strategy: stream, mmap, read, pread or direct
    ///
    /// stream is this program's loader, the others do what common loaders do. If --cmd contains
    /// {strategy}, NAME is any text and replaces it. May be repeated. [default: stream]
    #[arg(short, long = "strategy", value_name = "NAME", help_heading = "Search")]
    pub(crate) strategies: Vec<String>,
    /// Smallest limit to try
    ///
    /// [default: half the host memory that it takes without a limit; less if that works]
    #[arg(long, value_name = "SIZE", help_heading = "Search")]
    pub(crate) lo: Option<Size>,
    /// Largest limit to try
    ///
    /// [default: a little more than it takes without a limit, page cache included; more if that
    /// does not work]
    #[arg(long, value_name = "SIZE", help_heading = "Search")]
    pub(crate) hi: Option<Size>,
    /// How far off the answer may be
    ///
    /// A percentage of the answer (at least 4 MiB), or a size.
    #[arg(long, value_name = "SIZE", default_value = "5%", help_heading = "Search")]
    pub(crate) precision: Size,
    /// Runs that must work at the answer
    ///
    /// The same number of runs is made without a limit, for comparison.
    #[arg(short, long, value_name = "N", default_value_t = 3, help_heading = "Search",
          value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) runs: u32,
    /// Stop runs N times slower than without a limit
    ///
    /// A run may always take 5 s more. A limit under which a run is stopped counts as too small.
    #[arg(long, value_name = "N", default_value_t = 10, help_heading = "Search", hide_short_help = true,
          value_parser = clap::value_parser!(u32).range(2..=10_000))]
    pub(crate) max_slowdown: u32,
    /// Page cache before a run: cold, warm, asis
    ///
    /// Cached pages are charged to the group that read them first. With `cold`, what the load reads
    /// is charged to the limit that is tried, as in a container; with the others, some of it
    /// may not be.
    #[arg(
        long,
        value_name = "STATE",
        default_value = "cold",
        help_heading = "Search",
        hide_possible_values = true
    )]
    pub(crate) cache: CacheArg,
    /// Print the limit for k8s, docker, systemd or args
    ///
    /// On stdout, and nothing else; what was tried goes to stderr.
    #[arg(long, value_name = "FOR", help_heading = "Output", hide_possible_values = true)]
    pub(crate) emit: Option<EmitArg>,
    /// Percentage that --emit adds
    #[arg(long, value_name = "PERCENT", default_value = "25%", value_parser = parse_percent, help_heading = "Output")]
    pub(crate) headroom: u64,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
    #[command(flatten)]
    pub(crate) export: ExportArgs,
}

/// `--emit`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum EmitArg {
    /// the resources of a container
    K8s,
    /// flags of docker run
    Docker,
    /// lines of a unit's service section
    Systemd,
    /// flags of loadcheck itself
    Args,
}

/// `loadcheck doctor`
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// A checkpoint, or a folder to put one in
    ///
    /// Direct I/O and the page cache are tried there. [default: the current folder]
    pub(crate) path: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// `25%`, `25`.
fn parse_percent(text: &str) -> Result<u64, String> {
    let number = text.strip_suffix('%').unwrap_or(text).trim_end();
    let is_number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    let percent = number.parse().ok().filter(|percent| is_number && *percent <= 1000);
    percent.ok_or_else(|| "write a whole number of per cent, such as 25%; at most 1000%".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentages() {
        assert_eq!(
            (parse_percent("25%"), parse_percent("0"), parse_percent("100 %")),
            (Ok(25), Ok(0), Ok(100))
        );
        for text in ["", "%", "-1%", "+1%", "1.5%", "1001%", "x"] {
            assert!(parse_percent(text).is_err(), "{text}");
        }
    }
}
