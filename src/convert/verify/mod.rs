//! Compares a directory with its manifest and with its source.
//!
//! ```text
//! headers, coverage, index       checked as every checkpoint is opened
//! manifest -> Stated             sizes, types, shapes, the set of files
//! one pass over the files        BLAKE3 (and SHA-256 if it is stated) of each file and tensor
//! one pass over the source       BLAKE3 of each tensor, cast as the conversion did -> Comparison
//! tensors that differ            the first few are read again, to find where
//! ```
//!
//! All bytes pass through the ring of a load, within a budget. Faults are collected in the report;
//! errors are for directories that cannot be read.

mod against_manifest;
mod against_source;

use std::path::Path;

use self::against_manifest::Stated;
use self::against_source::Comparison;
use super::cancel::ConvertCancel;
use super::hash_pass::{HashPass, PassEvent};
use super::journal::WORK_FOLDER;
use super::manifest_read::OpenManifest;
use super::settings::default_options;
use super::side_files::directory_of;
use super::{ConvertError, ConvertEvent, Difference, MANIFEST_NAME, VerifyReport};
use crate::checkpoint::{Checkpoint, CheckpointError, OpenOptions, TensorId};
use crate::plan::{IoMode, LoadOptions, MemoryTerm, TermKind};
use crate::source::Fallback;
use crate::units::to_u64;

/// Most differences in a report.
const DIFFERENCES_MAX: usize = 1000;

/// Settings of a verification.
#[derive(Clone, Debug)]
#[must_use = "settings do nothing until they are used"]
pub struct Verification {
    open_options: OpenOptions,
    options: LoadOptions,
    cancel: ConvertCancel,
}

impl Default for Verification {
    fn default() -> Self {
        Self::new()
    }
}

impl Verification {
    /// Within 64 MiB of host memory, past the page cache.
    pub fn new() -> Self {
        Self::with(OpenOptions::default(), default_options(), ConvertCancel::default())
    }

    /// With these settings.
    pub(super) fn with(open_options: OpenOptions, options: LoadOptions, cancel: ConvertCancel) -> Self {
        Self { open_options, options, cancel }
    }

    /// How checkpoints are opened.
    pub fn open_options(mut self, options: OpenOptions) -> Self {
        self.open_options = options;
        self
    }

    /// The most host memory that the verification may hold, in bytes. 64 MiB by default. The
    /// metadata of both checkpoints and a hash for each tensor count too.
    pub fn host_budget(mut self, bytes: u64) -> Self {
        self.options.host_budget_bytes = bytes;
        self
    }

    /// How files are read. Past the page cache by default.
    pub fn io(mut self, mode: IoMode) -> Self {
        self.options.io = mode;
        self
    }

    /// Threads that read; zero counts as one. By default as many as the disk and the machine can
    /// use.
    pub fn jobs(mut self, threads: u32) -> Self {
        self.options.readers = Some(threads.max(1));
        self
    }

    /// A handle that cancels the verification from any thread.
    #[must_use]
    pub fn cancel_handle(&self) -> ConvertCancel {
        self.cancel.clone()
    }

    /// Checks the headers, coverage and index of `directory`, and the hashes if it has a manifest.
    /// With `against`, compares every tensor with that of the source. Both may be anything that a
    /// [`Checkpoint`] opens, with or without a manifest.
    ///
    /// # Errors
    /// [`ConvertError`] if the directory or its manifest cannot be read. Faults in its bytes are in
    /// the report.
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
        let checkpoint = match self.open_options.clone().of_weights().open(directory) {
            Ok(checkpoint) => Some(checkpoint),
            Err(error) => {
                findings.add_faults_of_files(error, root.as_deref(), manifest.is_some())?;
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
            cancel: self.cancel.clone(),
        };
        work.run(&mut findings, observe)?;
        Ok(findings.finish())
    }
}

/// The report while it is made.
#[derive(Debug, Default)]
struct Findings {
    report: VerifyReport,
    /// Differences that are not listed.
    more: u64,
}

impl Findings {
    /// Adds a difference.
    fn differ(&mut self, place: &str, what: String) {
        if self.report.differences.len() < DIFFERENCES_MAX {
            self.report.differences.push(Difference { place: place.to_owned(), what });
        } else {
            self.more += 1;
        }
    }

    /// Adds a note for a person.
    fn note(&mut self, note: String) {
        self.report.notes.push(note);
    }

    /// Adds the faults of files that make a checkpoint impossible to open.
    ///
    /// # Errors
    /// The error itself, if the system refused to read, or if there is neither a checkpoint nor a
    /// manifest.
    fn add_faults_of_files(
        &mut self,
        error: CheckpointError,
        root: Option<&Path>,
        has_manifest: bool,
    ) -> Result<(), ConvertError> {
        let is_nothing =
            matches!(error, CheckpointError::NotFound { .. } | CheckpointError::NoWeights { .. });
        let is_damage = error.is_invalid() || error.is_missing();
        if !is_damage || (is_nothing && !has_manifest) {
            return Err(error.into());
        }
        for problem in error.problems() {
            let text = problem.to_string();
            let Some(path) = problem.path() else {
                self.differ("checkpoint", text);
                continue;
            };
            let what = text.strip_prefix(&format!("{}: ", path.display())).unwrap_or(&text);
            let below = root.and_then(|root| path.strip_prefix(root).ok()?.to_str());
            let place = below.filter(|below| !below.is_empty()).map(str::to_owned);
            self.differ(&place.unwrap_or_else(|| path.display().to_string()), what.to_owned());
        }
        Ok(())
    }

    /// The report.
    fn finish(mut self) -> VerifyReport {
        if self.more > 0 {
            let what = format!("{} more differences are not listed", self.more);
            self.report.differences.push(Difference { place: "report".to_owned(), what });
        }
        self.report
    }
}

/// Notes a conversion that has not ended.
fn note_unfinished(root: &Path, has_manifest: bool, findings: &mut Findings) {
    if !root.join(WORK_FOLDER).exists() {
        return;
    }
    if has_manifest {
        findings.note(format!("{WORK_FOLDER} is left of a conversion: the same command removes it"));
    } else {
        let what = "a conversion into this directory is incomplete; the same command resumes it";
        findings.differ(WORK_FOLDER, what.to_owned());
    }
}

/// The checkpoint that a pass reads.
#[derive(Clone, Copy)]
enum PassOver {
    Source,
    Target,
}

/// The passes over bytes.
struct Work<'a> {
    options: LoadOptions,
    target: &'a Checkpoint,
    stated: Option<&'a Stated>,
    comparison: Option<&'a Comparison>,
    /// Of each tensor of the target: true once its bytes were compared.
    compared: Vec<bool>,
    /// BLAKE3 of each tensor of the target, if there is a source.
    hashes: Vec<[u8; 32]>,
    cancel: ConvertCancel,
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
        let mut report = |done_bytes| observe(&ConvertEvent::Verifying { done_bytes, total_bytes });
        report(0);
        self.hash_target(findings, &mut report)?;
        if let Some(comparison) = self.comparison {
            comparison.run(self, findings, &mut |done_bytes| report(target_bytes + done_bytes))?;
        }
        for (tensor, _) in self.target.tensors().zip(&self.compared).filter(|(_, compared)| **compared) {
            findings.report.tensors += 1;
            findings.report.bytes += tensor.len_bytes();
            if let Some(stated) = self.stated {
                findings.report.cast += u64::from(stated.cast_from(tensor.id).is_some());
                findings.report.quantised += u64::from(stated.quantised(tensor.id).is_some());
            }
        }
        Ok(())
    }

    /// Hashes the files, and compares them with the manifest.
    fn hash_target(
        &mut self,
        findings: &mut Findings,
        report: &mut dyn FnMut(u64),
    ) -> Result<(), ConvertError> {
        let (target, stated) = (self.target, self.stated);
        let pass = HashPass {
            checkpoint: target,
            options: self.options.clone(),
            beside: self.memory(PassOver::Target),
            cancel: self.cancel.clone(),
        };
        let with_sha256 = stated.is_some_and(Stated::has_sha256);
        let fallbacks = pass.files(with_sha256, &mut |event| match event {
            PassEvent::Progress(bytes) => report(bytes),
            PassEvent::File(shard, hashes) => {
                if let Some(stated) = stated {
                    stated.compare_file(target, shard, &hashes, findings);
                }
            }
            PassEvent::Scales(..) => {}
            PassEvent::Tensor(id, hashes) => {
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

    /// Compares the hash of a tensor of the target. True if it is the same.
    fn compare(&mut self, id: TensorId, blake3: &[u8; 32]) -> bool {
        self.compared[id.index()] = true;
        self.hashes[id.index()] == *blake3
    }

    /// The memory beside that of a pass over the source, whose plan counts the metadata of the
    /// source; or over the target.
    fn memory(&self, pass: PassOver) -> Vec<MemoryTerm> {
        let hashes = size_of_val(&*self.hashes) + size_of_val(&*self.compared);
        let stated = self.stated.map_or(0, Stated::held_bytes);
        let comparison = self.comparison.map_or(0, Comparison::held_bytes);
        let metadata = match pass {
            PassOver::Source => self.target.metadata_bytes(),
            PassOver::Target => self.comparison.map_or(0, Comparison::source_metadata_bytes),
        };
        vec![
            MemoryTerm::new(TermKind::HashesToCompare, to_u64(hashes) + stated + comparison),
            MemoryTerm::new(TermKind::OtherMetadata, metadata),
        ]
    }
}

/// Notes files that were not read in the mode that was asked for.
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
