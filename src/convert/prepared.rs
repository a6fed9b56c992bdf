//! A conversion that can be shown and run.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::scope::Scope;
use super::side_files::SideFiles;
use super::target::{self, Expected, FileState, TargetState};
use super::{Conversion, ConvertError, ConvertReport, MANIFEST_NAME, Part, run, source_guard};
use crate::load::CancelHandle;
use crate::plan::LoadPlan;

/// One file of tensors that a conversion makes.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlannedFile {
    /// Its path below the target.
    pub name: String,
    /// Its length in bytes, header included.
    pub file_bytes: u64,
    /// Number of its tensors.
    pub tensors: u64,
    /// The layers that it holds, or holds a part of.
    pub layers: Vec<String>,
    /// True if an earlier run has made it.
    pub is_done: bool,
}

/// A conversion that is planned; nothing has been written.
#[derive(Debug)]
pub struct PreparedConversion {
    pub(super) settings: Conversion,
    pub(super) source: PathBuf,
    pub(super) target: PathBuf,
    pub(super) scope: Scope,
    pub(super) side_files: SideFiles,
    pub(super) state: TargetState,
    /// The files that this run has to make, unless hashing shows that an earlier one did.
    pub(super) todo: Vec<usize>,
    pub(super) plan: Option<Arc<LoadPlan>>,
    pub(super) needed_bytes: u64,
    pub(super) cancel: ConvertCancel,
}

/// Cancels a conversion from any thread.
#[derive(Clone, Debug, Default)]
pub struct ConvertCancel {
    is_cancelled: Arc<AtomicBool>,
    load: Arc<Mutex<Option<CancelHandle>>>,
}

impl ConvertCancel {
    /// Cancels the conversion: it ends with [`LoadError::Cancelled`](crate::LoadError::Cancelled).
    /// Finished files stay.
    pub fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Release);
        if let Some(load) = &*self.load.lock().unwrap_or_else(PoisonError::into_inner) {
            load.cancel();
        }
    }

    /// True if it was cancelled.
    pub(super) fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(Ordering::Acquire)
    }

    /// The load to cancel from now on; one that comes too late is cancelled at once.
    pub(super) fn follow(&self, load: Option<CancelHandle>) {
        let mut current = self.load.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(load) = load.as_ref().filter(|_| self.is_cancelled()) {
            load.cancel();
        }
        *current = load;
    }
}

impl PreparedConversion {
    pub(super) fn new(settings: Conversion, source: &Path, target: &Path) -> Result<Self, ConvertError> {
        let mut scope = Scope::new(&settings, source)?;
        target::check_apart(source, &scope, target)?;
        let side_files = SideFiles::list(source, target, &scope.checkpoint)?;
        scope.notes.extend(side_files.notes.iter().cloned());
        let others = other_names(&scope, &side_files);
        let names = scope.shapes.files.iter().map(|file| file.id.as_str());
        let names: Vec<&str> =
            names.chain(others.iter().map(String::as_str)).chain([MANIFEST_NAME]).collect();
        source_guard::check(&source_guard::paths_of(source, &scope.checkpoint, &side_files), target, &names)?;
        let state = look(&settings, target, &scope, &side_files)?;
        let mut todo = scope.files_of(settings.part);
        todo.retain(|&file| state.files[file] != FileState::Done);
        let plan = match todo.is_empty() {
            true => None,
            false => Some(Arc::new(scope.plan(&settings, &todo)?)),
        };
        let has_end = settings.part.is_none() && !state.is_complete;
        let needed_bytes = target::needed_bytes(&scope, &todo, side_files.total_bytes(), has_end);
        let (source, target) = (source.to_owned(), target.to_owned());
        let cancel = ConvertCancel::default();
        Ok(Self { settings, source, target, scope, side_files, state, todo, plan, needed_bytes, cancel })
    }

    /// Looks at the target again, as it is now.
    pub(super) fn look_again(&mut self) -> Result<(), ConvertError> {
        self.state = look(&self.settings, &self.target, &self.scope, &self.side_files)?;
        Ok(())
    }

    /// The files of tensors, in execution order; all of them, also those of other parts.
    #[must_use]
    pub fn files(&self) -> Vec<PlannedFile> {
        let file = |(index, file): (usize, &super::files::FileShape)| PlannedFile {
            name: file.id.to_string(),
            file_bytes: self.scope.lengths[index].0,
            tensors: self.scope.tensor_count(file),
            layers: self
                .scope
                .shapes
                .layers(file, &self.scope.layers)
                .iter()
                .map(ToString::to_string)
                .collect(),
            is_done: self.state.files[index] == FileState::Done,
        };
        self.scope.shapes.files.iter().enumerate().map(file).collect()
    }

    /// The part that this run converts: positions in [`Self::files`].
    #[must_use]
    pub fn own_files(&self) -> Vec<usize> {
        self.scope.files_of(self.settings.part)
    }

    /// Side files that will be copied: their paths below the target and lengths in bytes.
    #[must_use]
    pub fn side_files(&self) -> Vec<(String, u64)> {
        self.side_files.files.iter().map(|file| (file.name.clone(), file.bytes)).collect()
    }

    /// Tied weights that are left out: the name of each, and of the one that is kept. They are
    /// tensors outside every stack, of two dimensions or more, whose bytes are those of another
    /// one.
    #[must_use]
    pub fn duplicates(&self) -> Vec<(String, String)> {
        let name = |id| self.scope.checkpoint.tensor(id).name.to_owned();
        self.scope.aliases.iter().map(|&(left, kept)| (name(left), name(kept))).collect()
    }

    /// What a person should know before it runs.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.scope.notes
    }

    /// Every read of this run, and every term of its memory; `None` if all its files are there.
    #[must_use]
    pub fn plan(&self) -> Option<&LoadPlan> {
        self.plan.as_deref()
    }

    /// True if the target is complete already.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.state.is_complete
    }

    /// Bytes that this run has to write, from above: files of its part that are not done, side
    /// files, index and manifest.
    #[must_use]
    pub fn needed_bytes(&self) -> u64 {
        self.needed_bytes
    }

    /// Bytes that are free in the target's file system, once what an interrupted run has left
    /// unfinished is gone.
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        self.state.free_bytes.saturating_add(self.state.partial_bytes)
    }

    /// A handle that cancels the conversion from any thread.
    #[must_use]
    pub fn cancel_handle(&self) -> ConvertCancel {
        self.cancel.clone()
    }

    /// Converts. Of a part, only its files are made, and [`Self::finish`] is left to be called;
    /// else the target is complete when this returns.
    ///
    /// # Errors
    /// [`ConvertError`]. Files that are published stay.
    pub fn run(self) -> Result<ConvertReport, ConvertError> {
        run::convert(self)
    }

    /// Checks that every file of every part is there, and writes side files, index and manifest.
    ///
    /// # Errors
    /// [`ConvertError::Incomplete`] if parts are missing, [`ConvertError::Locked`] if one is being
    /// converted.
    pub fn finish(self) -> Result<ConvertReport, ConvertError> {
        run::finish(self)
    }
}

/// Looks at the target.
fn look(
    settings: &Conversion,
    target: &Path,
    scope: &Scope,
    side_files: &SideFiles,
) -> Result<TargetState, ConvertError> {
    let others = other_names(scope, side_files);
    let part_count = settings.part.map(Part::of);
    let expected = Expected { scope, others: &others, part_count, overwrite: settings.overwrite };
    TargetState::look(target, &expected)
}

/// Paths of everything that is no file of tensors, the manifest aside: side files, indices.
fn other_names(scope: &Scope, side_files: &SideFiles) -> Vec<String> {
    let mut names: Vec<String> = side_files.files.iter().map(|file| file.name.clone()).collect();
    names.extend(scope.shapes.components.iter().filter_map(|component| component.index_name()));
    names
}
