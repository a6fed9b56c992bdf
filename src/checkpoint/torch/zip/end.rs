//! The end of a zip archive: where its directory is.
//!
//! A zip is read from its end, and lies there are what makes two readers see two different
//! archives. So the records at the end have to follow each other without gaps, up to the last byte
//! of the file, and the 32-bit fields have to repeat the 64-bit ones.

use std::os::unix::fs::FileExt;

use super::super::super::CheckpointError;
use super::super::super::format::Input;
use crate::units::{ByteRange, to_u64, to_usize};

const END_MAGIC: [u8; 4] = *b"PK\x05\x06";
const LOCATOR_MAGIC: [u8; 4] = *b"PK\x06\x07";
const END64_MAGIC: [u8; 4] = *b"PK\x06\x06";
const END_BYTES: u64 = 22;
const LOCATOR_BYTES: u64 = 20;
const END64_BYTES: u64 = 56;
const COMMENT_BYTES_MAX: u64 = 0xffff;

/// Where the directory is, and how many entries it has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Directory {
    pub(super) text: ByteRange,
    pub(super) count: u64,
}

/// Reads a field of a record.
pub(super) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes[at..at + 2].try_into().expect("a slice of two bytes"))
}

/// Reads a field of a record.
pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("a slice of four bytes"))
}

/// Reads a field of a record.
pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("a slice of eight bytes"))
}

/// Reads a part of the file.
pub(super) fn read(input: &Input<'_>, at: u64, bytes: &mut [u8]) -> Result<(), CheckpointError> {
    input.file.read_exact_at(bytes, at).map_err(|source| input.io(source))
}

/// The fields of a record at the end.
struct Fields {
    disk: u32,
    directory_disk: u32,
    count_here: u64,
    count: u64,
    len_bytes: u64,
    start: u64,
}

/// Finds the directory.
pub(super) fn find(input: &Input<'_>) -> Result<Directory, CheckpointError> {
    let tail_bytes = input.len_bytes.min(END_BYTES + COMMENT_BYTES_MAX);
    let mut tail = vec![0; to_usize(tail_bytes)];
    let tail_start = input.len_bytes - tail_bytes;
    read(input, tail_start, &mut tail)?;
    let last = (0..tail.len().saturating_sub(to_usize(END_BYTES) - 1)).rev();
    let Some(at) = last.clone().find(|&at| tail[at..].starts_with(&END_MAGIC)) else {
        return Err(input.invalid(
            input.len_bytes,
            "expected the end record of a zip archive, found none: interrupted download?",
        ));
    };
    let (end, end_start) = (&tail[at..], tail_start + to_u64(at));
    let behind = to_u64(end.len()) - END_BYTES;
    let comment_bytes = u64::from(u16_at(end, 20));
    if comment_bytes != behind {
        let reason = format!("end record with {comment_bytes} bytes of comment, found {behind} behind it");
        return Err(input.invalid(end_start, reason));
    }
    let short = Fields {
        disk: u32::from(u16_at(end, 4)),
        directory_disk: u32::from(u16_at(end, 6)),
        count_here: u64::from(u16_at(end, 8)),
        count: u64::from(u16_at(end, 10)),
        len_bytes: u64::from(u32_at(end, 12)),
        start: u64::from(u32_at(end, 16)),
    };
    let (fields, records_start) = match wide(input, end_start)? {
        Some((wide, start)) => {
            check_alike(input, end_start, &short, &wide)?;
            (wide, start)
        }
        None => (short, end_start),
    };
    check(input, &fields, records_start)
}

/// Reads the 64-bit record, if there is one, and its offset.
fn wide(input: &Input<'_>, end_start: u64) -> Result<Option<(Fields, u64)>, CheckpointError> {
    let Some(locator_start) = end_start.checked_sub(LOCATOR_BYTES) else { return Ok(None) };
    let mut locator = [0; to_array(LOCATOR_BYTES)];
    read(input, locator_start, &mut locator)?;
    if !locator.starts_with(&LOCATOR_MAGIC) {
        return Ok(None);
    }
    let record_start = u64_at(&locator, 8);
    let disks = (u32_at(&locator, 4), u32_at(&locator, 16));
    if disks != (0, 1) || record_start.checked_add(END64_BYTES) != Some(locator_start) {
        let reason = format!(
            "expected the 64-bit end record right before its locator and on one disk, found it at {record_start}"
        );
        return Err(input.invalid(locator_start, reason));
    }
    let mut record = [0; to_array(END64_BYTES)];
    read(input, record_start, &mut record)?;
    if !record.starts_with(&END64_MAGIC) || u64_at(&record, 4) != END64_BYTES - 12 {
        return Err(input.invalid(record_start, "expected a 64-bit end record of 56 bytes, found none"));
    }
    let fields = Fields {
        disk: u32_at(&record, 16),
        directory_disk: u32_at(&record, 20),
        count_here: u64_at(&record, 24),
        count: u64_at(&record, 32),
        len_bytes: u64_at(&record, 40),
        start: u64_at(&record, 48),
    };
    Ok(Some((fields, record_start)))
}

const fn to_array(bytes: u64) -> usize {
    match bytes {
        LOCATOR_BYTES => 20,
        _ => 56,
    }
}

/// Refuses an end record that says something else than the 64-bit one.
fn check_alike(input: &Input<'_>, at: u64, short: &Fields, wide: &Fields) -> Result<(), CheckpointError> {
    let alike = |short: u64, wide: u64, full: u64| short == wide || short == full;
    let (full, wide_full) = (u64::from(u16::MAX), u64::from(u32::MAX));
    let all = alike(short.count_here, wide.count_here, full)
        && alike(short.count, wide.count, full)
        && alike(short.len_bytes, wide.len_bytes, wide_full)
        && alike(short.start, wide.start, wide_full)
        && alike(u64::from(short.disk), u64::from(wide.disk), full)
        && alike(u64::from(short.directory_disk), u64::from(wide.directory_disk), full);
    match all {
        true => Ok(()),
        false => Err(input.invalid(at, "the two end records of the archive contradict each other")),
    }
}

/// Checks that the directory is whole and right before the end records.
fn check(input: &Input<'_>, fields: &Fields, records_start: u64) -> Result<Directory, CheckpointError> {
    let &Fields { disk, directory_disk, count_here, count, len_bytes, start } = fields;
    if (disk, directory_disk) != (0, 0) || count_here != count {
        return Err(input.invalid(records_start, "expected an archive in one file, found one in several"));
    }
    let text = ByteRange::with_len(start, len_bytes).filter(|text| text.end() == records_start);
    let Some(text) = text else {
        let reason = format!(
            "expected the directory right before its end record, found it announced at {start} with {len_bytes} bytes"
        );
        return Err(input.invalid(records_start, reason));
    };
    Ok(Directory { text, count })
}
