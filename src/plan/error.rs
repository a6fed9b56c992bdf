//! Why a load cannot be planned.

use super::Quantisation;
use crate::ranks::SplitError;
use crate::units::HumanBytes;

/// Why a load cannot be planned. Nothing has been read or allocated.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The host budget does not hold what the load needs at least.
    #[error(
        "host budget of {} is below the floor of {} ({detail}); use {} or more",
        HumanBytes(*budget_bytes), HumanBytes(*smallest_bytes), HumanBytes(*smallest_bytes)
    )]
    BudgetTooSmall {
        /// What the caller allowed.
        budget_bytes: u64,
        /// The smallest budget that works for this checkpoint and these settings: a whole number of
        /// MiB.
        smallest_bytes: u64,
        /// What the floor is made of.
        detail: String,
    },
    /// The layers do not fit the device budget.
    #[error(
        "{what} needs {} of device memory, the device budget is {}",
        HumanBytes(*needed_bytes), HumanBytes(*budget_bytes)
    )]
    DeviceBudgetTooSmall {
        /// What does not fit.
        what: String,
        /// What it needs.
        needed_bytes: u64,
        /// What the caller allowed.
        budget_bytes: u64,
    },
    /// A layer does not fit a window of bytes, not even alone.
    #[error(
        "layer {layer} takes {} and the window is {}; allow a window of {} or more, or keep the layer",
        HumanBytes(*needed_bytes), HumanBytes(*window_bytes), HumanBytes(*needed_bytes)
    )]
    WindowTooSmall {
        /// The largest layer.
        layer: String,
        /// What it takes.
        needed_bytes: u64,
        /// The window.
        window_bytes: u64,
    },
    /// A sum of sizes does not fit in 64 bits, or a count in 32.
    #[error("{what} of layer {layer} do not fit: the checkpoint is larger than any machine")]
    Overflow {
        /// What was summed.
        what: &'static str,
        /// Where.
        layer: String,
    },
    /// A tensor cannot be divided among the ranks.
    #[error(transparent)]
    Split(#[from] SplitError),
    /// The pieces of a part lie further apart than a plan counts.
    #[error("{tensor:?} cannot be divided in that dimension: its parts are in pieces 4 GiB apart")]
    TooFarApart {
        /// The tensor.
        tensor: String,
    },
    /// A tensor that is divided among ranks would have other scales on each.
    #[error(
        "one rank of several cannot have its parts quantised to {form}: convert the checkpoint first, with --quantise {form}"
    )]
    QuantisedShard {
        /// What was asked for.
        form: Quantisation,
    },
    /// Nothing of the whole checkpoint can be quantised, whatever of it is selected.
    #[error(
        "nothing to quantise to {form}: no layer of a stack has a plain float weight of two or three dimensions and rows of 32 \
         elements or more"
    )]
    NothingToQuantise {
        /// What was asked for.
        form: Quantisation,
    },
    /// A selection left nothing of a checkpoint that has tensors.
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
