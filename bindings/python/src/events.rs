//! Times of layers and passes, for the callbacks `on_layer` and `on_pass`.
//!
//! The loader's thread must not wait for the interpreter: a stream that is dropped waits for that
//! thread, maybe with the interpreter attached. So events wait in a channel, and the thread that
//! takes the layers calls the callbacks.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use onelayer::{Binding, LoaderBuilder, Waits};
use pyo3::prelude::*;

/// The times of one layer in one pass. Moments count from the start of the load.
#[pyclass(frozen, get_all, module = "onelayer")]
pub(crate) struct LayerTimes {
    name: String,
    /// Its place in the order of the stream.
    index: usize,
    pass_number: u64,
    /// True if it stays from the first pass to the last.
    is_kept: bool,
    reading_seconds: f64,
    filling_seconds: f64,
    linking_seconds: f64,
    /// Waits since the layer before it was handed out, in seconds, by cause.
    waits: HashMap<String, f64>,
    opened_seconds: f64,
    handed_out_seconds: f64,
    /// `None` for a kept layer, and if the stream ended before.
    released_seconds: Option<f64>,
}

/// The times of one pass.
#[pyclass(frozen, get_all, module = "onelayer")]
pub(crate) struct PassTimes {
    pass_number: u64,
    seconds: f64,
    /// Waits in seconds, by cause.
    waits: HashMap<String, f64>,
    read_bytes: u64,
}

#[pymethods]
impl LayerTimes {
    fn __repr__(&self) -> String {
        let Self { name, pass_number, reading_seconds, filling_seconds, .. } = self;
        format!(
            "<onelayer.LayerTimes {name:?}, pass {pass_number}: read for {reading_seconds:.4} s, \
             filled for {filling_seconds:.4} s>"
        )
    }
}

#[pymethods]
impl PassTimes {
    fn __repr__(&self) -> String {
        let Self { pass_number, seconds, read_bytes, .. } = self;
        format!("<onelayer.PassTimes {pass_number}: {seconds:.3} s, {read_bytes} bytes read>")
    }
}

/// Seconds by cause: `disk`, `fill`, `link`, `engine`.
pub(crate) fn seconds_by_cause(waits: &Waits) -> HashMap<String, f64> {
    Binding::ALL.map(|cause| (cause.to_string(), waits.of(cause).as_secs_f64())).into()
}

enum Event {
    Layer(LayerTimes),
    Pass(PassTimes),
}

/// The callbacks of a load, and the events that wait for them.
#[derive(Default)]
pub(crate) struct Callbacks {
    on_layer: Option<Py<PyAny>>,
    on_pass: Option<Py<PyAny>>,
    events: Option<Mutex<Receiver<Event>>>,
}

impl Callbacks {
    /// Has the load report what the callbacks want to know.
    pub(crate) fn attach(
        mut builder: LoaderBuilder,
        on_layer: Option<Py<PyAny>>,
        on_pass: Option<Py<PyAny>>,
    ) -> (LoaderBuilder, Self) {
        if on_layer.is_none() && on_pass.is_none() {
            return (builder, Self::default());
        }
        let (sender, events) = channel();
        if on_layer.is_some() {
            let sender: Sender<Event> = sender.clone();
            // Nobody listens any more once the stream is gone.
            builder = builder.on_layer(move |times| drop(sender.send(Event::Layer(layer_times(times)))));
        }
        if on_pass.is_some() {
            builder = builder.on_pass(move |pass| drop(sender.send(Event::Pass(pass_times(pass)))));
        }
        (builder, Self { on_layer, on_pass, events: Some(Mutex::new(events)) })
    }

    /// Calls the callbacks for all events so far.
    ///
    /// # Errors
    /// Those of the callbacks.
    pub(crate) fn call(&self, py: Python<'_>) -> PyResult<()> {
        let Some(events) = &self.events else { return Ok(()) };
        loop {
            // The lock is free again before Python code runs.
            let event = events.lock().unwrap_or_else(PoisonError::into_inner).try_recv();
            match (event, &self.on_layer, &self.on_pass) {
                (Ok(Event::Layer(times)), Some(told), _) => drop(told.call1(py, (times,))?),
                (Ok(Event::Pass(times)), _, Some(told)) => drop(told.call1(py, (times,))?),
                (Ok(_), ..) => {}
                (Err(_), ..) => return Ok(()),
            }
        }
    }
}

fn layer_times(times: &onelayer::LayerTimes<'_>) -> LayerTimes {
    LayerTimes {
        name: times.id.as_str().to_owned(),
        index: times.index,
        pass_number: times.pass,
        is_kept: times.is_kept,
        reading_seconds: times.reading.as_secs_f64(),
        filling_seconds: times.filling.as_secs_f64(),
        linking_seconds: times.linking.as_secs_f64(),
        waits: seconds_by_cause(&times.waits),
        opened_seconds: times.opened.as_secs_f64(),
        handed_out_seconds: times.handed_out.as_secs_f64(),
        released_seconds: times.released.as_ref().map(Duration::as_secs_f64),
    }
}

fn pass_times(pass: &onelayer::PassReport) -> PassTimes {
    PassTimes {
        pass_number: pass.pass,
        seconds: pass.elapsed.as_secs_f64(),
        waits: seconds_by_cause(&pass.waits),
        read_bytes: pass.read_bytes,
    }
}
