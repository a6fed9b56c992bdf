//! A Python stream: an interruptible iterator of layers, and a context manager.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use onelayer::{Awaited, CancelHandle, LoadError, LoadPlan, LoadReport, Progress, Target};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors;
use crate::events::Callbacks;
use crate::layer::Layer;
use crate::plan::Plan;
use crate::report::Report;

/// How often a wait checks for signals: Ctrl-C works within this time.
const WAIT_SLICE: Duration = Duration::from_millis(100);

/// A running load.
#[pyclass(frozen, module = "onelayer")]
pub(crate) struct LayerStream {
    /// Locked only while detached from the interpreter.
    state: Mutex<State>,
    cancel: CancelHandle,
    progress: Progress,
    plan: Arc<LoadPlan>,
    target: Target,
    callbacks: Callbacks,
}

enum State {
    Running(Box<onelayer::LayerStream>),
    Closed(Box<LoadReport>),
}

/// The result of one slice of a wait.
enum Slice {
    Awaited(Awaited),
    Failed(LoadError),
    Closed,
}

impl LayerStream {
    pub(crate) fn new(stream: onelayer::LayerStream, target: Target, callbacks: Callbacks) -> Self {
        let (cancel, progress) = (stream.cancel_handle(), stream.progress());
        let plan = Arc::clone(stream.plan());
        let state = Mutex::new(State::Running(Box::new(stream)));
        Self { state, cancel, progress, plan, target, callbacks }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // After a panic with the lock held the stream has ended.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_a_slice(&self) -> Slice {
        match &mut *self.lock() {
            State::Closed(_) => Slice::Closed,
            State::Running(stream) => match stream.next_within(WAIT_SLICE) {
                Ok(awaited) => Slice::Awaited(awaited),
                Err(error) => Slice::Failed(error),
            },
        }
    }

    /// Ends the load and keeps its report.
    fn end(&self) {
        // Ends waits in other threads.
        self.cancel.cancel();
        let mut state = self.lock();
        if let State::Running(stream) = &*state {
            let report = Box::new(stream.report());
            // Drops the running load: threads, files, ring, layers not handed out.
            *state = State::Closed(report);
        }
    }
}

#[pymethods]
impl LayerStream {
    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Layer>> {
        loop {
            let slice = py.detach(|| self.wait_a_slice());
            self.callbacks.call(py)?;
            match slice {
                Slice::Awaited(Awaited::Layer(layer)) => return Ok(Some(Layer::new(layer, self.target))),
                Slice::Awaited(Awaited::Ended) => return Ok(None),
                Slice::Awaited(_) => py.check_signals()?,
                Slice::Failed(error) => return Err(errors::of_load(py, &error)),
                Slice::Closed => return Err(PyValueError::new_err("the stream was closed")),
            }
        }
    }

    /// Number of layers.
    fn __len__(&self) -> usize {
        self.plan.layers().len()
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.end());
        self.callbacks.call(py)
    }

    /// Cancels the load: the next wait for a layer fails. Returns at once.
    fn cancel(&self) {
        self.cancel.cancel();
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) -> PyResult<()> {
        self.close(py)
    }

    #[getter]
    fn closed(&self, py: Python<'_>) -> bool {
        py.detach(|| matches!(&*self.lock(), State::Closed(_)))
    }

    #[getter]
    fn report(&self, py: Python<'_>) -> Report {
        let report = py.detach(|| match &*self.lock() {
            State::Running(stream) => stream.report(),
            State::Closed(report) => LoadReport::clone(report),
        });
        Report::new(&report, &self.plan)
    }

    #[getter]
    fn plan(&self) -> Plan {
        Plan::new(&self.plan)
    }

    /// Tensor bytes that have arrived, and in total.
    #[getter]
    fn progress(&self) -> (u64, u64) {
        (self.progress.tensor_bytes_done(), self.progress.tensor_bytes_total())
    }

    fn __repr__(&self) -> String {
        let (done, total) = self.progress();
        format!(
            "<onelayer.LayerStream: {} layers to {}, {done} of {total} bytes>",
            self.__len__(),
            self.target
        )
    }
}

impl Drop for LayerStream {
    fn drop(&mut self) {
        // The interpreter may be attached here. Joining the threads cannot hang, since they never
        // need it.
        self.end();
    }
}
