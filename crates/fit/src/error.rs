//! Why something does not fit, or a map is none.

use super::place::Tier;
use onelayer::units::HumanBytes;

/// Why a plan cannot be made, or a device map cannot be kept.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FitError {
    /// `config.json` is none.
    #[error("{origin}: {message}")]
    BadConfig {
        /// The file.
        origin: String,
        /// What is wrong.
        message: String,
    },
    /// What has to be in one place does not fit there.
    #[error("{tier} has to hold at least {}, of which {reason}; its limit is {}", HumanBytes(*needed_bytes), HumanBytes(*limit_bytes))]
    TooSmall {
        /// Where.
        tier: Tier,
        /// The smallest limit that works.
        needed_bytes: u64,
        /// The limit.
        limit_bytes: u64,
        /// The largest part of it.
        reason: String,
    },
    /// A device map is no JSON object of names and places.
    #[error("the device map is not understood: {message}")]
    BadMap {
        /// What is wrong.
        message: String,
    },
    /// A device map names a GPU that is not there.
    #[error("`{key}` is placed on GPU {device}, and there are {count}")]
    UnknownDevice {
        /// The key.
        key: String,
        /// The number.
        device: u32,
        /// GPUs with a limit.
        count: usize,
    },
    /// Entries of a device map name nothing in the checkpoint.
    #[error(
        "{count} entries name no module and no tensor of the checkpoint, the first is `{key}`; correct or remove it"
    )]
    UnknownKey {
        /// The first.
        key: String,
        /// How many.
        count: usize,
    },
    /// A tensor is in no entry of a device map.
    #[error(
        "{count} tensors have no place, the first is `{tensor}`; add its module, or \"\" for all the rest"
    )]
    Unplaced {
        /// The first.
        tensor: String,
        /// How many.
        count: usize,
    },
    /// A device map cuts through a layer.
    #[error("layer `{layer}` is split: `{first}` is on {first_tier}, `{second}` on {second_tier}")]
    SplitLayer {
        /// The layer.
        layer: String,
        /// One tensor.
        first: String,
        /// Where it is.
        first_tier: Tier,
        /// Another.
        second: String,
        /// Where that is.
        second_tier: Tier,
    },
    /// A device map separates two tensors that are one.
    #[error(
        "`{alias}` is the same tensor as `{owner}`, but one is on {alias_tier} and the other on {owner_tier}"
    )]
    SeparatedTie {
        /// The one that is counted.
        owner: String,
        /// Where it is.
        owner_tier: Tier,
        /// The other.
        alias: String,
        /// Where that is.
        alias_tier: Tier,
    },
    /// A place has to hold more than its limit.
    #[error("{tier} has to hold {}, its limit is {}", HumanBytes(*needed_bytes), HumanBytes(*limit_bytes))]
    OverLimit {
        /// Where.
        tier: Tier,
        /// What it would hold.
        needed_bytes: u64,
        /// Its limit.
        limit_bytes: u64,
    },
}

impl FitError {
    /// True if a larger limit, a shorter context or a smaller batch would help.
    #[must_use]
    pub const fn is_over_budget(&self) -> bool {
        matches!(self, Self::TooSmall { .. } | Self::OverLimit { .. })
    }

    /// True if a device map is wrong whatever the limits are.
    #[must_use]
    pub const fn is_bad_map(&self) -> bool {
        matches!(
            self,
            Self::BadMap { .. }
                | Self::UnknownDevice { .. }
                | Self::UnknownKey { .. }
                | Self::Unplaced { .. }
                | Self::SplitLayer { .. }
                | Self::SeparatedTie { .. }
        )
    }
}
