//! Compares a checkpoint with the manifest beside it.
//!
//! The manifest is read entry by entry. Sizes, types and shapes are compared at once; only the hash
//! of each file and tensor is kept, until the bytes were read.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::super::hash::{Digest, Hashes, from_hex, hex};
use super::super::manifest::{Alias, Entry, ManifestFile, ManifestTensor, SideFileRecord};
use super::super::read_file::{ReadFault, read_file};
use super::super::side_files::SideFiles;
use super::{ConvertError, Findings, OpenManifest};
use crate::checkpoint::{Checkpoint, DType, Shard, ShardId, TensorId};
use crate::footprint::{Held, block_bytes};
use crate::load::hash_each;
use crate::plan::Quantisation;
use crate::units::to_u64;

/// Digits of a hash in a difference.
const SHOWN_DIGITS: usize = 16;

/// The contents of a manifest.
#[derive(Debug, Default)]
pub(super) struct Stated {
    /// The directory of the manifest.
    root: PathBuf,
    /// Of each file of the checkpoint.
    files: Vec<Option<Hashes>>,
    /// Of each tensor of the checkpoint.
    tensors: Vec<Option<StatedTensor>>,
    /// Of each tensor of the checkpoint; empty if the manifest has none.
    sha256: Vec<Option<[u8; 32]>>,
    side_files: Vec<SideFileRecord>,
    /// Names of tensors that were not selected.
    left_out: BTreeSet<String>,
    /// Tensors that were left out, each with the tensor that has its bytes. Sorted by name.
    aliases: Vec<Alias>,
    /// True if any hash is a SHA-256.
    has_sha256: bool,
}

#[derive(Clone, Copy, Debug)]
struct StatedTensor {
    blake3: [u8; 32],
    cast_from: Option<DType>,
    quantised: Option<Quantisation>,
}

impl Stated {
    /// Reads a manifest, and compares it with the headers. `checkpoint` is `None` if it cannot be
    /// opened.
    ///
    /// # Errors
    /// [`ConvertError::BadManifest`], [`ConvertError::Read`].
    pub(super) fn read(
        manifest: OpenManifest<'_>,
        root: &Path,
        checkpoint: Option<&Checkpoint>,
        findings: &mut Findings,
    ) -> Result<Self, ConvertError> {
        let mut stated = Self { root: root.to_owned(), ..Self::default() };
        let mut by_path = BTreeMap::new();
        if let Some(checkpoint) = checkpoint {
            by_path = checkpoint.shards().iter().map(|shard| shard.path.as_path()).zip(0..).collect();
            stated.files = vec![None; checkpoint.shards().len()];
            stated.tensors = vec![None; checkpoint.tensor_count()];
        }
        // The position of the file that the next tensors belong to.
        let mut index = None;
        let (head, side_files) = manifest.read(&mut |entry| match (entry, checkpoint) {
            (Entry::File(file), Some(checkpoint)) => {
                index = stated.take_file(&file, &by_path, checkpoint, findings);
            }
            (Entry::Tensor(tensor), Some(checkpoint)) => {
                if let Some(index) = index {
                    stated.take_tensor(&tensor, index, checkpoint, findings);
                }
            }
            (Entry::File(file), None) => check_presence(&file, root, findings),
            (Entry::Tensor(_), None) => {}
        })?;
        stated.side_files = side_files;
        stated.has_sha256 |= stated.side_files.iter().any(|file| file.sha256.is_some());
        stated.left_out = head.left_out.into_iter().collect();
        stated.aliases = head.aliases;
        stated.aliases.sort_by(|left, right| left.name.cmp(&right.name));
        stated.check_side_files(root, findings)?;
        if let Some(checkpoint) = checkpoint {
            stated.check_coverage(checkpoint, findings);
        }
        Ok(stated)
    }

    /// Takes the entry of a file. Returns its position in the checkpoint.
    fn take_file(
        &mut self,
        file: &ManifestFile,
        by_path: &BTreeMap<&Path, usize>,
        checkpoint: &Checkpoint,
        findings: &mut Findings,
    ) -> Option<usize> {
        let path = self.root.join(&file.name);
        let Some(&index) = by_path.get(path.as_path()) else {
            let what = match path.exists() {
                true => "is stated in the manifest, but does not belong to the checkpoint".to_owned(),
                false => "is missing".to_owned(),
            };
            findings.differ(&file.name, what);
            return None;
        };
        let shard = &checkpoint.shards()[index];
        let found_bytes = shard.identity.len_bytes;
        if found_bytes != file.bytes {
            findings.differ(&file.name, format!("has {found_bytes} bytes, the manifest says {}", file.bytes));
        }
        self.files[index] = hashes_of(&file.blake3, file.sha256.as_deref());
        self.has_sha256 |= file.sha256.is_some();
        Some(index)
    }

    fn take_tensor(
        &mut self,
        tensor: &ManifestTensor,
        index: usize,
        checkpoint: &Checkpoint,
        findings: &mut Findings,
    ) {
        let shard = &checkpoint.shards()[index];
        let name = format!("{}{}", shard.name_prefix, tensor.name);
        let in_file = checkpoint.find(&name).filter(|entry| entry.shard.index() == index);
        let Some(entry) = in_file else {
            return findings.differ(&name, format!("is not in {}, as the manifest says", self.below(shard)));
        };
        let found = (entry.dtype_name, entry.shape, entry.extent.len_bytes());
        let stated = (tensor.dtype.as_str(), tensor.shape.as_slice(), tensor.bytes);
        if found != stated {
            let text =
                |(dtype, shape, bytes): (&str, &[u64], u64)| format!("{dtype} {shape:?} of {bytes} bytes");
            findings.differ(&name, format!("is {}, the manifest says {}", text(found), text(stated)));
        }
        let Some(hashes) = hashes_of(&tensor.blake3, tensor.sha256.as_deref()) else { return };
        let cast_from = tensor.cast_from.as_deref().and_then(|name| name.parse().ok());
        let id = entry.id.index();
        let quantised = tensor.quantised.as_deref().and_then(|name| name.parse().ok());
        self.tensors[id] = Some(StatedTensor { blake3: hashes.blake3, cast_from, quantised });
        if let Some(sha256) = hashes.sha256 {
            self.has_sha256 = true;
            self.sha256.resize(self.tensors.len(), None);
            self.sha256[id] = Some(sha256);
        }
    }

    /// Finds files and tensors that are not in the manifest.
    fn check_coverage(&self, checkpoint: &Checkpoint, findings: &mut Findings) {
        for (shard, _) in checkpoint.shards().iter().zip(&self.files).filter(|(_, stated)| stated.is_none()) {
            findings.differ(&self.below(shard), "is not in the manifest".to_owned());
        }
        for (tensor, _) in checkpoint.tensors().zip(&self.tensors).filter(|(_, stated)| stated.is_none()) {
            if self.files[tensor.shard.index()].is_some() {
                findings.differ(tensor.name, "is not in the manifest".to_owned());
            }
        }
        for Alias { name, same_as } in &self.aliases {
            if checkpoint.find(name).is_some() {
                findings.differ(name, "is there, and the manifest says that it was left out".to_owned());
            }
            if checkpoint.find(same_as).is_none() {
                findings.differ(same_as, format!("is missing, and {name} was left out for it"));
            }
        }
    }

    /// Hashes the side files, several at once.
    fn check_side_files(&self, root: &Path, findings: &mut Findings) -> Result<(), ConvertError> {
        let checked = hash_each(&self.side_files, |file| check_side_file(file, root));
        for (file, fault) in self.side_files.iter().zip(checked) {
            if let Some(what) = fault? {
                findings.differ(&file.name, what);
            }
        }
        Ok(())
    }

    /// Finds files that are not in the manifest.
    ///
    /// # Errors
    /// [`ConvertError::Read`] if the directory cannot be listed.
    pub(super) fn check_others(
        &self,
        directory: &Path,
        root: &Path,
        checkpoint: &Checkpoint,
        findings: &mut Findings,
    ) -> Result<(), ConvertError> {
        let found = match SideFiles::list(directory, None, checkpoint) {
            Err(ConvertError::TooManySideFiles { limit, .. }) => {
                findings
                    .note(format!("{} has more than {limit} files beside those of tensors", root.display()));
                return Ok(());
            }
            found => found?,
        };
        let stated: BTreeSet<&str> = self.side_files.iter().map(|file| file.name.as_str()).collect();
        for index in found.indices.iter().filter(|index| !stated.contains(index.as_str())) {
            findings.differ(
                index,
                "is an index that the manifest does not know: loaders may follow it".to_owned(),
            );
        }
        if let Some(names) = found.other_tensors.text() {
            findings.differ(&names, "neither the index nor the manifest knows them".to_owned());
        }
        let mut extra =
            found.files.iter().map(|file| file.name.as_str()).filter(|name| !stated.contains(name));
        if let Some(first) = extra.next() {
            let more = match extra.count() {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            findings.note(format!("not in the manifest: {first}{more}"));
        }
        Ok(())
    }

    /// Compares the hashes of a file.
    pub(super) fn compare_file(
        &self,
        checkpoint: &Checkpoint,
        shard: ShardId,
        found: &Hashes,
        findings: &mut Findings,
    ) {
        let Some(stated) = &self.files[shard.index()] else { return };
        findings.report.files += 1;
        if let Some(what) = difference(stated, found) {
            findings.differ(&self.below(checkpoint.shard(shard)), what);
        }
    }

    /// The path of a file, as in the manifest.
    fn below(&self, shard: &Shard) -> String {
        shard.path.strip_prefix(&self.root).unwrap_or(&shard.path).to_string_lossy().into_owned()
    }

    /// Compares the hashes of a tensor; false if the manifest has none.
    pub(super) fn compare_tensor(
        &self,
        checkpoint: &Checkpoint,
        id: TensorId,
        found: &Hashes,
        findings: &mut Findings,
    ) -> bool {
        let Some(stated) = &self.tensors[id.index()] else { return false };
        let sha256 = self.sha256.get(id.index()).copied().flatten();
        if let Some(what) = difference(&Hashes { blake3: stated.blake3, sha256 }, found) {
            findings.differ(checkpoint.tensor(id).name, what);
        }
        true
    }

    /// The type that a tensor had before it was cast, if it was.
    pub(super) fn cast_from(&self, id: TensorId) -> Option<DType> {
        self.tensors[id.index()].as_ref()?.cast_from
    }

    /// The form that the weight of a tensor was quantised to, if it was.
    pub(super) fn quantised(&self, id: TensorId) -> Option<Quantisation> {
        self.tensors[id.index()].as_ref()?.quantised
    }

    /// True if that tensor was not selected.
    pub(super) fn is_left_out(&self, name: &str) -> bool {
        self.left_out.contains(name)
    }

    /// The tensor with the bytes of one that was left out.
    pub(super) fn same_as(&self, name: &str) -> Option<&str> {
        let found = self.aliases.binary_search_by(|alias| alias.name.as_str().cmp(name)).ok()?;
        Some(&self.aliases[found].same_as)
    }

    /// True if SHA-256 has to be computed.
    pub(super) fn has_sha256(&self) -> bool {
        self.has_sha256
    }

    /// The host memory of all of it, in bytes.
    pub(super) fn held_bytes(&self) -> u64 {
        let texts = self.left_out.iter().map(String::len);
        let texts =
            texts.chain(self.aliases.iter().flat_map(|alias| [alias.name.len(), alias.same_as.len()]));
        // A name, its header, and its place in a tree.
        let texts: u64 = texts.map(|len| block_bytes(to_u64(len)) + 48).sum();
        let side_files: u64 = self.side_files.iter().map(|file| to_u64(file.name.len()) + 320).sum();
        let lists = Held::default().list(&self.files).list(&self.tensors).list(&self.sha256);
        lists.and(texts).and(side_files).bytes()
    }
}

/// Compares the length of a file with the manifest. If the checkpoint cannot be opened, this is all
/// that can be compared.
fn check_presence(file: &ManifestFile, root: &Path, findings: &mut Findings) {
    match root.join(&file.name).metadata() {
        Ok(metadata) if metadata.len() == file.bytes => {}
        Ok(metadata) => {
            let (found, stated) = (metadata.len(), file.bytes);
            findings.differ(&file.name, format!("has {found} bytes, the manifest says {stated}"));
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            findings.differ(&file.name, "is missing".to_owned());
        }
        Err(error) => findings.differ(&file.name, format!("cannot be looked at: {error}")),
    }
}

/// The hashes of an entry. The reader of the manifest has checked them.
fn hashes_of(blake3: &str, sha256: Option<&str>) -> Option<Hashes> {
    Some(Hashes { blake3: from_hex(blake3)?, sha256: sha256.and_then(from_hex) })
}

/// Says how two pairs of hashes differ, if they do.
fn difference(stated: &Hashes, found: &Hashes) -> Option<String> {
    let pairs =
        [("BLAKE3", Some(stated.blake3), Some(found.blake3)), ("SHA-256", stated.sha256, found.sha256)];
    let (kind, stated, found) =
        pairs.into_iter().find_map(|(kind, stated, found)| match (stated, found) {
            (Some(stated), Some(found)) if stated != found => Some((kind, stated, found)),
            _ => None,
        })?;
    let [found, stated] = [found, stated].map(|hash| hex(&hash)[..SHOWN_DIGITS].to_owned());
    Some(format!("has other bytes: {kind} is {found}..., the manifest says {stated}..."))
}

/// Says how a side file differs from its record, if it does.
///
/// # Errors
/// [`ConvertError::Read`], [`ConvertError::Checkpoint`].
fn check_side_file(file: &SideFileRecord, root: &Path) -> Result<Option<String>, ConvertError> {
    let path = root.join(&file.name);
    let mut digest = Digest::new(file.sha256.is_some());
    let read = read_file(&path, |piece| {
        digest.update_alone(piece);
        Ok::<(), ConvertError>(())
    });
    let bytes = match read {
        Ok(bytes) => bytes,
        Err(ReadFault::Open(error)) if error.kind() == std::io::ErrorKind::NotFound => {
            return Ok(Some("is missing".to_owned()));
        }
        Err(ReadFault::NotRegular(found)) => return Ok(Some(format!("is a {found}, not a file"))),
        Err(fault) => return Err(fault.at(&path)),
    };
    if bytes != file.bytes {
        return Ok(Some(format!("has {bytes} bytes, the manifest says {}", file.bytes)));
    }
    let stated = hashes_of(&file.blake3, file.sha256.as_deref());
    Ok(stated.and_then(|stated| difference(&stated, &digest.take())))
}
