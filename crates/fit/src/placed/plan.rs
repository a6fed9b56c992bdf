//! What a load by a device map would do: the plans of its places, and totals.

use std::fmt;

use crate::Tier;
use onelayer::layers::LayerId;
use onelayer::plan::LoadPlan;
use onelayer::units::HumanBytes;

/// What a load by a device map would do.
#[derive(Clone, Debug)]
pub struct PlacedPlan {
    pub(super) steps: Vec<TierPlan>,
    pub(super) disk: DiskPlan,
}

/// The plan of one place.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TierPlan {
    /// A GPU or the host.
    pub tier: Tier,
    /// What is read for it, and where it goes.
    pub plan: LoadPlan,
}

/// What stays in the files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DiskPlan {
    /// Layers, in execution order.
    pub layers: Vec<LayerId>,
    /// Their tensors.
    pub tensors: u64,
    /// Bytes of them, as the files have them.
    pub tensor_bytes: u64,
}

impl PlacedPlan {
    /// The places, in the order in which they are loaded: GPUs by number, then the host.
    #[must_use]
    pub fn steps(&self) -> &[TierPlan] {
        &self.steps
    }

    /// What stays in the files.
    #[must_use]
    pub fn disk(&self) -> &DiskPlan {
        &self.disk
    }

    /// The plan of a place, if anything is loaded there.
    #[must_use]
    pub fn of(&self, tier: Tier) -> Option<&LoadPlan> {
        self.steps.iter().find(|step| step.tier == tier).map(|step| &step.plan)
    }

    /// Bytes of the tensors that are loaded, as they are delivered.
    #[must_use]
    pub fn tensor_bytes(&self) -> u64 {
        self.steps.iter().map(|step| step.plan.tensor_bytes()).sum()
    }

    /// Bytes that are read, alignment included.
    #[must_use]
    pub fn read_bytes(&self) -> u64 {
        self.steps.iter().map(|step| step.plan.aligned_read_bytes()).sum()
    }

    /// Host memory of layers that stay there.
    #[must_use]
    pub fn resident_host_bytes(&self) -> u64 {
        self.steps.iter().map(|step| step.plan.memory().resident_host_bytes()).sum()
    }

    /// Host memory at most, beside layers that stay there: of the place that takes most, since one
    /// is loaded after the other, with what the plans of those before it take.
    #[must_use]
    pub fn budgeted_bytes(&self) -> u64 {
        let budget = |step: &TierPlan| step.plan.memory().budget_bytes();
        let whole = self.steps.first().map_or(0, budget);
        let held = |step: &TierPlan| whole - budget(step) + step.plan.memory().budgeted_bytes();
        self.steps.iter().map(held).max().unwrap_or(0)
    }
}

impl fmt::Display for PlacedPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for TierPlan { tier, plan } in &self.steps {
            let (layers, bytes) = (plan.layers().len(), HumanBytes(plan.memory().resident_bytes()));
            let (reads, read) = (plan.reads().len(), HumanBytes(plan.aligned_read_bytes()));
            writeln!(f, "{tier:<8} {layers} layers, {bytes}; {reads} reads, {read}")?;
        }
        let DiskPlan { layers, tensors, tensor_bytes } = &self.disk;
        if *tensors > 0 {
            let bytes = HumanBytes(*tensor_bytes);
            writeln!(f, "{:<8} {} layers, {tensors} tensors, {bytes}; not read", Tier::Disk, layers.len())?;
        }
        let (budget, host) = (HumanBytes(self.budgeted_bytes()), HumanBytes(self.resident_host_bytes()));
        write!(f, "peak     {budget} of host memory, and {host} of layers on the host")
    }
}
