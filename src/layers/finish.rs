//! Makes [`Layers`] of the ordered drafts: ids, tensors and sub-units are ranges of two shared
//! arrays.
//!
//! First all texts and ids are appended to the arrays and their ranges are recorded. When the
//! arrays are complete, the layers are made from the ranges. The last step of the grouping.

use super::classify::ListKind;
use super::drafts::{Drafts, Inputs};
use super::positions::{index32, slot};
use super::shared::{Shared, SharedBuilder, Span};
use super::{Confidence, Layer, LayerKind, Layers, LayersError, SubUnit, name_parts};
use crate::checkpoint::TensorId;
use crate::footprint::{Held, PeakMeter, items_bytes, list_bytes};

/// "None yet".
const NONE: u32 = u32::MAX;

/// Whether layers list their sub-units. With very many experts this takes as long as all other
/// steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SubUnits {
    Named,
    LeftOut,
}

/// Makes the layers in this order. The meter counts them as kept.
pub(super) fn finish(
    drafts: Drafts<'_>,
    ordered: &[u32],
    sub_units: SubUnits,
    meter: &mut PeakMeter,
) -> Result<Layers, LayersError> {
    let mut assembly = Assembly::new(&drafts, sub_units);
    for &draft in ordered {
        let full = || LayersError::TooMuchText { limit_bytes: u64::from(u32::MAX) };
        assembly.add(&drafts, draft).ok_or_else(full)?;
    }
    let spans = assembly.held();
    meter.keep(spans);
    let Assembly { shared_parts, layers: layer_spans, units, stacks, stack_of_list, .. } = assembly;
    let shared = shared_parts.share();
    let mut layers = Layers { layers: Vec::with_capacity(ordered.len()), ..Layers::default() };
    let mut first_unit = 0;
    for (&draft, span) in ordered.iter().zip(layer_spans) {
        let kind = match drafts.inputs.stack(drafts.list[slot(draft)]) {
            Some(list) => LayerKind::Member { stack: slot(stack_of_list[slot(list)]) },
            None => LayerKind::Group,
        };
        let sub_units =
            units[first_unit..slot(span.unit_end)].iter().map(|unit| unit.sub_unit(&shared)).collect();
        first_unit = slot(span.unit_end);
        let tensors = shared.ids(span.tensors);
        layers.layers.push(Layer { id: shared.prefix(span.id).into(), kind, tensors, sub_units });
    }
    layers.stacks = stacks.iter().map(|(path, _)| shared.prefix(path.clone())).collect();
    layers.confidence = stacks.iter().map(|&(_, confidence)| confidence).collect();
    layers.companions = companions(&drafts.inputs);
    layers.by_id = (0..index32(layers.layers.len())).collect();
    layers
        .by_id
        .sort_unstable_by(|&left, &right| layers.layers[slot(left)].id.cmp(&layers.layers[slot(right)].id));
    let mut position_of = vec![NONE; drafts.list.len()];
    for (position, &draft) in (0..).zip(ordered) {
        position_of[slot(draft)] = position;
    }
    // Reuses the list of the drafts, which the meter counts: each entry becomes the position of a
    // layer.
    layers.layer_of = drafts.of_tensor;
    for entry in &mut layers.layer_of {
        *entry = position_of[slot(*entry)];
    }
    let held = held(&layers, &shared);
    meter.release(list_bytes(&layers.layer_of));
    meter.keep(held);
    meter.note(Held::default().list(&position_of));
    meter.release(spans.bytes());
    layers.metadata_bytes = held.bytes();
    Ok(layers)
}

/// Memory of the layers.
fn held(layers: &Layers, shared: &Shared) -> Held {
    let sub_units = layers.layers.iter().map(|layer| items_bytes::<SubUnit>(layer.sub_units.len()));
    let flat = shared.held().list(&layers.layers).list(&layers.stacks).list(&layers.confidence);
    flat.list(&layers.layer_of).list(&layers.by_id).list(&layers.companions).and(sub_units.sum())
}

fn companions(inputs: &Inputs<'_>) -> Vec<(TensorId, TensorId)> {
    let pairs =
        || inputs.companions.pairs().map(|(companion, weight)| (TensorId(companion), TensorId(weight)));
    let mut companions = Vec::with_capacity(pairs().count());
    companions.extend(pairs());
    companions
}

/// A layer in the shared arrays.
struct LayerSpan {
    id: Span,
    tensors: Span,
    /// End of its sub-units in the list of all of them.
    unit_end: u32,
}

/// A sub-unit in the shared arrays.
struct UnitSpan {
    prefix: Span,
    tensors: Span,
}

impl UnitSpan {
    fn sub_unit(&self, shared: &Shared) -> SubUnit {
        SubUnit { prefix: shared.prefix(self.prefix.clone()), tensors: shared.ids(self.tensors.clone()) }
    }
}

/// The growing shared arrays, and the ranges in them.
struct Assembly {
    sub_units: SubUnits,
    shared_parts: SharedBuilder,
    layers: Vec<LayerSpan>,
    units: Vec<UnitSpan>,
    /// Stacks in execution order.
    stacks: Vec<(Span, Confidence)>,
    /// Positions in `stacks`.
    stack_of_list: Vec<u32>,
    /// Of the current layer: pairs of child and tensor for the tensors in sub-units, and the lists
    /// of those children.
    inside: Vec<(u32, u32)>,
    inner_lists: Vec<u32>,
}

impl Assembly {
    fn new(drafts: &Drafts<'_>, sub_units: SubUnits) -> Self {
        Self {
            sub_units,
            shared_parts: SharedBuilder::with_capacity(drafts.of_tensor.len()),
            layers: Vec::with_capacity(drafts.list.len()),
            units: Vec::new(),
            stacks: Vec::new(),
            stack_of_list: vec![NONE; drafts.inputs.lists.count()],
            inside: Vec::new(),
            inner_lists: Vec::new(),
        }
    }

    /// Adds a layer; `None` if there is too much text.
    fn add(&mut self, drafts: &Drafts<'_>, draft: u32) -> Option<()> {
        let inputs = &drafts.inputs;
        let entry = drafts.list[slot(draft)];
        let id = self.shared_parts.text(inputs.id(entry))?;
        let tensors = self.shared_parts.ids(drafts.tensors(draft).iter().map(|&tensor| TensorId(tensor)));
        if let Some(list) = inputs.stack(entry) {
            self.add_stack(inputs, list)?;
            if self.sub_units == SubUnits::Named {
                self.add_sub_units(inputs, drafts.tensors(draft))?;
            }
        }
        self.layers.push(LayerSpan { id, tensors, unit_end: index32(self.units.len()) });
        Some(())
    }

    fn add_stack(&mut self, inputs: &Inputs<'_>, list: u32) -> Option<()> {
        let known = &mut self.stack_of_list[slot(list)];
        if *known == NONE {
            *known = index32(self.stacks.len());
            let ListKind::Stack(confidence) = inputs.kinds.of(list) else {
                unreachable!("only members of stacks have a list")
            };
            self.stacks.push((self.shared_parts.text(inputs.lists.path(list))?, confidence));
        }
        Some(())
    }

    /// Adds the children of the outermost lists inside a member, with their tensors and companions.
    fn add_sub_units(&mut self, inputs: &Inputs<'_>, tensors: &[u32]) -> Option<()> {
        let Inputs { lists, kinds, companions, .. } = inputs;
        let is_sub_unit = |child: u32| kinds.is_sub_unit_list(lists.child(child).list);
        self.inside.clear();
        for &tensor in tensors {
            let children = lists.around(companions.weight(tensor).unwrap_or(tensor));
            let child = children.iter().copied().find(|&child| is_sub_unit(child));
            self.inside.extend(child.map(|child| (child, tensor)));
        }
        self.inside.sort_unstable();
        self.inner_lists.clear();
        for list in self.inside.iter().map(|&(child, _)| lists.child(child).list) {
            if self.inner_lists.last() != Some(&list) {
                self.inner_lists.push(list);
            }
        }
        self.inner_lists.sort_unstable();
        self.inner_lists.dedup();
        self.inner_lists.sort_unstable_by(|&left, &right| {
            name_parts::compare_natural(lists.path(left), lists.path(right)).then(left.cmp(&right))
        });
        let mut next = 0;
        for &child in self.inner_lists.iter().flat_map(|&list| lists.children(list)) {
            // Children are mostly numbered in the order of their list.
            let is_next = self.inside.get(next).is_some_and(|&(other, _)| other == child);
            let start = if is_next { next } else { self.inside.partition_point(|&(other, _)| other < child) };
            let own = self.inside[start..].iter().take_while(|&&(other, _)| other == child);
            let tensors = self.shared_parts.ids(own.map(|&(_, tensor)| TensorId(tensor)));
            next = start + tensors.len();
            if !tensors.is_empty() {
                let prefix = self.shared_parts.text(lists.child_path(child))?;
                self.units.push(UnitSpan { prefix, tensors });
            }
        }
        Some(())
    }

    fn held(&self) -> Held {
        let shared_parts = self.shared_parts.held().list(&self.layers).list(&self.stack_of_list);
        let grown = shared_parts.grown_list(&self.units).grown_list(&self.stacks);
        grown.grown_list(&self.inside).grown_list(&self.inner_lists)
    }
}
