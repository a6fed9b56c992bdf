//! The formats that are read.

use std::fmt;

/// The format of a checkpoint file, found by its content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FileFormat {
    /// safetensors.
    Safetensors,
    /// What `torch.save` writes since torch 1.6: a zip archive with a pickle.
    TorchZip,
    /// What `torch.save` wrote from 0.1.10 to 1.5: pickles in a row, then the storages.
    TorchLegacy,
    /// What `torch.save` wrote before 0.1.10: a tar archive.
    TorchTar,
    /// GGUF, versions 2 and 3.
    Gguf,
}

impl FileFormat {
    /// The name for people.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Safetensors => "safetensors",
            Self::TorchZip => "PyTorch zip",
            Self::TorchLegacy => "legacy PyTorch",
            Self::TorchTar => "PyTorch tar",
            Self::Gguf => "GGUF",
        }
    }
}

impl fmt::Display for FileFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
