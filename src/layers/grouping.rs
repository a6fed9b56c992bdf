//! Assigns every tensor to one layer: companions, claims of the override, stacks, then the groups outside of them.
//!
//! Puts the other files of this stage together and checks that no tensor is lost; [`Layers`] is its only caller.

use std::collections::HashMap;

use super::companions::Companions;
use super::lists::{Lists, bucket, index32, slot, span};
use super::names;
use super::order::{self, Item, Shapes};
use super::overrides::{self, Claims, Ordered};
use super::rule::{Verdict, Verdicts};
use super::{
    Confidence, Layer, LayerId, LayerKind, LayerMap, Layers, LayersError, NamedShape, Rule, SubUnit,
};
use crate::checkpoint::TensorId;
use crate::units::to_u64;

/// "None yet", in the flat arrays.
const NONE: u32 = u32::MAX;

/// Most tensors that can be grouped: positions in the flat arrays (several per tensor) are 32 bits wide.
const TENSORS_MAX: u64 = 1 << 28;

/// Groups `names`; `shard_of` tells the file of a tensor, as far as files are known.
pub(super) fn group(
    names: &[NamedShape<'_>],
    map: &LayerMap,
    rule: &Rule,
    shard_of: &dyn Fn(u32) -> u32,
) -> Result<Layers, LayersError> {
    let found = to_u64(names.len());
    if found > TENSORS_MAX {
        return Err(LayersError::TooManyTensors { found, limit: TENSORS_MAX });
    }
    let companions = Companions::find(names);
    let claims = Claims::find(names, map)?;
    let lists = Lists::find(names, |tensor| {
        companions.host(index32(tensor)).is_none() && claims.group(tensor).is_none()
    });
    let given = overrides::given_lists(&lists, map)?;
    let verdicts = Verdicts::judge(&lists, rule, |list| given.get(&list).copied());
    let drafts = Drafts::assign(names, map, &lists, &verdicts, &companions, &claims)?;
    let ordered = drafts.ordered(map, shard_of)?;
    let layers = drafts.finish(&verdicts, &companions, &ordered);
    check_complete(names.len(), &layers)?;
    Ok(layers)
}

/// What a layer is made of, before it has a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    /// A child of a list that is a stack.
    Member { child: u32, list: u32 },
    /// A group outside every stack.
    Rest,
    /// A group of the override.
    Given { group: u32 },
}

#[derive(Clone, Copy, Debug)]
struct Draft<'a> {
    id: &'a str,
    origin: Origin,
}

/// The layers, each with its tensors, in no order yet.
struct Drafts<'a> {
    names: &'a [NamedShape<'a>],
    map: &'a LayerMap,
    lists: &'a Lists<'a>,
    drafts: Vec<Draft<'a>>,
    draft_of: Vec<u32>,
    tensors: Vec<u32>,
    starts: Vec<u32>,
}

impl<'a> Drafts<'a> {
    fn assign(
        names: &'a [NamedShape<'a>],
        map: &'a LayerMap,
        lists: &'a Lists<'a>,
        verdicts: &Verdicts,
        companions: &Companions,
        claims: &Claims,
    ) -> Result<Self, LayersError> {
        let containers = Containers::of(lists, verdicts);
        let mut drafts: Vec<Draft<'a>> = Vec::new();
        let mut by_child = vec![NONE; lists.child_count()];
        let mut by_group = vec![NONE; map.groups.len()];
        let mut by_path: HashMap<&'a str, u32> = HashMap::new();
        let mut draft_of = vec![NONE; names.len()];
        for (tensor, entry) in names.iter().enumerate() {
            if companions.host(index32(tensor)).is_some() {
                continue;
            }
            let mut new = |id: &'a str, origin: Origin| {
                drafts.push(Draft { id, origin });
                index32(drafts.len() - 1)
            };
            let stack_child = lists
                .around(index32(tensor))
                .iter()
                .copied()
                .find(|&child| matches!(verdicts.of(lists.child(child).list), Verdict::Stack(_)));
            draft_of[tensor] = if let Some(group) = claims.group(tensor) {
                let known = &mut by_group[slot(group)];
                if *known == NONE {
                    *known = new(&map.groups[slot(group)].id.name, Origin::Given { group });
                }
                *known
            } else if let Some(child) = stack_child {
                let known = &mut by_child[slot(child)];
                if *known == NONE {
                    let list = lists.child(child).list;
                    *known = new(lists.child_path(child), Origin::Member { child, list });
                }
                *known
            } else {
                let path = containers.group_path(entry.name);
                *by_path.entry(path).or_insert_with(|| new(path, Origin::Rest))
            };
        }
        for (companion, host) in companions.pairs() {
            draft_of[slot(companion)] = draft_of[slot(host)];
        }
        let (tensors, starts) = bucket(drafts.len(), (0..).zip(&draft_of).map(|(at, &draft)| (draft, at)));
        let drafts = Self { names, map, lists, drafts, draft_of, tensors, starts };
        drafts.check_ids()?;
        Ok(drafts)
    }

    /// Ids of the rule are prefixes and cannot collide; a group of the override can take one that exists.
    fn check_ids(&self) -> Result<(), LayersError> {
        if self.map.groups.is_empty() {
            return Ok(());
        }
        let mut seen: HashMap<&str, Origin> = HashMap::new();
        for draft in &self.drafts {
            if let Some(other) = seen.insert(draft.id, draft.origin) {
                let group = [draft.origin, other].into_iter().find_map(|origin| match origin {
                    Origin::Given { group } => Some(&self.map.groups[slot(group)].id),
                    Origin::Member { .. } | Origin::Rest => None,
                });
                let id = group.expect("only a group of the override can collide");
                return Err(LayersError::MapIdTaken { place: id.place, name: id.name.clone() });
            }
        }
        Ok(())
    }

    fn tensors(&self, draft: u32) -> &[u32] {
        &self.tensors[span(&self.starts, slot(draft))]
    }

    /// All layers in execution order, by the default and then by the override.
    fn ordered(&self, map: &LayerMap, shard_of: &dyn Fn(u32) -> u32) -> Result<Vec<u32>, LayersError> {
        let units = self.units(shard_of);
        let items: Vec<_> = units.iter().map(|unit| unit.item).collect();
        let mut ordered = Vec::with_capacity(self.drafts.len());
        for unit in order::order(&items, &UnitShapes { drafts: self, units: &units }) {
            ordered.extend(&units[slot(unit)].drafts);
        }
        if map.order.is_empty() {
            return Ok(ordered);
        }
        let named: Vec<_> = (ordered.iter())
            .map(|&draft| {
                let draft = &self.drafts[slot(draft)];
                let stack = match draft.origin {
                    Origin::Member { list, .. } => Some(self.lists.path(list)),
                    Origin::Rest | Origin::Given { .. } => None,
                };
                Ordered { id: draft.id, stack }
            })
            .collect();
        let positions = overrides::reorder(&named, &map.order)?;
        Ok(positions.into_iter().map(|position| ordered[slot(position)]).collect())
    }

    /// Stacks with their members in natural order, and groups.
    fn units(&self, shard_of: &dyn Fn(u32) -> u32) -> Vec<Unit<'a>> {
        let mut draft_of_child = vec![NONE; self.lists.child_count()];
        for (draft, entry) in (0..).zip(&self.drafts) {
            if let Origin::Member { child, .. } = entry.origin {
                draft_of_child[slot(child)] = draft;
            }
        }
        let mut units = Vec::new();
        let mut is_done = vec![false; self.lists.count()];
        for (draft, entry) in (0..).zip(&self.drafts) {
            let (path, is_stack, drafts) = match entry.origin {
                Origin::Member { list, .. } => {
                    if std::mem::replace(&mut is_done[slot(list)], true) {
                        continue;
                    }
                    let members = self.lists.children(list).iter().map(|&child| draft_of_child[slot(child)]);
                    // The slash of `vae/` stays, so that a list at its root is known to be in a component.
                    let prefix = self.lists.prefix(list);
                    (prefix.strip_suffix('.').unwrap_or(prefix), true, members.collect())
                }
                Origin::Rest => (entry.id, false, vec![draft]),
                Origin::Given { group } => {
                    (self.map.groups[slot(group)].prefixes[0].name.as_str(), false, vec![draft])
                }
            };
            let first = drafts.first().and_then(|&draft| self.tensors(draft).first());
            let first_shard = first.map_or(0, |&tensor| shard_of(tensor));
            units.push(Unit { item: Item { path, is_stack, first_shard }, drafts });
        }
        units
    }

    fn finish(&self, verdicts: &Verdicts, companions: &Companions, ordered: &[u32]) -> Layers {
        let mut layers = Layers::default();
        let mut position_of = vec![NONE; self.drafts.len()];
        let mut stack_of: HashMap<u32, usize> = HashMap::new();
        layers.layers.reserve_exact(ordered.len());
        for &draft in ordered {
            position_of[slot(draft)] = index32(layers.layers.len());
            let Draft { id, origin } = self.drafts[slot(draft)];
            let (kind, sub_units) = match origin {
                Origin::Member { list, .. } => {
                    let stack = *stack_of.entry(list).or_insert_with(|| {
                        layers.stacks.push(self.lists.path(list).into());
                        layers.confidence.push(confidence(verdicts, list));
                        layers.stacks.len() - 1
                    });
                    (LayerKind::Member { stack }, self.sub_units(verdicts, companions, draft))
                }
                Origin::Rest | Origin::Given { .. } => (LayerKind::Group, Box::default()),
            };
            let tensors = self.tensors(draft).iter().map(|&tensor| TensorId(tensor)).collect();
            layers.layers.push(Layer { id: LayerId::new(id), kind, tensors, sub_units });
        }
        layers.layer_of = self.draft_of.iter().map(|&draft| position_of[slot(draft)]).collect();
        layers.by_id = (0..index32(layers.layers.len())).collect();
        layers
            .by_id
            .sort_by(|&left, &right| layers.layers[slot(left)].id.cmp(&layers.layers[slot(right)].id));
        layers.companions =
            companions.pairs().map(|(companion, host)| (TensorId(companion), TensorId(host))).collect();
        layers
    }

    /// Lists inside of a member, outermost first, each child with its tensors and their companions.
    fn sub_units(&self, verdicts: &Verdicts, companions: &Companions, draft: u32) -> Box<[SubUnit]> {
        let is_sub_unit = |child: u32| verdicts.is_sub_unit_list(self.lists.child(child).list);
        let mut unit_of: HashMap<u32, Vec<TensorId>> = HashMap::new();
        let mut inner_lists: Vec<u32> = Vec::new();
        for &tensor in self.tensors(draft) {
            let children = self.lists.around(companions.host(tensor).unwrap_or(tensor));
            if let Some(child) = children.iter().copied().find(|&child| is_sub_unit(child)) {
                unit_of
                    .entry(child)
                    .or_insert_with(|| {
                        inner_lists.push(self.lists.child(child).list);
                        Vec::new()
                    })
                    .push(TensorId(tensor));
            }
        }
        inner_lists.sort_unstable();
        inner_lists.dedup();
        inner_lists
            .sort_by(|&left, &right| names::compare_natural(self.lists.path(left), self.lists.path(right)));
        (inner_lists.iter().flat_map(|&list| self.lists.children(list)))
            .filter_map(|&child| {
                let tensors = unit_of.remove(&child)?;
                Some(SubUnit { prefix: self.lists.child_path(child).into(), tensors: tensors.into() })
            })
            .collect()
    }
}

fn confidence(verdicts: &Verdicts, list: u32) -> Confidence {
    match verdicts.of(list) {
        Verdict::Stack(confidence) => confidence,
        Verdict::Transparent | Verdict::Inside => unreachable!("only members of stacks have a list"),
    }
}

/// A stack or a group, with its layers.
struct Unit<'a> {
    item: Item<'a>,
    drafts: Vec<u32>,
}

struct UnitShapes<'a, 'b> {
    drafts: &'b Drafts<'a>,
    units: &'b [Unit<'a>],
}

impl Shapes for UnitShapes<'_, '_> {
    fn shapes(&self, item: usize) -> impl Iterator<Item = Option<&[u64]>> {
        let first = self.units[item].drafts[0];
        self.drafts.tensors(first).iter().map(|&tensor| self.drafts.names[slot(tensor)].shape)
    }
}

/// The containers of all stacks, to tell how deep a group outside of them is.
struct Containers<'a> {
    /// Paths of the stacks, sorted bytewise: the path that shares most with a name is next to it.
    stacks: Vec<&'a str>,
}

impl<'a> Containers<'a> {
    fn of(lists: &Lists<'a>, verdicts: &Verdicts) -> Self {
        let mut stacks: Vec<_> = (0..index32(lists.count()))
            .filter(|&list| matches!(verdicts.of(list), Verdict::Stack(_)))
            .map(|list| lists.path(list))
            .collect();
        stacks.sort_unstable();
        Self { stacks }
    }

    /// The group of a tensor outside every stack: one component more than the deepest container of a stack around
    /// it; a parameter directly on such a container belongs to the container's own group.
    fn group_path<'n>(&self, name: &'n str) -> &'n str {
        let at = self.stacks.partition_point(|stack| *stack < name);
        let neighbours = [at.checked_sub(1), Some(at)].into_iter().flatten();
        let shared = neighbours
            .filter_map(|at| self.stacks.get(at))
            .map(|stack| proper_container(stack, name))
            .max()
            .unwrap_or(0);
        let body = names::body_start(name);
        let from = if shared > body { shared + 1 } else { body };
        match name[from..].find('.') {
            Some(length) => &name[..from + length],
            None if shared > body => &name[..shared],
            None => name,
        }
    }
}

/// Length of the deepest container of both, which is neither of them.
fn proper_container(stack: &str, name: &str) -> usize {
    let shared = names::common_container(stack, name);
    if shared < stack.len() && shared < name.len() {
        return shared;
    }
    stack.as_bytes()[..shared].iter().rposition(|&byte| byte == b'.').unwrap_or(0)
}

/// Step 5 of the rule: every tensor is in exactly one layer.
fn check_complete(tensor_count: usize, layers: &Layers) -> Result<(), LayersError> {
    let mut seen = vec![false; tensor_count];
    let mut found = 0;
    for tensor in layers.layers.iter().flat_map(|layer| &layer.tensors) {
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

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!(check_complete(3, &with(&[&[0, 2], &[1]])), Ok(()));
        let found = |tensors: &[&[u32]]| match check_complete(3, &with(tensors)) {
            Err(LayersError::Unaccounted { what: "tensors", expected: 3, found }) => found,
            other => panic!("{other:?}"),
        };
        assert_eq!(found(&[&[0], &[2]]), 2);
        assert_eq!(found(&[&[0, 1, 2], &[1]]), 4);
        assert_eq!(found(&[&[0, 1], &[1]]), 2, "as many as there are, but one twice");
        assert_eq!(found(&[&[0, 1, 7]]), 2);
    }
}
