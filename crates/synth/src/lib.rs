//! Makes checkpoints of random weights with the tensor names, shapes and dtypes of real models, to
//! try a loader without a download. The weights are finite and never zero.
//!
//! ```text
//! preset or config.json ─> config ─> architecture ─> shards ─> directory ─> writer ─> publish
//!                          (JSON)    (tensors)       (files)   (checks)     (bytes)   (names)
//! ```
//!
//! Every program that opens the real model opens the result: `config.json`, shards and index are
//! laid out as transformers writes them. There is no tokenizer.
//!
//! `loadcheck synth` passes a [`SynthRequest`] to [`run`] and prints the [`SynthReport`].
//!
//! A file uses only files to its left in the picture, and `error`. `presets` feeds `config`;
//! `decoder`, `other` and `tensor_list` belong to `architecture`, `random` to `writer`.

use onelayer_system::units::to_u64;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

mod architecture;
mod config;
mod decoder;
mod directory;
#[cfg(test)]
mod end_to_end;
mod error;
mod other;
mod presets;
mod random;
#[cfg(test)]
mod references;
mod shards;
mod tensor_list;
mod writer;

pub use directory::belongs_to_checkpoint;
pub use error::SynthError;
pub use onelayer_system::FloatType;
pub use presets::presets;

use config::ModelConfig;
use directory::TargetDirectory;
use shards::ShardPlan;
use writer::WriteJob;

/// The default size of a shard: 5 GB, as in huggingface_hub.
pub const SHARD_BYTES_DEFAULT: u64 = 5_000_000_000;

/// Files take whole blocks of this size on most file systems.
const BLOCK_BYTES_MIN: u64 = 4096;

/// The name of the index.
const INDEX_NAME: &str = "model.safetensors.index.json";

/// The name of the configuration.
const CONFIG_NAME: &str = "config.json";

/// A checkpoint to make.
#[derive(Clone, Debug)]
pub struct SynthRequest {
    /// A preset's name, or the path of a `config.json` or of a directory with one. A preset wins
    /// over a file of the same name; text with a slash is always a path.
    pub source: String,
    /// The directory to write into. It is created if missing.
    pub directory: PathBuf,
    /// The element type; `None`: that of the configuration.
    pub dtype: Option<FloatType>,
    /// Keep only this many layers, of encoder and decoder each if there are both.
    pub layer_count: Option<u64>,
    /// The most bytes of tensors in one file. A larger tensor gets a file for itself.
    pub shard_bytes_max: u64,
    /// The same seed gives the same tensors, for any number of threads and any size of the shards.
    pub seed: u64,
    /// Threads that generate and write, each with a buffer of 4 MiB. `None`: as many as cores, from
    /// 2 to 4.
    pub thread_count: Option<usize>,
    /// Overwrite files of the same names in a directory that is not empty.
    pub force: bool,
    /// Set it, for instance from a signal handler, to stop early. All written files are then
    /// removed.
    pub cancel: Arc<AtomicBool>,
}

impl SynthRequest {
    /// A request with the defaults: the configuration's dtype, all layers, shards of 5 GB, seed 0,
    /// no overwriting.
    pub fn new(source: impl Into<String>, directory: impl Into<PathBuf>) -> Self {
        Self {
            source: source.into(),
            directory: directory.into(),
            dtype: None,
            layer_count: None,
            shard_bytes_max: SHARD_BYTES_DEFAULT,
            seed: 0,
            thread_count: None,
            force: false,
            cancel: Arc::default(),
        }
    }
}

/// The checkpoint that was made.
#[derive(Clone, Debug, PartialEq)]
pub struct SynthReport {
    /// The directory.
    pub directory: PathBuf,
    /// The architecture.
    pub model_type: String,
    /// The element type of every tensor.
    pub dtype: FloatType,
    /// Every file with its length: shards, then the index, then the configuration.
    pub files: Vec<(String, u64)>,
    /// Number of tensors.
    pub tensor_count: u64,
    /// Number of elements of all tensors.
    pub parameter_count: u64,
    /// Bytes of all tensors.
    pub tensor_bytes: u64,
    /// Bytes of all files of tensors, headers included.
    pub file_bytes: u64,
    /// The seed that was used.
    pub seed: u64,
    /// Whether the page cache was bypassed. Otherwise cached pages were dropped after writing.
    pub direct: bool,
    /// Time from the first block to the last sync and rename.
    pub elapsed: Duration,
}

/// Makes a checkpoint.
///
/// `progress` is called on this thread with the bytes written so far and the total: first with
/// zero, then after every block. Memory: one block of 4 MiB per thread, and the headers.
///
/// # Errors
///
/// Nothing is written if the request cannot be met: an unknown source, an unsupported
/// configuration, a directory that is not empty, too little free space. After a later error (a full
/// disk, a failed write or sync, an interruption), all new files are removed, and the directory if
/// it was new.
pub fn run(request: &SynthRequest, progress: &mut dyn FnMut(u64, u64)) -> Result<SynthReport, SynthError> {
    let mut config = read_source(&request.source)?;
    if let Some(layer_count) = request.layer_count {
        architecture::cut_layers(&mut config, layer_count)?;
    }
    let dtype = match request.dtype {
        Some(dtype) => dtype,
        None => config.dtype()?,
    };
    let layout = architecture::layout(&config)?;
    config.set("architectures", vec![layout.class_name]);
    config.set_dtype(dtype);
    let plan = shards::plan(&config, &layout.tensors, dtype, request.shard_bytes_max)?;
    let side_files = side_files(&config, &plan);
    let names = plan.shards.iter().map(|shard| shard.name.clone());
    let names: Vec<String> = names.chain(side_files.iter().map(|(name, _)| (*name).to_owned())).collect();

    let target =
        TargetDirectory::open(&request.directory, request.force, &names, needed_bytes(&plan, &side_files))?;
    let start = Instant::now();
    let job = WriteJob {
        plan: &plan,
        target: &target,
        dtype,
        seed: request.seed,
        thread_count: request.thread_count.unwrap_or_else(thread_count_default),
        cancel: &request.cancel,
    };
    let written = writer::write(&job, progress)?;
    let mut parts = written.parts;
    for (name, text) in &side_files {
        parts.push(target.write_small(name, text)?);
    }
    target.publish(&parts)?;

    let mut files: Vec<_> = plan.shards.iter().map(|shard| (shard.name.clone(), shard.file_bytes)).collect();
    files.extend(side_files.iter().map(|(name, text)| ((*name).to_owned(), length(text))));
    Ok(SynthReport {
        directory: request.directory.clone(),
        model_type: config.model_type().to_owned(),
        dtype,
        files,
        tensor_count: to_u64(layout.tensors.len()),
        parameter_count: plan.parameter_count,
        tensor_bytes: plan.tensor_bytes,
        file_bytes: plan.file_bytes(),
        seed: request.seed,
        direct: written.direct,
        elapsed: start.elapsed(),
    })
}

/// Reads the configuration that `source` names.
fn read_source(source: &str) -> Result<ModelConfig, SynthError> {
    match presets::find(source) {
        Ok(config) => Ok(config),
        Err(unknown) => {
            let path = Path::new(source);
            let looks_like_path = source.contains('/') || source.ends_with(".json");
            if looks_like_path || path.exists() { ModelConfig::read(path) } else { Err(unknown) }
        }
    }
}

/// The small files beside the shards, in the order of publishing.
fn side_files(config: &ModelConfig, plan: &ShardPlan) -> Vec<(&'static str, String)> {
    let index = plan.index_text.iter().map(|text| (INDEX_NAME, text.clone()));
    index.chain([(CONFIG_NAME, config.to_text())]).collect()
}

/// Space of all files, in whole blocks.
fn needed_bytes(plan: &ShardPlan, side_files: &[(&str, String)]) -> u64 {
    let shards = plan.shards.iter().map(|shard| shard.file_bytes);
    let lengths = shards.chain(side_files.iter().map(|(_, text)| length(text)));
    lengths.map(|bytes| bytes.next_multiple_of(BLOCK_BYTES_MIN)).sum()
}

fn length(text: &str) -> u64 {
    to_u64(text.len())
}

/// With two threads, one generates while the other writes. More than four gain nothing on one disk.
fn thread_count_default() -> usize {
    std::thread::available_parallelism().map_or(2, |cores| cores.get().clamp(2, 4))
}
