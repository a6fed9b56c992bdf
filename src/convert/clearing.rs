//! Makes room for a conversion that replaces another one: whatever the other one has made and this
//! one does not replace goes.
//!
//! ```text
//! indices --> files and side files of the other one --> sync --> its manifest --> sync --> its journals
//! ```
//!
//! Manifest and journals say what the other one has made, so they go last: a run that is killed on
//! the way is gone on with. Files that no conversion has made are left alone.

use std::collections::{BTreeMap, BTreeSet};

use super::files::Component;
use super::journal::{self, Records};
use super::manifest_reader::{Entry, OpenManifest};
use super::output::TargetDirectory;
use super::prepared::PreparedConversion;
use super::{ConvertError, MANIFEST_NAME, Part, source_guard};

/// Removes what another conversion has made. Does nothing if this one has begun.
///
/// # Errors
/// [`ConvertError::Locked`] if the other one is under way, [`ConvertError::Write`].
pub(super) fn clear(prepared: &PreparedConversion, target: &TargetDirectory) -> Result<(), ConvertError> {
    let scope = &prepared.scope;
    let part_count = Some(prepared.settings.part.map_or(1, Part::of));
    let is_begun = |records: &Records| {
        !records.is_empty() && records.differ_from(&scope.fingerprint, part_count).is_none()
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
    let made: BTreeSet<String> = old.names().map(str::to_owned).chain(made_by_manifest(target)).collect();
    let indices: Vec<String> = scope.shapes.components.iter().filter_map(Component::index_name).collect();
    let doomed: Vec<&str> = made.iter().chain(&indices).map(String::as_str).collect();
    let source = source_guard::paths_of(&prepared.source, &scope.checkpoint, &prepared.side_files);
    source_guard::check(&source, target.path(), &doomed)?;
    for index in &indices {
        target.remove(index)?;
    }
    let files = scope.shapes.files.iter().map(|file| file.id.as_str());
    let side_files = prepared.side_files.files.iter().map(|file| file.name.as_str());
    let replaced: BTreeSet<&str> = files.chain(side_files).collect();
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

/// The files and side files that a manifest in the target lists; none if it cannot be read.
fn made_by_manifest(target: &TargetDirectory) -> Vec<String> {
    let mut names = Vec::new();
    let path = target.path_of(MANIFEST_NAME);
    if let Ok(Some(manifest)) = OpenManifest::open(&path) {
        let read = manifest.read(&mut |entry| {
            if let Entry::File(file) = entry {
                names.push(file.name);
            }
        });
        // What stands before a fault is enough to know whose files these are.
        names.extend(read.into_iter().flat_map(|(_, side_files)| side_files).map(|file| file.name));
    }
    names
}
