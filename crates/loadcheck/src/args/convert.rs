//! The command lines of `convert` and `verify`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;
use onelayer::convert::Part;

use super::values::{ExpertsArg, Io, NamesArg};
use super::{OutputArgs, Quantise, parse_float_type};
use crate::sizes::Size;
use onelayer::FloatType;

/// First line of the help of `convert`, and its examples.
pub(super) const CONVERT_ABOUT: &str = "Rewrites a checkpoint as one file per layer, in bounded memory

The target stays a plain Hugging Face checkpoint: safetensors files, the standard index, and copies of whatever lies beside
them. Memory stays within the budget plus 16 MiB whatever the model, which is checked on every conversion. Files appear under their
names only when they are complete and on the disk. An interrupted conversion goes on where it stopped when the same command
is run again. The source is never changed.

Examples:
  loadcheck convert ./model ./layers --dry-run
  loadcheck convert ./model ./layers --verify
  loadcheck convert ./model ./bf16 --dtype bf16 --exclude '^vision_tower'
  loadcheck convert ./layers ./whole --merge --max-shard-size 5GB
  loadcheck convert model.gguf ./layers --names hf --dtype bf16
  loadcheck convert ./model ./layers --part 1/8      on each of eight machines
  loadcheck convert ./model ./layers --finish        once all of them are done";

/// First line of the help of `verify`, and its examples.
pub(super) const VERIFY_ABOUT: &str = "Checks a checkpoint: headers, index, and hashes by its manifest

Every byte is read once where there is a manifest, as `loadcheck convert` writes it, or a SHA-256 in the name of a file, as in
the Hugging Face cache. Without either, only headers and index can be checked, which the answer says; --require-hashes makes that
an error. With --against, every tensor is compared with that of another checkpoint. Exit code 5 if something
differs; each difference is named.

Examples:
  loadcheck verify ./layers
  loadcheck verify ./layers --against ./model";

/// Help of `--force` where a checkpoint is written.
pub(super) const FORCE_HELP: &str = "Replace what is in the way";
pub(super) const FORCE_LONG_HELP: &str = "Replace what is in the way

Files in TARGET that another conversion or somebody else has put there, and the output file of the report. Without it, both are \
refused (LC0210, LC0205). Whatever another conversion has made goes; other files go only if their names are needed. Symbolic links \
are replaced, never followed.";

/// `loadcheck convert`
#[derive(Clone, Debug, Args)]
pub(crate) struct ConvertArgs {
    /// File, directory, index, or org/name[@revision] from the cache
    pub(crate) source: OsString,
    /// Directory to write; may exist
    pub(crate) target: PathBuf,
    #[command(flatten)]
    pub(crate) files: FileArgs,
    #[command(flatten)]
    pub(crate) tensors: TensorArgs,
    #[command(flatten)]
    pub(crate) work: WorkArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// Which tensors share a file.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Files")]
pub(crate) struct FileArgs {
    /// Most bytes of tensors in a file
    ///
    /// Neighbouring layers share a file as long as they fit; a layer that does not fit is cut
    /// between tensors. A single tensor may be larger. With --merge, files are filled tensor by
    /// tensor. Sizes: as for --budget.
    #[arg(long, value_name = "SIZE")]
    pub(crate) max_shard_size: Option<Size>,
    /// Experts of a layer: together or per-file
    ///
    /// `per-file` gives each expert a file of its own, behind the rest of its layer. `together` is
    /// the default.
    #[arg(long, value_name = "HOW", hide_possible_values = true)]
    pub(crate) experts: Option<ExpertsArg>,
    /// Merge into one file or shards of --max-shard-size
    ///
    /// Undoes the split into layers: shards of at most --max-shard-size, filled tensor by tensor,
    /// or one file without it.
    #[arg(long, conflicts_with = "experts")]
    pub(crate) merge: bool,
    /// Rules that override how tensors are grouped into layers
    ///
    /// A TOML file with the keys stacks, not_stacks, order and [groups]; `loadcheck inspect` shows
    /// the grouping.
    #[arg(long, value_name = "FILE.toml", hide_short_help = true)]
    pub(crate) layers: Option<PathBuf>,
}

/// Which tensors are written, and as what.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Tensors")]
pub(crate) struct TensorArgs {
    /// Cast plain floats: bf16, f16 or f32
    ///
    /// F64, F32, F16 and BF16 tensors become this type, rounded once, to nearest even. Integers,
    /// 8-bit floats and whatever belongs to a quantized weight stay as they are, unless a rule
    /// names them.
    #[arg(long, value_name = "DTYPE", value_parser = parse_float_type)]
    pub(crate) dtype: Option<FloatType>,
    /// Quantise weights: int8, int4 or fp8
    ///
    /// FORM is int8, int4-g32, int4-g64, int4-g128 (or int4) or fp8.
    ///
    /// Float weights of two or three dimensions in the layers of stacks, but no routers of experts,
    /// row by row: int8 and fp8 (E4M3) with an F32 scale for each row, int4 with a BF16 scale
    /// for each group of 32, 64 or 128 (int4 alone) elements. `X` is written as values
    /// under its name, and `X_scale`. What that loses is in the report. What a rule of
    /// --dtype-rules names is not quantised. Each of these weights is read twice.
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
    /// Casts by name, before --dtype
    ///
    /// A TOML file of [[rule]] tables, each with match = "REGEX" (on full names, not anchored) and
    /// dtype = "bf16", "f16", "f32" or "keep". The first rule that matches a tensor decides
    /// about it, whatever number type it has.
    #[arg(long, value_name = "FILE.toml", hide_short_help = true)]
    pub(crate) dtype_rules: Option<PathBuf>,
    /// Only these: a layer's id, or a regex on names
    ///
    /// May be repeated; a tensor is selected if any PATTERN matches. A PATTERN that equals the id
    /// of a layer takes that layer, any other is a regular expression on full tensor names, not
    /// anchored.
    #[arg(long, value_name = "PATTERN")]
    pub(crate) select: Vec<String>,
    /// All but these; wins over --select
    ///
    /// May be repeated. PATTERN as for --select.
    #[arg(long, value_name = "PATTERN")]
    pub(crate) exclude: Vec<String>,
    /// Dictionary of a PyTorch file to read: ema, optimizer.state, ... [default: the weights]
    ///
    /// As for `run`.
    #[arg(long, value_name = "NAME", hide_short_help = true)]
    pub(crate) prefix: Option<String>,
    /// hf: name GGUF tensors as transformers does
    ///
    /// `blk.0.attn_q.weight` becomes `model.layers.0.self_attn.q_proj.weight`, and rows that
    /// llama.cpp's converter has reordered get the order of the model again. With --dtype
    /// transformers loads the target, once config.json and the tokenizer of the model are beside
    /// the files. An architecture for which that is not exact is refused. Other formats have these
    /// names already.
    #[arg(long, value_name = "HOW", hide_possible_values = true)]
    pub(crate) names: Option<NamesArg>,
    /// Write tied weights once
    ///
    /// Leaves out a tensor outside of all stacks that has the same bytes as an earlier one, such as
    /// a tied output head. The manifest lists it as an alias. Only for models whose
    /// configuration ties them: others would miss it.
    #[arg(long)]
    pub(crate) drop_duplicates: bool,
}

/// How the work is done.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Work")]
pub(crate) struct WorkArgs {
    /// Show files, bytes, memory and time; write nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Compare all tensors with the source afterwards
    ///
    /// Reads source and target again. One difference is exit code 5 (LC0510).
    #[arg(long)]
    pub(crate) verify: bool,
    /// Most host memory the conversion may hold
    ///
    /// A budget that is too small is refused with the smallest one that works. Sizes: 512Mi, 10GiB,
    /// 10G (10^9), 1024B, 80% of the memory limit, 2x-layer, 1.1x-largest-tensor.
    #[arg(long, value_name = "SIZE", default_value = "64MiB")]
    pub(crate) budget: Size,
    /// Threads that read, and as many that write [default: by the plan]
    ///
    /// At most 64 read and 4 write. What is written does not depend on it.
    #[arg(long, value_name = "N", hide_short_help = true, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) jobs: Option<u32>,
    /// direct, buffered, mmap or auto
    ///
    /// How the source is read: past the page cache (O_DIRECT); through it; by windows of a mapping;
    /// whichever of the first two suits each read. A file that cannot be read
    /// the way that was asked for is named in the report. Files are written past the page cache
    /// wherever that is possible.
    #[arg(
        long,
        value_name = "MODE",
        default_value = "direct",
        hide_possible_values = true,
        hide_short_help = true
    )]
    pub(crate) io: Io,
    /// Write every byte, even where the kernel could copy or share it
    ///
    /// Without it, stretches that stay as they are share their blocks with the source where the
    /// file system can do that.
    #[arg(long, hide_short_help = true)]
    pub(crate) no_kernel_copy: bool,
    /// SHA-256 in the manifest, beside BLAKE3
    #[arg(long, hide_short_help = true)]
    pub(crate) sha256: bool,
    /// Only part I of N, such as 1/8, from 1
    ///
    /// Eight machines that share a file system run parts 1/8 to 8/8, in any order, again if one
    /// fails; then one of them runs the same command with --finish instead. All of them give
    /// the same other options.
    #[arg(long, value_name = "I/N")]
    pub(crate) part: Option<Part>,
    /// Write index and manifest once all parts exist
    #[arg(long, conflicts_with = "part")]
    pub(crate) finish: bool,
}

/// `loadcheck verify`
#[derive(Debug, Args)]
pub(crate) struct VerifyArgs {
    /// File, directory, index, or org/name[@revision] from the cache
    #[arg(value_name = "DIR")]
    pub(crate) directory: OsString,
    /// Compare every tensor with that of SOURCE
    ///
    /// What the manifest of DIR says was cast, left out or tied is taken into account.
    #[arg(long, value_name = "SOURCE")]
    pub(crate) against: Option<OsString>,
    /// Dictionary of a PyTorch file that SOURCE is, as for `convert`
    #[arg(long, value_name = "NAME", requires = "against")]
    pub(crate) prefix: Option<String>,
    /// Names of a GGUF file that SOURCE is, as for `convert`
    #[arg(long, value_name = "HOW", hide_possible_values = true, requires = "against")]
    pub(crate) names: Option<NamesArg>,
    /// Fail if there is no hash to check the weights by
    ///
    /// Hashes are in the manifest of a conversion, and in the names of files in the Hugging Face
    /// cache. Without them, only headers and index can be checked.
    #[arg(long)]
    pub(crate) require_hashes: bool,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}
