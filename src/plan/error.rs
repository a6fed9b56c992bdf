//! Why a load cannot be planned.

use super::Quantisation;
use crate::ranks::SplitError;
use crate::units::HumanBytes;

/// Why a load cannot be planned. Nothing has been read or allocated.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The host budget is below the smallest one that works.
    #[error(
        "host budget of {} is below the floor of {} ({detail}); use {} or more",
        HumanBytes(*budget_bytes), HumanBytes(*smallest_bytes), HumanBytes(*smallest_bytes)
    )]
    BudgetTooSmall {
        /// The caller's budget.
        budget_bytes: u64,
        /// The smallest budget that works for this checkpoint and these settings: a whole number of
        /// MiB.
        smallest_bytes: u64,
        /// The parts of the floor.
        detail: String,
    },
    /// The layers do not fit the device budget.
    #[error(
        "{what} needs {} of device memory, the device budget is {}",
        HumanBytes(*needed_bytes), HumanBytes(*budget_bytes)
    )]
    DeviceBudgetTooSmall {
        /// The part that does not fit.
        what: String,
        /// Bytes that it needs.
        needed_bytes: u64,
        /// The caller's budget.
        budget_bytes: u64,
    },
    /// A layer does not fit the window of bytes, even alone.
    #[error(
        "layer {layer} takes {} and the window is {}; allow a window of {} or more, or keep the layer",
        HumanBytes(*needed_bytes), HumanBytes(*window_bytes), HumanBytes(*needed_bytes)
    )]
    WindowTooSmall {
        /// The largest layer.
        layer: String,
        /// Bytes that it needs.
        needed_bytes: u64,
        /// The window.
        window_bytes: u64,
    },
    /// A sum of sizes does not fit in 64 bits, or a count in 32.
    #[error("{what} of layer {layer} do not fit: the checkpoint is larger than any machine")]
    Overflow {
        /// The sum or count that overflowed.
        what: &'static str,
        /// The layer.
        layer: String,
    },
    /// A tensor cannot be divided among the ranks.
    #[error(transparent)]
    Split(#[from] SplitError),
    /// The pieces of a rank's part are too far apart for a plan's 32-bit counts.
    #[error("{tensor:?} cannot be divided in that dimension: its parts are in pieces 4 GiB apart")]
    TooFarApart {
        /// The tensor.
        tensor: String,
    },
    /// The elements of a tensor lie scattered in its file, so that no slot can hold neighbours.
    #[error(
        "{tensor:?} of shape {shape:?} lies in its file with strides {strides:?}, which are not put in order on the way; \
         save it with tensor.contiguous()"
    )]
    Scattered {
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Box<[u64]>,
        /// Elements from one index to the next, for each dimension.
        strides: Box<[u64]>,
    },
    /// Ranks would compute different scales for their parts of a tensor.
    #[error(
        "one rank of several cannot have its parts quantised to {form}: convert the checkpoint first, with --quantise {form}"
    )]
    QuantisedShard {
        /// The requested form.
        form: Quantisation,
    },
    /// No tensor of the whole checkpoint can be quantised, whatever is selected.
    #[error(
        "nothing to quantise to {form}: no layer of a stack has a plain float weight of two or three dimensions and rows of 32 \
         elements or more"
    )]
    NothingToQuantise {
        /// The requested form.
        form: Quantisation,
    },
    /// The selection matches no tensor of a checkpoint that has tensors.
    #[error("the selection matches none of the {tensors} tensors")]
    NothingSelected {
        /// Tensors in the checkpoint.
        tensors: u64,
    },
}

impl PlanError {
    /// True if a larger budget would help.
    #[must_use]
    pub fn is_over_budget(&self) -> bool {
        matches!(
            self,
            Self::BudgetTooSmall { .. } | Self::DeviceBudgetTooSmall { .. } | Self::WindowTooSmall { .. }
        )
    }
}
