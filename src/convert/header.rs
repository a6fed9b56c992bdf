//! The header of a safetensors file.
//!
//! Format: 8 bytes of length (little-endian), then so many bytes of JSON, then the tensors without
//! gaps (<https://github.com/huggingface/safetensors#format>). The JSON may end in spaces: they
//! move the first tensor to a multiple of 4096 bytes, for reads past the page cache and for
//! mappings.
//!
//! Written without the `safetensors` crate, which would hold the whole text (100 MB at most) and
//! sort the tensors.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::{self, Write};

use serde::ser::SerializeMap as _;
use serde::{Serialize, Serializer};

use crate::checkpoint::{BlockType, Checkpoint, DType, TensorEntry};
use crate::plan::{LoadPlan, Placement};
use crate::units::{Alignment, to_u64, to_usize};

/// The longest header that readers accept, in bytes: the limit of the format's reference.
pub(super) const HEADER_BYTES_MAX: u64 = 100_000_000;
/// Bytes of the length before the JSON.
const PREFIX_BYTES: u64 = 8;

/// The header of one file.
#[derive(Clone, Copy)]
pub(super) struct Header<'a> {
    pub(super) checkpoint: &'a Checkpoint,
    /// The prefix that is removed from the tensors' names.
    pub(super) name_prefix: &'a str,
    /// The text of `__metadata__`.
    pub(super) metadata: &'a BTreeMap<String, String>,
    /// The tensors. Their offsets in the arena are those in the data of the file.
    pub(super) placements: &'a [Placement],
    /// The plan of these placements.
    pub(super) plan: &'a LoadPlan,
}

/// What stands before the name of a tensor of blocks in `__metadata__`; the value is its type.
const BLOCK_KEY: &str = "gguf_type.";

/// How a tensor is written. safetensors has no blocks: they are bytes there.
pub(super) struct Written<'a> {
    pub(super) name: &'a str,
    pub(super) dtype: &'a str,
    pub(super) shape: Cow<'a, [u64]>,
    block: Option<BlockType>,
}

impl<'a> Written<'a> {
    pub(super) fn of(plan: &'a LoadPlan, placement: &Placement, entry: &TensorEntry<'a>) -> Self {
        let (name, shape) = plan.delivered(placement, entry);
        match placement.delivered_dtype(entry.dtype) {
            DType::Block(block) => {
                let shape = Cow::Owned(block.byte_shape(shape));
                Self { name, dtype: DType::U8.name(), shape, block: Some(block) }
            }
            _ => Self {
                name,
                dtype: placement.delivered_dtype_name(entry),
                shape: Cow::Borrowed(shape),
                block: None,
            },
        }
    }
}

/// The entry of a tensor.
#[derive(Serialize)]
struct TensorInfo<'a> {
    dtype: &'a str,
    shape: &'a [u64],
    data_offsets: [u64; 2],
}

impl Serialize for Header<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        let metadata = self.metadata_with_blocks();
        if !metadata.is_empty() {
            map.serialize_entry("__metadata__", &*metadata)?;
        }
        for (placement, written) in self.written() {
            let start = placement.arena_offset_bytes;
            let data_offsets = [start, start + placement.len_bytes()];
            let info = TensorInfo { dtype: written.dtype, shape: &written.shape, data_offsets };
            map.serialize_entry(self.name_of(&written), &info)?;
        }
        map.end()
    }
}

impl<'a> Header<'a> {
    fn written(&self) -> impl Iterator<Item = (&'a Placement, Written<'a>)> {
        let (checkpoint, plan) = (self.checkpoint, self.plan);
        self.placements.iter().map(move |placement| {
            (placement, Written::of(plan, placement, &checkpoint.tensor(placement.tensor)))
        })
    }

    /// Without the component's prefix.
    fn name_of(&self, written: &Written<'a>) -> &'a str {
        written.name.strip_prefix(self.name_prefix).unwrap_or(written.name)
    }

    /// The text of `__metadata__`, and the types of the file's blocks.
    fn metadata_with_blocks(&self) -> Cow<'a, BTreeMap<String, String>> {
        let mut metadata = Cow::Borrowed(self.metadata);
        for (_, written) in self.written() {
            if let Some(block) = written.block {
                let key = format!("{BLOCK_KEY}{}", self.name_of(&written));
                metadata.to_mut().insert(key, block.to_string());
            }
        }
        metadata
    }

    /// Where the first tensor begins in the file: a multiple of 4096.
    pub(super) fn data_start(&self) -> u64 {
        data_start_after(self.text_bytes())
    }

    /// Writes length, text and padding.
    ///
    /// # Errors
    /// Those of `out`.
    pub(super) fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let text_bytes = self.text_bytes();
        let header_bytes = data_start_after(text_bytes) - PREFIX_BYTES;
        out.write_all(&header_bytes.to_le_bytes())?;
        serde_json::to_writer(&mut *out, self)?;
        out.write_all(&[b' '; 4096][..to_usize(header_bytes - text_bytes)])
    }

    fn text_bytes(&self) -> u64 {
        let mut counter = Counter(0);
        serde_json::to_writer(&mut counter, self).expect("counting does not fail");
        counter.0
    }
}

fn data_start_after(text_bytes: u64) -> u64 {
    Alignment::PAGE.up(PREFIX_BYTES + text_bytes).expect("a header is shorter than memory")
}

/// Counts the bytes that are written to it.
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
