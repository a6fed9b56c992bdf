//! Everything a path may lead to: one file, shards with and without an index, several copies side
//! by side, pipelines and the hub's cache. And the checkpoints in `fixtures/`, compared tensor by
//! tensor with what the reference package reads.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests too")]

use std::collections::BTreeMap;
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};

use onelayer::checkpoint::{Checkpoint, CheckpointError, HubCache};
use onelayer_testing::safetensors_file::{FileBuilder, index};

fn fixtures() -> PathBuf {
    onelayer_testing::repository().join("fixtures")
}

/// A file with tensors of one byte each.
fn bytes_file(path: impl AsRef<Path>, names: &[&str]) {
    let path = path.as_ref();
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    names
        .iter()
        .fold(FileBuilder::new().metadata("format", "pt"), |file, name| file.bytes_tensor(name, 1))
        .write(path);
}

fn names(checkpoint: &Checkpoint) -> Vec<String> {
    let mut names: Vec<String> = checkpoint.tensors().map(|tensor| tensor.name.to_owned()).collect();
    names.sort();
    names
}

fn file_names(checkpoint: &Checkpoint) -> Vec<String> {
    let names = checkpoint
        .shards()
        .iter()
        .map(|shard| shard.path.file_name().unwrap().to_string_lossy().into_owned());
    names.collect()
}

/// Opens, and checks what holds for every checkpoint.
#[track_caller]
fn open(path: impl AsRef<Path>) -> Checkpoint {
    let path = path.as_ref();
    let checkpoint = Checkpoint::open(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut sum = 0;
    for (position, tensor) in checkpoint.tensors().enumerate() {
        assert_eq!(tensor.id.index(), position);
        assert_eq!(checkpoint.tensor(tensor.id), tensor);
        assert_eq!(checkpoint.find(tensor.name), Some(tensor));
        let shard = checkpoint.shard(tensor.shard);
        assert!(shard.data.contains(tensor.extent));
        assert_eq!(shard.identity.len_bytes, shard.data.end());
        sum += tensor.extent.len_bytes();
    }
    assert_eq!(checkpoint.tensors().len(), checkpoint.tensor_count());
    assert_eq!(checkpoint.tensor_bytes(), sum);
    assert!(checkpoint.find("no such tensor").is_none());
    checkpoint
}

#[test]
fn fixtures_hold_the_bytes_that_the_reference_reads() {
    let text = std::fs::read_to_string(fixtures().join("reference_hashes.json")).unwrap();
    let reference: BTreeMap<String, BTreeMap<String, serde_json::Value>> =
        serde_json::from_str(&text).unwrap();
    assert_eq!(reference.len(), 5);
    for (folder, tensors) in reference {
        let checkpoint = open(fixtures().join("checkpoints").join(&folder));
        assert_eq!(checkpoint.tensor_count(), tensors.len(), "{folder}");
        assert_eq!(checkpoint.notes(), [""; 0], "{folder}");
        for (name, expected) in tensors {
            let tensor = checkpoint.find(&name).unwrap_or_else(|| panic!("{folder}: no {name}"));
            assert_eq!(expected["dtype"], tensor.dtype_name);
            assert_eq!(expected["shape"], serde_json::json!(tensor.shape));
            assert_eq!(expected["bytes"], tensor.extent.len_bytes());
            let mut bytes = vec![0; usize::try_from(tensor.extent.len_bytes()).unwrap()];
            let file = std::fs::File::open(&checkpoint.shard(tensor.shard).path).unwrap();
            file.read_exact_at(&mut bytes, tensor.extent.start()).unwrap();
            assert_eq!(expected["blake3"], blake3::hash(&bytes).to_hex().as_str(), "{folder}: {name}");
        }
    }
}

#[test]
fn one_set_opens_alike_by_every_path_to_it() {
    let folder = fixtures().join("checkpoints/llama_sharded");
    let by_folder = open(&folder);
    let by_index = open(folder.join("model.safetensors.index.json"));
    assert_eq!(by_folder.shards().len(), 4);
    assert!(by_folder.tensors().eq(by_index.tensors()));
    let metadata = &by_folder.shards()[0].metadata;
    assert_eq!(metadata.iter().collect::<Vec<_>>(), [("format", "pt")]);
    // Sorted by shard, then by offset.
    let order: Vec<_> = by_folder.tensors().map(|tensor| (tensor.shard, tensor.extent.start())).collect();
    assert!(order.is_sorted());
    let shard = open(folder.join("model-00002-of-00004.safetensors"));
    assert_eq!(shard.tensor_count(), 16);
    assert!(by_folder.metadata_bytes() > shard.metadata_bytes());
}

#[test]
fn the_index_wins_over_other_copies() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    bytes_file(path.join("model-1.safetensors"), &["a"]);
    bytes_file(path.join("model-2.safetensors"), &["b"]);
    bytes_file(path.join("model.safetensors"), &["whole"]);
    bytes_file(path.join(".hidden.safetensors"), &["hidden"]);
    std::fs::create_dir(path.join("folder.safetensors")).unwrap();
    let text = index(&[("a", "./model-1.safetensors"), ("b", "model-2.safetensors")]);
    std::fs::write(path.join("model.safetensors.index.json"), text).unwrap();
    let checkpoint = open(path);
    assert_eq!(names(&checkpoint), ["a", "b"]);
    let [note] = checkpoint.notes() else { panic!("{:?}", checkpoint.notes()) };
    assert!(note.ends_with("model.safetensors.index.json wins; not read: model.safetensors"), "{note}");
}

#[test]
fn variants_are_chosen_by_the_stated_rule() {
    let variants = [
        "model.bf16.safetensors.index.json",
        "model.safetensors.index.fp16.json",
        "diffusion_pytorch_model.safetensors.index.json",
        "other.safetensors.index.json",
        "model.safetensors.index.json",
    ];
    // The last of the list is the best; without it the next best is taken, and so on.
    let best_first = [
        "model.safetensors.index.json",
        "diffusion_pytorch_model.safetensors.index.json",
        "other.safetensors.index.json",
        "model.bf16.safetensors.index.json",
        "model.safetensors.index.fp16.json",
    ];
    let folder = tempfile::tempdir().unwrap();
    for variant in variants {
        let file = format!("{variant}.of.safetensors");
        bytes_file(folder.path().join(&file), &[variant]);
        std::fs::write(folder.path().join(variant), index(&[(variant, &file)])).unwrap();
    }
    for (position, best) in best_first.into_iter().enumerate() {
        let checkpoint = open(folder.path());
        assert_eq!(names(&checkpoint), [best]);
        let last = position + 1 == best_first.len();
        let said =
            checkpoint.notes().iter().filter(|note| note.contains(&format!("{best} wins; not read: ")));
        assert_eq!(said.count(), if last { 1 } else { 2 }, "{:?}", checkpoint.notes());
        std::fs::remove_file(folder.path().join(best)).unwrap();
    }
}

#[test]
fn directories_without_an_index_follow_the_stated_rule() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let step = |file: &str, expected: &[&str]| {
        bytes_file(path.join(file), &[file]);
        assert_eq!(file_names(&open(path)), expected, "{file}");
    };
    step("z.safetensors", &["z.safetensors"]);
    step("a.safetensors", &["a.safetensors", "z.safetensors"]);
    step("model.fp16.safetensors", &["model.fp16.safetensors"]);
    step("model.bf16.safetensors", &["model.bf16.safetensors"]);
    step("x-0-of-1.safetensors", &["x-0-of-1.safetensors"]);
    step("diffusion_pytorch_model.safetensors", &["diffusion_pytorch_model.safetensors"]);
    step("model.safetensors", &["model.safetensors"]);
    let checkpoint = open(path);
    let [note] = checkpoint.notes() else { panic!("{:?}", checkpoint.notes()) };
    assert!(note.contains("model.safetensors wins") && note.ends_with("and 2 more"), "{note}");
}

#[test]
fn numbered_sets_are_taken_whole_or_not_at_all() {
    for (files, missing) in [
        (vec!["m-00001-of-00002", "m-00002-of-00002"], None),
        (vec!["m-00000-of-00002", "m-00001-of-00002"], None),
        (vec!["m-00000-of-000002", "m-00001-of-000002", "m-00002-of-000002"], None),
        (vec!["m_00001-of-2", "m_00002-of-2"], None),
        (vec!["m.fp16-1-of-2", "m.fp16-2-of-2"], None),
        (vec!["m-00001-of-00002"], Some("m-00002-of-00002.safetensors")),
        (vec!["m-00001-of-00003", "m-00003-of-00003"], Some("m-00002-of-00003.safetensors")),
        (vec!["m-00000-of-00003", "m-00002-of-00003"], Some("m-00001-of-00003.safetensors")),
    ] {
        let folder = tempfile::tempdir().unwrap();
        for file in &files {
            bytes_file(folder.path().join(format!("{file}.safetensors")), &[file]);
        }
        match missing {
            None => assert_eq!(open(folder.path()).shards().len(), files.len()),
            Some(expected) => match Checkpoint::open(folder.path()) {
                Err(CheckpointError::MissingShards { missing, missing_count: 1, .. }) => {
                    assert_eq!(missing, [expected]);
                }
                other => panic!("{files:?}: {other:?}"),
            },
        }
    }
    // A number of files that cannot be counted up to.
    let folder = tempfile::tempdir().unwrap();
    bytes_file(folder.path().join("m-1-of-18446744073709551615.safetensors"), &["a"]);
    match Checkpoint::open(folder.path()) {
        Err(CheckpointError::MissingShards { missing, missing_count, .. }) => {
            assert_eq!((missing.len(), missing_count), (64, u64::MAX - 1));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn files_without_a_rule_are_one_set_and_may_not_collide() {
    let folder = tempfile::tempdir().unwrap();
    bytes_file(folder.path().join("layer_1.safetensors"), &["a", "b"]);
    bytes_file(folder.path().join("layer_2.safetensors"), &["c"]);
    assert_eq!(names(&open(folder.path())), ["a", "b", "c"]);
    bytes_file(folder.path().join("layer_3.safetensors"), &["b", "c"]);
    match Checkpoint::open(folder.path()) {
        Err(CheckpointError::DuplicateTensor { tensor, count: 2, path, other }) => {
            assert_eq!(tensor, "b");
            assert!(path.ends_with("layer_1.safetensors") && other.ends_with("layer_3.safetensors"));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn all_problems_of_a_set_are_reported_together() {
    let folder = tempfile::tempdir().unwrap();
    for number in 0..40 {
        std::fs::write(folder.path().join(format!("{number:02}.safetensors")), b"<html>404</html>").unwrap();
    }
    let error = Checkpoint::open(folder.path()).unwrap_err();
    assert_eq!(error.problems().len(), 32);
    assert!(
        error.to_string().contains("00.safetensors") && error.to_string().ends_with("(and 31 more)"),
        "{error}"
    );
    assert!(error.is_invalid() && !error.is_missing());
}

#[test]
fn empty_directories_say_what_they_hold_instead() {
    let folder = tempfile::tempdir().unwrap();
    let message = |path: &Path| {
        let error = Checkpoint::open(path).unwrap_err();
        assert!(matches!(error, CheckpointError::NoWeights { .. }) && error.is_missing(), "{error}");
        error.to_string()
    };
    assert!(message(folder.path()).contains("found no such file"));
    std::fs::write(folder.path().join("tf_model.h5"), b"").unwrap();
    assert!(message(folder.path()).contains("tf_model.h5, a format that is not read"));
    std::fs::write(folder.path().join("optimizer.pt"), b"").unwrap();
    std::fs::write(folder.path().join("training_args.bin"), b"").unwrap();
    assert!(message(folder.path()).contains("tf_model.h5"), "the state of a training run is no model");
}

/// The rules are about names; what a file is, its content says.
#[test]
fn files_of_pytorch_and_gguf_are_chosen_like_safetensors() {
    let folder = tempfile::tempdir().unwrap();
    let opened = |path: &Path| file_names(&open(path));
    let at = |name: &str| folder.path().join(name);
    bytes_file(at("q.gguf"), &["q"]);
    assert_eq!(opened(folder.path()), ["q.gguf"], "the only file");
    bytes_file(at("ema.ckpt"), &["e"]);
    assert_eq!(opened(folder.path()), ["ema.ckpt"], "PyTorch before GGUF");
    bytes_file(at("other.pth"), &["o"]);
    let error = Checkpoint::open(folder.path()).unwrap_err();
    assert!(
        matches!(&error, CheckpointError::Ambiguous { files, count: 2, .. } if files == &["ema.ckpt", "other.pth"]),
        "{error}"
    );
    assert!(
        error.is_invalid()
            && error.path() == Some(folder.path())
            && error.to_string().contains("name one file")
    );
    bytes_file(at("pytorch_model-00001-of-00002.bin"), &["a"]);
    assert!(Checkpoint::open(folder.path()).unwrap_err().is_missing(), "half a set");
    bytes_file(at("pytorch_model-00002-of-00002.bin"), &["b"]);
    assert_eq!(names(&open(folder.path())), ["a", "b"]);
    bytes_file(at("pytorch_model.fp16.bin"), &["h"]);
    assert_eq!(names(&open(folder.path())), ["a", "b"], "a set before a variant");
    bytes_file(at("pytorch_model.bin"), &["m"]);
    assert_eq!(names(&open(folder.path())), ["m"]);
    let entries = [("a", "pytorch_model-00001-of-00002.bin"), ("b", "pytorch_model-00002-of-00002.bin")];
    std::fs::write(at("pytorch_model.bin.index.json"), index(&entries)).unwrap();
    assert_eq!(names(&open(folder.path())), ["a", "b"]);
    let notes = open(folder.path()).notes().join("\n");
    assert!(notes.contains("pytorch_model.bin.index.json wins; not read: ema.ckpt, other.pth"), "{notes}");
    bytes_file(at("model.safetensors"), &["s"]);
    assert_eq!(opened(folder.path()), ["model.safetensors"]);
}

#[test]
fn one_file_of_each_rank_is_refused_with_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    bytes_file(folder.path().join("consolidated.00.pth"), &["a"]);
    assert_eq!(names(&open(folder.path())), ["a"], "one rank is the whole model");
    bytes_file(folder.path().join("consolidated.01.pth"), &["a"]);
    let error = Checkpoint::open(folder.path()).unwrap_err().to_string();
    assert!(error.contains("one rank's part of every tensor: merge them"), "{error}");
}

#[test]
fn indices_of_all_forms_are_read() {
    let folder = tempfile::tempdir().unwrap();
    bytes_file(folder.path().join("x/one.safetensors"), &["a", "b"]);
    bytes_file(folder.path().join("two.safetensors"), &["weight_map.c"]);
    let entries = r#""b":"x/one.safetensors","weight_map.c":"two.safetensors","a":"./x/one.safetensors""#;
    for (text, noted) in [
        (format!(r#"{{"metadata":{{"total_size":3}},"weight_map":{{{entries}}}}}"#), false),
        (format!(r#"{{"metadata":{{"total_size":3.0,"x":[{{}}]}},"weight_map":{{{entries}}}}}"#), false),
        (format!(r#"{{"metadata":{{"total_size":0}},"weight_map":{{{entries}}}}}"#), true),
        (format!(r#"{{"metadata":{{"total_size":1e400}},"weight_map":{{{entries}}}}}"#), true),
        (format!(r#"{{"metadata":{{"total_size":"3"}},"weight_map":{{{entries}}}}}"#), false),
        (format!(r#"{{"metadata":null,"weight_map":{{{entries}}}}}"#), false),
        (
            format!(r#" {{"_path":"/abs","_class":"x","weight_map":{{{entries}}},"format":"pt","n":[1]}} "#),
            false,
        ),
        (format!("{{{entries}}}"), false),
        (format!(r#"{{"metadata":{{"total_size":3}},{entries}}}"#), false),
    ] {
        let path = folder.path().join("index.json");
        std::fs::write(&path, &text).unwrap();
        let checkpoint = open(&path);
        assert_eq!(names(&checkpoint), ["a", "b", "weight_map.c"], "{text}");
        assert_eq!(file_names(&checkpoint), ["two.safetensors", "one.safetensors"]);
        assert_eq!(checkpoint.notes().len(), usize::from(noted), "{text}: {:?}", checkpoint.notes());
    }
}

/// JSON that is no index: the first key that cannot be one of an index is named.
#[test]
fn what_is_no_index_says_by_which_key() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.json");
    for text in [r#"{"layers":24,"heads":[8]}"#, r#"{"t":"f.safetensors","layers":{},"heads":8}"#] {
        std::fs::write(&path, text).unwrap();
        let error = Checkpoint::open(&path).unwrap_err().to_string();
        assert!(error.contains("`layers`") && !error.contains("heads"), "{error}");
    }
}

/// A pipeline with a sharded transformer, two text encoders and components without weights.
fn pipeline(path: &Path) {
    let text = r#"{
        "_class_name": "Pipeline", "_diffusers_version": "0.35.0",
        "transformer": ["diffusers", "Transformer2DModel"], "text_encoder": ["transformers", "CLIPTextModel"],
        "text_encoder_2": ["transformers", "T5EncoderModel"], "scheduler": ["diffusers", "EulerDiscreteScheduler"],
        "tokenizer": ["transformers", "CLIPTokenizer"], "safety_checker": [null, null], "feature_extractor": null,
        "requires_safety_checker": true
    }"#;
    std::fs::write(path.join("model_index.json"), text).unwrap();
    bytes_file(
        path.join("transformer/diffusion_pytorch_model-00001-of-00002.safetensors"),
        &["blocks.0", "shared"],
    );
    bytes_file(path.join("transformer/diffusion_pytorch_model-00002-of-00002.safetensors"), &["blocks.1"]);
    let entries = [
        ("blocks.0", "diffusion_pytorch_model-00001-of-00002.safetensors"),
        ("shared", "diffusion_pytorch_model-00001-of-00002.safetensors"),
        ("blocks.1", "diffusion_pytorch_model-00002-of-00002.safetensors"),
    ];
    let file = path.join("transformer/diffusion_pytorch_model.safetensors.index.json");
    std::fs::write(file, index(&entries)).unwrap();
    bytes_file(path.join("text_encoder/model.safetensors"), &["shared"]);
    bytes_file(path.join("text_encoder/model.fp16.safetensors"), &["shared"]);
    bytes_file(path.join("text_encoder_2/model.safetensors"), &["shared", "__metadata__x"]);
    bytes_file(path.join("unlisted/model.safetensors"), &["x"]);
    bytes_file(path.join("safety_checker/model.safetensors"), &["x"]);
    bytes_file(path.join("whole.safetensors"), &["x"]);
    std::fs::create_dir(path.join("scheduler")).unwrap();
}

#[test]
fn pipelines_are_their_components() {
    let folder = tempfile::tempdir().unwrap();
    pipeline(folder.path());
    let expected = [
        "text_encoder/shared",
        "text_encoder_2/__metadata__x",
        "text_encoder_2/shared",
        "transformer/blocks.0",
        "transformer/blocks.1",
        "transformer/shared",
    ];
    let checkpoint = open(folder.path());
    assert_eq!(names(&checkpoint), expected);
    assert!(open(folder.path().join("model_index.json")).tensors().eq(checkpoint.tensors()));
    let notes = checkpoint.notes().join("\n");
    for said in [
        "model_index.json wins; not read: whole.safetensors",
        "text_encoder: model.safetensors wins; not read: model.fp16.safetensors",
        "scheduler: component without weights",
        "tokenizer: component without a folder",
    ] {
        assert!(notes.contains(said), "{said}: {notes}");
    }
    assert_eq!(checkpoint.notes().len(), 4, "{notes}");
    assert!(checkpoint.shards().iter().all(|shard| shard.metadata.get("format") == Some("pt")));

    // The comparison of index and headers holds for components too, without the prefix.
    bytes_file(
        folder.path().join("transformer/diffusion_pytorch_model-00002-of-00002.safetensors"),
        &["blocks.2"],
    );
    let error = Checkpoint::open(folder.path()).unwrap_err();
    assert_eq!(error.problems().len(), 2, "{error}");
    assert!(
        matches!(&error.problems()[0], CheckpointError::MissingTensor { tensor, .. } if tensor == "blocks.1")
    );
    assert!(
        matches!(&error.problems()[1], CheckpointError::UnindexedTensor { tensor, .. } if tensor == "blocks.2")
    );
}

#[test]
fn pipelines_without_any_weights_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("model_index.json"), r#"{"unet":["a","b"]}"#).unwrap();
    let error = Checkpoint::open(folder.path()).unwrap_err();
    assert!(matches!(error, CheckpointError::NoWeights { .. }), "{error}");
}

const COMMIT: &str = "0e9e39f249a16976918f6564b8830bc894c89659";

/// A cache with one repository, laid out as the hub's own tools do.
fn cache(root: &Path) -> PathBuf {
    let repository = root.join("models--org--name");
    let snapshot = repository.join("snapshots").join(COMMIT);
    std::fs::create_dir_all(&snapshot).unwrap();
    std::fs::create_dir_all(repository.join("refs/refs/pr")).unwrap();
    std::fs::write(repository.join("refs/main"), COMMIT).unwrap();
    std::fs::write(repository.join("refs/refs/pr/1"), COMMIT).unwrap();
    bytes_file(repository.join("blobs/1111"), &["a"]);
    bytes_file(repository.join("blobs/2222"), &["b"]);
    let entries = [("a", "model-00001-of-00002.safetensors"), ("b", "model-00002-of-00002.safetensors")];
    std::fs::write(repository.join("blobs/3333"), index(&entries)).unwrap();
    for (blob, name) in [
        ("1111", "model-00001-of-00002.safetensors"),
        ("2222", "model-00002-of-00002.safetensors"),
        ("3333", "model.safetensors.index.json"),
    ] {
        symlink(Path::new("../../blobs").join(blob), snapshot.join(name)).unwrap();
    }
    snapshot
}

#[test]
fn the_hubs_cache_resolves_names_and_revisions() {
    let root = tempfile::tempdir().unwrap();
    let snapshot = cache(root.path());
    let hub = HubCache::new(root.path());
    for name in ["org/name", "org/name@main", "org/name@refs/pr/1", &format!("org/name@{COMMIT}")] {
        assert_eq!(hub.resolve(name).unwrap(), snapshot, "{name}");
    }
    assert_eq!(names(&open(&snapshot)), ["a", "b"]);
    assert_eq!(names(&open(snapshot.join("model.safetensors.index.json"))), ["a", "b"]);
}

#[test]
fn names_cannot_leave_the_cache() {
    let root = tempfile::tempdir().unwrap();
    let snapshot = cache(root.path());
    let hub = HubCache::new(root.path());
    for name in ["../org/name", "org/../name", "", "org/", "/org", "a/b/c", "org/na me", "org--name", "@main"]
    {
        let error = hub.resolve(name).unwrap_err();
        assert!(matches!(error, CheckpointError::InvalidRepository { .. }), "{name}: {error}");
        assert!(!error.is_missing() && !error.is_invalid());
    }
    // What the path would lead to is there, so only the rule on names stands in the way.
    for revision in ["../refs/main", "refs/../main", "/etc/hostname", "", ".", "..", "a//b", "a\\b", "main\0"]
    {
        let error = hub.resolve(&format!("org/name@{revision}")).unwrap_err();
        assert!(matches!(error, CheckpointError::UnsafeName { .. }), "{revision:?}: {error}");
    }
    for found in ["../../../etc", &format!("../snapshots/{COMMIT}"), "main", "", &"g".repeat(40)] {
        std::fs::write(root.path().join("models--org--name/refs/main"), found).unwrap();
        let error = hub.resolve("org/name").unwrap_err();
        assert!(matches!(error, CheckpointError::UnsafeName { .. }), "{found}: {error}");
    }
    std::fs::write(root.path().join("models--org--name/refs/main"), format!("{COMMIT}\n")).unwrap();
    assert_eq!(hub.resolve("org/name").unwrap(), snapshot);
}

#[test]
fn what_the_cache_lacks_is_named() {
    let root = tempfile::tempdir().unwrap();
    let snapshot = cache(root.path());
    let hub = HubCache::new(root.path());
    for name in
        ["org/other", "gpt2", "org/name@v2", "org/name@0e9e39f", &format!("org/name@{}", "0".repeat(40))]
    {
        let error = hub.resolve(name).unwrap_err();
        assert!(matches!(error, CheckpointError::NotCached { .. }) && error.is_missing(), "{name}: {error}");
    }
    // The blob of one shard is gone, a part of it has arrived.
    let blobs = root.path().join("models--org--name/blobs");
    std::fs::remove_file(blobs.join("2222")).unwrap();
    std::fs::write(blobs.join("2222.incomplete"), [0; 2048]).unwrap();
    for error in [hub.resolve("org/name").unwrap_err(), Checkpoint::open(&snapshot).unwrap_err()] {
        match &error {
            CheckpointError::DanglingLink { path, target, partial_bytes: Some(2048) } => {
                assert!(path.ends_with("model-00002-of-00002.safetensors") && target.ends_with("blobs/2222"));
            }
            other => panic!("{other:?}"),
        }
        assert!(error.is_missing() && error.to_string().contains("2 KiB of it arrived"), "{error}");
    }
    // Not even its link is there.
    std::fs::remove_file(snapshot.join("model-00002-of-00002.safetensors")).unwrap();
    let error = hub.resolve("org/name").unwrap_err();
    assert!(matches!(error, CheckpointError::MissingShards { missing_count: 1, .. }), "{error}");
    // Nothing but the start of a download.
    for entry in std::fs::read_dir(&snapshot).unwrap() {
        std::fs::remove_file(entry.unwrap().path()).unwrap();
    }
    let error = hub.resolve("org/name").unwrap_err();
    assert!(
        error.to_string().contains("an interrupted download") && error.to_string().contains("2222"),
        "{error}"
    );
}

#[test]
fn hundreds_of_shards_need_few_descriptors() {
    if onelayer_testing::in_own_process(module_path!(), "hundreds_of_shards_need_few_descriptors") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for number in 0..300 {
        let file = format!("m-{number:05}-of-00300.safetensors");
        bytes_file(folder.path().join(&file), &[&file]);
    }
    // The limit holds for the whole process, so the other tests of this file run under it too.
    let limit = rustix::process::Rlimit {
        current: Some(64),
        maximum: rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum,
    };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
    let checkpoint = open(folder.path());
    assert_eq!((checkpoint.shards().len(), checkpoint.tensor_count()), (300, 300));
}
