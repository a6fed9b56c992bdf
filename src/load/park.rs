//! Layers that wait elsewhere: copied out of their arena, which is freed, and later into a new one.
//!
//! ```text
//! resident --(copy out, 1 MiB at a time)--> parked, arena freed --(new arena, copy in)--> resident
//! ```
//!
//! A layer that somebody holds is not parked: its memory would stay, and the copy would come on
//! top.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{Advice, Mode, OFlags};

use super::hash::TensorHash;
use super::layer::{Content, LayerData};
use super::owners::Owners;
use super::{LoadError, LoadedLayer, Receipt};
use crate::checkpoint::Checkpoint;
use crate::device::{ArenaPool, REFILLED_BYTES_MAX, Target, Unfilled};
use crate::live::MemoryUse;
use crate::plan::{LoadPlan, PlannedLayer};
use crate::staging::memory::AnonymousMemory;
use crate::units::{to_u64, to_usize};

/// Where layers wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ParkTo<'a> {
    /// In host memory, which grows by as much: the budget of a load does not bound it.
    Memory,
    /// In a file without a name in this folder, as large as the layer. The space is free again when
    /// the layer is restored or unloaded, or the process ends in whatever way. The page cache
    /// keeps nothing of it.
    Folder(&'a Path),
}

/// A layer that waits.
pub(crate) struct ParkedLayer {
    checkpoint: Checkpoint,
    plan: Arc<LoadPlan>,
    index: usize,
    hashes: Vec<TensorHash>,
    home: Arc<dyn ArenaPool>,
    bytes: Parked,
}

/// The bytes of its arena.
#[derive(Debug)]
enum Parked {
    Memory(AnonymousMemory),
    File { file: File, folder: PathBuf },
}

/// What came of parking a layer.
pub(crate) enum Parking {
    /// It waits, and its arena was freed.
    Parked(ParkedLayer, Receipt),
    /// It stays where it is: somebody holds it, it is there already, or it is nowhere.
    Stays(LoadedLayer, Receipt),
    /// It could not be copied out, and stays where it is.
    Failed(LoadedLayer, LoadError),
}

impl LoadedLayer {
    /// Copies the layer out and frees it.
    pub(crate) fn park(self, to: ParkTo<'_>) -> Parking {
        let is_there = to == ParkTo::Memory && self.data.resident().target() == Target::Host;
        let home = self.home().filter(|_| !is_there && self.resident_bytes() > 0);
        let Some(home) = home else { return Parking::Stays(self, Receipt::default()) };
        let holders = self.holders();
        if !holders.is_empty() {
            let bytes = self.resident_bytes();
            let receipt =
                Receipt { layers: 1, asked_bytes: bytes, held_bytes: bytes, holders, ..Receipt::default() };
            return Parking::Stays(self, receipt);
        }
        let bytes = match self.copy_out(to) {
            Ok(bytes) => bytes,
            Err(error) => return Parking::Failed(self, error),
        };
        let data = &self.data;
        let parked = ParkedLayer {
            checkpoint: data.checkpoint.clone(),
            plan: Arc::clone(&data.plan),
            index: data.index,
            hashes: data.hashes.clone(),
            home,
            bytes,
        };
        let parked_bytes = self.resident_bytes();
        let receipt = Receipt { parked_bytes, ..self.unload() };
        Parking::Parked(parked, receipt)
    }

    fn copy_out(&self, to: ParkTo<'_>) -> Result<Parked, LoadError> {
        let len_bytes = self.resident_bytes();
        let mut parked = match to {
            ParkTo::Memory => {
                let memory = AnonymousMemory::new(len_bytes);
                let memory = memory.map_err(|source| self.fault(Path::new("host memory"), source))?;
                memory.live().note(MemoryUse::Parked, Some(self.id()));
                Parked::Memory(memory)
            }
            ParkTo::Folder(folder) => {
                let file = nameless_file(folder).map_err(|source| self.fault(folder, source))?;
                Parked::File { file, folder: folder.to_owned() }
            }
        };
        let mut piece = vec![0; to_usize(REFILLED_BYTES_MAX.min(len_bytes))];
        let mut offset_bytes = 0;
        while offset_bytes < len_bytes {
            let piece_bytes = REFILLED_BYTES_MAX.min(len_bytes - offset_bytes);
            let piece = &mut piece[..to_usize(piece_bytes)];
            self.data.resident().read(offset_bytes, piece)?;
            let written = parked.write(offset_bytes, piece);
            written.map_err(|source| self.fault(parked.folder(), source))?;
            offset_bytes += piece_bytes;
        }
        parked.finish().map_err(|source| self.fault(parked.folder(), source))?;
        Ok(parked)
    }

    fn fault(&self, path: &Path, source: io::Error) -> LoadError {
        LoadError::Park { layer: self.id().clone(), path: path.to_owned(), source }
    }
}

impl ParkedLayer {
    fn planned(&self) -> &PlannedLayer {
        &self.plan.layers()[self.index]
    }

    /// Bytes that wait, in host memory or in a file.
    pub(crate) fn len_bytes(&self) -> u64 {
        self.planned().arena_bytes
    }

    /// Into an arena again.
    pub(crate) fn restore(mut self) -> Result<LoadedLayer, Box<(Self, LoadError)>> {
        let (home, plan) = (Arc::clone(&self.home), Arc::clone(&self.plan));
        let bytes = &mut self.bytes;
        let refilled =
            home.refill(&plan.layers()[self.index], &mut |offset, target| bytes.read(offset, target));
        let resident = match refilled {
            Ok(resident) => resident,
            Err(Unfilled::Device(error)) => return Err(Box::new((self, error.into()))),
            Err(Unfilled::Bytes(source)) => {
                let (layer, path) = (self.planned().id.clone(), self.bytes.folder().to_owned());
                return Err(Box::new((self, LoadError::Park { layer, path, source })));
            }
        };
        let data = LayerData {
            checkpoint: self.checkpoint,
            plan: self.plan,
            index: self.index,
            hashes: self.hashes,
            owners: Owners::default(),
            // The load's window is for layers that it delivers.
            content: Some(Content { resident, permit: None }),
            shelf: None,
        };
        Ok(LoadedLayer::new(data))
    }

    /// Gives up what waits. Of memory it is said what the system took; a file is no memory.
    pub(crate) fn unload(self) -> Receipt {
        let bytes = self.len_bytes();
        let mut receipt = Receipt { layers: 1, ..Receipt::default() };
        if let Parked::Memory(memory) = self.bytes {
            receipt.asked_bytes = bytes;
            match memory.unmap() {
                Ok(()) => receipt.returned_bytes = bytes,
                Err(_) => receipt.unconfirmed_bytes = bytes,
            }
        }
        receipt
    }
}

impl Parked {
    fn folder(&self) -> &Path {
        match self {
            Self::Memory(_) => Path::new("host memory"),
            Self::File { folder, .. } => folder,
        }
    }

    fn write(&mut self, offset_bytes: u64, piece: &[u8]) -> io::Result<()> {
        match self {
            Self::Memory(memory) => {
                memory.fill(offset_bytes, piece);
                Ok(())
            }
            Self::File { file, .. } => {
                file.write_all_at(piece, offset_bytes)?;
                // The system begins to write, so that little is left to wait for at the end.
                let _ = rustix::fs::fadvise(&*file, offset_bytes, None, Advice::DontNeed);
                Ok(())
            }
        }
    }

    /// Whatever waits in a file shall wait there, and not in the page cache.
    fn finish(&self) -> io::Result<()> {
        let Self::File { file, .. } = self else { return Ok(()) };
        file.sync_data()?;
        let _ = rustix::fs::fadvise(file, 0, None, Advice::DontNeed);
        Ok(())
    }

    fn read(&mut self, offset_bytes: u64, target: &mut [u8]) -> io::Result<()> {
        match self {
            Self::Memory(memory) => {
                memory.copy_to(offset_bytes, target);
                Ok(())
            }
            Self::File { file, .. } => {
                file.read_exact_at(target, offset_bytes)?;
                // Up to here and no further: what the system has read ahead is wanted next.
                let read_bytes = std::num::NonZeroU64::new(offset_bytes + to_u64(target.len()));
                let _ = rustix::fs::fadvise(&*file, 0, read_bytes, Advice::DontNeed);
                Ok(())
            }
        }
    }
}

/// A file that is gone when it is closed: without a name, where the file system can make one, else
/// with its name taken away at once.
fn nameless_file(folder: &Path) -> io::Result<File> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    if let Ok(file) = rustix::fs::open(folder, flags, Mode::RUSR | Mode::WUSR) {
        return Ok(File::from(file));
    }
    let mut number = 0;
    loop {
        let path = folder.join(format!(".onelayer-parked-{}-{number}", std::process::id()));
        let opened = File::options().read(true).write(true).create_new(true).open(&path);
        match opened {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
            Err(error) => return Err(error),
            Ok(file) => {
                std::fs::remove_file(&path)?;
                return Ok(file);
            }
        }
    }
}

impl fmt::Debug for ParkedLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ParkedLayer").field("id", &self.planned().id).field("bytes", &self.bytes).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::{ByteRange, MIB};
    use onelayer_system::file_system::FileSystem;
    use onelayer_system::page_cache;
    use onelayer_testing::skipped;

    /// What the system has read ahead of a piece stays for the next one; in the end nothing is
    /// cached.
    #[test]
    fn what_was_read_leaves_the_cache_and_what_is_read_ahead_stays() {
        let folder = tempfile::tempdir().unwrap();
        let file = nameless_file(folder.path()).unwrap();
        if FileSystem::holding(&file).unwrap().name() == Some("tmpfs") {
            skipped("temporary files live in memory here");
            return;
        }
        let len_bytes = 8 * MIB;
        let mut parked = Parked::File { file, folder: folder.path().to_owned() };
        let mut piece = vec![7; to_usize(MIB)];
        for offset_bytes in (0..len_bytes).step_by(piece.len()) {
            parked.write(offset_bytes, &piece).unwrap();
        }
        parked.finish().unwrap();
        let cached = |parked: &Parked, start: u64, end: u64| {
            let Parked::File { file, .. } = parked else { panic!("it waits in a file") };
            page_cache::pages_by_mincore(file, ByteRange::new(start, end).unwrap()).unwrap()
        };
        assert_eq!(cached(&parked, 0, len_bytes), 0);
        let Parked::File { file, .. } = &parked else { panic!("it waits in a file") };
        // As a system does that has read ahead.
        file.read_exact_at(&mut piece, 4 * MIB).unwrap();
        let ahead = cached(&parked, 4 * MIB, len_bytes);
        parked.read(0, &mut piece).unwrap();
        assert_eq!(cached(&parked, 0, MIB), 0);
        assert!(ahead > 0 && cached(&parked, 4 * MIB, len_bytes) >= ahead);
        for offset_bytes in (0..len_bytes).step_by(piece.len()) {
            parked.read(offset_bytes, &mut piece).unwrap();
        }
        assert_eq!(cached(&parked, 0, len_bytes), 0);
    }
}
