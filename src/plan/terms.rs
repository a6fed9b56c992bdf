//! The named parts that a memory peak is summed from.

use std::fmt;

/// The parts that a peak is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TermKind {
    /// The staging ring.
    Ring,
    /// Mapped windows of files, one per reader.
    MappedWindows,
    /// Scales of quantised rows, until they are copied behind the values.
    Scales,
    /// The description of the checkpoint.
    Metadata,
    /// The peak of grouping tensors into layers.
    Grouping,
    /// The plan.
    Plan,
    /// Entries of layers and files while the load runs.
    LoaderState,
    /// Hashes of tensors.
    Hashes,
    /// Buffers of files that are written.
    WriteBuffers,
    /// Lists of the files of a conversion.
    Files,
    /// Hashes that a verification compares with.
    HashesToCompare,
    /// The description of the second checkpoint of a comparison.
    OtherMetadata,
    /// Resident layers in the window.
    Window,
    /// Resident layers that stay through all passes.
    KeptLayers,
}

impl TermKind {
    /// Its name in printed plans and in reports, such as `mapped windows`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ring => "ring",
            Self::MappedWindows => "mapped windows",
            Self::Scales => "scales in the making",
            Self::Metadata => "checkpoint metadata",
            Self::Grouping => "layer grouping",
            Self::Plan => "plan",
            Self::LoaderState => "loader state",
            Self::Hashes => "hashes",
            Self::WriteBuffers => "write buffers",
            Self::Files => "files",
            Self::HashesToCompare => "hashes to compare",
            Self::OtherMetadata => "metadata of the other checkpoint",
            Self::Window => "window",
            Self::KeptLayers => "kept layers",
        }
    }
}

impl fmt::Display for TermKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// One part of the peak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryTerm {
    /// Which part.
    pub kind: TermKind,
    /// Its size in bytes.
    pub bytes: u64,
}

impl MemoryTerm {
    pub(crate) const fn new(kind: TermKind, bytes: u64) -> Self {
        Self { kind, bytes }
    }
}
