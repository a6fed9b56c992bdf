//! A structured header with contiguous offsets and a few mutations, with the same oracle as for any
//! bytes.

use arbitrary::{Result, Unstructured};
use onelayer::DType;

use super::header::check_file;
use super::header_structure::{Mutation, Tensor, contiguous, file};

/// Strings in place of an integer.
const INTEGERS: [&str; 15] = [
    "0",
    "1",
    "8",
    "-0",
    "-1",
    "1.0",
    "1e1",
    "2305843009213693951",
    "18446744073709551615",
    "18446744073709551616",
    "00",
    "null",
    "\"1\"",
    "[]",
    "1e999",
];
/// JSON values.
const VALUES: [&str; 16] = [
    r#"["U8",[0],[0,0]]"#,
    r#"{"dtype":{"U8":null},"shape":[0],"data_offsets":[0,0]}"#,
    r#"{"dtype":"U8","shape":[0]}"#,
    r#"{"dtype":"U8","shape":[0],"data_offsets":[0,0],"shape":[0]}"#,
    r#"{"dtype":"U8","shape":[0],"data_offsets":[0,0,0]}"#,
    r#"{"data_offsets":[0,0],"shape":[0],"dtype":"U8"}"#,
    "{}",
    "null",
    "true",
    r#"{"format":"pt"}"#,
    r#"{"a":"1","a":"2"}"#,
    r#"{"a":"1","b":"\ud83d\ude00"}"#,
    r#""\ud800""#,
    "-1.5E+3",
    "[[[[]]]]",
    r#"{"a":{"b":[1,{"c":null}]}}"#,
];
/// Bytes with a meaning in JSON, and some that are invalid.
const MARKS: &[u8] = b" \t\n\"\\{}[],:0-.e\0\xef\xff\x01";

/// Checks one input.
pub fn check(data: &[u8]) {
    let mut choices = Unstructured::new(data);
    // When the choices run out, the rest is zeros.
    if let Ok((tensors, mutations)) = structure(&mut choices) {
        check_file(&file(tensors, &mutations));
    }
}

fn structure(choices: &mut Unstructured<'_>) -> Result<(Vec<Tensor>, Vec<Mutation>)> {
    let tensors = (0..choices.int_in_range(0..=6_u8)?).map(|_| tensor(choices)).collect::<Result<_>>()?;
    let mutations = (0..choices.int_in_range(0..=4_u8)?).map(|_| mutation(choices)).collect::<Result<_>>()?;
    Ok((contiguous(tensors), mutations))
}

fn tensor(choices: &mut Unstructured<'_>) -> Result<(String, String, Vec<u64>)> {
    let dim = |choices: &mut Unstructured<'_>| {
        Ok(match choices.int_in_range(0..=16_u8)? {
            15 => (1 << 61) - 1,
            14 => 1 << choices.int_in_range(0..=63_u8)?,
            few => u64::from(few),
        })
    };
    let shape = (0..choices.int_in_range(0..=4_u8)?).map(|_| dim(choices)).collect::<Result<_>>()?;
    Ok((name(choices)?, dtype(choices)?, shape))
}

fn name(choices: &mut Unstructured<'_>) -> Result<String> {
    const NAMES: [&str; 8] = ["a", "b", "c", "d", "", "__metadata__", "model.layers.0.w", "model.layers.1.w"];
    Ok(match choices.int_in_range(0..=8_usize)? {
        8 => text(choices)?,
        known => NAMES[known].to_owned(),
    })
}

/// Any short text.
fn text(choices: &mut Unstructured<'_>) -> Result<String> {
    let len = choices.int_in_range(0..=12_usize)?;
    Ok(String::from_utf8_lossy(choices.bytes(len.min(choices.len()))?).into_owned())
}

fn dtype(choices: &mut Unstructured<'_>) -> Result<String> {
    let known = DType::ALL;
    let at = choices.int_in_range(0..=known.len())?;
    Ok(known.get(at).map_or("F7", |dtype| dtype.name()).to_owned())
}

fn integer(choices: &mut Unstructured<'_>) -> Result<String> {
    Ok(match choices.int_in_range(0..=3_u8)? {
        0 => choices.choose(&INTEGERS)?.to_string(),
        1 => choices.arbitrary::<u64>()?.to_string(),
        _ => choices.int_in_range(0..=40_u8)?.to_string(),
    })
}

fn value(choices: &mut Unstructured<'_>) -> Result<String> {
    Ok(match choices.int_in_range(0..=4_u8)? {
        0 => text(choices)?,
        1 => serde_json::to_string(&text(choices)?).expect("texts are JSON"),
        _ => choices.choose(&VALUES)?.to_string(),
    })
}

fn mutation(choices: &mut Unstructured<'_>) -> Result<Mutation> {
    let at = choices.int_in_range(0..=5_usize)?;
    Ok(match choices.int_in_range(0..=16_u8)? {
        0 => Mutation::Dim(at, choices.int_in_range(0..=5)?, integer(choices)?),
        1 => Mutation::Start(at, integer(choices)?),
        2 => Mutation::End(at, integer(choices)?),
        3 => Mutation::DType(at, dtype(choices)?),
        4 => Mutation::Name(at, name(choices)?),
        5 => {
            let key = choices.choose(&["a", "b", "dtype", "shape", "data_offsets", ""])?.to_string();
            Mutation::Extra(at, key, value(choices)?)
        }
        6 => Mutation::Swap(at, choices.int_in_range(0..=5)?),
        7 => Mutation::Repeat(at),
        8 => Mutation::Drop(at),
        9 => Mutation::Value(at, value(choices)?),
        10 => Mutation::Metadata(value(choices)?),
        11 => Mutation::Data(choices.int_in_range(-3..=3)?),
        12 => Mutation::Announce(choices.int_in_range(-3..=3)?),
        13 => Mutation::Overwrite(choices.int_in_range(0..=399)?, choices.arbitrary()?),
        14 => Mutation::Insert(choices.int_in_range(0..=399)?, *choices.choose(MARKS)?),
        15 => Mutation::Remove(choices.int_in_range(0..=399)?),
        _ => Mutation::Edge(choices.int_in_range(0..=399)?),
    })
}
