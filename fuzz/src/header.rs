//! A file of any bytes: same verdict and description as the reference reader, or a known
//! difference.
//!
//! Input: a file, or if it starts like JSON, the text of a header. The check then adds the header's
//! length and as many data bytes as the header needs, so the fuzzer need not.

use std::path::Path;

use onelayer::checkpoint::{CheckpointError, OpenOptions};
use onelayer::{Checkpoint, Layers};

use super::layers::check_layers;
use super::memory::peak_of;
use super::oracle;
use super::scratch::Scratch;
use onelayer_testing::safetensors_file::with_header;

/// Maximum number of data bytes after a header.
const DATA_BYTES_MAX: u64 = 1 << 16;
/// Memory limit besides the part in proportion to the header. The promise is 16 MiB; in fact it is
/// mostly a buffer of 256 KiB.
const MEMORY_BYTES: u64 = 1 << 20;
/// Maximum length of a message: names are shortened, and paths are short here.
const MESSAGE_BYTES_MAX: usize = 2000;

/// Checks one input.
pub fn check(data: &[u8]) {
    match data.first() {
        Some(b'{' | b' ' | b'\t' | b'\n' | b'\r') => check_file(&with_header(data, data_bytes(data))),
        _ => check_file(data),
    }
}

/// Checks one file.
pub(crate) fn check_file(bytes: &[u8]) {
    thread_local!(static SCRATCH: Scratch = Scratch::new());
    SCRATCH.with(|scratch| {
        let path = scratch.holding(bytes);
        let verdict = oracle::compare(path, bytes);
        let verdict = verdict.unwrap_or_else(|difference| panic!("{difference}\n{}", bytes.escape_ascii()));
        let again = open_bounded(path, bytes.len());
        assert_eq!(again.is_ok(), verdict.refusal.is_none(), "the same file, another verdict");
        match again {
            Err(error) => {
                assert!(error.is_invalid(), "{error}");
                assert_eq!(error.path(), Some(path), "{error}");
                check_message(&error);
            }
            Ok(checkpoint) => {
                let layers = Layers::group(&checkpoint).expect("whatever the names are");
                check_layers(&layers, checkpoint.tensor_count());
            }
        }
    });
}

/// Opens a checkpoint with a header or index of this size and checks the memory promise.
pub(crate) fn open_bounded(path: &Path, text_bytes: usize) -> Result<Checkpoint, CheckpointError> {
    open_bounded_with(path, text_bytes, &OpenOptions::new())
}

/// The same with options.
pub(crate) fn open_bounded_with(
    path: &Path,
    text_bytes: usize,
    options: &OpenOptions,
) -> Result<Checkpoint, CheckpointError> {
    let (outcome, peak_bytes) = peak_of(|| options.open(path));
    let allowed_bytes = 4 * u64::try_from(text_bytes).expect("a length fits") + MEMORY_BYTES;
    assert!(peak_bytes <= allowed_bytes, "{peak_bytes} bytes of heap for {text_bytes} of text");
    outcome
}

/// Checks that a message is short for any file.
pub(crate) fn check_message(error: &CheckpointError) {
    let text = error.to_string();
    assert!(text.len() <= MESSAGE_BYTES_MAX, "{} bytes: {text}", text.len());
}

/// The largest number before a `]`: the end of the last tensor in a usual header.
fn data_bytes(header: &[u8]) -> usize {
    let ends = header.iter().enumerate().filter(|(_, byte)| **byte == b']');
    let number = |(end, _): (usize, &u8)| {
        let digits = header[..end].rsplit(|byte| !byte.is_ascii_digit()).next()?;
        std::str::from_utf8(digits).ok()?.parse::<u64>().ok()
    };
    let largest = ends.filter_map(number).filter(|number| *number <= DATA_BYTES_MAX).max();
    usize::try_from(largest.unwrap_or(0)).unwrap_or(0)
}
