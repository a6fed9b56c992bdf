//! What is dropped is given back: parts of a model are unloaded, and the receipts are held against
//! the kernel's own books.
//!
//! What a process has mapped is nobody else's doing only if nothing else runs in it: each scenario
//! is a test that is ignored, and that another one runs in a process of its own.
#![allow(
    clippy::unwrap_used,
    clippy::as_conversions,
    clippy::print_stdout,
    reason = "a test that cannot go on panics"
)]

use std::path::Path;

use onelayer::live::{self, MemoryKind, MemoryUse};
use onelayer::{Checkpoint, LayerId, LoadError, Loader, Model, ParkTo, Part, Receipt, Target};
use onelayer_testing::{TestTensor, small_decoder, write_file, write_sharded};

/// Runs one scenario in a process of its own.
fn alone(scenario: &str) {
    let output = onelayer_testing::again(module_path!(), scenario).arg("--ignored").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("1 passed"), "{text}");
}

#[test]
fn a_layer_a_prefix_and_all_are_given_back() {
    alone("scenario_parts");
}

#[test]
fn a_component_is_given_back() {
    alone("scenario_component");
}

#[test]
fn what_holds_a_layer_is_named() {
    alone("scenario_holders");
}

#[test]
fn the_list_of_what_is_allocated_forgets_nothing() {
    alone("scenario_live");
}

#[test]
fn what_is_parked_comes_back_as_it_was() {
    alone("scenario_parked");
}

fn load(path: &Path) -> Model {
    let loader = Loader::builder(Target::Host).host_budget(8 << 20).build().unwrap();
    loader.load(&Checkpoint::open(path).unwrap()).unwrap()
}

/// The addresses that this process has mapped.
fn mapped() -> Vec<(u64, u64)> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let number = |text: &str| u64::from_str_radix(text, 16).unwrap();
    let range =
        |line: &str| line.split(' ').next().unwrap().split_once('-').map(|(a, b)| (number(a), number(b)));
    maps.lines().filter_map(range).collect()
}

/// Where the tensors of a part of the model lie.
fn addresses(model: &Model, part: Part<'_>) -> Vec<u64> {
    let layers = model.layers().filter(|layer| part.contains(layer.id()));
    layers
        .flat_map(|layer| layer.tensors().filter_map(|tensor| tensor.host_pointer()).collect::<Vec<_>>())
        .map(|pointer| pointer.as_ptr().addr() as u64)
        .collect()
}

fn bytes_of(model: &Model, part: Part<'_>) -> u64 {
    model.layers().filter(|layer| part.contains(layer.id())).map(|layer| layer.resident_bytes()).sum()
}

/// Unloads a part twice: the first time everything goes, and what it lay in with it; the second
/// time nothing is left to do.
fn unload_twice(model: &mut Model, part: Part<'_>) {
    let (asked_bytes, places) = (bytes_of(model, part), addresses(model, part));
    let left_bytes = model.resident_bytes() - asked_bytes;
    assert!(asked_bytes > 0 && !places.is_empty(), "{part}");
    let receipt = model.unload(part).unwrap();
    assert_eq!(
        (receipt.asked_bytes, receipt.returned_bytes),
        (asked_bytes, asked_bytes),
        "{part}: {receipt}"
    );
    assert!(receipt.is_complete() && receipt.holders.is_empty(), "{part}: {receipt}");
    let mapped = mapped();
    let stay =
        places.iter().filter(|&&place| mapped.iter().any(|&(start, end)| (start..end).contains(&place)));
    assert_eq!(stay.count(), 0, "{part}: the kernel still has it mapped");
    assert_eq!(model.resident_bytes(), left_bytes, "{part}: the rest is as it was");
    assert_eq!(model.unload(part).unwrap(), Receipt::default(), "{part}: a second time");
}

#[test]
#[ignore = "scenario"]
fn scenario_parts() {
    let folder = tempfile::tempdir().unwrap();
    write_sharded(folder.path(), &small_decoder(12, 300_000));
    let mut model = load(folder.path());
    unload_twice(&mut model, Part::Layer(&LayerId::new("model.layers.1")));
    assert!(model.tensor("model.layers.10.mlp.up_proj.weight").is_ok(), "another name, another layer");
    unload_twice(&mut model, Part::Prefix("model.layers"));
    unload_twice(&mut model, Part::All);
    assert_eq!(model.resident_bytes(), 0);
}

#[test]
#[ignore = "scenario"]
fn scenario_component() {
    let folder = tempfile::tempdir().unwrap();
    let components = ["text_encoder", "text_encoder_2", "transformer"];
    for (seed, component) in (0..).zip(components) {
        std::fs::create_dir(folder.path().join(component)).unwrap();
        let tensors: Vec<_> = (0..3)
            .map(|layer| {
                TestTensor::random(format!("encoder.layers.{layer}.weight"), 70_000, 10 * seed + layer)
            })
            .collect();
        write_file(&folder.path().join(component).join("model.safetensors"), &tensors, 0);
    }
    let entries = components.map(|name| format!("{name:?}: [\"a\", \"b\"]")).join(",");
    std::fs::write(folder.path().join("model_index.json"), format!("{{{entries}}}")).unwrap();
    let mut model = load(folder.path());
    unload_twice(&mut model, Part::Component("text_encoder"));
    assert!(model.tensor("text_encoder_2/encoder.layers.0.weight").is_ok());
    unload_twice(&mut model, Part::Prefix("text_encoder_2/encoder"));
    unload_twice(&mut model, Part::All);
}

#[test]
#[ignore = "scenario"]
fn scenario_holders() {
    let folder = tempfile::tempdir().unwrap();
    write_sharded(folder.path(), &small_decoder(3, 100_000));
    let mut model = load(folder.path());
    let [up, down] = ["up", "down"].map(|name| format!("model.layers.1.mlp.{name}_proj.weight"));
    let held = model.tensor(&up).unwrap();
    let again = held.clone();
    let other = model.tensor(&down).unwrap();
    let before = held.as_bytes().unwrap().to_vec();

    let layer_bytes = bytes_of(&model, Part::Layer(&LayerId::new("model.layers.1")));
    let (asked_bytes, holders) = (model.resident_bytes(), model.holders());
    let receipt = model.unload(Part::All).unwrap();
    assert_eq!(receipt.holders, holders);
    let named: Vec<_> = receipt.holders.iter().map(|holder| (&*holder.tensor, holder.owners)).collect();
    assert_eq!(named, [(&*down, 1), (&*up, 2)], "in the order of the file");
    assert!(receipt.holders.iter().all(|holder| holder.layer == LayerId::new("model.layers.1")));
    assert_eq!(receipt.held_bytes, layer_bytes);
    assert_eq!((receipt.asked_bytes, receipt.returned_bytes), (asked_bytes, asked_bytes - layer_bytes));
    let words = receipt.to_string();
    assert!(words.contains("held by \"model.layers.1.mlp.down_proj.weight\", \""), "{words}");

    // What is held stays as it was, and goes with its last owner.
    assert!(held.as_bytes().unwrap() == before);
    let place = held.host_pointer().unwrap().as_ptr().addr() as u64;
    let is_mapped = || mapped().iter().any(|&(start, end)| (start..end).contains(&place));
    drop((held, other));
    assert!(is_mapped());
    drop(again);
    assert!(!is_mapped());
}

#[test]
fn an_unknown_part_is_an_error_that_names_what_there_is() {
    let folder = tempfile::tempdir().unwrap();
    write_sharded(folder.path(), &small_decoder(2, 10_000));
    let mut model = load(folder.path());
    let cases = [
        (
            Part::Prefix("model.layer"),
            "no layer below named \"model.layer\"; did you mean \"model.layers.1\"?",
        ),
        (Part::Component("vae"), "no component named \"vae\""),
        (Part::Layer(&LayerId::new("model.layers.7")), "no layer named \"model.layers.7\""),
    ];
    for (part, expected) in cases {
        let words = model.unload(part).unwrap_err().to_string();
        assert!(words.contains(expected), "{words}");
    }
}

#[test]
fn layers_of_a_stream_say_what_becomes_of_them() {
    let folder = tempfile::tempdir().unwrap();
    write_sharded(folder.path(), &small_decoder(3, 100_000));
    let loader = Loader::builder(Target::Host).host_budget(8 << 20).build().unwrap();
    let mut stream = loader.stream(&Checkpoint::open(folder.path()).unwrap()).unwrap();
    let mut kept = Vec::new();
    for layer in stream.by_ref() {
        let layer = layer.unwrap();
        if layer.id().as_str().contains("layers") {
            let receipt = layer.unload();
            assert_eq!(
                (receipt.recycled_bytes, receipt.returned_bytes),
                (receipt.asked_bytes, 0),
                "{receipt}"
            );
        } else if kept.is_empty() {
            kept.push(layer);
        }
    }
    drop(stream);
    let receipt = Receipt::default().and(kept.remove(0).unload());
    assert!(receipt.is_complete() && receipt.asked_bytes > 0, "nothing is used again: {receipt}");
}

/// Every tensor of the model, by name.
fn contents(model: &Model) -> Vec<(String, Vec<u8>)> {
    let of_layer = |layer: &onelayer::LoadedLayer| {
        let tensors = layer.tensors().map(|t| (t.name().to_owned(), t.as_bytes().unwrap().to_vec()));
        tensors.collect::<Vec<_>>()
    };
    model.layers().flat_map(of_layer).collect()
}

fn anonymous_bytes() -> u64 {
    onelayer_probe::Procfs::default().myself().memory().rss_bytes.value().unwrap()
}

#[test]
#[ignore = "scenario"]
fn scenario_parked() {
    let folder = tempfile::tempdir().unwrap();
    let shelf = tempfile::tempdir().unwrap();
    write_sharded(folder.path(), &small_decoder(4, 3_000_000));
    let mut model = load(folder.path());
    let (before, resident_bytes) = (contents(&model), model.resident_bytes());
    let rss_bytes = anonymous_bytes();

    let held = model.tensor("model.layers.2.mlp.up_proj.weight").unwrap();
    let receipt = model.park(Part::Prefix("model.layers"), ParkTo::Folder(shelf.path())).unwrap();
    assert_eq!(receipt.holders[0].tensor, held.name());
    assert!(receipt.parked_bytes > 0 && receipt.parked_bytes == receipt.returned_bytes, "{receipt}");
    assert_eq!(receipt.held_bytes + receipt.returned_bytes, receipt.asked_bytes);
    assert!(model.layer(&LayerId::new("model.layers.2")).is_ok(), "what is held stays");
    assert!(model.tensor("model.layers.1.mlp.up_proj.weight").is_err());
    assert_eq!(model.parked_bytes(), receipt.parked_bytes);
    assert_eq!(model.resident_bytes() + receipt.parked_bytes, resident_bytes);
    // Where pages are small, the ends of the three arenas, rounded up to 2 MiB, were never touched.
    let untouched_bytes = 3 * (2 << 20);
    let gone_bytes = rss_bytes - anonymous_bytes() + (4 << 20) + untouched_bytes;
    assert!(gone_bytes >= receipt.parked_bytes, "memory has gone");
    assert_eq!(
        std::fs::read_dir(shelf.path()).unwrap().count(),
        0,
        "no file is left that anybody could find"
    );
    drop(held);

    // On the host, its memory is where layers are: nothing is copied.
    assert_eq!(model.park(Part::All, ParkTo::Memory).unwrap(), Receipt::default());
    let parked_bytes = model.park(Part::All, ParkTo::Folder(shelf.path())).unwrap().parked_bytes;
    assert_eq!(model.parked_bytes(), resident_bytes);
    assert!(parked_bytes > 0 && model.resident_bytes() == 0);
    assert_eq!(model.park(Part::All, ParkTo::Folder(shelf.path())).unwrap(), Receipt::default(), "again");

    assert_eq!(model.restore(Part::All).unwrap(), resident_bytes);
    assert_eq!(model.restore(Part::All).unwrap(), 0, "again");
    assert!(contents(&model) == before, "bit by bit the same");
    model.park(Part::All, ParkTo::Folder(shelf.path())).unwrap();
    let receipt = model.unload(Part::All).unwrap();
    assert_eq!((receipt.asked_bytes, model.parked_bytes()), (0, 0), "a file is no memory: {receipt}");
    assert_eq!(model.restore(Part::All).unwrap(), 0, "what was unloaded is gone");
}

#[test]
fn what_cannot_be_parked_stays_resident() {
    let folder = tempfile::tempdir().unwrap();
    write_sharded(folder.path(), &small_decoder(2, 10_000));
    let mut model = load(folder.path());
    let before = contents(&model);
    let error = model.park(Part::All, ParkTo::Folder(&folder.path().join("absent"))).unwrap_err();
    assert!(matches!(&error, LoadError::Park { .. }), "{error}");
    assert!(
        error.to_string().starts_with("cannot park layer ") && error.to_string().ends_with("absent"),
        "{error}"
    );
    assert!(contents(&model) == before);
}

#[test]
fn a_scope_unloads_its_part_whichever_way_it_ends() {
    let folder = tempfile::tempdir().unwrap();
    let shelf = tempfile::tempdir().unwrap();
    write_sharded(folder.path(), &small_decoder(3, 10_000));
    let mut model = load(folder.path());
    let ids = [0, 1, 2].map(|number| LayerId::new(&format!("model.layers.{number}")));

    model.park(&ids[0], ParkTo::Folder(shelf.path())).unwrap();
    let scope = model.scope(&ids[0]).unwrap();
    assert!(scope.layer(&ids[0]).is_ok(), "what was parked is resident in its scope");
    let receipt = scope.end();
    assert!(receipt.is_complete() && receipt.asked_bytes > 0, "{receipt}");

    fn fails(model: &mut Model, id: &LayerId) -> Result<(), LoadError> {
        let scope = model.scope(id)?;
        scope.tensor("no such tensor")?;
        Ok(())
    }
    fails(&mut model, &ids[1]).unwrap_err();
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let mut scope = model.scope(&ids[2]).unwrap();
        // What is gone already is no trouble at the end.
        scope.unload(Part::Layer(&LayerId::new("lm_head"))).unwrap();
        panic!("on purpose");
    }));
    assert!(panicked.is_err());
    for id in &ids {
        assert!(model.layer(id).is_err(), "{id}");
    }
    assert!(model.resident_bytes() > 0, "the rest stays");
}

#[test]
fn a_layer_is_replaced_by_one_that_is_alike() {
    let [folder, other, unlike] = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let shards = small_decoder(3, 50_000);
    write_sharded(folder.path(), &shards);
    let id = LayerId::new("model.layers.1");
    let mut changed = shards.clone();
    for tensor in changed.iter_mut().flatten() {
        tensor.bytes.iter_mut().for_each(|byte| *byte = !*byte);
    }
    write_sharded(other.path(), &changed);
    changed
        .iter_mut()
        .flatten()
        .find(|tensor| tensor.name.contains("layers.1.mlp.up"))
        .unwrap()
        .shape
        .push(1);
    write_sharded(unlike.path(), &changed);

    let loader = Loader::builder(Target::Host).host_budget(8 << 20).build().unwrap();
    let mut model = load(folder.path());
    let before = contents(&model);
    let open = |folder: &tempfile::TempDir| Checkpoint::open(folder.path()).unwrap();
    let error = model.replace(&id, &loader, &open(&unlike)).unwrap_err().to_string();
    assert!(error.contains("layer model.layers.1 is not alike") && error.contains("up_proj"), "{error}");
    assert!(contents(&model) == before, "the model is as it was");

    for _ in 0..2 {
        let receipt = model.replace(&id, &loader, &open(&other)).unwrap();
        assert!(receipt.is_complete(), "{receipt}");
        for (name, bytes) in &before {
            let found = model.tensor(name).unwrap().as_bytes().unwrap().to_vec();
            let is_of_layer = name.starts_with("model.layers.1.");
            let expected = bytes.iter().map(|&byte| if is_of_layer { !byte } else { byte });
            assert!(found.into_iter().eq(expected), "{name}");
        }
        // What was unloaded is loaded again.
        assert!(model.unload(&id).unwrap().is_complete());
    }
    let receipt = model.replace(&id, &loader, &open(&folder)).unwrap();
    assert_eq!(receipt, Receipt::default());
    assert!(contents(&model) == before);
}

/// What is there and was not when the mark was set: uses, layers and bytes.
fn new_since(mark: &live::Snapshot) -> Vec<(MemoryUse, Option<String>, u64)> {
    let new = live::snapshot().since(mark).new.into_iter();
    new.map(|one| (one.used_for, one.layer.map(|id| id.to_string()), one.bytes)).collect()
}

#[test]
#[ignore = "scenario"]
fn scenario_live() {
    let folder = tempfile::tempdir().unwrap();
    write_sharded(folder.path(), &small_decoder(3, 300_000));
    let shelf = tempfile::tempdir().unwrap();
    let mark = live::snapshot();
    assert!(mark.allocations().is_empty(), "{mark:?}");
    let mut model = load(folder.path());
    assert_eq!(live::snapshot().bytes(MemoryKind::Host), model.resident_bytes(), "the ring is gone");
    let listed: Vec<_> = new_since(&mark)
        .into_iter()
        .map(|(used_for, layer, bytes)| {
            assert_eq!(used_for, MemoryUse::Layer);
            (layer.unwrap(), bytes)
        })
        .collect();
    let mut expected: Vec<_> = model.layers().map(|l| (l.id().to_string(), l.resident_bytes())).collect();
    expected.sort();
    let mut sorted = listed.clone();
    sorted.sort();
    assert_eq!(sorted, expected);
    let of_model: Vec<u64> = model.live().allocations().iter().map(|one| one.number).collect();
    assert_eq!(of_model.len(), listed.len());

    // Every tensor is in one group, as long as it is.
    let tensors: Vec<_> = model.layers().flat_map(|l| l.tensors().collect::<Vec<_>>()).collect();
    let groups = model.live().groups();
    assert_eq!(groups.iter().map(|group| group.count).sum::<usize>(), tensors.len());
    assert_eq!(
        groups.iter().map(|group| group.bytes).sum::<u64>(),
        tensors.iter().map(|t| t.len_bytes()).sum::<u64>()
    );
    assert!(
        groups.iter().any(|group| group.count > 1)
            && groups.is_sorted_by(|one, next| one.bytes >= next.bytes)
    );
    drop(tensors);

    // A tensor that outlives its layer is found, with its owners.
    let held = model.tensor("model.layers.1.mlp.up_proj.weight").unwrap();
    model.unload_all();
    let live = live::snapshot();
    let [one] = live.since(&mark).new.try_into().unwrap();
    assert_eq!(one.layer, Some(LayerId::new("model.layers.1")));
    let owned: Vec<_> = one.tensors.iter().filter(|t| t.owners > 0).map(|t| (&*t.name, t.owners)).collect();
    assert_eq!(owned, [(held.name(), 1)]);
    assert!(model.live().allocations().is_empty(), "it is no part of the model any more");
    drop(held);
    assert_eq!(new_since(&mark), []);
    assert_eq!(live::snapshot().since(&live).gone.len(), 1);

    // A stream has a ring and arenas, and leaves nothing.
    let loader = Loader::builder(Target::Host).host_budget(8 << 20).build().unwrap();
    let mut stream = loader.stream(&Checkpoint::open(folder.path()).unwrap()).unwrap();
    let first = stream.next().unwrap().unwrap();
    let uses: Vec<_> = new_since(&mark).into_iter().map(|(used_for, ..)| used_for).collect();
    assert!(uses.contains(&MemoryUse::Ring) && uses.contains(&MemoryUse::Layer), "{uses:?}");
    drop(first);
    drop(stream);
    assert_eq!(new_since(&mark), []);

    let mut model = load(folder.path());
    model.park(Part::All, ParkTo::Folder(shelf.path())).unwrap();
    assert_eq!(new_since(&mark), [], "what waits in a file takes no memory");
}

/// One cycle after the other, in a process of its own: what is resident afterwards is what was
/// before.
#[test]
fn a_hundred_cycles_leave_memory_as_it_was() {
    alone("scenario_cycles");
}

#[test]
#[ignore = "takes a minute: 100 loads of 1 GB; run by hand"]
fn a_hundred_cycles_of_a_large_model() {
    cycles(25_000_000, 100);
}

#[test]
#[ignore = "scenario"]
fn scenario_cycles() {
    cycles(400_000, 100);
}

fn cycles(unit: usize, count: usize) {
    let folder = tempfile::tempdir().unwrap();
    write_sharded(folder.path(), &small_decoder(4, unit));
    let cycle = || {
        let mut model = load(folder.path());
        let bytes = model.resident_bytes();
        let receipt = model.unload(Part::Prefix("model.layers")).unwrap().and(model.unload_all());
        assert!(receipt.is_complete(), "{receipt}");
        bytes
    };
    // The first touch of code and of the allocator is no leak.
    (0..3).for_each(|_| {
        cycle();
    });
    let before_bytes = anonymous_bytes();
    let mut most_bytes = 0;
    for _ in 0..count {
        let bytes = cycle();
        assert!(bytes > 8 << 20, "what would stay must show");
        most_bytes = most_bytes.max(anonymous_bytes());
        assert!(live::snapshot().allocations().is_empty());
    }
    let grown_bytes = most_bytes.saturating_sub(before_bytes);
    println!("{count} cycles of {} MiB: +{} KiB", cycle() >> 20, grown_bytes >> 10);
    assert!(grown_bytes <= 4 << 20, "{grown_bytes} bytes after {count} cycles");
}
