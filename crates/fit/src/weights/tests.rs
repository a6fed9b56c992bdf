//! The counted bytes are those that a load delivers.

use std::io::Write;

use super::*;
use onelayer::plan::{LoadPlan, PlanLimits};

/// A file with such tensors and no bytes to speak of.
fn checkpoint(tensors: &[(&str, &str, &[u64])]) -> (tempfile::TempDir, Checkpoint) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let (mut header, mut end_bytes) = (Vec::new(), 0);
    for (name, dtype, shape) in tensors {
        let start_bytes = end_bytes;
        let bits = dtype.parse::<DType>().unwrap().bits().unwrap();
        end_bytes += shape.iter().product::<u64>() * bits / 8;
        header.push(format!(
            r#""{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{start_bytes},{end_bytes}]}}"#
        ));
    }
    let header = format!("{{{}}}", header.join(","));
    let mut file = std::fs::File::create(&path).unwrap();
    let header_bytes = u64::try_from(header.len()).unwrap();
    file.write_all(&header_bytes.to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.set_len(8 + header_bytes + end_bytes).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    (folder, checkpoint)
}

/// The bytes of every tensor of a checkpoint, by name.
fn weighed(checkpoint: &Checkpoint, weights: Weights) -> Vec<(&str, u64)> {
    let layers = Layers::group(checkpoint).unwrap();
    let weighing = Weighing::new(weights, checkpoint, &layers);
    checkpoint.tensors().map(|tensor| (tensor.name, weighing.bytes(tensor.id))).collect()
}

/// Bytes of a tensor in two layers, or outside them if it is not `in_stack`.
fn bytes(dtype: &str, shape: &[u64], in_stack: bool, weights: Weights) -> u64 {
    let names = ["model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"];
    let norms = ["model.layers.0.norm.weight", "model.layers.1.norm.weight"];
    let mut tensors = names.map(|name| (name, dtype, shape)).to_vec();
    tensors.extend(norms.map(|name| (name, "F32", &[3][..])));
    let (_folder, checkpoint) = checkpoint(&tensors);
    let name = names[if in_stack { 1 } else { 2 }];
    weighed(&checkpoint, weights).into_iter().find(|(other, _)| *other == name).unwrap().1
}

#[test]
fn precisions_are_counted_as_they_are_told() {
    let of = |precision, in_stack| bytes("F32", &[3, 256], in_stack, Weights::Derived(precision));
    assert_eq!(of(Precision::Bf16, true), 1536);
    assert_eq!(of(Precision::Fp8, true), 768 + 3 * 4);
    assert_eq!(of(Precision::Int8, true), 768 + 3 * 4);
    assert_eq!(of(Precision::Int4, true), 384 + 3 * 2 * 2);
    // Outside the stacks, and vectors: 16 bits.
    assert!(Precision::ALL.into_iter().all(|precision| of(precision, false) == 1536));
    assert_eq!(bytes("BF16", &[100], true, Weights::Derived(Precision::Int4)), 200);
    // Odd rows take a whole byte more, a part of a group a whole scale.
    assert_eq!(bytes("BF16", &[2, 129], true, Weights::Derived(Precision::Int4)), 2 * (65 + 4));
    let fp8 = |precision| bytes("F8_E4M3", &[8, 64], true, Weights::Derived(precision));
    assert_eq!((fp8(Precision::Bf16), fp8(Precision::Fp8), fp8(Precision::Int8)), (1024, 512, 512 + 32));
    assert_eq!(fp8(Precision::Int4), 256 + 8 * 2);
    assert_eq!(bytes("I32", &[8, 8], true, Weights::Derived(Precision::Bf16)), 256);
    assert_eq!(bytes("F16", &[0, 8], true, Weights::Derived(Precision::Int8)), 0);
    assert_eq!(bytes("F16", &[8, 0], true, Weights::Derived(Precision::Int4)), 0);
}

#[test]
fn narrowing_leaves_what_is_narrow() {
    let of = |dtype, float| bytes(dtype, &[10, 10], true, Weights::Narrowed(float));
    assert_eq!(of("F32", FloatType::Bf16), 200);
    assert_eq!(of("F32", FloatType::F32), 400);
    assert_eq!(of("F64", FloatType::F32), 400);
    assert_eq!(of("F16", FloatType::Bf16), 200);
    assert_eq!(of("I32", FloatType::Bf16), 400);
}

/// Two layers with weights, routers, biases, short rows, four dimensions, a quantised weight with
/// its scale, and what stands beside.
const MIXED: &[(&str, &str, &[u64])] = &[
    ("model.embed_tokens.weight", "F32", &[50, 96]),
    ("model.layers.0.self_attn.q_proj.weight", "BF16", &[70, 96]),
    ("model.layers.0.mlp.experts.gate_up_proj", "F32", &[3, 20, 65]),
    ("model.layers.0.mlp.experts.gate_up_proj_bias", "F16", &[3, 40]),
    ("model.layers.0.mlp.gate.weight", "BF16", &[3, 96]),
    ("model.layers.0.router.proj.weight", "F32", &[3, 96]),
    ("model.layers.0.mlp.short.weight", "BF16", &[96, 31]),
    ("model.layers.0.conv.weight", "F32", &[4, 3, 5, 64]),
    ("model.layers.0.norm.weight", "F32", &[96]),
    ("model.layers.1.self_attn.q_proj.weight", "F32", &[70, 97]),
    ("model.layers.1.mlp.up_proj.weight", "F8_E4M3", &[20, 64]),
    ("model.layers.1.mlp.up_proj.weight_scale", "F32", &[20, 64]),
    ("model.layers.1.mlp.down_proj.weight", "BF16", &[20, 64]),
    ("model.layers.1.mlp.down_proj.weight_scale", "F32", &[20, 64]),
    ("lm_head.weight", "BF16", &[50, 96]),
];

/// As a load delivers it, layer by layer.
#[test]
fn what_is_counted_is_what_a_load_delivers() {
    let (_folder, checkpoint) = checkpoint(MIXED);
    let layers = Layers::group(&checkpoint).unwrap();
    for dtype in [None, Some(FloatType::Bf16)] {
        for to in [None].into_iter().chain(Quantisation::ALL.map(Some)) {
            let mut limits = PlanLimits::new(8 << 20);
            (limits.options.quantise, limits.options.dtype) = (to, dtype);
            let plan = LoadPlan::build(&checkpoint, &layers, &limits, |_| true).unwrap();
            let weights = match (to, dtype) {
                (Some(to), dtype) => Weights::Quantised { to, dtype },
                (None, Some(dtype)) => Weights::Narrowed(dtype),
                (None, None) => Weights::AsStored,
            };
            let demand = crate::Demand::of(&checkpoint, &layers, None, weights);
            let planned: Vec<u64> = plan.layers().iter().map(|layer| layer.tensor_bytes).collect();
            let counted: Vec<u64> = demand.units.iter().map(|unit| unit.weight_bytes).collect();
            assert_eq!(counted, planned, "{weights:?}");
        }
    }
}

/// Derived precisions count what a load would deliver, and 16 bits for the rest.
#[test]
fn a_precision_is_what_quantising_and_narrowing_come_to() {
    let (_folder, checkpoint) = checkpoint(&MIXED[..10]);
    for precision in [Precision::Fp8, Precision::Int8, Precision::Int4] {
        let to = precision.quantisation().unwrap();
        let loaded = Weights::Quantised { to, dtype: Some(FloatType::Bf16) };
        assert_eq!(
            weighed(&checkpoint, Weights::Derived(precision)),
            weighed(&checkpoint, loaded),
            "{precision}"
        );
    }
}
