//! The plan of a load by a device map: the plans of its tiers, and totals.

use std::fmt;

use crate::Tier;
use onelayer::layers::LayerId;
use onelayer::plan::LoadPlan;
use onelayer::units::HumanBytes;

/// The plan of a load by a device map.
#[derive(Clone, Debug)]
pub struct PlacedPlan {
    pub(super) steps: Vec<TierPlan>,
    pub(super) disk: DiskPlan,
}

/// The plan of one tier.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TierPlan {
    /// A GPU or the host.
    pub tier: Tier,
    /// Its reads and copies.
    pub plan: LoadPlan,
}

/// The tensors that stay in the files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DiskPlan {
    /// Layers, in execution order.
    pub layers: Vec<LayerId>,
    /// Their tensors.
    pub tensors: u64,
    /// Bytes of these tensors, as stored.
    pub tensor_bytes: u64,
}

impl PlacedPlan {
    /// The tiers in the order of loading: GPUs by number, then the host.
    #[must_use]
    pub fn steps(&self) -> &[TierPlan] {
        &self.steps
    }

    /// The tensors that stay in the files.
    #[must_use]
    pub fn disk(&self) -> &DiskPlan {
        &self.disk
    }

    /// The plan of a tier, if anything is loaded there.
    #[must_use]
    pub fn of(&self, tier: Tier) -> Option<&LoadPlan> {
        self.steps.iter().find(|step| step.tier == tier).map(|step| &step.plan)
    }

    /// Bytes of the loaded tensors, as delivered.
    #[must_use]
    pub fn tensor_bytes(&self) -> u64 {
        self.steps.iter().map(|step| step.plan.tensor_bytes()).sum()
    }

    /// Bytes to read, alignment included.
    #[must_use]
    pub fn read_bytes(&self) -> u64 {
        self.steps.iter().map(|step| step.plan.aligned_read_bytes()).sum()
    }

    /// Host memory of layers that stay there.
    #[must_use]
    pub fn resident_host_bytes(&self) -> u64 {
        self.steps.iter().map(|step| step.plan.memory().resident_host_bytes()).sum()
    }

    /// Peak of host memory beside resident layers: that of the tier with the highest peak, since
    /// tiers are loaded one after the other, plus the plans of the tiers before it.
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
