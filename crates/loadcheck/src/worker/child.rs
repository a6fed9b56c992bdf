//! The worker's side: reads its job, does it, tells its parent.

use std::io::{self, Read as _};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use rustix::process::{Signal, getppid, set_parent_process_death_signal};

use super::protocol::{Job, Message, Task, tell};
use super::{cycles, measure, measure_simple, measure_tiers, prepare};
use crate::exit::Exit;
use crate::signals::ASKING_TO_STOP;

/// The hidden first argument that makes this program a worker.
pub(crate) const ARGUMENT: &str = "__worker";

/// Runs as a worker.
///
/// # Errors
/// A message for people who started it by hand.
pub(crate) fn main() -> Result<Exit, &'static str> {
    // Without the parent, nothing would stop this process or read its output.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    // Started through a link, the process is called like the link, `exe`. Where that cannot be changed
    // it stays so.
    let _ = std::fs::write("/proc/self/comm", env!("CARGO_BIN_NAME"));
    let mut text = String::new();
    let job = io::stdin()
        .lock()
        .read_to_string(&mut text)
        .ok()
        .and_then(|_| serde_json::from_str::<Job>(&text).ok());
    let Some(job) = job else {
        return Err("loadcheck: this is an internal command");
    };
    drop(text);
    // The parent may have ended before the line that binds this process to it.
    let parent = getppid().map(|pid| pid.as_raw_nonzero().get());
    if parent != i32::try_from(job.parent_pid).ok() {
        return Ok(Exit::Terminated);
    }
    let cancel = Arc::new(AtomicBool::new(false));
    for signal in ASKING_TO_STOP {
        // Ctrl-C reaches the whole group; ending in order gives a partial report.
        let _ = signal_hook::flag::register(signal, Arc::clone(&cancel));
    }
    let finished = match job.task {
        Task::Prepare { load, has_source, cache } => {
            tell(&match prepare::prepare(&load, has_source, cache, &cancel) {
                Ok(checked) => Message::Checked(Box::new(checked)),
                Err(problems) => Message::Error(problems),
            });
            return Ok(Exit::Ok);
        }
        Task::Measure(task) => match &task.load.device_map {
            Some(map) => measure_tiers::measure(&task, map, &cancel),
            None => measure::measure(&task, &cancel),
        },
        Task::MeasureSimple { load, strategy, refuses, interval_ms } => {
            measure_simple::measure(&load, strategy, refuses, interval_ms, &cancel)
        }
        Task::Cycle { loads, count } => cycles::cycle(&loads, count, &cancel),
    };
    tell(&match finished {
        Ok(finished) => Message::Done(Box::new(finished)),
        Err(problems) => Message::Error(problems),
    });
    Ok(Exit::Ok)
}
