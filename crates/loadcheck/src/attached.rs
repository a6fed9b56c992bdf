//! A process that runs already and was not started by us: it is found and waited for, and never
//! signalled.

use std::time::{Duration, Instant};

use crossbeam_channel::RecvTimeoutError;
use onelayer_probe::Procfs;

use crate::descendants::{Identity, identity_of};
use crate::problem::{Code, Problem};
use crate::signals::Interrupts;

/// How often its end is looked for.
const LOOK: Duration = Duration::from_millis(20);

/// Why waiting ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AttachedEvent {
    /// The process ended by itself.
    Ended,
    /// The time is up.
    TimeUp,
    /// A signal asked us to stop.
    Interrupted(i32),
}

/// A running process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attached {
    identity: Identity,
}

impl Attached {
    /// The process with this id.
    ///
    /// # Errors
    /// [`Code::CannotStart`] if there is none or it is a thread of one, [`Code::CannotMeasure`] if
    /// `/proc` belongs to other processes.
    pub(crate) fn find(pid: u32) -> Result<Self, Problem> {
        let place = format!("--pid {pid}");
        if !Procfs::default().is_of_this_namespace() {
            let message = "/proc shows the processes of another namespace";
            return Err(Problem::new(Code::CannotMeasure, message).at(place));
        }
        let identity = identity_of(pid).ok_or_else(|| {
            Problem::new(Code::CannotStart, "there is no such process")
                .at(&*place)
                .help("`ps` or `pgrep` shows process ids; in a container, those of this container")
        })?;
        // A thread looks like a process there, but for its descendants: it seems to have none.
        if let Some(of) = process_of(pid).filter(|of| *of != pid) {
            let problem = Problem::new(Code::CannotStart, format!("this is a thread of process {of}"));
            return Err(problem.at(place).help(format!("--pid {of} measures the process")));
        }
        Ok(Self { identity })
    }

    /// Its process id.
    pub(crate) fn pid(self) -> u32 {
        self.identity.0
    }

    /// Its program and arguments; its name alone if it keeps them to itself.
    pub(crate) fn command(self) -> Vec<String> {
        let text = |file: &str| std::fs::read(format!("/proc/{}/{file}", self.pid())).unwrap_or_default();
        let words: Vec<String> = text("cmdline")
            .split(|byte| *byte == 0)
            .filter(|word| !word.is_empty())
            .map(|word| String::from_utf8_lossy(word).into_owned())
            .collect();
        if words.is_empty() { vec![String::from_utf8_lossy(&text("comm")).trim().to_owned()] } else { words }
    }

    /// Waits for its end, for at most this time.
    pub(crate) fn wait(self, interrupts: &Interrupts, time: Option<Duration>) -> AttachedEvent {
        let start = Instant::now();
        loop {
            let left = time.map(|time| time.saturating_sub(start.elapsed()));
            match interrupts.receiver().recv_timeout(left.map_or(LOOK, |left| left.min(LOOK))) {
                Ok(signal) => return AttachedEvent::Interrupted(signal),
                Err(RecvTimeoutError::Disconnected | RecvTimeoutError::Timeout) => {}
            }
            // The id may belong to another process by now.
            if identity_of(self.pid()) != Some(self.identity) {
                return AttachedEvent::Ended;
            }
            if time.is_some_and(|time| start.elapsed() >= time) {
                return AttachedEvent::TimeUp;
            }
        }
    }
}

/// The process that a thread belongs to: a process is its own first thread.
fn process_of(thread: u32) -> Option<u32> {
    let status = std::fs::read(format!("/proc/{thread}/status")).ok()?;
    let line = status.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(b"Tgid:"))?;
    std::str::from_utf8(line).ok()?.trim().parse().ok()
}
