#![allow(missing_docs, reason = "a bench")]
#![allow(dead_code, reason = "each bench uses only a part of the shared code")]
//! Planning an open checkpoint: tensors to layers, layers to reads and copies. Tensors per second.
//!
//! `cargo bench -p onelayer --bench plan`

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use onelayer::plan::PlanLimits;
use onelayer::{Checkpoint, Layers, LoadPlan};

use self::data::Tensor;

#[path = "support/criteria.rs"]
mod criteria;
#[path = "support/data.rs"]
mod data;

fn plan(criterion: &mut Criterion) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut group = criterion.benchmark_group("plan");
    for (name, tensors) in [("dense, 17 GB", dense()), ("20k experts, 31 GB", experts())] {
        let path = folder.path().join(format!("{}.safetensors", tensors.len()));
        data::headers_only(&path, &tensors).expect("file systems here have holes");
        let checkpoint = Checkpoint::open(&path).expect("a checkpoint");
        let layers = Layers::group(&checkpoint).expect("layers");
        let limits = PlanLimits::new(64 << 20);
        let count = checkpoint.tensor_count();
        group.throughput(Throughput::Elements(u64::try_from(count).expect("64 bits")));
        group.bench_function(format!("group, {name}, {count} tensors"), |bencher| {
            bencher.iter(|| Layers::group(&checkpoint).expect("layers"));
        });
        group.bench_function(format!("build, {name}, {count} tensors"), |bencher| {
            bencher.iter(|| LoadPlan::build(&checkpoint, &layers, &limits, |_| true).expect("a plan"));
        });
    }
    group.finish();
}

/// The shapes of a 7B model with a large vocabulary.
fn dense() -> Vec<Tensor> {
    let mut tensors = vec![Tensor::new("model.embed_tokens.weight", "BF16", 2, &[256_000, 3072])];
    for layer in 0..28 {
        let parts: [(&str, &[u64]); 9] = [
            ("input_layernorm", &[3072]),
            ("mlp.down_proj", &[3072, 24_576]),
            ("mlp.gate_proj", &[24_576, 3072]),
            ("mlp.up_proj", &[24_576, 3072]),
            ("post_attention_layernorm", &[3072]),
            ("self_attn.k_proj", &[4096, 3072]),
            ("self_attn.o_proj", &[3072, 4096]),
            ("self_attn.q_proj", &[4096, 3072]),
            ("self_attn.v_proj", &[4096, 3072]),
        ];
        for (part, shape) in parts {
            tensors.push(Tensor::new(format!("model.layers.{layer}.{part}.weight"), "BF16", 2, shape));
        }
    }
    tensors.push(Tensor::new("model.norm.weight", "BF16", 2, &[3072]));
    tensors
}

/// Many small experts: 52 layers of 128 experts of three matrices.
fn experts() -> Vec<Tensor> {
    let mut tensors = Vec::new();
    for layer in 0..52 {
        for expert in 0..128 {
            for part in ["down_proj", "gate_proj", "up_proj"] {
                let name = format!("model.layers.{layer}.mlp.experts.{expert}.{part}.weight");
                tensors.push(Tensor::new(name, "BF16", 2, &[768, 1024]));
            }
        }
    }
    tensors
}

criterion_group! { name = benches; config = criteria::quick(); targets = plan }
criterion_main!(benches);
