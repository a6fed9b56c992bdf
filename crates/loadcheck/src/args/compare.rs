//! The command line of `compare`.

use clap::Args;

use super::{CacheArg, ExportArgs, LoadArgs, OutputArgs, PictureArgs};

/// First line of the help of `compare`, and its examples.
pub(super) const COMPARE_ABOUT: &str = "Compares the cost of ways to load SOURCE

Every run is a fresh process. Rounds are interleaved (each way once a round, another one first each time), so that a busy machine \
is busy for all of them. Before every run the page cache is set to the state of --cache, and checked. Memory \
is the highest of all runs, time the median.

  stream   this program's: through a ring, within the budget
  mmap     maps every file and keeps it, every page touched
  read     reads whole files into memory and keeps them
  pread    reads one tensor at a time into memory of its own; kept, unless --device none
  direct   the same past the page cache

The other strategies use one thread and load to host memory, whatever --device says. A strategy that fails or is killed gets \
a row that says so, and is not run again; the others go on. One that would not fit in memory is refused before it starts, and \
gets a row too.

Exit code 5 if a row failed, 2 if a command cannot be started. A row that was refused, or that the kernel killed for want of memory, \
is a result, as long as another one completed.

Examples:
  loadcheck compare ./model
  loadcheck compare ./model -s stream -s mmap -s direct --cache cold --device none
  loadcheck compare ./model --cmd 'python load.py {source}' --export-markdown compare.md
  loadcheck compare ./model --cmd 'python load.py {strategy} {source}' -s load_file -s clone";

/// `loadcheck compare`
#[derive(Debug, Args)]
pub(crate) struct CompareArgs {
    #[command(flatten)]
    pub(crate) load: LoadArgs,
    /// stream, mmap, read, pread or direct; repeatable
    ///
    /// Default: stream, mmap and read. The same twice shows how much the machine varies. If a --cmd
    /// contains {strategy}, NAME is any text and replaces it, one row each.
    #[arg(short, long = "strategy", value_name = "NAME", help_heading = "Compare")]
    pub(crate) strategies: Vec<String>,
    /// A command that loads, such as 'python load.py {source}'
    ///
    /// One more row, measured as `exec` does: its whole process tree, in a control group of its own
    /// where there can be one. Split into words as a shell would, but not run by a shell;
    /// {source} and {strategy} are put in afterwards. What it prints goes to stderr. May be
    /// repeated.
    #[arg(long = "cmd", value_name = "TEMPLATE", help_heading = "Compare")]
    pub(crate) commands: Vec<String>,
    /// The name of a --cmd in the tables
    ///
    /// The first --name is for the first --cmd, and so on; those without are called cmd, or cmd1,
    /// cmd2, ...
    #[arg(
        long = "name",
        value_name = "NAME",
        help_heading = "Compare",
        hide_short_help = true,
        requires = "commands"
    )]
    pub(crate) names: Vec<String>,
    /// Rounds: runs of each
    #[arg(short, long, value_name = "N", default_value_t = 5, help_heading = "Measurement",
          value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) runs: u32,
    /// Rounds before, not counted
    #[arg(short, long, value_name = "N", default_value_t = 0, help_heading = "Measurement",
          value_parser = clap::value_parser!(u32).range(0..=10_000))]
    pub(crate) warmup: u32,
    /// Page cache before a run: cold, warm, asis
    ///
    /// `cold` drops the pages of the source, `warm` reads it once; before every run, and looked at
    /// each time. A row says if some of its runs began otherwise. With `asis` a run finds what
    /// the one before it has left.
    #[arg(
        long,
        value_name = "STATE",
        default_value = "asis",
        help_heading = "Measurement",
        hide_possible_values = true
    )]
    pub(crate) cache: CacheArg,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
    #[command(flatten)]
    pub(crate) export: ExportArgs,
    #[command(flatten)]
    pub(crate) picture: PictureArgs,
}
