//! The terms of a plan against a counting allocator: what opening, grouping and planning really
//! hold at their highest, for checkpoints that consist of nothing but names.
//!
//! The allocator of this test counts what every block takes, and of a block that grows the old and
//! the new one. The terms of the plan, ring and windows aside, must cover that to within a MiB, and
//! must not be a wild guess upwards.

#![allow(
    clippy::unwrap_used,
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    clippy::print_stdout,
    reason = "helpers of tests are tests too"
)]

use std::fmt::Write as _;
use std::path::Path;
use std::sync::atomic::Ordering;

use crate::allocator::{LIVE, PEAK};
use onelayer::plan::TermKind;
use onelayer::{Checkpoint, LayerMap, Loader, Target};

const MIB: usize = 1 << 20;
/// More than any of them needs.
const BUDGET_BYTES: u64 = 1 << 30;

/// Tensors of each checkpoint.
fn tensors() -> usize {
    onelayer_testing::all_or(100_000, 40_000)
}

/// Writes one file whose tensors have these names and shapes, of single bytes.
fn write_file(path: &Path, tensors: impl Iterator<Item = (String, &'static [u64])>) {
    let mut header = String::from("{");
    let mut offset = 0;
    for (name, shape) in tensors {
        let end = offset + shape.iter().product::<u64>();
        let comma = if header.len() > 1 { "," } else { "" };
        write!(
            header,
            r#"{comma}"{name}":{{"dtype":"U8","shape":{shape:?},"data_offsets":[{offset},{end}]}}"#
        )
        .unwrap();
        offset = end;
    }
    header.push('}');
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.resize(file.len() + offset as usize, 0);
    std::fs::write(path, file).unwrap();
}

/// What a checkpoint took and what the plan said that it takes.
fn check(what: &str, path: &Path, map: &LayerMap) {
    let before = LIVE.load(Ordering::Relaxed);
    let open_and_plan = || {
        let checkpoint = Checkpoint::open(path).unwrap();
        let (held, described) = (LIVE.load(Ordering::Relaxed) - before, checkpoint.metadata_bytes() as usize);
        assert!(held <= described + MIB / 16, "{what}: {held} bytes are held, {described} were described");
        assert!(
            described <= held + held / 4 + MIB / 4,
            "{what}: {described} bytes were described, {held} are held"
        );
        let loader = Loader::builder(Target::None).host_budget(BUDGET_BYTES).layer_map(map.clone()).build();
        let plan = loader.unwrap().plan(&checkpoint).unwrap();
        (checkpoint, plan)
    };
    PEAK.store(before, Ordering::Relaxed);
    let (checkpoint, plan) = open_and_plan();
    let measured = PEAK.load(Ordering::Relaxed) - before;
    let kept = LIVE.load(Ordering::Relaxed) - before;
    let terms = plan
        .memory()
        .terms()
        .iter()
        .filter(|term| !matches!(term.kind, TermKind::Ring | TermKind::MappedWindows));
    let promised = terms.map(|term| term.bytes).sum::<u64>() as usize;
    let layers = plan.layers().len();
    drop((checkpoint, plan));
    let left = LIVE.load(Ordering::Relaxed) - before;
    println!(
        "{what:<24} {layers:>6} layers, promised {:>6} KiB, measured {:>6} KiB, kept {:>6} KiB",
        promised >> 10,
        measured >> 10,
        kept >> 10
    );
    assert!(measured <= promised + MIB, "{what}: {measured} bytes were held, {promised} were promised");
    assert!(promised <= 2 * measured + MIB, "{what}: {promised} bytes were promised, {measured} were held");
    assert_eq!(left, 0, "{what}: bytes that nobody gave back");
}

const BYTE: &[u64] = &[1];
const NOTHING: &[u64] = &[0];
const VECTOR: &[u64] = &[2];
const MATRIX: &[u64] = &[2, 2];

fn names(name: impl Fn(usize) -> String) -> impl Iterator<Item = (String, &'static [u64])> {
    (0..tensors()).map(move |number| (name(number), BYTE))
}

fn flat(number: usize) -> String {
    format!("t{number:07}_abcdefgh")
}

/// A norm and two matrices: the smallest child that is a layer on its own.
fn block(prefix: impl Fn(usize) -> String) -> impl Iterator<Item = (String, &'static [u64])> {
    const PARTS: [(&str, &[u64]); 3] =
        [("norm.weight", VECTOR), ("up.weight", MATRIX), ("down.weight", MATRIX)];
    (0..tensors()).map(move |number| {
        let (suffix, shape) = PARTS[number % 3];
        (format!("{}.{suffix}", prefix(number / 3)), shape)
    })
}

fn expert(number: usize) -> String {
    let (expert, part) = (number / 3, ["gate", "up", "down"][number % 3]);
    format!("model.layers.{}.mlp.experts.{}.{part}_proj.weight", expert / 384, expert % 384)
}

/// One checkpoint per way of having very many names.
/// Memory of other tests would be counted: it runs in a process of its own.
#[test]
fn the_terms_cover_what_is_held_at_the_highest() {
    if onelayer_testing::in_own_process(module_path!(), "the_terms_cover_what_is_held_at_the_highest") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let map = LayerMap::default();
    // What is made once and stays: buffers of the test's own output, the keys of the hash tables.
    write_file(&path, (0..1).map(|number| (flat(number), BYTE)));
    println!("warm {}", Checkpoint::open(&path).unwrap().tensor_count());

    let check_file = |what: &str, tensors: &mut dyn Iterator<Item = (String, &'static [u64])>| {
        write_file(&path, tensors);
        check(what, &path, &map);
    };
    check_file("flat", &mut names(flat));
    check_file("long names", &mut names(|number| format!("t{number:07}{}", "x".repeat(300))));
    check_file("zero-size", &mut names(flat).map(|(name, _)| (name, NOTHING)));
    let shapes: [&[u64]; 2] = [&[1, 1, 1, 1, 1, 1, 1, 1], &[1, 1, 1, 1, 1, 1, 1, 2]];
    check_file("many dimensions", &mut (0..tensors()).map(|number| (flat(number), shapes[number % 2])));
    check_file("lists of one tensor", &mut names(|number| format!("a{number}.layers.0.w")));
    check_file("stacks of one layer", &mut block(|number| format!("a{number}.layers.0")));
    check_file("one long stack", &mut block(|number| format!("layers.{number}")));
    check_file("stacks of parts", &mut block(|number| format!("h.{}.experts.{}", number / 4, number % 4)));
    check_file("experts", &mut names(expert));
    check_file(
        "one layer of experts",
        &mut names(|number| {
            format!(
                "h.{}.experts.{}.{}.weight",
                number / 90_000,
                number / 3,
                ["up", "gate", "down"][number % 3]
            )
        }),
    );
    check_file(
        "companions",
        &mut names(|number| format!("{}{}", expert(number / 2), ["", "_scale_inv"][number % 2])),
    );
    check_file("four lists each", &mut names(|number| format!("{number}.{number}.{number}.{number}.w")));
    check_file("no two alike", &mut names(|number| format!("h.{}.m{number}.w", number / 4)));

    // Not in order, so that they have to be sorted.
    let words = |last: &str| {
        let keys = (0..tensors()).map(|number| format!(r#""k{}":"","#, number * 7919 % tensors()));
        keys.collect::<String>() + last
    };
    write_words(&path, "", &words(r#""z":"""#));
    check("free text", &path, &map);
    write_words(&path, &words(""), "");
    check("unknown fields", &path, &map);

    write_file(&path, names(flat));
    let order = format!("order = [\"{}\"]\n[groups]\nmine = [\"{}\"]", flat(77), flat(78));
    check("order of an override", &path, &LayerMap::parse(&order).unwrap());
    std::fs::remove_file(&path).unwrap();

    let shards = folder.path().join("shards");
    write_shards(&shards, 500);
    check("many shards", &shards, &map);
    let index = shards.join("model.safetensors.index.json");
    let text = std::fs::read_to_string(&index).unwrap();
    std::fs::write(&index, text.replacen('{', &format!("{{{}", words("").replace(r#":"""#, ":1")), 1))
        .unwrap();
    check("a talkative index", &shards, &map);
    let pipeline = folder.path().join("pipeline");
    let components = ["transformer", "text_encoder", "vae"];
    std::fs::create_dir(&pipeline).unwrap();
    let entries = components.map(|name| format!(r#""{name}":["diffusers","Model"]"#)).join(",");
    std::fs::write(pipeline.join("model_index.json"), format!("{{{entries}}}")).unwrap();
    for (component, name) in components.into_iter().enumerate() {
        std::fs::create_dir(pipeline.join(name)).unwrap();
        let tensors = block(|number| format!("blocks.{number}")).skip(component).step_by(components.len());
        write_file(&pipeline.join(name).join("diffusion_pytorch_model.safetensors"), tensors);
    }
    check("pipeline", &pipeline, &map);
}

/// Writes one tensor of one byte, with these fields before its own and this `__metadata__`: lists
/// of keys and values as JSON spells them.
fn write_words(path: &Path, fields: &str, metadata: &str) {
    let tensor = r#""dtype":"U8","shape":[1],"data_offsets":[0,1]"#;
    let header = format!(r#"{{"__metadata__":{{{metadata}}},"layers.0.w":{{{fields}{tensor}}}}}"#);
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.push(7);
    std::fs::write(path, file).unwrap();
}

/// A set of files with an index.
fn write_shards(folder: &Path, count: usize) {
    std::fs::create_dir(folder).unwrap();
    let mut index = String::from(r#"{"weight_map":{"#);
    for shard in 0..count {
        let file = format!("model-{:05}-of-{count:05}.safetensors", shard + 1);
        let range = shard * tensors() / count..(shard + 1) * tensors() / count;
        write_file(&folder.join(&file), range.clone().map(|number| (expert(number), BYTE)));
        for number in range {
            let comma = if number == 0 { "" } else { "," };
            write!(index, r#"{comma}"{}":"{file}""#, expert(number)).unwrap();
        }
    }
    std::fs::write(folder.join("model.safetensors.index.json"), index + "}}").unwrap();
}
