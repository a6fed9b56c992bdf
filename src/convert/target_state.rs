//! The files that the target already has: none, some or all files of this conversion, or files of
//! other programs. Removes the files of another conversion.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::file_plan::FilePlan;
use super::journal::{self, Record, Records};
use super::layout::Component;
use super::manifest::Entry;
use super::manifest_read::OpenManifest;
use super::side_files::SideFiles;
use super::source_overlap;
use super::target_directory::{Found, TargetDirectory};
use super::{ConvertError, MANIFEST_NAME};
use crate::units::to_u64;

/// The state of one file of tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FileState {
    /// To be written.
    Missing,
    /// Its bytes were written, but it may not be published: it has to be hashed.
    Unsure,
    /// Published, and not changed since.
    Done,
}

/// The state of the target.
#[derive(Debug)]
pub(super) struct TargetState {
    pub(super) records: Records,
    /// Of each file of tensors.
    pub(super) files: Vec<FileState>,
    /// True if the target has a manifest of this conversion.
    pub(super) is_complete: bool,
    /// Bytes of unfinished files, which are removed before anything is written.
    pub(super) partial_bytes: u64,
    /// Bytes that are free in its file system.
    pub(super) free_bytes: u64,
}

/// The conversion that the target should be of.
pub(super) struct Expected<'a> {
    pub(super) files: &'a FilePlan,
    /// Paths of side files and indices.
    pub(super) others: &'a [String],
    /// The number of parts; `None` if any number will do.
    pub(super) part_count: Option<u32>,
    /// Replace files of other programs and conversions.
    pub(super) overwrite: bool,
}

/// The manifest in the target.
enum FoundManifest {
    Missing,
    /// Of this conversion.
    Own,
    OfOtherConversion,
    /// It cannot be read.
    Unreadable(ConvertError),
}

impl TargetState {
    /// Reads the state of the target; changes nothing.
    ///
    /// # Errors
    /// [`ConvertError::Exists`] and [`ConvertError::OtherConversion`] for files that must not be
    /// replaced.
    pub(super) fn read(path: &Path, expected: &Expected<'_>) -> Result<Self, ConvertError> {
        let Some(target) = TargetDirectory::open(path)? else {
            let free_bytes = existing_ancestor(path)?.free_bytes()?;
            return Ok(Self::empty(expected.files, free_bytes));
        };
        let free_bytes = target.free_bytes()?;
        check_for_folders(&target, expected)?;
        let records = match Records::read(&target) {
            Ok(records) => records,
            Err(_) if expected.overwrite => Records::default(),
            Err(error) => return Err(error),
        };
        let difference = records.differ_from(&expected.files.fingerprint, expected.part_count);
        let is_own = difference.is_none();
        let manifest = find_manifest(&target, &expected.files.fingerprint)?;
        let is_complete = matches!(manifest, FoundManifest::Own);
        if !expected.overwrite {
            if let Some(what) = difference {
                return Err(ConvertError::OtherConversion { path: path.to_owned(), what });
            }
            check_manifest(path, manifest)?;
            check_for_other_files(&target, expected, &records, is_complete)?;
        }
        let records = if is_own { records } else { Records::default() };
        let mut state = Self { records, is_complete, ..Self::empty(expected.files, free_bytes) };
        state.find_files(&target, expected)?;
        Ok(state)
    }

    fn empty(files: &FilePlan, free_bytes: u64) -> Self {
        Self {
            records: Records::default(),
            files: vec![FileState::Missing; files.layout.files.len()],
            is_complete: false,
            partial_bytes: 0,
            free_bytes,
        }
    }

    fn find_files(&mut self, target: &TargetDirectory, expected: &Expected<'_>) -> Result<(), ConvertError> {
        let files = expected.files;
        if self.is_complete {
            let Some(name) = first_missing(target, files)? else {
                self.files.fill(FileState::Done);
                return Ok(());
            };
            // Another program removed or changed a file, and may have changed others too.
            self.is_complete = false;
            if !expected.overwrite {
                let what =
                    format!("this conversion, complete once, whose {name} is missing or has another length");
                return Err(ConvertError::OtherConversion { path: target.path().to_owned(), what });
            }
        }
        for (index, file) in files.layout.files.iter().enumerate() {
            let name = file.id.as_str();
            if let Some(Found::File { allocated_bytes, .. }) = target.find_partial(name)? {
                self.partial_bytes += allocated_bytes;
            }
            if let Some(record) = self.records.find(name) {
                self.files[index] = state_of(record, target.find(name)?, files.sizes[index].file_bytes);
            }
        }
        Ok(())
    }
}

/// The first file or index of a conversion that is missing, or has another length.
fn first_missing(target: &TargetDirectory, files: &FilePlan) -> Result<Option<String>, ConvertError> {
    for (file, size) in files.layout.files.iter().zip(&files.sizes) {
        let found = target.find(file.id.as_str())?;
        if !matches!(found, Some(Found::File { len_bytes, .. }) if len_bytes == size.file_bytes) {
            return Ok(Some(file.id.to_string()));
        }
    }
    for index in files.layout.components.iter().filter_map(Component::index_name) {
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

fn find_manifest(target: &TargetDirectory, fingerprint: &str) -> Result<FoundManifest, ConvertError> {
    let path = target.path_of(MANIFEST_NAME);
    match target.find(MANIFEST_NAME)? {
        None => return Ok(FoundManifest::Missing),
        Some(Found::File { .. }) => {}
        Some(found) => {
            return Ok(FoundManifest::Unreadable(ConvertError::Exists { path, found: found.name() }));
        }
    }
    let read = OpenManifest::open(&path).and_then(|manifest| match manifest {
        Some(manifest) => manifest.read(&mut |_| {}).map(|(head, _)| Some(head.fingerprint)),
        None => Ok(None),
    });
    Ok(match read {
        Ok(None) => FoundManifest::Missing,
        Ok(Some(found)) if found == fingerprint => FoundManifest::Own,
        Ok(Some(_)) => FoundManifest::OfOtherConversion,
        Err(error) => FoundManifest::Unreadable(error),
    })
}

/// Refuses the manifest of another conversion or program.
fn check_manifest(target: &Path, manifest: FoundManifest) -> Result<(), ConvertError> {
    let what = match manifest {
        FoundManifest::Missing | FoundManifest::Own => return Ok(()),
        FoundManifest::OfOtherConversion => {
            "a conversion of another source, or with other options".to_owned()
        }
        FoundManifest::Unreadable(ConvertError::BadManifest { reason, .. }) => {
            format!("{MANIFEST_NAME}, which is no manifest of this program ({reason})")
        }
        FoundManifest::Unreadable(error) => return Err(error),
    };
    Err(ConvertError::OtherConversion { path: target.to_owned(), what })
}

/// Refuses a target in which a folder has the name of a file: a file cannot replace it.
fn check_for_folders(target: &TargetDirectory, expected: &Expected<'_>) -> Result<(), ConvertError> {
    let files = expected.files.layout.files.iter().map(|file| file.id.as_str());
    let others = expected.others.iter().map(String::as_str);
    for name in files.chain(others).chain([MANIFEST_NAME]) {
        if let Some(found @ Found::Directory) = target.find(name)? {
            return Err(ConvertError::Exists { path: target.path_of(name), found: found.name() });
        }
    }
    Ok(())
}

/// Refuses a target with files in the way that no run of this conversion made.
fn check_for_other_files(
    target: &TargetDirectory,
    expected: &Expected<'_>,
    records: &Records,
    is_complete: bool,
) -> Result<(), ConvertError> {
    let layout = &expected.files.layout;
    let refuse = |name: &str, found| Err(ConvertError::Exists { path: target.path_of(name), found });
    for file in &layout.files {
        let name = file.id.as_str();
        match target.find(name)? {
            Some(Found::File { .. }) if is_complete || records.find(name).is_some() => {}
            Some(found) => return refuse(name, found.name()),
            None => {}
        }
    }
    // Once the conversion has begun, a file with the name of a side file is of an interrupted run.
    let is_begun = is_complete || !records.is_empty();
    for name in expected.others.iter().map(String::as_str).chain([MANIFEST_NAME]) {
        match target.find(name)? {
            Some(Found::File { .. }) if is_begun => {}
            Some(found) => return refuse(name, found.name()),
            None => {}
        }
    }
    match other_weights(target, expected.files)?.first() {
        Some(name) => refuse(name, "a file of weights"),
        None => Ok(()),
    }
}

/// Weights and indices in the folders of the conversion that it does not make: loaders would read
/// them too.
pub(super) fn other_weights(target: &TargetDirectory, files: &FilePlan) -> Result<Vec<String>, ConvertError> {
    let layout = &files.layout;
    let own: BTreeSet<&str> = layout.files.iter().map(|file| file.id.as_str()).collect();
    let indices: BTreeSet<String> = layout.components.iter().filter_map(Component::index_name).collect();
    let mut others = Vec::new();
    for component in &layout.components {
        for name in target.names_in(&component.prefix)? {
            let path = format!("{}{name}", component.prefix);
            let is_weights = name.ends_with(".safetensors") || name.contains(".safetensors.index");
            if is_weights
                && !name.starts_with('.')
                && !own.contains(path.as_str())
                && !indices.contains(&path)
            {
                others.push(path);
            }
        }
    }
    Ok(others)
}

/// The existing directory that the target would be made in.
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

/// Bytes that are still to be written, at most: files of tensors, and with `has_end` side files,
/// index and manifest.
pub(super) fn needed_bytes(files: &FilePlan, todo: &[usize], side_bytes: u64, has_end: bool) -> u64 {
    /// Lines of a tensor in the index and the manifest, without its name and shape.
    const LINES_BYTES: u64 = 400;
    let tensors: u64 = todo.iter().map(|&file| files.sizes[file].file_bytes).fold(0, u64::saturating_add);
    if !has_end {
        return tensors;
    }
    let names = files.checkpoint.tensors().map(|tensor| tensor.name.len());
    let lines: u64 = names.map(|name| LINES_BYTES + 2 * to_u64(name)).sum();
    tensors.saturating_add(side_bytes).saturating_add(2 * lines)
}

/// Removes the files that another conversion made and this one does not replace. Does nothing if
/// this conversion has begun.
///
/// ```text
/// indices --> files and side files --> sync --> manifest --> sync --> journals
/// ```
///
/// Manifest and journals list the files of the other conversion, so they are removed last: a run
/// that is killed on the way can be repeated. Files that no conversion made are left alone.
///
/// # Errors
/// [`ConvertError::Locked`] if the other conversion is running, [`ConvertError::OfSource`],
/// [`ConvertError::Write`].
pub(super) fn remove_other_conversion(
    target: &TargetDirectory,
    files: &FilePlan,
    side_files: &SideFiles,
    source_paths: &[PathBuf],
    part_count: u32,
) -> Result<(), ConvertError> {
    let is_begun = |records: &Records| {
        !records.is_empty() && records.differ_from(&files.fingerprint, Some(part_count)).is_none()
    };
    // Parts do not wait for each other.
    if Records::read(target).is_ok_and(|records| is_begun(&records)) {
        return Ok(());
    }
    let locks = journal::lock_all(target)?;
    let old = Records::read(target).unwrap_or_default();
    if is_begun(&old) {
        return Ok(());
    }
    let made: BTreeSet<String> = old.names().map(str::to_owned).chain(names_in_manifest(target)).collect();
    let indices: Vec<String> = files.layout.components.iter().filter_map(Component::index_name).collect();
    let removed: Vec<&str> = made.iter().chain(&indices).map(String::as_str).collect();
    source_overlap::check_names(source_paths, target.path(), &removed)?;
    for index in &indices {
        target.remove(index)?;
    }
    let tensor_files = files.layout.files.iter().map(|file| file.id.as_str());
    let side_files = side_files.files.iter().map(|file| file.name.as_str());
    let replaced: BTreeSet<&str> = tensor_files.chain(side_files).collect();
    for name in &made {
        target.remove_partial(name)?;
        if !replaced.contains(name.as_str()) {
            target.remove(name)?;
        }
    }
    let folder_of = |name: &str| name.rsplit_once('/').map_or(String::new(), |(folder, _)| folder.to_owned());
    let folders: BTreeMap<String, &String> = made.iter().map(|name| (folder_of(name), name)).collect();
    for name in folders.into_values() {
        target.sync_folder_of(name)?;
    }
    target.remove(MANIFEST_NAME)?;
    target.sync_folder_of(MANIFEST_NAME)?;
    journal::remove_all(target, locks)
}

/// The files and side files that the manifest in the target lists; none if it cannot be read.
fn names_in_manifest(target: &TargetDirectory) -> Vec<String> {
    let mut names = Vec::new();
    let path = target.path_of(MANIFEST_NAME);
    if let Ok(Some(manifest)) = OpenManifest::open(&path) {
        let read = manifest.read(&mut |entry| {
            if let Entry::File(file) = entry {
                names.push(file.name);
            }
        });
        // The entries before a fault belong to the other conversion too.
        names.extend(read.into_iter().flat_map(|(_, side_files)| side_files).map(|file| file.name));
    }
    names
}
