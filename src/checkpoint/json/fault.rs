//! Faults that the JSON reader finds. The caller adds the file and the section.

use std::io;
use std::path::Path;

use super::super::error::{CheckpointError, JsonSection, kept};

/// A fault in a JSON text.
#[derive(Debug)]
pub(in super::super) enum JsonFault {
    /// Reading failed.
    Io(io::Error),
    /// The text breaks the grammar, or has a value of the wrong type.
    Syntax {
        /// Byte offset in the file.
        offset: u64,
        /// The allowed text.
        expected: &'static str,
        /// The text found.
        found: String,
    },
    /// An object has a key twice.
    Duplicate(String),
}

impl JsonFault {
    /// The error for a file and a section of its text.
    pub(in super::super) fn at(self, path: &Path, section: JsonSection) -> CheckpointError {
        let path = path.to_owned();
        match self {
            Self::Io(source) => CheckpointError::Io { path, operation: "read", source },
            Self::Syntax { offset, expected, found } => {
                CheckpointError::Syntax { path, section, offset, expected, found }
            }
            Self::Duplicate(key) => CheckpointError::DuplicateKey { path, section, key: kept(&key) },
        }
    }
}

/// A byte in words.
pub(in super::super) fn describe(byte: Option<u8>) -> String {
    match byte {
        None => "the end".to_owned(),
        Some(byte @ 0x21..=0x7e) => format!("`{}`", char::from(byte)),
        Some(0xef) => "byte 0xef (the start of a byte order mark?)".to_owned(),
        Some(byte) => format!("byte {byte:#04x}"),
    }
}
