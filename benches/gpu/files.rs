#![allow(clippy::as_conversions, clippy::cast_precision_loss, reason = "rounded figures")]
//! Rates of reading files: from the page cache into a ring by thread count, beside copies to the
//! device, and from disk.

use std::fs::File;
use std::io::{self, Read};
use std::path::PathBuf;
use std::sync::Barrier;
use std::time::Instant;

use serde_json::{Value, json};

use crate::copies::{Bench, PROBE};
use crate::driver::{DriverError, Gpu};
use crate::plain::{HugeBuffer, Plain};
use crate::rate::{Effort, Times, row};
use crate::residency;

const MIB: usize = 1 << 20;

/// Files, and the number of reading threads.
pub(crate) struct Files {
    pub(crate) paths: Vec<PathBuf>,
    pub(crate) threads: Vec<usize>,
}

impl Files {
    /// Reads everything once in large blocks to cache it, and returns the cached share.
    pub(crate) fn warm(&self) -> io::Result<f64> {
        let mut block = vec![0; 8 * MIB];
        for path in &self.paths {
            let mut file = File::open(path)?;
            while file.read(&mut block)? > 0 {}
        }
        self.cached_share()
    }

    fn bytes(&self) -> io::Result<u64> {
        self.paths.iter().map(|path| Ok(path.metadata()?.len())).sum()
    }

    /// The cached share of the files; a partial last page counts as a whole one.
    fn cached_share(&self) -> io::Result<f64> {
        let cached: usize =
            self.paths.iter().map(|path| residency::cached_bytes(path)).sum::<io::Result<_>>()?;
        Ok((cached as f64 / self.bytes()?.max(1) as f64).min(1.0))
    }
}

/// Page cache to ring, by thread count and ring.
pub(crate) fn fill(files: &Files, effort: &Effort) -> Vec<Value> {
    let mut rows = Vec::new();
    for ring_bytes in effort.pick(vec![16 * MIB, 64 * MIB, 128 * MIB], vec![16 * MIB]) {
        for threads in &files.threads {
            if effort.is_over() {
                return rows;
            }
            let reader = cached_reader(*threads, ring_bytes);
            let fields =
                json!({ "threads": threads, "ring_bytes": ring_bytes, "block_bytes": reader.block_bytes });
            rows.push(row(fields, fill_row(files, effort, &reader, ring_bytes)));
        }
    }
    rows
}

fn cached_reader(threads: usize, ring_bytes: usize) -> Plain {
    // At least two blocks per thread, so that a reader continues while its last block is in use.
    let block_bytes = (ring_bytes / threads / 2).clamp(4096, 4 * MIB) / 4096 * 4096;
    Plain { direct: false, threads, block_bytes }
}

fn fill_row(files: &Files, effort: &Effort, reader: &Plain, ring_bytes: usize) -> io::Result<Value> {
    let mut ring = HugeBuffer::new(ring_bytes)?;
    let bytes = usize::try_from(files.bytes()?).unwrap_or(usize::MAX);
    let times = effort.repeat(2, || reader.read(&files.paths, ring.bytes()).map(drop))?;
    Ok(times.rate(bytes))
}

/// Page cache to one ring, and another ring to the device, at the same time and independently. The
/// slower rate is the limit of a load that overlaps both perfectly.
pub(crate) fn fill_and_copy(files: &Files, gpu: &Gpu, bench: &Bench<'_>, effort: &Effort) -> Vec<Value> {
    let mut rows = Vec::new();
    for threads in &files.threads {
        if effort.is_over() {
            break;
        }
        rows.push(row(json!({ "threads": threads }), together(files, gpu, bench, *threads)));
    }
    rows
}

fn together(files: &Files, gpu: &Gpu, bench: &Bench<'_>, threads: usize) -> Result<Value, DriverError> {
    let ring_bytes = 64 * MIB;
    let memory = gpu.register(HugeBuffer::new(ring_bytes)?)?;
    let mut ring = HugeBuffer::new(ring_bytes)?;
    let reader = cached_reader(threads, ring_bytes);
    let bytes = usize::try_from(files.bytes()?).unwrap_or(usize::MAX);
    let begin = Barrier::new(2);
    std::thread::scope(|scope| {
        let filler = scope.spawn(|| {
            begin.wait();
            let start = Instant::now();
            // Twice, so that thread start is a small part of it.
            let read = (0..2).try_for_each(|_| reader.read(&files.paths, ring.bytes()).map(drop));
            read.map(|()| start.elapsed())
        });
        begin.wait();
        let start = Instant::now();
        let (mut passes, mut copied) = (0, Ok(()));
        while !filler.is_finished() && copied.is_ok() {
            copied = bench.pass(&memory, PROBE);
            passes += 1;
        }
        let copying = start.elapsed();
        let filling = filler.join().expect("a filler does not panic")?;
        copied?;
        Ok(json!({
            "fill": Times::once(filling).rate(2 * bytes),
            "copy": Times::once(copying).rate(passes * bench.pass_bytes()),
        }))
    })
}

/// From disk: dropped from the page cache before each row, and checked.
pub(crate) fn disk(files: &Files, effort: &Effort) -> Vec<Value> {
    let shapes = [(true, 4), (true, 1), (true, 8), (true, 16), (false, 1), (false, 8)];
    let mut rows = Vec::new();
    for (direct, threads) in effort.pick(&shapes[..], &shapes[..1]) {
        if effort.is_over() {
            break;
        }
        let reader = Plain { direct: *direct, threads: *threads, block_bytes: 4 * MIB };
        let mode = if *direct { "direct" } else { "buffered" };
        let fields = json!({ "io": mode, "threads": threads, "block_bytes": reader.block_bytes });
        rows.push(row(fields, disk_row(files, &reader)));
    }
    rows
}

fn disk_row(files: &Files, reader: &Plain) -> io::Result<Value> {
    let mut ring = HugeBuffer::new((reader.threads * reader.block_bytes).max(16 * MIB))?;
    for path in &files.paths {
        residency::drop_pages(path)?;
    }
    let cached = files.cached_share()?;
    let start = Instant::now();
    let read = reader.read(&files.paths, ring.bytes())?;
    let rate = Times::once(start.elapsed()).rate(usize::try_from(read).unwrap_or(usize::MAX));
    Ok(row::<String>(rate, Ok(json!({ "cached_share": cached }))))
}
