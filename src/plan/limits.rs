//! The inputs of a plan: the options of the load, and facts about its files and its target.

use std::collections::BTreeSet;

use super::io::{IoDecision, IoMode};
use super::options::{LoadOptions, ReadOrder, Window};
use super::terms::MemoryTerm;
use crate::layers::LayerId;
use crate::units::Alignment;

/// Where resident layers live.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ResidentKind {
    /// In host memory, as arenas of the caller.
    Host,
    /// In memory of a device.
    Device,
    /// Nowhere: bytes are read and dropped.
    Nowhere,
}

/// How tensors get into the arena of their layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Landing {
    /// Each tensor is copied to its place. For targets where the cost of a copy is that of its
    /// bytes.
    Exact,
    /// Neighbours in the file are copied together and keep the file's spacing. Small tensors that
    /// land beside their place are moved on the device. For targets where each copy has a fixed
    /// cost.
    InPhase,
    /// Each tensor begins where the one before it ends, at any byte, and arenas are as long as
    /// their tensors. For arenas that become files.
    Packed,
}

/// The inputs of a plan. Made by [`PlanLimits::new`] or [`PlanLimits::of`], then changed field by
/// field.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlanLimits {
    /// The options of the load.
    pub options: LoadOptions,
    /// Layers that stay resident from the first pass to the last. Ignored with one pass.
    pub kept: BTreeSet<LayerId>,
    /// How each file is read, for [`IoMode::Auto`].
    pub decisions: Vec<IoDecision>,
    /// Reader threads if the [options](LoadOptions::readers) name no number. A small budget may get
    /// fewer.
    pub default_readers: u32,
    /// Reads start and end on multiples of this; at least [`Alignment::PAGE`].
    pub alignment: Alignment,
    /// Where resident layers live.
    pub resident: ResidentKind,
    /// How tensors get into the arena of their layer.
    pub landing: Landing,
    /// Terms of the caller (a conversion's buffers and lists) that count against the same budget.
    pub(crate) other_terms: Vec<MemoryTerm>,
}

impl PlanLimits {
    /// Limits for a host budget: everything resident on the host, buffered reads by two threads.
    #[must_use]
    pub fn new(host_budget_bytes: u64) -> Self {
        Self::of(LoadOptions {
            host_budget_bytes,
            window: Window::All,
            io: IoMode::Buffered,
            ..LoadOptions::default()
        })
    }

    /// Limits for these options, for files that need no alignment beyond a page, with everything
    /// resident on the host.
    #[must_use]
    pub fn of(options: LoadOptions) -> Self {
        Self {
            options,
            kept: BTreeSet::new(),
            decisions: Vec::new(),
            default_readers: 2,
            alignment: Alignment::PAGE,
            resident: ResidentKind::Host,
            landing: Landing::Exact,
            other_terms: Vec::new(),
        }
    }

    /// Reader threads that are wanted.
    pub(super) fn readers(&self) -> u32 {
        self.options.readers.unwrap_or(self.default_readers)
    }

    /// The order of reads that is possible: [`ReadOrder::Files`] needs all layers resident in one
    /// pass, and no hashing on the way.
    pub(super) fn possible_order(&self) -> ReadOrder {
        let options = &self.options;
        // On a target that keeps nothing, resident bytes are not summed in the plan. A device
        // budget there may refuse a layer while others are held.
        let has_room = self.resident != ResidentKind::Nowhere || options.device_budget_bytes.is_none();
        match options.window {
            Window::All if has_room && !options.hash && options.passes.is_one() => options.order,
            _ => ReadOrder::Layers,
        }
    }
}
