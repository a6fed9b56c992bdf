//! Work on a thread of its own, so that Ctrl-C and SIGTERM are answered while it goes on.

use std::any::Any;
use std::panic::resume_unwind;
use std::thread;

use crossbeam_channel::{bounded, select};

use crate::problem::{Code, Problem};
use crate::signals::Interrupts;

/// What happens to the work when a signal comes.
pub(crate) enum OnSignal<'a> {
    /// It is left alone: the program ends before it does. For work that changes nothing.
    Leave,
    /// It is asked to end, and waited for if it says that it will.
    Ask(&'a dyn Fn() -> bool),
}

/// How the work ended.
#[derive(Debug)]
pub(crate) enum Ended<T> {
    /// With its result. The signal came on the way, if one did.
    With(T, Option<i32>),
    /// Not at all: it was left when this signal came.
    Left(i32),
}

/// Does `work`.
///
/// # Errors
/// A thread that cannot be had.
///
/// # Panics
/// If `work` does.
pub(crate) fn beside<T: Send + 'static>(
    interrupts: &Interrupts,
    on_signal: OnSignal<'_>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<Ended<T>, Problem> {
    let (sender, results) = bounded(1);
    let thread = thread::Builder::new().name("convert".to_owned()).spawn(move || {
        // Nobody listens if the work was left.
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
