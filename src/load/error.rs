//! The errors that end a load.

use std::any::Any;
use std::path::PathBuf;
use std::time::Duration;

use crate::budget::BudgetError;
use crate::device::DeviceError;
use crate::layers::{LayerId, LayersError};
use crate::plan::PlanError;
use crate::slices::SliceError;
use crate::source::SourceError;
use crate::staging::StagingError;
use crate::units::HumanBytes;

/// An error that ended a load. Everything that the load held is freed when the stream is dropped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The tensors cannot be grouped into layers.
    #[error(transparent)]
    Layers(#[from] LayersError),
    /// The load cannot be planned, mostly because the budget is too small. Nothing was read.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The terms of the plan exceed the budget: an error in the plan itself.
    #[error(transparent)]
    Budget(#[from] BudgetError),
    /// A row of a weight to be quantised has an infinity or a NaN, so it has no scale.
    #[error(
        "row {row} of {tensor:?} has an infinity or a NaN and cannot be quantised; load the tensor as it is, or \
         leave it out"
    )]
    NotFinite {
        /// The tensor.
        tensor: String,
        /// The first such row that was found, counted over all dimensions but the last.
        row: u64,
    },
    /// The tensor has no such part.
    #[error(transparent)]
    Slice(#[from] SliceError),
    /// The ring cannot be allocated.
    #[error(transparent)]
    Staging(#[from] StagingError),
    /// A file cannot be read, or it changed since its header was checked.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The caller holds every layer of the window and waits for the next one.
    #[error(
        "the window is full: the caller has held {} for {waited:?}; drop a layer before taking the next, or \
         allow a window of more than {window}",
        list(held)
    )]
    Stalled {
        /// Layers the caller holds, in execution order.
        held: Vec<LayerId>,
        /// Size of the window.
        window: usize,
        /// How long the stream waited.
        waited: Duration,
    },
    /// The layers that the caller holds leave no room in the device budget for the next one, which
    /// the caller waits for. Layers that are dropped in the order in which they came always leave
    /// room.
    #[error(
        "the device budget of {} is full: the caller has held {} for {waited:?}; drop a layer before taking the \
         next, or allow a larger device budget",
        HumanBytes(*device_budget_bytes), list(held)
    )]
    DeviceBudgetFull {
        /// Layers the caller holds, in execution order.
        held: Vec<LayerId>,
        /// The device budget.
        device_budget_bytes: u64,
        /// How long the stream waited.
        waited: Duration,
    },
    /// The layers that the caller holds leave no place in a window of bytes for the next one, which
    /// the caller waits for.
    #[error(
        "the window of {} is full: the caller has held {} for {waited:?}; drop a layer before taking the next, or \
         allow a larger window",
        HumanBytes(*window_bytes), list(held)
    )]
    WindowFull {
        /// Layers the caller holds, in the order in which they came.
        held: Vec<LayerId>,
        /// The window.
        window_bytes: u64,
        /// How long the stream waited.
        waited: Duration,
    },
    /// The load was cancelled.
    #[error("the load was cancelled")]
    Cancelled,
    /// A thread of the loader panicked.
    #[error("a loader thread panicked: {message}")]
    Panicked {
        /// The panic's message.
        message: String,
    },
    /// The system refused to wait for queued reads.
    #[error("waiting for queued reads failed; use direct reads without a queue (IoMode::Direct)")]
    Queue {
        /// The system's answer.
        source: std::io::Error,
    },
    /// A thread could not be started.
    #[error("cannot start a loader thread")]
    Thread {
        /// The system's answer.
        source: std::io::Error,
    },
    /// A layer cannot be parked or restored: memory, the folder or the disk refuses.
    #[error("cannot park layer {layer} in {}", path.display())]
    Park {
        /// The layer.
        layer: LayerId,
        /// The folder of its file, or `host memory`.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A layer of another checkpoint cannot take the place of one of this model.
    #[error(
        "layer {layer} is not alike in the other checkpoint: tensor {tensor:?} is {found} there and {expected} here"
    )]
    NotAlike {
        /// The layer.
        layer: LayerId,
        /// The first tensor that differs.
        tensor: String,
        /// The tensor in the model.
        expected: String,
        /// The tensor in the other checkpoint.
        found: String,
    },
    /// No such layer or tensor in the model.
    #[error("the model has no {kind} named {name:?}{}", nearest.as_ref().map_or(String::new(), |near| format!("; did you mean {near:?}?")))]
    NotFound {
        /// `layer`, `layer below`, `component` or `tensor`.
        kind: &'static str,
        /// The requested name.
        name: String,
        /// The nearest name there is.
        nearest: Option<String>,
    },
}

impl LoadError {
    /// The model has no layer of that name.
    pub(super) fn no_layer(id: &LayerId) -> Self {
        Self::NotFound { kind: "layer", name: id.to_string(), nearest: None }
    }

    /// True if a larger budget would help.
    #[must_use]
    pub fn is_over_budget(&self) -> bool {
        match self {
            Self::Plan(plan) => plan.is_over_budget(),
            Self::DeviceBudgetFull { .. } | Self::WindowFull { .. } => true,
            _ => false,
        }
    }

    /// True if the device cannot be used at all on this machine or with this build.
    #[must_use]
    pub fn is_device_unavailable(&self) -> bool {
        matches!(self, Self::Device(device) if device.is_unavailable())
    }

    /// True if the device has too little memory for the layers that must be resident.
    #[must_use]
    pub fn is_out_of_device_memory(&self) -> bool {
        matches!(self, Self::Device(device) if device.is_out_of_memory())
    }

    /// True if a file changed under the load.
    #[must_use]
    pub fn is_file_changed(&self) -> bool {
        matches!(self, Self::Source(source) if source.is_file_changed())
    }
}

fn list(layers: &[LayerId]) -> String {
    layers.iter().map(LayerId::as_str).collect::<Vec<_>>().join(", ")
}

/// The message of a panic.
pub(super) fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}
