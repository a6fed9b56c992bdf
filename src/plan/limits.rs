//! What a plan has to respect.

use std::collections::BTreeSet;
use std::fmt;

use super::{FloatType, IoDecision, IoMode, MemoryTerm, Passes, Quantisation, QuantiseChoice, ReadOrder};
use crate::layers::LayerId;
use crate::units::{Alignment, HumanBytes, KIB};

/// How many layers are resident at once: filled, handed out and not yet dropped. Those that are
/// kept do not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Window {
    /// All of them.
    All,
    /// At most so many; zero counts as one.
    Layers(u32),
    /// As many as fit so many bytes, whatever their number. Each of them has to fit alone.
    Bytes(u64),
}

impl Window {
    /// The window over `layers` layers: at least one, at most all. A window of bytes may hold all.
    #[must_use]
    pub fn over(self, layers: usize) -> usize {
        match self {
            Self::All | Self::Bytes(_) => layers.max(1),
            Self::Layers(count) => usize::try_from(count).unwrap_or(usize::MAX).clamp(1, layers.max(1)),
        }
    }
}

impl fmt::Display for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("all"),
            Self::Layers(count) => write!(f, "{count}"),
            Self::Bytes(bytes) => write!(f, "{}", HumanBytes(*bytes)),
        }
    }
}

/// Where resident layers live.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ResidentKind {
    /// In host memory, as arenas of the caller.
    Host,
    /// In memory of a device: none of the host's.
    Device,
    /// Nowhere: bytes are read and dropped.
    Nowhere,
}

/// How tensors get into the arena of their layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Landing {
    /// Each is copied to its place: where a copy costs what its bytes cost.
    Exact,
    /// Neighbours in the file travel together and keep the file's spacing; what is small and lands
    /// beside its place is moved on the device: where each copy has a price of its own.
    InPhase,
    /// Each begins where the one before it ends, at any byte, and arenas are as long as their
    /// tensors: where the arena is a file to be.
    Packed,
}

/// What a plan has to respect. Made by [`PlanLimits::new`], then changed field by field.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlanLimits {
    /// Host memory the load may hold, resident layers aside, in bytes.
    pub host_budget_bytes: u64,
    /// Device memory that resident layers may take, in bytes; not bounded if `None`.
    pub device_budget_bytes: Option<u64>,
    /// Layers resident at once.
    pub window: Window,
    /// How often the layers are streamed.
    pub passes: Passes,
    /// Layers that stay where they are from the first pass to the last. Matters only where there is
    /// more than one.
    pub kept: BTreeSet<LayerId>,
    /// How files are read.
    pub io: IoMode,
    /// How each file is read, for [`IoMode::Auto`].
    pub decisions: Vec<IoDecision>,
    /// In which order reads are issued. [`ReadOrder::Files`] needs a window of all layers, one
    /// pass, and nobody who hashes on the way; where that is not so, it is one layer after the
    /// other.
    pub order: ReadOrder,
    /// Reader threads wanted; a small budget may get fewer.
    pub readers: u32,
    /// What reads are phased to; at least [`Alignment::PAGE`].
    pub alignment: Alignment,
    /// Where resident layers live.
    pub resident: ResidentKind,
    /// How tensors get into the arena of their layer.
    pub landing: Landing,
    /// What wider floats are narrowed to on the way; nothing is if `None`.
    pub dtype: Option<FloatType>,
    /// What weights of layers are quantised to on the way; none is if `None`. Whatever is not
    /// follows [`Self::dtype`].
    pub quantise: Option<Quantisation>,
    /// Which tensors are quantised, if it is not the rule that decides: weights of layers, but no
    /// routers of experts.
    pub quantise_choice: Option<QuantiseChoice>,
    /// A hole of up to so many bytes between two wanted tensors, or inside the wanted part of one,
    /// is read through; of a longer one, nothing is read. By default what a disk moves in the
    /// time of one more request, 64 KiB. Zero where others read what is in the holes.
    pub hole_bytes_max: u64,
    /// Keep a hash of every tensor that is read: 32 bytes each.
    pub hash: bool,
    /// What else is held under the same budget.
    pub(crate) beside: Vec<MemoryTerm>,
}

impl PlanLimits {
    /// The order that can be had.
    pub(super) fn order_had(&self) -> ReadOrder {
        // What is kept nowhere is not summed, so a bound on it may refuse some layers while others are
        // held.
        let has_room = self.resident != ResidentKind::Nowhere || self.device_budget_bytes.is_none();
        match self.window {
            Window::All if has_room && !self.hash && self.passes.is_one() => self.order,
            _ => ReadOrder::Layers,
        }
    }

    /// Limits for a host budget, buffered reads by two threads, everything resident on the host.
    #[must_use]
    pub fn new(host_budget_bytes: u64) -> Self {
        Self {
            host_budget_bytes,
            device_budget_bytes: None,
            window: Window::All,
            passes: Passes::default(),
            kept: BTreeSet::new(),
            io: IoMode::Buffered,
            decisions: Vec::new(),
            order: ReadOrder::Layers,
            readers: 2,
            alignment: Alignment::PAGE,
            resident: ResidentKind::Host,
            landing: Landing::Exact,
            dtype: None,
            quantise: None,
            quantise_choice: None,
            hole_bytes_max: 64 * KIB,
            hash: false,
            beside: Vec::new(),
        }
    }
}
