//! Converted tensors are bit-equal to the source for every layout of files, and every run writes
//! the same bytes.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use onelayer_testing::layouts;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use onelayer::convert::{Conversion, ConvertError, Experts, Grouping, KernelCopy, Part};
use onelayer::{Checkpoint, PlanError};

fn fixture(name: &str) -> PathBuf {
    onelayer_testing::repository().join("fixtures/checkpoints").join(name)
}

const FIXTURES: [&str; 5] = ["gemma2", "gpt2", "llama", "llama_sharded", "qwen2_moe"];

/// The kernel copies the same bytes that would be written.
#[test]
fn what_the_kernel_copies_is_right() {
    let (source, folder) = (fixture("llama"), tempfile::tempdir().unwrap());
    let path = |name: &str| folder.path().join(name);
    convert(Conversion::new().kernel_copy(KernelCopy::Never), &source, &path("written"));
    let always = Conversion::new().kernel_copy(KernelCopy::Always).host_budget(16 << 20);
    let report = always.prepare(&source, path("copied")).unwrap().run().unwrap();
    let copied_bytes = report.kernel_copied.cloned_bytes + report.kernel_copied.copied_bytes;
    assert!(copied_bytes > report.written_bytes / 2, "{:?}", report.kernel_copied);
    assert!(files(&path("written")) == files(&path("copied")));
}

/// Every tensor of a checkpoint, read without the library's loader.
fn tensors(path: &Path) -> BTreeMap<String, (String, Vec<u64>, Vec<u8>)> {
    let checkpoint = Checkpoint::open(path).unwrap();
    let read = |tensor: onelayer::TensorEntry<'_>| {
        let file = fs::read(&checkpoint.shard(tensor.shard).path).unwrap();
        let range =
            usize::try_from(tensor.extent.start()).unwrap()..usize::try_from(tensor.extent.end()).unwrap();
        (tensor.name.to_owned(), (tensor.dtype_name.to_owned(), tensor.shape.to_vec(), file[range].to_vec()))
    };
    checkpoint.tensors().map(read).collect()
}

/// The bytes of every file below a directory.
fn files(path: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![path.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let entry = entry.unwrap().path();
            if entry.is_dir() {
                folders.push(entry);
            } else {
                found.insert(entry.strip_prefix(path).unwrap().to_owned(), fs::read(&entry).unwrap());
            }
        }
    }
    found
}

fn convert(settings: Conversion, source: &Path, target: &Path) {
    let report = settings.host_budget(16 << 20).prepare(source, target).unwrap().run().unwrap();
    assert!(report.is_complete);
}

#[test]
fn every_layer_gets_a_file_and_every_tensor_its_bytes() {
    for name in FIXTURES {
        let (source, folder) = (fixture(name), tempfile::tempdir().unwrap());
        let target = folder.path().join("target");
        convert(Conversion::new(), &source, &target);
        assert!(tensors(&source) == tensors(&target), "{name}");
        let checkpoint = Checkpoint::open(&target).unwrap();
        assert!(checkpoint.shards().len() > 2, "{name}");
        for shard in checkpoint.shards() {
            assert_eq!(shard.data.start() % 4096, 0, "{name}");
        }
        assert_eq!(
            fs::read(source.join("config.json")).unwrap(),
            fs::read(target.join("config.json")).unwrap()
        );
    }
}

#[test]
fn there_and_back_and_there_again() {
    let sources = tempfile::tempdir().unwrap();
    let fixtures = FIXTURES.map(|name| (name, fixture(name)));
    let layouts = layouts::all(sources.path()).into_iter().map(|layout| (layout.name, layout.path));
    for (name, source) in fixtures.into_iter().chain(layouts) {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        convert(Conversion::new(), &source, &path("layers"));
        convert(Conversion::new().grouping(Grouping::Merged), &path("layers"), &path("one"));
        let is_pipeline = path("one").join("model_index.json").exists();
        assert_eq!(Checkpoint::open(path("one")).unwrap().shards().len(), if is_pipeline { 2 } else { 1 });
        let shards = Conversion::new().grouping(Grouping::Merged).max_shard_bytes(100_000);
        convert(shards, &path("one"), &path("shards"));
        convert(Conversion::new().jobs(7), &path("shards"), &path("again"));
        assert!(tensors(&source) == tensors(&path("again")), "{name}");
        let (mut first, mut again) = (files(&path("layers")), files(&path("again")));
        // Manifests have the path of their source.
        first.remove(Path::new("onelayer.manifest.json")).unwrap();
        again.remove(Path::new("onelayer.manifest.json")).unwrap();
        assert!(first == again, "{name}");
    }
}

/// Every layout, read by the `safetensors` crate: names, types, shapes, bytes and alignment are
/// right, and the index has every tensor.
#[test]
fn every_layout_comes_through() {
    let (sources, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for layout in layouts::all(sources.path()) {
        let (name, target) = (layout.name, folder.path().join("target"));
        let report = Conversion::new().prepare(&layout.path, &target).unwrap().run().unwrap();
        assert!(report.is_complete, "{name}");
        let found = files(&target);
        let mut expected = layout.tensors.clone();
        for (path, bytes) in
            found.iter().filter(|(path, _)| path.extension().is_some_and(|end| end == "safetensors"))
        {
            let (header_bytes, header) = safetensors::SafeTensors::read_metadata(bytes).unwrap();
            assert_eq!((8 + header_bytes) % 4096, 0, "{name}");
            for info in header.tensors().values() {
                let element_bytes = (info.dtype.bitsize() / 8).max(1);
                assert!(
                    info.data_offsets.0 % element_bytes == 0 || info.data_offsets.0 == info.data_offsets.1,
                    "{name}"
                );
            }
            let component = path.parent().unwrap().to_str().unwrap();
            let prefix = if component.is_empty() { String::new() } else { format!("{component}/") };
            for (tensor, view) in safetensors::SafeTensors::deserialize(bytes).unwrap().tensors() {
                let wanted = expected.remove(&format!("{prefix}{tensor}")).unwrap();
                let dtype = serde_json::to_value(view.dtype()).unwrap();
                let shape: Vec<u64> =
                    view.shape().iter().map(|&elements| u64::try_from(elements).unwrap()).collect();
                assert_eq!(
                    (dtype.as_str().unwrap(), &shape),
                    (wanted.dtype, &wanted.shape),
                    "{name}: {tensor}"
                );
                assert!(view.data() == wanted.bytes, "{name}: {tensor}");
            }
        }
        assert!(expected.is_empty(), "{name}: {:?} are lost", expected.keys());
        for (path, bytes) in &layout.side_files {
            assert!(found.get(Path::new(path)) == Some(bytes), "{name}: {path}");
        }
        check_indices(name, &found);
        fs::remove_dir_all(&target).unwrap();
    }
}

/// Every index lists the tensors of the files beside it, and their bytes.
fn check_indices(name: &str, files: &BTreeMap<PathBuf, Vec<u8>>) {
    for (path, text) in
        files.iter().filter(|(path, _)| path.to_str().unwrap().ends_with(".safetensors.index.json"))
    {
        let index: serde_json::Value = serde_json::from_slice(text).unwrap();
        let map = index["weight_map"].as_object().unwrap();
        let (mut tensors, mut bytes) = (0, 0);
        for (tensor, file) in map {
            let file = &files[&path.with_file_name(file.as_str().unwrap())];
            let parsed = safetensors::SafeTensors::deserialize(file).unwrap();
            bytes += parsed.tensor(tensor).unwrap().data().len();
        }
        for file in files.iter().filter(|(other, _)| other.parent() == path.parent()) {
            if file.0.extension().is_some_and(|end| end == "safetensors") {
                tensors += safetensors::SafeTensors::deserialize(file.1).unwrap().len();
            }
        }
        assert_eq!(
            (map.len(), &index["metadata"]["total_size"]),
            (tensors, &serde_json::json!(bytes)),
            "{name}"
        );
    }
}

#[test]
fn neither_runs_nor_jobs_nor_parts_change_a_byte() {
    let (source, folder) = (fixture("qwen2_moe"), tempfile::tempdir().unwrap());
    let settings = || Conversion::new().experts(Experts::PerFile);
    let path = |name: &str| folder.path().join(name);
    convert(settings().jobs(1), &source, &path("one"));
    convert(settings().jobs(8), &source, &path("eight"));
    for number in [3, 1, 2] {
        let part = settings().part(Part::new(number, 3).unwrap());
        let report = part.clone().prepare(&source, path("parts")).unwrap().run().unwrap();
        assert!(!report.is_complete && report.files_written > 0);
        let again = part.prepare(&source, path("parts")).unwrap().run().unwrap();
        assert_eq!((again.files_written, again.files_kept), (0, report.files_written));
    }
    let whole = settings().prepare(&source, path("parts")).unwrap().run().unwrap_err();
    assert!(whole.to_string().contains("3 parts"), "{whole}");
    assert!(settings().prepare(&source, path("parts")).unwrap().finish().unwrap().is_complete);
    assert!(files(&path("one")) == files(&path("eight")));
    assert!(files(&path("one")) == files(&path("parts")));
    assert!(tensors(&source) == tensors(&path("one")));
}

/// The transposed tensor is one unit, which takes four times its bytes in the slot.
#[test]
fn what_is_put_in_order_can_become_longer() {
    use onelayer::FloatType;
    use onelayer::convert::Casting;
    use onelayer_testing::torch_file::{Pickle, View, archive};

    let (rows, columns) = (1031, 1500);
    let view = View { offset: 0, shape: &[rows, columns], strides: &[1, rows] };
    let pickle =
        Pickle::new().raw(b"}").text("w").tensor("ByteStorage", "0", rows * columns, &view).raw(b"s").end();
    let data = onelayer_testing::random_bytes(usize::try_from(rows * columns).unwrap(), 7);
    let folder = tempfile::tempdir().unwrap();
    let (source, target) = (folder.path().join("w.pt"), folder.path().join("target"));
    fs::write(&source, archive(&pickle, &[&data]).0).unwrap();
    let settings = |budget_bytes| {
        let settings = Conversion::new().dtype_rule(|_| Some(Casting::To(FloatType::F32)));
        settings.host_budget(budget_bytes).verify(true)
    };
    let error = settings(16 << 20).prepare(&source, &target).unwrap_err();
    let ConvertError::Plan(PlanError::BudgetTooSmall { smallest_bytes, .. }) = error else {
        panic!("{error}")
    };
    assert!(settings(smallest_bytes).prepare(&source, &target).unwrap().run().unwrap().is_complete);
    let (rows, columns) = (1031, 1500);
    let places = (0..rows).flat_map(|row| (0..columns).map(move |column| column * rows + row));
    let expected: Vec<u8> = places.flat_map(|at| f32::from(data[at]).to_le_bytes()).collect();
    let found = &tensors(&target)["w"];
    assert!(found.0 == "F32" && found.2 == expected);
}
