//! Ctrl-C and SIGTERM, turned into events of a channel.
//!
//! The first one asks the program to stop what it started and to keep what it knows; a second one
//! ends it at once, after the same children have been killed. So does the first one, a moment
//! later, when the measurement is over: then only the report is left to write, and its reader
//! may never read it.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use crossbeam_channel::{Receiver, TrySendError, bounded};
use rustix::process::{Signal, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::iterator::Signals;

use crate::descendants::{descendants, remember_strangers};
use crate::exit::Exit;
use crate::problem::{Code, Problem};

/// Signals that ask a program to stop.
pub(crate) const ASKING_TO_STOP: [i32; 3] = [SIGINT, SIGTERM, SIGHUP];

/// How long the program may go on writing its report after a signal that came too late for the
/// measurement.
const LAST_WORDS_PATIENCE: Duration = Duration::from_millis(500);

/// Lets a write beyond the limit of a file's size (`RLIMIT_FSIZE`) be an error like any other: left
/// alone, the signal that comes with it ends the process without a word. A handler that does
/// nothing, and not the signal ignored: what this program starts would inherit that.
pub(crate) fn outlive_file_size_limit() {
    // Where there can be no handler, all is as it was.
    drop(signal_hook::flag::register(SIGXFSZ, Arc::default()));
}

/// Signals that ask the program to stop, as they come in.
#[derive(Debug)]
pub(crate) struct Interrupts {
    receiver: Receiver<i32>,
    leftovers: Arc<Mutex<Vec<PathBuf>>>,
}

impl Interrupts {
    /// Begins to listen. From here on the default action of these signals is off.
    ///
    /// # Errors
    /// [`Code::LoadFailed`] if the system refuses handlers or a thread.
    pub(crate) fn listen() -> Result<Self, Problem> {
        Self::begin()
            .map_err(|error| Problem::new(Code::LoadFailed, format!("cannot handle signals: {error}")))
    }

    fn begin() -> io::Result<Self> {
        // A signal stops only processes that this program has started.
        remember_strangers();
        let mut signals = Signals::new(ASKING_TO_STOP)?;
        let (sender, receiver) = bounded(8);
        let leftovers: Arc<Mutex<Vec<PathBuf>>> = Arc::default();
        let leftovers_at_exit = Arc::clone(&leftovers);
        thread::Builder::new().name("signals".to_owned()).spawn(move || {
            let mut count = 0_u32;
            for signal in signals.forever() {
                count += 1;
                // A full channel means that the program is stopping already.
                let is_heard = !matches!(sender.try_send(signal), Err(TrySendError::Disconnected(_)));
                if count == 1 && !is_heard {
                    // Long enough for a report whose reader reads.
                    thread::sleep(LAST_WORDS_PATIENCE);
                }
                if count > 1 || !is_heard {
                    leave_at_once(&leftovers_at_exit);
                    std::process::exit(i32::from(exit_of(signal).code()));
                }
            }
        })?;
        Ok(Self { receiver, leftovers })
    }

    /// Where the signals arrive.
    pub(crate) fn receiver(&self) -> &Receiver<i32> {
        &self.receiver
    }

    /// A directory, empty of files, that a second signal removes on the way out.
    pub(crate) fn remember_leftover(&self, directory: &Path) {
        self.leftovers.lock().unwrap_or_else(PoisonError::into_inner).push(directory.to_owned());
    }

    /// The remembered directories are gone.
    pub(crate) fn forget_leftovers(&self) {
        self.leftovers.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

/// Kills every descendant, removes the empty directories that were remembered.
fn leave_at_once(leftovers: &Mutex<Vec<PathBuf>>) {
    for pid in descendants() {
        let _ = kill_process(pid, Signal::KILL);
    }
    for directory in leftovers.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
        // A control group can be removed as soon as its last process is gone.
        for _ in 0..50 {
            match std::fs::remove_dir(&directory) {
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                    thread::sleep(Duration::from_millis(2))
                }
                _ => break,
            }
        }
    }
}

/// The exit code that belongs to a signal.
pub(crate) fn exit_of(signal: i32) -> Exit {
    if signal == SIGINT { Exit::Interrupted } else { Exit::Terminated }
}

/// The problem of a command that a signal has ended.
pub(crate) fn interrupted(signal: i32) -> Problem {
    Problem::new(Code::Interrupted, format!("interrupted by {}", name_of(signal)))
}

/// The name of a signal.
pub(crate) fn name_of(signal: i32) -> String {
    signal_hook::low_level::signal_name(signal).map_or_else(|| format!("signal {signal}"), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_codes() {
        assert_eq!((exit_of(SIGINT), exit_of(SIGTERM)), (Exit::Interrupted, Exit::Terminated));
        assert_eq!((name_of(9).as_str(), name_of(64).as_str()), ("SIGKILL", "signal 64"));
    }
}
