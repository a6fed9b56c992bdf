//! Queued copies and fills, and the ranges of memory that they use.

use super::host::HostKind;
use super::memory::offset_of;
use crate::ledger::Direction;

/// A range of device memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceRange {
    pub(crate) address: u64,
    pub(crate) len_bytes: u64,
    /// Start of its allocation.
    pub(crate) start: u64,
    pub(crate) device: usize,
}

impl DeviceRange {
    pub(crate) fn span(&self) -> std::ops::Range<u64> {
        self.address..self.address + self.len_bytes
    }

    pub(crate) fn offset(&self) -> u64 {
        offset_of(self.device, self.address)
    }
}

/// A range of host memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostRange {
    pub(crate) start: usize,
    pub(crate) len: usize,
    pub(crate) kind: HostKind,
}

/// A queued copy.
#[derive(Debug)]
pub(crate) enum Copy {
    ToDevice {
        source: HostRange,
        target: DeviceRange,
        /// Checksum of the source when it was queued.
        sum: u64,
    },
    /// A copy whose bytes were read when it was queued.
    Staged {
        bytes: Vec<u8>,
        target: DeviceRange,
    },
    ToHost {
        source: DeviceRange,
        target: HostRange,
    },
    OnDevice {
        source: DeviceRange,
        target: DeviceRange,
    },
    Fill {
        target: DeviceRange,
        value: u8,
    },
}

impl Copy {
    pub(crate) fn direction(&self) -> Direction {
        match self {
            Self::ToDevice { .. } | Self::Staged { .. } => Direction::HostToDevice,
            Self::ToHost { .. } => Direction::DeviceToHost,
            Self::OnDevice { .. } => Direction::DeviceToDevice,
            Self::Fill { .. } => Direction::Fill,
        }
    }

    pub(crate) fn len_bytes(&self) -> u64 {
        match self {
            Self::ToDevice { target, .. }
            | Self::Staged { target, .. }
            | Self::OnDevice { target, .. }
            | Self::Fill { target, .. } => target.len_bytes,
            Self::ToHost { source, .. } => source.len_bytes,
        }
    }

    pub(crate) fn uses_host(&self) -> bool {
        matches!(self, Self::ToDevice { .. } | Self::ToHost { .. })
    }

    pub(crate) fn read_range(&self) -> Option<DeviceRange> {
        match self {
            Self::ToHost { source, .. } | Self::OnDevice { source, .. } => Some(*source),
            _ => None,
        }
    }

    pub(crate) fn written_range(&self) -> Option<DeviceRange> {
        match self {
            Self::ToDevice { target, .. }
            | Self::Staged { target, .. }
            | Self::OnDevice { target, .. }
            | Self::Fill { target, .. } => Some(*target),
            Self::ToHost { .. } => None,
        }
    }

    pub(crate) fn host_kind(&self) -> Option<HostKind> {
        match self {
            Self::ToDevice { source, .. } => Some(source.kind),
            Self::ToHost { target, .. } => Some(target.kind),
            _ => None,
        }
    }
}
