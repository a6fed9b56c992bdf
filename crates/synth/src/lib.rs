//! `loadcheck synth`: makes a checkpoint with a real model's tensor names, shapes and dtypes,
//! filled with random bytes that are finite as floats and never zero, so that anyone can try a
//! loader without a download.
//!
//! ```text
//! preset or config.json ─> config ─> architecture ─> shards ─> directory ─> writer ─> publish
//!                          (JSON)    (tensors)       (files)   (checks)     (bytes)   (names)
//! ```
//!
//! The result opens in whatever opens the model itself: `config.json`, shards and index are laid
//! out as transformers writes them. The weights are noise, so that the model computes nonsense. No
//! tokenizer is made.
//!
//! It knows neither arguments nor the terminal: the program hands over a [`SynthRequest`] and
//! prints the [`SynthReport`].

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
mod writer;

pub use directory::belongs_to_checkpoint;
pub use error::SynthError;
pub use onelayer_system::FloatType;
pub use presets::presets;

use config::ModelConfig;
use directory::TargetDirectory;
use shards::ShardPlan;
use writer::WriteJob;

/// The size of a shard where the caller does not say: 5 GB, as huggingface_hub has it.
pub const SHARD_BYTES_DEFAULT: u64 = 5_000_000_000;

/// A file never takes less than whole blocks; what most file systems use.
const BLOCK_BYTES_MIN: u64 = 4096;

/// The name of the index.
const INDEX_NAME: &str = "model.safetensors.index.json";

/// The name of the configuration.
const CONFIG_NAME: &str = "config.json";

/// What to make, and where.
#[derive(Clone, Debug)]
pub struct SynthRequest {
    /// A preset's name, or the path of a `config.json` or of a directory that holds one. A preset's
    /// name wins over a file of that name; a path with a slash is always a path.
    pub source: String,
    /// The directory to write into; made if it is missing.
    pub directory: PathBuf,
    /// Another element type than the configuration's.
    pub dtype: Option<FloatType>,
    /// Keep only this many layers (of encoder and decoder each, where there are both).
    pub layer_count: Option<u64>,
    /// Most bytes of tensors in one file; a larger tensor has a file of its own.
    pub shard_bytes_max: u64,
    /// The same seed gives the same bytes, whatever the number of threads and the size of the
    /// shards.
    pub seed: u64,
    /// Threads that make and write bytes, each with a buffer of 4 MiB; none: as many as cores, from
    /// 2 to 4.
    pub thread_count: Option<usize>,
    /// Overwrite files of the same names in a directory that is not empty.
    pub force: bool,
    /// Set it (from a signal handler, say) to stop early; what was written is then removed.
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

/// What was made.
#[derive(Clone, Debug, PartialEq)]
pub struct SynthReport {
    /// The directory.
    pub directory: PathBuf,
    /// The architecture.
    pub model_type: String,
    /// The element type of every tensor.
    pub dtype: FloatType,
    /// Every file, with its length: tensors first, then the index, then the configuration.
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
    /// Whether the page cache was bypassed; where not, it was dropped behind the writer.
    pub direct: bool,
    /// From the first block to the last sync and rename.
    pub elapsed: Duration,
}

/// Makes a checkpoint.
///
/// `progress` is called on this thread with the bytes written and the bytes to be written, first
/// with zero, then after every block. Memory is one block of 4 MiB per thread, and the headers.
///
/// # Errors
///
/// Nothing is written if the request cannot be met: an unknown source, a configuration that cannot
/// be laid out, a directory that is not empty, too little free space. An error after that (a full
/// disk, a failed write or sync, an interruption) removes what was made, the directory included if
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
        tensor_count: u64::try_from(layout.tensors.len()).expect("a number of tensors fits 64 bits"),
        parameter_count: plan.parameter_count,
        tensor_bytes: plan.tensor_bytes,
        file_bytes: plan.file_bytes(),
        seed: request.seed,
        direct: written.direct,
        elapsed: start.elapsed(),
    })
}

/// Finds the configuration that the source names.
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

/// The small files beside the tensors, in the order in which they get their names.
fn side_files(config: &ModelConfig, plan: &ShardPlan) -> Vec<(&'static str, String)> {
    let index = plan.index_text.iter().map(|text| (INDEX_NAME, text.clone()));
    index.chain([(CONFIG_NAME, config.to_text())]).collect()
}

/// Room that all files take, in whole blocks.
fn needed_bytes(plan: &ShardPlan, side_files: &[(&str, String)]) -> u64 {
    let shards = plan.shards.iter().map(|shard| shard.file_bytes);
    let lengths = shards.chain(side_files.iter().map(|(_, text)| length(text)));
    lengths.map(|bytes| bytes.next_multiple_of(BLOCK_BYTES_MIN)).sum()
}

fn length(text: &str) -> u64 {
    u64::try_from(text.len()).expect("a length in memory fits 64 bits")
}

/// Two threads hide one's generating behind the other's writing; more than four gain nothing on one
/// disk.
fn thread_count_default() -> usize {
    std::thread::available_parallelism().map_or(2, |cores| cores.get().clamp(2, 4))
}
