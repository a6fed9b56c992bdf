//! Assigns every tensor to one layer: companions to their weight's, then groups of the override,
//! members of stacks, and the groups outside every stack.

use super::classify::{ListKind, ListKinds};
use super::companions::Companions;
use super::lists::Lists;
use super::name_parts;
use super::names::Names;
use super::overrides::Claims;
use super::positions::{bucket, index32, slot, span};
use super::text_index::TextIndex;
use super::{LayerMap, LayersError};
use crate::footprint::{Held, PeakMeter};

/// "None yet", in the flat arrays.
const NONE: u32 = u32::MAX;

/// Results of the earlier steps.
#[derive(Clone, Copy)]
pub(super) struct Inputs<'a> {
    pub(super) names: Names<'a>,
    pub(super) map: &'a LayerMap,
    pub(super) lists: &'a Lists<'a>,
    pub(super) kinds: &'a ListKinds,
    pub(super) companions: &'a Companions,
}

/// A layer before it has a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Draft {
    /// A child of a list that is a stack.
    Member {
        /// The child.
        child: u32,
    },
    /// A group outside every stack: a prefix of the name of one of its tensors.
    Rest {
        /// The tensor.
        sample: u32,
        /// Length of the prefix.
        path_len: u32,
    },
    /// A group of the override.
    Given {
        /// Its position in the override.
        group: u32,
    },
}

/// The layers with their tensors, not yet in order.
pub(super) struct Drafts<'a> {
    pub(super) inputs: Inputs<'a>,
    pub(super) list: Vec<Draft>,
    /// The draft of each tensor.
    pub(super) of_tensor: Vec<u32>,
    /// The tensors of each draft, ascending.
    tensors: Vec<u32>,
    starts: Vec<u32>,
}

/// Drafts while tensors are assigned, with indices to find the draft of a tensor.
struct Assignment<'a> {
    inputs: Inputs<'a>,
    containers: Containers<'a>,
    list: Vec<Draft>,
    by_child: Vec<u32>,
    by_group: Vec<u32>,
    by_path: TextIndex,
}

impl<'a> Assignment<'a> {
    fn new(inputs: Inputs<'a>) -> Self {
        Self {
            inputs,
            containers: Containers::of(inputs.lists, inputs.kinds),
            list: Vec::new(),
            by_child: vec![NONE; inputs.lists.child_count()],
            by_group: vec![NONE; inputs.map.groups.len()],
            by_path: TextIndex::default(),
        }
    }

    /// The draft of a tensor that is no companion.
    fn draft(&mut self, tensor: u32, group: Option<u32>) -> u32 {
        let Inputs { names, lists, kinds, .. } = self.inputs;
        let is_stack = |child: u32| matches!(kinds.of(lists.child(child).list), ListKind::Stack(_));
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
        let Self { inputs, list, by_path, .. } = self;
        // The index holds only groups outside every stack.
        let path_of = |list: &[Draft], draft: u32| inputs.id(list[slot(draft)]);
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

impl<'a> Inputs<'a> {
    /// The id of a draft's layer.
    pub(super) fn id(&self, draft: Draft) -> &'a str {
        match draft {
            Draft::Member { child } => self.lists.child_path(child),
            Draft::Rest { sample, path_len } => &self.names.name(sample)[..slot(path_len)],
            Draft::Given { group } => &self.map.groups[slot(group)].id.name,
        }
    }

    /// The stack of a draft, if it is a member of one.
    pub(super) fn stack(&self, draft: Draft) -> Option<u32> {
        match draft {
            Draft::Member { child } => Some(self.lists.child(child).list),
            Draft::Rest { .. } | Draft::Given { .. } => None,
        }
    }
}

impl<'a> Drafts<'a> {
    pub(super) fn assign(
        inputs: Inputs<'a>,
        claims: &Claims,
        meter: &mut PeakMeter,
    ) -> Result<Self, LayersError> {
        let mut assignment = Assignment::new(inputs);
        let mut of_tensor = vec![NONE; inputs.names.count()];
        for tensor in inputs.names.tensors().filter(|&tensor| inputs.companions.weight(tensor).is_none()) {
            of_tensor[slot(tensor)] = assignment.draft(tensor, claims.group(tensor));
        }
        for (companion, weight) in inputs.companions.pairs() {
            of_tensor[slot(companion)] = of_tensor[slot(weight)];
        }
        meter.note(assignment.held().list(&of_tensor));
        let mut list = assignment.list;
        list.shrink_to_fit();
        let (tensors, starts) =
            bucket(list.len(), (0..).zip(&of_tensor).map(|(tensor, &draft)| (draft, tensor)));
        let drafts = Self { inputs, list, of_tensor, tensors, starts };
        let held = Held::default().list(&drafts.list).list(&drafts.of_tensor);
        meter.keep(held.list(&drafts.tensors).list(&drafts.starts));
        drafts.check_ids(meter)?;
        Ok(drafts)
    }

    /// Checks that a group of the override does not take the id of another layer. Ids of the rule
    /// are prefixes and cannot collide.
    fn check_ids(&self, meter: &mut PeakMeter) -> Result<(), LayersError> {
        let groups = &self.inputs.map.groups;
        if groups.is_empty() {
            return Ok(());
        }
        let id = |draft: u32| self.inputs.id(self.list[slot(draft)]);
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
}

/// The containers of all stacks, which decide the depth of groups outside of them.
struct Containers<'a> {
    /// Paths of the stacks, sorted bytewise. The path that shares most with a name is next to it.
    stacks: Vec<&'a str>,
}

impl<'a> Containers<'a> {
    fn of(lists: &Lists<'a>, kinds: &ListKinds) -> Self {
        let mut stacks: Vec<_> = (0..index32(lists.count()))
            .filter(|&list| matches!(kinds.of(list), ListKind::Stack(_)))
            .map(|list| lists.path(list))
            .collect();
        stacks.sort_unstable();
        Self { stacks }
    }

    /// The group of a tensor outside every stack: the deepest container of a stack around it, and
    /// one component more. A parameter directly in such a container belongs to the container's own
    /// group.
    fn group_path<'n>(&self, name: &'n str) -> &'n str {
        let at = self.stacks.partition_point(|stack| *stack < name);
        let neighbours = [at.checked_sub(1), Some(at)].into_iter().flatten();
        let shared = neighbours
            .filter_map(|at| self.stacks.get(at))
            .map(|stack| proper_container(stack, name))
            .max()
            .unwrap_or(0);
        let body = name_parts::body_start(name);
        let from = if shared > body { shared + 1 } else { body };
        match name[from..].find('.') {
            Some(length) => &name[..from + length],
            None if shared > body => &name[..shared],
            None => name,
        }
    }
}

/// Length of the deepest container of both that is neither of them.
fn proper_container(stack: &str, name: &str) -> usize {
    let shared = name_parts::common_container(stack, name);
    if shared < stack.len() && shared < name.len() {
        return shared;
    }
    stack.as_bytes()[..shared].iter().rposition(|&byte| byte == b'.').unwrap_or(0)
}
