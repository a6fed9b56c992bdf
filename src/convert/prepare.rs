//! A conversion that is planned: it can be shown, and run.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::cancel::ConvertCancel;
use super::config_file;
use super::file_plan::FilePlan;
use super::layout::{Component, TargetFile};
use super::side_files::SideFiles;
use super::target_state::{self, Expected, FileState, TargetState};
use super::{Conversion, ConvertError, MANIFEST_NAME, Part, source_overlap};
use crate::plan::LoadPlan;

/// One file of tensors in the target.
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
    /// True if an earlier run made it.
    pub is_done: bool,
}

/// A conversion that is planned; nothing is written yet.
#[derive(Debug)]
pub struct PreparedConversion {
    pub(super) settings: Conversion,
    pub(super) source: PathBuf,
    pub(super) target: PathBuf,
    pub(super) files: FilePlan,
    pub(super) side_files: SideFiles,
    pub(super) state: TargetState,
    /// The files that this run has to make, unless hashing shows that an earlier run made them.
    pub(super) todo: Vec<usize>,
    pub(super) plan: Option<Arc<LoadPlan>>,
    pub(super) needed_bytes: u64,
    pub(super) is_described: bool,
    pub(super) cancel: ConvertCancel,
}

impl Conversion {
    /// Opens the source, plans every file, and checks the target. Writes nothing.
    ///
    /// # Errors
    /// [`ConvertError`], before any tensor byte is read, unless [`Self::drop_duplicates`] has to
    /// compare some.
    pub fn prepare(
        self,
        source: impl AsRef<Path>,
        target: impl AsRef<Path>,
    ) -> Result<PreparedConversion, ConvertError> {
        let (settings, source, target) = (self, source.as_ref(), target.as_ref());
        let mut files = FilePlan::new(&settings, source)?;
        source_overlap::check_directories(source, &files.checkpoint, target)?;
        let mut side_files = SideFiles::list(source, Some(target), &files.checkpoint)?;
        files.notes.extend(side_files.notes.iter().cloned());
        let config = config_file::change(&settings, &files, &mut side_files.files);
        let others = other_names(&files, &side_files);
        let names = files.layout.files.iter().map(|file| file.id.as_str());
        let names: Vec<&str> =
            names.chain(others.iter().map(String::as_str)).chain([MANIFEST_NAME]).collect();
        let source_paths = source_overlap::paths_of(source, &files.checkpoint, &side_files);
        source_overlap::check_names(&source_paths, target, &names)?;
        let state = read_state(&settings, target, &files, &side_files)?;
        if !state.is_complete {
            files.notes.extend(config.notes);
        }
        let mut todo = files.files_of(settings.part);
        todo.retain(|&file| state.files[file] != FileState::Done);
        let plan = match todo.is_empty() {
            true => None,
            false => Some(Arc::new(files.load_plan(&settings, &todo)?)),
        };
        let has_end = settings.part.is_none() && !state.is_complete;
        let needed_bytes = target_state::needed_bytes(&files, &todo, side_files.total_bytes(), has_end);
        let (source, target) = (source.to_owned(), target.to_owned());
        let cancel = ConvertCancel::default();
        Ok(PreparedConversion {
            settings,
            source,
            target,
            files,
            side_files,
            state,
            todo,
            plan,
            needed_bytes,
            is_described: config.is_described,
            cancel,
        })
    }
}

impl PreparedConversion {
    /// Reads the state of the target again.
    pub(super) fn read_state_again(&mut self) -> Result<(), ConvertError> {
        self.state = read_state(&self.settings, &self.target, &self.files, &self.side_files)?;
        Ok(())
    }

    /// The files of tensors of all parts, in execution order.
    #[must_use]
    pub fn files(&self) -> Vec<PlannedFile> {
        let layout = &self.files.layout;
        let planned = |(index, file): (usize, &TargetFile)| PlannedFile {
            name: file.id.to_string(),
            file_bytes: self.files.sizes[index].file_bytes,
            tensors: self.files.tensor_count(file),
            layers: layout.layers(file, &self.files.layers).iter().map(ToString::to_string).collect(),
            is_done: self.state.files[index] == FileState::Done,
        };
        layout.files.iter().enumerate().map(planned).collect()
    }

    /// The files of the part that this run converts: positions in [`Self::files`].
    #[must_use]
    pub fn own_files(&self) -> Vec<usize> {
        self.files.files_of(self.settings.part)
    }

    /// True if weights are quantised and `config.json` describes them to compressed-tensors, which
    /// transformers, vLLM and others read: each quantised tensor is the matrix of a linear layer in
    /// `int8` or `fp8`, and the configuration named a model and no quantisation.
    #[must_use]
    pub fn describes_quantisation(&self) -> bool {
        self.is_described
    }

    /// Side files that will be written: paths below the target, and lengths in bytes.
    #[must_use]
    pub fn side_files(&self) -> Vec<(String, u64)> {
        self.side_files.files.iter().map(|file| (file.name.clone(), file.bytes)).collect()
    }

    /// Tied weights that are left out: the name of each, and of the one that is kept. They are
    /// tensors outside every stack, of two dimensions or more, with the same bytes as another one,
    /// and names that share their bytes in a PyTorch file.
    #[must_use]
    pub fn duplicates(&self) -> Vec<(String, String)> {
        let name = |id| self.files.checkpoint.tensor(id).name.to_owned();
        let dropped = self.files.aliases.iter().map(|&(left, kept)| (name(left), name(kept)));
        dropped.chain(self.files.tied_names().map(|(left, kept)| (left, name(kept)))).collect()
    }

    /// Notes for a person, before it runs.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.files.notes
    }

    /// Every read of this run, and every term of its memory; `None` if all its files exist.
    #[must_use]
    pub fn plan(&self) -> Option<&LoadPlan> {
        self.plan.as_deref()
    }

    /// True if the target is complete already.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.state.is_complete
    }

    /// Bytes that this run has to write, at most: files of its part that are not done, side files,
    /// index and manifest.
    #[must_use]
    pub fn needed_bytes(&self) -> u64 {
        self.needed_bytes
    }

    /// Bytes that are free in the file system of the target, once the unfinished files of an
    /// interrupted run are removed.
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        self.state.free_bytes.saturating_add(self.state.partial_bytes)
    }

    /// A handle that cancels the conversion from any thread.
    #[must_use]
    pub fn cancel_handle(&self) -> ConvertCancel {
        self.cancel.clone()
    }
}

fn read_state(
    settings: &Conversion,
    target: &Path,
    files: &FilePlan,
    side_files: &SideFiles,
) -> Result<TargetState, ConvertError> {
    let others = other_names(files, side_files);
    let part_count = settings.part.map(Part::of);
    let expected = Expected { files, others: &others, part_count, overwrite: settings.overwrite };
    TargetState::read(target, &expected)
}

/// The paths of side files and indices.
fn other_names(files: &FilePlan, side_files: &SideFiles) -> Vec<String> {
    let mut names: Vec<String> = side_files.files.iter().map(|file| file.name.clone()).collect();
    names.extend(files.layout.components.iter().filter_map(Component::index_name));
    names
}
