//! The end of a conversion: when every file is there, side files, then indices, then the manifest.
//! Then the journals go.

use std::fs::File;
use std::io::{self, BufWriter, Write};

use super::digest::{Digest, hex};
use super::files::Component;
use super::journal::{self, Records};
use super::manifest::{Alias, SideFileRecord};
use super::manifest_writer::{ManifestHead, ManifestWriter};
use super::output::{PartialFile, TargetDirectory};
use super::prepared::PreparedConversion;
use super::target::{Expected, FileState, TargetState, strange_weights};
use super::{ConvertError, ConvertEvent, ConvertReport, MANIFEST_NAME, Part};

use crate::checkpoint::TensorId;
use crate::plan::SCALE_SUFFIX;
use crate::units::to_u64;

/// Texts are written through a buffer of so many bytes.
const BUFFER_BYTES: usize = 64 << 10;

/// Ends the conversion.
///
/// # Errors
/// [`ConvertError::Incomplete`] if a file is missing, [`ConvertError::Locked`] if a part is being
/// converted.
pub(super) fn end(
    prepared: &PreparedConversion,
    target: &TargetDirectory,
    report: &mut ConvertReport,
) -> Result<(), ConvertError> {
    // Looked at without the locks first: whoever asks too early must not keep a part from beginning.
    look(prepared, target)?;
    let locks = journal::lock_all(target)?;
    let state = look(prepared, target)?;
    if state.is_complete {
        // Another run has ended it since this one was prepared.
        report.is_complete = true;
        return tidy(target, locks);
    }
    let mut side_files = copy_side_files(prepared, target, report)?;
    for component in &prepared.scope.shapes.components {
        side_files.extend(write_index(prepared, target, component)?);
    }
    write_manifest(prepared, target, &state.records, &side_files)?;
    report.is_complete = true;
    prepared.settings.tell(&ConvertEvent::Finished);
    report.notes.extend(note_strangers(prepared, target)?);
    tidy(target, locks)
}

/// Names weights that stand beside those of the conversion, which is there to replace files and not
/// to remove what somebody else made.
fn note_strangers(
    prepared: &PreparedConversion,
    target: &TargetDirectory,
) -> Result<Option<String>, ConvertError> {
    let strange = strange_weights(target, &prepared.scope)?;
    let Some(first) = strange.first() else { return Ok(None) };
    let others = match strange.len() - 1 {
        0 => String::new(),
        others => format!(" and {others} more"),
    };
    Ok(Some(format!(
        "no part of this conversion, and left alone: {first}{others}; loaders that take every file of weights will read that too"
    )))
}

/// Removes the journals of a conversion that is complete. A run that was interrupted at its very
/// end may have left them. `locks` are those of its journals, or none.
pub(super) fn tidy(target: &TargetDirectory, locks: Vec<File>) -> Result<(), ConvertError> {
    journal::remove_all(target, locks)?;
    target.sync_folder_of(MANIFEST_NAME)
}

/// What stands in the target, if every file is there.
fn look(prepared: &PreparedConversion, target: &TargetDirectory) -> Result<TargetState, ConvertError> {
    let expected = Expected {
        scope: &prepared.scope,
        others: &[],
        part_count: prepared.settings.part.map(Part::of),
        overwrite: true,
    };
    let state = TargetState::look(target.path(), &expected)?;
    let is_missing = |file: &usize| state.files[*file] != FileState::Done;
    let missing: Vec<usize> = (0..state.files.len()).filter(is_missing).collect();
    if missing.is_empty() { Ok(state) } else { Err(incomplete(prepared, &missing)) }
}

/// The error that files are missing.
pub(super) fn incomplete(prepared: &PreparedConversion, missing: &[usize]) -> ConvertError {
    let first = missing.first().map(|&file| prepared.scope.shapes.files[file].id.to_string());
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
            return Err(crate::load::LoadError::Cancelled.into());
        }
        let partial = target.create_file(&side_file.name)?;
        let path = partial.full_path();
        let record = side_file.copy_to(&mut partial.file(), &path, prepared.settings.sha256)?;
        partial.publish(true)?;
        report.side_files += 1;
        prepared.settings.tell(&ConvertEvent::SideFile { file: &side_file.name, bytes: record.bytes });
        records.push(record);
    }
    Ok(records)
}

/// The index of a component, as other writers write it: names in order, two spaces. None for a
/// single file.
fn write_index(
    prepared: &PreparedConversion,
    target: &TargetDirectory,
    component: &Component,
) -> Result<Option<SideFileRecord>, ConvertError> {
    let Some(name) = component.index_name() else { return Ok(None) };
    let scope = &prepared.scope;
    // Tensors, and whether it is their scales.
    let mut places: Vec<(TensorId, bool, usize)> = Vec::new();
    let mut total_bytes = 0_u64;
    for file in component.files.clone() {
        for &tensor in scope.shapes.tensors(&scope.shapes.files[file]) {
            places.push((tensor, false, file));
            places.extend(scope.quantisation(tensor).map(|_| (tensor, true, file)));
        }
        total_bytes += scope.data_bytes(file);
    }
    let halves = |&(tensor, is_scales, _): &(TensorId, bool, usize)| {
        (scope.checkpoint.name_of(tensor), if is_scales { SCALE_SUFFIX } else { "" })
    };
    places.sort_unstable_by(|left, right| {
        let [left, right] =
            [left, right].map(&halves).map(|(name, suffix)| name.bytes().chain(suffix.bytes()));
        left.cmp(right)
    });
    let below = |path: &str| path.strip_prefix(&*component.prefix).unwrap_or(path).to_owned();
    let text = |out: &mut dyn Write| -> io::Result<()> {
        write!(
            out,
            "{{\n  \"metadata\": {{\n    \"total_size\": {total_bytes}\n  }},\n  \"weight_map\": {{"
        )?;
        for (number, place) in places.iter().enumerate() {
            let ((name, suffix), file) = (halves(place), &place.2);
            out.write_all(if number > 0 { b",\n    " } else { b"\n    " })?;
            serde_json::to_writer(&mut *out, &below(&format!("{name}{suffix}")))?;
            out.write_all(b": ")?;
            serde_json::to_writer(&mut *out, &below(scope.shapes.files[*file].id.as_str()))?;
        }
        out.write_all(b"\n  }\n}\n")
    };
    write_text(prepared, target, &name, text).map(Some)
}

fn write_manifest(
    prepared: &PreparedConversion,
    target: &TargetDirectory,
    records: &Records,
    side_files: &[SideFileRecord],
) -> Result<(), ConvertError> {
    let scope = &prepared.scope;
    let name = |id: TensorId| scope.checkpoint.tensor(id).name.to_owned();
    let head = ManifestHead {
        tool: concat!("onelayer ", env!("CARGO_PKG_VERSION")).to_owned(),
        fingerprint: scope.fingerprint.clone(),
        source: scope.source.clone(),
        options: prepared.settings.options_text.clone(),
        aliases: scope
            .aliases
            .iter()
            .map(|&(left, kept)| Alias { name: name(left), same_as: name(kept) })
            .collect(),
        left_out: scope.left_out.iter().map(|&id| name(id)).collect(),
    };
    let text = |out: &mut dyn Write| -> io::Result<()> {
        let mut writer = ManifestWriter::new(out, &head)?;
        for file in &scope.shapes.files {
            let record = records.find(file.id.as_str()).expect("every file is there");
            writer.raw_file(record.entry(target).map_err(io::Error::other)?)?;
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
    let mut out = Counted::new(&partial, prepared.settings.sha256);
    let written = text(&mut out).and_then(|()| out.finish());
    let (bytes, hashes) = written.map_err(|source| match source.downcast::<ConvertError>() {
        Ok(error) => error,
        Err(source) => ConvertError::Write { path: partial.full_path(), operation: "write", source },
    })?;
    partial.publish(true)?;
    let sha256 = hashes.sha256.as_ref().map(hex);
    Ok(SideFileRecord { name: name.to_owned(), bytes, blake3: hex(&hashes.blake3), sha256 })
}

/// Writes to a file through a buffer, and hashes and counts what passes.
struct Counted<'a> {
    out: BufWriter<&'a File>,
    digest: Digest,
    bytes: u64,
}

impl<'a> Counted<'a> {
    fn new(partial: &'a PartialFile, with_sha256: bool) -> Self {
        let out = BufWriter::with_capacity(BUFFER_BYTES, partial.file());
        Self { out, digest: Digest::new(with_sha256), bytes: 0 }
    }

    fn finish(mut self) -> io::Result<(u64, super::digest::Hashes)> {
        self.out.flush()?;
        Ok((self.bytes, self.digest.take()))
    }
}

impl Write for Counted<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.out.write_all(bytes)?;
        self.digest.update(bytes);
        self.bytes += to_u64(bytes.len());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
