//! How layers leave: unloading, with a receipt of what came back, and parking.
//!
//! Each byte is in one place of a [`Receipt`]. It counts as returned once the system or the driver
//! has confirmed that it took it:
//!
//! ```text
//! asked = returned + kept by the pool + queued + recycled + lent + unconfirmed + held
//! ```
//!
//! Parking copies a layer elsewhere, 1 MiB at a time, and frees its arena. Restoring copies it into
//! a new arena. A layer that is held is not parked: its memory would stay, and the copy would come
//! on top.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{Advice, Mode, OFlags};

use super::error::LoadError;
use super::hash::TensorHash;
use super::layer::LoadedLayer;
use super::layer_data::{Content, Holder, LayerData};
use crate::checkpoint::Checkpoint;
use crate::device::{ArenaPool, Freed, REFILLED_BYTES_MAX, Target, Unfilled};
use crate::live::MemoryUse;
use crate::plan::{LoadPlan, PlannedLayer};
use crate::staging::memory::AnonymousMemory;
use crate::units::{HumanBytes, to_u64, to_usize};

/// The result of an unload. [`Self::asked_bytes`] is the sum of the fields after it, up to
/// [`Self::held_bytes`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Receipt {
    /// Layers to unload.
    pub layers: u64,
    /// Bytes of their memory, on the device or the host.
    pub asked_bytes: u64,
    /// Bytes that the system or the driver has confirmed to have back. On the host: the mapping is
    /// gone (`munmap`). On a CUDA device: the free is over, the pool was trimmed, and the driver
    /// counts this many bytes fewer for the pool (`CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT`). Without
    /// pools: `cuMemFree` has succeeded.
    pub returned_bytes: u64,
    /// Bytes that are free and that the device's pool keeps for the next layer. It gives back whole
    /// pages, and small layers share one, which goes back with the last of them.
    pub kept_bytes: u64,
    /// Bytes that the device frees in its own order, after the work that
    /// [`release_after`](LoadedLayer::release_after) named. Nothing waits for it, so the time is
    /// not known.
    pub queued_bytes: u64,
    /// Bytes that a running stream uses for its next layers and gives back at its end.
    pub recycled_bytes: u64,
    /// Bytes in memory that the caller provided, and that is the caller's again.
    pub lent_bytes: u64,
    /// Bytes that were given up without a confirmation: a call was refused, or the context is lost.
    pub unconfirmed_bytes: u64,
    /// Bytes of layers that are held. They are freed with the last owner.
    pub held_bytes: u64,
    /// Bytes that were copied elsewhere first and are parked there. No part of the sum.
    pub parked_bytes: u64,
    /// The tensors that hold them, in the order of the layers.
    pub holders: Vec<Holder>,
}

impl Receipt {
    /// True if every byte that was asked for is back.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.returned_bytes == self.asked_bytes
    }

    /// The sum of both receipts.
    #[must_use]
    pub fn and(mut self, other: Self) -> Self {
        self.layers += other.layers;
        self.asked_bytes += other.asked_bytes;
        self.returned_bytes += other.returned_bytes;
        self.kept_bytes += other.kept_bytes;
        self.queued_bytes += other.queued_bytes;
        self.recycled_bytes += other.recycled_bytes;
        self.lent_bytes += other.lent_bytes;
        self.unconfirmed_bytes += other.unconfirmed_bytes;
        self.held_bytes += other.held_bytes;
        self.parked_bytes += other.parked_bytes;
        self.holders.extend(other.holders);
        self
    }

    /// Frees a layer.
    fn of_one(layer: LoadedLayer) -> Self {
        let pool = layer.arena_pool();
        free_together(pool.as_deref(), std::iter::once(layer))
    }

    /// Frees layers, those of one arena pool together, so that each pool is trimmed once.
    pub(crate) fn of(layers: impl IntoIterator<Item = LoadedLayer>) -> Self {
        let mut receipt = Self::default();
        let mut layers: Vec<LoadedLayer> = layers.into_iter().collect();
        while let Some(first) = layers.first() {
            let pool = first.arena_pool();
            let (same, others) = layers.into_iter().partition(|layer| comes_from(pool.as_ref(), layer));
            receipt = receipt.and(free_together(pool.as_deref(), same));
            layers = others;
        }
        receipt
    }
}

/// True if the memory of the layer comes from that pool.
fn comes_from(pool: Option<&Arc<dyn ArenaPool>>, layer: &LoadedLayer) -> bool {
    match (pool, layer.arena_pool()) {
        (Some(one), Some(other)) => Arc::ptr_eq(one, &other),
        (None, None) => true,
        _ => false,
    }
}

/// Frees layers whose memory came from one pool.
fn free_together(pool: Option<&dyn ArenaPool>, layers: impl IntoIterator<Item = LoadedLayer>) -> Receipt {
    let mut receipt = Receipt::default();
    let before_bytes = pool.and_then(ArenaPool::pool_bytes);
    let mut pooled_bytes = 0;
    for layer in layers {
        let bytes = layer.resident_bytes();
        receipt.layers += 1;
        receipt.asked_bytes += bytes;
        let counter = match layer.give_up() {
            Err(holders) => {
                receipt.holders.extend(holders);
                &mut receipt.held_bytes
            }
            Ok(Freed::Returned) => &mut receipt.returned_bytes,
            Ok(Freed::ToPool) => &mut pooled_bytes,
            Ok(Freed::Queued) => &mut receipt.queued_bytes,
            Ok(Freed::Recycled) => &mut receipt.recycled_bytes,
            Ok(Freed::Lent) => &mut receipt.lent_bytes,
            Ok(Freed::Unconfirmed) => &mut receipt.unconfirmed_bytes,
        };
        *counter += bytes;
    }
    if let Some(pool) = pool.filter(|_| pooled_bytes > 0) {
        let is_settled = pool.settle();
        match before_bytes.zip(pool.pool_bytes()) {
            Some((before_bytes, after_bytes)) if is_settled => {
                // A pool gives back whole pages, which may be more than these layers.
                receipt.returned_bytes += pooled_bytes.min(before_bytes.saturating_sub(after_bytes));
                receipt.kept_bytes += pooled_bytes.saturating_sub(before_bytes.saturating_sub(after_bytes));
            }
            _ => receipt.unconfirmed_bytes += pooled_bytes,
        }
    }
    receipt
}

/// Holders that the text names.
const SHOWN: usize = 3;

impl fmt::Display for Receipt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} asked, {} returned", HumanBytes(self.asked_bytes), HumanBytes(self.returned_bytes))?;
        let rest = [
            (self.kept_bytes, "kept by the device's pool"),
            (self.queued_bytes, "queued on the device to be freed"),
            (self.recycled_bytes, "reused by the stream"),
            (self.lent_bytes, "in the caller's own memory"),
            (self.unconfirmed_bytes, "given up without a confirmation"),
        ];
        for (bytes, words) in rest.into_iter().filter(|&(bytes, _)| bytes > 0) {
            write!(f, ", {} {words}", HumanBytes(bytes))?;
        }
        if self.held_bytes == 0 {
            return Ok(());
        }
        write!(f, ", {} held by ", HumanBytes(self.held_bytes))?;
        for (number, holder) in self.holders.iter().take(SHOWN).enumerate() {
            let comma = if number > 0 { ", " } else { "" };
            write!(f, "{comma}{:?}", holder.tensor)?;
            if holder.owners > 1 {
                write!(f, " ({} times)", holder.owners)?;
            }
        }
        match self.holders.len() {
            // Its stream keeps the layer, or the holder has dropped it meanwhile.
            0 => f.write_str("its stream, or an owner that is just being dropped"),
            more if more > SHOWN => write!(f, " and {} more", more - SHOWN),
            _ => Ok(()),
        }
    }
}

/// Where parked layers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ParkTo<'a> {
    /// In host memory, in addition to the budget of any load.
    Memory,
    /// In a file without a name in this folder, as large as the layer. The space is free again when
    /// the layer is restored or unloaded, or when the process ends in any way. Nothing of it stays
    /// in the page cache.
    Folder(&'a Path),
}

/// A parked layer.
pub(crate) struct ParkedLayer {
    checkpoint: Checkpoint,
    plan: Arc<LoadPlan>,
    index: usize,
    hashes: Vec<TensorHash>,
    pool: Arc<dyn ArenaPool>,
    bytes: ParkedBytes,
}

/// The bytes of its arena.
#[derive(Debug)]
enum ParkedBytes {
    Memory(AnonymousMemory),
    File { file: File, folder: PathBuf },
}

/// The result of parking a layer.
pub(crate) enum Parking {
    /// It is parked, and its arena was freed.
    Parked(ParkedLayer, Receipt),
    /// It stays where it is: it is held, is there already, or has no bytes.
    Stays(LoadedLayer, Receipt),
    /// It could not be copied, and stays where it is.
    Failed(LoadedLayer, LoadError),
}

impl LoadedLayer {
    /// Frees the layer, as dropping it does, and returns what came back. Tensors that were taken
    /// keep its memory until they are dropped; the receipt names them.
    pub fn unload(self) -> Receipt {
        Receipt::of_one(self)
    }

    /// Copies the layer elsewhere and frees it.
    pub(crate) fn park(self, to: ParkTo<'_>) -> Parking {
        let is_there = to == ParkTo::Memory && self.data.resident().target() == Target::Host;
        let pool = self.arena_pool().filter(|_| !is_there && self.resident_bytes() > 0);
        let Some(pool) = pool else { return Parking::Stays(self, Receipt::default()) };
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
            pool,
            bytes,
        };
        let parked_bytes = self.resident_bytes();
        let receipt = Receipt { parked_bytes, ..self.unload() };
        Parking::Parked(parked, receipt)
    }

    fn copy_out(&self, to: ParkTo<'_>) -> Result<ParkedBytes, LoadError> {
        let len_bytes = self.resident_bytes();
        let mut parked = match to {
            ParkTo::Memory => {
                let memory = AnonymousMemory::new(len_bytes);
                let memory = memory.map_err(|source| self.fault(Path::new("host memory"), source))?;
                memory.live().note(MemoryUse::Parked, Some(self.id()));
                ParkedBytes::Memory(memory)
            }
            ParkTo::Folder(folder) => {
                let file = nameless_file(folder).map_err(|source| self.fault(folder, source))?;
                ParkedBytes::File { file, folder: folder.to_owned() }
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

    /// Bytes that are parked, in host memory or in a file.
    pub(crate) fn len_bytes(&self) -> u64 {
        self.planned().arena_bytes
    }

    /// Copies the layer into an arena again.
    pub(crate) fn restore(mut self) -> Result<LoadedLayer, Box<(Self, LoadError)>> {
        let (pool, plan) = (Arc::clone(&self.pool), Arc::clone(&self.plan));
        let bytes = &mut self.bytes;
        let refilled =
            pool.refill(&plan.layers()[self.index], &mut |offset, target| bytes.read(offset, target));
        let resident = match refilled {
            Ok(resident) => resident,
            Err(Unfilled::Device(error)) => return Err(Box::new((self, error.into()))),
            Err(Unfilled::Bytes(source)) => {
                let (layer, path) = (self.planned().id.clone(), self.bytes.folder().to_owned());
                return Err(Box::new((self, LoadError::Park { layer, path, source })));
            }
        };
        let data = LayerData {
            index: self.index,
            hashes: self.hashes,
            // The window of the load is for layers that the load delivers.
            content: Some(Content { resident, permit: None }),
            ..LayerData::blank(&self.checkpoint, &self.plan)
        };
        Ok(LoadedLayer::new(data))
    }

    /// Frees the parked bytes. The receipt counts host memory; a file is no memory.
    pub(crate) fn unload(self) -> Receipt {
        let bytes = self.len_bytes();
        let mut receipt = Receipt { layers: 1, ..Receipt::default() };
        if let ParkedBytes::Memory(memory) = self.bytes {
            receipt.asked_bytes = bytes;
            match memory.unmap() {
                Ok(()) => receipt.returned_bytes = bytes,
                Err(_) => receipt.unconfirmed_bytes = bytes,
            }
        }
        receipt
    }
}

impl ParkedBytes {
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
                // The system starts to write now, so that little is left for the end.
                let _ = rustix::fs::fadvise(&*file, offset_bytes, None, Advice::DontNeed);
                Ok(())
            }
        }
    }

    /// Writes the file out and drops it from the page cache.
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
                // Only up to here: bytes that the system has read ahead are wanted next.
                let read_bytes = std::num::NonZeroU64::new(offset_bytes + to_u64(target.len()));
                let _ = rustix::fs::fadvise(&*file, 0, read_bytes, Advice::DontNeed);
                Ok(())
            }
        }
    }
}

/// A file that is gone when it is closed: one without a name if the file system can make it,
/// otherwise one whose name is removed at once.
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
    use onelayer_system::file_system::FileSystem;
    use onelayer_system::page_cache;
    use onelayer_testing::skipped;

    use super::*;
    use crate::units::{ByteRange, MIB};

    /// A layer that its stream keeps is held, though no tensor of it was taken.
    #[test]
    fn a_layer_without_holders_is_its_streams() {
        let receipt = Receipt { layers: 1, asked_bytes: 5, held_bytes: 5, ..Receipt::default() };
        let text = receipt.to_string();
        assert!(text.ends_with("5 B held by its stream, or an owner that is just being dropped"), "{text}");
    }

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
        let mut parked = ParkedBytes::File { file, folder: folder.path().to_owned() };
        let mut piece = vec![7; to_usize(MIB)];
        for offset_bytes in (0..len_bytes).step_by(piece.len()) {
            parked.write(offset_bytes, &piece).unwrap();
        }
        parked.finish().unwrap();
        let cached = |parked: &ParkedBytes, start: u64, end: u64| {
            let ParkedBytes::File { file, .. } = parked else { panic!("it waits in a file") };
            page_cache::pages_by_mincore(file, ByteRange::new(start, end).unwrap()).unwrap()
        };
        assert_eq!(cached(&parked, 0, len_bytes), 0);
        let ParkedBytes::File { file, .. } = &parked else { panic!("it waits in a file") };
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
