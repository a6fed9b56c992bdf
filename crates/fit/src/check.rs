//! A device map that comes back, perhaps edited: does it place every tensor once, split no layer,
//! keep the limits?

use super::cache::Workload;
use super::demand::Demand;
use super::device_map::DeviceMap;
use super::error::FitError;
use super::place::{FitPlan, Limits, Tier};
use onelayer::checkpoint::Checkpoint;
use onelayer::layers::Layers;

/// Layers that are cut are named up to so many; who has cut one has often cut all.
const SPLIT_LAYERS_MAX: usize = 8;

impl Demand {
    /// Takes the places from a map instead of finding them. `limits` without GPUs leave the number
    /// of GPUs open, and what they hold unchecked.
    ///
    /// # Errors
    /// Everything that is wrong with the map; and limits that it does not keep.
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

    /// The place of each layer, where the map gives it one.
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
            // A layer without tensors is nowhere, and takes nothing.
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

/// The entries that name no module and no tensor of a checkpoint, if there are any. The head that
/// shares the embedding's tensor is one of the model.
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

/// The same limits with as many GPUs as the map names, each without a limit.
fn as_many_as_named(map: &DeviceMap, limits: &Limits) -> Limits {
    let numbers = map.entries().iter().filter_map(|(_, tier)| match tier {
        Tier::Device(device) => usize::try_from(*device).ok(),
        Tier::Host | Tier::Disk => None,
    });
    // A map names few; whoever writes a large number gets so many empty rows and no more.
    let count = numbers.max().map_or(0, |largest| largest.saturating_add(1).min(DEVICES_MAX));
    Limits { device_bytes: vec![u64::MAX; count], ..limits.clone() }
}

/// Above any machine.
const DEVICES_MAX: usize = 1024;
