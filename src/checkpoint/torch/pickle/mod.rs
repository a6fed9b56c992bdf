//! A machine that reads pickles and executes nothing.
//!
//! A pickle is a program for a stack machine that may call any function. Here it only builds values
//! in an [`Arena`]: numbers, texts, containers, storages and tensors. A call of a function that is
//! not on the allow-list gives an opaque object.
//!
//! | file | does |
//! |---|---|
//! | `machine` | the second pass: runs the opcodes |
//! | `object` | what calls, states and added values mean |
//! | `arena`, `class` | the values; the classes that mean something |
//! | `scan` | the first pass: the end, and what is fetched from the memo |
//! | `opcode` | the opcodes |

use super::super::CheckpointError;
use super::stream::{Fault, Stream};
use crate::units::{ByteRange, to_u64};

pub(super) use self::arena::{Arena, Chain, Item, Ref, Slice, Unreadable};
pub(super) use self::class::Known;
pub(super) use self::machine::Persistent;
pub(super) use self::object::{Place, Refusal, placed};
use super::super::format::Input;

mod arena;
mod class;
mod machine;
mod object;
mod opcode;
mod scan;

/// Reads the pickle at the start of `text`. Returns its value, and the offset of its end.
pub(super) fn read(
    input: &Input<'_>,
    text: ByteRange,
    arena: &mut Arena,
    persistent: &mut impl Persistent,
) -> Result<(Ref, u64), Fault> {
    let limit_bytes = input.pickle_bytes_max();
    let within = ByteRange::with_len(text.start(), text.len_bytes().min(limit_bytes)).unwrap_or(text);
    let mut stream = Stream::new(input, within);
    let survey = match scan::scan(&mut stream) {
        Err(_) if stream.ran_out() && within != text => {
            let (path, what, found_bytes) = (input.path.to_owned(), "pickle", text.len_bytes());
            return Err(Box::new(CheckpointError::OverLimit { path, what, found_bytes, limit_bytes }));
        }
        other => other?,
    };
    let memo_bytes = survey.fetched.heap_bytes() + 8 * to_u64(survey.fetched.len());
    if arena.meter.add(memo_bytes).is_err() {
        return Err(fault(input, arena, text.start(), Refusal::Full));
    }
    let text = ByteRange::new(text.start(), survey.end).expect("a pickle ends behind its start");
    let mut stream = Stream::new(input, text);
    let value = machine::Machine::new(&mut stream, arena, persistent, survey.fetched).run()?;
    Ok((value, survey.end))
}

/// The error for a value that was refused at an offset of the file.
pub(super) fn fault(input: &Input<'_>, arena: &Arena, at: u64, refusal: Refusal) -> Fault {
    Box::new(match refusal {
        Refusal::Invalid(reason) => input.invalid(at, reason),
        Refusal::Full => {
            let (path, limit_bytes) = (input.path.to_owned(), arena.meter.limit_bytes());
            let (what, found_bytes) = ("description of the pickle", limit_bytes.saturating_add(1));
            CheckpointError::OverLimit { path, what, found_bytes, limit_bytes }
        }
    })
}
