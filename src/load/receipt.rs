//! What an unload gave back, and who says so.
//!
//! A byte is in one place of a receipt. It counts as returned when the system or the driver has
//! taken it and has said so; what cannot be proved is not claimed:
//!
//! ```text
//! asked = returned + kept by the pool + queued + recycled + lent + unconfirmed + held
//! ```

use std::fmt;
use std::sync::Arc;

use super::LoadedLayer;
use crate::device::{ArenaPool, Freed};
use crate::layers::LayerId;
use crate::units::HumanBytes;

/// What an unload gave back. [`Self::asked_bytes`] is the sum of what follows it, up to
/// [`Self::held_bytes`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Receipt {
    /// Layers that were to go.
    pub layers: u64,
    /// Bytes that they took: on the device, or in the host's memory.
    pub asked_bytes: u64,
    /// Bytes that went back, as whoever has them now has said. On the host: the mapping is gone
    /// (`munmap`). On a CUDA device: the free is over, the pool was trimmed, and the driver
    /// counts so many bytes fewer for the pool (`CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT`);
    /// without pools, `cuMemFree` has succeeded.
    pub returned_bytes: u64,
    /// Bytes that are free, and that the device's pool keeps for the next layer: it gives back
    /// whole pages, and small layers share one. They go with the last of them.
    pub kept_bytes: u64,
    /// Bytes that the device frees in its own order, once what
    /// [`release_after`](LoadedLayer::release_after) named is over. Nobody waits for it, so
    /// nobody can say when.
    pub queued_bytes: u64,
    /// Bytes that a running stream uses for its next layers, and gives back at its end.
    pub recycled_bytes: u64,
    /// Bytes in memory of the caller's, which is the caller's again.
    pub lent_bytes: u64,
    /// Bytes that were given up and of which nobody says that they are back: a call was refused, or
    /// the context is lost.
    pub unconfirmed_bytes: u64,
    /// Bytes of layers that somebody holds. They go with the last owner.
    pub held_bytes: u64,
    /// Bytes that were copied elsewhere first, and wait there: no part of the sum.
    pub parked_bytes: u64,
    /// The tensors that hold them, in the order of the layers.
    pub holders: Vec<Holder>,
}

/// A tensor that holds its layer: it was taken and not dropped.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// The layer.
    pub layer: LayerId,
    /// The tensor's full name.
    pub tensor: String,
    /// How many there are of it.
    pub owners: usize,
}

impl Receipt {
    /// True if all that was asked for is back.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.returned_bytes == self.asked_bytes
    }

    /// Both together.
    #[must_use]
    pub fn and(mut self, other: Self) -> Self {
        self.layers += other.layers;
        self.asked_bytes += other.asked_bytes;
        self.returned_bytes += other.returned_bytes;
        self.kept_bytes += other.kept_bytes;
        self.queued_bytes += other.queued_bytes;
        self.recycled_bytes += other.recycled_bytes;
        self.lent_bytes += other.lent_bytes;
        self.unconfirmed_bytes += other.unconfirmed_bytes;
        self.held_bytes += other.held_bytes;
        self.parked_bytes += other.parked_bytes;
        self.holders.extend(other.holders);
        self
    }

    /// Frees a layer, and lets the place that it came from say what it got back.
    pub(crate) fn of_one(layer: LoadedLayer) -> Self {
        let home = layer.home();
        free_together(home.as_deref(), std::iter::once(layer))
    }

    /// Frees layers, and lets each place that they came from say what it got back.
    pub(crate) fn of(layers: impl IntoIterator<Item = LoadedLayer>) -> Self {
        let mut receipt = Self::default();
        let mut layers: Vec<LoadedLayer> = layers.into_iter().collect();
        while let Some(first) = layers.first() {
            let home = first.home();
            let (same, others) = layers.into_iter().partition(|layer| is_same(home.as_ref(), layer));
            receipt = receipt.and(free_together(home.as_deref(), same));
            layers = others;
        }
        receipt
    }
}

/// True if the layer comes from that place.
fn is_same(home: Option<&Arc<dyn ArenaPool>>, layer: &LoadedLayer) -> bool {
    match (home, layer.home()) {
        (Some(one), Some(other)) => Arc::ptr_eq(one, &other),
        (None, None) => true,
        _ => false,
    }
}

/// Frees layers that came from one place.
fn free_together(home: Option<&dyn ArenaPool>, layers: impl IntoIterator<Item = LoadedLayer>) -> Receipt {
    let mut receipt = Receipt::default();
    let before_bytes = home.and_then(ArenaPool::pool_bytes);
    let mut pooled_bytes = 0;
    for layer in layers {
        let bytes = layer.resident_bytes();
        receipt.layers += 1;
        receipt.asked_bytes += bytes;
        let place = match layer.give_up() {
            Err(holders) => {
                receipt.holders.extend(holders);
                &mut receipt.held_bytes
            }
            Ok(Freed::Returned) => &mut receipt.returned_bytes,
            Ok(Freed::ToPool) => &mut pooled_bytes,
            Ok(Freed::Queued) => &mut receipt.queued_bytes,
            Ok(Freed::Recycled) => &mut receipt.recycled_bytes,
            Ok(Freed::Lent) => &mut receipt.lent_bytes,
            Ok(Freed::Unconfirmed) => &mut receipt.unconfirmed_bytes,
        };
        *place += bytes;
    }
    if let Some(home) = home.filter(|_| pooled_bytes > 0) {
        let is_settled = home.settle();
        match before_bytes.zip(home.pool_bytes()) {
            Some((before_bytes, after_bytes)) if is_settled => {
                // A pool takes whole pages, so it may give back more than it was asked for.
                receipt.returned_bytes += pooled_bytes.min(before_bytes.saturating_sub(after_bytes));
                receipt.kept_bytes += pooled_bytes.saturating_sub(before_bytes.saturating_sub(after_bytes));
            }
            _ => receipt.unconfirmed_bytes += pooled_bytes,
        }
    }
    receipt
}

/// Holders that a line of text has room for.
const SHOWN: usize = 3;

impl fmt::Display for Receipt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} asked, {} returned", HumanBytes(self.asked_bytes), HumanBytes(self.returned_bytes))?;
        let rest = [
            (self.kept_bytes, "kept by the device's pool"),
            (self.queued_bytes, "freed when the device comes to it"),
            (self.recycled_bytes, "used again by the stream"),
            (self.lent_bytes, "the caller's own"),
            (self.unconfirmed_bytes, "given up without an answer"),
        ];
        for (bytes, words) in rest.into_iter().filter(|&(bytes, _)| bytes > 0) {
            write!(f, ", {} {words}", HumanBytes(bytes))?;
        }
        if self.held_bytes == 0 {
            return Ok(());
        }
        write!(f, ", {} held by ", HumanBytes(self.held_bytes))?;
        for (number, holder) in self.holders.iter().take(SHOWN).enumerate() {
            let comma = if number > 0 { ", " } else { "" };
            write!(f, "{comma}{:?}", holder.tensor)?;
            if holder.owners > 1 {
                write!(f, " ({} times)", holder.owners)?;
            }
        }
        match self.holders.len() {
            // A layer that its stream keeps has no holder by name; and whoever held one may have
            // dropped it meanwhile, or be about to.
            0 => f.write_str("its stream, or somebody who is letting go"),
            more if more > SHOWN => write!(f, " and {} more", more - SHOWN),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A layer that its stream keeps is held, and nobody has its tensors.
    #[test]
    fn a_layer_without_holders_is_said_to_be_its_streams() {
        let receipt = Receipt { layers: 1, asked_bytes: 5, held_bytes: 5, ..Receipt::default() };
        let text = receipt.to_string();
        assert!(text.ends_with("5 B held by its stream, or somebody who is letting go"), "{text}");
    }
}
