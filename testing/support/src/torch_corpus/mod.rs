//! Hostile PyTorch files, each with the verdict that a strict reader must reach. Nothing here
//! shares code with the reader.

use crate::torch_file::{Pickle, ZipParts, archive, vector};

pub mod old;
pub mod pickles;
pub mod tensors;
pub mod zips;

/// What must become of a file.
#[derive(Clone, Debug)]
pub enum Verdict {
    /// Refused with this kind of error, and this text in the message.
    Refused(&'static str, String),
    /// Read: exactly these tensors, each with the bytes 1, 2, 3, 4.
    Read(&'static [&'static str]),
}

/// A file.
#[derive(Clone, Debug)]
pub struct Case {
    pub name: String,
    pub bytes: Vec<u8>,
    pub verdict: Verdict,
}

/// The storage of all cases.
pub const DATA: [u8; 4] = [1, 2, 3, 4];

pub fn refused(name: impl Into<String>, bytes: Vec<u8>, kind: &'static str, text: &str) -> Case {
    Case { name: name.into(), bytes, verdict: Verdict::Refused(kind, text.to_owned()) }
}

pub fn read(name: impl Into<String>, bytes: Vec<u8>, tensors: &'static [&'static str]) -> Case {
    Case { name: name.into(), bytes, verdict: Verdict::Read(tensors) }
}

/// A pickle of one tensor `w` over the whole storage.
pub fn plain_pickle() -> Vec<u8> {
    Pickle::new().raw(b"}").text("w").tensor("ByteStorage", "0", 4, &vector(&[4])).raw(b"s").end()
}

/// The archive that all changes begin with.
pub fn plain() -> (Vec<u8>, ZipParts) {
    archive(&plain_pickle(), &[&DATA])
}

/// An archive of this pickle.
pub fn zipped(pickle: &[u8]) -> Vec<u8> {
    archive(pickle, &[&DATA]).0
}

/// All cases.
pub fn cases() -> Vec<Case> {
    let groups = [zips::cases(), pickles::cases(), tensors::cases(), old::cases()];
    groups.into_iter().flatten().collect()
}
