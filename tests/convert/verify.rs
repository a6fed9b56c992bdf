//! Verification: a target without faults passes, and every change is found and named.
#![allow(
    clippy::unwrap_used,
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    clippy::result_large_err,
    reason = "a test that cannot go on panics"
)]

use onelayer_testing::layouts;

use std::fs;
use std::path::{Path, PathBuf};

use onelayer::convert::{Conversion, ConvertError, ConvertEvent, Manifest, Verification, VerifyReport};
use onelayer::{Checkpoint, FloatType, OpenOptions};
use onelayer_testing::layouts::Layout;
use tempfile::TempDir;

/// A layout, and a conversion of it.
struct Converted {
    folder: TempDir,
    layout: Layout,
    target: PathBuf,
}

fn convert(name: &str, settings: Conversion) -> Converted {
    let folder = tempfile::tempdir().unwrap();
    let layout = layouts::one(folder.path(), name);
    let target = folder.path().join("target");
    settings.prepare(&layout.path, &target).unwrap().run().unwrap();
    Converted { folder, layout, target }
}

fn verify(target: &Path, against: Option<&Path>) -> Result<VerifyReport, ConvertError> {
    Verification::new().run(target, against, &mut |_| {})
}

impl Converted {
    fn verify(&self) -> VerifyReport {
        verify(&self.target, None).unwrap()
    }

    fn against(&self) -> VerifyReport {
        verify(&self.target, Some(&self.layout.path)).unwrap()
    }

    fn manifest(&self) -> PathBuf {
        self.target.join("onelayer.manifest.json")
    }

    fn remove_manifest(&self) {
        fs::remove_file(self.manifest()).unwrap();
    }

    /// The file of a tensor, and where its bytes begin in it.
    fn place_of(&self, tensor: &str) -> (PathBuf, usize) {
        let checkpoint = Checkpoint::open(&self.target).unwrap();
        let entry = checkpoint.find(tensor).unwrap();
        (checkpoint.shard(entry.shard).path.clone(), entry.extent.start() as usize)
    }
}

fn flip(path: &Path, at: usize) {
    let mut bytes = fs::read(path).unwrap();
    bytes[at] ^= 0x10;
    fs::write(path, bytes).unwrap();
}

/// Place and text of every difference, in one text each.
fn told(report: &VerifyReport) -> Vec<String> {
    report.differences.iter().map(|found| format!("{}: {}", found.place, found.what)).collect()
}

fn is_told(report: &VerifyReport, place: &str, what: &str) -> bool {
    report.differences.iter().any(|found| found.place == place && found.what.contains(what))
}

#[test]
fn a_verification_can_be_cancelled() {
    let folder = tempfile::tempdir().unwrap();
    let layout = layouts::all(folder.path()).into_iter().next().unwrap();
    let target = folder.path().join("target");
    Conversion::new().prepare(&layout.path, &target).unwrap().run().unwrap();
    let verification = Verification::new();
    let cancel = verification.cancel_handle();
    let found = verification.run(&target, Some(&layout.path), &mut |_| cancel.cancel());
    let Err(ConvertError::Load(error)) = found else { panic!("{found:?}") };
    assert!(matches!(error, onelayer::LoadError::Cancelled), "{error}");
}

#[test]
fn what_was_converted_verifies() {
    let folder = tempfile::tempdir().unwrap();
    for (number, layout) in layouts::all(folder.path()).into_iter().enumerate() {
        let name = layout.name;
        let target = folder.path().join(format!("target-{number}"));
        let conversion = Conversion::new().sha256(number % 2 == 0);
        conversion.prepare(&layout.path, &target).unwrap().run().unwrap();
        let checkpoint = Checkpoint::open(&target).unwrap();
        let bytes: usize = layout.tensors.values().map(|tensor| tensor.bytes.len()).sum();
        let sums = |report: &VerifyReport| (report.files, report.tensors, report.bytes);
        let expected = (checkpoint.shards().len() as u64, layout.tensors.len() as u64, bytes as u64);
        for against in [None, Some(layout.path.as_path())] {
            let report = verify(&target, against).unwrap();
            assert_eq!((told(&report), sums(&report)), (vec![], expected), "{name}, {against:?}");
        }
        // The other way round, the side that is checked has no manifest.
        let report = verify(&layout.path, Some(&target)).unwrap();
        assert_eq!((told(&report), sums(&report)), (vec![], (0, expected.1, expected.2)), "{name}, back");
        assert!(
            report.notes.iter().any(|note| note.contains("there is no onelayer.manifest.json")),
            "{name}"
        );
        let report = verify(&layout.path, None).unwrap();
        assert_eq!((told(&report), sums(&report)), (vec![], (0, 0, 0)), "{name}, structure");
    }
}

#[test]
fn any_changed_byte_of_any_file_is_found() {
    for name in ["pipeline", "side files", "nothing in them"] {
        let converted = convert(name, Conversion::new());
        let mut files = Vec::new();
        collect(&converted.target, &mut files);
        assert!(files.len() > 3, "{name}: {files:?}");
        for file in files {
            let len = fs::metadata(&file).unwrap().len() as usize;
            for at in [0, 9, len / 3, len / 2, len.saturating_sub(2), len.saturating_sub(1)] {
                if at >= len {
                    continue;
                }
                flip(&file, at);
                let found = verify(&converted.target, None);
                let is_right = found.as_ref().is_ok_and(|report| report.differences.is_empty());
                // Some text of the manifest is not about files: the program, the source.
                let is_manifest = file == converted.manifest();
                assert!(!is_right || is_manifest, "{name}: byte {at} of {}", file.display());
                flip(&file, at);
            }
        }
        assert_eq!(told(&converted.verify()), [""; 0], "all is as it was");
    }
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { collect(&path, files) } else { files.push(path) }
    }
}

#[test]
fn a_changed_byte_of_a_tensor_is_named_and_located() {
    let converted = convert("several slots", Conversion::new());
    let tensor = "model.layers.1.a";
    let (path, start) = converted.place_of(tensor);
    let file = path.file_name().unwrap().to_str().unwrap().to_owned();
    flip(&path, start + 2_900_000);
    let report = converted.verify();
    assert!(is_told(&report, tensor, "has other bytes: BLAKE3 is "), "{:?}", told(&report));
    assert!(is_told(&report, &file, "has other bytes: BLAKE3 is "), "{:?}", told(&report));
    assert_eq!(report.differences.len(), 2, "and nothing else: {:?}", told(&report));
    let report = converted.against();
    let byte = converted.layout.tensors[tensor].bytes[2_900_000];
    let expected = format!(
        "differs from the source first at its byte 2900000 of 3000017: {:#04x}, in the source {byte:#04x}",
        byte ^ 0x10
    );
    assert!(is_told(&report, tensor, &expected), "{:?}", told(&report));
    assert_eq!(report.differences.len(), 3);
    converted.remove_manifest();
    assert_eq!(told(&converted.verify()), [""; 0], "nobody knows what it should be");
    assert_eq!(told(&converted.against()), [format!("{tensor}: {expected}")]);
}

#[test]
fn many_tensors_that_differ_are_all_named_and_some_located() {
    let converted = convert("every type", Conversion::new());
    converted.remove_manifest();
    for name in converted.layout.tensors.keys() {
        let (path, start) = converted.place_of(name);
        flip(&path, start);
    }
    let report = converted.against();
    assert_eq!(report.differences.len(), converted.layout.tensors.len(), "{:?}", told(&report));
    let located = report.differences.iter().filter(|found| found.what.contains("first at its byte 0 of"));
    assert_eq!(located.count(), 8);
}

#[test]
fn files_that_are_missing_cut_or_too_many_are_named() {
    let converted = convert("encoder and decoder", Conversion::new());
    let shards = Checkpoint::open(&converted.target).unwrap().shards().len();
    let file = format!("model-00002-of-{shards:05}.safetensors");
    let path = converted.target.join(&file);
    let whole = fs::read(&path).unwrap();

    fs::write(&path, &whole[..whole.len() - 1]).unwrap();
    let report = converted.verify();
    assert!(
        is_told(&report, &file, &format!("has {} bytes, the manifest says", whole.len() - 1)),
        "{:?}",
        told(&report)
    );
    assert!(report.notes.iter().any(|note| note.contains("no bytes of tensors were compared")));

    fs::remove_file(&path).unwrap();
    assert!(is_told(&converted.verify(), &file, "is missing"), "{:?}", told(&converted.verify()));
    assert!(is_told(&converted.against(), &file, "is missing"));
    fs::write(&path, &whole).unwrap();

    for side_file in ["config.json", "spiece.model", "model.safetensors.index.json"] {
        let path = converted.target.join(side_file);
        let bytes = fs::read(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let report = converted.verify();
        assert!(is_told(&report, side_file, "is missing"), "{:?}", told(&report));
        fs::create_dir(&path).unwrap();
        assert!(is_told(&converted.verify(), side_file, "is a directory, not a file"));
        fs::remove_dir(&path).unwrap();
        fs::write(&path, [&bytes[..], b"x"].concat()).unwrap();
        let report = converted.verify();
        assert!(is_told(&report, side_file, "bytes, the manifest says"), "{:?}", told(&report));
        fs::write(&path, bytes).unwrap();
    }

    fs::write(converted.target.join("README.md"), "mine").unwrap();
    let report = converted.verify();
    assert_eq!(told(&report), [""; 0]);
    assert!(report.notes.contains(&"not in the manifest: README.md".to_owned()), "{:?}", report.notes);
    fs::copy(&path, converted.target.join("adapter.safetensors")).unwrap();
    assert!(is_told(&converted.verify(), "adapter.safetensors", "neither the index nor the manifest"));
    fs::remove_file(converted.target.join("adapter.safetensors")).unwrap();
    fs::copy(
        converted.target.join("model.safetensors.index.json"),
        converted.target.join("model.safetensors.index.fp16.json"),
    )
    .unwrap();
    let report = converted.verify();
    assert!(
        is_told(&report, "model.safetensors.index.fp16.json", "loaders may follow it"),
        "{:?}",
        told(&report)
    );
}

#[test]
fn a_manifest_of_something_else_is_found() {
    let converted = convert("experts", Conversion::new().sha256(true));
    let text = fs::read_to_string(converted.manifest()).unwrap();
    let parsed = Manifest::read(&converted.manifest()).unwrap();
    let tensor = &parsed.files[3].tensors[1];
    let name = tensor.name.as_str();
    let line = text.lines().find(|line| line.contains(&format!("{{\"name\":\"{name}\""))).unwrap();
    let try_with = |changed: &str| {
        fs::write(converted.manifest(), text.replace(line, changed)).unwrap();
        converted.verify()
    };
    assert_eq!(told(&try_with(line)), [""; 0]);
    let sha256 = tensor.sha256.clone().unwrap();
    let cases = [
        (line.replace(&tensor.blake3, &"0".repeat(64)), "has other bytes: BLAKE3 is "),
        (line.replace(&sha256, &"0".repeat(64)), "has other bytes: SHA-256 is "),
        (line.replace("\"dtype\":\"BF16\"", "\"dtype\":\"F16\""), "the manifest says F16 ["),
        (line.replace("\"shape\":[", "\"shape\":[1,"), "the manifest says BF16 [1, "),
    ];
    for (changed, what) in cases {
        assert_ne!(changed, line);
        let report = try_with(&changed);
        assert!(is_told(&report, name, what), "{what}: {:?}", told(&report));
    }
    let report = try_with(&line.replace(name, "nobody"));
    assert!(is_told(&report, "nobody", "as the manifest says"), "{:?}", told(&report));
    assert!(is_told(&report, name, "is not in the manifest"), "{:?}", told(&report));

    // A wrong hash of a whole file, and a file of the manifest that is missing.
    let file = &parsed.files[3];
    fs::write(converted.manifest(), text.replacen(&file.blake3, &"1".repeat(64), 1)).unwrap();
    let report = converted.verify();
    assert_eq!(report.differences.len(), 1);
    assert!(is_told(&report, &file.name, "the manifest says 1111111111111111..."), "{:?}", told(&report));
    let stated = |bytes: u64| format!("\"name\":\"{}\",\"bytes\":{bytes},", file.name);
    fs::write(converted.manifest(), text.replace(&stated(file.bytes), &stated(1_234_567))).unwrap();
    let report = converted.verify();
    assert_eq!(report.differences.len(), 1);
    let what = format!("has {} bytes, the manifest says 1234567", file.bytes);
    assert!(is_told(&report, &file.name, &what), "{:?}", told(&report));
    fs::write(converted.manifest(), text.replace(&file.name, "model-other.safetensors")).unwrap();
    let report = converted.verify();
    assert!(is_told(&report, "model-other.safetensors", "is missing"), "{:?}", told(&report));
    assert!(is_told(&report, &file.name, "is not in the manifest"), "{:?}", told(&report));
    for damage in ["", "{}", &text[..text.len() / 2]] {
        fs::write(converted.manifest(), damage).unwrap();
        let error = verify(&converted.target, None).unwrap_err();
        assert!(matches!(error, ConvertError::BadManifest { .. }), "{error}");
    }
}

#[test]
fn casts_are_compared_with_what_the_source_would_become() {
    let converted = convert("wide floats", Conversion::new().dtype(FloatType::F32));
    assert_eq!(told(&converted.verify()), [""; 0]);
    let report = converted.against();
    assert_eq!((told(&report), report.tensors), (vec![], converted.layout.tensors.len() as u64));
    let (path, start) = converted.place_of("h.1.a");
    flip(&path, start + 101);
    let report = converted.against();
    assert!(is_told(&report, "h.1.a", "first at its byte 101 of 252: "), "{:?}", told(&report));
    assert!(is_told(&report, "h.1.a", ", cast from F64"), "{:?}", told(&report));
    flip(&path, start + 101);
    converted.remove_manifest();
    let report = converted.against();
    assert!(is_told(&report, "h.1.a", "is F32, in the source F64"), "{:?}", told(&report));
    let same = report.tensors as usize;
    assert_eq!(report.differences.len() + same, converted.layout.tensors.len());
}

#[test]
fn what_was_left_out_on_purpose_is_no_difference() {
    let converted = convert("tied head", Conversion::new().drop_duplicates(true));
    let report = converted.against();
    assert_eq!(told(&report), [""; 0]);
    assert!(report.notes.iter().any(|note| note.starts_with("1 tensors of the source are stored under")));
    let (path, start) = converted.place_of("model.embed_tokens.weight");
    flip(&path, start + 7);
    let report = converted.against();
    for name in ["model.embed_tokens.weight", "lm_head.weight"] {
        assert!(is_told(&report, name, "first at its byte 7"), "{:?}", told(&report));
    }
    flip(&path, start + 7);
    converted.remove_manifest();
    assert_eq!(told(&converted.against()), ["lm_head.weight: is missing; the source has it"]);

    let only_one = Conversion::new().select(|_, layer| layer.as_str() == "model.layers.1");
    let converted = convert("layers across shards", only_one);
    let report = converted.against();
    assert_eq!((told(&report), report.tensors), (vec![], 4));
    assert!(
        report.notes.contains(&"11 tensors of the source were left out on purpose".to_owned()),
        "{:?}",
        report.notes
    );
    converted.remove_manifest();
    assert_eq!(converted.against().differences.len(), 11);
    let report = verify(&converted.layout.path, Some(&converted.target)).unwrap();
    assert_eq!(report.differences.len(), 11);
    assert!(is_told(&report, "model.norm.weight", "is not in the source"), "{:?}", told(&report));
}

#[test]
fn different_checkpoints_differ() {
    let folder = tempfile::tempdir().unwrap();
    let (left, right) =
        (layouts::one(folder.path(), "quantized"), layouts::one(folder.path(), "packed types"));
    let report = verify(&left.path, Some(&right.path)).unwrap();
    assert_eq!(report.differences.len(), left.tensors.len() + right.tensors.len());
    let other = tempfile::tempdir().unwrap();
    let turned = onelayer_testing::TestTensor {
        shape: vec![3, 3],
        ..left.tensors["model.layers.0.norm.weight"].clone()
    };
    onelayer_testing::write_file(&other.path().join("model.safetensors"), &[turned], 0);
    let report = verify(other.path(), Some(&left.path)).unwrap();
    assert!(
        is_told(&report, "model.layers.0.norm.weight", "has the shape [3, 3], in the source [9]"),
        "{:?}",
        told(&report)
    );
}

#[test]
fn an_unfinished_conversion_is_none() {
    let converted = convert("experts", Conversion::new());
    fs::create_dir(converted.target.join(".onelayer-convert")).unwrap();
    let report = converted.verify();
    assert_eq!(told(&report), [""; 0], "the manifest is written last");
    assert!(
        report.notes.iter().any(|note| note.starts_with(".onelayer-convert is left")),
        "{:?}",
        report.notes
    );
    converted.remove_manifest();
    assert!(is_told(&converted.verify(), ".onelayer-convert", "incomplete"));
}

#[test]
fn what_is_no_checkpoint_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    for path in [folder.path().join("none"), folder.path().to_owned()] {
        let error = verify(&path, None).unwrap_err();
        assert!(matches!(&error, ConvertError::Checkpoint(error) if error.is_missing()), "{error}");
    }
    let layout = layouts::one(folder.path(), "one tensor");
    assert!(verify(&layout.path, Some(&folder.path().join("none"))).is_err());
    // If the manifest lists it, its absence is a difference.
    let converted = convert("one tensor", Conversion::new());
    fs::remove_file(converted.target.join("model.safetensors")).unwrap();
    assert!(
        is_told(&converted.verify(), "model.safetensors", "is missing"),
        "{:?}",
        told(&converted.verify())
    );
}

#[test]
fn damaged_headers_are_differences_that_name_the_file() {
    let converted = convert("many shards, unordered", Conversion::new());
    let path = converted.target.join("model-00004-of-00010.safetensors");
    let whole = fs::read(&path).unwrap();
    for damage in [&whole[..7], b"{}", &[&[0xff; 8], &whole[8..]].concat()] {
        fs::write(&path, damage).unwrap();
        for report in [converted.verify(), converted.against()] {
            let file = "model-00004-of-00010.safetensors";
            assert!(report.differences.iter().all(|found| found.place == file), "{:?}", told(&report));
            // The fault of its header, and of its length if the manifest has another one.
            let expected = 1 + usize::from(damage.len() != whole.len());
            assert_eq!(report.differences.len(), expected, "{:?}", told(&report));
        }
    }
}

#[test]
fn a_budget_is_kept_or_refused() {
    let converted = convert("several slots", Conversion::new());
    let run = |mib: u64| {
        let verification = Verification::new().host_budget(mib << 20).open_options(OpenOptions::new());
        let mut told = 0;
        let found = verification.run(&converted.target, Some(&converted.layout.path), &mut |_| told += 1);
        (found, told)
    };
    assert_eq!(told(&run(5).0.unwrap()), [""; 0]);
    let (refused, told) = run(4);
    let refused = refused.unwrap_err();
    assert!(matches!(&refused, ConvertError::Plan(error) if error.is_over_budget()), "{refused}");
    assert_eq!(told, 0, "before anything is read");
}

#[test]
fn progress_goes_up_to_all_of_it() {
    let converted = convert("several slots", Conversion::new());
    let bytes: u64 = converted.layout.tensors.values().map(|tensor| tensor.bytes.len() as u64).sum();
    for (against, expected) in [(None, bytes), (Some(converted.layout.path.as_path()), 2 * bytes)] {
        let mut last = None;
        let mut observe = |event: &ConvertEvent<'_>| {
            let &ConvertEvent::Verifying { done_bytes, total_bytes } = event else { panic!("{event:?}") };
            assert!(last.is_none_or(|last| last <= done_bytes) && total_bytes == expected);
            last = Some(done_bytes);
        };
        Verification::new().run(&converted.target, against, &mut observe).unwrap();
        assert_eq!(last, Some(expected));
    }
    drop(converted.folder);
}
