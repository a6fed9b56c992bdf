//! Memory of resident layers.
//!
//! In one pass each layer gets an arena, and later layers reuse arenas that fit. With two or more
//! passes nothing is allocated after the start: kept layers have an arena each, and all other
//! layers share one allocation, the window:
//!
//! ```text
//! kept     | embed_tokens | | lm_head |            read once, handed out in every pass
//! window   | layers.7 | layers.5 | layers.6 |      a place is free again when its layer is dropped
//! ```
//!
//! With a window of N layers, every place is as long as the longest layer, so that N layers always
//! fit. With a window of bytes, a place is as long as its layer.

use super::layout::Layout;
use super::{MemoryTerm, PlanError, PlanLimits, PlannedLayer, ResidentKind, TermKind, Window};
use crate::units::{Alignment, HumanBytes};

/// The memory that all layers but kept ones share, pass after pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WindowShape {
    /// Its length in bytes: one allocation.
    pub bytes: u64,
    /// Lengths of places are multiples of this.
    pub unit_bytes: u64,
}

/// Memory of resident layers, wherever they live.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ResidentMemory {
    /// Peak bytes.
    pub(super) bytes: u64,
    /// The parts of the sum.
    pub(super) terms: Vec<MemoryTerm>,
    /// `None` if every layer has its own arena.
    pub(super) window: Option<WindowShape>,
}

impl ResidentMemory {
    pub(super) fn of(layout: &Layout, limits: &PlanLimits) -> Result<Self, PlanError> {
        if limits.resident == ResidentKind::Nowhere {
            return Ok(Self { bytes: 0, terms: Vec::new(), window: None });
        }
        let this = match limits.options.passes.is_one() {
            true => Self::of_one_pass(layout, limits)?,
            false => Self::of_passes(layout, limits)?,
        };
        match limits.options.device_budget_bytes {
            Some(budget_bytes) if this.bytes > budget_bytes => Err(PlanError::DeviceBudgetTooSmall {
                what: this.terms.iter().map(|term| term.kind.name()).collect::<Vec<_>>().join(" and "),
                needed_bytes: this.bytes,
                budget_bytes,
            }),
            _ => Ok(this),
        }
    }

    /// The largest sum of neighbours in the window.
    fn of_one_pass(layout: &Layout, limits: &PlanLimits) -> Result<Self, PlanError> {
        let layers = &layout.layers;
        let bytes = match limits.options.window {
            Window::Bytes(bytes) => {
                check_longest(layers.iter(), bytes)?;
                total(layers.iter())?.min(bytes)
            }
            Window::All | Window::Layers(_) => largest_window(layers, limits)?,
        };
        Ok(Self { bytes, terms: vec![MemoryTerm::new(TermKind::Window, bytes)], window: None })
    }

    fn of_passes(layout: &Layout, limits: &PlanLimits) -> Result<Self, PlanError> {
        let kept_bytes = total(layout.layers.iter().filter(|layer| layer.is_kept))?;
        let others = || layout.layers.iter().filter(|layer| !layer.is_kept);
        let longest = others().max_by_key(|layer| layer.arena_bytes);
        let longest_bytes = longest.map_or(0, |layer| layer.arena_bytes);
        let window = match limits.options.window {
            Window::Bytes(bytes) => {
                check_longest(others(), bytes)?;
                let bytes = total(others())?.min(bytes);
                WindowShape { bytes, unit_bytes: Alignment::PAGE.bytes() }
            }
            Window::All => WindowShape { bytes: total(others())?, unit_bytes: Alignment::PAGE.bytes() },
            Window::Layers(_) => {
                let places = u64::try_from(limits.options.window.over(others().count())).unwrap_or(u64::MAX);
                let bytes = places.checked_mul(longest_bytes).ok_or_else(|| overflow(longest))?;
                WindowShape { bytes, unit_bytes: longest_bytes.max(1) }
            }
        };
        let bytes = window.bytes.checked_add(kept_bytes).ok_or_else(|| overflow(longest))?;
        let mut terms = vec![MemoryTerm::new(TermKind::Window, window.bytes)];
        if kept_bytes > 0 {
            terms.push(MemoryTerm::new(TermKind::KeptLayers, kept_bytes));
        }
        Ok(Self { bytes, terms, window: Some(window) })
    }
}

fn overflow(layer: Option<&PlannedLayer>) -> PlanError {
    let layer = layer.map_or_else(String::new, |layer| layer.id.to_string());
    PlanError::Overflow { what: "the bytes", layer }
}

fn total<'a>(mut layers: impl Iterator<Item = &'a PlannedLayer>) -> Result<u64, PlanError> {
    layers
        .try_fold(0_u64, |sum, layer| sum.checked_add(layer.arena_bytes).ok_or_else(|| overflow(Some(layer))))
}

/// Each layer has to fit the window alone.
fn check_longest<'a>(
    layers: impl Iterator<Item = &'a PlannedLayer>,
    window_bytes: u64,
) -> Result<(), PlanError> {
    match layers.max_by_key(|layer| layer.arena_bytes) {
        Some(layer) if layer.arena_bytes > window_bytes => Err(PlanError::WindowTooSmall {
            layer: layer.id.to_string(),
            needed_bytes: layer.arena_bytes,
            window_bytes,
        }),
        _ => Ok(()),
    }
}

/// The largest sum of neighbours in a window of layers.
fn largest_window(layers: &[PlannedLayer], limits: &PlanLimits) -> Result<u64, PlanError> {
    let count = limits.options.window.over(layers.len());
    let mut largest = (0_u64, 0_usize);
    for (first, neighbours) in layers.windows(count).enumerate() {
        largest = largest.max((total(neighbours.iter())?, first));
    }
    match limits.options.device_budget_bytes {
        Some(budget_bytes) if largest.0 > budget_bytes => Err(PlanError::DeviceBudgetTooSmall {
            what: format!("a window of {count} layers from {}", layers[largest.1].id),
            needed_bytes: largest.0,
            budget_bytes,
        }),
        _ => Ok(largest.0),
    }
}

impl std::fmt::Display for WindowShape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", HumanBytes(self.bytes))
    }
}
