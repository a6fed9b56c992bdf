//! Long work on a thread of its own, while the caller's thread reports progress and watches for
//! Ctrl-C.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use onelayer::convert::{ConvertCancel, ConvertEvent};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

/// How often signals are checked.
const WAIT_SLICE: Duration = Duration::from_millis(100);

/// Bytes done, and in all.
type Progress = (u64, u64);

/// Tells the caller's thread how far the work is.
pub(crate) struct Reporter(Sender<Progress>);

/// The caller's end.
pub(crate) struct Watch(Receiver<Progress>);

/// Both ends. The work must drop its end when it is done.
pub(crate) fn watch() -> (Reporter, Watch) {
    let (sender, events) = channel();
    (Reporter(sender), Watch(events))
}

impl Reporter {
    /// Passes on the progress of an event, if it has any.
    pub(crate) fn hear(&self, event: &ConvertEvent<'_>) {
        let (ConvertEvent::Progress { done_bytes, total_bytes }
        | ConvertEvent::Verifying { done_bytes, total_bytes }) = *event
        else {
            return;
        };
        // Nobody listens any more after a cancellation.
        let _ = self.0.send((done_bytes, total_bytes));
    }
}

impl Watch {
    /// Runs `work` on a thread, and calls `progress` with the bytes done and in all. An exception of
    /// `progress`, or Ctrl-C, cancels the work, waits for its end, and is returned.
    pub(crate) fn run<T: Send + 'static>(
        self,
        py: Python<'_>,
        progress: Option<&Py<PyAny>>,
        cancel: &ConvertCancel,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> PyResult<T> {
        let builder = thread::Builder::new().name("onelayer-convert".to_owned());
        let worker = builder.spawn(work);
        let worker =
            worker.map_err(|error| PyRuntimeError::new_err(format!("cannot start a thread: {error}")))?;
        let watched = self.until_the_end(py, progress);
        if watched.is_err() {
            cancel.cancel();
        }
        let done = py.detach(|| worker.join());
        watched?;
        done.map_err(|_| PyRuntimeError::new_err("the work ended in a panic"))
    }

    fn until_the_end(mut self, py: Python<'_>, progress: Option<&Py<PyAny>>) -> PyResult<()> {
        let events = &mut self.0;
        loop {
            let waiting = &mut *events;
            let event = py.detach(move || waiting.recv_timeout(WAIT_SLICE));
            py.check_signals()?;
            match (event, progress) {
                (Ok(event), Some(progress)) => drop(progress.call1(py, event)?),
                (Ok(_), None) | (Err(RecvTimeoutError::Timeout), _) => {}
                (Err(RecvTimeoutError::Disconnected), _) => return Ok(()),
            }
        }
    }
}
