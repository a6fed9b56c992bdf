//! `loadcheck synth` from outside: what a user types, what stands in the directory, and the exit
//! code.
//!
//! The contents of the files and every kind of failure are tested beside the code; here are the
//! contract of the command line and what only a process of its own can show: a kill at any moment.

#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise, in its helpers too")]

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use safetensors::SafeTensors;

fn synth(arguments: &[&str], directory: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_loadcheck"));
    command.arg("synth").args(arguments).arg(directory);
    command
}

fn output(arguments: &[&str], directory: &Path) -> Output {
    synth(arguments, directory).output().unwrap()
}

fn names(directory: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(directory) else { return Vec::new() };
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_preset_becomes_a_checkpoint_that_the_reference_reader_opens() {
    let directory = tempfile::tempdir().unwrap();
    let made = output(&["tiny-llama"], directory.path());
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    assert_eq!(names(directory.path()), ["config.json", "model.safetensors"]);
    let bytes = std::fs::read(directory.path().join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(file.len(), 75);
    assert_eq!(file.tensor("model.embed_tokens.weight").unwrap().shape(), [4096, 128]);
}

#[test]
fn options_cut_shard_and_seed() {
    let directory = tempfile::tempdir().unwrap();
    let made = |name: &str, seed: &str, threads: &str| {
        let target = directory.path().join(name);
        let mut arguments = vec!["tiny-llama", "--layers", "2", "--dtype", "f16", "--max-shard-size", "1MB"];
        arguments.extend(["--seed", seed, "--threads", threads]);
        let made = output(&arguments, &target);
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let files = names(&target);
        assert!(files.contains(&"model.safetensors.index.json".to_owned()), "{files:?}");
        files.iter().map(|file| std::fs::read(target.join(file)).unwrap()).collect::<Vec<_>>()
    };
    let first = made("first", "7", "1");
    assert!(first == made("again", "7", "3"));
    assert!(first != made("other", "8", "3"));
}

#[test]
fn refusals_name_the_remedy_and_have_their_exit_codes() {
    let directory = tempfile::tempdir().unwrap();
    let target = directory.path().join("target");
    let unknown = output(&["gema-7b"], &target);
    assert_eq!(unknown.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&unknown.stderr).contains("gemma-7b"));
    let missing = output(&["./no/config.json"], &target);
    assert_eq!(missing.status.code(), Some(3));
    assert!(!target.exists());
    assert!(output(&["tiny-llama"], &target).status.success());
    let again = output(&["tiny-llama"], &target);
    assert_eq!(again.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&again.stderr).contains("--force"));
    assert!(output(&["tiny-llama", "--force"], &target).status.success());
    for refused in [unknown, missing, again] {
        assert!(refused.stdout.is_empty(), "an error is no data");
    }
}

/// Killed without a chance to clean up, a run leaves nothing that a reader would take for a
/// checkpoint, and a run with `--force` gives the space back.
#[test]
fn a_kill_leaves_nothing_that_looks_like_a_checkpoint() {
    let directory = tempfile::tempdir().unwrap();
    let mut child = synth(&["smollm2-135m", "--max-shard-size", "100MB"], directory.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while names(directory.path()).is_empty() && Instant::now() < deadline {
        std::thread::yield_now();
    }
    child.kill().unwrap();
    assert!(!child.wait().unwrap().success(), "the run was over before it could be killed");
    let left = names(directory.path());
    assert!(!left.is_empty(), "nothing had been begun");
    for name in &left {
        assert!(name.starts_with('.') && name.ends_with(".loadcheck-part"), "{left:?}");
    }
    assert_eq!(output(&["tiny-llama"], directory.path()).status.code(), Some(2));
    assert!(output(&["tiny-llama", "--force"], directory.path()).status.success());
    assert_eq!(names(directory.path()), ["config.json", "model.safetensors"]);
}
