//! Whole runs: the contents of the directory after success and after every kind of failure.
//!
//! Some tests mount a small file system. If that is not permitted, they print that they skip.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::Ordering;

use half::{bf16, f16};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use super::*;

fn request(source: &str, directory: &Path) -> SynthRequest {
    SynthRequest::new(source, directory)
}

fn make(request: &SynthRequest) -> SynthReport {
    run(request, &mut |_, _| {}).unwrap()
}

fn fail(request: &SynthRequest) -> SynthError {
    run(request, &mut |_, _| {}).unwrap_err()
}

/// Every entry of a directory, with its bytes.
fn entries(directory: &Path) -> BTreeMap<String, Vec<u8>> {
    let named = |entry: fs::DirEntry| {
        (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap_or_default())
    };
    fs::read_dir(directory).unwrap().map(|entry| named(entry.unwrap())).collect()
}

fn names(directory: &Path) -> Vec<String> {
    entries(directory).into_keys().collect()
}

/// Every tensor of a checkpoint, read by the reference crate: name to type and bytes.
fn tensors(directory: &Path) -> BTreeMap<String, (Dtype, Vec<u8>)> {
    let mut all = BTreeMap::new();
    for (name, bytes) in entries(directory) {
        if name.ends_with(".safetensors") {
            for (tensor, view) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
                assert_eq!(all.insert(tensor, (view.dtype(), view.data().to_vec())), None);
            }
        }
    }
    all
}

fn assert_finite_and_not_zero(name: &str, dtype: Dtype, bytes: &[u8]) {
    let check =
        |value: f32| assert!(value.is_finite() && value != 0.0 && value.abs() < 1.0, "{name}: {value}");
    match dtype {
        Dtype::BF16 => {
            bytes.chunks_exact(2).for_each(|b| check(bf16::from_le_bytes([b[0], b[1]]).to_f32()));
        }
        Dtype::F16 => bytes.chunks_exact(2).for_each(|b| check(f16::from_le_bytes([b[0], b[1]]).to_f32())),
        Dtype::F32 => {
            bytes.chunks_exact(4).for_each(|b| check(f32::from_le_bytes([b[0], b[1], b[2], b[3]])));
        }
        other => panic!("{name}: {other:?}"),
    }
    assert!(bytes.iter().all(|byte| *byte != 0), "{name} holds a zero byte");
}

#[test]
fn every_dtype_reads_back_finite_and_not_zero() {
    for dtype in FloatType::ALL {
        let directory = tempfile::tempdir().unwrap();
        let mut request = request("tiny-llama", directory.path());
        request.dtype = Some(dtype);
        let mut calls = Vec::new();
        let report = run(&request, &mut |written, total| calls.push((written, total))).unwrap();
        assert_eq!(names(directory.path()), ["config.json", "model.safetensors"]);
        let found = tensors(directory.path());
        assert_eq!(found.len(), 75);
        for (name, (found_dtype, bytes)) in &found {
            assert_eq!(*found_dtype, shards::header_dtype(dtype));
            assert_finite_and_not_zero(name, *found_dtype, bytes);
        }
        assert_eq!(report.tensor_bytes, found.values().map(|(_, bytes)| length_of(bytes)).sum::<u64>());
        assert_eq!(report.tensor_count, 75);
        let config: Value =
            serde_json::from_slice(&fs::read(directory.path().join("config.json")).unwrap()).unwrap();
        assert_eq!(config["torch_dtype"], dtype.config_name());
        assert_eq!(calls[0], (0, report.file_bytes));
        assert_eq!(calls.last(), Some(&(report.file_bytes, report.file_bytes)));
    }
}

fn length_of(bytes: &[u8]) -> u64 {
    u64::try_from(bytes.len()).unwrap()
}

#[test]
fn bytes_depend_on_the_seed_and_on_nothing_else() {
    let made = |change: &dyn Fn(&mut SynthRequest)| {
        let directory = tempfile::tempdir().unwrap();
        let mut request = request("tiny-llama", directory.path());
        request.dtype = Some(FloatType::F32);
        change(&mut request);
        make(&request);
        (entries(directory.path()), tensors(directory.path()))
    };
    let base = made(&|request| request.thread_count = Some(1));
    assert!(base.0 == made(&|request| request.thread_count = Some(4)).0, "the number of threads matters");
    let sharded = made(&|request| request.shard_bytes_max = 1_000_000);
    assert!(base.1 == sharded.1, "the size of the shards matters");
    let other = made(&|request| request.seed = 1);
    assert_eq!(base.0["config.json"], other.0["config.json"]);
    for (name, (_, bytes)) in &base.1 {
        assert!(other.1[name].1 != *bytes, "{name} does not depend on the seed");
    }
}

#[test]
fn shards_and_index_agree() {
    let directory = tempfile::tempdir().unwrap();
    let mut request = request("tiny-llama", directory.path());
    request.shard_bytes_max = 1_000_000;
    let report = make(&request);
    let files = entries(directory.path());
    let index: Value = serde_json::from_slice(&files["model.safetensors.index.json"]).unwrap();
    assert_eq!(index["metadata"]["total_size"], report.tensor_bytes);
    let map = index["weight_map"].as_object().unwrap();
    assert_eq!(map.len(), 75);
    let mut found = 0;
    for (name, bytes) in files.iter().filter(|(name, _)| name.ends_with(".safetensors")) {
        let file = SafeTensors::deserialize(bytes).unwrap();
        let size: usize = file.tensors().iter().map(|(_, view)| view.data().len()).sum();
        assert!(size <= 1_000_000 || file.len() == 1, "{name} holds {size} bytes");
        for tensor in file.names() {
            assert_eq!(map[tensor], name.as_str());
            found += 1;
        }
    }
    assert_eq!(found, 75);
    let listed: BTreeMap<_, _> = report.files.iter().cloned().collect();
    assert_eq!(listed, files.iter().map(|(name, bytes)| (name.clone(), length_of(bytes))).collect());
    let shards: Vec<_> = files.keys().filter(|name| name.ends_with(".safetensors")).collect();
    assert_eq!(shards.len(), 6);
    assert_eq!(*shards[0], "model-00001-of-00006.safetensors");
}

#[test]
fn a_users_configuration_is_followed_and_kept() {
    let directory = tempfile::tempdir().unwrap();
    let source = directory.path().join("source");
    fs::create_dir(&source).unwrap();
    let text = r#"{"model_type": "qwen2_moe", "hidden_size": 64, "intermediate_size": 160, "vocab_size": 320,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 3,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "dtype": "float16", "mine": [1, 2]}"#;
    fs::write(source.join("config.json"), text).unwrap();
    let mut contents = Vec::new();
    for (number, given) in [source.clone(), source.join("config.json")].into_iter().enumerate() {
        let target = directory.path().join(format!("new/target-{number}"));
        let mut request = request(given.to_str().unwrap(), &target);
        request.layer_count = Some(2);
        assert_eq!(make(&request).model_type, "qwen2_moe");
        contents.push(entries(&target));
    }
    assert!(contents[0] == contents[1]);
    let config: Value = serde_json::from_slice(&contents[0]["config.json"]).unwrap();
    assert_eq!(config["mine"], serde_json::json!([1, 2]));
    assert_eq!(config["num_hidden_layers"], 2);
    assert_eq!(config["architectures"], serde_json::json!(["Qwen2MoeForCausalLM"]));
    let file = SafeTensors::deserialize(&contents[0]["model.safetensors"]).unwrap();
    assert_eq!(file.tensor("model.layers.1.mlp.experts.2.down_proj.weight").unwrap().shape(), [64, 32]);
    assert!(file.tensor("model.layers.2.input_layernorm.weight").is_err());
}

#[test]
fn modes_are_left_to_the_umask() {
    let directory = tempfile::tempdir().unwrap();
    let plain = directory.path().join("plain");
    fs::write(&plain, "").unwrap();
    let target = directory.path().join("target");
    make(&request("tiny-llama", &target));
    for name in names(&target) {
        let mode = fs::metadata(target.join(&name)).unwrap().permissions().mode();
        assert_eq!(mode, fs::metadata(&plain).unwrap().permissions().mode(), "{name}");
    }
}

#[test]
fn nothing_is_overwritten_without_force() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("notes.txt"), "mine").unwrap();
    let error = fail(&request("tiny-llama", directory.path()));
    assert!(error.is_request());
    assert!(error.to_string().contains("notes.txt") && error.to_string().contains("--force"), "{error}");
    assert_eq!(names(directory.path()), ["notes.txt"]);
    // A file where the directory should be, and one where its parent should be.
    for target in [directory.path().join("notes.txt"), directory.path().join("notes.txt/inside")] {
        let error = fail(&request("tiny-llama", &target));
        assert!(matches!(error, SynthError::NotADirectory { .. }), "{error}");
    }
    assert_eq!(fs::read_to_string(directory.path().join("notes.txt")).unwrap(), "mine");
}

#[test]
fn force_overwrites_its_own_names_and_never_follows_a_link() {
    let directory = tempfile::tempdir().unwrap();
    let victim = directory.path().join("victim");
    fs::write(&victim, "precious").unwrap();
    let target = directory.path().join("target");
    fs::create_dir(&target).unwrap();
    symlink(&victim, target.join("config.json")).unwrap();
    symlink(directory.path().join("nowhere"), target.join("model.safetensors")).unwrap();
    fs::write(target.join("tokenizer.json"), "kept").unwrap();
    let mut request = request("tiny-llama", &target);
    assert!(matches!(fail(&request), SynthError::NotEmpty { .. }));
    request.force = true;
    make(&request);
    assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
    assert!(!directory.path().join("nowhere").exists());
    assert_eq!(names(&target), ["config.json", "model.safetensors", "tokenizer.json"]);
    assert!(target.join("config.json").symlink_metadata().unwrap().is_file());
    assert_eq!(tensors(&target).len(), 75);
    make(&request);
}

#[test]
fn force_does_not_mix_two_checkpoints() {
    let directory = tempfile::tempdir().unwrap();
    let mut request = request("tiny-llama", directory.path());
    request.shard_bytes_max = 1_000_000;
    make(&request);
    let before = entries(directory.path());
    request.shard_bytes_max = SHARD_BYTES_DEFAULT;
    request.force = true;
    let error = fail(&request);
    assert!(matches!(error, SynthError::ForeignCheckpoint { .. }) && error.is_request(), "{error}");
    assert!(entries(directory.path()) == before);
}

#[test]
fn an_interrupted_run_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let target = directory.path().join("a/b");
    let mut request = request("tiny-llama", &target);
    request.shard_bytes_max = 500_000;
    request.thread_count = Some(1);
    let cancel = Arc::clone(&request.cancel);
    let mut seen_parts = Vec::new();
    let error = run(&request, &mut |written, _| {
        if written > 0 {
            seen_parts = names(&target);
            cancel.store(true, Ordering::Relaxed);
        }
    })
    .unwrap_err();
    assert!(error.is_interrupted(), "{error}");
    assert!(!seen_parts.is_empty());
    assert!(seen_parts.iter().all(|name| name.starts_with('.') && !name.ends_with(".safetensors")));
    assert_eq!(names(directory.path()), Vec::<String>::new());
}

#[test]
fn a_file_that_appears_meanwhile_is_kept() {
    let directory = tempfile::tempdir().unwrap();
    let target = directory.path().join("target");
    let config = target.join("config.json");
    let error =
        run(&request("tiny-llama", &target), &mut |_, _| fs::write(&config, "theirs").unwrap()).unwrap_err();
    assert!(matches!(&error, SynthError::Appeared { path } if *path == config), "{error}");
    assert_eq!(names(&target), ["config.json"]);
    assert_eq!(fs::read_to_string(&config).unwrap(), "theirs");
}

#[test]
fn bad_sources_are_told_apart() {
    let directory = tempfile::tempdir().unwrap();
    let target = directory.path().join("target");
    let write = |name: &str, text: &str| {
        let path = directory.path().join(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let unknown = fail(&request("gema-7b", &target));
    assert!(unknown.is_request() && unknown.to_string().contains("did you mean `gemma-7b`?"), "{unknown}");
    let fifo = directory.path().join("fifo.json");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let sources = [
        (directory.path().join("missing.json").to_str().unwrap().to_owned(), "missing.json"),
        (fifo.to_str().unwrap().to_owned(), "not a regular file"),
        (write("broken.json", "{"), "broken.json is not a JSON object"),
        (write("mamba.json", r#"{"model_type": "mamba"}"#), "`mamba`"),
        (write("empty.json", r#"{"model_type": "llama"}"#), "lacks `hidden_size`"),
        (
            write("wrong.json", r#"{"model_type": "llama", "hidden_size": "big"}"#),
            "`hidden_size` must be a whole number",
        ),
    ];
    for (source, expected) in sources {
        let error = fail(&request(&source, &target));
        assert!(error.is_invalid_config() && error.to_string().contains(expected), "{error}");
    }
    let mut zero = request("tiny-llama", &target);
    zero.shard_bytes_max = 0;
    assert!(matches!(fail(&zero), SynthError::ZeroShardSize));
    assert!(!target.exists());
}

/// A mounted file system, unmounted when dropped.
struct Mount {
    path: PathBuf,
    _directory: tempfile::TempDir,
}

impl Mount {
    fn new(kind: &str, options: &str) -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("mount");
        fs::create_dir(&path).unwrap();
        let arguments = ["-t", kind, "-o", options, kind];
        let mounted = Command::new("mount").args(arguments).arg(&path).output();
        if !mounted.is_ok_and(|output| output.status.success()) {
            onelayer_testing::skipped(format!("mounting {kind} ({options}) is not permitted here"));
            return None;
        }
        Some(Self { path, _directory: directory })
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.path).status();
    }
}

#[test]
fn too_little_space_is_seen_before_anything_is_written() {
    let Some(mount) = Mount::new("tmpfs", "size=1m") else { return };
    let error = fail(&request("tiny-llama", &mount.path.join("new")));
    match &error {
        SynthError::NoSpace { needed_bytes, available_bytes, .. } => {
            assert_eq!(*needed_bytes, 5_058_664_u64.next_multiple_of(4096) + 4096);
            assert_eq!(*available_bytes, 1 << 20);
        }
        other => panic!("{other}"),
    }
    assert!(error.is_request());
    assert_eq!(names(&mount.path), Vec::<String>::new());
}

/// The space is there at the start and gone when the files are to be made, or the inodes are.
#[test]
fn a_disk_that_fills_up_is_reported_and_cleaned() {
    for options in ["size=8m", "size=64m,nr_inodes=8"] {
        let Some(mount) = Mount::new("tmpfs", options) else { return };
        let mut request = request("tiny-llama", &mount.path.join("new"));
        request.shard_bytes_max = 500_000;
        let filler = mount.path.join("filler");
        let error = run(&request, &mut |written, _| {
            if written == 0 && options == "size=8m" {
                fs::write(&filler, vec![1; 6 << 20]).unwrap();
            }
        })
        .unwrap_err();
        assert!(matches!(error, SynthError::Full { .. }), "{options}: {error}");
        assert!(names(&mount.path).iter().all(|name| name == "filler"), "{options}");
    }
}

/// ramfs refuses direct writes, so the other way of writing is taken, long enough to flush on the
/// way; the bytes are the same.
#[test]
fn where_direct_writes_are_refused_the_bytes_are_the_same() {
    let Some(mount) = Mount::new("ramfs", "mode=0755") else { return };
    let direct = tempfile::tempdir().unwrap();
    let source = direct.path().join("source.json");
    let text = r#"{"model_type": "gemma", "hidden_size": 1024, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 8400}"#;
    fs::write(&source, text).unwrap();
    let targets = [direct.path().join("new"), mount.path.join("new")];
    let reports = targets.each_ref().map(|target| make(&request(source.to_str().unwrap(), target)));
    assert!(!reports[1].direct, "{:?}", reports[1]);
    assert!(reports[1].file_bytes > 32 << 20);
    assert!(entries(&targets[0]) == entries(&targets[1]));
}
