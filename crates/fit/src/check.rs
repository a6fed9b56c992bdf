//! Checks a device map: every tensor has a place, no layer is split, the limits are kept.

use super::cache::Workload;
use super::demand::Demand;
use super::device_map::DeviceMap;
use super::error::FitError;
use super::place::{FitPlan, Limits};
use super::tier::Tier;
use onelayer::checkpoint::Checkpoint;
use onelayer::layers::Layers;

/// The most split layers that are reported. A map that splits one often splits all.
const SPLIT_LAYERS_MAX: usize = 8;

impl Demand {
    /// Takes the tiers from a map instead of choosing them. If `limits` has no GPUs, any number of
    /// GPUs is allowed, without limits.
    ///
    /// # Errors
    /// All mistakes of the map, or all limits that it exceeds.
    pub fn check(
        &self,
        map: &DeviceMap,
        checkpoint: &Checkpoint,
        layers: &Layers,
        limits: &Limits,
        workload: &Workload,
    ) -> Result<FitPlan, Vec<FitError>> {
        let mut errors = Vec::new();
        let count = limits.device_bytes.len();
        for (key, tier) in map.entries() {
            if let Tier::Device(device) = tier
                && count > 0
                && usize::try_from(*device).map_or(true, |device| device >= count)
            {
                errors.push(FitError::UnknownDevice { key: key.clone(), device: *device, count });
            }
        }
        let tiers = self.tiers_of(map, checkpoint, layers, &mut errors);
        let Some(tiers) = tiers.filter(|_| errors.is_empty()) else { return Err(errors) };
        let limits = if count > 0 { limits.clone() } else { as_many_as_named(map, limits) };
        let plan = self.plan_of(tiers, &limits, workload);
        let over = plan.uses.iter().filter(|share| share.is_over()).map(|share| FitError::OverLimit {
            tier: share.tier,
            needed_bytes: share.needed_bytes(),
            limit_bytes: share.limit_bytes.unwrap_or(u64::MAX),
        });
        let over: Vec<FitError> = over.collect();
        if over.is_empty() { Ok(plan) } else { Err(over) }
    }

    /// The tier of each layer; `None` if a tensor has none.
    pub(crate) fn tiers_of(
        &self,
        map: &DeviceMap,
        checkpoint: &Checkpoint,
        layers: &Layers,
        errors: &mut Vec<FitError>,
    ) -> Option<Box<[Tier]>> {
        let lookup = map.lookup();
        let of: Vec<Option<Tier>> = checkpoint
            .tensors()
            .map(|tensor| lookup.of(tensor.name).map(|entry| map.entries()[entry].1))
            .collect();
        let name = |tensor| checkpoint.tensor(tensor).name.to_owned();
        let mut unplaced = checkpoint.tensors().zip(&of).filter(|(_, tier)| tier.is_none());
        if let Some((first, _)) = unplaced.next() {
            errors.push(FitError::Unplaced { tensor: first.name.to_owned(), count: 1 + unplaced.count() });
            return None;
        }
        let tier = |tensor: onelayer::checkpoint::TensorId| of[tensor.index()].unwrap_or(Tier::Disk);
        let mut tiers = Vec::with_capacity(layers.as_slice().len());
        let mut split = 0;
        for layer in layers.as_slice() {
            // A layer without tensors takes nothing.
            let Some(first) = layer.tensors.first().copied() else {
                tiers.push(Tier::Disk);
                continue;
            };
            let other = layer.tensors.iter().copied().find(|tensor| tier(*tensor) != tier(first));
            if let Some(second) = other.filter(|_| split < SPLIT_LAYERS_MAX) {
                split += 1;
                errors.push(FitError::SplitLayer {
                    layer: layer.id.to_string(),
                    first: name(first),
                    first_tier: tier(first),
                    second: name(second),
                    second_tier: tier(second),
                });
            }
            tiers.push(tier(first));
        }
        for tie in self.ties.iter().filter(|tie| tier(tie.owner) != tier(tie.alias)) {
            errors.push(FitError::SeparatedTie {
                owner: name(tie.owner),
                owner_tier: tier(tie.owner),
                alias: name(tie.alias),
                alias_tier: tier(tie.alias),
            });
        }
        Some(tiers.into())
    }
}

/// An error if entries name no module and no tensor of the checkpoint. A head that shares the
/// embedding's tensor is a module.
pub(crate) fn unknown_keys(map: &DeviceMap, demand: &Demand, checkpoint: &Checkpoint) -> Option<FitError> {
    let lookup = map.lookup();
    let mut is_known = vec![false; map.entries().len()];
    for tensor in checkpoint.tensors() {
        lookup.around(tensor.name).for_each(|entry| is_known[entry] = true);
    }
    let is_head = |key: &str| demand.tied_head.is_some_and(|(head, _)| head == key);
    let unknown = map.entries().iter().zip(is_known).filter(|((key, _), known)| !known && !is_head(key));
    let mut keys = unknown.map(|((key, _), _)| key);
    let first = keys.next()?;
    Some(FitError::UnknownKey { key: first.clone(), count: 1 + keys.count() })
}

/// The limits with as many GPUs as the map names, each without a limit.
fn as_many_as_named(map: &DeviceMap, limits: &Limits) -> Limits {
    let numbers = map.entries().iter().filter_map(|(_, tier)| match tier {
        Tier::Device(device) => usize::try_from(*device).ok(),
        Tier::Host | Tier::Disk => None,
    });
    // A large number in a map must not allocate without bound.
    let count = numbers.max().map_or(0, |largest| largest.saturating_add(1).min(DEVICES_MAX));
    Limits { device_bytes: vec![u64::MAX; count], ..limits.clone() }
}

/// The most GPUs of a map, more than any machine has.
const DEVICES_MAX: usize = 1024;
