//! The end of a conversion, once every file of tensors is there: side files are copied, indices and
//! the manifest are written, and the journals are removed.

use std::fs::File;
use std::io::{self, BufWriter, Write};

use serde::{Serialize, Serializer};

use super::hash::{HashingWriter, hex};
use super::journal::{self, Records};
use super::layout::Component;
use super::manifest::{Alias, ManifestHead, ManifestWriter, SideFileRecord};
use super::manifest_read::read_file_entry;
use super::prepare::PreparedConversion;
use super::target_directory::TargetDirectory;
use super::target_state::{Expected, FileState, TargetState, other_weights};
use super::{ConvertError, ConvertEvent, ConvertReport, MANIFEST_NAME, Part};
use crate::checkpoint::TensorId;
use crate::load::LoadError;
use crate::plan::SCALE_SUFFIX;
use crate::units::to_u64;

/// Bytes of the buffer through which texts are written.
const BUFFER_BYTES: usize = 64 << 10;

/// Ends the conversion.
///
/// # Errors
/// [`ConvertError::Incomplete`] if a file is missing, [`ConvertError::Locked`] if a part is being
/// converted.
pub(super) fn finish(
    prepared: &PreparedConversion,
    target: &TargetDirectory,
    report: &mut ConvertReport,
) -> Result<(), ConvertError> {
    // First without the locks: a call that comes too early must not keep a part from beginning.
    complete_state(prepared, target)?;
    let locks = journal::lock_all(target)?;
    let state = complete_state(prepared, target)?;
    if state.is_complete {
        // Another run ended the conversion since this one was prepared.
        report.is_complete = true;
        return remove_journals(target, locks);
    }
    let mut side_files = copy_side_files(prepared, target, report)?;
    for component in &prepared.files.layout.components {
        side_files.extend(write_index(prepared, target, component)?);
    }
    write_manifest(prepared, target, &state.records, &side_files)?;
    report.is_complete = true;
    prepared.settings.report(&ConvertEvent::Finished);
    report.notes.extend(note_other_weights(prepared, target)?);
    remove_journals(target, locks)
}

/// Names weights that are not of this conversion. They stay: the conversion replaces files, but
/// does not remove files that no conversion made.
fn note_other_weights(
    prepared: &PreparedConversion,
    target: &TargetDirectory,
) -> Result<Option<String>, ConvertError> {
    let found = other_weights(target, &prepared.files)?;
    let Some(first) = found.first() else { return Ok(None) };
    let others = match found.len() - 1 {
        0 => String::new(),
        others => format!(" and {others} more"),
    };
    Ok(Some(format!(
        "no part of this conversion, and left alone: {first}{others}; loaders that take every file of weights will read that too"
    )))
}

/// Removes the journals of a complete conversion. A run that was interrupted at its very end leaves
/// them. `locks` are those of the journals, or empty.
pub(super) fn remove_journals(target: &TargetDirectory, locks: Vec<File>) -> Result<(), ConvertError> {
    journal::remove_all(target, locks)?;
    target.sync_folder_of(MANIFEST_NAME)
}

/// The state of the target, if every file is there.
fn complete_state(
    prepared: &PreparedConversion,
    target: &TargetDirectory,
) -> Result<TargetState, ConvertError> {
    let expected = Expected {
        files: &prepared.files,
        others: &[],
        part_count: prepared.settings.part.map(Part::of),
        overwrite: true,
    };
    let state = TargetState::read(target.path(), &expected)?;
    let is_missing = |file: &usize| state.files[*file] != FileState::Done;
    let missing: Vec<usize> = (0..state.files.len()).filter(is_missing).collect();
    if missing.is_empty() { Ok(state) } else { Err(incomplete(prepared, &missing)) }
}

/// The error that files are missing.
pub(super) fn incomplete(prepared: &PreparedConversion, missing: &[usize]) -> ConvertError {
    let first = missing.first().map(|&file| prepared.files.layout.files[file].id.to_string());
    let first = first.unwrap_or_default();
    ConvertError::Incomplete { path: prepared.target.clone(), first, missing_count: to_u64(missing.len()) }
}

fn copy_side_files(
    prepared: &PreparedConversion,
    target: &TargetDirectory,
    report: &mut ConvertReport,
) -> Result<Vec<SideFileRecord>, ConvertError> {
    let mut records = Vec::with_capacity(prepared.side_files.files.len());
    for side_file in &prepared.side_files.files {
        if prepared.cancel.is_cancelled() {
            return Err(LoadError::Cancelled.into());
        }
        let partial = target.create_file(&side_file.name)?;
        let path = partial.full_path();
        let record = side_file.copy_to(&mut partial.file(), &path, prepared.settings.sha256)?;
        partial.publish(true)?;
        report.side_files += 1;
        prepared.settings.report(&ConvertEvent::SideFile { file: &side_file.name, bytes: record.bytes });
        records.push(record);
    }
    Ok(records)
}

/// The index of a component, as other writers write it: names in order, two spaces.
#[derive(Serialize)]
struct Index<M> {
    metadata: IndexMetadata,
    weight_map: M,
}

#[derive(Serialize)]
struct IndexMetadata {
    total_size: u64,
}

/// A JSON object whose members are made one by one, since there may be millions.
struct Members<I>(I);

impl<I: Iterator<Item = (String, String)> + Clone> Serialize for Members<I> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.clone())
    }
}

/// Writes the index of a component; `None` for a single file, which has no index.
fn write_index(
    prepared: &PreparedConversion,
    target: &TargetDirectory,
    component: &Component,
) -> Result<Option<SideFileRecord>, ConvertError> {
    let Some(name) = component.index_name() else { return Ok(None) };
    let files = &prepared.files;
    // Each tensor, whether it is the scales of that tensor, and its file.
    let mut places: Vec<(TensorId, bool, usize)> = Vec::new();
    let mut total_size = 0_u64;
    for file in component.files.clone() {
        for &tensor in files.layout.tensors(&files.layout.files[file]) {
            places.push((tensor, false, file));
            places.extend(files.quantisation(tensor).map(|_| (tensor, true, file)));
        }
        total_size += files.sizes[file].data_bytes();
    }
    let halves = |&(tensor, is_scales, _): &(TensorId, bool, usize)| {
        (files.checkpoint.name_of(tensor), if is_scales { SCALE_SUFFIX } else { "" })
    };
    places.sort_unstable_by(|left, right| {
        let [left, right] =
            [left, right].map(&halves).map(|(name, suffix)| name.bytes().chain(suffix.bytes()));
        left.cmp(right)
    });
    let below = |path: &str| path.strip_prefix(&*component.prefix).unwrap_or(path).to_owned();
    let members = places.iter().map(|place| {
        let (name, suffix) = halves(place);
        (below(&format!("{name}{suffix}")), below(files.layout.files[place.2].id.as_str()))
    });
    let index = Index { metadata: IndexMetadata { total_size }, weight_map: Members(members) };
    let text = |out: &mut dyn Write| -> io::Result<()> {
        serde_json::to_writer_pretty(&mut *out, &index)?;
        out.write_all(b"\n")
    };
    write_text(prepared, target, &name, text).map(Some)
}

fn write_manifest(
    prepared: &PreparedConversion,
    target: &TargetDirectory,
    records: &Records,
    side_files: &[SideFileRecord],
) -> Result<(), ConvertError> {
    let files = &prepared.files;
    let name = |id: TensorId| files.checkpoint.tensor(id).name.to_owned();
    let alias = |&(left_out, kept)| Alias { name: name(left_out), same_as: name(kept) };
    let tied =
        files.tied_names().map(|(name, id)| Alias { name, same_as: files.checkpoint.name_of(id).to_owned() });
    let head = ManifestHead {
        tool: concat!("onelayer ", env!("CARGO_PKG_VERSION")).to_owned(),
        fingerprint: files.fingerprint.clone(),
        source: files.source.clone(),
        options: prepared.settings.options_text.clone(),
        aliases: files.aliases.iter().map(alias).chain(tied).collect(),
        left_out: files.left_out.iter().map(|&id| name(id)).collect(),
    };
    let text = |out: &mut dyn Write| -> io::Result<()> {
        let mut writer = ManifestWriter::new(out, &head)?;
        for file in &files.layout.files {
            let record = records.find(file.id.as_str()).expect("every file is there");
            let entry = record.entry(target).map_err(io::Error::other)?;
            let mut written = Ok(());
            read_file_entry(entry, &mut |entry| {
                if written.is_ok() {
                    written = writer.entry(&entry);
                }
            })?;
            written?;
        }
        writer.finish(side_files).map(drop)
    };
    write_text(prepared, target, MANIFEST_NAME, text).map(drop)
}

/// Writes a text under its name, durably.
fn write_text(
    prepared: &PreparedConversion,
    target: &TargetDirectory,
    name: &str,
    text: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<SideFileRecord, ConvertError> {
    let partial = target.create_file(name)?;
    let buffered = BufWriter::with_capacity(BUFFER_BYTES, partial.file());
    let mut out = HashingWriter::new(buffered, prepared.settings.sha256);
    let written = text(&mut out).and_then(|()| out.flush());
    written.map_err(|source| match source.downcast::<ConvertError>() {
        Ok(error) => error,
        Err(source) => ConvertError::Write { path: partial.full_path(), operation: "write", source },
    })?;
    let (bytes, hashes) = (out.bytes, out.digest.take());
    drop(out);
    partial.publish(true)?;
    let sha256 = hashes.sha256.as_ref().map(hex);
    Ok(SideFileRecord { name: name.to_owned(), bytes, blake3: hex(&hashes.blake3), sha256 })
}
