//! Which tensor goes to which file: one file per layer, experts apart, neighbours together, or
//! files filled to a size.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::path::Path;

use onelayer::convert::{Casting, Conversion, ConvertError, Experts, Grouping, Part};
use onelayer::plan::PlanError;
use onelayer::{Checkpoint, FloatType};
use onelayer_testing::{TestTensor, small_decoder, write_file, write_sharded};

/// The names of the files, and the layers in each.
fn shape(settings: Conversion, source: &Path) -> Vec<(String, Vec<String>)> {
    let folder = tempfile::tempdir().unwrap();
    let prepared = settings.prepare(source, folder.path().join("target")).unwrap();
    prepared.files().into_iter().map(|file| (file.name, file.layers)).collect()
}

fn decoder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    write_sharded(folder.path(), &small_decoder(12, 1000));
    folder
}

#[test]
fn a_file_a_layer_in_execution_order() {
    let source = decoder();
    let files = shape(Conversion::new(), source.path());
    let layers: Vec<&str> = files.iter().map(|(_, layers)| layers[0].as_str()).collect();
    let expected: Vec<String> = onelayer::Layers::group(&Checkpoint::open(source.path()).unwrap())
        .unwrap()
        .as_slice()
        .iter()
        .map(|layer| layer.id.to_string())
        .collect();
    assert_eq!(layers, expected);
    assert_eq!(files[0].0, format!("model-00001-of-{:05}.safetensors", files.len()));
    let names: Vec<&String> = files.iter().map(|(name, _)| name).collect();
    assert!(names.is_sorted(), "names sort in execution order");
    assert!(files.iter().all(|(_, layers)| layers.len() == 1));
}

#[test]
fn neighbours_share_a_file_up_to_a_size_and_large_layers_are_cut() {
    let source = decoder();
    let whole = shape(Conversion::new(), source.path()).len();
    let prepared = |most| {
        let folder = tempfile::tempdir().unwrap();
        let settings = Conversion::new().max_shard_bytes(most);
        settings.prepare(source.path(), folder.path().join("target")).unwrap().files()
    };
    for most in [3000, 10_000, 40_000, 1 << 40] {
        let files = prepared(most);
        for file in &files {
            assert!(file.file_bytes <= most + 8192 || file.tensors == 1, "{file:?}");
            assert!(file.layers.len() == 1 || file.file_bytes <= most + 8192);
        }
        // Layers in one file are neighbours. A layer that fits into a file is not cut.
        let parts: Vec<String> = files.iter().flat_map(|file| file.layers.clone()).collect();
        let mut once = parts.clone();
        once.dedup();
        assert_eq!(once.len(), whole, "{most}");
    }
    assert!(prepared(3000).len() > whole && prepared(40_000).len() < whole);
    let one = prepared(1 << 40);
    assert_eq!((one.len(), one[0].name.as_str()), (1, "model.safetensors"));
}

#[test]
fn merged_files_are_filled_tensor_by_tensor() {
    let source = decoder();
    let merged = Conversion::new().grouping(Grouping::Merged);
    assert_eq!(shape(merged.clone(), source.path()).len(), 1);
    let shards = shape(merged.max_shard_bytes(5000), source.path());
    let cut = shards.iter().filter(|(_, layers)| layers.len() > 1).count();
    assert!(shards.len() > 2 && cut > 0, "{shards:?}");
}

#[test]
fn experts_get_files_of_their_own_and_other_lists_do_not() {
    let folder = tempfile::tempdir().unwrap();
    let mut tensors = Vec::new();
    let mut add = |name: String| tensors.push(TestTensor::random(name, 64, 7));
    for layer in 0..2 {
        for expert in 0..12 {
            add(format!("model.layers.{layer}.mlp.experts.{expert}.up.weight"));
            add(format!("model.layers.{layer}.mlp.experts.{expert}.down.weight"));
        }
        // A list whose members differ: no experts.
        add(format!("model.layers.{layer}.ff.net.0.proj.weight"));
        add(format!("model.layers.{layer}.ff.net.2.weight"));
        add(format!("model.layers.{layer}.gate.weight"));
    }
    write_file(&folder.path().join("model.safetensors"), &tensors, 0);
    let together = shape(Conversion::new(), folder.path());
    assert_eq!(together.len(), 2);
    let apart =
        Conversion::new().experts(Experts::PerFile).prepare(folder.path(), folder.path().join("t")).unwrap();
    let counts: Vec<u64> = apart.files().iter().map(|file| file.tensors).collect();
    let layer = [vec![3], vec![2; 12]].concat();
    assert_eq!(counts, [layer.clone(), layer].concat());
}

#[test]
fn parts_are_disjoint_and_cover_everything() {
    let source = decoder();
    let folder = tempfile::tempdir().unwrap();
    for of in [1, 2, 5, 40] {
        let mut seen = Vec::new();
        for number in 1..=of {
            let settings = Conversion::new().part(Part::new(number, of).unwrap());
            seen.extend(settings.prepare(source.path(), folder.path().join("t")).unwrap().own_files());
        }
        let all = shape(Conversion::new(), source.path()).len();
        assert_eq!(seen, (0..all).collect::<Vec<_>>(), "{of} parts");
    }
}

#[test]
fn only_plain_floats_are_cast_unless_others_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let tensor = |name: &str, dtype: &'static str, element_bytes: usize, seed| {
        let mut tensor = TestTensor::random(name, 8 * element_bytes, seed);
        (tensor.dtype, tensor.shape) = (dtype, vec![8]);
        tensor
    };
    let tensors = [
        tensor("a", "F32", 4, 1),
        tensor("b", "BF16", 2, 2),
        tensor("c", "I32", 4, 3),
        tensor("d", "F8_E4M3", 1, 4),
        tensor("e", "BOOL", 1, 5),
        // A weight of 8 bits and its scale.
        tensor("q.weight", "I8", 1, 6),
        tensor("q.weight_scale", "F32", 4, 7),
    ];
    write_file(&folder.path().join("model.safetensors"), &tensors, 0);
    let dtypes = |settings: Conversion| {
        let target = tempfile::tempdir().unwrap();
        settings.prepare(folder.path(), target.path().join("t")).unwrap().run().unwrap();
        let checkpoint = Checkpoint::open(target.path().join("t")).unwrap();
        let dtype = |name| checkpoint.find(name).unwrap().dtype_name.to_owned();
        ["a", "b", "c", "d", "e", "q.weight", "q.weight_scale"].map(dtype).join(" ")
    };
    let to_f16 = || Conversion::new().dtype(FloatType::F16);
    assert_eq!(dtypes(to_f16()), "F16 F16 I32 F8_E4M3 BOOL I8 F32");
    let named = to_f16().dtype_rule(|tensor| match tensor.name {
        "b" => Some(Casting::Keep),
        "c" | "d" | "q.weight_scale" => Some(Casting::To(FloatType::Bf16)),
        _ => None,
    });
    assert_eq!(dtypes(named), "F16 BF16 BF16 BF16 BOOL I8 BF16");
    let truth =
        Conversion::new().dtype_rule(|tensor| (tensor.name == "e").then_some(Casting::To(FloatType::F32)));
    let refused = truth.prepare(folder.path(), folder.path().join("t")).unwrap_err();
    assert!(matches!(refused, ConvertError::CannotCast { .. }), "{refused}");
}

#[test]
fn what_is_not_selected_is_left_out_and_nothing_left_is_an_error() {
    let source = decoder();
    let some = Conversion::new()
        .select(|tensor, layer| layer.as_str() == "model.layers.3" || tensor.name == "lm_head.weight");
    assert_eq!(shape(some, source.path()).len(), 2);
    let none =
        Conversion::new().select(|_, _| false).prepare(source.path(), source.path().join("t")).unwrap_err();
    assert!(matches!(none, ConvertError::NothingSelected { .. }), "{none}");
}

/// The budget that an error names is enough, and so is every larger one, for any number of tensors:
/// the buffers of the writers get the rest.
#[test]
fn the_budget_that_a_refusal_names_works() {
    const MIB: u64 = 1 << 20;
    let source = tempfile::tempdir().unwrap();
    let many = |index: u64| {
        TestTensor::random(format!("model.layers.{}.part.{index}.weight", index / 1000), 8, index)
    };
    write_file(&source.path().join("model.safetensors"), &(0..32_000).map(many).collect::<Vec<_>>(), 0);
    let target = source.path().join("target");
    let prepare = |settings: Conversion, bytes| {
        settings.host_budget(bytes).prepare(source.path(), &target).map_err(Box::new)
    };
    for settings in [Conversion::new, || Conversion::new().grouping(Grouping::Merged)] {
        let refused = prepare(settings(), 1).unwrap_err();
        let ConvertError::Plan(PlanError::BudgetTooSmall { smallest_bytes, .. }) = *refused else {
            panic!("{refused}");
        };
        assert!(smallest_bytes > 12 * MIB, "metadata must matter: {smallest_bytes}");
        let again = prepare(settings(), smallest_bytes - 1).unwrap_err();
        assert!(again.to_string().contains(&format!("use {} MiB", smallest_bytes / MIB)), "{again}");
        for more in [1, 2, 5] {
            prepare(settings(), smallest_bytes + more * MIB).unwrap();
        }
        prepare(settings().verify(true), smallest_bytes).unwrap().run().unwrap();
        std::fs::remove_dir_all(&target).unwrap();
    }
}
