//! The names of Hugging Face models for the tensors of a GGUF file, and the order of their rows.
//!
//! `names.txt` has a section for each group of architectures: the name in the file, the name in
//! transformers, and how llama.cpp's converter orders rows, if it changes that. `make_names.py`
//! writes it. Reordered rows become strides, and transposed weights too. Architectures whose values
//! the converter changes are refused.

use super::super::format::Input;
use super::super::metadata::FileMetadata;
use super::super::{CheckpointError, DType};

const TABLE: &str = include_str!("names.txt");

/// Architectures whose values differ from those of their models, and how.
const CHANGED: [(&str, &str); 6] = [
    ("gemma", "whose norm weights are stored plus 1, rounded"),
    ("gemma2", "whose norm weights are stored plus 1, rounded"),
    ("gemma3", "whose norm weights are stored plus 1, rounded"),
    ("nemotron", "whose norm weights are stored plus 1, rounded"),
    ("falcon", "whose rows of queries, keys and values are sorted apart"),
    ("mamba", "whose A_log is stored as -exp(A_log), rounded"),
];

/// Tensors that llama.cpp computes from the model's configuration.
const COMPUTED: [&str; 3] = ["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"];

const ADVICE: &str = "keep the names of the file: leave out --names hf";

/// The names of one architecture.
pub(super) struct Names {
    /// Its section of the table.
    lines: &'static str,
    arch: String,
    heads: Option<u64>,
    kv_heads: Option<u64>,
    /// The key of `kv_heads`.
    kv_heads_key: &'static str,
}

/// A tensor as its model has it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Renamed {
    pub(super) name: String,
    pub(super) shape: Vec<u64>,
    /// The dimensions that `strides` belong to.
    pub(super) dims: Vec<u64>,
    /// Empty if row-major.
    pub(super) strides: Vec<u64>,
}

/// How the rows of a tensor lie in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// In each head, the rows of the first half alternate with those of the second.
    Heads,
    /// The same for heads of keys.
    KvHeads,
    /// All queries, then all keys, then all values; the model has them head by head.
    Qkv,
    /// Weights are transposed.
    Turned,
}

impl Order {
    fn of(word: &str) -> Self {
        match word {
            "heads" => Self::Heads,
            "kv_heads" => Self::KvHeads,
            "qkv" => Self::Qkv,
            "turned" => Self::Turned,
            other => unreachable!("an order called {other} in names.txt"),
        }
    }
}

impl Names {
    /// The names for a file with these keys.
    pub(super) fn of(input: &Input<'_>, keys: &FileMetadata) -> Result<Self, CheckpointError> {
        let refuse = |found| Err(input.refused("", found, ADVICE));
        let Some(arch) = keys.get("general.architecture") else {
            return refuse("no general.architecture among its keys, which decides the names".to_owned());
        };
        if let Some((_, how)) = CHANGED.iter().find(|(changed, _)| *changed == arch) {
            return refuse(format!("architecture {arch}, {how}"));
        }
        let Some(lines) = section(arch) else {
            let arch = arch.escape_debug();
            return refuse(format!("architecture {arch}, for which no Hugging Face names are known"));
        };
        let number = |key: &str| keys.get(&format!("{arch}.attention.{key}"))?.parse::<u64>().ok();
        let heads = number("head_count").filter(|&heads| heads > 0);
        let (kv_heads, kv_heads_key) = match keys.get(&format!("{arch}.attention.head_count_kv")) {
            Some(_) => (number("head_count_kv").filter(|&heads| heads > 0), "head_count_kv"),
            None => (heads, "head_count"),
        };
        Ok(Self { lines, arch: arch.to_owned(), heads, kv_heads, kv_heads_key })
    }

    /// A tensor as its model has it; `None` if no model has it.
    pub(super) fn rename(
        &self,
        input: &Input<'_>,
        name: &str,
        dtype: DType,
        shape: &[u64],
    ) -> Result<Option<Renamed>, CheckpointError> {
        if COMPUTED.contains(&name) {
            return Ok(None);
        }
        let Some((new_name, order)) = self.find(name) else {
            let found =
                format!("a tensor that models of architecture {} do not have by this name", self.arch);
            return Err(input.refused(name, found, ADVICE));
        };
        let mut renamed =
            Renamed { name: new_name, shape: shape.to_vec(), dims: Vec::new(), strides: Vec::new() };
        match order {
            None => {}
            Some(Order::Turned) => {
                if let &[rows, columns] = shape {
                    if matches!(dtype, DType::Block(_)) {
                        let found = format!("{dtype}, whose blocks lie across the rows of the model");
                        return Err(input.refused(name, found, ADVICE));
                    }
                    renamed.shape = vec![columns, rows];
                    (renamed.dims, renamed.strides) = (renamed.shape.clone(), vec![1, columns]);
                }
            }
            Some(order) => {
                let (heads, key) = match order {
                    Order::KvHeads => (self.kv_heads, self.kv_heads_key),
                    _ => (self.heads, "head_count"),
                };
                let Some(heads) = heads else {
                    let found = format!("no number of heads: {}.attention.{key}", self.arch);
                    return Err(input.refused(name, found, ADVICE));
                };
                let Some((dims, strides)) = by_heads(order, heads, shape) else {
                    let found = format!("rows that {heads} heads cannot share, of shape {shape:?}");
                    return Err(input.refused(name, found, ADVICE));
                };
                (renamed.dims, renamed.strides) = (dims, strides);
            }
        }
        Ok(Some(renamed))
    }

    /// The name in the model, and the order of the rows.
    fn find(&self, name: &str) -> Option<(String, Option<Order>)> {
        let (base, suffix) =
            name.rsplit_once('.').filter(|(_, suffix)| matches!(*suffix, "weight" | "bias"))?;
        let block = base.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
        let block = block.filter(|(number, _)| number.bytes().all(|byte| byte.is_ascii_digit()));
        let is_it = |known: &str| match (known.strip_prefix("blk.{n}."), block) {
            (Some(known), Some((number, rest))) => !number.is_empty() && known == rest,
            (None, None) => known == base,
            _ => false,
        };
        let mut lines = self.lines.lines().map(|line| line.split(' '));
        let mut words =
            lines.find_map(|mut words| words.next().filter(|known| is_it(known)).map(|_| words))?;
        let new_base = words.next().expect("each line of names.txt has two names");
        let new_base = block.map_or(new_base.to_owned(), |(number, _)| new_base.replace("{n}", number));
        Some((format!("{new_base}.{suffix}"), words.next().map(Order::of)))
    }
}

/// The lines of an architecture in the table.
fn section(arch: &str) -> Option<&'static str> {
    TABLE.split("\n[").skip(1).find_map(|section| {
        let (archs, lines) = section.split_once("]\n").expect("a section of names.txt begins with a list");
        archs.split(' ').any(|known| known == arch).then_some(lines.trim_end())
    })
}

/// The dimensions of the model's rows, and their strides in the file; `None` if the shape does not
/// fit the number of heads.
fn by_heads(order: Order, heads: u64, shape: &[u64]) -> Option<(Vec<u64>, Vec<u64>)> {
    let (rows, columns) = match *shape {
        [rows] => (rows, 1),
        [rows, columns] => (rows, columns),
        _ => return None,
    };
    let parts = if order == Order::Qkv { 3 } else { 2 };
    let part = rows.checked_div(heads.checked_mul(parts)?)?;
    // The product is at most `rows`.
    if part == 0 || part * heads * parts != rows {
        return None;
    }
    let row = columns;
    let mut strides = match order {
        Order::Qkv => vec![part.checked_mul(row)?, (rows / parts).checked_mul(row)?, row],
        _ => vec![(2 * part).checked_mul(row)?, row, 2_u64.checked_mul(row)?],
    };
    let mut dims = vec![heads, parts, part];
    if shape.len() == 2 {
        dims.push(columns);
        strides.push(1);
    }
    Some((dims, strides))
}
