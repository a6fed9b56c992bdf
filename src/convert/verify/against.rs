//! Compares the tensors of a checkpoint with those of its source, by full name.
//!
//! A tensor is right if it has the type, the shape and the bytes of the source's; or, where the
//! manifest says that it was cast, those that the cast makes of them. What is not there must be
//! stated as left out.

use super::super::reading::{HashPass, Seen};
use super::{ConvertError, Findings, Stated, Work, locate, note_fallbacks};
use crate::checkpoint::{Checkpoint, DType, TensorEntry, TensorId};
use crate::footprint::{items_bytes, list_bytes};
use crate::plan::{Cast, FloatType, Quantisation, Quantised, SCALE_SUFFIX, Transform};

/// Tensors that differ whose first different byte is looked for.
const LOCATED_MAX: usize = 8;

/// Two tensors that have to be the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pair {
    pub(super) source: TensorId,
    pub(super) target: TensorId,
    pub(super) cast: Option<Cast>,
    pub(super) quantised: Option<QuantisedPair>,
}

/// What a pair is if its source was quantised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct QuantisedPair {
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

/// What is compared with what.
#[derive(Debug)]
pub(super) struct Comparison {
    source: Checkpoint,
    /// Ascending by source.
    pairs: Vec<Pair>,
}

impl Comparison {
    /// Finds the pairs. Whatever has no counterpart, or another type or shape, is a difference.
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
        let is_strange = |entry: &TensorEntry<'_>| source.find(entry.name).is_none() && !is_scale(entry);
        for entry in target.tensors().filter(is_strange) {
            findings.differ(entry.name, "is not in the source".to_owned());
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

    /// Bytes of the source that are hashed, cast as they are compared.
    pub(super) fn hashed_bytes(&self, target: &Checkpoint) -> u64 {
        self.pairs.iter().map(|pair| target.tensor(pair.target).extent.len_bytes()).sum()
    }

    /// Host memory that the pairs take, in bytes, and the list of what to read.
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

    /// Refuses what [`Self::run`] would refuse before it reads anything: better before the target
    /// has been read.
    ///
    /// # Errors
    /// As [`Self::run`].
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

    /// The pass over the source, and which of its tensors it hashes.
    fn pass(&self, work: &Work<'_>) -> (HashPass<'_>, Vec<TensorId>) {
        let ids = self.pairs.iter().map(|pair| pair.source).collect();
        let beside = work.memory(Some(&self.source));
        (HashPass { checkpoint: &self.source, options: work.options.clone(), beside }, ids)
    }

    /// Hashes the source, and compares with the hashes of the target.
    ///
    /// # Errors
    /// Those of a pass over files.
    pub(super) fn run(
        &self,
        work: &mut Work<'_>,
        findings: &mut Findings,
        tell: &mut dyn FnMut(u64),
    ) -> Result<(), ConvertError> {
        let (pass, ids) = self.pass(work);
        let mut different = Vec::new();
        let fallbacks = pass.tensors(&ids, &|id| self.transform(id), &mut |seen| match seen {
            Seen::Progress(bytes) => tell(bytes),
            Seen::File(..) => {}
            Seen::Scales(id, hashes) => {
                let Some(pair) = self.pair_of(id).and_then(|pair| pair.quantised) else { return };
                work.compared[pair.scales.index()] = true;
                if hashes.blake3 != work.hashes[pair.scales.index()] {
                    let name = work.target.tensor(pair.scales).name;
                    findings.differ(
                        name,
                        format!("has other scales than {} makes of the source", pair.form.to()),
                    );
                }
            }
            Seen::Tensor(id, hashes) => {
                let Some(pair) = self.pair_of(id) else { return };
                work.compared[pair.target.index()] = true;
                if hashes.blake3 == work.hashes[pair.target.index()] {
                    return;
                }
                if let Some(QuantisedPair { form, .. }) = pair.quantised {
                    let name = self.source.tensor(id).name;
                    findings.differ(name, format!("has other values than {} makes of the source", form.to()));
                } else if different.len() < LOCATED_MAX {
                    different.push(*pair);
                } else {
                    let name = self.source.tensor(id).name;
                    findings.differ(name, "has other bytes than in the source".to_owned());
                }
            }
        })?;
        note_fallbacks(&self.source, &fallbacks, findings);
        for pair in different {
            let what = locate::first_difference(&self.source, work.target, pair)?;
            findings.differ(self.source.tensor(pair.source).name, what);
        }
        Ok(())
    }
}

/// The pair of a tensor and its values, as the manifest says that they are, if their types and
/// shapes allow one and its scales are there.
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

/// The pair of two tensors, if their types and shapes allow one.
fn pair(
    source: &TensorEntry<'_>,
    target: &TensorEntry<'_>,
    stated: Option<&Stated>,
    findings: &mut Findings,
) -> Option<Pair> {
    if source.shape != target.shape {
        let what = format!("has the shape {:?}, in the source {:?}", target.shape, source.shape);
        findings.differ(source.name, what);
        return None;
    }
    let pair = |cast| Some(Pair { source: source.id, target: target.id, cast, quantised: None });
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
