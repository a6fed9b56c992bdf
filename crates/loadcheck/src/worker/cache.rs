//! The state of the page cache before a run: brought about, then checked, never believed.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use onelayer::checkpoint::Checkpoint;
use onelayer_probe::{drop_cache, residency};

use crate::args::CacheArg;
use crate::numbers::to_f64;

/// The beginning of a note on a state that was not reached.
pub(crate) const NOT_AS_ASKED: &str = "asked for a";
/// Enough to keep a disk busy while the pages that were read stay in the cache.
const BLOCK_BYTES: usize = 4 << 20;

/// How often a state is brought about that is not there afterwards: a machine that gives memory
/// back to its host takes pages away at any moment.
const TRIES: u32 = 3;

/// Makes the files of a checkpoint cold or warm; returns the share of their pages that is cached
/// afterwards, or `None` where the kernel does not tell. What did not work becomes a note.
pub(super) fn bring_about(
    checkpoint: &Checkpoint,
    state: CacheArg,
    cancel: &AtomicBool,
    notes: &mut Vec<String>,
) -> Option<f64> {
    let mut tries = 0;
    let (cached_bytes, file_bytes) = loop {
        let failures = apply(checkpoint, state, cancel);
        tries += 1;
        let Some((cached_bytes, file_bytes)) = cached(checkpoint) else {
            notes.extend(failures);
            return None;
        };
        let may_help = match state {
            CacheArg::Cold => cached_bytes > 0,
            // Where more is missing, memory does not hold the files.
            CacheArg::Warm => cached_bytes < file_bytes && cached_bytes >= file_bytes - file_bytes / 10,
            CacheArg::Asis => false,
        };
        if !may_help || tries == TRIES || !failures.is_empty() || cancel.load(Ordering::Relaxed) {
            notes.extend(failures);
            break (cached_bytes, file_bytes);
        }
    };
    let share = if file_bytes == 0 { 0.0 } else { to_f64(cached_bytes) / to_f64(file_bytes) };
    match state {
        CacheArg::Cold if cached_bytes > 0 => notes
            .push(format!("{NOT_AS_ASKED} cold cache, {:.1} % of the source is still cached", share * 100.0)),
        CacheArg::Warm if cached_bytes < file_bytes => notes
            .push(format!("{NOT_AS_ASKED} warm cache, only {:.1} % of the source is cached", share * 100.0)),
        _ => {}
    }
    Some(share)
}

/// Drops the files' pages or reads them in; what of that did not work.
fn apply(checkpoint: &Checkpoint, state: CacheArg, cancel: &AtomicBool) -> Vec<String> {
    let mut failures = Vec::new();
    for shard in checkpoint.shards() {
        let done = match state {
            CacheArg::Cold => drop_cache(&shard.path).map(|_| ()).map_err(|error| error.to_string()),
            CacheArg::Warm => warm(&shard.path, cancel).map_err(|error| {
                format!("cannot warm the page cache with {}: {error}", shard.path.display())
            }),
            CacheArg::Asis => Ok(()),
        };
        failures.extend(done.err());
    }
    failures
}

/// Bytes that are cached, and bytes in all; `None` where the kernel does not tell.
fn cached(checkpoint: &Checkpoint) -> Option<(u64, u64)> {
    let (mut cached_bytes, mut file_bytes) = (0_u64, 0_u64);
    for shard in checkpoint.shards() {
        let residency = residency(&shard.path).value()?;
        cached_bytes = cached_bytes.saturating_add(residency.resident_bytes);
        file_bytes = file_bytes.saturating_add(residency.file_bytes);
    }
    Some((cached_bytes, file_bytes))
}

/// Reads a file and throws the bytes away.
fn warm(path: &Path, cancel: &AtomicBool) -> std::io::Result<()> {
    let mut file = File::open(path)?;
    let mut block = vec![0; BLOCK_BYTES];
    while !cancel.load(Ordering::Relaxed) && file.read(&mut block)? > 0 {}
    Ok(())
}
