//! The worker's side: reads its job, does it, tells its parent.

use std::io::{self, Read as _, Write as _};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use rustix::process::{Signal, getppid, set_parent_process_death_signal};

use super::protocol::{Job, Message, Task};
use super::{cycles, imitate, measure, prepare};
use crate::exit::Exit;
use crate::signals::ASKING_TO_STOP;

/// The hidden first argument that makes this program a worker.
pub(crate) const ARGUMENT: &str = "__worker";

/// Runs as a worker.
pub(crate) fn main() -> ExitCode {
    // With the parent gone nobody would stop or read this process.
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
        crate::output::to_stderr("loadcheck: this is an internal command");
        return Exit::Usage.into();
    };
    drop(text);
    // The parent may have ended before the line that binds this process to it.
    let parent = getppid().map(|pid| pid.as_raw_nonzero().get());
    if parent != i32::try_from(job.parent_pid).ok() {
        return Exit::Terminated.into();
    }
    let cancel = Arc::new(AtomicBool::new(false));
    for signal in ASKING_TO_STOP {
        // Ctrl-C reaches the whole group; ending in order gives a partial report.
        let _ = signal_hook::flag::register(signal, Arc::clone(&cancel));
    }
    let last_word = match job.task {
        Task::Prepare { load, has_source, cache } => {
            match prepare::prepare(&load, has_source, cache, &cancel) {
                Ok(checked) => Message::Checked(Box::new(checked)),
                Err(problems) => Message::Error(problems),
            }
        }
        Task::Measure { load, budgets, watches, interval_ms } => {
            match measure::measure(&load, &budgets, &watches, interval_ms, &cancel) {
                Ok(finished) => Message::Done(Box::new(finished)),
                Err(problems) => Message::Error(problems),
            }
        }
        Task::Imitate { load, habit, refuses, interval_ms } => {
            match imitate::imitate(&load, habit, refuses, interval_ms, &cancel) {
                Ok(finished) => Message::Done(Box::new(finished)),
                Err(problems) => Message::Error(problems),
            }
        }
        Task::Cycle { loads, count } => match cycles::cycle(&loads, count, &cancel) {
            Ok(finished) => Message::Done(Box::new(finished)),
            Err(problems) => Message::Error(problems),
        },
    };
    tell(&last_word);
    Exit::Ok.into()
}

/// Sends a message. A worker that cannot, ends: its parent must not take a part of the story for
/// the whole. (A parent that is gone takes this process with it anyway.)
pub(super) fn tell(message: &Message) {
    let mut line = serde_json::to_vec(message).expect("messages are plain data");
    line.push(b'\n');
    let mut stdout = io::stdout().lock();
    if stdout.write_all(&line).and_then(|()| stdout.flush()).is_err() {
        std::process::exit(i32::from(Exit::LoadFailed.code()));
    }
}
