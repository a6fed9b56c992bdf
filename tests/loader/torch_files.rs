//! Files that torch 2.15 wrote (`fixtures/torch`), and small ones made here: names, dtypes, shapes
//! and bytes as torch reads them, parts, and what is said of the rest.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use onelayer::checkpoint::{Checkpoint, FileFormat, OpenOptions};
use onelayer::{Loader, Target};
use onelayer_testing::safetensors_file::FileBuilder;
use onelayer_testing::torch_file::{Pickle, View, archive, vector};
use serde_json::Value;

use super::describe;

fn folder() -> PathBuf {
    onelayer_testing::repository().join("fixtures/torch")
}

fn options(part: Option<&str>) -> OpenOptions {
    match part {
        Some("*") => OpenOptions::new().whole_file(),
        Some(part) => OpenOptions::new().select(part),
        None => OpenOptions::new(),
    }
}

#[test]
fn files_of_torch_are_read_as_torch_reads_them() {
    let rows: Vec<Value> =
        serde_json::from_str(&std::fs::read_to_string(folder().join("expected.json")).unwrap()).unwrap();
    assert!(rows.len() > 25);
    for row in &rows {
        let (file, part) = (row["file"].as_str().unwrap(), row["part"].as_str());
        let opened = options(part).open(folder().join(file));
        match row["refused"].as_str() {
            Some(expected) => {
                let error = opened.expect_err(file);
                assert!(error.to_string().contains(expected), "{file}: {error}");
                assert!(
                    error.is_invalid() && error.path().is_some_and(|path| path.ends_with(file)),
                    "{error}"
                );
            }
            None => {
                let checkpoint = opened.unwrap();
                let found = describe::tensors(&checkpoint).unwrap();
                assert_eq!(found["tensors"], row["tensors"], "{file}, {part:?}");
            }
        }
    }
}

#[test]
fn the_format_is_found_by_content() {
    let formats = [
        ("views.pt", FileFormat::TorchZip),
        ("views_legacy.pt", FileFormat::TorchLegacy),
        ("views_legacy4.pt", FileFormat::TorchLegacy),
        ("before_0.1.10.tar", FileFormat::TorchTar),
    ];
    for (file, format) in formats {
        let checkpoint = Checkpoint::open(folder().join(file)).unwrap();
        assert_eq!(checkpoint.shards()[0].format, format, "{file}");
    }
    // The length of its header begins like a pickle.
    let name = "n".repeat(588);
    let file = FileBuilder::new().tensor(&name, "U8", &[1], 1).build();
    assert_eq!(file[..8], [0x80, 2, 0, 0, 0, 0, 0, 0]);
    let path = tempfile::tempdir().unwrap();
    let path = path.path().join("a.bin");
    std::fs::write(&path, file).unwrap();
    assert_eq!(Checkpoint::open(&path).unwrap().shards()[0].format, FileFormat::Safetensors);
}

#[test]
fn tensors_are_delivered_with_the_bytes_of_the_file() {
    let checkpoint = Checkpoint::open(folder().join("dtypes.pt")).unwrap();
    let loader = Loader::builder(Target::Host).host_budget(64 << 20).build().unwrap();
    let model = loader.load(&checkpoint).unwrap();
    for entry in checkpoint.tensors() {
        assert!(entry.strides.is_empty());
        let mut expected = vec![0; usize::try_from(entry.extent.len_bytes()).unwrap()];
        let file = File::open(folder().join("dtypes.pt")).unwrap();
        file.read_exact_at(&mut expected, entry.extent.start()).unwrap();
        let tensor = model.tensor(entry.name).unwrap();
        assert_eq!(tensor.as_bytes().unwrap(), &expected[..], "{}", entry.name);
        assert_eq!((tensor.dtype(), tensor.shape()), (entry.dtype, entry.shape), "{}", entry.name);
    }
}

#[test]
fn tied_weights_are_one_tensor_with_several_names() {
    let checkpoint = Checkpoint::open(folder().join("views.pt")).unwrap();
    let base = checkpoint.find("base").unwrap();
    assert_eq!(checkpoint.find("tied").unwrap(), base);
    let aliases: Vec<&str> = checkpoint.aliases().map(|(name, _)| name).collect();
    // `wide` is a view of the first half, `flat` has another shape.
    assert_eq!(aliases, ["tied", "tied.parameter"]);
    assert_eq!(checkpoint.find("turned").unwrap().strides, [1, 12, 4]);
}

#[test]
fn notes_say_what_was_chosen_and_what_else_there_is() {
    let path = folder().join("training.ckpt");
    let notes = Checkpoint::open(&path).unwrap().notes().join("\n");
    for piece in [
        "training.ckpt: the tensors are those of `state_dict`; there are others in `optimizer_states`, `ema`",
        "also in the file, without tensors: `epoch`, `global_step`, `pytorch-lightning_version`, `lr_schedulers`",
        "not looked into: `numpy",
        "`argparse.Namespace`",
    ] {
        assert!(notes.contains(piece), "{piece} in {notes}");
    }
    let whole = OpenOptions::new().whole_file().open(&path).unwrap();
    assert!(!whole.notes().join("\n").contains("the tensors are those"));
    assert!(whole.find("ema.weights.0.weight").is_some());
    let weight = OpenOptions::new().select("state_dict.0.weight").open(&path).unwrap();
    assert_eq!(weight.tensors().next().unwrap().name, "0.weight");
}

#[test]
fn other_formats_have_no_parts() {
    let fixture = onelayer_testing::repository().join("fixtures/checkpoints/llama/model.safetensors");
    let error = OpenOptions::new().select("ema").open(&fixture).unwrap_err();
    assert!(error.to_string().contains("found a safetensors file, which has no parts"), "{error}");
    assert!(OpenOptions::new().whole_file().open(&fixture).is_ok());
}

fn opened(file: &[u8], part: Option<&str>) -> Result<Vec<String>, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file.pt");
    std::fs::write(&path, file).unwrap();
    let checkpoint = options(part).open(&path).map_err(|error| error.to_string())?;
    let names = checkpoint.tensors().map(|tensor| tensor.name.to_owned());
    Ok(names.chain(checkpoint.aliases().map(|(name, _)| name.to_owned())).collect())
}

/// A dictionary of dictionaries, each with a tensor `w` at another place of one storage.
fn nested(keys: &[&str]) -> Vec<u8> {
    let mut pickle = Pickle::new();
    pickle.raw(b"}(");
    for (place, key) in (0..).zip(keys) {
        pickle.text(key).raw(b"}").text("w");
        let view = View { offset: place, shape: &[1], strides: &[1] };
        pickle.tensor("ByteStorage", "0", 64, &view).raw(b"s");
    }
    archive(&pickle.raw(b"u").end(), &[&[7; 64]]).0
}

#[test]
fn the_usual_names_of_weights_are_chosen_in_order() {
    for (keys, expected) in [
        (&["optimizer", "model"][..], &["w"][..]),
        (&["model", "state_dict"], &["w"]),
        (&["module", "ema"], &["w"]),
        (&["model_state_dict"], &["w"]),
        (&["generator", "discriminator"], &["generator.w", "discriminator.w"]),
        (&["a.b", "ema_model"], &["a.b.w", "ema_model.w"]),
    ] {
        assert_eq!(opened(&nested(keys), None).unwrap(), expected, "{keys:?}");
    }
    let file = nested(&["model", "model.ema", "model.ema.best"]);
    for (part, expected) in [
        ("model", &["w"][..]),
        ("model.ema", &["w"]),
        ("model.ema.best", &["w"]),
        ("model.ema.best.w", &["w"]),
    ] {
        assert_eq!(opened(&file, Some(part)).unwrap(), expected, "{part}");
    }
    assert!(opened(&file, Some("model.e")).unwrap_err().contains("expected a part `model.e`"));
}

#[test]
fn keys_that_occur_twice_are_refused() {
    let view = vector(&[4]);
    let tensor = |pickle: &mut Pickle| {
        pickle.tensor("ByteStorage", "0", 64, &view);
    };
    let twice: [&dyn Fn(&mut Pickle); 2] = [&tensor, &|pickle| {
        pickle.raw(b"N");
    }];
    for (first, second) in [(0, 1), (1, 0), (0, 0)] {
        let mut pickle = Pickle::new();
        pickle.raw(b"}(").text("a");
        twice[first](&mut pickle);
        pickle.text("a");
        twice[second](&mut pickle);
        let error = opened(&archive(&pickle.raw(b"u").end(), &[&[7; 64]]).0, None).unwrap_err();
        assert!(error.contains("twice"), "{error}");
    }
}

#[test]
fn limits_on_directory_and_pickle_are_kept() {
    let kind = |limit: u64, file: &str| {
        let opened = OpenOptions::new().header_bytes_max(limit).open(folder().join(file));
        opened.map(|checkpoint| checkpoint.tensor_count()).map_err(|error| error.to_string())
    };
    for (file, limit, what) in [
        ("views.pt", 100, "directory of"),
        ("views_legacy.pt", 10, "pickle of"),
        ("views_legacy.pt", 200, "pickle of"),
    ] {
        let error = kind(limit, file).unwrap_err();
        assert!(error.contains(what) && error.contains("raise the limit if you trust the file"), "{error}");
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("long.pt");
    let pickle = Pickle::new().text(&"x".repeat(5000)).end();
    std::fs::write(&path, archive(&pickle, &[]).0).unwrap();
    let error = OpenOptions::new().header_bytes_max(1000).open(&path).unwrap_err().to_string();
    assert!(error.contains("pickle of 5008 bytes (4.9 KiB) is over the limit of 2000"), "{error}");
    assert!(OpenOptions::new().header_bytes_max(3000).open(&path).is_ok());
    assert!(kind(20_000, "views.pt").is_ok() && kind(20_000, "views_legacy.pt").is_ok());
}

#[test]
fn pickles_of_others_are_named() {
    for start in [&b"\x80\x02}q\0."[..], b"\x80\x04\x95\x10\0\0\0\0\0\0\0}\x94."] {
        let error = opened(start, None).unwrap_err();
        assert!(error.contains("found a Python pickle that torch.save did not write"), "{error}");
    }
}
