//! Finds the numbered lists in tensor names, with their children and the tensors below each child.
//!
//! `model.layers.7.mlp.experts.3.w1` is below child `7` of list `model.layers.` and below child `3`
//! of list `model.layers.7.mlp.experts.`. Everything is an offset into the names, in flat arrays: 4
//! bytes per tensor and list around it, about 20 per child. `classify.rs` decides which list is a
//! stack.

use std::cmp::Ordering;

use super::name_parts;
use super::names::Names;
use super::positions::{bucket, index32, slot, span};
use super::text_index::TextIndex;
use crate::footprint::{Held, PeakMeter};

/// The most numbered components of a name that are examined, from the left: enough for an expert of
/// a block of a stage of one of two towers. The bound keeps hostile names (thousands of numbers)
/// linear.
pub(super) const LEVELS_MAX: usize = 4;

/// "No child": the list is inside no other list.
pub(super) const NO_CHILD: u32 = u32::MAX;

/// One numbered list.
#[derive(Debug)]
pub(super) struct List {
    /// A tensor below it. The first `prefix_len` bytes of its name are the list's prefix, separator
    /// included.
    sample: u32,
    prefix_len: u32,
    /// The child of an outer list around this list, or [`NO_CHILD`].
    pub(super) parent: u32,
    /// Number of lists around it.
    pub(super) level: u8,
    /// Its children were found in natural order, so that the last one has the highest index.
    is_ascending: bool,
    /// The child that was found last.
    last: u32,
}

/// One element of a list.
#[derive(Debug)]
pub(super) struct Child {
    /// The list it belongs to.
    pub(super) list: u32,
    sample: u32,
    /// End of the index in the names of its tensors.
    path_len: u32,
}

/// All lists of a set of names.
#[derive(Debug)]
pub(super) struct Lists<'a> {
    names: Names<'a>,
    lists: Vec<List>,
    children: Vec<Child>,
    /// The children around each tensor, outermost first.
    levels: Vec<u32>,
    level_starts: Vec<u32>,
    /// Children of each list, in natural order.
    members: Vec<u32>,
    member_starts: Vec<u32>,
    /// Tensors below each child, ascending.
    tensors: Vec<u32>,
    tensor_starts: Vec<u32>,
}

impl<'a> Lists<'a> {
    /// Finds the lists in all names for which `takes_part` is true.
    pub(super) fn find(names: Names<'a>, takes_part: impl Fn(u32) -> bool, meter: &mut PeakMeter) -> Self {
        let mut builder = Builder::new(names);
        let mut level_starts = Vec::with_capacity(names.count() + 1);
        level_starts.push(0);
        for tensor in names.tensors() {
            if takes_part(tensor) {
                builder.add(names.name(tensor), tensor);
            }
            level_starts.push(index32(builder.levels.len()));
        }
        meter.note(builder.held().list(&level_starts));
        let Builder { mut lists, mut children, mut levels, .. } = builder;
        lists.shrink_to_fit();
        children.shrink_to_fit();
        levels.shrink_to_fit();
        let (members, member_starts) = bucket(
            lists.len(),
            (0..).zip(&children).map(|(child, entry): (u32, &Child)| (entry.list, child)),
        );
        let (tensors, tensor_starts) = bucket(
            children.len(),
            names.tensors().flat_map(|tensor| {
                let range = span(&level_starts, slot(tensor));
                levels[range].iter().map(move |&child| (child, tensor))
            }),
        );
        let mut found = Self {
            names,
            lists,
            children,
            levels,
            level_starts,
            members,
            member_starts,
            tensors,
            tensor_starts,
        };
        found.sort_members();
        meter.keep(found.held());
        found
    }

    /// Brings the children of every list into natural order.
    fn sort_members(&mut self) {
        let Self { names, lists, children, members, member_starts, .. } = self;
        let index = |child: u32| index_of(*names, lists, &children[slot(child)]);
        for (at, _) in lists.iter().enumerate().filter(|(_, list)| !list.is_ascending) {
            members[span(member_starts, at)]
                .sort_unstable_by(|&left, &right| name_parts::compare_indices(index(left), index(right)));
        }
    }

    /// Memory of the lists.
    fn held(&self) -> Held {
        let flat = [
            &self.levels,
            &self.level_starts,
            &self.members,
            &self.member_starts,
            &self.tensors,
            &self.tensor_starts,
        ];
        let flat = flat.into_iter().fold(Held::default(), Held::list);
        flat.list(&self.lists).list(&self.children)
    }

    /// Number of lists.
    pub(super) fn count(&self) -> usize {
        self.lists.len()
    }

    /// Number of children of all lists together.
    pub(super) fn child_count(&self) -> usize {
        self.children.len()
    }

    /// One list.
    pub(super) fn list(&self, list: u32) -> &List {
        &self.lists[slot(list)]
    }

    /// One child.
    pub(super) fn child(&self, child: u32) -> &Child {
        &self.children[slot(child)]
    }

    /// The prefix of a list with its separator: `model.layers.`, `vae/`, or "" at the root.
    pub(super) fn prefix(&self, list: u32) -> &'a str {
        let entry = self.list(list);
        &self.names.name(entry.sample)[..slot(entry.prefix_len)]
    }

    /// The prefix of a list without its separator: `model.layers`.
    pub(super) fn path(&self, list: u32) -> &'a str {
        name_parts::path_of_prefix(self.prefix(list))
    }

    /// The full prefix of a child: `model.layers.7`.
    pub(super) fn child_path(&self, child: u32) -> &'a str {
        self.child(child).path(self.names)
    }

    /// Children of a list in natural order.
    pub(super) fn children(&self, list: u32) -> &[u32] {
        &self.members[span(&self.member_starts, slot(list))]
    }

    /// Tensors below a child, ascending.
    pub(super) fn tensors(&self, child: u32) -> &[u32] {
        &self.tensors[span(&self.tensor_starts, slot(child))]
    }

    /// The children around a tensor, outermost first.
    pub(super) fn around(&self, tensor: u32) -> &[u32] {
        &self.levels[span(&self.level_starts, slot(tensor))]
    }

    /// The part of a tensor's name behind the child's index.
    pub(super) fn suffix(&self, child: u32, tensor: u32) -> &'a str {
        name_parts::suffix_after(self.names.name(tensor), slot(self.child(child).path_len))
    }

    /// The shape of a tensor, if it is known.
    pub(super) fn shape(&self, tensor: u32) -> Option<&'a [u64]> {
        self.names.shape(tensor)
    }
}

impl Child {
    /// The full prefix: `model.layers.7`.
    fn path<'a>(&self, names: Names<'a>) -> &'a str {
        &names.name(self.sample)[..slot(self.path_len)]
    }
}

/// The digits of a child.
fn index_of<'a>(names: Names<'a>, lists: &[List], child: &Child) -> &'a [u8] {
    let prefix_len = slot(lists[slot(child.list)].prefix_len);
    &names.name(child.sample).as_bytes()[prefix_len..slot(child.path_len)]
}

/// A numbered component of the current name, from byte `start` to byte `end`.
#[derive(Clone, Copy)]
struct Level {
    start: usize,
    end: usize,
    child: u32,
}

struct Builder<'a> {
    names: Names<'a>,
    lists: Vec<List>,
    children: Vec<Child>,
    levels: Vec<u32>,
    list_of_prefix: TextIndex,
    /// Empty until a child must be looked up.
    child_of_path: TextIndex,
    is_indexed: bool,
    /// The previous name, and its levels.
    previous: &'a str,
    open: Vec<Level>,
}

impl<'a> Builder<'a> {
    fn new(names: Names<'a>) -> Self {
        Self {
            names,
            lists: Vec::new(),
            children: Vec::new(),
            levels: Vec::new(),
            list_of_prefix: TextIndex::default(),
            child_of_path: TextIndex::default(),
            is_indexed: false,
            previous: "",
            open: Vec::with_capacity(LEVELS_MAX),
        }
    }

    /// Records the children around a tensor. Neighbours in a file mostly share them, so the levels
    /// of the previous name are reused as far as the names agree.
    fn add(&mut self, name: &'a str, tensor: u32) {
        let agreed = name_parts::agreed_len(name.as_bytes(), self.previous.as_bytes());
        let kept = self.open.iter().take_while(|level| level.end < agreed).count();
        // The names agree up to its start, so a number that begins there is an element of the same
        // list.
        let sibling = self.open.get(kept).filter(|level| level.start <= agreed).copied();
        self.open.truncate(kept);
        self.previous = name;
        let dot = name.as_bytes()[..agreed].iter().rposition(|&byte| byte == b'.');
        let from = dot.map_or_else(|| name_parts::body_start(name), |dot| dot + 1);
        for (start, end) in name_parts::numbered(name, from).take(LEVELS_MAX - kept) {
            let list = match sibling.filter(|sibling| sibling.start == start) {
                Some(sibling) => self.children[slot(sibling.child)].list,
                None => self.list(name, tensor, start),
            };
            let child = self.child(name, tensor, list, end);
            self.open.push(Level { start, end, child });
        }
        self.levels.extend(self.open.iter().map(|level| level.child));
    }

    /// The child of a list whose index ends at byte `end` of `name`.
    fn child(&mut self, name: &str, sample: u32, list: u32, end: usize) -> u32 {
        let next = index32(self.children.len());
        let &List { last, is_ascending, prefix_len, .. } = &self.lists[slot(list)];
        let order = self.children.get(slot(last)).map(|last| {
            let index = &name.as_bytes()[slot(prefix_len)..end];
            name_parts::compare_indices(index, index_of(self.names, &self.lists, last))
        });
        if order == Some(Ordering::Equal) {
            return last;
        }
        // Greater than all of them, so it is new.
        let is_new = is_ascending && order != Some(Ordering::Less);
        if !is_new {
            self.index_all();
        }
        if let Some(known) = self.find_or_note(&name[..end], next) {
            return known;
        }
        self.children.push(Child { list, sample, path_len: index32(end) });
        let list = &mut self.lists[slot(list)];
        (list.last, list.is_ascending) = (next, is_new);
        next
    }

    /// Indexes all children, so that they can be looked up.
    fn index_all(&mut self) {
        if std::mem::replace(&mut self.is_indexed, true) {
            return;
        }
        let Self { names, children, child_of_path, .. } = self;
        for child in 0..index32(children.len()) {
            child_of_path.insert(child, |child| children[slot(child)].path(*names));
        }
    }

    /// The child with this path, or `None` after recording `next` for it. Does nothing while
    /// children are not indexed.
    fn find_or_note(&mut self, path: &str, next: u32) -> Option<u32> {
        let Self { names, children, child_of_path, .. } = self;
        if !self.is_indexed {
            return None;
        }
        child_of_path.find_or_insert(path, next, |child| children[slot(child)].path(*names))
    }

    /// The list whose prefix is the first `prefix_len` bytes of `name`, inside the open levels.
    fn list(&mut self, name: &str, sample: u32, prefix_len: usize) -> u32 {
        let Self { names, lists, .. } = self;
        let prefix_of = |list: u32| {
            let entry = &lists[slot(list)];
            &names.name(entry.sample)[..slot(entry.prefix_len)]
        };
        let next = index32(lists.len());
        if let Some(list) = self.list_of_prefix.find_or_insert(&name[..prefix_len], next, prefix_of) {
            return list;
        }
        let parent = self.open.last().map_or(NO_CHILD, |level| level.child);
        let level = u8::try_from(self.open.len()).expect("LEVELS_MAX fits in a byte");
        let (is_ascending, last) = (true, NO_CHILD);
        self.lists.push(List { sample, prefix_len: index32(prefix_len), parent, level, is_ascending, last });
        next
    }

    fn held(&self) -> Held {
        let lists =
            Held::default().grown_list(&self.lists).grown_list(&self.children).grown_list(&self.levels);
        lists.grown(self.list_of_prefix.bytes()).grown(self.child_of_path.bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layers::NamedShape;

    fn found<'a>(entries: &'a [NamedShape<'a>]) -> Lists<'a> {
        Lists::find(Names::Listed(entries), |_| true, &mut PeakMeter::default())
    }

    fn named<'a>(names: &[&'a str]) -> Vec<NamedShape<'a>> {
        names.iter().map(|&name| NamedShape { name, shape: None }).collect()
    }

    #[test]
    fn nested_lists_know_each_other() {
        let entries = named(&["m.0.e.1.w", "m.0.e.0.w", "m.10.e.0.w", "m.9.x", "x", "m.0.e.1.v"]);
        let lists = found(&entries);
        let paths: Vec<_> = (0..index32(lists.count())).map(|list| lists.path(list)).collect();
        assert_eq!(paths, ["m", "m.0.e", "m.10.e"]);
        let children: Vec<_> = lists.children(0).iter().map(|&child| lists.child_path(child)).collect();
        assert_eq!(children, ["m.0", "m.9", "m.10"]);
        assert_eq!(lists.tensors(lists.children(0)[0]), [0, 1, 5]);
        assert_eq!(lists.list(0).parent, NO_CHILD);
        assert_eq!(lists.child_path(lists.list(2).parent), "m.10");
        assert_eq!(lists.around(4), [0_u32; 0]);
        assert_eq!(lists.suffix(lists.children(0)[0], 1), "e.0.w");
    }

    #[test]
    fn children_are_found_again_in_whatever_order_they_come() {
        let indices = ["2", "10", "10", "2", "3", "010", "10", "11", "9", "2", "12", "0", "12", "010"];
        let texts: Vec<String> =
            indices.iter().enumerate().map(|(at, index)| format!("x.{at}.h.{index}.w{at}")).collect();
        let mixed: Vec<String> =
            indices.iter().enumerate().map(|(at, index)| format!("h.{index}.w{at}")).collect();
        for texts in [mixed, texts] {
            let entries = named(&texts.iter().map(String::as_str).collect::<Vec<_>>());
            let lists = found(&entries);
            for tensor in 0..index32(texts.len()) {
                let children = lists.around(tensor);
                let name = &texts[slot(tensor)];
                for &child in children {
                    assert!(name.starts_with(&format!("{}.", lists.child_path(child))), "{name}");
                    assert!(lists.tensors(child).contains(&tensor));
                }
                assert_eq!(children.len(), name.split('.').filter(|part| part.parse::<u8>().is_ok()).count());
            }
            let paths: Vec<_> = lists.children(0).iter().map(|&child| lists.child_path(child)).collect();
            let mut distinct = paths.clone();
            distinct.dedup();
            assert_eq!(paths, distinct, "each once");
            if paths[0].starts_with('h') {
                assert_eq!(paths, ["h.0", "h.2", "h.3", "h.9", "h.10", "h.010", "h.11", "h.12"]);
            }
        }
    }

    #[test]
    fn depth_is_bounded() {
        let name = vec!["1"; 10_000].join(".");
        let entries = named(&[&name, &name[..1]]);
        let lists = found(&entries);
        assert_eq!(lists.around(0).len(), LEVELS_MAX);
        assert_eq!(lists.around(1), [0]);
    }
}
