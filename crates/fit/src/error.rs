//! Errors of plans and device maps.

use super::tier::Tier;
use onelayer::units::HumanBytes;

/// Why a model does not fit, or a device map is wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FitError {
    /// The `config.json` is not valid.
    #[error("{origin}: {message}")]
    BadConfig {
        /// The file.
        origin: String,
        /// The mistake.
        message: String,
    },
    /// A tier is too small for its minimum.
    #[error("{tier} needs at least {}, of which {reason}; its limit is {}", HumanBytes(*needed_bytes), HumanBytes(*limit_bytes))]
    TooSmall {
        /// Where.
        tier: Tier,
        /// The smallest sufficient limit.
        needed_bytes: u64,
        /// The limit.
        limit_bytes: u64,
        /// The largest part of the needed bytes.
        reason: String,
    },
    /// A device map is not a JSON object of names and places.
    #[error("the device map is not understood: {message}")]
    BadMap {
        /// The mistake.
        message: String,
    },
    /// A device map names a GPU that does not exist.
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
    /// No entry of a device map covers a tensor.
    #[error(
        "{count} tensors have no place, the first is `{tensor}`; add its module, or \"\" for all the rest"
    )]
    Unplaced {
        /// The first.
        tensor: String,
        /// How many.
        count: usize,
    },
    /// A device map splits a layer.
    #[error("layer `{layer}` is split: `{first}` is on {first_tier}, `{second}` on {second_tier}")]
    SplitLayer {
        /// The layer.
        layer: String,
        /// One tensor.
        first: String,
        /// Its tier.
        first_tier: Tier,
        /// Another.
        second: String,
        /// Where that is.
        second_tier: Tier,
    },
    /// A device map puts a shared tensor in two places.
    #[error(
        "`{alias}` is the same tensor as `{owner}`, but one is on {alias_tier} and the other on {owner_tier}"
    )]
    SeparatedTie {
        /// The tensor that is counted.
        owner: String,
        /// Its tier.
        owner_tier: Tier,
        /// The other.
        alias: String,
        /// Where that is.
        alias_tier: Tier,
    },
    /// A tier would hold more than its limit.
    #[error("{tier} needs {}, its limit is {}", HumanBytes(*needed_bytes), HumanBytes(*limit_bytes))]
    OverLimit {
        /// Where.
        tier: Tier,
        /// Bytes that it would hold.
        needed_bytes: u64,
        /// Its limit.
        limit_bytes: u64,
    },
}

impl FitError {
    /// True if a larger limit, a shorter context or a smaller batch may help.
    #[must_use]
    pub const fn is_over_budget(&self) -> bool {
        matches!(self, Self::TooSmall { .. } | Self::OverLimit { .. })
    }

    /// True if a device map is wrong with any limits.
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
