//! Weights that are quantised on their way: bit by bit what a plain reference makes of the file,
//! one number after the other, whatever the source, the budget, the readers, and whether they go to
//! memory or to files.
#![allow(clippy::unwrap_used, clippy::as_conversions, reason = "a test that cannot go on panics")]
#![allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the reference is plain")]

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::OnceLock;

use half::{bf16, f16};
use onelayer::convert::{Conversion, ConvertError, Grouping, Verification};
use onelayer::{
    Checkpoint, DType, IoMode, LayerId, LoadError, Loader, LoaderBuilder, PlanError, Quantisation, Rank,
    SplitRules, Target, Window,
};
use onelayer_testing::{TestTensor, random_bytes, write_file, write_sharded};

const MODES: [IoMode; 5] = [IoMode::Auto, IoMode::Buffered, IoMode::Mmap, IoMode::Direct, IoMode::Uring];

/// What becomes of one tensor: bytes of the values, bytes of the scales, the largest error, the
/// root mean square.
struct Expected {
    values: Vec<u8>,
    scales: Vec<u8>,
    max_abs_error: f32,
    rms_error: f64,
}

/// The numbers of a tensor in single precision.
fn numbers(dtype: &str, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        "F64" => bytes.chunks(8).map(|b| f64::from_le_bytes(b.try_into().unwrap()) as f32).collect(),
        "F32" => bytes.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect(),
        "F16" => bytes.chunks(2).map(|b| f16::from_le_bytes(b.try_into().unwrap()).to_f32()).collect(),
        "BF16" => bytes.chunks(2).map(|b| bf16::from_le_bytes(b.try_into().unwrap()).to_f32()).collect(),
        other => panic!("{other} is not quantised"),
    }
}

/// The number that an E4M3 byte without its sign stands for, by its definition.
fn e4m3(code: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(code >> 3), f64::from(code & 7));
    if exponent == 0 { mantissa / 512.0 } else { (1.0 + mantissa / 8.0) * 2_f64.powi(exponent - 7) }
}

/// The nearest E4M3 of at most 448; of two that are as near, the one whose last bit is zero.
fn nearest_e4m3(number: f32) -> u8 {
    let magnitude = f64::from(number.abs()).min(448.0);
    let distance = |code: u8| ((e4m3(code) - magnitude).abs(), code & 1);
    // The largest that is not above it, or the one behind that.
    let below = (0..=0x7E_u8).rev().find(|&code| e4m3(code) <= magnitude).unwrap();
    let [one, other] = [below, (below + 1).min(0x7E)];
    let code = if distance(other) < distance(one) { other } else { one };
    code | if number.is_sign_negative() { 0x80 } else { 0 }
}

fn group_of(form: Quantisation, row: usize) -> usize {
    form.group_elements().map_or(row, |group| group as usize)
}

fn reference(form: Quantisation, row: usize, numbers: &[f32]) -> Expected {
    let (mut values, mut scales, mut errors) = (Vec::new(), Vec::new(), Vec::new());
    for numbers in numbers.chunks(row) {
        let mut nibbles = Vec::new();
        for group in numbers.chunks(group_of(form, row)) {
            let most = group.iter().fold(0_f32, |most, x| most.max(x.abs()));
            let largest = match form {
                Quantisation::Int8 => 127.0,
                Quantisation::Fp8 => 448.0,
                _ => 7.0,
            };
            let mut scale = most / largest;
            if form.group_elements().is_some() {
                scale = bf16::from_f32(scale).to_f32();
            }
            if scale == 0.0 {
                scale = 1.0;
            }
            match form.group_elements() {
                Some(_) => scales.extend(bf16::from_f32(scale).to_le_bytes()),
                None => scales.extend(scale.to_le_bytes()),
            }
            for &number in group {
                let quotient = number / scale;
                let left = if form == Quantisation::Fp8 {
                    let code = nearest_e4m3(quotient);
                    values.push(code);
                    let magnitude = e4m3(code & 0x7F) as f32;
                    if code & 0x80 == 0 { magnitude } else { -magnitude }
                } else {
                    let rounded = quotient.round_ties_even().clamp(-largest, largest);
                    match form {
                        Quantisation::Int8 => values.push((rounded as i8) as u8),
                        _ => nibbles.push((rounded as i8 + 8) as u8),
                    }
                    rounded
                };
                errors.push((number - left * scale).abs());
            }
        }
        values.extend(nibbles.chunks(2).map(|pair| pair[0] | pair.get(1).copied().unwrap_or(0) << 4));
    }
    let squares: f64 = errors.iter().map(|&error| f64::from(error).powi(2)).sum();
    let max_abs_error = errors.iter().fold(0_f32, |most, &error| most.max(error));
    Expected { values, scales, max_abs_error, rms_error: (squares / errors.len() as f64).sqrt() }
}

/// Numbers of all magnitudes that weights have, and of some that they should not have; each row
/// with its own.
fn weights(dtype: &'static str, shape: &[u64], seed: u64) -> Vec<u8> {
    let row = *shape.last().unwrap() as usize;
    let count = shape.iter().product::<u64>() as usize;
    let random = random_bytes(4 * count, seed);
    let mut bytes = Vec::new();
    for (index, word) in random.chunks(4).enumerate() {
        let word = u32::from_le_bytes(word.try_into().unwrap());
        let unit = f64::from(word) / f64::from(u32::MAX) * 2.0 - 1.0;
        let number = match index / row % 7 {
            0 => unit * 0.05,
            // Ties of int8 and int4: the largest is 127, and so the scale is one.
            1 => {
                if index % row == 0 {
                    127.0
                } else {
                    f64::from(word % 256) / 2.0 - 64.0
                }
            }
            2 => 0.0,
            // Subnormal numbers of single precision; zeros in `f16`.
            3 => unit * 1e-40,
            4 => unit * unit * unit * 3.0,
            5 => {
                if index % 50 == 3 {
                    1000.0
                } else {
                    unit * 0.01
                }
            }
            _ => -unit * 6e-5,
        };
        match dtype {
            "F64" => bytes.extend(number.to_le_bytes()),
            "F32" => bytes.extend((number as f32).to_le_bytes()),
            "F16" => bytes.extend(f16::from_f64(number).to_le_bytes()),
            _ => bytes.extend(bf16::from_f64(number).to_le_bytes()),
        }
    }
    bytes
}

fn weight(name: &str, dtype: &'static str, shape: &[u64], seed: u64) -> TestTensor {
    TestTensor { name: name.into(), dtype, shape: shape.to_vec(), bytes: weights(dtype, shape, seed) }
}

/// Which of them are weights of layers.
fn is_quantised(name: &str) -> bool {
    ["q_proj.weight", "up_proj.weight", "down_proj.weight", "k_proj.weight", "gate_up_proj"]
        .iter()
        .any(|end| name.ends_with(end))
        && name.starts_with("model.layers.")
}

/// Three layers with weights of every type and of odd shapes, and what is not quantised.
fn model() -> Vec<Vec<TestTensor>> {
    let mut shards = vec![vec![weight("model.embed_tokens.weight", "BF16", &[50, 96], 1)]];
    for layer in 0..3 {
        let name = |rest: &str| format!("model.layers.{layer}.{rest}");
        let seed = 10 + 10 * layer;
        let large = if layer == 1 { [1101, 1001] } else { [70, 96] };
        shards.push(vec![
            weight(&name("self_attn.q_proj.weight"), "BF16", &large, seed),
            weight(&name("self_attn.q_proj.bias"), "BF16", &[large[0]], seed + 1),
            weight(&name("input_layernorm.weight"), "F32", &[3], seed + 2),
            weight(&name("mlp.up_proj.weight"), "F32", &[130, 257], seed + 3),
            weight(&name("mlp.experts.gate_up_proj"), "F16", &[3, 20, 65], seed + 4),
            weight(&name("mlp.experts.gate_up_proj_bias"), "F16", &[3, 40], seed + 5),
            weight(&name("mlp.gate.weight"), "BF16", &[3, 96], seed + 6),
            weight(&name("mlp.down_proj.weight"), "F64", &[41, 33], seed + 7),
            weight(&name("self_attn.k_proj.weight"), "BF16", &[9, 32], seed + 8),
            weight(&name("self_attn.conv.weight"), "BF16", &[96, 1, 4], seed + 9),
        ]);
    }
    shards.push(vec![weight("lm_head.weight", "BF16", &[50, 96], 2)]);
    shards
}

type Delivered = BTreeMap<String, (DType, Vec<u64>, Vec<u8>)>;

/// What has to arrive: by name, with type, shape and bytes.
fn expected(shards: &[Vec<TestTensor>], form: Quantisation, is_quantised: fn(&str) -> bool) -> Delivered {
    let mut all = BTreeMap::new();
    for tensor in shards.iter().flatten() {
        if !is_quantised(&tensor.name) {
            let dtype = tensor.dtype.parse().unwrap();
            all.insert(tensor.name.clone(), (dtype, tensor.shape.clone(), tensor.bytes.clone()));
            continue;
        }
        let row = *tensor.shape.last().unwrap() as usize;
        let made = reference(form, row, &numbers(tensor.dtype, &tensor.bytes));
        let with_last = |last: usize| {
            let mut shape = tensor.shape.clone();
            *shape.last_mut().unwrap() = last as u64;
            shape
        };
        let is_int4 = form.group_elements().is_some();
        let values = if is_int4 { row.div_ceil(2) } else { row };
        let scale_shape = with_last(row.div_ceil(group_of(form, row)));
        all.insert(tensor.name.clone(), (form.values(), with_last(values), made.values));
        all.insert(format!("{}_scale", tensor.name), (form.scales(), scale_shape, made.scales));
    }
    all
}

/// What has to arrive of `model`: made once, since the reference is slow.
fn expected_of_model(form: Quantisation) -> &'static Delivered {
    static MADE: [OnceLock<Delivered>; Quantisation::ALL.len()] =
        [const { OnceLock::new() }; Quantisation::ALL.len()];
    let place = Quantisation::ALL.iter().position(|other| *other == form).unwrap();
    MADE[place].get_or_init(|| expected(&model(), form, is_quantised))
}

fn loaded(loader: &Loader, checkpoint: &Checkpoint) -> Delivered {
    let mut all = BTreeMap::new();
    for layer in loader.stream(checkpoint).unwrap() {
        let layer = layer.unwrap();
        for tensor in layer.tensors() {
            let again = layer.tensor(tensor.name()).unwrap();
            assert_eq!((again.name(), again.len_bytes()), (tensor.name(), tensor.len_bytes()));
            let bytes = tensor.as_bytes().unwrap().to_vec();
            let known =
                all.insert(tensor.name().to_owned(), (tensor.dtype(), tensor.shape().to_vec(), bytes));
            assert!(known.is_none(), "{} came twice", tensor.name());
        }
    }
    all
}

#[track_caller]
fn assert_same(found: &Delivered, expected: &Delivered, what: &str) {
    let names = |list: &Delivered| list.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(found), names(expected), "{what}");
    for (name, (dtype, shape, bytes)) in expected {
        let found = &found[name];
        assert_eq!((&found.0, &found.1), (dtype, shape), "{what}: {name}");
        let first = found.2.iter().zip(bytes).position(|(left, right)| left != right);
        assert!(found.2 == *bytes, "{what}: {name} differs first at byte {first:?}");
    }
}

#[test]
fn what_arrives_is_what_the_reference_makes() {
    let folder = tempfile::tempdir().unwrap();
    write_sharded(folder.path(), &model());
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    for form in Quantisation::ALL {
        let expected = expected_of_model(form);
        for io in MODES {
            let builder = || Loader::builder(Target::Host).io(io).quantise(form);
            let smallest = builder().plan(&checkpoint).unwrap().memory().smallest_budget_bytes();
            let below = builder().host_budget(smallest - (1 << 20)).plan(&checkpoint).unwrap_err();
            assert!(below.is_over_budget(), "{below}");
            for (budget, window, readers) in [(smallest, 1, 1), (smallest + (3 << 20), 2, 3)] {
                let loader = builder().host_budget(budget).window(Window::Layers(window)).readers(readers);
                let found = loaded(&loader.build().unwrap(), &checkpoint);
                assert_same(&found, expected, &format!("{form}, {io}, {budget} bytes"));
            }
        }
    }
}

#[test]
fn all_at_once_and_hashed_on_the_way() {
    let folder = tempfile::tempdir().unwrap();
    write_sharded(folder.path(), &model());
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    for form in Quantisation::ALL {
        let expected = expected_of_model(form);
        let model = Loader::builder(Target::Host).quantise(form).build().unwrap().load(&checkpoint).unwrap();
        for (name, (dtype, shape, bytes)) in expected {
            let tensor = model.tensor(name).unwrap();
            assert_eq!((tensor.name(), tensor.dtype(), tensor.shape()), (name.as_str(), *dtype, &**shape));
            assert!(tensor.as_bytes().unwrap() == bytes, "{form}: {name}");
        }
        let loader = Loader::builder(Target::None).quantise(form).hash(true).host_budget(8 << 20);
        let mut hashes = BTreeMap::new();
        for layer in loader.build().unwrap().stream(&checkpoint).unwrap() {
            let layer = layer.unwrap();
            hashes.extend(
                layer.tensors().map(|t| (t.name().to_owned(), *t.hash().unwrap().unwrap().as_bytes())),
            );
        }
        let wanted =
            expected.iter().map(|(name, (.., bytes))| (name.clone(), *blake3::hash(bytes).as_bytes()));
        assert!(hashes.into_iter().eq(wanted), "{form}");
    }
}

/// The same of a model's own weights, by a script that numpy computes for:
/// fixtures/make_quantised_hashes.py.
#[test]
fn what_arrives_is_what_numpy_makes() {
    use sha2::Digest as _;
    let text = std::fs::read_to_string(onelayer_testing::repository().join("fixtures/quantised_hashes.json"));
    let hashes: BTreeMap<String, BTreeMap<String, String>> = serde_json::from_str(&text.unwrap()).unwrap();
    for folder in ["llama", "llama_sharded"] {
        let checkpoint = Checkpoint::open(onelayer_testing::fixture(folder)).unwrap();
        for form in Quantisation::ALL {
            let wanted = &hashes[form.name()];
            assert!(wanted.len() > 20);
            let found = loaded(&Loader::builder(Target::Host).quantise(form).build().unwrap(), &checkpoint);
            for (name, hash) in wanted {
                let (_, _, bytes) = &found[name];
                let found: String =
                    sha2::Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
                assert_eq!(found, *hash, "{form}: {name}");
            }
            let scales = found.keys().filter(|name| name.ends_with("_scale")).count();
            assert_eq!(2 * scales, wanted.len(), "{form}: nothing else is quantised");
        }
    }
}

#[test]
fn what_is_lost_is_told_for_each_tensor() {
    let folder = tempfile::tempdir().unwrap();
    write_sharded(folder.path(), &model());
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let tensors: Vec<TestTensor> = model().into_iter().flatten().collect();
    for form in Quantisation::ALL {
        let mut reports = Vec::new();
        for (budget_mib, readers) in [(6, 1), (32, 4)] {
            let loader = Loader::builder(Target::Host).quantise(form).host_budget(budget_mib << 20);
            let loader = loader.readers(readers).window(Window::All).build().unwrap();
            let mut stream = loader.stream(&checkpoint).unwrap();
            stream.by_ref().for_each(|layer| drop(layer.unwrap()));
            reports.push(stream.progress().quantisation_errors());
        }
        assert_eq!(reports[0], reports[1], "{form}");
        let wanted: Vec<_> = tensors.iter().filter(|tensor| is_quantised(&tensor.name)).collect();
        assert_eq!(reports[0].len(), wanted.len());
        for error in &reports[0] {
            let name = checkpoint.tensor(error.tensor).name;
            let tensor = wanted.iter().find(|tensor| tensor.name == name).unwrap();
            let numbers = numbers(tensor.dtype, &tensor.bytes);
            let made = reference(form, *tensor.shape.last().unwrap() as usize, &numbers);
            assert_eq!(error.elements, numbers.len() as u64, "{name}");
            assert_eq!(error.max_abs, numbers.iter().fold(0_f32, |most, x| most.max(x.abs())), "{name}");
            assert_eq!(error.max_abs_error, made.max_abs_error, "{form}: {name}");
            let off = f64::from(error.rms_error) / made.rms_error - 1.0;
            assert!(off.abs() < 1e-6, "{form}: {name}: {} and {}", error.rms_error, made.rms_error);
        }
    }
}

#[test]
fn a_choice_of_names_replaces_the_rule() {
    let folder = tempfile::tempdir().unwrap();
    write_sharded(folder.path(), &model());
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let chosen = |name: &str| name == "lm_head.weight" || name.ends_with("mlp.gate.weight");
    let loader = Loader::builder(Target::Host).quantise(Quantisation::Int8);
    let loader = loader.quantise_only(move |entry| chosen(entry.name) || entry.name.contains("bias"));
    let is_quantised = |name: &str| {
        // The bias of the experts has two dimensions and 40 columns.
        name == "lm_head.weight" || name.ends_with("mlp.gate.weight") || name.ends_with("gate_up_proj_bias")
    };
    let found = loaded(&loader.build().unwrap(), &checkpoint);
    assert_same(&found, &expected(&model(), Quantisation::Int8, is_quantised), "chosen");
}

/// A file, as a reader of this format sees it that is not ours.
fn read_back(folder: &Path) -> Delivered {
    let mut all = BTreeMap::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            let bytes = std::fs::read(&path).unwrap();
            let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            for (name, view) in file.tensors() {
                let dtype: DType =
                    serde_json::to_value(view.dtype()).unwrap().as_str().unwrap().parse().unwrap();
                let shape = view.shape().iter().map(|&extent| extent as u64).collect();
                let start = view.data().as_ptr().addr() - bytes.as_ptr().addr();
                let element = dtype.bits().unwrap().div_ceil(8) as usize;
                assert!(start.is_multiple_of(element), "{name} begins beside its element");
                assert!(all.insert(name, (dtype, shape, view.data().to_vec())).is_none());
            }
        }
    }
    all
}

#[test]
fn a_conversion_writes_the_same_and_loads_as_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("source");
    std::fs::create_dir(&source).unwrap();
    write_sharded(&source, &model());
    for form in Quantisation::ALL {
        let expected = expected_of_model(form);
        for (budget_mib, jobs, grouping) in
            [(7, 1, Grouping::PerLayer), (64, 4, Grouping::PerLayer), (64, 2, Grouping::Merged)]
        {
            let target = folder.path().join(format!("{form}-{budget_mib}-{jobs}"));
            let settings = Conversion::new().quantise(form).verify(true).grouping(grouping);
            let settings = settings.host_budget(budget_mib << 20).jobs(jobs);
            let report = settings.prepare(&source, &target).unwrap().run().unwrap();
            let verification = report.verification.unwrap();
            assert_eq!(verification.differences, [], "{form}");
            assert_eq!(verification.tensors, expected.len() as u64, "values and scales are compared");
            let quantised = expected.keys().filter(|name| name.ends_with("_scale")).count();
            assert_eq!(report.quantisation.len(), quantised);
            assert_same(&read_back(&target), expected, &format!("{form}, {budget_mib} MiB, {grouping:?}"));
            let checkpoint = Checkpoint::open(&target).unwrap();
            let found = loaded(&Loader::builder(Target::Host).build().unwrap(), &checkpoint);
            assert_same(&found, expected, &format!("{form}, loaded again"));
            scales_are_in_the_layer_of_their_weight(&checkpoint);
        }
        let [one, other] = ["7-1", "64-4"].map(|made| folder.path().join(format!("{form}-{made}")));
        for entry in std::fs::read_dir(&one).unwrap() {
            let name = entry.unwrap().file_name();
            if name.to_string_lossy().contains("model") {
                let [one, other] = [&one, &other].map(|folder| std::fs::read(folder.join(&name)).unwrap());
                assert!(one == other, "{} depends on budget or jobs", name.display());
            }
        }
    }
}

fn scales_are_in_the_layer_of_their_weight(checkpoint: &Checkpoint) {
    let layers = onelayer::Layers::group(checkpoint).unwrap();
    for entry in checkpoint.tensors().filter(|entry| entry.name.ends_with("_scale")) {
        let weight = checkpoint.find(entry.name.strip_suffix("_scale").unwrap()).unwrap();
        assert_eq!(layers.position_of(entry.id), layers.position_of(weight.id), "{}", entry.name);
        assert!(layers.companions().contains(&(entry.id, weight.id)), "{} is no companion", entry.name);
    }
}

#[test]
fn a_conversion_that_was_damaged_is_found_out() {
    let folder = tempfile::tempdir().unwrap();
    let (source, target) = (folder.path().join("source.safetensors"), folder.path().join("target"));
    write_file(&source, &model().into_iter().flatten().collect::<Vec<_>>(), 0);
    let settings = Conversion::new().quantise(Quantisation::Int8);
    settings.prepare(&source, &target).unwrap().run().unwrap();
    let compare = || Verification::new().run(&target, Some(&source), &mut |_| {}).unwrap();
    assert_eq!(compare().differences, []);
    // A weight of the source becomes another one: values and scale of its row are no longer what is
    // made of it.
    let checkpoint = Checkpoint::open(&source).unwrap();
    let changed = checkpoint.find("model.layers.1.mlp.up_proj.weight").unwrap();
    let at = changed.extent.start() as usize;
    let path = checkpoint.shards()[0].path.clone();
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[at..at + 4].copy_from_slice(&9.5_f32.to_le_bytes());
    std::fs::write(&path, bytes).unwrap();
    let found = compare().differences;
    let places: Vec<&str> = found.iter().map(|difference| difference.place.as_str()).collect();
    assert_eq!(places, ["model.layers.1.mlp.up_proj.weight_scale", "model.layers.1.mlp.up_proj.weight"]);
    assert!(found[1].what.contains("other values than int8 makes"), "{}", found[1].what);
}

#[test]
fn a_row_that_is_not_finite_ends_the_load_by_name() {
    for (dtype, special) in [
        ("BF16", vec![0x80, 0xFF]),
        ("F32", vec![1, 0, 0x80, 0x7F]),
        ("F64", {
            // Finite, but not in single precision.
            1e300_f64.to_le_bytes().to_vec()
        }),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let mut tensors: Vec<TestTensor> = (0..3)
            .map(|layer| {
                weight(&format!("model.layers.{layer}.mlp.up_proj.weight"), dtype, &[700, 513], layer)
            })
            .collect();
        tensors.extend(
            (0..3).map(|layer| weight(&format!("model.layers.{layer}.norm.weight"), "F32", &[5], layer)),
        );
        let row_bytes = 513 * special.len();
        let at = 601 * row_bytes + 40 * special.len();
        tensors[1].bytes[at..at + special.len()].copy_from_slice(&special);
        let path = folder.path().join("model.safetensors");
        write_file(&path, &tensors, 0);
        let checkpoint = Checkpoint::open(&path).unwrap();
        for form in Quantisation::ALL {
            let loader = Loader::builder(Target::Host).quantise(form).host_budget(6 << 20).build().unwrap();
            let error = loader.stream(&checkpoint).unwrap().find_map(Result::err).unwrap();
            let LoadError::NotFinite { tensor, row } = &error else { panic!("{error}") };
            assert_eq!((tensor.as_str(), *row), ("model.layers.1.mlp.up_proj.weight", 601));
            let target = folder.path().join(format!("{form}"));
            let error = Conversion::new().quantise(form).prepare(&path, &target).unwrap().run().unwrap_err();
            assert!(matches!(error, ConvertError::Load(LoadError::NotFinite { row: 601, .. })), "{error}");
        }
    }
}

#[test]
fn what_cannot_be_is_refused_before_anything_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    write_file(&path, &[weight("model.norm.weight", "BF16", &[40], 1)], 0);
    let checkpoint = Checkpoint::open(&path).unwrap();
    let nothing = Loader::builder(Target::Host).quantise(Quantisation::Fp8).plan(&checkpoint).unwrap_err();
    assert!(matches!(nothing, LoadError::Plan(PlanError::NothingToQuantise { .. })), "{nothing}");
    let refused = Conversion::new().quantise(Quantisation::Fp8).prepare(&path, folder.path().join("x"));
    let refused = refused.unwrap_err();
    assert!(matches!(refused, ConvertError::Plan(PlanError::NothingToQuantise { .. })), "{refused}");

    write_sharded(folder.path(), &model());
    std::fs::remove_file(&path).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let rules = SplitRules::common();
    let shard = Loader::builder(Target::Host)
        .quantise(Quantisation::Int8)
        .shard(Rank::new(0, 2).unwrap(), rules)
        .plan(&checkpoint)
        .unwrap_err();
    assert!(matches!(shard, LoadError::Plan(PlanError::QuantisedShard { .. })), "{shard}");
}

/// What is selected may be an embedding alone: it is asked of the checkpoint whether there is
/// anything to quantise.
#[test]
fn a_part_without_weights_arrives_as_it_is() {
    let folder = tempfile::tempdir().unwrap();
    write_sharded(folder.path(), &model());
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let quantising = || Loader::builder(Target::Host).quantise(Quantisation::Int8).host_budget(6 << 20);
    let embedding = quantising().select(|tensor| tensor.name.contains("embed_tokens"));
    let found = loaded(&embedding.build().unwrap(), &checkpoint);
    let whole = model();
    let stored = &whole[0][0];
    assert_eq!(found.len(), 1);
    assert_eq!(found[&stored.name], (DType::Bf16, stored.shape.clone(), stored.bytes.clone()));

    // So a layer of either kind can be replaced with a loader that quantises.
    let loader = quantising().build().unwrap();
    let mut resident = loader.load(&checkpoint).unwrap();
    for id in ["model.embed_tokens", "model.layers.1"].map(LayerId::new) {
        let before = resident.layer(&id).unwrap().resident_bytes();
        let receipt = resident.replace(&id, &loader, &checkpoint).unwrap();
        assert!(receipt.is_complete() && receipt.asked_bytes == before, "{receipt}");
        assert_eq!(resident.layer(&id).unwrap().resident_bytes(), before);
    }
    let whole = expected(&whole, Quantisation::Int8, is_quantised);
    for (name, (dtype, _, bytes)) in &whole {
        let tensor = resident.tensor(name).unwrap();
        assert!(tensor.dtype() == *dtype && tensor.as_bytes().unwrap() == bytes, "{name}");
    }
}

/// CPU that this thread has used, in nanoseconds.
fn cpu_ns() -> u64 {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    stat.split(' ').next().unwrap().parse().unwrap()
}

/// A hostile set: weights in plain floats, each with a companion in plain floats, so that none of
/// them is quantised. Whether a tensor has a companion may not take a look at all of them.
#[test]
fn a_hundred_thousand_names_with_companions_are_planned_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let mut tensors = Vec::new();
    for number in 0..50_000 {
        let name = format!("model.layers.{}.m{}.weight", number % 50, number / 50);
        let bytes = vec![0; 64];
        tensors.push(TestTensor {
            name: format!("{name}_scale"),
            dtype: "F32",
            shape: vec![],
            bytes: vec![0; 4],
        });
        tensors.push(TestTensor { name, dtype: "BF16", shape: vec![1, 32], bytes });
    }
    tensors.push(weight("model.layers.0.up.weight", "BF16", &[4, 64], 1));
    let path = folder.path().join("model.safetensors");
    write_file(&path, &tensors, 0);
    let checkpoint = Checkpoint::open(&path).unwrap();
    let planned = |settings: LoaderBuilder| {
        let before = cpu_ns();
        let plan = settings.host_budget(512 << 20).plan(&checkpoint).unwrap();
        (plan, cpu_ns() - before)
    };
    let (plain, plain_ns) = planned(Loader::builder(Target::Host));
    let (plan, quantising_ns) = planned(Loader::builder(Target::Host).quantise(Quantisation::Int8));
    assert_eq!(plan.quantised().len(), 1);
    assert_eq!(plan.tensor_bytes(), plain.tensor_bytes() - 4 * 128 + 4 * (64 + 4));
    // Compared pair by pair, it takes 1.25 billion steps, and twenty times as long.
    assert!(quantising_ns < 5 * plain_ns, "{quantising_ns} ns, without quantising {plain_ns} ns");
}

/// A row is never cut, so one that is longer than a slot raises the smallest budget; and says so.
#[test]
fn a_row_longer_than_a_slot_needs_a_larger_budget() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let mut tensors: Vec<TestTensor> = (0..2)
        .map(|layer| weight(&format!("model.layers.{layer}.mlp.up_proj.weight"), "F32", &[3, 400_001], layer))
        .collect();
    tensors
        .extend((0..2).map(|layer| weight(&format!("model.layers.{layer}.norm.weight"), "F32", &[5], layer)));
    write_file(&path, &tensors, 0);
    let checkpoint = Checkpoint::open(&path).unwrap();
    let builder = || Loader::builder(Target::Host).quantise(Quantisation::Int4G64);
    let smallest = builder().plan(&checkpoint).unwrap().memory().smallest_budget_bytes();
    assert!(smallest > 12 << 20, "four slots of two rows each");
    let refused = builder().host_budget(8 << 20).plan(&checkpoint).unwrap_err();
    let text = refused.to_string();
    assert!(
        refused.is_over_budget() && text.contains("\"model.layers.0.mlp.up_proj.weight\" is 1.5 MiB"),
        "{text}"
    );
    let loader = builder().host_budget(smallest).build().unwrap();
    let is_quantised = |name: &str| name.ends_with("up_proj.weight");
    assert_same(
        &loaded(&loader, &checkpoint),
        &expected(&[tensors], Quantisation::Int4G64, is_quantised),
        "long rows",
    );
}
