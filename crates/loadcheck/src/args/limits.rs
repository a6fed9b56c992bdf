//! `--limit` and its short forms: what may be limited, and by how much.

use std::str::FromStr;
use std::time::Duration;

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

use super::values::{by_name, name_of};
use crate::sizes::{Size, SizeError, parse_duration};

/// Limits that decide the exit code.
#[derive(Debug, Args)]
#[command(next_help_heading = "Limits (exit code 1 when exceeded)")]
pub(crate) struct LimitArgs {
    /// memory, rss, vram, pinned, cgroup or time
    ///
    /// memory is unreclaimable memory, and meant if METRIC= is left out. Also file: mapped pages of
    /// files. May be repeated. The --max-... flags are short for it. A metric that cannot be
    /// measured here is exit code 4, never a silent pass.
    #[arg(long = "limit", value_name = "METRIC=SIZE")]
    limits: Vec<Gate>,
    /// Most unreclaimable memory
    ///
    /// What the kernel cannot take back, so what a container has to hold.
    #[arg(long, value_name = "SIZE", alias = "max-host", value_parser = short_form(Metric::Host, "--max-memory"))]
    max_memory: Option<Gate>,
    /// Most resident pages, of files too
    #[arg(long, value_name = "SIZE", hide_short_help = true,
          value_parser = short_form(Metric::Rss, "--max-peak-rss"))]
    max_peak_rss: Option<Gate>,
    /// Most page-locked memory
    ///
    /// The staging ring of a load to a CUDA device is page-locked. Other loads lock nothing.
    #[arg(long, value_name = "SIZE", hide_short_help = true,
          value_parser = short_form(Metric::Pinned, "--max-pinned"))]
    max_pinned: Option<Gate>,
    /// Most device memory
    ///
    /// The peak on the target device. With @GPU, the target must be that GPU. Exit code 4 where
    /// device memory cannot be measured.
    #[arg(long, value_name = "SIZE[@GPU]", hide_short_help = true, value_parser = vram_gate)]
    max_vram: Option<Gate>,
    /// Most time, such as 30s; mean of the runs
    #[arg(long, value_name = "TIME", hide_short_help = true,
          value_parser = short_form(Metric::Time, "--max-time"))]
    max_time: Option<Gate>,
    /// Exit code 6 when a limit lies inside the spread of the runs
    ///
    /// Without it, memory is judged by the maximum over the runs and time by the mean.
    #[arg(long, hide_short_help = true)]
    pub(crate) strict_noise: bool,
}

impl LimitArgs {
    /// All gates that were asked for.
    pub(crate) fn gates(&self) -> Vec<Gate> {
        let short = [&self.max_memory, &self.max_peak_rss, &self.max_pinned, &self.max_vram, &self.max_time];
        self.limits.iter().chain(short.into_iter().flatten()).cloned().collect()
    }
}

/// What can be limited.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Metric {
    /// Unreclaimable memory.
    #[value(alias = "memory")]
    Host,
    /// All resident pages.
    Rss,
    /// Page-locked memory.
    Pinned,
    /// Device memory.
    Vram,
    /// Host and device memory where they are one pool.
    Uma,
    /// Mapped file pages.
    File,
    /// The memory cgroup's own peak.
    Cgroup,
    /// Wall time.
    Time,
}

/// The value of a limit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Bound {
    /// Memory.
    Size(Size),
    /// Time.
    Time(Duration),
}

/// A limit, with the flag that asked for it: `--limit METRIC=SIZE` or a short form.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Gate {
    /// What is limited.
    pub(crate) metric: Metric,
    /// The most it may be.
    pub(crate) bound: Bound,
    /// The GPU it is about, if it names one.
    pub(crate) gpu: Option<u32>,
    /// For messages.
    pub(crate) flag: String,
}

impl Gate {
    fn parse(metric: Metric, value: &str, flag: String) -> Result<Self, SizeError> {
        let bound = match metric {
            Metric::Time => Bound::Time(parse_duration(value)?),
            _ => Bound::Size(value.parse()?),
        };
        Ok(Self { metric, bound, gpu: None, flag })
    }
}

impl FromStr for Gate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, value) = text.split_once('=').unwrap_or(("host", text));
        let metric = by_name("metric", name)?;
        Self::parse(metric, value, format!("--limit {}", name_of(metric))).map_err(|error| error.to_string())
    }
}

/// The parser of a `--max-...` flag.
fn short_form(
    metric: Metric,
    flag: &'static str,
) -> impl Fn(&str) -> Result<Gate, SizeError> + Clone + Send + Sync + 'static {
    move |text| Gate::parse(metric, text, flag.to_owned())
}

/// `--max-vram SIZE[@GPU]`
fn vram_gate(text: &str) -> Result<Gate, String> {
    let (size, gpu) = text.split_once('@').map_or((text, None), |(size, gpu)| (size, Some(gpu)));
    let gpu = gpu.map(str::parse::<u32>).transpose();
    let gpu = gpu.map_err(|_| "write the GPU as a number, as in 12GiB@0".to_owned())?;
    let gate = Gate::parse(Metric::Vram, size, "--max-vram".to_owned());
    gate.map(|gate| Gate { gpu, ..gate }).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bare_size_means_host() {
        assert_eq!("200MiB".parse::<Gate>(), "host=200MiB".parse());
        assert_eq!("memory=1GiB".parse::<Gate>(), "1GiB".parse());
        assert!("speed=1GiB".parse::<Gate>().unwrap_err().contains("host, rss"));
        assert!("time=10MiB".parse::<Gate>().is_err());
        assert!(vram_gate("12GiB@x").is_err());
        assert_eq!(vram_gate("12GiB@1").unwrap().gpu, Some(1));
    }
}
