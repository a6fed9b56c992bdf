//! Assigns each layer to a tier: GPUs in the given order, then the host, then the disk. No layer is
//! split.
//!
//! Layers are placed in execution order, so that each device has consecutive ones. Layers that do
//! not fit on the GPUs still compute on the first GPU, which reserves room for the largest of them
//! and for their caches. The size of that room depends on which layers do not fit, so it is found
//! by iteration: from zero upwards, until it is enough.

use super::cache::Workload;
use super::demand::{Demand, Unit};
use super::error::FitError;
use super::tier::Tier;

/// The available memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of each GPU, in order, without the memory of the driver.
    pub device_bytes: Vec<u64>,
    /// Bytes of host memory; `None` is no limit.
    pub host_bytes: Option<u64>,
    /// Bytes of the host's memory for the load itself: its budget.
    pub staging_bytes: u64,
}

/// The use of one tier in a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TierUse {
    /// The place.
    pub tier: Tier,
    /// Its limit; `None` is no limit.
    pub limit_bytes: Option<u64>,
    /// Number of layers.
    pub layers: u64,
    /// Bytes of their weights.
    pub weight_bytes: u64,
    /// Caches of the layers that compute here.
    pub cache_bytes: u64,
    /// Intermediate results, an estimate.
    pub activation_bytes: u64,
    /// Room for the largest layer that computes here and is kept elsewhere. On the host also the
    /// staging memory of the load.
    pub landing_bytes: u64,
}

impl TierUse {
    /// The sum of all parts.
    #[must_use]
    pub const fn needed_bytes(&self) -> u64 {
        let kept = self.weight_bytes.saturating_add(self.cache_bytes);
        kept.saturating_add(self.activation_bytes).saturating_add(self.landing_bytes)
    }

    /// Bytes that are left; `None` without a limit.
    #[must_use]
    pub fn free_bytes(&self) -> Option<u64> {
        self.limit_bytes.map(|limit_bytes| limit_bytes.saturating_sub(self.needed_bytes()))
    }

    /// True if it needs more than its limit.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.limit_bytes.is_some_and(|limit_bytes| self.needed_bytes() > limit_bytes)
    }
}

/// The tier of each layer, and the use of each tier.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FitPlan {
    /// The tier of each of [`Demand::units`].
    pub tiers: Box<[Tier]>,
    /// The GPUs in order, the host, the disk.
    pub uses: Box<[TierUse]>,
    /// The tier that computes the layers that are not on a GPU.
    pub executor: Tier,
}

impl FitPlan {
    /// True if every layer is on a GPU.
    #[must_use]
    pub fn is_all_on_devices(&self) -> bool {
        self.tiers.iter().all(|tier| matches!(tier, Tier::Device(_)))
    }
}

impl Demand {
    /// Assigns each layer to a tier.
    ///
    /// # Errors
    /// [`FitError::TooSmall`] if the host, or the only GPU that could compute, is too small for its
    /// minimum.
    pub fn place(&self, limits: &Limits, workload: &Workload) -> Result<FitPlan, FitError> {
        let activation_bytes = self.activation_bytes(workload);
        let needs: Vec<Need> = self.units.iter().map(|unit| Need::of(unit, workload)).collect();
        let mut on_devices = vec![None; needs.len()];
        // Layers without a GPU compute on the first GPU with layers. A GPU that gets none is
        // skipped.
        for (number, first) in (0_u32..).zip(0..limits.device_bytes.len()) {
            let devices = Devices { limits: &limits.device_bytes, first, activation_bytes };
            if let Some(found) = devices.fill(&needs).filter(|found| found.contains(&Some(number))) {
                on_devices = found;
                break;
            }
        }
        let tiers = self.place_the_rest(&needs, &on_devices, limits, activation_bytes)?;
        let plan = self.plan_of(tiers, limits, workload);
        match plan.uses.iter().find(|share| share.is_over()) {
            Some(share) => Err(too_small(share)),
            None => Ok(plan),
        }
    }

    /// Places the other layers on host and disk. A layer that does not fit on the host goes to the
    /// disk; smaller layers behind it may still fit.
    fn place_the_rest(
        &self,
        needs: &[Need],
        on_devices: &[Option<u32>],
        limits: &Limits,
        activation_bytes: u64,
    ) -> Result<Box<[Tier]>, FitError> {
        let computes = on_devices.iter().all(Option::is_none);
        let kept = if computes { total(needs.iter().map(|need| need.cache_bytes)) } else { 0 };
        let fixed = if computes { kept.saturating_add(activation_bytes) } else { 0 };
        let fixed = fixed.saturating_add(limits.staging_bytes);
        // By iteration, as for the first GPU: room for the largest layer from the disk.
        let mut landing_bytes = 0;
        loop {
            let room =
                limits.host_bytes.map(|limit| limit.saturating_sub(fixed).saturating_sub(landing_bytes));
            let mut used = 0_u64;
            let mut largest_on_disk = 0;
            let mut tiers: Vec<Tier> = Vec::with_capacity(needs.len());
            for (need, device) in needs.iter().zip(on_devices) {
                let tier = match (device, need.tied_to) {
                    (Some(device), _) => Tier::Device(*device),
                    (None, Some(owner)) if owner < tiers.len() => tiers[owner],
                    (None, _) if room.is_none_or(|room| used.saturating_add(need.weight_bytes) <= room) => {
                        Tier::Host
                    }
                    _ => Tier::Disk,
                };
                match tier {
                    Tier::Host => used = used.saturating_add(need.weight_bytes),
                    Tier::Disk => largest_on_disk = need.landing_bytes.max(largest_on_disk),
                    Tier::Device(_) => {}
                }
                tiers.push(tier);
            }
            if !computes || largest_on_disk <= landing_bytes {
                return Ok(tiers.into());
            }
            landing_bytes = largest_on_disk;
        }
    }

    /// Adds up the use of each tier.
    pub(super) fn plan_of(&self, tiers: Box<[Tier]>, limits: &Limits, workload: &Workload) -> FitPlan {
        let first = tiers.iter().filter_map(|tier| match tier {
            Tier::Device(device) => Some(*device),
            Tier::Host | Tier::Disk => None,
        });
        let executor = first.min().map_or(Tier::Host, Tier::Device);
        let devices =
            (0_u32..).zip(&limits.device_bytes).map(|(device, limit)| (Tier::Device(device), Some(*limit)));
        let places = devices.chain([(Tier::Host, limits.host_bytes), (Tier::Disk, None)]);
        let empty = |(tier, limit_bytes)| TierUse {
            tier,
            limit_bytes,
            layers: 0,
            weight_bytes: 0,
            cache_bytes: 0,
            activation_bytes: 0,
            landing_bytes: if tier == Tier::Host { limits.staging_bytes } else { 0 },
        };
        let mut uses: Box<[TierUse]> = places.map(empty).collect();
        let mut landing_bytes = 0;
        for (unit, tier) in self.units.iter().zip(&tiers) {
            let computes_on = if matches!(tier, Tier::Device(_)) { *tier } else { executor };
            if *tier != computes_on {
                landing_bytes = unit.landing_bytes.max(landing_bytes);
            }
            for share in uses.iter_mut() {
                if share.tier == *tier {
                    share.layers += 1;
                    share.weight_bytes = share.weight_bytes.saturating_add(unit.weight_bytes);
                }
                if share.tier == computes_on {
                    share.cache_bytes = share.cache_bytes.saturating_add(unit.cache_bytes(workload));
                    share.activation_bytes = self.activation_bytes(workload);
                }
            }
        }
        for share in uses.iter_mut().filter(|share| share.tier == executor) {
            share.landing_bytes = share.landing_bytes.saturating_add(landing_bytes);
        }
        FitPlan { tiers, uses, executor }
    }
}

/// The error, with the largest part of the needed bytes.
fn too_small(share: &TierUse) -> FitError {
    let parts = [
        (share.weight_bytes, "weights"),
        (share.cache_bytes, "the cache of the context"),
        (share.activation_bytes, "intermediate results (an estimate)"),
        (share.landing_bytes, "room for layers from another tier"),
    ];
    let (bytes, name) = parts.into_iter().max_by_key(|(bytes, _)| *bytes).unwrap_or_default();
    FitError::TooSmall {
        tier: share.tier,
        needed_bytes: share.needed_bytes(),
        limit_bytes: share.limit_bytes.unwrap_or(u64::MAX),
        reason: format!("{} are {name}", onelayer::units::HumanBytes(bytes)),
    }
}

/// The needs of one layer under a workload.
#[derive(Clone, Copy, Debug)]
struct Need {
    weight_bytes: u64,
    landing_bytes: u64,
    cache_bytes: u64,
    tied_to: Option<usize>,
}

impl Need {
    fn of(unit: &Unit, workload: &Workload) -> Self {
        Self {
            weight_bytes: unit.weight_bytes,
            landing_bytes: unit.landing_bytes,
            cache_bytes: unit.cache_bytes(workload),
            tied_to: unit.tied_to,
        }
    }

    const fn bytes(&self) -> u64 {
        self.weight_bytes.saturating_add(self.cache_bytes)
    }
}

/// GPUs to fill, from the one that computes the layers without a GPU.
struct Devices<'a> {
    limits: &'a [u64],
    first: usize,
    activation_bytes: u64,
}

impl Devices<'_> {
    /// The device of each layer, if it has one; `None` if the first device is too small for its
    /// minimum.
    fn fill(&self, needs: &[Need]) -> Option<Vec<Option<u32>>> {
        let mut reserve_bytes = 0;
        loop {
            let rooms = self.rooms(reserve_bytes)?;
            let mut placed = fill_rooms(needs, self.first, &rooms);
            exchange(needs, &mut placed, self.first, rooms[0].unwrap_or(0));
            let elsewhere = || needs.iter().zip(&placed).filter(|(_, device)| device.is_none());
            let landing_bytes = elsewhere().map(|(need, _)| need.landing_bytes).max().unwrap_or(0);
            let cache_bytes = total(elsewhere().map(|(need, _)| need.cache_bytes));
            let needed_bytes = landing_bytes.saturating_add(cache_bytes);
            if needed_bytes <= reserve_bytes {
                return Some(placed);
            }
            // It grows in every round, since less fits into less room, so the loop ends.
            reserve_bytes = needed_bytes;
        }
    }

    /// Room for layers on each device, from the first on. `None` for devices that cannot compute at
    /// all.
    fn rooms(&self, reserve_bytes: u64) -> Option<Vec<Option<u64>>> {
        let fixed = self.activation_bytes.saturating_add(reserve_bytes);
        let first = self.limits[self.first].checked_sub(fixed)?;
        let others = self.limits[self.first + 1..].iter();
        let others = others.map(|limit| limit.checked_sub(self.activation_bytes));
        Some(std::iter::once(Some(first)).chain(others).collect())
    }
}

/// Puts consecutive layers on consecutive devices. A layer that fits on no remaining device is
/// skipped. Layers behind it are skipped, too, to keep the order, unless the layer would not fit on
/// any empty device. Skipped layers that fit on the first device go there.
fn fill_rooms(needs: &[Need], first: usize, rooms: &[Option<u64>]) -> Vec<Option<u32>> {
    let holds = |room: Option<u64>, need: &Need| room.is_some_and(|room| need.bytes() <= room);
    let slot_of = |device: Option<u32>| Some(usize::try_from(device?).ok()? - first);
    let is_one = |number: usize, owner: usize| number == owner || needs[number].tied_to == Some(owner);
    let mut left = rooms.to_vec();
    let mut cursor = 0;
    let mut placed: Vec<Option<u32>> = Vec::with_capacity(needs.len());
    for need in needs {
        if let Some(owner) = need.tied_to.filter(|owner| *owner < placed.len()) {
            // The rest of the layer must be with the shared tensor.
            let device = placed[owner];
            let slot = slot_of(device);
            match slot.filter(|slot| holds(left[*slot], need)) {
                Some(slot) => left[slot] = left[slot].map(|room| room - need.bytes()),
                None if need.bytes() == 0 => {}
                // Layers that share a tensor are together or on no device: all of them give back
                // their room.
                None => {
                    for number in (0..placed.len()).filter(|&number| is_one(number, owner)) {
                        if let Some(slot) = slot_of(placed[number].take()) {
                            left[slot] = left[slot].map(|room| room + needs[number].bytes());
                        }
                    }
                    placed.push(None);
                    continue;
                }
            }
            placed.push(device);
            continue;
        }
        let next = (cursor..left.len()).find(|slot| holds(left[*slot], need));
        if let Some(slot) = next {
            cursor = slot;
        } else if rooms.iter().any(|room| holds(*room, need)) {
            cursor = left.len();
        }
        // Skipped layers compute on the first device, so it is the best place for them.
        let fits = next.or_else(|| holds(left[0], need).then_some(0));
        if let Some(slot) = fits {
            left[slot] = left[slot].map(|room| room - need.bytes());
        }
        placed.push(fits.map(|slot| u32::try_from(first + slot).expect("GPUs are counted in u32")));
    }
    placed
}

/// A saturating sum.
fn total(bytes: impl Iterator<Item = u64>) -> u64 {
    bytes.fold(0, u64::saturating_add)
}

/// The most exchanges. Each leaves less room than the one before.
const EXCHANGES_MAX: usize = 8;
/// An exchange must gain at least this part of the room (1/50), since it costs the order.
const EXCHANGE_SHARE: u64 = 50;

/// Exchanges small layers of the first device for larger layers without a device that fit in their
/// place: layers without a device are copied in every pass.
fn exchange(needs: &[Need], placed: &mut [Option<u32>], first: usize, room_bytes: u64) {
    if placed.iter().all(Option::is_some) {
        return;
    }
    let first = u32::try_from(first).ok();
    let mut is_tied = vec![false; needs.len()];
    for (number, owner) in needs.iter().enumerate().filter_map(|(number, need)| Some((number, need.tied_to?)))
    {
        (is_tied[number], is_tied[owner]) = (true, true);
    }
    for _ in 0..EXCHANGES_MAX {
        let here = (0..needs.len()).filter(|&number| placed[number] == first);
        let used = total(here.clone().map(|number| needs[number].bytes()));
        let left = room_bytes.saturating_sub(used);
        let mut smaller: Vec<usize> = here.filter(|&number| !is_tied[number]).collect();
        smaller.sort_by_key(|&number| needs[number].bytes());
        let gain = |number: usize| {
            let bytes = needs[number].bytes();
            // The smallest layer that makes enough room.
            let enough = smaller.partition_point(|&other| needs[other].bytes() + left < bytes);
            let other = *smaller.get(enough)?;
            let gain = bytes.checked_sub(needs[other].bytes())?;
            (gain >= room_bytes / EXCHANGE_SHARE && gain > 0).then_some((gain, other))
        };
        let elsewhere = (0..needs.len()).rev().filter(|&number| placed[number].is_none() && !is_tied[number]);
        let best =
            elsewhere.filter_map(|number| Some((gain(number)?, number))).max_by_key(|((gain, _), _)| *gain);
        let Some(((_, out), number)) = best else { return };
        (placed[number], placed[out]) = (first, None);
    }
}

#[cfg(test)]
mod tests;
