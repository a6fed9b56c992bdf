//! Assigns every tensor to one layer: companions, claims of the override, stacks, then the groups
//! outside of them.
//!
//! Puts the other files of this stage together and checks that no tensor is lost; [`Layers`] is its
//! only caller. A checkpoint may have a million layers, so everything here is a flat list, and a
//! [`Meter`] counts what is held.

use super::companions::Companions;
use super::finish;
use super::index::TextIndex;
use super::lists::{Lists, bucket, index32, slot, span};
use super::named::Names;
use super::names;
use super::order::{self, Item, Shapes};
use super::overrides::{self, Claims, Ordered};
use super::rule::{Verdict, Verdicts};
use super::{LayerMap, Layers, LayersError, Rule};
use crate::footprint::{Held, Meter, list_bytes};
use crate::units::to_u64;

/// "None yet", in the flat arrays.
const NONE: u32 = u32::MAX;

/// Most tensors that can be grouped: positions in the flat arrays (several per tensor) are 32 bits
/// wide.
const TENSORS_MAX: u64 = 1 << 28;

/// Whether layers name their sub-units. Among very many experts that takes as long as all the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SubUnits {
    Named,
    LeftOut,
}

/// Groups `names`.
pub(super) fn group(
    names: Names<'_>,
    map: &LayerMap,
    rule: &Rule,
    sub_units: SubUnits,
) -> Result<Layers, LayersError> {
    let found = to_u64(names.count());
    if found > TENSORS_MAX {
        return Err(LayersError::TooManyTensors { found, limit: TENSORS_MAX });
    }
    let mut meter = Meter::default();
    let companions = Companions::find(names, &mut meter);
    let claims = Claims::find(names, map, &mut meter)?;
    let takes_part = |tensor| companions.host(tensor).is_none() && claims.group(tensor).is_none();
    let lists = Lists::find(names, takes_part, &mut meter);
    let given = overrides::given_lists(&lists, map)?;
    let verdicts = Verdicts::judge(&lists, rule, |list| given.get(&list).copied(), &mut meter);
    let basis = Basis { names, map, lists: &lists, verdicts: &verdicts, companions: &companions };
    let drafts = Drafts::assign(basis, &claims, &mut meter)?;
    let ordered = drafts.ordered(&mut meter)?;
    let mut layers = finish::finish(drafts, &ordered, sub_units, &mut meter)?;
    check_complete(names.count(), &layers, &mut meter)?;
    layers.peak_bytes = meter.peak_bytes();
    Ok(layers)
}

/// What is known before tensors are assigned.
#[derive(Clone, Copy)]
pub(super) struct Basis<'a> {
    pub(super) names: Names<'a>,
    pub(super) map: &'a LayerMap,
    pub(super) lists: &'a Lists<'a>,
    pub(super) verdicts: &'a Verdicts,
    pub(super) companions: &'a Companions,
}

/// A layer before it has a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Draft {
    /// A child of a list that is a stack.
    Member {
        /// The child.
        child: u32,
    },
    /// A group outside every stack: the first bytes of the name of one of its tensors.
    Rest {
        /// The tensor.
        sample: u32,
        /// How many bytes.
        path_len: u32,
    },
    /// A group of the override.
    Given {
        /// Which one.
        group: u32,
    },
}

/// The layers, each with its tensors, in no order yet.
pub(super) struct Drafts<'a> {
    pub(super) basis: Basis<'a>,
    pub(super) list: Vec<Draft>,
    /// The draft of each tensor.
    pub(super) of_tensor: Vec<u32>,
    /// The tensors of each draft, ascending.
    tensors: Vec<u32>,
    starts: Vec<u32>,
}

/// Drafts while tensors are assigned, and how to find the one that a tensor belongs to.
struct Assignment<'a> {
    basis: Basis<'a>,
    containers: Containers<'a>,
    list: Vec<Draft>,
    by_child: Vec<u32>,
    by_group: Vec<u32>,
    by_path: TextIndex,
}

impl<'a> Assignment<'a> {
    fn new(basis: Basis<'a>) -> Self {
        Self {
            basis,
            containers: Containers::of(basis.lists, basis.verdicts),
            list: Vec::new(),
            by_child: vec![NONE; basis.lists.child_count()],
            by_group: vec![NONE; basis.map.groups.len()],
            by_path: TextIndex::default(),
        }
    }

    /// The draft of a tensor that is no companion.
    fn draft(&mut self, tensor: u32, group: Option<u32>) -> u32 {
        let Basis { names, lists, verdicts, .. } = self.basis;
        let is_stack = |child: u32| matches!(verdicts.of(lists.child(child).list), Verdict::Stack(_));
        let (known, new) = if let Some(group) = group {
            (&mut self.by_group[slot(group)], Draft::Given { group })
        } else if let Some(child) = lists.around(tensor).iter().copied().find(|&child| is_stack(child)) {
            (&mut self.by_child[slot(child)], Draft::Member { child })
        } else {
            let path = self.containers.group_path(names.name(tensor));
            return self.rest(tensor, path);
        };
        if *known == NONE {
            *known = index32(self.list.len());
            self.list.push(new);
        }
        *known
    }

    fn rest(&mut self, sample: u32, path: &str) -> u32 {
        let Self { basis, list, by_path, .. } = self;
        // Only such drafts are in the index.
        let path_of = |list: &[Draft], draft: u32| basis.id(list[slot(draft)]);
        if let Some(draft) = by_path.find(path, |draft| path_of(list, draft)) {
            return draft;
        }
        let draft = index32(list.len());
        list.push(Draft::Rest { sample, path_len: index32(path.len()) });
        by_path.insert(draft, |draft| path_of(list, draft));
        draft
    }

    fn held(&self) -> Held {
        let found = Held::default().list(&self.by_child).list(&self.by_group).grown(self.by_path.bytes());
        found.grown_list(&self.list).grown_list(&self.containers.stacks)
    }
}

impl<'a> Basis<'a> {
    /// The id of a draft.
    pub(super) fn id(&self, draft: Draft) -> &'a str {
        match draft {
            Draft::Member { child } => self.lists.child_path(child),
            Draft::Rest { sample, path_len } => &self.names.name(sample)[..slot(path_len)],
            Draft::Given { group } => &self.map.groups[slot(group)].id.name,
        }
    }

    /// The stack that a draft is a layer of.
    pub(super) fn stack(&self, draft: Draft) -> Option<u32> {
        match draft {
            Draft::Member { child } => Some(self.lists.child(child).list),
            Draft::Rest { .. } | Draft::Given { .. } => None,
        }
    }
}

impl<'a> Drafts<'a> {
    fn assign(basis: Basis<'a>, claims: &Claims, meter: &mut Meter) -> Result<Self, LayersError> {
        let mut assignment = Assignment::new(basis);
        let mut of_tensor = vec![NONE; basis.names.count()];
        for tensor in basis.names.tensors().filter(|&tensor| basis.companions.host(tensor).is_none()) {
            of_tensor[slot(tensor)] = assignment.draft(tensor, claims.group(tensor));
        }
        for (companion, host) in basis.companions.pairs() {
            of_tensor[slot(companion)] = of_tensor[slot(host)];
        }
        meter.note(assignment.held().list(&of_tensor));
        let mut list = assignment.list;
        list.shrink_to_fit();
        let (tensors, starts) =
            bucket(list.len(), (0..).zip(&of_tensor).map(|(tensor, &draft)| (draft, tensor)));
        let drafts = Self { basis, list, of_tensor, tensors, starts };
        let held = Held::default().list(&drafts.list).list(&drafts.of_tensor);
        meter.keep(held.list(&drafts.tensors).list(&drafts.starts));
        drafts.check_ids(meter)?;
        Ok(drafts)
    }

    /// Ids of the rule are prefixes and cannot collide; a group of the override can take one that
    /// exists.
    fn check_ids(&self, meter: &mut Meter) -> Result<(), LayersError> {
        let groups = &self.basis.map.groups;
        if groups.is_empty() {
            return Ok(());
        }
        let id = |draft: u32| self.basis.id(self.list[slot(draft)]);
        let mut seen = TextIndex::default();
        for draft in 0..index32(self.list.len()) {
            if let Some(other) = seen.find(id(draft), id) {
                let taken = [draft, other].into_iter().find_map(|draft| match self.list[slot(draft)] {
                    Draft::Given { group } => Some(&groups[slot(group)].id),
                    Draft::Member { .. } | Draft::Rest { .. } => None,
                });
                let id = taken.expect("only a group of the override can collide");
                return Err(LayersError::MapIdTaken { position: id.position, name: id.name.clone() });
            }
            seen.insert(draft, id);
        }
        meter.note(Held::default().grown(seen.bytes()));
        Ok(())
    }

    /// The tensors of a draft, ascending.
    pub(super) fn tensors(&self, draft: u32) -> &[u32] {
        &self.tensors[span(&self.starts, slot(draft))]
    }

    /// All layers in execution order, by the default and then by the override. What it returns is
    /// kept.
    fn ordered(&self, meter: &mut Meter) -> Result<Vec<u32>, LayersError> {
        let units = Units::of(self, meter);
        let sequence = order::order(&units.items, &UnitShapes { drafts: self, units: &units }, meter);
        let mut ordered = Vec::with_capacity(self.list.len());
        for unit in &sequence {
            ordered.extend(units.drafts(*unit));
        }
        meter.keep(Held::default().list(&ordered));
        meter.release(list_bytes(&sequence) + units.held().bytes());
        drop((sequence, units));
        let map = self.basis.map;
        if map.order.is_empty() {
            return Ok(ordered);
        }
        let layer = |position: u32| {
            let draft = self.list[slot(ordered[slot(position)])];
            let stack = self.basis.stack(draft).map(|list| self.basis.lists.path(list));
            Ordered { id: self.basis.id(draft), stack }
        };
        let mut positions = overrides::reorder(ordered.len(), layer, &map.order, meter)?;
        for position in &mut positions {
            *position = ordered[slot(*position)];
        }
        Ok(positions)
    }
}

/// Stacks with their members in natural order, and groups: what is put in order.
struct Units<'a> {
    items: Vec<Item<'a>>,
    /// The drafts of each unit.
    drafts: Vec<u32>,
    starts: Vec<u32>,
}

impl<'a> Units<'a> {
    /// The units of all drafts; kept until they are released.
    fn of(drafts: &Drafts<'a>, meter: &mut Meter) -> Self {
        let Basis { names, map, lists, .. } = drafts.basis;
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
                    // The slash of `vae/` stays, so that a list at its root is known to be in a component.
                    let prefix = lists.prefix(list);
                    (prefix.strip_suffix('.').unwrap_or(prefix), true)
                }
                Draft::Rest { .. } => {
                    units.drafts.push(at);
                    (drafts.basis.id(*draft), false)
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
        self.drafts.tensors(first).iter().map(|&tensor| self.drafts.basis.names.shape(tensor))
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

    /// The group of a tensor outside every stack: one component more than the deepest container of
    /// a stack around it; a parameter directly on such a container belongs to the container's
    /// own group.
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
fn check_complete(tensor_count: usize, layers: &Layers, meter: &mut Meter) -> Result<(), LayersError> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::TensorId;
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
        assert_eq!(check_complete(3, &with(&[&[0, 2], &[1]]), &mut Meter::default()), Ok(()));
        let found = |tensors: &[&[u32]]| match check_complete(3, &with(tensors), &mut Meter::default()) {
            Err(LayersError::Unaccounted { what: "tensors", expected: 3, found }) => found,
            other => panic!("{other:?}"),
        };
        assert_eq!(found(&[&[0], &[2]]), 2);
        assert_eq!(found(&[&[0, 1, 2], &[1]]), 4);
        assert_eq!(found(&[&[0, 1], &[1]]), 2, "as many as there are, but one twice");
        assert_eq!(found(&[&[0, 1, 7]]), 2);
    }
}
