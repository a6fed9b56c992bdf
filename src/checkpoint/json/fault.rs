//! What the JSON reader finds wrong, before anyone knows which file and which part of it that was.

use std::io;
use std::path::Path;

use super::super::error::{CheckpointError, JsonSection, kept};

/// What is wrong with a text.
#[derive(Debug)]
pub(in super::super) enum JsonFault {
    /// The system refused to read on.
    Io(io::Error),
    /// Something stands where it may not.
    Syntax {
        /// Where, counted as the reader was told to count.
        offset: u64,
        /// What may stand there.
        expected: &'static str,
        /// What stands there.
        found: String,
    },
    /// A key stands twice in one object.
    Duplicate(String),
}

impl JsonFault {
    /// The error for that file and that part of its text.
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
