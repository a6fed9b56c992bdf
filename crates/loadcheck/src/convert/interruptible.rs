//! Runs work on another thread, so that Ctrl-C and SIGTERM are handled meanwhile.

use std::any::Any;
use std::panic::resume_unwind;
use std::thread;

use crossbeam_channel::{bounded, select};

use crate::problem::{Code, Problem};
use crate::signals::Interrupts;

/// How a signal ends the work.
pub(crate) enum OnSignal<'a> {
    /// The program ends without waiting for it. For work that changes nothing.
    Leave,
    /// The function asks it to end. If the function returns true, the program waits for the work.
    Ask(&'a dyn Fn() -> bool),
}

/// How the work ended.
#[derive(Debug)]
pub(crate) enum Ended<T> {
    /// With its result, and the signal that came meanwhile, if any.
    With(T, Option<i32>),
    /// It was abandoned because of this signal.
    Left(i32),
}

/// Runs `work`.
///
/// # Errors
/// A thread that cannot be had.
///
/// # Panics
/// If `work` does.
pub(crate) fn run_interruptible<T: Send + 'static>(
    interrupts: &Interrupts,
    on_signal: OnSignal<'_>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<Ended<T>, Problem> {
    let (sender, results) = bounded(1);
    let thread = thread::Builder::new().name("convert".to_owned()).spawn(move || {
        // The receiver is gone if the work was abandoned.
        let _ = sender.send(work());
    });
    let thread =
        thread.map_err(|error| Problem::new(Code::LoadFailed, format!("cannot start a thread: {error}")))?;
    let panicked = |thread: thread::JoinHandle<()>| -> Box<dyn Any + Send> {
        thread.join().err().unwrap_or_else(|| Box::new("the work ended without a result"))
    };
    let signal = select! {
        recv(results) -> result => match result {
            Ok(result) => return Ok(Ended::With(result, None)),
            Err(_) => resume_unwind(panicked(thread)),
        },
        recv(interrupts.receiver()) -> signal => signal.ok(),
    };
    if let Some(signal) = signal {
        let will_end = match on_signal {
            OnSignal::Leave => false,
            OnSignal::Ask(ask) => ask(),
        };
        if !will_end {
            return Ok(Ended::Left(signal));
        }
    }
    match results.recv() {
        Ok(result) => Ok(Ended::With(result, signal)),
        Err(_) => resume_unwind(panicked(thread)),
    }
}
