//! The largest context and batch that fit, by binary search.

use super::cache::Workload;
use super::demand::Demand;
use super::place::Limits;

/// The longest context that is tried: four times that of any published model.
const CONTEXT_MAX: u64 = 40_000_000;
/// The largest batch that is tried.
const BATCH_MAX: u64 = 1 << 20;

impl Demand {
    /// The longest context, in tokens, at the workload's batch. With `on_devices`, every layer must
    /// be on a GPU; otherwise layers may be on the host or the disk. At most the model's own
    /// maximum. `None` if the cache is unknown, or not even one token fits.
    #[must_use]
    pub fn largest_context(&self, limits: &Limits, workload: &Workload, on_devices: bool) -> Option<u64> {
        let most = self.context_max.unwrap_or(CONTEXT_MAX).min(CONTEXT_MAX);
        let at = |context_tokens| Workload { context_tokens, ..*workload };
        self.largest(most, |tokens| self.fits(limits, &at(tokens), on_devices))
    }

    /// The largest batch at the workload's context, likewise. `None` also without a context.
    #[must_use]
    pub fn largest_batch(&self, limits: &Limits, workload: &Workload, on_devices: bool) -> Option<u64> {
        let at = |batch| Workload { batch, ..*workload };
        let has_context = workload.context_tokens > 0;
        self.largest(BATCH_MAX, |batch| has_context && self.fits(limits, &at(batch), on_devices))
    }

    /// True if every layer fits.
    fn fits(&self, limits: &Limits, workload: &Workload, on_devices: bool) -> bool {
        self.place(limits, workload).is_ok_and(|plan| !on_devices || plan.is_all_on_devices())
    }

    /// The largest of `1..=most` that fits. If a number fits, every smaller one must.
    fn largest(&self, most: u64, fits: impl Fn(u64) -> bool) -> Option<u64> {
        let is_known = !self.cache.layers().is_empty() && self.units.iter().any(|unit| unit.cache.is_some());
        if !is_known || !fits(1) {
            return None;
        }
        let (mut good, mut bad) = (1, most.saturating_add(1));
        while bad - good > 1 {
            let middle = good + (bad - good) / 2;
            if fits(middle) { good = middle } else { bad = middle }
        }
        Some(good)
    }
}
