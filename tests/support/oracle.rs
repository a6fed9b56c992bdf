//! Our verdict on a file against the reference's, the safetensors crate.
//!
//! Both must accept and describe the same tensors, or both must refuse. Every difference falls in
//! one of the named classes below, each with its reason, or it is a fault. Used by whoever makes
//! files: at random, or led by coverage.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]
#![allow(dead_code, reason = "each user uses its own part")]

use std::cell::Cell;
use std::collections::BTreeMap;
use std::panic::{self, AssertUnwindSafe};
use std::path::Path;
use std::sync::Once;

use onelayer::checkpoint::{Checkpoint, CheckpointError, JsonSection};
use safetensors::SafeTensors;

/// Why the two differ, where they may. Ours is the stricter one in all but the last two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Class {
    /// A key twice in one object: the reference keeps the last, so two readers could see two files
    /// in one.
    Duplicate,
    /// Its derived reader also takes an array for a tensor's object and a tagged value for a dtype;
    /// the format names neither.
    DerivedForm,
    /// `"__metadata__": null`: the format asks for a map.
    NullMetadata,
    /// A shape with a zero and an overflow: the reference's verdict depends on which comes first.
    OverflowBesideZero,
    /// Its sum of header and data wraps: a panic with overflow checks, another error without. Both
    /// refuse.
    ReferencePanics,
    /// A number beyond f64 in a field that nobody reads: it is parsed there, and only read over
    /// here.
    UnreadNumber,
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

/// The reference's verdict.
pub(crate) enum Reference {
    Accepts(u64, Described),
    Refuses(String),
    Panics,
}

pub(crate) fn reference(bytes: &[u8]) -> Reference {
    let long = |value: usize| u64::try_from(value).unwrap();
    match quietly(|| SafeTensors::read_metadata(bytes)) {
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

/// Runs something that may panic without a message, and without whatever else a panic would bring
/// about here: a fuzzer ends the process.
fn quietly<T>(run: impl FnOnce() -> T) -> std::thread::Result<T> {
    static SILENCE: Once = Once::new();
    thread_local!(static IS_QUIET: Cell<bool> = const { Cell::new(false) });
    SILENCE.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !IS_QUIET.get() {
                before(info);
            }
        }));
    });
    IS_QUIET.set(true);
    let outcome = panic::catch_unwind(AssertUnwindSafe(run));
    IS_QUIET.set(false);
    outcome
}

/// True if a tensor stands twice in the header. Serde hands the members over one by one, before any
/// map could merge them.
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

/// The class of a file that only the reference accepts, as `accepted` describes it.
fn stricter(error: &CheckpointError, repeats_a_name: bool, accepted: &Described) -> Option<Class> {
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
        CheckpointError::Syntax {
            section: JsonSection::Metadata,
            expected: "an object of texts",
            found,
            ..
        } if found == "`n`" => Some(Class::NullMetadata),
        // The message shows the first of very many dimensions alone, and of a long name not all.
        CheckpointError::SizeOverflow { tensor, shape, .. }
            if shape.split([' ', '[', ']', ',']).any(|dim| dim == "0")
                || accepted.0.get(tensor).is_some_and(|(_, shape, ..)| shape.contains(&0)) =>
        {
            Some(Class::OverflowBesideZero)
        }
        _ => None,
    }
}

/// What came of a file on which both agree, or differ as they may.
#[derive(Debug)]
pub(crate) struct Verdict {
    /// Why we refuse it, if we do.
    pub(crate) refusal: Option<CheckpointError>,
    /// Why the reference says otherwise, if it does.
    pub(crate) difference: Option<Class>,
}

/// Compares the verdicts on the file at `path`, which consists of `bytes`.
///
/// # Errors
/// A difference that nothing explains.
pub(crate) fn compare(path: &Path, bytes: &[u8]) -> Result<Verdict, String> {
    let expected = reference(bytes);
    let header_end = match &expected {
        Reference::Accepts(header_end, _) => *header_end,
        _ => 0,
    };
    let accepted = |difference| Ok(Verdict { refusal: None, difference });
    let refused = |error, difference| Ok(Verdict { refusal: Some(error), difference });
    match (ours(path, header_end), expected) {
        (Ok(ours), Reference::Accepts(_, reference)) if ours == reference => accepted(None),
        (Ok(ours), Reference::Accepts(_, reference)) => {
            Err(format!("read differently: {ours:?}, {reference:?}"))
        }
        (Err(error), Reference::Refuses(_)) => refused(error, None),
        (Err(error), Reference::Panics) => refused(error, Some(Class::ReferencePanics)),
        (Err(error), Reference::Accepts(_, accepted)) => {
            match stricter(&error, repeats_a_name(bytes, header_end), &accepted) {
                Some(class) => refused(error, Some(class)),
                None => Err(format!("only we refuse: {error}")),
            }
        }
        (Ok(_), Reference::Refuses(reason)) if reason.contains("number out of range") => {
            accepted(Some(Class::UnreadNumber))
        }
        (Ok(_), Reference::Refuses(reason)) => Err(format!("only the reference refuses: {reason}")),
        (Ok(_), Reference::Panics) => Err("only the reference refuses, with a panic".to_owned()),
    }
}
