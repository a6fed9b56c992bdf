//! The window: how many layers, and how many bytes of them, may be resident at once.
//!
//! A layer has a [`Permit`] from its arena's allocation until its last owner is gone, wherever that is. The control loop
//! asks for permits; the stream asks whether the caller itself holds what the loop waits for.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crossbeam_channel::Sender;

use super::stream::Signal;

/// Gives out the places of the window.
#[derive(Debug)]
pub(super) struct PermitOffice {
    layers_max: usize,
    bytes_max: Option<u64>,
    holders: Mutex<Holders>,
    signals: Sender<Signal>,
}

#[derive(Debug, Default)]
struct Holders {
    /// Indices of the layers that have a place.
    layers: BTreeSet<usize>,
    /// Bytes of their arenas.
    bytes: u64,
    /// Why the last request was refused, if nothing has been given back since.
    refusal: Option<Full>,
}

/// What a refused layer would have gone beyond.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Full {
    /// The layers of the window.
    Layers { layers_max: usize },
    /// The bytes of the device budget.
    Bytes { bytes_max: u64 },
}

impl PermitOffice {
    /// An office for so many layers and, if there is a device budget, so many bytes.
    pub(super) fn new(layers_max: usize, bytes_max: Option<u64>, signals: Sender<Signal>) -> Arc<Self> {
        Arc::new(Self { layers_max, bytes_max, holders: Mutex::default(), signals })
    }

    /// A place for the layer, if there is one and its bytes fit.
    pub(super) fn try_issue(self: &Arc<Self>, layer: usize, arena_bytes: u64) -> Option<Permit> {
        let mut holders = self.lock();
        let bytes = holders.bytes.saturating_add(arena_bytes);
        holders.refusal = match self.bytes_max {
            _ if holders.layers.len() >= self.layers_max => {
                Some(Full::Layers { layers_max: self.layers_max })
            }
            Some(bytes_max) if bytes > bytes_max => Some(Full::Bytes { bytes_max }),
            _ => None,
        };
        if holders.refusal.is_some() {
            return None;
        }
        holders.layers.insert(layer);
        holders.bytes = bytes;
        drop(holders);
        Some(Permit { layer, arena_bytes, office: Arc::clone(self) })
    }

    /// What stops the load and the layers that would have to go, if they are all below `end`: with `end` = layers
    /// taken, the caller holds them, and nothing but the caller can let the load go on.
    pub(super) fn stopped_by_layers_below(&self, end: usize) -> Option<(Full, Vec<usize>)> {
        let holders = self.lock();
        let full = holders.refusal?;
        let is_below = holders.layers.last().is_none_or(|&last| last < end);
        is_below.then(|| (full, holders.layers.iter().copied().collect()))
    }

    fn lock(&self) -> MutexGuard<'_, Holders> {
        // No update can be left half done.
        self.holders.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place in the window.
#[derive(Debug)]
pub(super) struct Permit {
    layer: usize,
    arena_bytes: u64,
    office: Arc<PermitOffice>,
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut holders = self.office.lock();
        holders.layers.remove(&self.layer);
        holders.bytes -= self.arena_bytes;
        holders.refusal = None;
        drop(holders);
        // The control loop may have ended; then nobody waits for the place.
        let _ = self.office.signals.send(Signal::Dropped);
    }
}

#[cfg(test)]
mod tests {
    use crossbeam_channel::unbounded;

    use super::*;

    #[test]
    fn exhaust_fail_release_succeed() {
        let (signals, received) = unbounded();
        let office = PermitOffice::new(2, Some(100), signals);
        let first = office.try_issue(0, 60).unwrap();
        assert_eq!(office.stopped_by_layers_below(1), None, "nothing was refused");

        assert!(office.try_issue(1, 41).is_none());
        let full = Full::Bytes { bytes_max: 100 };
        assert_eq!(office.stopped_by_layers_below(1), Some((full, vec![0])));
        assert_eq!(office.stopped_by_layers_below(0), None, "the layer is still on its way to the caller");

        let second = office.try_issue(1, 40).unwrap();
        assert_eq!(office.stopped_by_layers_below(2), None);
        assert!(office.try_issue(2, 0).is_none());
        let full = Full::Layers { layers_max: 2 };
        assert_eq!(office.stopped_by_layers_below(2), Some((full, vec![0, 1])));

        drop(first);
        assert!(matches!(received.try_recv(), Ok(Signal::Dropped)));
        assert_eq!(office.stopped_by_layers_below(2), None, "the load has not asked again");
        let third = office.try_issue(2, 60).unwrap();
        assert!(office.try_issue(3, 0).is_none());
        drop((second, third));
        assert!(office.try_issue(3, 100).is_some());
    }
}
