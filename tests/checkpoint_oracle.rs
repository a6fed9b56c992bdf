//! Our verdict on random headers against the reference's, the safetensors crate.
//!
//! Headers are generated as structures (names, dtypes, shapes, contiguous offsets), then mutated as
//! structures and as text: byte flips alone never get past the offsets. Both must accept and describe the same
//! tensors, or both must refuse. Every difference falls in one of the named classes below, each with its
//! reason, or the test fails.
//!
//! `ONELAYER_ORACLE_CASES` sets the number of cases.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests too")]

#[path = "common/safetensors_file.rs"]
mod safetensors_file;

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Mutex;

use onelayer::checkpoint::{Checkpoint, CheckpointError, Place};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use safetensors::SafeTensors;
use safetensors_file::{announced, quoted};

const CASES: u32 = 20_000;

/// Why the two differ, where they may. Ours is the stricter one in all but the last two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Class {
    /// A key twice in one object: the reference keeps the last, so two readers could see two files in one.
    Duplicate,
    /// Its derived reader also takes an array for a tensor's object and a tagged value for a dtype; the format
    /// names neither.
    DerivedForm,
    /// `"__metadata__": null`: the format asks for a map.
    NullMetadata,
    /// A shape with a zero and an overflow: the reference's verdict depends on which comes first.
    OverflowBesideZero,
    /// Its sum of header and data wraps: a panic with overflow checks, another error without. Both refuse.
    ReferencePanics,
    /// A number beyond f64 in a field that nobody reads: it is parsed there, and only read over here.
    UnreadNumber,
}

#[derive(Clone, Debug)]
struct Tensor {
    name: String,
    dtype: String,
    shape: Vec<String>,
    start: String,
    end: String,
    extra: Option<(String, String)>,
}

#[derive(Clone, Debug)]
enum Mutation {
    /// One text of one tensor becomes another.
    Dim(usize, usize, String),
    Start(usize, String),
    End(usize, String),
    DType(usize, String),
    Name(usize, String),
    Extra(usize, String, String),
    /// Two tensors change places in the text.
    Swap(usize, usize),
    Repeat(usize),
    Drop(usize),
    /// A tensor's value becomes another text.
    Value(usize, String),
    Metadata(String),
    Data(i8),
    Announce(i8),
    /// A byte of the text: overwritten, inserted, removed.
    Overwrite(usize, u8),
    Insert(usize, u8),
    Remove(usize),
}

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
    ]
}

/// Tensors that cover their data exactly, where the shape allows it.
fn tensors() -> impl Strategy<Value = Vec<Tensor>> {
    let shape =
        prop::collection::vec(prop_oneof![3 => Just(0_u64), 30 => 1..5_u64, 1 => Just((1 << 61) - 1)], 0..4);
    prop::collection::vec((name(), dtype(), shape), 0..6).prop_map(|tensors| {
        let mut start = 0_u128;
        let describe = |(name, dtype, shape): (String, String, Vec<u64>)| {
            let bits = dtype.parse::<onelayer::checkpoint::DType>().ok().and_then(|dtype| dtype.bits());
            let elements = shape.iter().fold(1, |product: u128, &dim| product.saturating_mul(dim.into()));
            let bytes = elements.saturating_mul(bits.unwrap_or(8).into()) / 8;
            let end = start.saturating_add(bytes);
            let shape = shape.iter().map(u64::to_string).collect();
            let (first, last) = (start.to_string(), end.to_string());
            start = end;
            Tensor { name, dtype, shape, start: first, end: last, extra: None }
        };
        tensors.into_iter().map(describe).collect()
    })
}

/// The bytes of a file: structure, then mutations of it, then text, then mutations of that.
fn file(mut tensors: Vec<Tensor>, mutations: &[Mutation]) -> Vec<u8> {
    let mut data_bytes: u64 = tensors.last().map_or(0, |last| last.end.parse().unwrap_or(0));
    let mut values: BTreeMap<usize, &str> = BTreeMap::new();
    let mut metadata = None;
    let mut announce = 0_i64;
    for mutation in mutations {
        let count = tensors.len();
        let pick = |at: &usize| at.checked_rem(count);
        match mutation {
            Mutation::Dim(at, dim, text) => {
                if let Some(shape) = pick(at).map(|at| &mut tensors[at].shape) {
                    match dim.checked_rem(shape.len() + 1) {
                        Some(dim) if dim < shape.len() => shape[dim].clone_from(text),
                        _ => shape.push(text.clone()),
                    }
                }
            }
            Mutation::Start(at, text) => {
                pick(at).into_iter().for_each(|at| tensors[at].start.clone_from(text))
            }
            Mutation::End(at, text) => pick(at).into_iter().for_each(|at| tensors[at].end.clone_from(text)),
            Mutation::DType(at, text) => {
                pick(at).into_iter().for_each(|at| tensors[at].dtype.clone_from(text))
            }
            Mutation::Name(at, text) => pick(at).into_iter().for_each(|at| tensors[at].name.clone_from(text)),
            Mutation::Extra(at, key, text) => {
                pick(at).into_iter().for_each(|at| tensors[at].extra = Some((key.clone(), text.clone())));
            }
            Mutation::Swap(left, right) => {
                if let (Some(left), Some(right)) = (pick(left), pick(right)) {
                    tensors.swap(left, right);
                }
            }
            Mutation::Repeat(at) => pick(at).into_iter().for_each(|at| tensors.push(tensors[at].clone())),
            Mutation::Drop(at) => pick(at).into_iter().for_each(|at| drop(tensors.remove(at))),
            Mutation::Value(at, text) => drop(pick(at).map(|at| values.insert(at, text))),
            Mutation::Metadata(text) => metadata = Some(text),
            Mutation::Data(by) => data_bytes = data_bytes.saturating_add_signed(i64::from(*by)),
            Mutation::Announce(by) => announce += i64::from(*by),
            Mutation::Overwrite(..) | Mutation::Insert(..) | Mutation::Remove(..) => {}
        }
    }
    let mut members: Vec<String> = metadata.iter().map(|text| format!(r#""__metadata__":{text}"#)).collect();
    for (at, tensor) in tensors.iter().enumerate() {
        let value = values.get(&at).map_or_else(|| object(tensor), |&text| text.to_owned());
        members.push(format!("{}:{value}", quoted(&tensor.name)));
    }
    let mut text = format!("{{{}}}", members.join(",")).into_bytes();
    for mutation in mutations {
        match mutation {
            Mutation::Overwrite(at, byte) => {
                let at = at % text.len();
                text[at] = *byte;
            }
            Mutation::Insert(at, byte) => text.insert(at % (text.len() + 1), *byte),
            Mutation::Remove(at) if text.len() > 1 => drop(text.remove(at % text.len())),
            _ => {}
        }
    }
    let length = u64::try_from(text.len()).unwrap();
    announced(
        length.saturating_add_signed(announce),
        &text,
        usize::try_from(data_bytes).unwrap_or(0).min(1 << 16),
    )
}

fn object(tensor: &Tensor) -> String {
    let extra =
        tensor.extra.iter().map(|(key, value)| format!(",{}:{value}", quoted(key))).collect::<String>();
    format!(
        r#"{{"dtype":{},"shape":[{}],"data_offsets":[{},{}]{extra}}}"#,
        quoted(&tensor.dtype),
        tensor.shape.join(","),
        tensor.start,
        tensor.end
    )
}

/// What both sides are compared by.
type Described = (BTreeMap<String, (String, Vec<u64>, u64, u64)>, BTreeMap<String, String>);

fn ours(path: &Path, header_end: u64) -> Result<Described, CheckpointError> {
    let checkpoint = Checkpoint::open(path)?;
    let tensors = checkpoint
        .tensors()
        .map(|tensor| {
            let (start, end) = (tensor.extent.start() - header_end, tensor.extent.end() - header_end);
            (tensor.name.to_owned(), (tensor.dtype_name.to_owned(), tensor.shape.to_vec(), start, end))
        })
        .collect();
    let metadata = &checkpoint.shards()[0].metadata;
    Ok((tensors, metadata.iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect()))
}

enum Reference {
    Accepts(u64, Described),
    Refuses(String),
    Panics,
}

fn reference(bytes: &[u8]) -> Reference {
    let long = |value: usize| u64::try_from(value).unwrap();
    match catch_unwind(AssertUnwindSafe(|| SafeTensors::read_metadata(bytes))) {
        Err(_) => Reference::Panics,
        Ok(Err(error)) => Reference::Refuses(error.to_string()),
        Ok(Ok((header_bytes, metadata))) => {
            let tensors = metadata
                .tensors()
                .into_iter()
                .map(|(name, info)| {
                    let shape = info.shape.iter().map(|&dim| long(dim)).collect();
                    let (start, end) = info.data_offsets;
                    (name, (info.dtype.to_string(), shape, long(start), long(end)))
                })
                .collect();
            let texts = metadata.metadata().clone().unwrap_or_default().into_iter().collect();
            Reference::Accepts(long(header_bytes) + 8, (tensors, texts))
        }
    }
}

/// True if a tensor stands twice in the header. Serde hands the members over one by one, before any map
/// could merge them.
fn repeats_a_name(bytes: &[u8], header_end: u64) -> bool {
    struct Names(bool);
    impl<'de> serde::de::Visitor<'de> for Names {
        type Value = bool;
        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("an object")
        }
        fn visit_map<A: serde::de::MapAccess<'de>>(mut self, mut map: A) -> Result<bool, A::Error> {
            let mut seen = std::collections::BTreeSet::new();
            while let Some((name, _)) = map.next_entry::<String, serde::de::IgnoredAny>()? {
                self.0 |= !seen.insert(name);
            }
            Ok(self.0)
        }
    }
    let header = &bytes[8..usize::try_from(header_end).unwrap()];
    serde::Deserializer::deserialize_map(&mut serde_json::Deserializer::from_slice(header), Names(false))
        .unwrap()
}

/// The class of a file that only the reference accepts.
fn stricter(error: &CheckpointError, repeats_a_name: bool) -> Option<Class> {
    match error {
        // Of two tensors of one name the reference forgets the first before it checks sizes and offsets.
        CheckpointError::SizeMismatch { .. }
        | CheckpointError::SizeOverflow { .. }
        | CheckpointError::PartialByte { .. }
        | CheckpointError::ReversedOffsets { .. }
            if repeats_a_name =>
        {
            Some(Class::Duplicate)
        }
        CheckpointError::DuplicateKey { .. } => Some(Class::Duplicate),
        CheckpointError::Syntax { expected, found, .. }
            if *expected == "an object with dtype, shape and data_offsets" && found == "`[`" =>
        {
            Some(Class::DerivedForm)
        }
        CheckpointError::Syntax { expected: "the name of a dtype", found, .. } if found == "`{`" => {
            Some(Class::DerivedForm)
        }
        CheckpointError::Syntax { place: Place::Metadata, expected: "an object of texts", found, .. }
            if found == "`n`" =>
        {
            Some(Class::NullMetadata)
        }
        CheckpointError::SizeOverflow { shape, .. }
            if shape.split([' ', '[', ']', ',']).any(|dim| dim == "0") =>
        {
            Some(Class::OverflowBesideZero)
        }
        _ => None,
    }
}

/// Compares the verdicts; `Ok` holds whether the file is good, and the class of a difference.
fn compare(path: &Path, bytes: &[u8]) -> Result<(bool, Option<Class>), String> {
    let expected = reference(bytes);
    let header_end = match &expected {
        Reference::Accepts(header_end, _) => *header_end,
        _ => 0,
    };
    match (ours(path, header_end), expected) {
        (Ok(ours), Reference::Accepts(_, reference)) if ours == reference => Ok((true, None)),
        (Ok(ours), Reference::Accepts(_, reference)) => {
            Err(format!("read differently: {ours:?}, {reference:?}"))
        }
        (Err(_), Reference::Refuses(_)) => Ok((false, None)),
        (Err(_), Reference::Panics) => Ok((false, Some(Class::ReferencePanics))),
        (Err(error), Reference::Accepts(..)) => match stricter(&error, repeats_a_name(bytes, header_end)) {
            Some(class) => Ok((false, Some(class))),
            None => Err(format!("only we refuse: {error}")),
        },
        (Ok(_), Reference::Refuses(reason)) if reason.contains("number out of range") => {
            Ok((true, Some(Class::UnreadNumber)))
        }
        (Ok(_), Reference::Refuses(reason)) => Err(format!("only the reference refuses: {reason}")),
        (Ok(_), Reference::Panics) => Err("only the reference refuses, with a panic".to_owned()),
    }
}

#[test]
fn every_difference_from_the_reference_is_explained() {
    let cases =
        std::env::var("ONELAYER_ORACLE_CASES").map_or(CASES, |text| text.parse().expect("a number of cases"));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file.safetensors");
    // Overwritten in place: some file systems flush a file that is truncated and written anew.
    let target = std::fs::File::create(&path).unwrap();
    let tally: Mutex<(u64, u64, BTreeMap<Class, u64>)> = Mutex::default();
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    // The reference's panics are a class of their own; their messages would drown everything else.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let outcome = TestRunner::new(config).run(
        &(tensors(), prop::collection::vec(mutation(), 0..4)),
        |(tensors, mutations)| {
            let bytes = file(tensors, &mutations);
            target.write_all_at(&bytes, 0).unwrap();
            target.set_len(bytes.len().try_into().unwrap()).unwrap();
            let (good, class) = compare(&path, &bytes).map_err(|difference| {
                TestCaseError::fail(format!("{difference}\n{}", bytes.escape_ascii()))
            })?;
            let mut tally = tally.lock().unwrap();
            tally.0 += u64::from(good);
            tally.1 += u64::from(!good);
            if let Some(class) = class {
                *tally.2.entry(class).or_default() += 1;
            }
            Ok(())
        },
    );
    std::panic::set_hook(hook);
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
        assert_eq!(compare(&path, &bytes).map(|(_, class)| class), Ok(Some(class)), "{header}");
    }
}
