#![allow(missing_docs, reason = "a bench")]
#![allow(dead_code, reason = "each bench uses only a part of the shared code")]
//! Reading headers: `Checkpoint::open` on one file with a cached header. Header bytes per second.
//!
//! `cargo bench -p onelayer --bench header`

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use onelayer::Checkpoint;

use self::data::Tensor;

#[path = "support/criteria.rs"]
mod criteria;
#[path = "support/data.rs"]
mod data;

fn open(criterion: &mut Criterion) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut group = criterion.benchmark_group("header");
    for count in [1_000, 100_000] {
        let path = folder.path().join(format!("{count}.safetensors"));
        let header_bytes = data::headers_only(&path, &tensors(count)).expect("room for the file");
        group.throughput(Throughput::Bytes(header_bytes));
        group.bench_function(format!("open, {count} tensors"), |bencher| {
            bencher.iter(|| Checkpoint::open(&path).expect("a checkpoint"));
        });
    }
    group.finish();
}

/// Long and similar names, as in mixture-of-experts checkpoints.
fn tensors(count: usize) -> Vec<Tensor> {
    let name =
        |index: usize| format!("model.layers.{}.mlp.experts.{}.down_proj.weight", index / 384, index % 384);
    (0..count).map(|index| Tensor::new(name(index), "BF16", 2, &[64, 32])).collect()
}

criterion_group! { name = benches; config = criteria::quick(); targets = open }
criterion_main!(benches);
