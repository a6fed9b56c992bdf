//! Checks a directory against its manifest, and against what it was made of.
//!
//! ```text
//! headers, coverage, index       as every checkpoint is opened
//! manifest -> Stated             sizes, types, shapes, the set of files
//! one pass over the files        BLAKE3, and SHA-256 where it is stated: of each file and of each tensor
//! one pass over the source       BLAKE3 of each tensor, cast as the conversion did -> Comparison
//! tensors that differ            the first few are read again, to say where
//! ```
//!
//! Everything passes through the ring of a load, within a budget. What is wrong is collected, not
//! returned as an error: errors are for what cannot be read.

mod against;
mod findings;
mod locate;
mod stated;

use std::path::Path;

use self::against::Comparison;
use self::findings::Findings;
use self::stated::Stated;
use super::journal::WORK_FOLDER;
use super::manifest_reader::{Entry, OpenManifest};
use super::reading::{HashPass, Seen, direct};
use super::side_files::{SideFiles, directory_of};
use super::{ConvertError, ConvertEvent, MANIFEST_NAME};
use crate::checkpoint::{Checkpoint, CheckpointError, OpenOptions};
use crate::plan::{IoMode, LoadOptions, MemoryTerm, TermKind};
use crate::source::Fallback;
use crate::units::to_u64;

/// Settings of a verification.
#[derive(Clone, Debug)]
#[must_use = "settings do nothing until they are used"]
pub struct Verification {
    open_options: OpenOptions,
    options: LoadOptions,
}

impl Default for Verification {
    fn default() -> Self {
        Self::new()
    }
}

/// One thing that is not as it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Difference {
    /// The file, or the tensor.
    pub place: String,
    /// What is wrong with it: both sides of the comparison, in words.
    pub what: String,
}

/// What a verification found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct VerifyReport {
    /// Files of tensors whose hashes were compared.
    pub files: u64,
    /// Tensors whose bytes were compared.
    pub tensors: u64,
    /// Bytes of those tensors.
    pub bytes: u64,
    /// What is wrong; empty if all is well. At most a thousand, and how many there are beside them.
    pub differences: Vec<Difference>,
    /// What a person should know: a manifest that is missing, tensors that were left out on
    /// purpose.
    pub notes: Vec<String>,
}

impl Verification {
    /// Within 64 MiB of host memory, past the page cache.
    pub fn new() -> Self {
        Self::with(OpenOptions::default(), direct())
    }

    /// With these settings.
    pub(super) fn with(open_options: OpenOptions, options: LoadOptions) -> Self {
        Self { open_options, options }
    }

    /// How checkpoints are opened.
    pub fn open_options(mut self, options: OpenOptions) -> Self {
        self.open_options = options;
        self
    }

    /// Most host memory that the verification may hold, in bytes. 64 MiB by default. Counts what is
    /// known of both checkpoints, and a hash for each tensor.
    pub fn host_budget(mut self, bytes: u64) -> Self {
        self.options.host_budget_bytes = bytes;
        self
    }

    /// How files are read. Past the page cache by default.
    pub fn io(mut self, mode: IoMode) -> Self {
        self.options.io = mode;
        self
    }

    /// Threads that read; zero counts as one. By default what the disk and the machine can use.
    pub fn jobs(mut self, threads: u32) -> Self {
        self.options.readers = Some(threads.max(1));
        self
    }

    /// Checks `directory`: headers, coverage, the index against the files, and, where there is a
    /// manifest, the hashes. With `against`, compares every tensor with that of the source.
    /// Both may be anything that a [`Checkpoint`] opens, with or without a manifest.
    ///
    /// # Errors
    /// [`ConvertError`] if it cannot be read at all, or its manifest cannot. Whatever is wrong with
    /// its bytes is in the report.
    pub fn run(
        &self,
        directory: &Path,
        against: Option<&Path>,
        observe: &mut dyn FnMut(&ConvertEvent<'_>),
    ) -> Result<VerifyReport, ConvertError> {
        let mut findings = Findings::default();
        let source = against.map(|path| self.open_options.open(path)).transpose()?;
        let root = directory_of(directory);
        let manifest_path = root.as_ref().map(|root| root.join(MANIFEST_NAME));
        let manifest = match &manifest_path {
            Some(path) => OpenManifest::open(path)?,
            None => None,
        };
        let checkpoint = match self.open_options.open(directory) {
            Ok(checkpoint) => Some(checkpoint),
            Err(error) => {
                findings.refused(error, root.as_deref(), manifest.is_some())?;
                None
            }
        };
        if let Some(root) = &root {
            note_unfinished(root, manifest.is_some(), &mut findings);
        }
        let stated = match (manifest, &root) {
            (Some(manifest), Some(root)) => {
                Some(Stated::read(manifest, root, checkpoint.as_ref(), &mut findings)?)
            }
            _ => None,
        };
        let Some(checkpoint) = checkpoint else {
            findings.note("no bytes of tensors were compared: the checkpoint cannot be opened".to_owned());
            return Ok(findings.finish());
        };
        checkpoint.notes().iter().for_each(|note| findings.note(note.clone()));
        match (&stated, &root) {
            (Some(stated), Some(root)) => stated.check_others(directory, root, &checkpoint, &mut findings)?,
            _ if against.is_none() => findings.note(format!(
                "there is no {MANIFEST_NAME}: only headers and index were checked, no bytes of tensors"
            )),
            _ => findings.note(format!("there is no {MANIFEST_NAME}: files were not hashed")),
        }
        let comparison =
            source.map(|source| Comparison::new(&checkpoint, source, stated.as_ref(), &mut findings));
        let mut work = Work {
            options: self.options.clone(),
            target: &checkpoint,
            stated: stated.as_ref(),
            comparison: comparison.as_ref(),
            compared: vec![false; checkpoint.tensor_count()],
            hashes: Vec::new(),
        };
        work.run(&mut findings, observe)?;
        Ok(findings.finish())
    }
}

/// Says if a conversion has not ended here.
fn note_unfinished(root: &Path, has_manifest: bool, findings: &mut Findings) {
    if !root.join(WORK_FOLDER).exists() {
        return;
    }
    if has_manifest {
        findings.note(format!("{WORK_FOLDER} is left of a conversion: the same command removes it"));
    } else {
        let what = "a conversion into this directory has not ended; the same command goes on with it";
        findings.differ(WORK_FOLDER, what.to_owned());
    }
}

/// The passes over bytes.
struct Work<'a> {
    options: LoadOptions,
    target: &'a Checkpoint,
    stated: Option<&'a Stated>,
    comparison: Option<&'a Comparison>,
    /// Per tensor of the target: whether its bytes were compared with anything.
    compared: Vec<bool>,
    /// Per tensor of the target, if there is a source.
    hashes: Vec<[u8; 32]>,
}

impl Work<'_> {
    fn run(
        &mut self,
        findings: &mut Findings,
        observe: &mut dyn FnMut(&ConvertEvent<'_>),
    ) -> Result<(), ConvertError> {
        if self.stated.is_none() && self.comparison.is_none() {
            return Ok(());
        }
        if let Some(comparison) = self.comparison {
            self.hashes = vec![[0; 32]; self.target.tensor_count()];
            comparison.check(self)?;
        }
        let target_bytes = self.target.tensor_bytes();
        let source_bytes = self.comparison.map_or(0, |comparison| comparison.hashed_bytes(self.target));
        let total_bytes = target_bytes.saturating_add(source_bytes);
        let mut tell = |done_bytes| observe(&ConvertEvent::Verifying { done_bytes, total_bytes });
        tell(0);
        self.hash_target(findings, &mut tell)?;
        if let Some(comparison) = self.comparison {
            comparison.run(self, findings, &mut |done_bytes| tell(target_bytes + done_bytes))?;
        }
        for (tensor, _) in self.target.tensors().zip(&self.compared).filter(|(_, compared)| **compared) {
            findings.report.tensors += 1;
            findings.report.bytes += tensor.extent.len_bytes();
        }
        Ok(())
    }

    /// Hashes the files, and compares with what is stated.
    fn hash_target(
        &mut self,
        findings: &mut Findings,
        tell: &mut dyn FnMut(u64),
    ) -> Result<(), ConvertError> {
        let (target, stated) = (self.target, self.stated);
        let pass = HashPass { checkpoint: target, options: self.options.clone(), beside: self.memory(None) };
        let with_sha256 = stated.is_some_and(Stated::has_sha256);
        let fallbacks = pass.files(with_sha256, &mut |seen| match seen {
            Seen::Progress(bytes) => tell(bytes),
            Seen::File(shard, hashes) => {
                if let Some(stated) = stated {
                    stated.compare_file(target, shard, &hashes, findings);
                }
            }
            Seen::Scales(..) => {}
            Seen::Tensor(id, hashes) => {
                if let Some(place) = self.hashes.get_mut(id.index()) {
                    *place = hashes.blake3;
                }
                if let Some(stated) = stated {
                    self.compared[id.index()] |= stated.compare_tensor(target, id, &hashes, findings);
                }
            }
        })?;
        note_fallbacks(target, &fallbacks, findings);
        Ok(())
    }

    /// What is held beside a pass over the checkpoint `other` (of which the plan knows), or over
    /// the target.
    fn memory(&self, other: Option<&Checkpoint>) -> Vec<MemoryTerm> {
        let hashes = size_of_val(&*self.hashes) + size_of_val(&*self.compared);
        let stated = self.stated.map_or(0, Stated::held_bytes);
        let comparison = self.comparison.map_or(0, Comparison::held_bytes);
        let metadata = match (other, self.comparison) {
            (Some(_), _) => self.target.metadata_bytes(),
            (None, Some(comparison)) => comparison.source_metadata_bytes(),
            (None, None) => 0,
        };
        vec![
            MemoryTerm::new(TermKind::HashesToCompare, to_u64(hashes) + stated + comparison),
            MemoryTerm::new(TermKind::OtherMetadata, metadata),
        ]
    }
}

/// Says which files were not read the way that was asked for.
fn note_fallbacks(checkpoint: &Checkpoint, fallbacks: &[Fallback], findings: &mut Findings) {
    let Some(first) = fallbacks.first() else { return };
    let path = checkpoint.shard(first.shard).path.display();
    let others = match fallbacks.len() - 1 {
        0 => String::new(),
        others => format!(", and {others} more"),
    };
    let Fallback { from, to, reason, .. } = first;
    findings.note(format!("read {to}, not {from}: {path} ({reason}){others}"));
}
