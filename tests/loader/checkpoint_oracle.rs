//! Our verdict on random headers against the reference's, the safetensors crate.
//!
//! Headers are generated as structures (names, dtypes, shapes, contiguous offsets), then mutated as
//! structures and as text: byte flips alone never get past the offsets. Both must accept and
//! describe the same tensors, or both must refuse. Every difference falls in one of the named
//! classes below, each with its reason, or the test fails.
//!
//! `ONELAYER_ORACLE_CASES` sets the number of cases.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests too")]

use onelayer_testing::safetensors_file;

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;

use crate::header_structure::{Mutation, Tensor, contiguous, file};
use crate::oracle::{Class, Reference, compare, reference};
use onelayer_testing::all_or;
use onelayer_testing::safetensors_file::quoted;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

fn name() -> impl Strategy<Value = String> {
    prop_oneof![
        6 => "[a-d]{1,2}",
        1 => Just(String::new()),
        1 => Just("__metadata__".to_owned()),
        1 => any::<String>(),
    ]
}

fn dtype() -> impl Strategy<Value = String> {
    let known = onelayer::checkpoint::DType::ALL.map(|dtype| dtype.name().to_owned());
    prop_oneof![12 => prop::sample::select(known.to_vec()), 1 => Just("F7".to_owned())]
}

/// Texts that may stand where an integer belongs.
fn integer() -> impl Strategy<Value = String> {
    prop_oneof![
        8 => (0..20_u64).prop_map(|value| value.to_string()),
        1 => any::<u64>().prop_map(|value| value.to_string()),
        1 => (0..64_u32, 0..3_u64).prop_map(|(shift, add)| (1_u64 << shift).wrapping_sub(1).wrapping_add(add).to_string()),
        1 => prop::sample::select(vec![
            "-0", "-1", "1.0", "1e1", "0.0", "18446744073709551615", "18446744073709551616", "00", "null", "\"1\"", "[]",
            "true", "1e999",
        ]).prop_map(str::to_owned),
    ]
}

fn json() -> impl Strategy<Value = String> {
    let leaf = prop_oneof![
        integer(),
        any::<String>().prop_map(|text| quoted(&text)),
        prop::sample::select(vec!["false", "\"\\ud800\"", "\"\\ud83d\\ude00\"", "nul", "1e-400", "-1.5E+3"])
            .prop_map(str::to_owned),
    ];
    leaf.prop_recursive(4, 12, 3, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..3).prop_map(|items| format!("[{}]", items.join(","))),
            prop::collection::vec(("[a-c]", inner), 0..3).prop_map(|items| {
                let items: Vec<String> =
                    items.iter().map(|(key, value)| format!("\"{key}\":{value}")).collect();
                format!("{{{}}}", items.join(","))
            }),
        ]
    })
}

/// Whole values in place of a tensor's object.
fn value() -> impl Strategy<Value = String> {
    prop_oneof![
        json(),
        Just(r#"["U8",[0],[0,0]]"#.to_owned()),
        Just(r#"{"dtype":{"U8":null},"shape":[0],"data_offsets":[0,0]}"#.to_owned()),
        Just(r#"{"dtype":"U8","shape":[0]}"#.to_owned()),
        Just(r#"{"dtype":"U8","shape":[0],"data_offsets":[0,0],"shape":[0]}"#.to_owned()),
        Just(r#"{"dtype":"U8","shape":[0],"data_offsets":[0,0,0]}"#.to_owned()),
    ]
}

fn metadata() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => Just(r#"{"format":"pt"}"#.to_owned()),
        1 => Just("{}".to_owned()),
        1 => Just("null".to_owned()),
        1 => Just(r#"{"a":"1","a":"2"}"#.to_owned()),
        1 => prop::collection::btree_map(any::<String>(), any::<String>(), 0..3)
            .prop_map(|map| serde_json::to_string(&map).unwrap()),
        2 => json(),
    ]
}

fn mutation() -> impl Strategy<Value = Mutation> {
    let at = 0..6_usize;
    prop_oneof![
        (at.clone(), at.clone(), integer()).prop_map(|(at, dim, text)| Mutation::Dim(at, dim, text)),
        (at.clone(), integer()).prop_map(|(at, text)| Mutation::Start(at, text)),
        (at.clone(), integer()).prop_map(|(at, text)| Mutation::End(at, text)),
        (at.clone(), dtype()).prop_map(|(at, text)| Mutation::DType(at, text)),
        (at.clone(), name()).prop_map(|(at, text)| Mutation::Name(at, text)),
        (at.clone(), "[a-c]|dtype|shape", json()).prop_map(|(at, key, text)| Mutation::Extra(at, key, text)),
        (at.clone(), at.clone()).prop_map(|(left, right)| Mutation::Swap(left, right)),
        at.clone().prop_map(Mutation::Repeat),
        at.clone().prop_map(Mutation::Drop),
        (at, value()).prop_map(|(at, text)| Mutation::Value(at, text)),
        metadata().prop_map(Mutation::Metadata),
        (-3..4_i8).prop_map(Mutation::Data),
        (-3..4_i8).prop_map(Mutation::Announce),
        (0..400_usize, any::<u8>()).prop_map(|(at, byte)| Mutation::Overwrite(at, byte)),
        (0..400_usize, prop::sample::select(b" \t\n\"\\{}[],:0-.e\0\xef\xff\x01".to_vec()))
            .prop_map(|(at, byte)| Mutation::Insert(at, byte)),
        (0..400_usize).prop_map(Mutation::Remove),
        (0..400_usize).prop_map(Mutation::Edge),
    ]
}

/// Tensors that cover their data exactly, where the shape allows it.
fn tensors() -> impl Strategy<Value = Vec<Tensor>> {
    let shape =
        prop::collection::vec(prop_oneof![3 => Just(0_u64), 30 => 1..5_u64, 1 => Just((1 << 61) - 1)], 0..4);
    // As many are of the kind of the one before as not: neighbours of one kind are read in another way.
    prop::collection::vec((name(), dtype(), shape, any::<bool>()), 0..6).prop_map(|mut tensors| {
        for at in 1..tensors.len() {
            if tensors[at].3 {
                let (_, dtype, shape, _) = tensors[at - 1].clone();
                (tensors[at].1, tensors[at].2) = (dtype, shape);
            }
        }
        contiguous(tensors.into_iter().map(|(name, dtype, shape, _)| (name, dtype, shape)).collect())
    })
}

#[test]
fn every_difference_from_the_reference_is_explained() {
    let cases = std::env::var("ONELAYER_ORACLE_CASES")
        .map_or(all_or(20_000, 4_000), |text| text.parse().expect("a number of cases"));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file.safetensors");
    // Overwritten in place: some file systems flush a file that is truncated and written anew.
    let target = std::fs::File::create(&path).unwrap();
    let tally: Mutex<(u64, u64, BTreeMap<Class, u64>)> = Mutex::default();
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let outcome = TestRunner::new(config).run(
        &(tensors(), prop::collection::vec(mutation(), 0..4)),
        |(tensors, mutations)| {
            let bytes = file(tensors, &mutations);
            target.write_all_at(&bytes, 0).unwrap();
            target.set_len(bytes.len().try_into().unwrap()).unwrap();
            let verdict = compare(&path, &bytes).map_err(|difference| {
                TestCaseError::fail(format!("{difference}\n{}", bytes.escape_ascii()))
            })?;
            let mut tally = tally.lock().unwrap();
            let good = verdict.refusal.is_none();
            tally.0 += u64::from(good);
            tally.1 += u64::from(!good);
            if let Some(class) = verdict.difference {
                *tally.2.entry(class).or_default() += 1;
            }
            Ok(())
        },
    );
    let (good, bad, classes) = tally.into_inner().unwrap();
    println!("{good} accepted, {bad} refused; differences: {classes:?}");
    outcome.unwrap_or_else(|failure| panic!("{failure}"));
    // A generator that made only one kind would prove nothing.
    let least = u64::from(cases) / 10;
    assert!(good >= least && bad >= least, "{good} accepted, {bad} refused");
}

#[test]
fn every_class_of_difference_is_real() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file.safetensors");
    let panics =
        r#"{"a":{"dtype":"U8","shape":[2305843009213693951],"data_offsets":[0,2305843009213693951]}"#;
    let mut chain = panics.to_owned();
    // Sizes below 2^61 each, offsets that go on to 2^64.
    for part in 1..8_u64 {
        let (start, end) = (part * 2_305_843_009_213_693_951, (part + 1) * 2_305_843_009_213_693_951);
        chain.push_str(&format!(
            r#","b{part}":{{"dtype":"U8","shape":[2305843009213693951],"data_offsets":[{start},{end}]}}"#
        ));
    }
    chain.push('}');
    for (class, header) in [
        (
            Class::Duplicate,
            r#"{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#,
        ),
        (Class::DerivedForm, r#"{"a":["U8",[0],[0,0]]}"#),
        (Class::DerivedForm, r#"{"a":{"dtype":{"U8":null},"shape":[0],"data_offsets":[0,0]}}"#),
        (Class::NullMetadata, r#"{"__metadata__":null}"#),
        (
            Class::OverflowBesideZero,
            r#"{"a":{"dtype":"U8","shape":[0,4294967296,4294967296],"data_offsets":[0,0]}}"#,
        ),
        (Class::ReferencePanics, &chain),
        (Class::UnreadNumber, r#"{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"x":1e999}}"#),
    ] {
        let bytes = safetensors_file::with_header(header, 0);
        std::fs::write(&path, &bytes).unwrap();
        if class == Class::ReferencePanics && !cfg!(debug_assertions) {
            // Without overflow checks the wrapped sum is merely another reason to refuse.
            assert!(matches!(reference(&bytes), Reference::Refuses(_)));
            continue;
        }
        assert_eq!(compare(&path, &bytes).unwrap().difference, Some(class), "{header}");
    }
}
