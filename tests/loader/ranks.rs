//! Several ranks: the parts of all of them together are the checkpoint, bit for bit, and each reads
//! little more than its part; the shares of all of them are each tensor once.
#![allow(clippy::single_range_in_vec_init, reason = "a range of one dimension")]
#![allow(clippy::unwrap_used, clippy::as_conversions, reason = "a test that cannot go on panics")]
#![allow(clippy::cast_possible_truncation, reason = "lengths of small test files")]

use std::collections::BTreeMap;
use std::path::Path;

use onelayer::plan::FloatType;
use onelayer::{
    Checkpoint, IoMode, LayerMap, Layers, LoadError, LoadPlan, Loader, LoaderBuilder, PlanError, Rank,
    RankPart, Share, Split, SplitError, SplitRules, Target, Window,
};
use onelayer_testing::{TestTensor, fixture, random_bytes, write_file};

const FIXTURES: [&str; 5] = ["gemma2", "gpt2", "llama", "llama_sharded", "qwen2_moe"];
const MODES: [IoMode; 5] = [IoMode::Auto, IoMode::Buffered, IoMode::Mmap, IoMode::Direct, IoMode::Uring];

/// What one rank was given of a tensor.
struct Given {
    shape: Vec<u64>,
    part: Option<RankPart>,
    bytes: Vec<u8>,
}

fn rank(rank: u32, world: u32) -> Rank {
    Rank::new(rank, world).unwrap()
}

fn load(loader: LoaderBuilder, checkpoint: &Checkpoint) -> BTreeMap<String, Given> {
    let mut tensors = BTreeMap::new();
    for layer in loader.build().unwrap().stream(checkpoint).unwrap() {
        for tensor in layer.unwrap().tensors() {
            let (shape, part) = (tensor.shape().to_vec(), tensor.part().cloned());
            let given = Given { shape, part, bytes: tensor.as_bytes().unwrap().to_vec() };
            tensors.insert(tensor.name().to_owned(), given);
        }
    }
    tensors
}

/// The bytes of a part by the definition: element by element of the whole.
fn cut(whole: &[u8], shape: &[u64], part: &RankPart) -> Vec<u8> {
    let inside: u64 = shape[part.axis + 1..].iter().product();
    let outside: u64 = shape[..part.axis].iter().product();
    let element_bytes = whole.len() as u64 / shape.iter().product::<u64>();
    let block = shape[part.axis] / part.blocks;
    let mut bytes = Vec::new();
    for row in 0..outside * part.blocks {
        for index in part.range.clone() {
            let start = ((row * block + index) * inside * element_bytes) as usize;
            bytes.extend_from_slice(&whole[start..start + (inside * element_bytes) as usize]);
        }
    }
    bytes
}

/// Checks each part against the whole, and that the parts of all ranks are all of each tensor that
/// is divided.
fn check(whole: &BTreeMap<String, Given>, ranks: &[BTreeMap<String, Given>], what: &str) -> usize {
    let mut divided = 0;
    for (name, tensor) in whole {
        let mut ranges = Vec::new();
        for (number, given) in ranks.iter().enumerate() {
            let given = &given[name];
            let Some(part) = &given.part else {
                assert_eq!(given.shape, tensor.shape, "{what}: {name}");
                assert!(given.bytes == tensor.bytes, "{what}: {name} is whole on rank {number}");
                continue;
            };
            assert_eq!(given.shape, *part.shape, "{what}: {name}");
            assert!(
                given.bytes == cut(&tensor.bytes, &tensor.shape, part),
                "{what}: {name} of rank {number}"
            );
            ranges.push((part.range.clone(), tensor.shape[part.axis] / part.blocks));
        }
        if let Some(&(_, block)) = ranges.first() {
            assert_eq!(ranges.len(), ranks.len(), "{what}: {name}");
            assert!(ranges.windows(2).all(|pair| pair[0].0.end == pair[1].0.start), "{what}: {name}");
            assert_eq!((ranges[0].0.start, ranges.last().unwrap().0.end), (0, block), "{what}: {name}");
            divided += 1;
        }
    }
    divided
}

#[test]
fn the_parts_of_all_ranks_are_the_checkpoint() {
    for name in FIXTURES {
        let checkpoint = Checkpoint::open(fixture(name)).unwrap();
        let whole = load(Loader::builder(Target::Host), &checkpoint);
        for world in [2, 4, 8] {
            for io in [IoMode::Auto, IoMode::Direct] {
                let of_rank = |number| {
                    let loader =
                        Loader::builder(Target::Host).io(io).shard(rank(number, world), SplitRules::common());
                    load(loader, &checkpoint)
                };
                let ranks: Vec<_> = (0..world).map(of_rank).collect();
                let divided = check(&whole, &ranks, &format!("{name}, {world} ranks, {io}"));
                let expected = whole.keys().filter(|name| is_divided(name)).count();
                assert_eq!(divided, expected, "{name}: what is divided");
            }
        }
    }
}

/// By the names of the fixtures: projections, embeddings and heads, with the biases of outputs that
/// are divided.
fn is_divided(name: &str) -> bool {
    let words = [
        "_proj.weight",
        "embed_tokens",
        "lm_head",
        "wte",
        "c_attn",
        "c_fc",
        "q_proj.bias",
        "k_proj.bias",
        "v_proj.bias",
    ];
    words.iter().any(|word| name.contains(word))
}

/// Rows and columns, fused blocks, three dimensions, runs near one another and far apart, in the
/// types that matter.
fn wide(path: &Path) -> Checkpoint {
    let tensor = |name: &str, dtype: &'static str, bytes: u64, shape: &[u64], seed| TestTensor {
        name: name.to_owned(),
        dtype,
        shape: shape.to_vec(),
        bytes: random_bytes((shape.iter().product::<u64>() * bytes) as usize, seed),
    };
    let tensors = [
        tensor("layers.0.norm.weight", "BF16", 2, &[257], 1),
        tensor("layers.0.o_proj.weight", "BF16", 2, &[1200, 1504], 2),
        tensor("layers.0.up_proj.weight", "F32", 4, &[1504, 300], 3),
        tensor("layers.0.down_proj.weight", "F32", 4, &[300, 1504], 4),
        tensor("layers.1.gate_up_proj.weight", "BF16", 2, &[1600, 800], 5),
        tensor("layers.1.experts", "BF16", 2, &[4, 600, 640], 6),
        tensor("layers.1.o_proj.weight", "U8", 1, &[8, 400_000], 7),
        tensor("layers.1.odd.bias", "U8", 1, &[13], 8),
        tensor("lm_head.weight", "BF16", 2, &[1001, 96], 9),
    ];
    write_file(path, &tensors, 1);
    Checkpoint::open(path).unwrap()
}

fn wide_rules() -> SplitRules {
    SplitRules::common()
        .with(|tensor| tensor.name.ends_with("experts").then_some(Split::Even { axis: 1, blocks: 1 }))
}

#[test]
fn every_way_of_reading_and_every_budget_gives_the_same_parts() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = wide(&folder.path().join("model.safetensors"));
    let whole = load(Loader::builder(Target::Host), &checkpoint);
    for io in MODES {
        for (budget_mib, window) in [(6, Window::Layers(1)), (64, Window::All)] {
            let of_rank = |number| {
                let loader =
                    Loader::builder(Target::Host).io(io).host_budget(budget_mib << 20).window(window);
                load(loader.shard(rank(number, 4), wide_rules()), &checkpoint)
            };
            let ranks: Vec<_> = (0..4).map(of_rank).collect();
            assert_eq!(check(&whole, &ranks, &format!("{io}, {budget_mib} MiB")), 7);
        }
    }
}

#[test]
fn parts_are_narrowed_like_wholes() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = wide(&folder.path().join("model.safetensors"));
    let narrowed = |io| Loader::builder(Target::Host).io(io).host_budget(6 << 20).dtype(FloatType::Bf16);
    let whole = load(narrowed(IoMode::Buffered), &checkpoint);
    for io in MODES {
        let ranks: Vec<_> = (0..2)
            .map(|number| load(narrowed(io).shard(rank(number, 2), wide_rules()), &checkpoint))
            .collect();
        assert_eq!(check(&whole, &ranks, &format!("{io}, narrowed")), 7);
        assert_eq!(ranks[0]["layers.0.down_proj.weight"].bytes.len(), 300 * 752 * 2);
    }
}

#[test]
fn hashes_on_the_way_are_those_of_the_parts() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = wide(&folder.path().join("model.safetensors"));
    for io in MODES {
        let part =
            |target| Loader::builder(target).io(io).host_budget(6 << 20).shard(rank(1, 4), wide_rules());
        let expected = load(part(Target::Host), &checkpoint);
        let mut count = 0;
        for layer in part(Target::None).hash(true).build().unwrap().stream(&checkpoint).unwrap() {
            for tensor in layer.unwrap().tensors() {
                let hash = tensor.hash().unwrap().unwrap();
                assert_eq!(
                    hash.as_bytes(),
                    blake3::hash(&expected[tensor.name()].bytes).as_bytes(),
                    "{}",
                    tensor.name()
                );
                count += 1;
            }
        }
        assert_eq!(count, expected.len());
    }
}

/// Any range of any dimension of anything, in reads that are cut anywhere.
#[test]
fn random_ranges_arrive_whatever_lies_around_them() {
    let mut seed = 0;
    let mut below = |end: u64| {
        seed += 1;
        u64::from_le_bytes(random_bytes(8, seed).try_into().unwrap()) % end
    };
    for round in 0..12 {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let mut splits = BTreeMap::new();
        let mut tensors = Vec::new();
        for number in 0..8 {
            let (dtype, element_bytes) = [("U8", 1), ("BF16", 2), ("F32", 4), ("F64", 8)][below(4) as usize];
            let most = [30, 3000, 1_500_000][below(3) as usize];
            let elements = 1 + below(most) / element_bytes;
            let rows = 1 + below(elements.min(700));
            let inner = 1 + below((elements / rows).clamp(1, 900));
            let shape = vec![rows, inner, 1 + elements / rows / inner];
            let axis = below(3) as usize;
            let (a, b) = (below(shape[axis] + 1), below(shape[axis] + 1));
            let name = format!("layers.{}.t{number}", below(2));
            splits.insert(name.clone(), Split::Range { axis, range: a.min(b)..a.max(b) });
            let bytes = random_bytes((shape.iter().product::<u64>() * element_bytes) as usize, number);
            tensors.push(TestTensor { name, dtype, shape, bytes });
        }
        write_file(&path, &tensors, round);
        let checkpoint = Checkpoint::open(&path).unwrap();
        let io = MODES[round % MODES.len()];
        let plain = || {
            let loader = Loader::builder(Target::Host).io(io).host_budget(6 << 20);
            if round % 3 == 0 { loader.dtype(FloatType::Bf16) } else { loader }
        };
        let whole = load(plain(), &checkpoint);
        let rules = SplitRules::none().with(move |tensor| splits.get(tensor.name).cloned());
        for (name, given) in load(plain().shard(rank(0, 2), rules), &checkpoint) {
            let tensor = &whole[&name];
            match &given.part {
                Some(part) => {
                    assert!(
                        given.bytes == cut(&tensor.bytes, &tensor.shape, part),
                        "{round}: {name} {part:?}"
                    );
                }
                None => assert!(given.bytes == tensor.bytes, "{round}: {name}"),
            }
        }
    }
}

fn plan(checkpoint: &Checkpoint, io: IoMode, world: u32, rules: SplitRules) -> Vec<LoadPlan> {
    let of_rank = |number| {
        let loader = Loader::builder(Target::Host).io(io).shard(rank(number, world), rules.clone());
        loader.plan(checkpoint).unwrap()
    };
    (0..world).map(of_rank).collect()
}

#[test]
fn a_rank_reads_its_rows_and_hardly_anything_else() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let rows = |name: &str, rows: u64, seed| TestTensor {
        shape: vec![rows, 1000],
        ..TestTensor::random(name, rows as usize * 1000, seed)
    };
    let names =
        ["layers.0.q_proj.weight", "layers.0.up_proj.weight", "layers.1.q_proj.weight", "lm_head.weight"];
    let tensors: Vec<TestTensor> = names.iter().zip(1..).map(|(name, seed)| rows(name, 1600, seed)).collect();
    write_file(&path, &tensors, 0);
    let checkpoint = Checkpoint::open(&path).unwrap();
    for world in [2, 4, 8] {
        for plan in plan(&checkpoint, IoMode::Direct, world, SplitRules::common()) {
            let share = 4 * 1_600_000 / u64::from(world);
            // The vocabulary is divided in steps of 64.
            assert!(plan.source_bytes() <= share + 64_000, "{} of {share}", plan.source_bytes());
            // A block at each end of each tensor.
            assert!(plan.aligned_read_bytes() <= plan.source_bytes() + 4 * 2 * 4096);
            assert_eq!(plan.gap_bytes(), 0);
            let loader = Loader::builder(Target::Host)
                .io(IoMode::Direct)
                .shard(plan.rank().unwrap(), SplitRules::common());
            let mut stream = loader.build().unwrap().stream(&checkpoint).unwrap();
            assert!(stream.by_ref().all(|layer| layer.is_ok()));
            let read_bytes = stream.report().read_bytes;
            assert!(read_bytes <= plan.aligned_read_bytes(), "{read_bytes} of {}", plan.aligned_read_bytes());
        }
    }
}

#[test]
fn columns_cost_the_gaps_between_them_unless_these_are_long() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = wide(&folder.path().join("model.safetensors"));
    let only = |name: &'static str| move |tensor: &onelayer::checkpoint::TensorEntry<'_>| tensor.name == name;
    let plan = |name| {
        let loader = Loader::builder(Target::Host).shard(rank(1, 4), wide_rules()).select(only(name));
        loader.plan(&checkpoint).unwrap()
    };
    // 300 rows of 6 kB, a quarter of each: all but three quarters of one row are read.
    let near = plan("layers.0.down_proj.weight");
    assert_eq!((near.source_bytes(), near.gap_bytes()), (451_200, 300 * 6016 - 451_200 - 4512));
    // 8 rows of 400 kB: a quarter of each, and not the 300 kB between them.
    let far = plan("layers.1.o_proj.weight");
    assert_eq!((far.source_bytes(), far.gap_bytes(), far.reads().len()), (800_000, 0, 8));
}

#[test]
fn whoever_reads_through_no_hole_reads_columns_alone() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = wide(&folder.path().join("model.safetensors"));
    let whole = load(Loader::builder(Target::Host), &checkpoint);
    for io in MODES {
        let loader = |number| {
            let loader = Loader::builder(Target::Host).io(io).host_budget(6 << 20).window(Window::Layers(1));
            loader.read_through(0).shard(rank(number, 4), wide_rules())
        };
        let ranks: Vec<_> = (0..4).map(|number| load(loader(number), &checkpoint)).collect();
        assert_eq!(check(&whole, &ranks, &format!("{io}, no hole")), 7);
        let plan = loader(1).plan(&checkpoint).unwrap();
        assert_eq!(plan.gap_bytes(), 0);
        // A block at most at each end of a read, and a read for each run of columns.
        assert!(plan.reads().len() > 300, "{}", plan.reads().len());
        assert!(plan.over_read_bytes() <= plan.reads().len() as u64 * 2 * 4096, "{io}");
        let mut stream = loader(1).build().unwrap().stream(&checkpoint).unwrap();
        assert!(stream.by_ref().all(|layer| layer.is_ok()));
        let (read_bytes, share_bytes) = (stream.report().read_bytes, plan.source_bytes());
        let edges_bytes = if io == IoMode::Buffered { 0 } else { plan.over_read_bytes() };
        assert!(read_bytes <= share_bytes + edges_bytes, "{io}: {read_bytes} of {share_bytes}");
    }
}

#[test]
fn vocabularies_are_divided_as_if_they_were_padded() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = wide(&folder.path().join("model.safetensors"));
    let id = checkpoint.find("lm_head.weight").unwrap().id;
    let ranges = |world| -> Vec<_> {
        let plans = plan(&checkpoint, IoMode::Buffered, world, SplitRules::common());
        plans.iter().map(|plan| plan.part(id).unwrap().range.clone()).collect()
    };
    // 1001, padded to 1024.
    assert_eq!(ranges(2), [0..512, 512..1001]);
    assert_eq!(ranges(4), [0..256, 256..512, 512..768, 768..1001]);
    assert_eq!(ranges(32).last(), Some(&(992..1001)));
}

#[test]
fn what_cannot_be_divided_names_the_tensor() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = wide(&folder.path().join("model.safetensors"));
    let refused = |world, rules| {
        let loader = Loader::builder(Target::Host).shard(rank(0, world), rules);
        match loader.plan(&checkpoint).unwrap_err() {
            LoadError::Plan(PlanError::Split(error)) => error,
            other => panic!("{other}"),
        }
    };
    // The vocabulary is divided by padding, and 1504 columns by 47; 1200 columns are not there.
    let SplitError::Uneven { tensor, axis, len, world, .. } = refused(3, SplitRules::common()) else {
        panic!()
    };
    assert_eq!((tensor.as_str(), axis, len, world), ("layers.0.o_proj.weight", 1, 1504, 3));
    let norm = |split: Split| {
        let rule = move |tensor: &onelayer::checkpoint::TensorEntry<'_>| {
            tensor.name.ends_with("norm.weight").then(|| split.clone())
        };
        refused(2, SplitRules::none().with(rule))
    };
    assert!(matches!(
        norm(Split::Even { axis: 1, blocks: 1 }),
        SplitError::NoSuchAxis { axis: 1, dimensions: 1, .. }
    ));
    assert!(matches!(norm(Split::Even { axis: 0, blocks: 1 }), SplitError::Uneven { len: 257, .. }));
    let beyond = norm(Split::Range { axis: 0, range: 200..258 });
    assert!(beyond.to_string().contains("layers.0.norm.weight"), "{beyond}");
    assert!(Rank::new(2, 2).is_none() && Rank::new(0, 0).is_none());
}

#[test]
fn companions_of_quantized_weights_go_with_them() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let tensor = |name: &str, shape: &[u64]| TestTensor {
        shape: shape.to_vec(),
        ..TestTensor::random(format!("layers.0.{name}"), shape.iter().product::<u64>() as usize, 1)
    };
    let tensors = [
        // A scale for each block of 16 by 16; one for each output; one for all.
        tensor("up_proj.weight", &[64, 32]),
        tensor("up_proj.weight_scale_inv", &[4, 2]),
        tensor("gate_proj.weight", &[64, 32]),
        tensor("gate_proj.weight_scale", &[64, 1]),
        tensor("gate_proj.input_scale", &[1]),
        tensor("down_proj.weight", &[32, 64]),
        tensor("down_proj.weight_scale_inv", &[2, 4]),
        tensor("o_proj.weight", &[32, 32]),
        tensor("o_proj.weight_scale", &[32]),
        tensor("q_proj.weight", &[32, 32]),
        tensor("q_proj.weight_scale", &[32]),
        // GPTQ: inputs first; a zero point for eight outputs, a scale for a group of inputs.
        tensor("k_proj.qweight", &[8, 64]),
        tensor("k_proj.scales", &[2, 64]),
        tensor("k_proj.qzeros", &[2, 8]),
        tensor("k_proj.g_idx", &[64]),
        tensor("self_attn.dense.qweight", &[8, 64]),
        tensor("self_attn.dense.scales", &[2, 64]),
        tensor("self_attn.dense.g_idx", &[64]),
        // Packed along the inputs, with its shape as two numbers.
        tensor("v_proj.weight_packed", &[64, 8]),
        tensor("v_proj.weight_shape", &[2]),
        // Blocks of 128, the last one not full: a rank's rows begin inside a block.
        tensor("fc1.weight", &[448, 256]),
        tensor("fc1.weight_scale_inv", &[4, 2]),
    ];
    write_file(&path, &tensors, 0);
    let checkpoint = Checkpoint::open(&path).unwrap();
    let plans = plan(&checkpoint, IoMode::Buffered, 2, SplitRules::common());
    let axis = |name: &str| {
        let id = checkpoint.find(&format!("layers.0.{name}")).unwrap().id;
        plans[1].part(id).map(|part| part.axis)
    };
    for (name, expected) in [
        ("up_proj.weight_scale_inv", Some(0)),
        ("gate_proj.weight_scale", Some(0)),
        ("gate_proj.input_scale", None),
        ("down_proj.weight", Some(1)),
        ("down_proj.weight_scale_inv", Some(1)),
        ("o_proj.weight_scale", None),
        ("q_proj.weight_scale", Some(0)),
        ("k_proj.qweight", Some(1)),
        ("k_proj.scales", Some(1)),
        ("k_proj.qzeros", Some(1)),
        ("k_proj.g_idx", None),
        ("self_attn.dense.qweight", Some(0)),
        ("self_attn.dense.scales", Some(0)),
        ("self_attn.dense.g_idx", Some(0)),
        ("v_proj.weight_packed", Some(0)),
        ("v_proj.weight_shape", None),
        ("fc1.weight", Some(0)),
        ("fc1.weight_scale_inv", None),
    ] {
        assert_eq!(axis(name), expected, "{name}");
    }
    let whole = load(Loader::builder(Target::Host), &checkpoint);
    let of_rank = |number| {
        load(Loader::builder(Target::Host).shard(rank(number, 2), SplitRules::common()), &checkpoint)
    };
    check(&whole, &[of_rank(0), of_rank(1)], "companions");
}

/// Names that mean one thing in one family and another in the next: what stands beside them tells
/// which.
#[test]
fn shared_names_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let tensor = |name: &str, shape: &[u64]| TestTensor {
        shape: shape.to_vec(),
        ..TestTensor::random(name, shape.iter().product::<u64>() as usize, 1)
    };
    let tensors = [
        // Mixtral: w2 leads back.
        tensor("model.layers.0.experts.0.w1.weight", &[64, 32]),
        tensor("model.layers.0.experts.0.w2.weight", &[32, 64]),
        tensor("model.layers.0.experts.0.w3.weight", &[64, 32]),
        // Qwen's first: both lead there, c_proj leads back.
        tensor("transformer.h.0.mlp.w1.weight", &[64, 32]),
        tensor("transformer.h.0.mlp.w2.weight", &[64, 32]),
        tensor("transformer.h.0.mlp.c_proj.weight", &[32, 64]),
        // ChatGLM: a gate and what it gates, in one.
        tensor("encoder.layers.0.mlp.dense_h_to_4h.weight", &[128, 32]),
        tensor("encoder.layers.0.mlp.dense_h_to_4h.bias", &[128]),
        tensor("encoder.layers.0.mlp.dense_4h_to_h.weight", &[32, 64]),
        // GPT-NeoX
        tensor("gpt_neox.layers.0.mlp.dense_h_to_4h.weight", &[128, 32]),
        tensor("gpt_neox.layers.0.mlp.dense_h_to_4h.bias", &[128]),
        tensor("gpt_neox.layers.0.mlp.dense_4h_to_h.weight", &[32, 128]),
    ];
    write_file(&path, &tensors, 0);
    let checkpoint = Checkpoint::open(&path).unwrap();
    let plans = plan(&checkpoint, IoMode::Buffered, 2, SplitRules::common());
    for (name, expected) in [
        ("model.layers.0.experts.0.w1.weight", Some(0)),
        ("model.layers.0.experts.0.w2.weight", Some(1)),
        ("model.layers.0.experts.0.w3.weight", Some(0)),
        ("transformer.h.0.mlp.w1.weight", None),
        ("transformer.h.0.mlp.w2.weight", None),
        ("encoder.layers.0.mlp.dense_h_to_4h.weight", None),
        ("encoder.layers.0.mlp.dense_h_to_4h.bias", None),
        ("encoder.layers.0.mlp.dense_4h_to_h.weight", Some(1)),
        ("gpt_neox.layers.0.mlp.dense_h_to_4h.weight", Some(0)),
        ("gpt_neox.layers.0.mlp.dense_h_to_4h.bias", Some(0)),
        ("gpt_neox.layers.0.mlp.dense_4h_to_h.weight", Some(1)),
    ] {
        let id = checkpoint.find(name).unwrap().id;
        assert_eq!(plans[1].part(id).map(|part| part.axis), expected, "{name}");
    }
}

#[test]
fn a_plan_for_a_rank() {
    let checkpoint = Checkpoint::open(fixture("gpt2")).unwrap();
    let loader = Loader::builder(Target::Host).host_budget(8 << 20).io(IoMode::Direct).readers(2);
    let plan = loader.shard(rank(1, 2), SplitRules::common()).plan(&checkpoint).unwrap();
    insta::assert_snapshot!(format!("{plan:#}"));
}

#[test]
fn each_tensor_is_read_by_one_rank() {
    for name in FIXTURES {
        let checkpoint = Checkpoint::open(fixture(name)).unwrap();
        let whole = load(Loader::builder(Target::Host), &checkpoint);
        for world in [1, 2, 3, 4, 8] {
            let share = Share::divide(&checkpoint, &Layers::group(&checkpoint).unwrap(), world, |_| true);
            let mut found = BTreeMap::new();
            let mut read_bytes = 0;
            for number in 0..world {
                let loader = Loader::builder(Target::Host).share(rank(number, world));
                assert_eq!(loader.plan(&checkpoint).unwrap().gap_bytes(), 0, "others read what lies between");
                for (name, given) in load(loader, &checkpoint) {
                    let id = checkpoint.find(&name).unwrap().id;
                    assert!(share.is_of(rank(number, world), id), "every rank knows who reads what");
                    assert!(given.bytes == whole[&name].bytes && given.part.is_none(), "{name}");
                    read_bytes += given.bytes.len() as u64;
                    assert!(found.insert(name, ()).is_none(), "read by two");
                }
            }
            assert_eq!(found.len(), whole.len());
            assert_eq!(read_bytes, checkpoint.tensor_bytes());
        }
    }
}

#[test]
fn shares_are_balanced_all_the_way() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let mut tensors = vec![TestTensor::random("model.embed_tokens.weight", 400_000, 1)];
    for layer in 0..24 {
        for (name, len) in
            [("q", 16_000), ("k", 4000), ("v", 4000), ("o", 16_000), ("up", 40_000), ("down", 40_000)]
        {
            tensors.push(TestTensor::random(format!("model.layers.{layer}.{name}.weight"), len, 2));
        }
        tensors.push(TestTensor::random(format!("model.layers.{layer}.norm.weight"), 100, 3));
    }
    write_file(&path, &tensors, 0);
    let checkpoint = Checkpoint::open(&path).unwrap();
    let layers = Layers::group_with(&checkpoint, &LayerMap::default()).unwrap();
    for world in [2, 3, 4, 8] {
        let share = Share::divide(&checkpoint, &layers, world, |_| true);
        let mut bytes = vec![0_u64; world as usize];
        let mut half = Vec::new();
        for (index, layer) in layers.as_slice().iter().enumerate() {
            for &tensor in layer.tensors.iter() {
                bytes[share.owner(tensor).unwrap() as usize] += checkpoint.tensor(tensor).extent.len_bytes();
            }
            if index == 12 {
                half.clone_from(&bytes);
            }
        }
        let even = checkpoint.tensor_bytes() / u64::from(world);
        let (least, most) = (*bytes.iter().min().unwrap(), *bytes.iter().max().unwrap());
        assert!(least * 100 >= even * 95 && most * 100 <= even * 105, "{world} ranks: {bytes:?} of {even}");
        // Whoever has not the embedding is about half way after half of the layers.
        let others = bytes.iter().zip(&half).filter(|(_, half)| **half < 400_000);
        for (all, half) in others.filter(|(all, half)| **all - **half < 400_000) {
            assert!(half * 100 >= all * 35 && half * 100 <= all * 75, "{world} ranks: {half} of {all}");
        }
    }
    let none = Share::divide(&checkpoint, &layers, 2, |_| false);
    assert!(checkpoint.tensors().all(|tensor| none.owner(tensor.id).is_none()));
}
