#![allow(missing_docs, reason = "a bench")]
#![allow(dead_code, reason = "each bench uses only a part of the shared code")]
//! Casts to narrower types: a load of 64 MiB of F32 from the page cache that drops its bytes, with
//! and without a cast. Prints bytes read per second for the whole load; the ratio of the lines is
//! the cost of the cast.
//!
//! `cargo bench -p onelayer --bench cast`

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use onelayer::{Checkpoint, FloatType, IoMode, Loader, Target};

use self::data::Tensor;

#[path = "support/criteria.rs"]
mod criteria;
#[path = "support/data.rs"]
mod data;

const TENSORS: u64 = 4;
const TENSOR_BYTES: u64 = 16 << 20;

fn cast(criterion: &mut Criterion) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("random.safetensors");
    let tensor = |number| Tensor::new(format!("layers.{number}.w"), "F32", 4, &[1024, TENSOR_BYTES / 4096]);
    data::random(&path, &(0..TENSORS).map(tensor).collect::<Vec<_>>()).expect("room for the file");
    let checkpoint = Checkpoint::open(&path).expect("a checkpoint");
    let mut group = criterion.benchmark_group("cast, 64 MiB of F32, warm");
    group.throughput(Throughput::Bytes(TENSORS * TENSOR_BYTES));
    let types = [("as it is", None), ("to BF16", Some(FloatType::Bf16)), ("to F16", Some(FloatType::F16))];
    for (name, dtype) in types {
        let mut builder = Loader::builder(Target::None).host_budget(16 << 20).io(IoMode::Buffered);
        if let Some(dtype) = dtype {
            builder = builder.dtype(dtype);
        }
        let loader = builder.build().expect("this device is everywhere");
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                let mut stream = loader.stream(&checkpoint).expect("a stream");
                for layer in &mut stream {
                    layer.expect("a layer");
                }
                assert!(stream.report().tensor_bytes > 0);
            });
        });
    }
    group.finish();
}

criterion_group! { name = benches; config = criteria::quick(); targets = cast }
criterion_main!(benches);
