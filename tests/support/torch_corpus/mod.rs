//! Hostile PyTorch files, each with the verdict that a strict reader must reach. Nothing here
//! shares code with the reader.

#![allow(dead_code, reason = "each test program uses a part")]

use onelayer_testing::torch_file::{Pickle, ZipParts, archive, vector};

pub(crate) mod old;
pub(crate) mod pickles;
pub(crate) mod tensors;
pub(crate) mod zips;

/// What must become of a file.
#[derive(Clone, Debug)]
pub(crate) enum Verdict {
    /// Refused with this kind of error, and this text in the message.
    Refused(&'static str, String),
    /// Read: exactly these tensors, each with the bytes 1, 2, 3, 4.
    Read(&'static [&'static str]),
}

/// A file.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) bytes: Vec<u8>,
    pub(crate) verdict: Verdict,
}

/// The storage of all cases.
pub(crate) const DATA: [u8; 4] = [1, 2, 3, 4];

pub(crate) fn refused(name: impl Into<String>, bytes: Vec<u8>, kind: &'static str, text: &str) -> Case {
    Case { name: name.into(), bytes, verdict: Verdict::Refused(kind, text.to_owned()) }
}

pub(crate) fn read(name: impl Into<String>, bytes: Vec<u8>, tensors: &'static [&'static str]) -> Case {
    Case { name: name.into(), bytes, verdict: Verdict::Read(tensors) }
}

/// A pickle of one tensor `w` over the whole storage.
pub(crate) fn plain_pickle() -> Vec<u8> {
    Pickle::new().raw(b"}").text("w").tensor("ByteStorage", "0", 4, &vector(&[4])).raw(b"s").end()
}

/// The archive that all changes begin with.
pub(crate) fn plain() -> (Vec<u8>, ZipParts) {
    archive(&plain_pickle(), &[&DATA])
}

/// An archive of this pickle.
pub(crate) fn zipped(pickle: &[u8]) -> Vec<u8> {
    archive(pickle, &[&DATA]).0
}

/// All cases.
pub(crate) fn cases() -> Vec<Case> {
    let groups = [zips::cases(), pickles::cases(), tensors::cases(), old::cases()];
    groups.into_iter().flatten().collect()
}
