//! The ready files of `docs/convert`, taken literally: the Slurm script and the containers of the
//! Kubernetes jobs convert a small checkpoint part by part, with the program that was just built.
#![allow(
    clippy::unwrap_used,
    clippy::as_conversions,
    clippy::cast_lossless,
    reason = "a test that cannot go on panics"
)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::support::{assert_code, repository, run, stderr, workplace};
use onelayer_testing::skipped;
use serde_json::Value;

/// A folder whose `loadcheck` is the program that was just built.
fn binaries(place: &Path) -> PathBuf {
    let folder = place.join("bin");
    fs::create_dir(&folder).unwrap();
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_loadcheck"), folder.join("loadcheck")).unwrap();
    folder
}

/// A shell with `loadcheck` in its path.
fn shell(place: &Path, program: &str, variables: &[(&str, &str)]) -> Command {
    let mut command = Command::new(program);
    let path = format!("{}:{}", place.join("bin").display(), std::env::var("PATH").unwrap());
    command.current_dir(place).env("PATH", path).envs(variables.iter().copied());
    command
}

/// All files of the two targets are equal.
#[track_caller]
fn assert_same(place: &Path, target: &str, expected: &str) {
    let mut names: Vec<_> =
        fs::read_dir(place.join(expected)).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert!(names.len() > 5);
    for name in names {
        let bytes = |folder: &str| fs::read(place.join(folder).join(&name)).unwrap();
        assert_eq!(bytes(target), bytes(expected), "{name:?}");
    }
}

#[test]
fn the_slurm_script_converts_part_by_part() {
    let place = workplace();
    binaries(place.path());
    assert_code(&run(place.path(), "convert model whole --sha256"), 0);
    let task = |variables: &[(&str, &str)]| -> Output {
        let mut all = vec![("TARGET", "layers"), ("PARTS", "3"), ("OPTIONS", "--sha256 --budget 32MiB")];
        all.extend(variables);
        let script = repository("docs/convert/slurm-array.sh");
        shell(place.path(), "bash", &all).arg(script).output().unwrap()
    };
    let refused = task(&[("SLURM_ARRAY_TASK_ID", "1")]);
    assert!(stderr(&refused).contains("SOURCE: the checkpoint to convert"), "{}", stderr(&refused));
    let source = ("SOURCE", "model");
    for number in ["2", "1", "2"] {
        assert_code(&task(&[source, ("SLURM_ARRAY_TASK_ID", number), ("SLURM_CPUS_PER_TASK", "2")]), 0);
    }
    assert_code(&task(&[source]), 5);
    assert_code(&task(&[source, ("SLURM_ARRAY_TASK_ID", "3")]), 0);
    assert_code(&task(&[source]), 0);
    assert_same(place.path(), "layers", "whole");
}

/// The documents of a YAML file, as Python's parser reads them; `None` where there is none.
fn yaml(path: &Path) -> Option<Vec<Value>> {
    let script = "import json, sys, yaml; json.dump(list(yaml.safe_load_all(open(sys.argv[1]))), sys.stdout)";
    let output = Command::new("python3").arg("-c").arg(script).arg(path).output().ok()?;
    output.status.success().then(|| serde_json::from_slice(&output.stdout).unwrap())
}

#[test]
fn the_kubernetes_jobs_convert_part_by_part() {
    let Some(documents) = yaml(&repository("docs/convert/kubernetes-job.yaml")) else {
        skipped("no python3 with PyYAML here, so the Kubernetes jobs are not run");
        return;
    };
    let place = workplace();
    binaries(place.path());
    assert_code(&run(place.path(), "convert model whole"), 0);
    let job = |name: &str| {
        documents.iter().find(|job| job["kind"] == "Job" && job["metadata"]["name"] == name).unwrap()
    };
    let settings = &documents.iter().find(|map| map["kind"] == "ConfigMap").unwrap();
    let parts = job("convert-parts");
    assert_eq!(parts["spec"]["completionMode"], "Indexed");
    let count = parts["spec"]["completions"].as_u64().unwrap();
    assert_eq!(
        settings["data"]["PARTS"].as_str().unwrap().parse(),
        Ok(count),
        "the number of parts is one number"
    );
    let start = |job: &Value, index: &str| {
        let spec = &job["spec"]["template"]["spec"];
        let container = &spec["containers"][0];
        assert_eq!(container["envFrom"][0]["configMapRef"]["name"], settings["metadata"]["name"]);
        let volume = &container["volumeMounts"][0];
        assert_eq!(volume["name"], spec["volumes"][0]["name"]);
        let mount = volume["mountPath"].as_str().unwrap();
        for path in ["SOURCE", "TARGET"] {
            assert!(settings["data"][path].as_str().unwrap().starts_with(mount), "{path} is on the volume");
        }
        let variables = [
            ("SOURCE", "model"),
            ("TARGET", "layers"),
            ("OPTIONS", settings["data"]["OPTIONS"].as_str().unwrap()),
            ("PARTS", settings["data"]["PARTS"].as_str().unwrap()),
            ("JOB_COMPLETION_INDEX", index),
            ("WAIT_SECONDS", "0.05"),
        ];
        let words = |list: &Value| -> Vec<String> {
            list.as_array().unwrap().iter().map(|word| word.as_str().unwrap().to_owned()).collect()
        };
        let mut command = words(&container["command"]);
        command.extend(words(&container["args"]));
        let mut child = shell(place.path(), &command[0], &variables);
        child.args(&command[1..]).stdout(std::process::Stdio::null()).spawn().unwrap()
    };
    // It begins before the parts do, and waits for them.
    let mut finish = start(job("convert-finish"), "");
    for index in (0..count).rev() {
        assert!(finish.try_wait().unwrap().is_none(), "not all parts are there");
        // The other job may just look whether all parts are there, and holds the part for that moment.
        let mut tries = 0..=parts["spec"]["backoffLimitPerIndex"].as_u64().unwrap();
        let is_done = tries.any(|_| start(parts, &index.to_string()).wait().unwrap().success());
        assert!(is_done, "part of index {index}");
    }
    assert!(finish.wait().unwrap().success());
    assert_same(place.path(), "layers", "whole");
}
