//! What stands in the target already: nothing, a part of this conversion, all of it, or something
//! that is not ours.

use std::collections::BTreeSet;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use super::journal::{Record, Records};
use super::manifest_reader::OpenManifest;
use super::output::{Found, TargetDirectory};
use super::scope::Scope;
use super::side_files::directory_of;
use super::{ConvertError, MANIFEST_NAME};
use crate::units::to_u64;

/// What became of a file so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FileState {
    /// To be written.
    Missing,
    /// Its bytes were written, but nobody has seen it published: it has to be hashed.
    Unsure,
    /// Published, and untouched since.
    Done,
}

/// What stands in the target.
#[derive(Debug)]
pub(super) struct TargetState {
    pub(super) records: Records,
    /// Per file of the conversion.
    pub(super) files: Vec<FileState>,
    /// True if there is a manifest of this very conversion.
    pub(super) is_complete: bool,
    /// Bytes that unfinished files take, which go before anything is written.
    pub(super) partial_bytes: u64,
    /// Bytes that are free in its file system.
    pub(super) free_bytes: u64,
}

/// What is expected of the target.
pub(super) struct Expected<'a> {
    pub(super) scope: &'a Scope,
    /// Paths of everything that is no file of tensors: side files, indices.
    pub(super) others: &'a [String],
    /// Into how many parts this run cuts the conversion; `None` if it takes it as it is.
    pub(super) part_count: Option<u32>,
    pub(super) overwrite: bool,
}

impl TargetState {
    /// Looks at the target; changes nothing.
    ///
    /// # Errors
    /// [`ConvertError::Exists`] and [`ConvertError::OtherConversion`] for what must not be
    /// replaced.
    pub(super) fn look(path: &Path, expected: &Expected<'_>) -> Result<Self, ConvertError> {
        let Some(target) = TargetDirectory::open(path)? else {
            let free_bytes = existing_ancestor(path)?.free_bytes()?;
            return Ok(Self::empty(expected.scope, free_bytes));
        };
        let free_bytes = target.free_bytes()?;
        check_for_folders(&target, expected)?;
        let records = match Records::read(&target) {
            Ok(records) => records,
            Err(_) if expected.overwrite => Records::default(),
            Err(error) => return Err(error),
        };
        let other = records.differ_from(&expected.scope.fingerprint, expected.part_count);
        let manifest = fingerprint_of(&target)?;
        let is_complete =
            manifest.as_ref().is_some_and(|found| *found == Ok(expected.scope.fingerprint.clone()));
        if !expected.overwrite {
            if let Some(what) = other {
                return Err(ConvertError::OtherConversion { path: path.to_owned(), what });
            }
            match manifest {
                Some(Err(error)) => return Err(error.into_error(path)),
                Some(Ok(_)) if !is_complete => {
                    let what = "a conversion of another source, or with other options".to_owned();
                    return Err(ConvertError::OtherConversion { path: path.to_owned(), what });
                }
                _ => {}
            }
            check_for_strangers(&target, expected, &records, is_complete)?;
        }
        let is_ours = records.differ_from(&expected.scope.fingerprint, expected.part_count).is_none();
        let records = if is_ours { records } else { Records::default() };
        let mut state = Self { records, is_complete, ..Self::empty(expected.scope, free_bytes) };
        state.find_files(&target, expected)?;
        Ok(state)
    }

    fn empty(scope: &Scope, free_bytes: u64) -> Self {
        Self {
            records: Records::default(),
            files: vec![FileState::Missing; scope.shapes.files.len()],
            is_complete: false,
            partial_bytes: 0,
            free_bytes,
        }
    }

    fn find_files(&mut self, target: &TargetDirectory, expected: &Expected<'_>) -> Result<(), ConvertError> {
        let scope = expected.scope;
        if self.is_complete {
            let Some(name) = first_missing(target, scope)? else {
                self.files.fill(FileState::Done);
                return Ok(());
            };
            self.no_longer_complete(target, &name, expected)?;
        }
        for (index, file) in scope.shapes.files.iter().enumerate() {
            let name = file.id.as_str();
            if let Some(Found::File { allocated_bytes, .. }) = target.find_partial(name)? {
                self.partial_bytes += allocated_bytes;
            }
            if let Some(record) = self.records.find(name) {
                self.files[index] = state_of(record, target.find(name)?, scope.lengths[index].0);
            }
        }
        Ok(())
    }

    /// The manifest is there, and not all that it names: somebody has been at it, and what else
    /// they did cannot be known.
    fn no_longer_complete(
        &mut self,
        target: &TargetDirectory,
        name: &str,
        expected: &Expected<'_>,
    ) -> Result<(), ConvertError> {
        self.is_complete = false;
        if expected.overwrite {
            return Ok(());
        }
        let what = format!("this conversion, complete once, whose {name} is missing or has another length");
        Err(ConvertError::OtherConversion { path: target.path().to_owned(), what })
    }
}

/// The first file or index of a conversion that is missing, or has another length.
fn first_missing(target: &TargetDirectory, scope: &Scope) -> Result<Option<String>, ConvertError> {
    for (file, (expected_bytes, _)) in scope.shapes.files.iter().zip(&scope.lengths) {
        let found = target.find(file.id.as_str())?;
        if !matches!(found, Some(Found::File { len_bytes, .. }) if len_bytes == *expected_bytes) {
            return Ok(Some(file.id.to_string()));
        }
    }
    for index in scope.shapes.components.iter().filter_map(|component| component.index_name()) {
        if target.find(&index)?.is_none() {
            return Ok(Some(index));
        }
    }
    Ok(None)
}

fn state_of(record: &Record, found: Option<Found>, expected_bytes: u64) -> FileState {
    match found {
        _ if record.bytes != expected_bytes => FileState::Missing,
        Some(Found::File { len_bytes, modified_ns, .. })
            if len_bytes == expected_bytes && record.published_ns == Some(modified_ns) =>
        {
            FileState::Done
        }
        _ => FileState::Unsure,
    }
}

/// The fingerprint that the manifest holds, if there is one.
fn fingerprint_of(target: &TargetDirectory) -> Result<Option<Result<String, Illegible>>, ConvertError> {
    let path = target.path_of(MANIFEST_NAME);
    match target.find(MANIFEST_NAME)? {
        None => return Ok(None),
        Some(Found::Other(found)) => return Ok(Some(Err(Illegible(ConvertError::Exists { path, found })))),
        Some(Found::File { .. }) => {}
    }
    let read = OpenManifest::open(&path).and_then(|manifest| match manifest {
        Some(manifest) => manifest.read(&mut |_| {}).map(|(head, _)| Some(head.fingerprint)),
        None => Ok(None),
    });
    Ok(match read {
        Ok(fingerprint) => fingerprint.map(Ok),
        Err(error) => Some(Err(Illegible(error))),
    })
}

/// Why a manifest cannot be read. Never equal to another reason.
#[derive(Debug)]
struct Illegible(ConvertError);

impl Illegible {
    /// Somebody else's file, unless the system did not let us read it.
    fn into_error(self, target: &Path) -> ConvertError {
        match self.0 {
            ConvertError::BadManifest { reason, .. } => {
                let what = format!("{MANIFEST_NAME}, which is no manifest of this program ({reason})");
                ConvertError::OtherConversion { path: target.to_owned(), what }
            }
            error => error,
        }
    }
}

impl PartialEq for Illegible {
    fn eq(&self, _other: &Self) -> bool {
        false
    }
}

/// Refuses a target in which a folder has the name of a file: no file can replace it.
fn check_for_folders(target: &TargetDirectory, expected: &Expected<'_>) -> Result<(), ConvertError> {
    let files = expected.scope.shapes.files.iter().map(|file| file.id.as_str());
    let others = expected.others.iter().map(String::as_str);
    for name in files.chain(others).chain([MANIFEST_NAME]) {
        if let Some(Found::Other(found @ "a directory")) = target.find(name)? {
            return Err(ConvertError::Exists { path: target.path_of(name), found });
        }
    }
    Ok(())
}

/// Refuses a target in which something stands in the way that no run of this conversion has made.
fn check_for_strangers(
    target: &TargetDirectory,
    expected: &Expected<'_>,
    records: &Records,
    is_complete: bool,
) -> Result<(), ConvertError> {
    let shapes = &expected.scope.shapes;
    let refuse = |name: &str, found| Err(ConvertError::Exists { path: target.path_of(name), found });
    for file in &shapes.files {
        let name = file.id.as_str();
        match target.find(name)? {
            Some(Found::Other(found)) => return refuse(name, found),
            Some(Found::File { .. }) if !is_complete && records.find(name).is_none() => {
                return refuse(name, "a file");
            }
            _ => {}
        }
    }
    // Once begun, what has the name of a side file is what an interrupted run has left.
    let is_begun = is_complete || !records.is_empty();
    for name in expected.others.iter().map(String::as_str).chain([MANIFEST_NAME]) {
        match target.find(name)? {
            Some(Found::Other(found)) => return refuse(name, found),
            Some(Found::File { .. }) if !is_begun => return refuse(name, "a file"),
            _ => {}
        }
    }
    match strange_weights(target, expected.scope)?.first() {
        Some(name) => refuse(name, "a file of weights"),
        None => Ok(()),
    }
}

/// Weights and indices in the folders of the conversion that it does not make: loaders would take
/// them too.
pub(super) fn strange_weights(target: &TargetDirectory, scope: &Scope) -> Result<Vec<String>, ConvertError> {
    let shapes = &scope.shapes;
    let own: BTreeSet<&str> = shapes.files.iter().map(|file| file.id.as_str()).collect();
    let indices: BTreeSet<String> =
        shapes.components.iter().filter_map(|component| component.index_name()).collect();
    let mut strange = Vec::new();
    for component in &shapes.components {
        for name in target.names_in(&component.prefix)? {
            let path = format!("{}{name}", component.prefix);
            let is_weights = name.ends_with(".safetensors") || name.contains(".safetensors.index");
            if is_weights
                && !name.starts_with('.')
                && !own.contains(path.as_str())
                && !indices.contains(&path)
            {
                strange.push(path);
            }
        }
    }
    Ok(strange)
}

/// The directory that a new one would be made in.
fn existing_ancestor(path: &Path) -> Result<TargetDirectory, ConvertError> {
    for ancestor in path.ancestors().skip(1) {
        let ancestor = if ancestor.as_os_str().is_empty() { Path::new(".") } else { ancestor };
        if let Some(directory) = TargetDirectory::open(ancestor)? {
            return Ok(directory);
        }
    }
    let source = std::io::ErrorKind::NotFound.into();
    Err(ConvertError::Write { path: path.to_owned(), operation: "find a directory to make it in", source })
}

/// Refuses a target that is a directory of the source.
pub(super) fn check_apart(source: &Path, scope: &Scope, target: &Path) -> Result<(), ConvertError> {
    let place = |metadata: Metadata| (metadata.dev(), metadata.ino());
    let Ok(target_place) = target.metadata().map(place) else { return Ok(()) };
    let folders = scope.checkpoint.shards().iter().filter_map(|shard| shard.path.parent());
    // An index may lie elsewhere than the files that it lists.
    let root = directory_of(source);
    let is_target = |folder: &Path| {
        let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
        folder.metadata().map(place).is_ok_and(|place| place == target_place)
    };
    if folders.chain(root.as_deref()).any(is_target) {
        return Err(ConvertError::SameDirectory { path: target.to_owned() });
    }
    Ok(())
}

/// What is still to be written, from above: files of tensors, side files, index and manifest.
pub(super) fn needed_bytes(scope: &Scope, files: &[usize], side_bytes: u64, has_end: bool) -> u64 {
    /// Lines of a tensor in the index and the manifest, its name and shape aside.
    const LINES_BYTES: u64 = 400;
    let tensors: u64 = files.iter().map(|&file| scope.lengths[file].0).fold(0, u64::saturating_add);
    if !has_end {
        return tensors;
    }
    let checkpoint = &scope.checkpoint;
    let lines: u64 = checkpoint.tensors().map(|tensor| LINES_BYTES + 2 * to_u64(tensor.name.len())).sum();
    tensors.saturating_add(side_bytes).saturating_add(2 * lines)
}

/// The path of the target, for errors.
pub(super) fn no_space(path: &Path, needed_bytes: u64, free_bytes: u64) -> Result<(), ConvertError> {
    if needed_bytes <= free_bytes {
        return Ok(());
    }
    Err(ConvertError::NoSpace { path: PathBuf::from(path), needed_bytes, free_bytes })
}
