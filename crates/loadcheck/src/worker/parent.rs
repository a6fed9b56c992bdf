//! The parent's side: starts a worker, hears its messages, stops it in time, and tells the end of
//! it.

use std::ffi::OsString;
use std::io::{self, BufRead as _, BufReader, Read, Write as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, after, never, select, unbounded};
use onelayer_probe::{ChildGroup, prefer_for_oom_kill};
use rustix::process::{Pid, Signal, kill_process};

use super::child::ARGUMENT;
use super::protocol::{Job, Message, Task};
use crate::problem::{Code, Problem};
use crate::report::Outcome;
use crate::signals::{ASKING_TO_STOP, Interrupts, name_of};

/// How long a worker may take to end by itself after it was asked to: the whole program has two
/// seconds, on a busy machine too.
const PATIENCE: Duration = Duration::from_millis(1200);
/// How much later than its worker this process may hear of a signal that went to both.
const SIGNAL_PATIENCE: Duration = Duration::from_secs(1);
/// Where glibc looks for settings.
const ALLOCATOR_VARIABLE: &str = "GLIBC_TUNABLES";
/// See [`frugal_allocator`].
const FRUGAL: &str = "glibc.malloc.tcache_count=0:glibc.malloc.arena_max=1:glibc.pthread.stack_cache_size=0";
/// The longest line of a worker: a hash, a place or a plan, never a tensor.
const LINE_BYTES_MAX: u64 = 64 << 20;

/// How a worker ended.
#[derive(Debug)]
pub(crate) enum Ending {
    /// It ended by itself; problems if it could not report.
    Ended(Vec<Problem>),
    /// It was stopped because this signal came.
    Interrupted(i32),
}

/// Starts a worker on `task` and hands its messages to `listen` until it has ended. A message that
/// is the worker's last word (`Checked`, `Done`, `Error`) is handed over like any other. With a
/// control group, the worker runs in it.
///
/// Call it from a thread that outlives the worker: the kernel kills a child when the *thread* that
/// started it ends.
pub(crate) fn carry_out(
    task: Task,
    group: Option<&ChildGroup>,
    interrupts: &Interrupts,
    mut listen: impl FnMut(Message),
) -> Ending {
    let (mut child, messages) = match start(task, group) {
        Ok(started) => started,
        Err(problem) => return Ending::Ended(vec![problem]),
    };
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let (mut has_last_word, mut was_told_to_stop) = (false, false);
    let mut interrupted = None;
    let mut deadline = never();
    loop {
        select! {
            recv(messages) -> message => match message {
                Ok(message) => {
                    has_last_word |= matches!(message, Message::Checked(_) | Message::Done(_) | Message::Error(_));
                    was_told_to_stop |= is_interrupted(&message);
                    listen(message);
                }
                Err(_) => break,
            },
            recv(interrupts.receiver()) -> signal => if let Ok(signal) = signal {
                interrupted.get_or_insert(signal);
                send(pid, Signal::TERM);
                deadline = after(PATIENCE);
            },
            recv(deadline) -> _ => {
                send(pid, Signal::KILL);
                deadline = never();
            }
        }
    }
    let status = wait(&mut child);
    // Ctrl-C reaches worker and parent alike, and the worker may have been the faster one: half a load
    // is no success.
    let is_on_its_way = was_told_to_stop || is_ended_by_interrupt(status);
    let patience = if is_on_its_way { SIGNAL_PATIENCE } else { Duration::ZERO };
    match interrupted.or_else(|| interrupts.receiver().recv_timeout(patience).ok()) {
        Some(signal) => Ending::Interrupted(signal),
        None if was_told_to_stop => Ending::Ended(vec![Problem::new(
            Code::Interrupted,
            "the worker was interrupted by a signal that it alone was sent",
        )]),
        None if has_last_word => Ending::Ended(Vec::new()),
        None => Ending::Ended(vec![lost(status)]),
    }
}

/// Address space of the thread that listens (its stack), and of the report that follows.
const LISTENING_BYTES: usize = 3 << 20;

/// True for the last word of a worker that was asked to stop.
fn is_interrupted(message: &Message) -> bool {
    matches!(message, Message::Done(finished) if finished.run.outcome == Outcome::Interrupted)
}

/// True for a worker that was ended by a signal that it could not listen to yet.
fn is_ended_by_interrupt(status: Option<ExitStatus>) -> bool {
    let signal = status.and_then(|status| status.signal());
    signal.is_some_and(|signal| ASKING_TO_STOP.contains(&signal))
}

fn start(task: Task, group: Option<&ChildGroup>) -> Result<(Child, Receiver<Message>), Problem> {
    let cannot = |what: &str, error: &dyn std::fmt::Display| {
        Problem::new(Code::WorkerLost, format!("cannot {what} the worker process: {error}"))
    };
    let mut command = Command::new("/proc/self/exe");
    // For `ps`; the name in `top` is set by the worker itself.
    command.arg0(env!("CARGO_BIN_NAME")).arg(ARGUMENT).stdin(Stdio::piped()).stdout(Stdio::piped());
    if matches!(task, Task::Cycle { .. }) {
        command.env(ALLOCATOR_VARIABLE, frugal_allocator(std::env::var_os(ALLOCATOR_VARIABLE)));
    }
    if let Some(group) = group {
        group.enter_on_spawn(&mut command).map_err(|error| cannot("place", &error))?;
    }
    prefer_for_oom_kill(&mut command);
    let mut child = command.spawn().map_err(|error| {
        let problem = cannot("start", &error);
        if error.kind() == io::ErrorKind::NotFound { problem.help("/proc must be mounted") } else { problem }
    })?;
    let job = Job { parent_pid: std::process::id(), task };
    let text = serde_json::to_vec(&job).map_err(|error| cannot("instruct", &error))?;
    let mut stdin = child.stdin.take().expect("stdin was asked for as a pipe");
    // A worker that ends before it has read everything is noticed when its own output ends.
    let _ = stdin.write_all(&text);
    drop(stdin);
    let stdout = child.stdout.take().expect("stdout was asked for as a pipe");
    let (sender, messages) = unbounded();
    // An allocation that fails ends a process without a word, so it ends in order before that.
    std::hint::black_box(&mut Vec::<u8>::new())
        .try_reserve_exact(LISTENING_BYTES)
        .map_err(|error| cannot("listen to", &error))?;
    thread::Builder::new()
        .name("worker-messages".to_owned())
        .spawn(move || {
            let mut lines = BufReader::new(stdout);
            let mut line = Vec::new();
            loop {
                line.clear();
                match lines.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line) {
                    Ok(0) | Err(_) => return,
                    Ok(_) => {}
                }
                // A line that is cut or foreign is no message; the worker's end tells the rest.
                if let Ok(message) = serde_json::from_slice(&line)
                    && sender.send(message).is_err()
                {
                    return;
                }
            }
        })
        .map_err(|error| cannot("listen to", &error))?;
    Ok((child, messages))
}

/// Settings of glibc with which it keeps little of what is given back: no thread has a cache of its
/// own, all share one arena, and the stacks of threads that have ended go. What it keeps otherwise
/// grows for hundreds of cycles, more slowly each time, and would be measured as a slope. What
/// there is already comes last, and so counts.
///
/// Format and names: "Tunables" in the GNU C Library manual. Other libraries do not look.
fn frugal_allocator(already: Option<OsString>) -> OsString {
    let mut settings = OsString::from(FRUGAL);
    if let Some(already) = already.filter(|already| !already.is_empty()) {
        settings.push(":");
        settings.push(already);
    }
    settings
}

fn send(pid: Option<Pid>, signal: Signal) {
    if let Some(pid) = pid {
        // It may have ended already, and is not reaped before `wait`: no other process can have its id.
        let _ = kill_process(pid, signal);
    }
}

/// Waits for a child whose output has ended: it is about to end, or is killed.
fn wait(child: &mut Child) -> Option<ExitStatus> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Some(status),
            Ok(None) if Instant::now() < deadline => thread::sleep(Duration::from_millis(1)),
            _ => {
                let _ = child.kill();
                return child.wait().ok();
            }
        }
    }
}

fn lost(status: Option<ExitStatus>) -> Problem {
    match status {
        Some(status) if status.signal().is_some() => {
            let signal = status.signal().unwrap_or_default();
            let problem = Problem::new(
                Code::WorkerKilled,
                format!("the worker was killed by {} before it could report", name_of(signal)),
            );
            if signal == Signal::KILL.as_raw() {
                problem.help("a memory limit kills like that: look for the out-of-memory killer in `dmesg`")
            } else {
                problem
            }
        }
        Some(status) => Problem::new(
            Code::WorkerLost,
            format!("the worker ended with exit code {} without a report", status.code().unwrap_or_default()),
        )
        .help("this is a bug in loadcheck; its message stands above"),
        None => Problem::new(Code::WorkerLost, "the worker cannot be waited for"),
    }
}
