//! The command line as clap sees it: names, values, help texts. No decision is taken here; `config`
//! turns these into what a run needs.

#![allow(
    rustdoc::broken_intra_doc_links,
    reason = "help texts are for terminals, where brackets are no links"
)]

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::ArgPredicate;
use clap::{Arg, ArgAction, Args, Parser, Subcommand};

pub(crate) use self::compare::CompareArgs;
pub(crate) use self::convert::{ConvertArgs, VerifyArgs};
pub(crate) use self::fit::{DoctorArgs, EmitArg, FitArgs};
pub(crate) use self::given::{Given, Next};
pub(crate) use self::leak::{LeakArgs, MaxSlope, MemoryKind, POINTS_MIN};
pub(crate) use self::limits::{Bound, Gate, LimitArgs, Metric};
pub(crate) use self::passes::PassesArgs;
pub(crate) use self::picture::{PictureArgs, ReportArgs};
pub(crate) use self::plan::{CacheDtype, FitsArgs, PlaceArgs, PlanArgs};
pub(crate) use self::quantise::Quantise;
pub(crate) use self::ranks::RankArgs;
pub(crate) use self::values::{
    CacheArg, ColorArg, Device, ExpertsArg, FormatArg, Io, ProgressArg, Window, name_of, reason_of,
};
use crate::exit::Exit;
use crate::numbers::to_f64;
use crate::sizes::{Size, parse_duration};
use onelayer::FloatType;
use onelayer_synth::presets;

mod compare;
mod convert;
mod fit;
mod given;
mod leak;
mod limits;
mod passes;
mod picture;
mod plan;
mod quantise;
mod ranks;
mod values;

/// First line of every help text: two public repositories use the name for something else.
const ABOUT: &str = "loadcheck measures what loading a model checkpoint costs: memory, then time";

const EXAMPLES: &str = "Examples:
  loadcheck ./model                            what does loading this need?
  loadcheck org/name --window 1                from the local Hugging Face cache, one layer at a time
  loadcheck fits ./model 8GB                   does it fit? exit code 1 if not
  loadcheck exec python load.py ./model        why was my script killed? what does it need?
  loadcheck compare ./model                    which way to load is best?
  loadcheck fit ./model                        the smallest memory limit that works, by trying
  loadcheck ./model --max-memory 2GiB          a gate for CI: exit code 1 when exceeded
  loadcheck plan ./model --vram 24GiB          which layer fits on which GPU?
  loadcheck leak ./model                       load, use, unload, 30 times: does memory grow?
  loadcheck convert ./model ./layers           one file per layer, in bounded memory
  loadcheck verify ./layers --against ./model  nothing was lost
  loadcheck synth tiny-llama /tmp/m && loadcheck /tmp/m
                                               try it without a download";

/// Last lines of the short help.
const QUESTIONS: &str = "Questions:
  loadcheck fits ./model 8GB           does it fit?
  loadcheck exec python load.py        why was it killed? what does it need?
  loadcheck compare ./model            which way to load is best?
  loadcheck ./model --max-memory 2GiB  a gate for CI

`run` may be left out; its flags: loadcheck run -h. More: loadcheck --help";

/// The whole command line.
#[derive(Debug, Parser)]
#[command(
    name = "loadcheck",
    version,
    about = ABOUT,
    long_about = format!("{ABOUT}\n\n{EXAMPLES}"),
    after_help = QUESTIONS,
    after_long_help = Exit::table(),
    override_usage = "loadcheck [run] <SOURCE> [FLAGS]\n       loadcheck <COMMAND> [FLAGS]",
    subcommand_required = true,
    disable_help_flag = true,
    disable_help_subcommand = true,
    arg_required_else_help = true,
    max_term_width = 100
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
    #[command(flatten)]
    pub(crate) terminal: TerminalArgs,
}

/// What to do.
#[derive(Debug, Subcommand)]
#[allow(clippy::large_enum_variant, reason = "there is one of them in a run of the program")]
pub(crate) enum Command {
    /// Measures what one load of SOURCE costs, within a host budget
    #[command(
        long_about = "Measures what one load of SOURCE costs, within a host budget\n\n\
        Every run happens in a fresh process that measures itself. The number that sizes a container is \
        unreclaimable memory: what the kernel cannot take back. The promise that the growth of RSS stays within the budget plus \
        16 MiB (plus the layers kept, on the host device) is checked on every run.\n\n\
        Examples:\n  \
          loadcheck ./model --budget 64MiB --window 1\n  \
          loadcheck ./model --device cuda:0 --verify\n  \
          loadcheck ./model --device none --io direct --cache cold --runs 3\n  \
          loadcheck ./model --max-memory 200MiB --json -o loadcheck.json\n  \
          loadcheck ./model --window 1 --export-html load.html",
        after_long_help = Exit::table()
    )]
    Run(Box<RunArgs>),
    /// Compares the cost of ways to load SOURCE
    #[command(long_about = compare::COMPARE_ABOUT, after_long_help = Exit::table())]
    Compare(Box<CompareArgs>),
    /// Does a load of SOURCE fit in 8GB? From the headers
    #[command(long_about = plan::FITS_ABOUT, after_long_help = Exit::table())]
    Fits(Box<FitsArgs>),
    /// Finds the smallest memory limit that a load works under
    #[command(
        long_about = fit::FIT_ABOUT,
        after_long_help = Exit::table(),
        mut_arg("source", not_for_commands)
    )]
    Fit(Box<FitArgs>),
    /// Predicts what a load costs and what fits where, from headers
    #[command(long_about = plan::PLAN_ABOUT, after_long_help = Exit::table())]
    Plan(Box<PlanArgs>),
    /// Shows what a load has to move: layers, dtypes, largest tensors
    #[command(
        long_about = "Shows what a load has to move: layers, dtypes, largest tensors\n\n\
        Only headers are read.\n\n\
        Examples:\n  loadcheck inspect ./model\n  loadcheck inspect ./model --json | jq '.layers[].id'",
        after_long_help = Exit::table()
    )]
    Inspect(InspectArgs),
    /// Measures what a command costs, such as another loader
    #[command(
        long_about = "Measures what a command costs, such as another loader: its whole process tree\n\n\
        The command's own exit code stands in the report; a command that fails makes exit code 5. With a \
        machine-readable format its output goes to stderr. If it is killed for want of memory, the peak is what \
        the limit allowed: `loadcheck fit --cmd` finds what the command needs.\n\n\
        With --pid, a process that runs already is measured with all its descendants, until it ends, --for is over, or \
        Ctrl-C. It is never signalled. Earlier peaks are not in the report, except the kernel's own mark of its RSS.\n\n\
        Examples:\n  loadcheck exec python load_test.py ./model\n  \
        loadcheck exec --max-memory 2GiB --until-line 'server is ready' -- ./serve ./model\n  \
        loadcheck exec --pid 4711 --for 30s",
        after_long_help = Exit::table()
    )]
    Exec(ExecArgs),
    /// Loads, uses and unloads SOURCE again and again: does memory grow?
    #[command(
        long_about = leak::LEAK_ABOUT,
        after_long_help = Exit::table(),
        mut_arg("source", |source| not_for_processes(not_for_commands(source)))
    )]
    Leak(Box<LeakArgs>),
    /// Rewrites a checkpoint as one file per layer, in bounded memory
    #[command(
        long_about = convert::CONVERT_ABOUT,
        after_long_help = Exit::table(),
        mut_arg("force", |force| force.help(convert::FORCE_HELP).long_help(convert::FORCE_LONG_HELP).hide_short_help(false))
    )]
    Convert(Box<ConvertArgs>),
    /// Checks a checkpoint: headers, index, and hashes by its manifest
    #[command(long_about = convert::VERIFY_ABOUT, after_long_help = Exit::table())]
    Verify(VerifyArgs),
    /// Renders a saved report, or compares two; loads nothing
    #[command(alias = "diff", long_about = picture::REPORT_ABOUT, after_long_help = Exit::table())]
    Report(ReportArgs),
    /// Shows what can be measured and used here
    #[command(long_about = fit::DOCTOR_ABOUT, after_long_help = Exit::table())]
    Doctor(DoctorArgs),
    /// Writes a checkpoint of noise, shaped like a real model
    #[command(
        long_about = "Writes a checkpoint of noise, shaped like a real model, to measure its load\n\n\
        Examples:\n  loadcheck synth tiny-llama /tmp/tiny\n  loadcheck synth gemma-7b /data/gemma --max-shard-size 5GB\n  \
        loadcheck synth ./config.json /data/mine",
        after_long_help = format!("{}\n\n{}", preset_list(), Exit::table())
    )]
    Synth(SynthArgs),
    /// Says what the code of an error means, such as LC0205
    ///
    /// Without CODE: every code. A checkpoint or a command that fails prints one.
    Explain(ExplainArgs),
    /// Prints a completion script for a shell
    Completions(CompletionsArgs),
    /// Prints the manual page, or that of a command
    Man(ManArgs),
}

/// A command of `--cmd` need not load a source: then SOURCE is empty.
fn not_for_commands(source: Arg) -> Arg {
    let source = source.required(false).required_unless_present("cmd");
    source.default_value_if("cmd", ArgPredicate::IsPresent, "")
}

/// A process that runs already loads nothing at our request: then SOURCE is empty.
fn not_for_processes(source: Arg) -> Arg {
    source.required_unless_present_any(["cmd", "pid"]).default_value_if("pid", ArgPredicate::IsPresent, "")
}

/// The presets of `synth`, for its help.
fn preset_list() -> String {
    use std::fmt::Write as _;
    let mut text = String::from("Presets:");
    for preset in presets() {
        let millions = preset.parameter_count / 1_000_000;
        let size = if millions < 1000 {
            format!("{millions} M")
        } else {
            format!("{:.1} B", to_f64(millions) / 1e3)
        };
        let _ = write!(text, "\n  {:<14} {size:>7}  {}", preset.name, preset.about);
    }
    text
}

/// How a load is done. Shared by `run` and `plan`.
#[derive(Debug, Args)]
#[command(next_help_heading = "Load")]
pub(crate) struct LoadArgs {
    /// File, directory, index, or org/name[@revision] from the cache
    #[arg(help_heading = None::<&str>, index = 1)]
    pub(crate) source: OsString,
    /// Most host memory the load may hold
    ///
    /// The staging ring and all other memory of the load, without kept layers. A budget that is too
    /// small is refused with the smallest one that works. Sizes: 512Mi, 10GiB, 10G (10^9),
    /// 1024B, 80% of the memory limit, 2x-layer, 1.1x-largest-tensor.
    #[arg(long, value_name = "SIZE", default_value = "64MiB")]
    pub(crate) budget: Size,
    /// auto, buffered, mmap, direct or uring
    ///
    /// How files are read: through the page cache; by windows of a mapping that are dropped behind
    /// the cursor; past the page cache (O_DIRECT), one by one or in a queue of the kernel's
    /// (io_uring). `auto` reads cached bytes from the page cache and the rest past it, and leaves
    /// the page cache as it was. It uses queues where bytes are copied or cast. The report says
    /// what was decided for each file and why. A file that cannot be read the way that was
    /// asked for is named in the report.
    #[arg(long, value_name = "MODE", default_value = "auto", hide_possible_values = true)]
    pub(crate) io: Io,
    /// auto, cuda:N, host or none
    ///
    /// Where layers go. `auto` takes cuda:0 where there is a CUDA driver with a device, else the
    /// host, and says which. On the host device they are memory of the measured process, beside
    /// the budget; with `none` bytes are read, hashed if that is asked for, and dropped. `plan`
    /// needs no device to plan for one.
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub(crate) device: Device,
    /// Most device memory that layers may take
    ///
    /// Refused with the shortfall if the layers of the window need more. Per cent are of the
    /// device's memory.
    #[arg(long, value_name = "SIZE", hide_short_help = true)]
    pub(crate) device_budget: Option<Size>,
    /// Device memory that stays free
    ///
    /// A load that would leave less is refused before it begins. Matters on CUDA devices only.
    #[arg(long, value_name = "SIZE", default_value = "64MiB", hide_short_help = true)]
    pub(crate) device_reserve: Size,
    /// Narrow wider floats: bf16, f16 or f32
    ///
    /// F32 and F64 tensors arrive as this type, rounded to nearest even, ties to even; all others
    /// arrive as they are.
    #[arg(long, value_name = "DTYPE", value_parser = parse_float_type)]
    pub(crate) dtype: Option<FloatType>,
    /// Quantise weights: int8, int4 or fp8
    ///
    /// FORM is int8, int4-g32, int4-g64, int4-g128 (or int4) or fp8.
    ///
    /// Float weights of two or three dimensions in the layers of stacks, but no routers of experts,
    /// row by row: int8 and fp8 (E4M3) with an F32 scale for each row, int4 with a BF16 scale
    /// for each group of 32, 64 or 128 (int4 alone) elements. `X` arrives as values
    /// under its name, and `X_scale`. What that loses is in the report, tensor by tensor.
    #[arg(long, value_name = "FORM", alias = "quantize")]
    pub(crate) quantise: Option<Quantise>,
    /// Quantise the weights whose name matches, and no others
    ///
    /// Replaces the rule about layers and routers. Only float tensors with two or three dimensions
    /// and rows of 32 elements or more are quantised.
    #[arg(
        long,
        value_name = "REGEX",
        requires = "quantise",
        hide_short_help = true,
        alias = "quantize-only"
    )]
    pub(crate) quantise_only: Option<String>,
    /// Layers kept at once: N, 2GiB or all
    ///
    /// With `all` every layer stays until the end, then all are given back and memory is measured
    /// again. With a number, or a size such as 2GiB, each layer is dropped as soon as it was
    /// delivered.
    #[arg(long, value_name = "WINDOW", default_value = "all")]
    pub(crate) window: Window,
    /// Layers read ahead
    #[arg(long, value_name = "N", default_value_t = 2, hide_short_help = true)]
    pub(crate) prefetch: u32,
    /// Threads that read [default: by the plan]
    #[arg(long, value_name = "N", hide_short_help = true, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) readers: Option<u32>,
    /// Only tensors whose name matches
    #[arg(long, value_name = "REGEX")]
    pub(crate) select: Option<String>,
    /// Rules that override how tensors are grouped into layers
    ///
    /// A TOML file with the keys stacks, not_stacks, order and [groups]; `loadcheck inspect` shows
    /// the grouping.
    #[arg(long, value_name = "FILE.toml", hide_short_help = true)]
    pub(crate) layers: Option<PathBuf>,
    /// Dictionary of a PyTorch file to read: ema, optimizer.state, ... [default: the weights]
    ///
    /// A training checkpoint has several: without this flag, what is called state_dict,
    /// model_state_dict, model or module is read. An empty name reads the whole file.
    #[arg(long, value_name = "NAME", hide_short_help = true)]
    pub(crate) prefix: Option<String>,
    /// Let unknown dtypes pass as bytes
    ///
    /// Without it, a dtype that this version does not know is refused (LC0302).
    #[arg(long, hide_short_help = true)]
    pub(crate) opaque_dtypes: bool,
}

/// Where the result goes.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Output")]
pub(crate) struct OutputArgs {
    /// table, plain, json, jsonl, md, csv, github
    ///
    /// Without it: a table on a terminal, plain text elsewhere.
    #[arg(
        long,
        value_name = "FORMAT",
        default_value = "auto",
        hide_default_value = true,
        hide_possible_values = true
    )]
    pub(crate) format: FormatArg,
    /// Same as --format json
    #[arg(long, conflicts_with = "format")]
    pub(crate) json: bool,
    /// Write there; the ending picks the format
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// Overwrite files that exist
    ///
    /// Without it, an output file that exists is refused (LC0205).
    #[arg(long, hide_short_help = true)]
    pub(crate) force: bool,
}

/// Copies of the report in further files.
#[derive(Debug, Args)]
#[command(next_help_heading = "Output")]
pub(crate) struct ExportArgs {
    /// Also write the report as JSON
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub(crate) export_json: Option<PathBuf>,
    /// Also write the report as Markdown
    ///
    /// A table for a pull request or a page.
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub(crate) export_markdown: Option<PathBuf>,
    /// Keep a sample of memory every MS milliseconds in the report
    ///
    /// In JSON, under runs[].samples. A report that is saved as JSON keeps them every 5 ms anyway.
    /// At most 4096 rows are kept; of those that share a row, the
    /// highest counts.
    #[arg(long, value_name = "MS", hide_short_help = true, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    pub(crate) timeline: Option<u64>,
}

/// How the program behaves on the terminal. Accepted by every command.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Terminal")]
pub(crate) struct TerminalArgs {
    /// auto, bar, plain, json, never
    ///
    /// On stderr: a bar on a terminal, elsewhere a line every 10 % and at least every 10 s; `json`
    /// prints an object a line.
    #[arg(
        long,
        global = true,
        value_name = "HOW",
        default_value = "auto",
        hide_default_value = true,
        hide_possible_values = true,
        hide_short_help = true
    )]
    pub(crate) progress: ProgressArg,
    /// auto, always, never
    ///
    /// NO_COLOR, CLICOLOR_FORCE and TERM=dumb are obeyed; nothing is coloured in a pipe unless it
    /// is forced.
    #[arg(
        long,
        global = true,
        value_name = "WHEN",
        default_value = "auto",
        hide_default_value = true,
        hide_possible_values = true,
        hide_short_help = true
    )]
    pub(crate) color: ColorArg,
    /// No progress, no hints
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub(crate) quiet: bool,
    /// More detail
    #[arg(short, long, global = true)]
    pub(crate) verbose: bool,
    /// Never use the network
    ///
    /// This version never does: names are looked up in the local cache only.
    #[arg(long, global = true, hide_short_help = true)]
    pub(crate) offline: bool,
    /// This help; --help has more
    #[arg(short, long, global = true, action = ArgAction::Help)]
    help: Option<bool>,
}

/// `loadcheck run`
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) load: LoadArgs,
    #[command(flatten)]
    pub(crate) ranks: RankArgs,
    #[command(flatten)]
    pub(crate) passes: PassesArgs,
    /// Time that each layer is worked on
    ///
    /// A stand-in for an engine: with --passes each layer is held for so long before it is dropped,
    /// such as 5ms.
    #[arg(long, value_name = "TIME", help_heading = "Load", hide_short_help = true, requires = "passes",
          value_parser = parse_duration)]
    pub(crate) engine_time: Option<Duration>,
    /// Load by a device map: GPUs, host and disk at once
    ///
    /// A JSON object of modules and places, as accelerate's device_map; `plan --export-device-map`
    /// writes one. GPUs are loaded in the order of their numbers, then the host, all within one
    /// budget; the disk is not read. A GPU that is not there is exit code 4, a map that does not
    /// fit the checkpoint exit code 2 (LC0215).
    #[arg(long, value_name = "FILE", help_heading = "Load", hide_short_help = true,
          conflicts_with_all = ["device", "window", "prefetch", "passes", "keep", "engine_time", "tp", "read_through"])]
    pub(crate) device_map: Option<PathBuf>,
    /// Print a BLAKE3 hash of every tensor
    ///
    /// Of the bytes as they are delivered. Hashing is part of the time that is measured.
    #[arg(long, help_heading = "Load")]
    pub(crate) hash: bool,
    /// Compare every delivered tensor with its file
    ///
    /// Reads each tensor back in pieces of 1 MiB and compares it with its file, which separate code
    /// reads again. With --dtype, that code casts as well. Not available with --quantise. One
    /// difference is exit code 5 (LC0508). The time it takes is not part of the time that is
    /// measured.
    #[arg(long, help_heading = "Load")]
    pub(crate) verify: bool,
    /// Runs, each in a fresh process
    #[arg(short, long, value_name = "N", default_value_t = 1, help_heading = "Measurement",
          value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) runs: u32,
    /// Runs before, not counted
    ///
    /// Each in a fresh process as well; they warm the page cache and nothing else.
    #[arg(short, long, value_name = "N", default_value_t = 0, help_heading = "Measurement", hide_short_help = true,
          value_parser = clap::value_parser!(u32).range(0..=10_000))]
    pub(crate) warmup: u32,
    /// Page cache before a run: cold, warm, asis
    ///
    /// `cold` drops the pages of the source, `warm` reads it once. The state is checked afterwards,
    /// and the report says `unchecked` where the kernel does not tell.
    #[arg(
        long,
        value_name = "STATE",
        default_value = "asis",
        help_heading = "Measurement",
        hide_possible_values = true
    )]
    pub(crate) cache: CacheArg,
    #[command(flatten)]
    pub(crate) limits: LimitArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
    #[command(flatten)]
    pub(crate) export: ExportArgs,
    #[command(flatten)]
    pub(crate) picture: PictureArgs,
}

/// `loadcheck inspect`
#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    /// File, directory, index, or org/name[@revision] from the cache
    pub(crate) source: OsString,
    /// Rules that override how tensors are grouped into layers
    #[arg(long, value_name = "FILE.toml")]
    pub(crate) layers: Option<PathBuf>,
    /// Dictionary of a PyTorch file to read: ema, optimizer.state, ... [default: the weights]
    ///
    /// A training checkpoint has several: without this flag, what is called state_dict,
    /// model_state_dict, model or module is read. An empty name reads the whole file.
    #[arg(long, value_name = "NAME", hide_short_help = true)]
    pub(crate) prefix: Option<String>,
    /// Let unknown dtypes pass as bytes
    #[arg(long)]
    pub(crate) opaque_dtypes: bool,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// `loadcheck exec`
#[derive(Debug, Args)]
#[command(
    override_usage = "loadcheck exec [FLAGS] [--] <COMMAND> [ARGS]...\n       loadcheck exec [FLAGS] --pid <PID>"
)]
pub(crate) struct ExecArgs {
    /// The command and its arguments; flags of loadcheck come before it
    #[arg(trailing_var_arg = true, required_unless_present = "pid", value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
    /// Measure a process that runs already, and its descendants
    #[arg(long, value_name = "PID", help_heading = "Measurement", conflicts_with_all = ["command", "until_line"])]
    pub(crate) pid: Option<u32>,
    /// Stop measuring --pid after this time [default: when it ends, or at Ctrl-C]
    #[arg(long = "for", value_name = "TIME", help_heading = "Measurement", requires = "pid", value_parser = parse_duration)]
    pub(crate) time: Option<Duration>,
    /// Measure until a line matches, then stop it
    ///
    /// Looks at stdout and stderr of the command. A program that writes to a pipe may hold lines
    /// back: try `python -u`.
    #[arg(long, value_name = "REGEX", help_heading = "Measurement")]
    pub(crate) until_line: Option<String>,
    #[command(flatten)]
    pub(crate) limits: LimitArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
    #[command(flatten)]
    pub(crate) export: ExportArgs,
    #[command(flatten)]
    pub(crate) picture: PictureArgs,
}

/// `loadcheck synth`
#[derive(Debug, Args)]
pub(crate) struct SynthArgs {
    /// A preset (--help lists them), or a config.json
    #[arg(value_name = "PRESET|config.json")]
    pub(crate) model: OsString,
    /// Directory to create
    #[arg(value_name = "DIR")]
    pub(crate) target: PathBuf,
    /// bf16, f16 or f32 [default: the model's own]
    #[arg(long, value_name = "DTYPE", value_parser = parse_float_type)]
    pub(crate) dtype: Option<FloatType>,
    /// Keep only the first N layers
    #[arg(long, value_name = "N")]
    pub(crate) layers: Option<u64>,
    /// Most bytes of tensors in a file [default: 5GB]
    #[arg(long, value_name = "SIZE")]
    pub(crate) max_shard_size: Option<Size>,
    /// Threads that make bytes [default: one per core]
    #[arg(long, value_name = "N", hide_short_help = true)]
    pub(crate) threads: Option<std::num::NonZeroUsize>,
    /// The same seed gives the same bytes
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// `loadcheck explain`
#[derive(Debug, Args)]
pub(crate) struct ExplainArgs {
    /// The code, as an error has it
    #[arg(value_name = "CODE")]
    pub(crate) code: Option<String>,
}

/// `loadcheck completions`
#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// bash, zsh, fish, powershell or elvish
    #[arg(hide_possible_values = true)]
    pub(crate) shell: clap_complete::Shell,
}

/// `loadcheck man`
#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// The command whose page is wanted
    #[arg(value_name = "COMMAND")]
    pub(crate) page: Option<String>,
}

impl LoadArgs {
    /// How `inspect` looks at a source: with the defaults, and a budget that is never too small.
    pub(crate) fn of_inspect(args: &InspectArgs) -> Self {
        Self {
            layers: args.layers.clone(),
            opaque_dtypes: args.opaque_dtypes,
            prefix: args.prefix.clone(),
            ..Self::looking_at(args.source.clone())
        }
    }

    /// The defaults for a look that loads nothing.
    pub(crate) fn looking_at(source: OsString) -> Self {
        Self {
            source,
            budget: Size::Bytes(u64::MAX),
            io: Io::Buffered,
            device: Device::Host,
            device_budget: None,
            device_reserve: Size::Bytes(0),
            dtype: None,
            quantise: None,
            quantise_only: None,
            window: Window::All,
            prefetch: 2,
            readers: None,
            select: None,
            layers: None,
            prefix: None,
            opaque_dtypes: false,
        }
    }
}

fn parse_float_type(text: &str) -> Result<FloatType, String> {
    FloatType::parse(text).ok_or_else(|| "write bf16, f16 or f32".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_way_of_reading_is_in_the_help() {
        use clap::ValueEnum as _;
        let command = Cli::command();
        let run = command.find_subcommand("run").unwrap();
        let io = run.get_arguments().find(|argument| argument.get_id() == "io").unwrap();
        let help = io.get_help().unwrap().to_string();
        for mode in Io::value_variants() {
            assert!(help.contains(&name_of(*mode)), "{help}");
        }
    }
}
