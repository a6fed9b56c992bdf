//! Headers as structures, for whoever makes random ones: tensors, and changes of them.
//!
//! Byte flips alone never get past the offsets. So a structure is right to begin with, then some of
//! it is changed, then its text is.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::collections::BTreeMap;

use onelayer::checkpoint::DType;
use onelayer_testing::safetensors_file::{announced, quoted};

/// What the reader has of a header's text at a time, in bytes.
const READER_BYTES: usize = 1 << 16;
/// Bytes of data behind a header, at most.
const DATA_BYTES_MAX: usize = 1 << 16;

/// A tensor as texts, so that anything may stand where a number belongs.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) dtype: String,
    pub(crate) shape: Vec<String>,
    pub(crate) start: String,
    pub(crate) end: String,
    pub(crate) extra: Option<(String, String)>,
}

/// A change of a structure, or of its text.
#[derive(Clone, Debug)]
pub(crate) enum Mutation {
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
    /// Spaces behind the first brace, so many that what the reader has at a time ends with this
    /// byte of the text.
    Edge(usize),
}

/// Tensors (name, dtype, shape) that cover their data exactly, where the shape allows it.
pub(crate) fn contiguous(tensors: Vec<(String, String, Vec<u64>)>) -> Vec<Tensor> {
    let mut start = 0_u128;
    let describe = |(name, dtype, shape): (String, String, Vec<u64>)| {
        let bits = dtype.parse::<DType>().ok().and_then(|dtype| dtype.bits());
        let elements = shape.iter().fold(1, |product: u128, &dim| product.saturating_mul(dim.into()));
        let bytes = elements.saturating_mul(bits.unwrap_or(8).into()) / 8;
        let end = start.saturating_add(bytes);
        let shape = shape.iter().map(u64::to_string).collect();
        let (first, last) = (start.to_string(), end.to_string());
        start = end;
        Tensor { name, dtype, shape, start: first, end: last, extra: None }
    };
    tensors.into_iter().map(describe).collect()
}

/// The bytes of a file: structure, then mutations of it, then text, then mutations of that.
pub(crate) fn file(mut tensors: Vec<Tensor>, mutations: &[Mutation]) -> Vec<u8> {
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
            Mutation::Overwrite(..) | Mutation::Insert(..) | Mutation::Remove(..) | Mutation::Edge(_) => {}
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
            Mutation::Edge(at) if text.first() == Some(&b'{') && text.len() < READER_BYTES => {
                let spaces = READER_BYTES - 1 - at % text.len();
                text.splice(1..1, std::iter::repeat_n(b' ', spaces));
            }
            _ => {}
        }
    }
    let length = u64::try_from(text.len()).unwrap();
    announced(
        length.saturating_add_signed(announce),
        &text,
        usize::try_from(data_bytes).unwrap_or(0).min(DATA_BYTES_MAX),
    )
}

/// The value of a tensor.
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
