//! A command as a child process: passes its output on, waits for its end, stops its whole tree when
//! wanted.
//!
//! Signals: a Ctrl-C in a terminal reaches the child by itself, since it shares our process group;
//! every other signal is forwarded. A child that does not end in time is killed with all its
//! descendants.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::AsFd as _;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded, select, unbounded};
use onelayer_probe::{ChildGroup, prefer_for_oom_kill};
use regex::bytes::Regex;
use rustix::process::{Signal, getpgrp, kill_process};
use signal_hook::consts::SIGINT;

use crate::descendants::descendants;
use crate::problem::{Code, Problem};
use crate::signals::Interrupts;

/// How long a command may take to end after it was asked to because its line was seen.
const PATIENCE: Duration = Duration::from_secs(5);
/// The same after Ctrl-C: the program itself is to be gone within 2 s.
const PATIENCE_INTERRUPTED: Duration = Duration::from_millis(1500);
/// How long a signal may take to be noticed after the command that it ended too.
const SIGNAL_DELAY: Duration = Duration::from_millis(50);
/// A longer line is looked at in pieces.
const LINE_BYTES_MAX: usize = 1 << 20;

/// Looks for a line in what a command prints.
#[derive(Debug)]
pub(crate) struct LineWatch {
    pattern: Arc<Regex>,
    sender: Sender<()>,
    receiver: Receiver<()>,
}

impl LineWatch {
    /// Waits for the first line that matches.
    pub(crate) fn new(pattern: Regex) -> Self {
        let (sender, receiver) = bounded(1);
        Self { pattern: Arc::new(pattern), sender, receiver }
    }

    /// Waits for each line that matches.
    pub(crate) fn each(pattern: Regex) -> Self {
        let (sender, receiver) = unbounded();
        Self { pattern: Arc::new(pattern), sender, receiver }
    }

    /// Passes everything on, and notices the line. Ends with the pipe.
    fn pass_on(
        &self,
        mut from: impl Read + Send + 'static,
        mut to: impl Write + Send + 'static,
    ) -> io::Result<()> {
        let (pattern, sender) = (Arc::clone(&self.pattern), self.sender.clone());
        thread::Builder::new().name("command-output".to_owned()).spawn(move || {
            let (mut block, mut line) = (vec![0; 64 << 10], Vec::new());
            loop {
                let count = match from.read(&mut block) {
                    Ok(0) => break,
                    Ok(count) => count,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    Err(_) => break,
                };
                // The reader of our output may be gone; the line still counts.
                let _ = to.write_all(&block[..count]).and_then(|()| to.flush());
                for &byte in &block[..count] {
                    if byte == b'\n' || line.len() >= LINE_BYTES_MAX {
                        notice(&pattern, &mut line, &sender);
                    }
                    if byte != b'\n' {
                        line.push(byte);
                    }
                }
            }
            notice(&pattern, &mut line, &sender);
        })?;
        Ok(())
    }
}

fn notice(pattern: &Regex, line: &mut Vec<u8>, sender: &Sender<()>) {
    if pattern.is_match(line) {
        // Where one match is enough, there is room for one.
        let _ = sender.try_send(());
    }
    line.clear();
}

/// Why waiting ended.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Event {
    /// The command ended.
    Ended(Option<ExitStatus>),
    /// The line was seen.
    LineSeen,
    /// A signal asked to stop.
    Interrupted(i32),
}

/// A command that has ended.
#[derive(Debug, Default)]
pub(crate) struct Ended {
    /// Its exit code, if it ended by itself.
    pub(crate) exit_code: Option<i32>,
    /// The signal that ended it.
    pub(crate) signal: Option<i32>,
    /// The line was seen before that.
    pub(crate) line_seen: bool,
    /// It was not started here, and may run on.
    pub(crate) is_attached: bool,
    /// The signal that asked us to stop.
    pub(crate) interrupted: Option<i32>,
    /// Descendants that outlived it and were left alone.
    pub(crate) left_behind: usize,
}

/// A running command.
#[derive(Debug)]
pub(crate) struct Child {
    pid: u32,
    start: Instant,
    exit: Receiver<Option<ExitStatus>>,
    status: Option<ExitStatus>,
    watch: Option<LineWatch>,
}

impl Child {
    /// Starts `words`. With `stdout_is_ours`, what it prints goes to stderr. Without `reads_stdin`,
    /// there is nothing on its stdin: of several runs, the first would take it all.
    ///
    /// # Errors
    /// [`Code::CannotStart`] if there is no such program or it cannot be run.
    pub(crate) fn start(
        words: &[OsString],
        watch: Option<LineWatch>,
        stdout_is_ours: bool,
        reads_stdin: bool,
        group: Option<&ChildGroup>,
    ) -> Result<Self, Problem> {
        let (program, arguments) = words.split_first().expect("the parser asks for at least one word");
        let cannot = |error: &dyn std::fmt::Display| {
            Problem::new(Code::CannotStart, format!("cannot start the command: {error}"))
                .at(program.to_string_lossy().into_owned())
        };
        let mut command = Command::new(program);
        command.args(arguments);
        if !reads_stdin {
            command.stdin(Stdio::null());
        }
        if watch.is_some() {
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
        } else if stdout_is_ours {
            let stderr = io::stderr().as_fd().try_clone_to_owned().map_err(|error| cannot(&error))?;
            command.stdout(stderr);
        }
        if let Some(group) = group {
            group.enter_on_spawn(&mut command).map_err(|error| cannot(&error))?;
        }
        prefer_for_oom_kill(&mut command);
        let start = Instant::now();
        let mut child = command.spawn().map_err(|error| cannot(&error))?;
        if let Some(watch) = &watch {
            let stdout = child.stdout.take().expect("stdout was asked for as a pipe");
            let stderr = child.stderr.take().expect("stderr was asked for as a pipe");
            let passed = if stdout_is_ours {
                watch.pass_on(stdout, io::stderr())
            } else {
                watch.pass_on(stdout, io::stdout())
            };
            passed.and_then(|()| watch.pass_on(stderr, io::stderr())).map_err(|error| cannot(&error))?;
        }
        let pid = child.id();
        let (sender, exit) = bounded(1);
        thread::Builder::new()
            .name("command-end".to_owned())
            .spawn(move || sender.send(child.wait().ok()))
            .map_err(|error| cannot(&error))?;
        Ok(Self { pid, start, exit, status: None, watch })
    }

    /// Its process id.
    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    /// Since it was started.
    pub(crate) fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// Waits for the first event.
    pub(crate) fn wait(&mut self, interrupts: &Interrupts) -> Event {
        let never = crossbeam_channel::never();
        let line = self.watch.as_ref().map_or(&never, |watch| &watch.receiver);
        select! {
            recv(line) -> _ => Event::LineSeen,
            recv(self.exit) -> status => {
                let status = status.unwrap_or_default().or(self.status);
                self.status = status;
                // A Ctrl-C reaches the command as well; its end may be known before the signal is.
                if !status.is_some_and(|status| status.success())
                    && let Ok(signal) = interrupts.receiver().recv_timeout(SIGNAL_DELAY)
                {
                    return Event::Interrupted(signal);
                }
                // What it printed last may still be on its way.
                match &self.watch {
                    Some(watch) if watch.receiver.recv_timeout(Duration::from_millis(200)).is_ok() => Event::LineSeen,
                    _ => Event::Ended(status),
                }
            }
            recv(interrupts.receiver()) -> signal => Event::Interrupted(signal.unwrap_or(SIGINT)),
        }
    }

    /// Stops it if it still runs, and says how it ended.
    pub(crate) fn end(self, event: Event, interrupts: &Interrupts) -> Ended {
        let mut ended = Ended::default();
        let status = match event {
            Event::Ended(status) => status,
            Event::LineSeen => {
                ended.line_seen = true;
                let interrupted = self.stop(Signal::TERM, true, PATIENCE, interrupts);
                ended.interrupted = interrupted.1;
                interrupted.0
            }
            Event::Interrupted(signal) => {
                ended.interrupted = Some(signal);
                let forwarded = Signal::from_named_raw(signal).unwrap_or(Signal::TERM);
                let is_there_already = signal == SIGINT && is_in_foreground();
                self.stop(forwarded, !is_there_already, PATIENCE_INTERRUPTED, interrupts).0
            }
        };
        ended.exit_code = status.and_then(|status| status.code());
        ended.signal = status.and_then(|status| status.signal());
        ended.left_behind = if matches!(event, Event::Ended(_)) { descendants().len() } else { 0 };
        ended
    }

    /// Sends `signal` to the command (if `send`), waits, then kills what is left of its tree.
    fn stop(
        &self,
        signal: Signal,
        send: bool,
        patience: Duration,
        interrupts: &Interrupts,
    ) -> (Option<ExitStatus>, Option<i32>) {
        if send {
            send_all(signal);
        }
        let deadline = Instant::now() + patience;
        let (mut status, mut interrupted) = (self.status, None);
        while Instant::now() < deadline && interrupted.is_none() {
            match self.exit.recv_timeout(Duration::from_millis(20)) {
                Ok(exit) => status = exit,
                Err(RecvTimeoutError::Timeout) => {}
                // Its end was told before; what is left are its descendants.
                Err(RecvTimeoutError::Disconnected) => thread::sleep(Duration::from_millis(20)),
            }
            interrupted = interrupts.receiver().try_recv().ok();
            if descendants().is_empty() {
                break;
            }
        }
        end_descendants();
        let last = self.exit.recv_timeout(Duration::from_millis(200)).ok().flatten();
        (status.or(last), interrupted)
    }
}

/// Kills every descendant.
pub(crate) fn end_descendants() {
    // New ones may be born between the list and the kill.
    for _ in 0..10 {
        if !send_all(Signal::KILL) {
            break;
        }
        thread::sleep(Duration::from_millis(10));
    }
}

/// Sends a signal to every descendant; false if there is none left.
fn send_all(signal: Signal) -> bool {
    let family = descendants();
    for pid in &family {
        // It may have ended since it was listed.
        let _ = kill_process(*pid, signal);
    }
    !family.is_empty()
}

/// True if this process belongs to the foreground of its terminal: Ctrl-C then reaches its children
/// by itself.
fn is_in_foreground() -> bool {
    let terminal = std::fs::File::open("/dev/tty");
    terminal.is_ok_and(|terminal| rustix::termios::tcgetpgrp(terminal).is_ok_and(|group| group == getpgrp()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_seen_in_whatever_pieces_it_comes() {
        let watch = LineWatch::new(Regex::new("^server is ready$").unwrap());
        let text: &[u8] = b"not ready\nserver is ready\nmore";
        watch.pass_on(text.chain(&b""[..]), io::sink()).unwrap();
        assert!(watch.receiver.recv_timeout(Duration::from_secs(5)).is_ok());
        let watch = LineWatch::new(Regex::new("ready$").unwrap());
        watch.pass_on(&b"ready or not"[..], io::sink()).unwrap();
        assert!(watch.receiver.recv_timeout(Duration::from_millis(200)).is_err());
    }
}
