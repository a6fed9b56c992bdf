//! Shared by the tests of conversions: a small source, its right target, and checks of targets.
#![allow(dead_code, unused_imports, reason = "each test file uses its own part")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{loadcheck, stderr, stdout};
pub(crate) use crate::support::{run_command as run, wrapped};
use onelayer_testing::{TestTensor, write_sharded};

/// The name of the index of a model.
pub(crate) const INDEX: &str = "model.safetensors.index.json";
/// The name of the manifest.
pub(crate) const MANIFEST: &str = "onelayer.manifest.json";

/// Everything in a folder: the bytes of files by their path below it. Folders are there as a path
/// that ends in `/`; what is neither file nor folder has its kind as its bytes.
pub(crate) type Tree = BTreeMap<String, Vec<u8>>;

/// Reads a folder, following no link.
pub(crate) fn tree(folder: &Path) -> Tree {
    fn read(folder: &Path, prefix: &str, found: &mut Tree) {
        for entry in fs::read_dir(folder).unwrap() {
            let entry = entry.unwrap();
            let name = format!("{prefix}{}", entry.file_name().to_str().unwrap());
            let kind = entry.file_type().unwrap();
            if kind.is_dir() {
                read(&entry.path(), &format!("{name}/"), found);
                found.insert(format!("{name}/"), Vec::new());
            } else if kind.is_file() {
                found.insert(name, fs::read(entry.path()).unwrap());
            } else {
                found.insert(name, format!("{kind:?}").into_bytes());
            }
        }
    }
    let mut found = Tree::new();
    read(folder, "", &mut found);
    found
}

/// The names in which two folders differ, with what is wrong; empty if they are the same.
pub(crate) fn differences(found: &Tree, expected: &Tree) -> Vec<String> {
    let mut wrong = Vec::new();
    for (name, bytes) in expected {
        match found.get(name) {
            None => wrong.push(format!("{name} is missing")),
            Some(other) if other != bytes => {
                wrong.push(format!(
                    "{name} has {} bytes that differ from the {} it must have",
                    other.len(),
                    bytes.len()
                ));
            }
            Some(_) => {}
        }
    }
    wrong.extend(
        found.keys().filter(|name| !expected.contains_key(*name)).map(|name| format!("{name} is too much")),
    );
    wrong
}

/// True for a name that only a complete file of tensors may have.
pub(crate) fn is_published(name: &str) -> bool {
    name.ends_with(".safetensors") && !name.rsplit('/').next().unwrap().starts_with('.')
}

/// A small decoder in two shards with side files: an embedding that takes several writes, `layers`
/// layers, norm, and a head of `head_bytes`, which is half of the second shard or more.
pub(crate) fn write_source(folder: &Path, layers: u64, head_bytes: usize) {
    fs::create_dir_all(folder).unwrap();
    let mut tensors = vec![TestTensor::random("model.embed_tokens.weight", (2 << 20) + 77, 1)];
    for layer in 0..layers {
        for (number, (part, len)) in (0..).zip([
            ("input_layernorm.weight", 64),
            ("mlp.up_proj.weight", 9001),
            ("self_attn.q_proj.weight", 4099),
        ]) {
            tensors.push(TestTensor::random(
                format!("model.layers.{layer}.{part}"),
                len,
                10 + 3 * layer + number,
            ));
        }
    }
    tensors.push(TestTensor::random("model.norm.weight", 64, 2));
    tensors.push(TestTensor::random("lm_head.weight", head_bytes, 3));
    let second = tensors.split_off(tensors.len() / 2);
    write_sharded(folder, &[tensors, second]);
    fs::write(folder.join("config.json"), "{\"architectures\": [\"SmallForCausalLM\"]}\n").unwrap();
    fs::write(folder.join("tokenizer.json"), "{}\n").unwrap();
}

/// A source, and the target of an undisturbed conversion.
pub(crate) struct World {
    pub(crate) directory: tempfile::TempDir,
    pub(crate) source: PathBuf,
    pub(crate) golden: Tree,
    flags: Vec<String>,
}

impl World {
    /// A source of three layers, converted with one thread and `flags`.
    pub(crate) fn new(flags: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        // strace shows paths without links.
        let root = directory.path().canonicalize().unwrap();
        let source = root.join("source");
        write_source(&source, 3, (1 << 20) + 500_001);
        let mut flags: Vec<String> = flags.iter().map(|&flag| flag.into()).collect();
        if !flags.iter().any(|flag| flag == "--jobs") {
            flags.extend(["--jobs".into(), "1".into()]);
        }
        let mut world = Self { directory, source, golden: Tree::new(), flags };
        let target = world.path("golden");
        let output = world.convert(&target).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        world.golden = tree(&target);
        assert!(world.golden.contains_key(MANIFEST) && world.golden.contains_key(INDEX));
        let is_hidden = |name: &&String| name.split('/').any(|part| part.starts_with('.'));
        assert_eq!(world.golden.keys().find(is_hidden), None, "nothing unfinished stays");
        assert!(world.files() >= 5, "{:?}", world.golden.keys());
        world
    }

    /// A path beside the source.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().canonicalize().unwrap().join(name)
    }

    /// Number of files of tensors.
    pub(crate) fn files(&self) -> usize {
        self.golden.keys().filter(|name| is_published(name)).count()
    }

    /// The command that converts the source to `target`.
    pub(crate) fn convert(&self, target: &Path) -> Command {
        let mut command = loadcheck(self.directory.path());
        command.arg("convert").arg(&self.source).arg(target).args(&self.flags);
        command.args(["--budget", "8MiB", "--json", "-q"]);
        command
    }

    /// The faults of a target whose conversion was disturbed, and the number of its published
    /// files. Files may be missing, but each file with a final name must be right, and index and
    /// manifest must not list missing files.
    pub(crate) fn assess(&self, target: &Path) -> (Vec<String>, usize) {
        let found = if target.exists() { tree(target) } else { Tree::new() };
        let mut wrong = Vec::new();
        let mut published = 0;
        for (name, bytes) in found.iter().filter(|(name, _)| is_published(name)) {
            published += 1;
            if self.golden.get(name) != Some(bytes) {
                wrong.push(format!("{name} is published, and wrong"));
            }
        }
        if let Some(index) = found.get(INDEX) {
            if published < self.files() {
                wrong.push(format!("the index is there, and {published} of {} files", self.files()));
            }
            if self.golden.get(INDEX) != Some(index) {
                wrong.push("the index is there, and wrong".into());
            }
        }
        if found.contains_key(MANIFEST) {
            for (name, bytes) in &self.golden {
                if found.get(name) != Some(bytes) {
                    wrong.push(format!("the manifest is there, and {name} is not, or wrong"));
                }
            }
        }
        (wrong, published)
    }

    /// Runs the conversion once more, undisturbed. Returns the faults of its output and its target,
    /// if it found `published` files.
    pub(crate) fn resume(&self, target: &Path, published: usize) -> Vec<String> {
        let output = run(&self.convert(target));
        if !output.status.success() {
            return vec![format!("the next run fails: {}: {}", output.status, stderr(&output))];
        }
        let mut wrong = differences(&tree(target), &self.golden);
        let report: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
        let count =
            |name: &str| usize::try_from(report["convert"]["result"][name].as_u64().unwrap()).unwrap();
        let (kept, written) = (count("files_kept"), count("files_written"));
        if kept + 1 < published {
            wrong.push(format!("{published} files were published, and {kept} of them were kept"));
        }
        if kept + written != self.files() {
            wrong.push(format!("{kept} files kept and {written} written are not {}", self.files()));
        }
        wrong
    }
}
