//! What people name that is no checkpoint: each is called what it is, and the help says what to
//! name instead.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::fs;

use crate::support::{assert_code, loadcheck, run, stderr, workplace};

#[test]
fn each_wrong_kind_of_file_has_a_help_line() {
    let place = workplace();
    let onnx = b"\x08\x07\x12\x07pytorch\x1a\x05abcdefghijklmnopqrstuvwxyz";
    for (name, text, message, help) in [
        ("m.onnx", &onnx[..], "an ONNX model, which is not read", "that it was made from"),
        ("m.tflite", b"\x1c\x00\x00\x00TFL3aaaaaaaaaaaaaaaaaa", "a TensorFlow Lite model", "made from"),
        ("m.h5", b"\x89HDF\r\n\x1a\naaaaaaaaaaaaaa", "an HDF5 file", "made from"),
        ("m.msgpack", b"\xde\x00\x10aaaaaaaaaaaaaaaaaaaa", "a Flax checkpoint", "made from"),
        ("m.tar.gz", b"\x1f\x8b\x08aaaaaaaaaaaaaaaaaaaaa", "a compressed file", "unpack it"),
        ("m.safetensors.incomplete", &onnx[..], "a download that has not ended", "hf download"),
        ("config.json", b"{\"model_type\": \"llama\"}", "a JSON file that is no index", "directory"),
        ("notes.txt", b"hello, this is a text\n", "a text", "name a file of weights"),
        ("load.py", b"import torch, safetensors\n", "a program", "loadcheck exec -- python"),
        ("noise", &onnx[..], "neither safetensors nor PyTorch nor GGUF", "name a file of weights"),
        ("a.safetensors", b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer", "git lfs pull"),
        ("b.safetensors", b"<!DOCTYPE html><html></html>", "HTML", "signed in"),
        ("c.safetensors", b"", "an empty file", "download or copy it again"),
    ] {
        fs::write(place.path().join(name), text).unwrap();
        let output = run(place.path(), &format!("inspect {name}"));
        assert_code(&output, 3);
        let text = stderr(&output);
        let (said, helped) = text.split_once("\n  help: ").unwrap_or((&text, ""));
        assert!(said.contains(message) && helped.contains(help), "{name}: {text}");
        assert!(!said.contains("safetensors file") || name.ends_with("safetensors"), "{name}: {text}");
    }
}

#[test]
fn what_is_damaged_stays_damaged() {
    let place = workplace();
    let path = place.path().join("model/model.safetensors");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 9]).unwrap();
    let text = stderr(&run(place.path(), "inspect model"));
    assert!(text.contains("9 bytes short") && text.contains("the download or copy stopped early"), "{text}");
    let index = r#"{"weight_map": {"a": "x.safetensors"}}"#;
    fs::write(place.path().join("model/model.safetensors.index.json"), index).unwrap();
    let text = stderr(&run(place.path(), "inspect model"));
    assert!(text.contains("missing") && !text.contains("JSON file"), "{text}");
    fs::write(place.path().join("model/x.safetensors.incomplete"), "x").unwrap();
    let text = stderr(&run(place.path(), "inspect model"));
    assert!(text.contains("help: x.safetensors.incomplete is a download that has not ended"), "{text}");
}

#[test]
fn folders_name_the_models_below_them() {
    let place = workplace();
    fs::create_dir_all(place.path().join("all/deep/er")).unwrap();
    fs::create_dir_all(place.path().join("none")).unwrap();
    fs::rename(place.path().join("model"), place.path().join("all/deep/er/model")).unwrap();
    for (folder, help) in [
        ("all", "help: name one of the models below it: all/deep/er/model"),
        ("none", "help: the directory is empty"),
    ] {
        let output = run(place.path(), folder);
        assert_code(&output, 3);
        assert!(stderr(&output).contains(help), "{}", stderr(&output));
    }
    fs::write(place.path().join("none/model.onnx"), "x").unwrap();
    let text = stderr(&run(place.path(), "inspect none"));
    assert!(text.contains("help: model.onnx is an ONNX model, which is not read"), "{text}");
    fs::write(place.path().join("none/model.safetensors.incomplete"), "x").unwrap();
    let text = stderr(&run(place.path(), "inspect none"));
    assert!(text.contains("model.safetensors.incomplete is a download that has not ended"), "{text}");
}

#[test]
fn addresses_say_what_to_type() {
    let place = workplace();
    for (address, help) in [
        ("https://huggingface.co/org/name", "type `org/name`: "),
        ("https://huggingface.co/org/name/tree/v2", "type `org/name@v2`: "),
        ("https://huggingface.co/gpt2", "`hf download gpt2`"),
        ("huggingface.co/org/name", "type `org/name`"),
        ("s3://bucket/x", "copy the checkpoint to a local directory"),
        ("gpt2", "neither a path here nor a model in the local Hugging Face cache"),
    ] {
        let output = run(place.path(), &format!("inspect {address}"));
        assert_code(&output, 3);
        assert!(stderr(&output).contains(help), "{address}: {}", stderr(&output));
    }
}

#[test]
fn names_of_one_word_are_found_in_the_cache() {
    let place = workplace();
    let commit = "607a30d783dfa663caf39e06633721c8d4cfcd7e";
    let repository = place.path().join("hub/models--gpt2");
    let snapshot = repository.join("snapshots").join(commit);
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(repository.join("refs")).unwrap();
    fs::write(repository.join("refs/main"), commit).unwrap();
    fs::copy(place.path().join("model/model.safetensors"), snapshot.join("model.safetensors")).unwrap();
    let inspect = |name: &str| {
        let mut command = loadcheck(place.path());
        command.args(["inspect", name]).env("HF_HUB_CACHE", place.path().join("hub")).output().unwrap()
    };
    for name in ["gpt2", "hf://gpt2", "gpt2@main"] {
        assert_code(&inspect(name), 0);
    }
    let text = stderr(&inspect("hub"));
    assert!(text.contains(&format!("models below it: gpt2@{commit}")), "{text}");
    assert_code(&inspect("hf://gpt3"), 3);
    fs::create_dir(place.path().join("gpt2")).unwrap();
    assert_code(&inspect("gpt2"), 3);
}
