//! The header of a safetensors file, written piece by piece so that its text is never held.
//!
//! Format: 8 bytes of length (little-endian), then so many bytes of JSON, then the tensors without
//! gaps (<https://github.com/huggingface/safetensors#format>). The JSON may end in spaces: here in as many as bring the first tensor to a
//! multiple of 4096 bytes, which is what reading past the page cache and mapping want.

use std::collections::BTreeMap;
use std::io::{self, Write};

use serde_json::to_writer;

use crate::checkpoint::Checkpoint;
use crate::plan::{LoadPlan, Placement};
use crate::units::{Alignment, to_u64, to_usize};

/// The longest header that readers take, in bytes: the limit of the format's reference.
pub(super) const HEADER_BYTES_MAX: u64 = 100_000_000;
/// Bytes of the length in front of the header.
const PREFIX_BYTES: u64 = 8;

/// The header of one file to be.
#[derive(Clone, Copy)]
pub(super) struct Header<'a> {
    pub(super) checkpoint: &'a Checkpoint,
    /// What is taken off the front of the tensors' names.
    pub(super) name_prefix: &'a str,
    /// The free text.
    pub(super) metadata: &'a BTreeMap<String, String>,
    /// The tensors; their places in the arena are those in the data of the file.
    pub(super) placements: &'a [Placement],
    /// The plan that they are of.
    pub(super) plan: &'a LoadPlan,
}

impl Header<'_> {
    /// Where the first tensor begins in the file: a multiple of 4096.
    pub(super) fn data_start(&self) -> u64 {
        let mut counter = Counter(0);
        self.write_text(&mut counter).expect("counting does not fail");
        Alignment::PAGE.up(PREFIX_BYTES + counter.0).expect("a header is shorter than memory")
    }

    /// Writes length, text and padding.
    ///
    /// # Errors
    /// What the writer answers.
    pub(super) fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let data_start = self.data_start();
        out.write_all(&(data_start - PREFIX_BYTES).to_le_bytes())?;
        let mut counted = Counted { out, bytes: PREFIX_BYTES };
        self.write_text(&mut counted)?;
        let padding_bytes = to_usize(data_start - counted.bytes);
        out.write_all(&[b' '; 4096][..padding_bytes])
    }

    fn write_text(&self, out: &mut impl Write) -> io::Result<()> {
        out.write_all(b"{")?;
        let mut separator = "";
        if !self.metadata.is_empty() {
            out.write_all(b"\"__metadata__\":")?;
            to_writer(&mut *out, self.metadata)?;
            separator = ",";
        }
        for placement in self.placements {
            let entry = self.checkpoint.tensor(placement.tensor);
            let (name, shape) = self.plan.delivered(placement, &entry);
            let name = name.strip_prefix(self.name_prefix).unwrap_or(name);
            out.write_all(separator.as_bytes())?;
            to_writer(&mut *out, name)?;
            out.write_all(b":{\"dtype\":")?;
            to_writer(&mut *out, placement.delivered_dtype_name(&entry))?;
            out.write_all(b",\"shape\":")?;
            to_writer(&mut *out, shape)?;
            let start = placement.arena_offset_bytes;
            write!(out, ",\"data_offsets\":[{start},{}]}}", start + placement.len_bytes())?;
            separator = ",";
        }
        out.write_all(b"}")
    }
}

/// Counts what is written to it.
struct Counter(u64);

impl Write for Counter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += to_u64(bytes.len());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Counts what passes through it.
struct Counted<'a, W> {
    out: &'a mut W,
    bytes: u64,
}

impl<W: Write> Write for Counted<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes)?;
        self.bytes += to_u64(written);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
