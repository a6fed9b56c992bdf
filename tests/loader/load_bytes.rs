//! Every byte arrives at its place: whatever the source, the device, the window and the budget.
#![allow(clippy::unwrap_used, clippy::as_conversions, reason = "a test that cannot go on panics")]

use onelayer::plan::IoReason;
use onelayer::{Checkpoint, IoMode, Loader, Target, Window};
use onelayer_testing::skipped;
use onelayer_testing::{TestTensor, small_decoder, write_file, write_sharded};

const MODES: [IoMode; 5] = [IoMode::Auto, IoMode::Buffered, IoMode::Mmap, IoMode::Direct, IoMode::Uring];

/// The tensors as the reference reader sees them: name and bytes, sorted by name.
fn reference(folder: &std::path::Path) -> Vec<(String, Vec<u8>)> {
    let mut tensors = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            let bytes = std::fs::read(&path).unwrap();
            let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            tensors.extend(file.tensors().into_iter().map(|(name, view)| (name, view.data().to_vec())));
        }
    }
    tensors.sort();
    tensors
}

#[test]
fn streaming_delivers_what_the_reference_reads() {
    let folder = tempfile::tempdir().unwrap();
    write_sharded(folder.path(), &small_decoder(5, 700_000));
    let expected = reference(folder.path());
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    for io in MODES {
        for (budget_mib, window, prefetch) in [(5, 1, 0), (6, 1, 2), (8, 2, 1), (64, 3, 9)] {
            let loader = Loader::builder(Target::Host)
                .host_budget(budget_mib << 20)
                .io(io)
                .window(Window::Layers(window))
                .prefetch(prefetch);
            let loader = loader.build().unwrap();
            // mmap needs its window on top of the smallest ring.
            if io == IoMode::Mmap && budget_mib == 5 {
                assert!(loader.plan(&checkpoint).unwrap_err().is_over_budget());
                continue;
            }
            let mut found = Vec::new();
            for layer in loader.stream(&checkpoint).unwrap() {
                let layer = layer.unwrap();
                found.extend(layer.tensors().map(|t| (t.name().to_owned(), t.as_bytes().unwrap().to_vec())));
            }
            found.sort();
            assert!(found == expected, "{io:?}, {budget_mib} MiB, window {window}, prefetch {prefetch}");
        }
    }
}

#[test]
fn hashes_on_the_way_equal_hashes_of_the_bytes() {
    let folder = tempfile::tempdir().unwrap();
    write_sharded(folder.path(), &small_decoder(4, 600_000));
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let expected = reference(folder.path());
    for io in MODES {
        let loader = Loader::builder(Target::None).host_budget(8 << 20).io(io).hash(true).build().unwrap();
        let mut found = Vec::new();
        for layer in loader.stream(&checkpoint).unwrap() {
            let layer = layer.unwrap();
            assert!(layer.tensors().all(|tensor| tensor.as_bytes().is_none()));
            found.extend(
                layer.tensors().map(|t| (t.name().to_owned(), *t.hash().unwrap().unwrap().as_bytes())),
            );
        }
        found.sort();
        let hashes = expected.iter().map(|(name, bytes)| (name.clone(), *blake3::hash(bytes).as_bytes()));
        assert!(found.into_iter().eq(hashes), "{io:?}");
    }
}

#[test]
fn a_model_finds_tensors_by_name_and_gives_them_back() {
    let folder = tempfile::tempdir().unwrap();
    write_sharded(folder.path(), &small_decoder(3, 100_000));
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let mut model = Loader::builder(Target::Host).build().unwrap().load(&checkpoint).unwrap();
    for (name, bytes) in reference(folder.path()) {
        assert_eq!(model.tensor(&name).unwrap().as_bytes().unwrap(), bytes, "{name}");
    }
    let missing = model.tensor("model.layers.0.mlp.up_proj.weigth").unwrap_err().to_string();
    assert!(missing.contains("did you mean \"model.layers.0.mlp.up_proj.weight\""), "{missing}");

    let id = onelayer::LayerId::new("model.layers.1");
    let kept = model.tensor("model.layers.1.mlp.up_proj.weight").unwrap();
    let resident = model.resident_bytes();
    let receipt = model.unload(&id).unwrap();
    assert_eq!((receipt.returned_bytes, receipt.held_bytes), (0, receipt.asked_bytes));
    assert_eq!(receipt.holders[0].tensor, kept.name());
    assert!(receipt.asked_bytes > 0 && kept.as_bytes().is_some());
    assert_eq!(model.unload(&id).unwrap().asked_bytes, 0, "a second unload is harmless");
    assert!(model.layer(&id).unwrap_err().to_string().contains("no layer named"));
    drop(kept);
    let rest = model.unload_all();
    assert_eq!(rest.returned_bytes, resident - receipt.asked_bytes);
    assert_eq!(model.resident_bytes(), 0);
}

#[test]
fn odd_checkpoints_load() {
    let folder = tempfile::tempdir().unwrap();
    let scalar = TestTensor { name: "step".into(), dtype: "I64", shape: vec![], bytes: vec![7; 8] };
    let cases: [(&str, Vec<TestTensor>); 4] = [
        ("empty", vec![]),
        ("scalar", vec![scalar.clone()]),
        ("zero", vec![TestTensor::random("nothing", 0, 1)]),
        ("mixed", vec![TestTensor::random("a.0.x", 0, 1), scalar, TestTensor::random("b", 4097, 2)]),
    ];
    for (name, tensors) in cases {
        let path = folder.path().join(format!("{name}.safetensors"));
        write_file(&path, &tensors, 0);
        let checkpoint = Checkpoint::open(&path).unwrap();
        for io in MODES {
            let model = Loader::builder(Target::Host).io(io).build().unwrap().load(&checkpoint).unwrap();
            for tensor in &tensors {
                assert_eq!(model.tensor(&tensor.name).unwrap().as_bytes().unwrap(), tensor.bytes, "{name}");
            }
            let loader = Loader::builder(Target::None).io(io).hash(true).build().unwrap();
            let count: usize =
                loader.stream(&checkpoint).unwrap().map(|layer| layer.unwrap().tensors().len()).sum();
            assert_eq!(count, tensors.len(), "{name}");
        }
    }
}

#[test]
fn a_selection_loads_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    write_sharded(folder.path(), &small_decoder(3, 10_000));
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let select = |pattern: &'static str| {
        let builder = Loader::builder(Target::Host);
        builder.select(move |tensor| tensor.name.contains(pattern)).build().unwrap()
    };
    let model = select("layers.1.").load(&checkpoint).unwrap();
    assert_eq!(model.layers().map(|layer| layer.id().to_string()).collect::<Vec<_>>(), ["model.layers.1"]);
    let refused = select("nowhere").load(&checkpoint).unwrap_err().to_string();
    assert!(refused.contains("none of the 18 tensors"), "{refused}");
}

/// Files in memory, where there is nothing beside the page cache and direct I/O has nothing to go
/// past.
#[test]
fn files_on_tmpfs_arrive_and_nothing_is_read_direct() {
    let Ok(folder) = tempfile::tempdir_in("/dev/shm") else {
        skipped("no /dev/shm to write to");
        return;
    };
    write_sharded(folder.path(), &small_decoder(4, 3_000_000));
    let expected = reference(folder.path());
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let loader = Loader::builder(Target::Host).window(Window::All).build().unwrap();
    let plan = loader.plan(&checkpoint).unwrap();
    if !plan.decisions()[0].file_system.is_some_and(|kind| kind.is_memory()) {
        skipped("/dev/shm is no tmpfs here");
        return;
    }
    assert!(plan.decisions().iter().all(|decision| decision.reason == IoReason::Memory), "{plan}");
    let mut stream = loader.stream(&checkpoint).unwrap();
    let mut found = Vec::new();
    for layer in &mut stream {
        let layer = layer.unwrap();
        found.extend(layer.tensors().map(|t| (t.name().to_owned(), t.as_bytes().unwrap().to_vec())));
    }
    found.sort();
    assert!(found == expected);
    let report = stream.report();
    assert_eq!((report.ways.direct_bytes, report.ways.buffered_bytes), (0, report.read_bytes));
}

/// The plan says what was decided for each file, and the report what was done.
#[test]
fn decisions_are_in_the_plan_and_ways_in_the_report() {
    let folder = tempfile::tempdir().unwrap();
    write_sharded(folder.path(), &small_decoder(4, 3_000_000));
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    for io in MODES {
        let loader = Loader::builder(Target::None).io(io).build().unwrap();
        let mut stream = loader.stream(&checkpoint).unwrap();
        let plan = std::sync::Arc::clone(stream.plan());
        let files = if io == IoMode::Auto { checkpoint.shards().len() } else { 0 };
        assert_eq!(plan.decisions().len(), files, "{io}");
        assert_eq!(plan.to_string().contains(" on "), files > 0, "{plan}");
        assert!(stream.all(|layer| layer.is_ok()));
        let report = stream.report();
        let ways = report.ways;
        let sum = ways.direct_bytes + ways.buffered_bytes + ways.mapped_bytes;
        assert_eq!(sum, report.read_bytes, "{io}: {ways:?}");
        assert!(sum >= plan.source_bytes(), "{io}: {ways:?}");
    }
}
