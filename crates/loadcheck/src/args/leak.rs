//! The command line of `leak`.

use std::ffi::OsString;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::values::by_name;
use super::{ExportArgs, LoadArgs, OutputArgs};
use crate::sizes::{Size, SizeError, parse_duration};

/// Fewer points have no such confidence: even if each is above the one before it, chance may have
/// done it.
pub(crate) const POINTS_MIN: u32 = onelayer_probe::SLOPE_POINTS_MIN;
/// All pairs of points are looked at: more points would take too long, and too much memory.
pub(crate) const POINTS_MAX: u32 = 2000;

/// First line of the help of `leak`, and its examples.
pub(super) const LEAK_ABOUT: &str = "Loads, uses and unloads SOURCE again and again: does memory grow?

After each cycle, and before the first, memory is measured by kind: host (what the kernel cannot take back), rss, file (mapped \
pages of files), pinned (page-locked), vram (the device), and live (what this library says it has allocated). For each there is a \
slope in bytes a cycle, with its confidence of 99 %; it is a leak if the whole confidence lies above --max-slope. To use means to \
read every byte that was delivered. Cycles to warm up are not counted: caches, allocators and drivers keep what they need.

  leak A            load A, use, unload, all in one process, which measures itself
  leak A B          A -> B -> A: a cycle loads A, unloads it, loads B, unloads it
  --component       the same with parts of a diffusers pipeline
  --isolate         a process for each cycle; measures what is left on the machine when the process has ended
  --cmd             a run of the command is a cycle; measures what is left on the machine when the process has ended: shared memory, \
processes that it left behind, device memory. Page cache is no leak.
  --cmd --each-line a line of its output is a cycle; measures the memory of its processes at that moment, for a server
  --pid --every     each span of time is a cycle; measures a process that runs already, and its descendants; it is never signalled

Exit code 1 for a leak, or if a load took more memory than it promised; 6 with --strict-noise if the limit lies inside a confidence \
interval.

Examples:
  loadcheck leak ./model --cycles 100
  loadcheck leak ./pipeline --component text_encoder --component transformer
  loadcheck leak ./model --device cuda:0 --max-slope 64KiB --max-slope vram=0
  loadcheck leak ./model --cmd 'python load.py {source}'
  loadcheck leak ./model --cmd './serve {source}' --each-line 'request done' --cycles 200
  loadcheck leak --pid 4711 --every 10s --cycles 60";

/// `loadcheck leak`
#[derive(Debug, Args)]
pub(crate) struct LeakArgs {
    #[command(flatten)]
    pub(crate) load: LoadArgs,
    /// Sources to load next, each after unloading the last
    #[arg(index = 2, value_name = "THEN", help_heading = None::<&str>, conflicts_with = "cmd")]
    pub(crate) then: Vec<OsString>,
    /// Rounds that count, from 8
    #[arg(long, value_name = "N", default_value_t = 30, help_heading = "Cycles",
          value_parser = clap::value_parser!(u32).range(i64::from(POINTS_MIN)..=i64::from(POINTS_MAX)))]
    pub(crate) cycles: u32,
    /// Rounds before, not counted
    #[arg(short, long, value_name = "N", default_value_t = 3, help_heading = "Cycles",
          value_parser = clap::value_parser!(u32).range(0..=1000))]
    pub(crate) warmup: u32,
    /// Only this component of a pipeline; repeatable
    ///
    /// As its folder is called. Several are loaded one after the other, each after the one before
    /// it was unloaded.
    #[arg(long = "component", value_name = "NAME", help_heading = "Cycles", conflicts_with_all = ["cmd", "select"])]
    pub(crate) components: Vec<String>,
    /// A fresh process for each cycle
    ///
    /// Measures what is left on the machine when the process has ended.
    #[arg(long, help_heading = "Cycles", conflicts_with = "cmd")]
    pub(crate) isolate: bool,
    /// A command that loads: 'python load.py {source}'
    ///
    /// Split into words as a shell would, but not run by a shell; {source} is put in afterwards.
    /// What it prints goes to stderr.
    #[arg(long, value_name = "TEMPLATE", help_heading = "Cycles")]
    pub(crate) cmd: Option<String>,
    /// Measure --cmd at each such line of its output
    ///
    /// It runs once, and is stopped after the last cycle. A program that writes to a pipe may hold
    /// lines back: `python -u`.
    #[arg(long, value_name = "REGEX", help_heading = "Cycles", requires = "cmd", conflicts_with = "pid")]
    pub(crate) each_line: Option<String>,
    /// Measure a process that runs already
    ///
    /// With its descendants, at fixed times. Growth is per time then: steady work gives a clear
    /// answer, and work that comes in bursts needs a longer --every.
    #[arg(long, value_name = "PID", help_heading = "Cycles", conflicts_with_all = ["source", "cmd", "each_line", "isolate", "components", "then"])]
    pub(crate) pid: Option<u32>,
    /// Time of a cycle with --pid
    #[arg(long, value_name = "TIME", help_heading = "Cycles", requires = "pid", default_value = "10s", hide_short_help = true,
          conflicts_with_all = ["source", "cmd"], value_parser = parse_duration)]
    pub(crate) every: Duration,
    /// Most growth per cycle: host, file, pinned, vram
    ///
    /// More is a leak [default: 16KiB]. Without KIND, the limit is for every kind. May be repeated.
    /// A kind that is named and cannot be measured here is exit code 4.
    #[arg(
        long = "max-slope",
        value_name = "[KIND=]SIZE",
        help_heading = "Limits (exit code 1 when exceeded)"
    )]
    pub(crate) max_slopes: Vec<MaxSlope>,
    /// Exit code 6 when a limit lies inside a confidence interval
    #[arg(long, hide_short_help = true, help_heading = "Limits (exit code 1 when exceeded)")]
    pub(crate) strict_noise: bool,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
    #[command(flatten)]
    pub(crate) export: ExportArgs,
}

/// A kind of memory, in the order of the report's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum MemoryKind {
    /// Unreclaimable memory.
    Host,
    /// All resident pages.
    Rss,
    /// Mapped pages of files.
    File,
    /// Page-locked memory.
    Pinned,
    /// Device memory.
    Vram,
    /// What the library has allocated, on the host and on devices.
    Live,
}

/// `--max-slope [KIND=]SIZE`
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct MaxSlope {
    /// What it is about; `None` is every kind.
    pub(crate) kind: Option<MemoryKind>,
    /// The most it may grow a cycle.
    pub(crate) size: Size,
}

impl FromStr for MaxSlope {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (kind, size) = match text.split_once('=') {
            None => (None, text),
            Some((name, size)) => (Some(by_name("kind of memory", name)?), size),
        };
        let size = size.parse().map_err(|error: SizeError| error.to_string())?;
        Ok(Self { kind, size })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slopes_are_for_one_kind_or_all() {
        let parse = |text: &str| text.parse::<MaxSlope>();
        assert_eq!(parse("64KiB"), Ok(MaxSlope { kind: None, size: Size::Bytes(64 << 10) }));
        assert_eq!(parse("vram=0"), Ok(MaxSlope { kind: Some(MemoryKind::Vram), size: Size::Bytes(0) }));
        assert!(parse("disk=1").unwrap_err().contains("host, rss"));
        assert!(parse("host=").is_err());
    }
}
