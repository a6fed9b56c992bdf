//! How other loaders load: the simple strategies that `compare` puts beside our own, on the same
//! files.
//!
//! Each does what a loader of its kind does, with one thread and without tricks, so that its
//! numbers are typical.
//!
//! | strategy | does | keeps |
//! |---|---|---|
//! | `mmap` | maps each file whole, touches every page of every tensor | the mappings |
//! | `read` | reads each file whole into memory | the files |
//! | `pread` | reads one tensor at a time into memory of its own | the tensors, unless all is dropped |
//! | `direct` | the same past the page cache | the same |
//!
//! At the end, every byte of every selected tensor has been in memory; with `read`, the bytes
//! between them too. Everything that is kept stays until the [`Held`] is dropped.

use std::path::{Path, PathBuf};

use onelayer::checkpoint::{Checkpoint, TensorId};
use serde::{Deserialize, Serialize};

use crate::problem::{Code, Problem};

mod direct;
mod mapped;
mod owned;

pub(crate) use self::mapped::Mapping;
pub(crate) use self::owned::Owned;

/// A way of loading that other loaders use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum SimpleStrategy {
    /// Map everything and keep it.
    Mmap,
    /// Read whole files.
    Read,
    /// Read tensor by tensor.
    Pread,
    /// Read tensor by tensor, past the page cache.
    Direct,
}

/// A way of loading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Strategy {
    /// Ours.
    Stream,
    /// One that other loaders use.
    Simple(SimpleStrategy),
}

impl Strategy {
    /// All of them, as they are spelt.
    pub(crate) const ALL: [(Self, &'static str); 5] = [
        (Self::Stream, "stream"),
        (Self::Simple(SimpleStrategy::Mmap), "mmap"),
        (Self::Simple(SimpleStrategy::Read), "read"),
        (Self::Simple(SimpleStrategy::Pread), "pread"),
        (Self::Simple(SimpleStrategy::Direct), "direct"),
    ];

    /// The one of that name.
    ///
    /// # Errors
    /// There is none: [`Code::Usage`].
    pub(crate) fn parse(name: &str) -> Result<Self, Problem> {
        let found = Self::ALL.iter().find(|(_, known)| *known == name);
        found.map(|(strategy, _)| *strategy).ok_or_else(|| {
            let known = Self::ALL.map(|(_, known)| known).join(", ");
            Problem::new(Code::Usage, format!("there is no strategy `{name}`"))
                .at("--strategy")
                .help(format!("there are {known}; with {{strategy}} in --cmd a name is free text"))
        })
    }

    /// Its name.
    pub(crate) fn name(self) -> &'static str {
        Self::ALL.iter().find(|(strategy, _)| *strategy == self).map_or("", |(_, name)| name)
    }
}

/// Memory that a load still holds when it is done.
#[derive(Debug, Default)]
pub(crate) struct Held {
    mappings: Vec<Mapping>,
    owned: Vec<Owned>,
}

/// Why a load ended early.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum StrategyError {
    /// It was asked to.
    #[error("cancelled")]
    Cancelled,
    /// A file could not be opened, mapped or read.
    #[error("cannot {action}: {source}")]
    File {
        /// The action that failed.
        action: &'static str,
        /// With which file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A file is shorter than its header says.
    #[error("the file ends before byte {end_bytes} that its header promises")]
    EndOfFile {
        /// Which file.
        path: PathBuf,
        /// Where the tensor ends.
        end_bytes: u64,
    },
    /// There is no memory for a tensor or a file.
    #[error("cannot get {len_bytes} bytes of memory: {source}")]
    Memory {
        /// How much was asked for.
        len_bytes: u64,
        /// The system's answer.
        source: std::io::Error,
    },
}

impl StrategyError {
    /// The file it is about.
    pub(crate) fn path(&self) -> Option<&Path> {
        match self {
            Self::File { path, .. } | Self::EndOfFile { path, .. } => Some(path),
            Self::Cancelled | Self::Memory { .. } => None,
        }
    }
}

/// A step of a load.
pub(crate) enum Event<'a> {
    /// A file or a tensor begins.
    Begins(&'a str),
    /// So many more bytes have arrived.
    Arrived(u64),
    /// Something was done in another way than the strategy says.
    Note(String),
}

/// Hears each step. An error ends the load.
pub(crate) type Observe<'a> = dyn FnMut(Event<'_>) -> Result<(), StrategyError> + 'a;

/// Loads `tensors` (sorted as the checkpoint has them) by a strategy.
///
/// With `keeps`, `pread` and `direct` keep every tensor; the other two always keep what they have.
///
/// # Errors
/// [`StrategyError`]; what was held is given back then.
pub(crate) fn load(
    strategy: SimpleStrategy,
    checkpoint: &Checkpoint,
    tensors: &[TensorId],
    keeps: bool,
    observe: &mut Observe<'_>,
) -> Result<Held, StrategyError> {
    let mut held = Held::default();
    for of_shard in tensors.chunk_by(|left, right| same_shard(checkpoint, *left, *right)) {
        let shard = checkpoint.shard(checkpoint.tensor(of_shard[0]).shard);
        let path = shard.path.as_path();
        match strategy {
            SimpleStrategy::Mmap => {
                let mapping = Mapping::of_file(path)?;
                for tensor in of_shard {
                    let tensor = checkpoint.tensor(*tensor);
                    observe(Event::Begins(tensor.name))?;
                    mapping.touch(tensor.extent, path, observe)?;
                }
                held.mappings.push(mapping);
            }
            SimpleStrategy::Read => {
                observe(Event::Begins(&path.file_name().unwrap_or_default().to_string_lossy()))?;
                held.owned.push(owned::file(path, observe)?);
            }
            SimpleStrategy::Pread | SimpleStrategy::Direct => {
                let mut reader = direct::Reader::open(path, strategy == SimpleStrategy::Direct, observe)?;
                for tensor in of_shard {
                    let tensor = checkpoint.tensor(*tensor);
                    observe(Event::Begins(tensor.name))?;
                    let owned = reader.tensor(tensor.extent, observe)?;
                    if keeps {
                        held.owned.push(owned);
                    }
                }
            }
        }
    }
    Ok(held)
}

fn same_shard(checkpoint: &Checkpoint, left: TensorId, right: TensorId) -> bool {
    checkpoint.tensor(left).shard == checkpoint.tensor(right).shard
}

/// Bytes of host memory that a strategy takes for `tensors`, beside what the kernel can take back.
///
/// # Errors
/// [`StrategyError::File`] if a file cannot be looked up.
pub(crate) fn needed_bytes(
    strategy: SimpleStrategy,
    checkpoint: &Checkpoint,
    tensors: &[TensorId],
    keeps: bool,
) -> Result<u64, StrategyError> {
    let sizes = tensors.iter().map(|tensor| checkpoint.tensor(*tensor).len_bytes());
    match strategy {
        SimpleStrategy::Mmap => Ok(0),
        SimpleStrategy::Pread | SimpleStrategy::Direct if keeps => Ok(sizes.fold(0, u64::saturating_add)),
        SimpleStrategy::Pread | SimpleStrategy::Direct => Ok(sizes.max().unwrap_or(0)),
        SimpleStrategy::Read => {
            let mut total_bytes = 0_u64;
            for of_shard in tensors.chunk_by(|left, right| same_shard(checkpoint, *left, *right)) {
                let path = checkpoint.shard(checkpoint.tensor(of_shard[0]).shard).path.as_path();
                let metadata = std::fs::metadata(path).map_err(|source| failed("look up", path, source))?;
                total_bytes = total_bytes.saturating_add(metadata.len());
            }
            Ok(total_bytes)
        }
    }
}

fn failed(action: &'static str, path: &Path, source: std::io::Error) -> StrategyError {
    StrategyError::File { action, path: path.to_owned(), source }
}

#[cfg(test)]
mod tests;
