#![allow(missing_docs, clippy::print_stderr, reason = "a bench")]
#![allow(dead_code, reason = "each bench uses only a part of the shared code")]
//! Filling slots: every source reads a file of 64 MiB in reads of 4 MiB, with one and two threads,
//! into one slot per thread. The file is in the page cache (checked with `mincore`), so buffered
//! and mapped reads copy from there; direct reads still come from the disk.
//!
//! `cargo bench -p onelayer --bench fill`

use std::thread;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use onelayer::checkpoint::Checkpoint;
use onelayer::source::{self, IoMode, ReadRequest, Source};
use onelayer::units::{Alignment, ByteRange};

use self::data::Tensor;
use self::plain::HugeBuffer;

#[path = "support/criteria.rs"]
mod criteria;
#[path = "support/data.rs"]
mod data;
#[path = "support/plain.rs"]
mod plain;
#[path = "support/residency.rs"]
mod residency;

const FILE_BYTES: u64 = 64 << 20;
const SLOT_BYTES: usize = 4 << 20;

fn fill(criterion: &mut Criterion) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("random.safetensors");
    data::random(&path, &[Tensor::new("w", "U8", 1, &[FILE_BYTES])]).expect("room for the file");
    let cached = residency::cached_bytes(&path).expect("mincore");
    assert!(u64::try_from(cached).expect("64 bits") >= FILE_BYTES, "{cached} bytes are cached");
    let checkpoint = Checkpoint::open(&path).expect("a checkpoint");
    let requests = requests(&checkpoint);
    let mut group = criterion.benchmark_group("fill, 64 MiB in reads of 4 MiB");
    group.throughput(Throughput::Bytes(FILE_BYTES));
    let modes = [
        ("buffered, warm", IoMode::Buffered),
        ("mmap, warm", IoMode::Mmap),
        ("direct, disk", IoMode::Direct),
    ];
    for (name, mode) in modes {
        let source = source::open(mode, &checkpoint).expect("a source");
        if !source.fallbacks().is_empty() {
            eprintln!("fill: {name} is left out, the file system refuses it");
            continue;
        }
        for threads in [1, 2] {
            let mut slots = HugeBuffer::new(threads * SLOT_BYTES).expect("memory");
            group.bench_function(format!("{name}, {threads} threads"), |bencher| {
                bencher.iter(|| read(source.as_ref(), &requests, threads, slots.bytes()));
            });
        }
    }
    group.finish();
}

/// Reads from the first byte of the file on.
fn requests(checkpoint: &Checkpoint) -> Vec<ReadRequest> {
    let tensor = checkpoint.tensors().next().expect("one tensor");
    let end = Alignment::PAGE.up(tensor.extent.end()).expect("a file's length");
    let starts = (0..end).step_by(SLOT_BYTES);
    let request = |start: u64| {
        let stop = end.min(start + u64::try_from(SLOT_BYTES).expect("64 bits"));
        let extent = ByteRange::new(start, stop).expect("not empty");
        let payload = extent.intersect(tensor.extent).expect("blocks hold bytes of the tensor");
        ReadRequest { shard: tensor.shard, extent, payload }
    };
    starts.map(request).collect()
}

/// Each thread reads every n-th request into its slot, for n threads.
fn read(source: &dyn Source, requests: &[ReadRequest], threads: usize, memory: &mut [u8]) {
    let slot_bytes = memory.len() / threads;
    thread::scope(|scope| {
        for (number, slot) in memory.chunks_mut(slot_bytes).enumerate() {
            scope.spawn(move || {
                for request in requests.iter().skip(number).step_by(threads) {
                    source.read(request, slot).expect("a read");
                }
            });
        }
    });
}

criterion_group! { name = benches; config = criteria::quick(); targets = fill }
criterion_main!(benches);
