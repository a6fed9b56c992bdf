//! PyTorch's zip archives: what `torch.save` writes since torch 1.6.
//!
//! One root folder holds `data.pkl`, a file per storage (`data/0`, ...) and small files about the
//! format. Every entry is stored as it is, so the directory and the local headers tell where each
//! storage lies.
//!
//! | file | does |
//! |---|---|
//! | `entries` | the directory |
//! | `local` | the local headers |
//! | `end` | the records at the end of the file |

use super::super::CheckpointError;
use super::super::format::Input;
use super::pickle::{self, Arena, Item, Persistent, Ref, Refusal};
use super::storage_id::StorageId;
use crate::footprint::Held;
use crate::units::{ByteRange, to_u64, to_usize};

pub(super) use self::entries::Entries;

mod end;
mod entries;
mod local;

/// The longest `byteorder` entry that is looked at.
const BYTE_ORDER_BYTES_MAX: u64 = 16;

/// A zip archive whose pickle was read.
pub(super) struct Archive {
    entries: Entries,
    /// The position of the storage that was found last.
    last: usize,
}

impl Archive {
    /// Reads the directory and the pickle. Returns the pickle's value, too.
    pub(super) fn read(input: &Input<'_>, arena: &mut Arena) -> Result<(Self, Ref), CheckpointError> {
        let directory = end::find(input)?;
        let mut entries = Entries::read(input, directory, arena)?;
        local::locate(input, &mut entries, arena, directory.text.start())?;
        entries.finish(input, arena)?;
        check_byte_order(input, entries.named("byteorder", arena))?;
        let Some(text) = entries.named("data.pkl", arena) else {
            let found = "a zip archive without the entry `data.pkl`";
            return Err(input.refused("", found, "only archives that torch.save wrote can be read"));
        };
        let mut archive = Self { entries, last: 0 };
        let (value, _) = pickle::read(input, text, arena, &mut archive).map_err(|fault| *fault)?;
        Ok((archive, value))
    }

    /// The first byte of a storage in the file.
    pub(super) fn start_of(&self, storage: u32) -> u64 {
        self.entries.bytes(to_usize(u64::from(storage))).start()
    }

    pub(super) fn add_to(&self, held: Held) -> Held {
        self.entries.add_to(held)
    }
}

fn check_byte_order(input: &Input<'_>, entry: Option<ByteRange>) -> Result<(), CheckpointError> {
    let Some(entry) = entry else { return Ok(()) };
    let mut text = vec![0; to_usize(entry.len_bytes().min(BYTE_ORDER_BYTES_MAX))];
    end::read(input, entry.start(), &mut text)?;
    match &text[..] {
        b"little" => Ok(()),
        b"big" => Err(input.refused(
            "",
            "the bytes of its tensors in big-endian order",
            "load and save it once with torch on this machine",
        )),
        _ => Err(input.invalid(entry.start(), "expected the byte order `little` or `big`")),
    }
}

impl Persistent for Archive {
    fn load(&mut self, arena: &mut Arena, id: Ref) -> Result<Ref, Refusal> {
        let StorageId { element, key, count, .. } = StorageId::of(arena, id)?;
        let Some(position) = self.entries.storage(key, self.last, arena) else {
            return Err(Refusal::Invalid(format!(
                "expected the entry `data/{}`, found none",
                key.escape_debug()
            )));
        };
        let (found_bytes, bytes) =
            (self.entries.bytes(position).len_bytes(), count.checked_mul(element.bytes()));
        if bytes.is_none_or(|bytes| bytes > found_bytes) {
            let reason = format!(
                "storage `{}` of {count} elements of {} bytes, found {found_bytes} bytes in its entry",
                key.escape_debug(),
                element.bytes()
            );
            return Err(Refusal::Invalid(reason));
        }
        self.last = position;
        let id = u32::try_from(to_u64(position)).map_err(|_| Refusal::Full)?;
        Ok(arena.push(Item::Storage { element, id, count })?)
    }
}
