//! What can go wrong on a device.

use crate::units::HumanBytes;

/// What can go wrong on a device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The system refused memory for an arena.
    #[error("cannot allocate an arena of {} in host memory", HumanBytes(*bytes))]
    HostAllocation {
        /// Bytes of the arena.
        bytes: u64,
        /// The system's answer.
        source: std::io::Error,
    },
}
