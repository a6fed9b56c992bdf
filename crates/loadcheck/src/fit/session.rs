//! A search as it happens: every run brings the page cache into its state, is told to people, and
//! ends up in the report.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use super::search::{Range, Search, Tried};
use super::trial::{Ran, try_once};
use super::{command, ours};
use crate::args::{CacheArg, Device};
use crate::config::LoadConfig;
use crate::numbers::{limit_bytes, median};
use crate::output::escape::escape;
use crate::output::fitted::try_line;
use crate::output::terminal::{ProgressMode, Terminal};
use crate::output::to_stderr;
use crate::progress::Progress;
use crate::report::{Fitted, Try, TryOutcome};
use crate::signals::Interrupts;
use crate::sizes::{Size, SizeContext};
use crate::strategies::Strategy;
use crate::worker::{Stop, ask_to_prepare};

/// Time that every run may take, however quick it is without a limit.
const GIVE_UP_SECONDS_MIN: f64 = 5.0;
/// Room above the peak of a run without a limit, so that nothing is reclaimed. The kernel charges
/// in batches.
const CHARGE_SLACK_BYTES: u64 = 8 << 20;
/// Searches for a border that turns out to flicker are begun anew so many times.
const SHAKEN_COUNT_MAX: u32 = 5;

/// A loader.
#[derive(Clone, Debug)]
pub(crate) enum Loader {
    /// One of this program.
    Ours { load: Box<LoadConfig>, strategy: Strategy },
    /// A command.
    Command(Vec<OsString>),
}

/// The settings of a search.
pub(crate) struct Session<'a> {
    pub(crate) terminal: &'a Terminal,
    pub(crate) interrupts: &'a Interrupts,
    pub(crate) source: PathBuf,
    /// The quantities that relative sizes refer to.
    pub(crate) context: SizeContext,
    pub(crate) cache: CacheArg,
    pub(crate) lo: Option<u64>,
    pub(crate) hi: Option<u64>,
    pub(crate) ceiling_bytes: u64,
    pub(crate) precision: Size,
    pub(crate) runs: u32,
    pub(crate) max_slowdown: u32,
}

impl Session<'_> {
    /// Searches. What was found until then is in `fitted`, also if the search ends early.
    ///
    /// # Errors
    /// Why it ended early.
    pub(crate) fn search(&self, loader: &Loader, fitted: &mut Fitted) -> Result<(), Stop> {
        self.tell(&format!("{}:", escape(&fitted.strategy)));
        let mut unlimited = Vec::new();
        for _ in 0..self.runs {
            unlimited.extend(self.run(loader, None, None, fitted)?);
        }
        let range = self.range(fitted);
        (fitted.lo_bytes, fitted.hi_bytes) = (Some(range.lo_bytes), Some(range.hi_bytes));
        let give_up = median(&unlimited) * f64::from(self.max_slowdown) + GIVE_UP_SECONDS_MIN;
        let give_up = Duration::try_from_secs_f64(give_up).ok();
        let run = |limit: Option<u64>| self.run(loader, limit, give_up, fitted);
        let mut search = Search::new(range, unlimited, run);
        let found = find(&mut search);
        let (flaky, times) = (search.flaky(), search.unlimited().to_vec());
        drop(search);
        fitted.flaky_bytes = flaky;
        conclude(fitted, &times);
        let (smallest, comfortable) = found?;
        (fitted.smallest_bytes, fitted.comfortable_bytes) = (smallest, comfortable);
        fitted.precision_bytes = smallest.map(|smallest| range.precision_bytes(smallest));
        Ok(())
    }

    /// Where to look, after runs without a limit.
    fn range(&self, fitted: &mut Fitted) -> Range {
        let most = |value: fn(&Try) -> Option<u64>| fitted.tries.iter().filter_map(value).max();
        let host_bytes = most(|tried| tried.peak_host_bytes);
        let cgroup_bytes = most(|tried| tried.peak_cgroup_bytes);
        fitted.unlimited_host_bytes = host_bytes;
        // Everything that was charged, and nothing has to be taken back.
        let whole = cgroup_bytes.or(host_bytes.map(|host_bytes| host_bytes.saturating_mul(2)));
        let whole = whole.unwrap_or(self.ceiling_bytes).saturating_add(CHARGE_SLACK_BYTES);
        let hi_bytes = self.hi.unwrap_or(whole).min(self.ceiling_bytes);
        let lo_bytes = self.lo.or(host_bytes.map(|host_bytes| host_bytes / 2)).unwrap_or(hi_bytes / 4);
        Range {
            lo_bytes: lo_bytes.min(hi_bytes),
            lo_is_stated: self.lo.is_some(),
            hi_bytes,
            ceiling_bytes: if self.hi.is_some() { hi_bytes } else { self.ceiling_bytes },
            precision: self.precision,
            runs: self.runs,
        }
    }

    /// Runs once.
    fn run(
        &self,
        loader: &Loader,
        limit: Option<u64>,
        give_up: Option<Duration>,
        fitted: &mut Fitted,
    ) -> Result<Tried, Stop> {
        if let Ok(signal) = self.interrupts.receiver().try_recv() {
            return Err(Stop::Signal(signal));
        }
        let cached_share = self.bring_about(loader)?;
        let load = |group: &_| -> Ran {
            match loader {
                Loader::Ours { load, strategy } => {
                    let progress = Progress::start(self.bar(), &label(limit));
                    ours::run(load, *strategy, &self.context, group, self.interrupts, cached_share, progress)
                }
                Loader::Command(words) => command::run(words, group, self.interrupts, cached_share),
            }
        };
        let (tried, stop) = try_once(limit, give_up, self.interrupts, load)?;
        let works = tried.seconds.filter(|_| tried.outcome == TryOutcome::Ok);
        self.tell(&format!("  {}", try_line(&tried)));
        fitted.tries.push(tried);
        stop.map_or(Ok(works), Err)
    }

    /// Brings the page cache into the state that is wanted; returns the share of the source that is
    /// cached.
    fn bring_about(&self, loader: &Loader) -> Result<Option<f64>, Stop> {
        if self.cache == CacheArg::Asis {
            return Ok(None);
        }
        match loader {
            Loader::Command(_) => Ok(command::bring_about(&self.source, self.cache)?),
            Loader::Ours { load, .. } => {
                // No device is needed for that.
                let mut load = LoadConfig { device: Device::None, ..LoadConfig::clone(load) };
                let prepared = ask_to_prepare(&mut load, true, Some(self.cache), self.interrupts);
                Ok(prepared.checked?.cached_share)
            }
        }
    }

    /// A bar for each run, if there are bars at all: lines are for what came out of a run.
    fn bar(&self) -> ProgressMode {
        if self.terminal.progress == ProgressMode::Bar { ProgressMode::Bar } else { ProgressMode::Never }
    }

    fn tell(&self, line: &str) {
        match self.terminal.progress {
            ProgressMode::Never => {}
            ProgressMode::Json => to_stderr(&serde_json::json!({"fit": line.trim()}).to_string()),
            ProgressMode::Bar | ProgressMode::Plain => to_stderr(line),
        }
    }
}

/// The smallest limit, and the smallest comfortable one.
fn find<F>(search: &mut Search<F>) -> Result<(Option<u64>, Option<u64>), Stop>
where
    F: FnMut(Option<u64>) -> Result<Tried, Stop>,
{
    let mut found = (None, None);
    for _ in 0..SHAKEN_COUNT_MAX {
        let Some(smallest) = search.smallest()? else { return Ok((None, None)) };
        found = (Some(smallest), search.comfortable(smallest)?);
        if !search.is_shaken(smallest) {
            break;
        }
    }
    Ok(found)
}

/// How a run under a limit is called.
fn label(limit: Option<u64>) -> String {
    limit.map_or_else(|| "no limit".to_owned(), limit_bytes)
}

/// Compares runs under a limit with those without one.
fn conclude(fitted: &mut Fitted, unlimited: &[f64]) {
    if unlimited.is_empty() {
        return;
    }
    let usual = median(unlimited);
    fitted.unlimited_seconds = Some(usual);
    for tried in fitted.tries.iter_mut().filter(|tried| tried.outcome == TryOutcome::Ok && usual > 0.0) {
        tried.slowdown = tried.seconds.filter(|_| tried.limit_bytes.is_some()).map(|seconds| seconds / usual);
    }
}
