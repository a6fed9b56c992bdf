//! `--tp` and `--tp-rule`: the part of one rank, planned, loaded and compared; what the plan says
//! of it; what is refused.
#![allow(clippy::unwrap_used, clippy::as_conversions, reason = "a test that cannot go on panics")]

use std::collections::BTreeMap;

use crate::support::{assert_code, json, run, stderr, stdout};
use onelayer::{Checkpoint, Loader, Rank, Split, SplitRules, Target};
use onelayer_testing::fixture;

/// Hashes of a rank's parts, by name, as the library loads them.
fn expected(rank: Rank, rules: SplitRules) -> BTreeMap<String, String> {
    let checkpoint = Checkpoint::open(fixture("gpt2")).unwrap();
    let loader = Loader::builder(Target::Host).shard(rank, rules).build().unwrap();
    let model = loader.load(&checkpoint).unwrap();
    let tensors = model.layers().flat_map(|layer| layer.tensors().collect::<Vec<_>>());
    tensors.map(|tensor| (tensor.name().to_owned(), tensor.hash().unwrap().unwrap().to_hex())).collect()
}

#[test]
fn each_rank_loads_its_part() {
    let place = tempfile::tempdir().unwrap();
    let model = fixture("gpt2").display().to_string();
    let whole = json(&run(place.path(), &format!("plan {model} --device host --json")));
    assert!(whole["plan"]["rank"].is_null() && whole["plan"]["params"]["tp"].is_null());
    let mut tensor_bytes = 0;
    for number in 0..2 {
        let line = format!("{model} --tp {number}/2 --budget 8MiB --io direct");
        let output = run(place.path(), &format!("run {line} --device host --verify --json"));
        assert_code(&output, 0);
        let report = json(&output);
        assert_eq!(report["runs"][0]["params"]["tp"], format!("{number}/2"));
        assert_eq!(report["runs"][0]["verified"]["mismatches"], 0);
        let planned = &report["plan"]["rank"];
        assert_eq!((planned["rank"].as_u64(), planned["world"].as_u64()), (Some(number), Some(2)));
        assert_eq!(
            (planned["part_tensors"].as_u64(), planned["whole_tensors"].as_u64()),
            (Some(25), Some(27))
        );
        tensor_bytes += planned["wanted_bytes"].as_u64().unwrap();

        let output = run(place.path(), &format!("run {line} --device none --hash --json"));
        assert_code(&output, 0);
        let rank = Rank::new(u32::try_from(number).unwrap(), 2).unwrap();
        let found: BTreeMap<String, String> = json(&output)["hashes"]
            .as_array()
            .unwrap()
            .iter()
            .map(|hash| {
                (hash["name"].as_str().unwrap().to_owned(), hash["blake3"].as_str().unwrap().to_owned())
            })
            .collect();
        assert_eq!(found, expected(rank, SplitRules::common()));
    }
    let all = whole["plan"]["tensor_bytes"].as_u64().unwrap();
    assert!(tensor_bytes > all && tensor_bytes < 2 * all, "parts once, norms twice: {tensor_bytes} of {all}");
}

#[test]
fn a_plan_says_what_a_rank_wants_and_what_lies_between() {
    let place = tempfile::tempdir().unwrap();
    let model = fixture("gpt2").display().to_string();
    let text = stdout(&run(place.path(), &format!("plan {model} --tp 1/2 --device host -v")));
    assert!(text.contains(" · rank 1/2"), "{text}");
    assert!(text.contains("rank 1 of 2: 25 tensors in part, 27 whole; "), "{text}");
    assert!(text.contains(" of gaps (derived)"), "{text}");
}

#[test]
fn rules_come_before_the_table_and_the_first_one_counts() {
    let place = tempfile::tempdir().unwrap();
    let model = fixture("gpt2").display().to_string();
    let line = format!(
        "{model} --tp 1/2 --device none --hash --json --tp-rule wte=whole --tp-rule w.e=0 --tp-rule wpe=1"
    );
    let output = run(place.path(), &format!("run {line}"));
    assert_code(&output, 0);
    let rules = SplitRules::common()
        .with(|tensor| tensor.name.contains("wpe").then_some(Split::Even { axis: 0, blocks: 1 }))
        .with(|tensor| tensor.name.contains("wte").then_some(Split::Whole));
    let expected = expected(Rank::new(1, 2).unwrap(), rules);
    let report = json(&output);
    for hash in report["hashes"].as_array().unwrap() {
        let name = hash["name"].as_str().unwrap();
        assert_eq!(hash["blake3"].as_str().unwrap(), expected[name], "{name}");
    }
}

#[test]
fn what_cannot_be_divided_is_refused() {
    let place = tempfile::tempdir().unwrap();
    let model = fixture("gpt2").display().to_string();
    for (flags, code, said) in [
        ("--tp 2/2", 2, "write RANK/WORLD"),
        ("--tp 0/2 --tp-rule (=0", 2, "unclosed group"),
        ("--tp-rule wte=0", 2, "--tp"),
        ("--tp 0/3", 2, "which 3 ranks cannot divide evenly"),
        ("--tp 0/2 --tp-rule ln_f.bias=1", 2, "has 1 dimensions, a rule divides dimension 1"),
    ] {
        let output = run(place.path(), &format!("plan {model} --device host {flags}"));
        assert_code(&output, code);
        assert!(stderr(&output).contains(said), "{flags}: {}", stderr(&output));
    }
}
