//! Runs the steps of the grouping in order, and checks that every tensor is in exactly one layer.
//!
//! A checkpoint may have a million layers, so all tables are flat lists, and a [`PeakMeter`] counts
//! their memory.

use super::classify::ListKinds;
use super::companions::Companions;
use super::drafts::{Draft, Drafts, Inputs};
use super::finish::{self, SubUnits};
use super::lists::Lists;
use super::names::{NamedShape, Names};
use super::order::{self, Item, Shapes};
use super::overrides::{self, Claims, Ordered};
use super::positions::{index32, slot, span};
use super::{LayerMap, Layers, LayersError, Rule};
use crate::checkpoint::{Checkpoint, TensorId};
use crate::footprint::{Held, PeakMeter, list_bytes};
use crate::units::to_u64;

/// "None yet", in the flat arrays.
const NONE: u32 = u32::MAX;

/// The most tensors that can be grouped: positions in the flat arrays (several per tensor) have 32
/// bits.
const TENSORS_MAX: u64 = 1 << 28;

/// Groups `names`.
fn group(names: Names<'_>, map: &LayerMap, rule: &Rule, sub_units: SubUnits) -> Result<Layers, LayersError> {
    let found = to_u64(names.count());
    if found > TENSORS_MAX {
        return Err(LayersError::TooManyTensors { found, limit: TENSORS_MAX });
    }
    let mut meter = PeakMeter::default();
    let companions = Companions::find(names, &mut meter);
    let claims = Claims::find(names, map, &mut meter)?;
    let takes_part = |tensor| companions.weight(tensor).is_none() && claims.group(tensor).is_none();
    let lists = Lists::find(names, takes_part, &mut meter);
    let given = overrides::given_lists(&lists, map)?;
    let kinds = ListKinds::classify(&lists, rule, |list| given.get(&list).copied(), &mut meter);
    let inputs = Inputs { names, map, lists: &lists, kinds: &kinds, companions: &companions };
    let drafts = Drafts::assign(inputs, &claims, &mut meter)?;
    let ordered = drafts.ordered(&mut meter)?;
    let mut layers = finish::finish(drafts, &ordered, sub_units, &mut meter)?;
    check_complete(names.count(), &layers, &mut meter)?;
    layers.peak_bytes = meter.peak_bytes();
    Ok(layers)
}

impl Drafts<'_> {
    /// All layers in execution order: the default order, then the override's. The meter counts the
    /// result as kept.
    fn ordered(&self, meter: &mut PeakMeter) -> Result<Vec<u32>, LayersError> {
        let units = Units::of(self, meter);
        let sequence = order::order(&units.items, &UnitShapes { drafts: self, units: &units }, meter);
        let mut ordered = Vec::with_capacity(self.list.len());
        for unit in &sequence {
            ordered.extend(units.drafts(*unit));
        }
        meter.keep(Held::default().list(&ordered));
        meter.release(list_bytes(&sequence) + units.held().bytes());
        drop((sequence, units));
        let map = self.inputs.map;
        if map.order.is_empty() {
            return Ok(ordered);
        }
        let layer = |position: u32| {
            let draft = self.list[slot(ordered[slot(position)])];
            let stack = self.inputs.stack(draft).map(|list| self.inputs.lists.path(list));
            Ordered { id: self.inputs.id(draft), stack }
        };
        let mut positions = overrides::reorder(ordered.len(), layer, &map.order, meter)?;
        for position in &mut positions {
            *position = ordered[slot(*position)];
        }
        Ok(positions)
    }
}

/// Stacks with their members in natural order, and groups: the items of the default order.
struct Units<'a> {
    items: Vec<Item<'a>>,
    /// The drafts of each unit.
    drafts: Vec<u32>,
    starts: Vec<u32>,
}

impl<'a> Units<'a> {
    /// The units of all drafts. The meter counts them until they are released.
    fn of(drafts: &Drafts<'a>, meter: &mut PeakMeter) -> Self {
        let Inputs { names, map, lists, .. } = drafts.inputs;
        let mut draft_of_child = vec![NONE; lists.child_count()];
        for (at, draft) in (0..).zip(&drafts.list) {
            if let Draft::Member { child } = *draft {
                draft_of_child[slot(child)] = at;
            }
        }
        let mut is_done = vec![false; lists.count()];
        let mut units =
            Self { items: Vec::new(), drafts: Vec::with_capacity(drafts.list.len()), starts: vec![0] };
        for (at, draft) in (0..).zip(&drafts.list) {
            let first = units.drafts.len();
            let (path, is_stack) = match *draft {
                Draft::Member { child } => {
                    let list = lists.child(child).list;
                    if std::mem::replace(&mut is_done[slot(list)], true) {
                        continue;
                    }
                    let members = lists.children(list).iter();
                    units.drafts.extend(members.map(|&child| draft_of_child[slot(child)]));
                    // The slash of `vae/` stays, to mark a list at the root of a component.
                    let prefix = lists.prefix(list);
                    (prefix.strip_suffix('.').unwrap_or(prefix), true)
                }
                Draft::Rest { .. } => {
                    units.drafts.push(at);
                    (drafts.inputs.id(*draft), false)
                }
                Draft::Given { group } => {
                    units.drafts.push(at);
                    (map.groups[slot(group)].prefixes[0].name.as_str(), false)
                }
            };
            let tensor = drafts.tensors(units.drafts[first]).first();
            let first_shard = tensor.map_or(0, |&tensor| names.shard(tensor));
            units.items.push(Item { path, is_stack, first_shard });
            units.starts.push(index32(units.drafts.len()));
        }
        meter.note(units.held().grown_list(&units.items).list(&draft_of_child).list(&is_done));
        units.items.shrink_to_fit();
        units.starts.shrink_to_fit();
        meter.keep(units.held());
        units
    }

    fn drafts(&self, unit: u32) -> &[u32] {
        &self.drafts[span(&self.starts, slot(unit))]
    }

    fn held(&self) -> Held {
        Held::default().list(&self.items).list(&self.drafts).list(&self.starts)
    }
}

struct UnitShapes<'a, 'b> {
    drafts: &'b Drafts<'a>,
    units: &'b Units<'a>,
}

impl Shapes for UnitShapes<'_, '_> {
    fn shapes(&self, item: u32) -> impl Iterator<Item = Option<&[u64]>> {
        let first = self.units.drafts(item)[0];
        self.drafts.tensors(first).iter().map(|&tensor| self.drafts.inputs.names.shape(tensor))
    }
}

/// Checks that every tensor is in exactly one layer.
fn check_complete(tensor_count: usize, layers: &Layers, meter: &mut PeakMeter) -> Result<(), LayersError> {
    let mut seen = vec![false; tensor_count];
    meter.note(Held::default().list(&seen));
    let mut found = 0;
    for tensor in layers.layers.iter().flat_map(|layer| layer.tensors.iter()) {
        found += 1;
        if let Some(seen) = seen.get_mut(tensor.index()) {
            *seen = true;
        }
    }
    let distinct = to_u64(seen.iter().filter(|&&seen| seen).count());
    let expected = to_u64(tensor_count);
    if found != expected || distinct != expected {
        let found = if found == expected { distinct } else { found };
        return Err(LayersError::Unaccounted { what: "tensors", expected, found });
    }
    Ok(())
}

impl Layers {
    /// Groups the tensors of a checkpoint by the rule.
    ///
    /// # Errors
    /// [`LayersError::Unaccounted`] if tensors or bytes do not add up, which would be a bug.
    pub fn group(checkpoint: &Checkpoint) -> Result<Self, LayersError> {
        Self::group_with(checkpoint, &LayerMap::default())
    }

    /// Groups the tensors of a checkpoint by the rule and an override.
    ///
    /// # Errors
    /// As [`group`](Self::group), and if the override has a name that the checkpoint does not have,
    /// or contradicts itself.
    pub fn group_with(checkpoint: &Checkpoint, map: &LayerMap) -> Result<Self, LayersError> {
        Self::of_checkpoint(checkpoint, map, SubUnits::Named)
    }

    /// As [`group_with`](Self::group_with), without sub-units.
    pub(crate) fn group_whole(checkpoint: &Checkpoint, map: &LayerMap) -> Result<Self, LayersError> {
        Self::of_checkpoint(checkpoint, map, SubUnits::LeftOut)
    }

    fn of_checkpoint(
        checkpoint: &Checkpoint,
        map: &LayerMap,
        sub_units: SubUnits,
    ) -> Result<Self, LayersError> {
        let layers = group(Names::Opened(checkpoint), map, &Rule::default(), sub_units)?;
        let bytes_of = |tensor: &TensorId| checkpoint.bytes_of(*tensor);
        let found = layers.layers.iter().flat_map(|layer| layer.tensors.iter()).map(bytes_of).sum();
        let expected = checkpoint.tensor_bytes();
        if found != expected {
            return Err(LayersError::Unaccounted { what: "bytes", expected, found });
        }
        Ok(layers)
    }

    /// Groups bare names. A tensor's id is its position in `names`.
    ///
    /// # Errors
    /// As [`group_with`](Self::group_with), and [`LayersError::TooManyTensors`].
    pub fn from_names(names: &[NamedShape<'_>], map: &LayerMap) -> Result<Self, LayersError> {
        Self::from_names_by(names, map, &Rule::default())
    }

    /// As [`from_names`](Self::from_names), with other thresholds, to measure how much they matter.
    ///
    /// # Errors
    /// As [`from_names`](Self::from_names).
    pub fn from_names_by(names: &[NamedShape<'_>], map: &LayerMap, rule: &Rule) -> Result<Self, LayersError> {
        group(Names::Listed(names), map, rule, SubUnits::Named)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layers::{Layer, LayerId, LayerKind};

    fn with(tensors: &[&[u32]]) -> Layers {
        let layer = |ids: &&[u32]| Layer {
            id: LayerId::new("l"),
            kind: LayerKind::Group,
            tensors: ids.iter().map(|&id| TensorId(id)).collect(),
            sub_units: Box::default(),
        };
        Layers { layers: tensors.iter().map(layer).collect(), ..Layers::default() }
    }

    #[test]
    fn lost_and_doubled_tensors_are_errors() {
        assert_eq!(check_complete(3, &with(&[&[0, 2], &[1]]), &mut PeakMeter::default()), Ok(()));
        let found = |tensors: &[&[u32]]| match check_complete(3, &with(tensors), &mut PeakMeter::default()) {
            Err(LayersError::Unaccounted { what: "tensors", expected: 3, found }) => found,
            other => panic!("{other:?}"),
        };
        assert_eq!(found(&[&[0], &[2]]), 2);
        assert_eq!(found(&[&[0, 1, 2], &[1]]), 4);
        assert_eq!(found(&[&[0, 1], &[1]]), 2, "as many as there are, but one twice");
        assert_eq!(found(&[&[0, 1, 7]]), 2);
    }
}
