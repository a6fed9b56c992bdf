//! Compares the tensors of a checkpoint with those of its source, by full name.
//!
//! A tensor is right if it has the type, shape and bytes of the source; or, if the manifest says
//! that it was cast, those of the cast. The manifest must list missing tensors as left out.

use super::super::hash_pass::{HashPass, PassEvent};
use super::super::read_file::OpenShard;
use super::{ConvertError, Findings, PassOver, Stated, Work, note_fallbacks};
use crate::checkpoint::{Checkpoint, DType, FileFormat, TensorEntry, TensorId};
use crate::footprint::{items_bytes, list_bytes};
use crate::load::TensorReader;
use crate::plan::{Cast, CastOp, FloatType, Quantisation, Quantised, SCALE_SUFFIX, Transform};
use crate::staging::cast::cast_step;
use crate::units::{to_u64, to_usize};

/// Most differing tensors whose first different byte is searched.
const LOCATED_MAX: usize = 8;
/// Bytes of the source that are read at once in this search: whole elements of every type that is
/// cast.
const PIECE_BYTES: u64 = 256 << 10;

/// Two tensors that have to be the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Pair {
    source: TensorId,
    target: TensorId,
    cast: Option<Cast>,
    quantised: Option<QuantisedPair>,
}

/// How the source of a pair was quantised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct QuantisedPair {
    form: Quantised,
    /// The scales in the target.
    scales: TensorId,
}

impl Pair {
    fn transform(&self) -> Transform {
        match self.quantised {
            Some(QuantisedPair { form, .. }) => Transform::Quantise(form),
            None => self.cast.into(),
        }
    }
}

/// All pairs of a source and its target.
#[derive(Debug)]
pub(super) struct Comparison {
    source: Checkpoint,
    /// Ascending by source.
    pairs: Vec<Pair>,
}

impl Comparison {
    /// Finds the pairs. A tensor without a counterpart, or with another type or shape, is a
    /// difference.
    pub(super) fn new(
        target: &Checkpoint,
        source: Checkpoint,
        stated: Option<&Stated>,
        findings: &mut Findings,
    ) -> Self {
        let mut pairs = Vec::with_capacity(source.tensor_count());
        let (mut left_out, mut aliases) = (0_u64, 0_u64);
        for entry in source.tensors() {
            let counterpart = target.find(entry.name);
            let same_as = || stated?.same_as(entry.name).and_then(|name| target.find(name));
            match counterpart.or_else(|| same_as().inspect(|_| aliases += 1)) {
                Some(counterpart) => match stated.and_then(|stated| stated.quantised(counterpart.id)) {
                    Some(to) => pairs.extend(quantised_pair(&entry, &counterpart, to, target, findings)),
                    None => pairs.extend(pair(&entry, &counterpart, stated, findings)),
                },
                None if stated.is_some_and(|stated| stated.is_left_out(entry.name)) => left_out += 1,
                None => findings.differ(entry.name, "is missing; the source has it".to_owned()),
            }
        }
        let is_scale = |entry: &TensorEntry<'_>| {
            let weight = entry.name.strip_suffix(SCALE_SUFFIX).and_then(|name| source.find(name));
            weight.is_some() && stated.is_some_and(|stated| stated.quantised(entry.id).is_some())
        };
        let is_extra = |entry: &TensorEntry<'_>| source.find(entry.name).is_none() && !is_scale(entry);
        for entry in target.tensors().filter(is_extra) {
            findings.differ(entry.name, "is not in the source".to_owned());
        }
        let is_gguf = source.shards().iter().any(|shard| shard.format == FileFormat::Gguf);
        if pairs.is_empty() && is_gguf {
            findings.note(
                "no tensor has its name in the source: compare with --names hf if it was converted so"
                    .to_owned(),
            );
        }
        if left_out > 0 {
            findings.note(format!("{left_out} tensors of the source were left out on purpose"));
        }
        if aliases > 0 {
            findings
                .note(format!("{aliases} tensors of the source are stored under the name of an equal one"));
        }
        Self { source, pairs }
    }

    /// Bytes of the source that are hashed, as they are after their cast.
    pub(super) fn hashed_bytes(&self, target: &Checkpoint) -> u64 {
        self.pairs.iter().map(|pair| target.tensor(pair.target).extent.len_bytes()).sum()
    }

    /// Host memory of the pairs and of the list of tensors to read, in bytes.
    pub(super) fn held_bytes(&self) -> u64 {
        list_bytes(&self.pairs) + items_bytes::<TensorId>(self.pairs.len())
    }

    pub(super) fn source_metadata_bytes(&self) -> u64 {
        self.source.metadata_bytes()
    }

    fn pair_of(&self, source: TensorId) -> Option<&Pair> {
        let found = self.pairs.binary_search_by_key(&source, |pair| pair.source).ok()?;
        Some(&self.pairs[found])
    }

    /// Fails as [`Self::run`] would before it reads anything: better before the target is read.
    ///
    /// # Errors
    /// Those of [`Self::run`].
    pub(super) fn check(&self, work: &Work<'_>) -> Result<(), ConvertError> {
        let (pass, ids) = self.pass(work);
        match ids.is_empty() {
            true => Ok(()),
            false => pass.check_tensors(&ids, &|id| self.transform(id)),
        }
    }

    fn transform(&self, id: TensorId) -> Transform {
        self.pair_of(id).map_or(Transform::Keep, Pair::transform)
    }

    /// The pass over the source, and the tensors that it hashes.
    fn pass(&self, work: &Work<'_>) -> (HashPass<'_>, Vec<TensorId>) {
        let ids = self.pairs.iter().map(|pair| pair.source).collect();
        let beside = work.memory(PassOver::Source);
        let (options, cancel) = (work.options.clone(), work.cancel.clone());
        (HashPass { checkpoint: &self.source, options, beside, cancel }, ids)
    }

    /// Hashes the source, and compares it with the hashes of the target.
    ///
    /// # Errors
    /// Those of [`HashPass::tensors`], and [`ConvertError::Read`].
    pub(super) fn run(
        &self,
        work: &mut Work<'_>,
        findings: &mut Findings,
        report: &mut dyn FnMut(u64),
    ) -> Result<(), ConvertError> {
        let (pass, ids) = self.pass(work);
        let mut different = Vec::new();
        let fallbacks = pass.tensors(&ids, &|id| self.transform(id), &mut |event| match event {
            PassEvent::Progress(bytes) => report(bytes),
            PassEvent::File(..) => {}
            PassEvent::Scales(id, hashes) => {
                let Some(pair) = self.pair_of(id).and_then(|pair| pair.quantised) else { return };
                if !work.compare(pair.scales, &hashes.blake3) {
                    let name = work.target.tensor(pair.scales).name;
                    let form = pair.form.to();
                    findings.differ(name, format!("has other scales than {form} makes of the source"));
                }
            }
            PassEvent::Tensor(id, hashes) => {
                let Some(pair) = self.pair_of(id) else { return };
                if work.compare(pair.target, &hashes.blake3) {
                    return;
                }
                let name = self.source.tensor(id).name;
                match pair.quantised {
                    Some(QuantisedPair { form, .. }) => {
                        let form = form.to();
                        findings.differ(name, format!("has other values than {form} makes of the source"));
                    }
                    None if different.len() < LOCATED_MAX => different.push(*pair),
                    None => findings.differ(name, "has other bytes than in the source".to_owned()),
                }
            }
        })?;
        note_fallbacks(&self.source, &fallbacks, findings);
        for pair in different {
            let what = first_difference(&self.source, work.target, pair)?;
            findings.differ(self.source.tensor(pair.source).name, what);
        }
        Ok(())
    }
}

/// The pair of a tensor and its quantised values, if the types and shapes of values and scales are
/// those of the form in the manifest.
fn quantised_pair(
    source: &TensorEntry<'_>,
    values: &TensorEntry<'_>,
    to: Quantisation,
    target: &Checkpoint,
    findings: &mut Findings,
) -> Option<Pair> {
    let scale_name = format!("{}{SCALE_SUFFIX}", source.name);
    let Some(scales) = target.find(&scale_name) else {
        findings.differ(&scale_name, format!("is missing; {:?} was quantised to {to}", source.name));
        return None;
    };
    let expected = Quantised::of(source, to).map(|form| (form, form.shapes(source.shape)));
    let found = (values.dtype, values.shape, scales.dtype, scales.shape);
    match &expected {
        Some((form, [value_shape, scale_shape]))
            if found == (to.values(), &**value_shape, to.scales(), &**scale_shape) =>
        {
            let quantised = Some(QuantisedPair { form: *form, scales: scales.id });
            Some(Pair { source: source.id, target: values.id, cast: None, quantised })
        }
        _ => {
            let what = format!(
                "is {} {:?} with scales {} {:?}, which is not what {to} makes of {} {:?} in the source",
                values.dtype, values.shape, scales.dtype, scales.shape, source.dtype, source.shape
            );
            findings.differ(source.name, what);
            None
        }
    }
}

/// The pair of two tensors, if shapes and types are the same, or the manifest has the cast.
fn pair(
    source: &TensorEntry<'_>,
    target: &TensorEntry<'_>,
    stated: Option<&Stated>,
    findings: &mut Findings,
) -> Option<Pair> {
    let pair = |cast| Some(Pair { source: source.id, target: target.id, cast, quantised: None });
    if let (DType::Block(block), DType::U8) = (source.dtype, target.dtype) {
        // Blocks as stored are written as bytes.
        let expected = block.byte_shape(source.shape);
        if expected == target.shape {
            return pair(None);
        }
        let what = format!("has the shape {:?}, where blocks of {block} have {expected:?}", target.shape);
        findings.differ(source.name, what);
        return None;
    }
    if source.shape != target.shape {
        let what = format!("has the shape {:?}, in the source {:?}", target.shape, source.shape);
        findings.differ(source.name, what);
        return None;
    }
    if source.dtype_name == target.dtype_name {
        return pair(None);
    }
    let (found, original) = (target.dtype_name, source.dtype_name);
    let cast = match stated.and_then(|stated| stated.cast_from(target.id)) {
        None => {
            findings.differ(source.name, format!("is {found}, in the source {original}"));
            return None;
        }
        Some(from) if from != source.dtype => {
            let what = format!(
                "was cast from {from} to {found}, as the manifest says, but is {original} in the source"
            );
            findings.differ(source.name, what);
            return None;
        }
        Some(from) => float_type(target.dtype).and_then(|to| Cast::between(from, to)),
    };
    if cast.is_none() {
        let what = format!(
            "was cast from {original} to {found}, as the manifest says, which this version does not do"
        );
        findings.differ(source.name, what);
    }
    cast.and_then(|cast| pair(Some(cast)))
}

fn float_type(dtype: DType) -> Option<FloatType> {
    [FloatType::Bf16, FloatType::F16, FloatType::F32].into_iter().find(|&float| DType::from(float) == dtype)
}

/// Reads both tensors of a pair again. Returns the first byte in which they differ, in words.
///
/// # Errors
/// [`ConvertError::Read`], [`ConvertError::Checkpoint`].
fn first_difference(source: &Checkpoint, target: &Checkpoint, pair: Pair) -> Result<String, ConvertError> {
    let (expected, found) = (source.tensor(pair.source), target.tensor(pair.target));
    let expected_bytes = TensorReader::open(source)?;
    let found_file = OpenShard::open(target, found.shard)?;
    let (mut read_bytes, mut compared_bytes) = (0, 0);
    while read_bytes < expected.len_bytes() {
        let len = PIECE_BYTES.min(expected.len_bytes() - read_bytes);
        let delivered = pair.cast.map_or(len, |cast| cast.delivered_bytes(len));
        // A cast may make more bytes than it gets.
        let mut wanted = vec![0; to_usize(len.max(delivered))];
        expected_bytes.read(pair.source, read_bytes, &mut wanted[..to_usize(len)])?;
        if let Some(cast) = pair.cast {
            let tensor = pair.source;
            let all = CastOp { tensor, slot_offset_bytes: 0, source_len_bytes: len, cast };
            cast_step(&mut wanted, &all);
        }
        wanted.truncate(to_usize(delivered));
        let mut is = vec![0; wanted.len()];
        found_file.read(found.extent.start() + compared_bytes, &mut is)?;
        if let Some(at) = is.iter().zip(&wanted).position(|(left, right)| left != right) {
            let cast = pair.cast.map_or(String::new(), |cast| format!(", cast from {}", cast.source()));
            return Ok(format!(
                "differs from the source first at its byte {} of {}: {:#04x}, in the source {:#04x}{cast}",
                compared_bytes + to_u64(at),
                found.extent.len_bytes(),
                is[at],
                wanted[at]
            ));
        }
        read_bytes += len;
        compared_bytes += delivered;
    }
    Ok("had other bytes than in the source, but not when both were read again: check the storage".to_owned())
}

#[cfg(test)]
mod tests {
    use super::super::super::test_files::{Tensor, tensor, write_file};
    use super::*;

    fn opened(folder: &std::path::Path, name: &str, tensor: &Tensor) -> Checkpoint {
        let path = folder.join(name);
        write_file(&path, std::slice::from_ref(tensor));
        Checkpoint::open(path).unwrap()
    }

    #[test]
    fn the_first_difference_is_found_in_every_piece_and_behind_every_cast() {
        for (dtype, to) in [
            (DType::F64, Some(FloatType::F32)),
            (DType::U8, Some(FloatType::F32)),
            (DType::F16, Some(FloatType::Bf16)),
            (DType::Bf16, None),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let source = tensor("t", dtype, &[300, 1001], 1);
            let cast = to.map(|to| Cast::between(dtype, to).unwrap());
            let len = to_u64(source.bytes.len());
            let delivered = to_usize(cast.map_or(len, |cast| cast.delivered_bytes(len)));
            let mut bytes = source.bytes.clone();
            bytes.resize(bytes.len().max(delivered), 0);
            if let Some(cast) = cast {
                let tensor = TensorId(0);
                cast_step(&mut bytes, &CastOp { tensor, slot_offset_bytes: 0, source_len_bytes: len, cast });
            }
            bytes.truncate(delivered);
            let dtype = to.map_or(dtype, DType::from);
            let original = opened(folder.path(), "original", &source);
            let compare = |bytes: Vec<u8>| {
                let target = Tensor { dtype, bytes, ..source.clone() };
                let target = opened(folder.path(), "target", &target);
                let [source, target_id] = [&original, &target].map(|side| side.find("t").unwrap().id);
                first_difference(
                    &original,
                    &target,
                    Pair { source, target: target_id, cast, quantised: None },
                )
                .unwrap()
            };
            for at in [0, 7, delivered / 2 + 1, delivered - 1] {
                let mut changed = bytes.clone();
                changed[at] ^= 0x81;
                changed[delivered - 1] ^= 0x02;
                let found = compare(changed);
                let start = format!("differs from the source first at its byte {at} of {delivered}: ");
                assert!(found.starts_with(&start), "{dtype}: {found}, not {start}");
            }
            assert!(compare(bytes).contains("but not when both were read again"));
        }
    }
}
