//! The default order of execution: groups in front of the stacks, the stacks, groups behind them.
//!
//! Layers form a tree of containers (`model` holds `embed_tokens`, `layers` and `norm`), and
//! siblings are sorted at every node. `role.rs` tells the position of a group among its siblings.
//! An override can replace the order. The components of a pipeline stay apart.

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::ops::Range;

use super::name_parts;
use super::positions::{index32, slot};
use super::role::{Flow, Role, words};
use super::text_index::TextIndex;
use crate::footprint::{Held, PeakMeter, list_bytes};

/// The most tensors of a group, and widths of a container, that are examined.
const LOOK_MAX: usize = 64;

/// A stack or a group, to be put in order.
#[derive(Clone, Copy, Debug)]
pub(super) struct Item<'a> {
    /// The path of the stack or group.
    pub(super) path: &'a str,
    /// True for a stack.
    pub(super) is_stack: bool,
    /// The first file that holds a part of it; 0 if files are unknown.
    pub(super) first_shard: u32,
}

/// Shapes of tensors, which the order depends on.
pub(super) trait Shapes {
    /// Shapes of an item's tensors: those of a stack's first member, or of a whole group.
    fn shapes(&self, item: u32) -> impl Iterator<Item = Option<&[u64]>>;
}

/// Positions of `items` in the default order. The meter counts the result as kept.
pub(super) fn order(items: &[Item<'_>], shapes: &impl Shapes, meter: &mut PeakMeter) -> Vec<u32> {
    let mut sorted: Vec<u32> = (0..index32(items.len())).collect();
    let split = |item: u32| {
        let path = items[slot(item)].path;
        path.split_at(name_parts::body_start(path))
    };
    sorted.sort_unstable_by(|&left, &right| {
        let ((left_component, left_body), (right_component, right_body)) = (split(left), split(right));
        (name_parts::compare_natural(left_component, right_component))
            .then_with(|| compare_paths(left_body, right_body))
            .then_with(|| left.cmp(&right))
    });
    let mut ordered = Vec::with_capacity(items.len());
    meter.keep(Held::default().list(&ordered).list(&sorted));
    for component in sorted.chunk_by(|&left, &right| split(left).0 == split(right).0) {
        Tree::of(items, component, shapes, meter).walk(&mut ordered, meter);
    }
    meter.release(list_bytes(&sorted));
    ordered
}

/// Compares paths component by component, so that everything below a container is contiguous.
fn compare_paths(left: &str, right: &str) -> Ordering {
    let key = |byte: u8| if byte == b'.' { 0 } else { u16::from(byte) + 1 };
    left.bytes().map(key).cmp(right.bytes().map(key))
}

/// "No node", "no item".
const NONE: u32 = u32::MAX;

/// A container, or an item at a leaf. There may be a million nodes, so their lists are ranges of
/// shared arrays.
#[derive(Debug)]
struct Node {
    /// Length of the container's path; one more than the path for a leaf.
    depth: u32,
    /// The item of a leaf, or [`NONE`].
    item: u32,
    /// Some item below, for the node's name.
    sample: u32,
    /// The children, in the order in which they were attached.
    child_first: u32,
    child_last: u32,
    /// The next child of the same container.
    next: u32,
    /// Lengths of the vectors of the stacks below: the widths of the activations between layers.
    widths: (u32, u32),
    /// Widths of the embedding tables directly in this container, to find the stack that reads
    /// them.
    vocabularies: (u32, u32),
    first_shard: u32,
    /// Longest dimension in the stacks below.
    dimension_max: u64,
    has_stack: bool,
    /// Holds an embedding table longer than any dimension of its layers.
    has_vocabulary: bool,
    role: Option<Role>,
}

impl Node {
    fn new(depth: usize, item: u32, sample: u32) -> Self {
        Self {
            depth: index32(depth),
            item,
            sample,
            child_first: NONE,
            child_last: NONE,
            next: NONE,
            widths: (0, 0),
            vocabularies: (0, 0),
            first_shard: 0,
            dimension_max: 0,
            has_stack: false,
            has_vocabulary: false,
            role: None,
        }
    }
}

struct Tree<'a> {
    items: &'a [Item<'a>],
    nodes: Vec<Node>,
    root: u32,
    widths: Vec<u64>,
    vocabularies: Vec<u64>,
}

fn range((start, end): (u32, u32)) -> Range<usize> {
    slot(start)..slot(end)
}

impl<'a> Tree<'a> {
    /// The tree of one component, whose items come sorted by path.
    fn of(items: &'a [Item<'a>], sorted: &[u32], shapes: &impl Shapes, meter: &mut PeakMeter) -> Self {
        let mut nodes = Vec::with_capacity(sorted.len() + 1);
        nodes.push(Node::new(0, NONE, 0));
        let mut tree = Self { items, nodes, root: 0, widths: Vec::new(), vocabularies: Vec::new() };
        let mut open = vec![0_u32];
        let mut previous: Option<u32> = None;
        for &item in sorted {
            let agreed =
                previous.map_or(0, |other| name_parts::common_container(tree.body(other), tree.body(item)));
            tree.close(&mut open, agreed);
            let depth = tree.body(item).len() + 1;
            open.push(tree.push(Node::new(depth, item, item)));
            previous = Some(item);
        }
        tree.close(&mut open, 0);
        meter.note(tree.held().grown_list(&open));
        drop(open);
        tree.measure(shapes, meter);
        tree
    }

    fn held(&self) -> Held {
        Held::default().grown_list(&self.nodes).grown_list(&self.widths).grown_list(&self.vocabularies)
    }

    fn body(&self, item: u32) -> &'a str {
        let path = self.items[slot(item)].path;
        &path[name_parts::body_start(path)..]
    }

    fn push(&mut self, node: Node) -> u32 {
        self.nodes.push(node);
        index32(self.nodes.len() - 1)
    }

    fn node(&mut self, node: u32) -> &mut Node {
        &mut self.nodes[slot(node)]
    }

    /// The children of a container, in the order in which they were attached.
    fn children(&self, node: u32) -> impl Iterator<Item = u32> + '_ {
        let known = |child: u32| (child != NONE).then_some(child);
        let first = known(self.nodes[slot(node)].child_first);
        std::iter::successors(first, move |&child| known(self.nodes[slot(child)].next))
    }

    fn attach(&mut self, container: u32, child: u32) {
        let last = std::mem::replace(&mut self.node(container).child_last, child);
        if last == NONE {
            self.node(container).child_first = child;
        } else {
            self.node(last).next = child;
        }
    }

    /// The item of a leaf.
    fn item(&self, node: u32) -> Option<u32> {
        Some(self.nodes[slot(node)].item).filter(|&item| item != NONE)
    }

    /// Attaches every open node deeper than `depth` to its container, which is created if missing.
    fn close(&mut self, open: &mut Vec<u32>, depth: usize) {
        let depth_of = |nodes: &[Node], node: u32| slot(nodes[slot(node)].depth);
        let mut last: Option<u32> = None;
        while let Some(node) = open.pop_if(|node| depth_of(&self.nodes, *node) > depth) {
            if let Some(child) = last.replace(node) {
                self.attach(node, child);
            }
        }
        let Some(child) = last else { return };
        let mut container = *open.last().expect("the root has depth 0 and stays open");
        if depth_of(&self.nodes, container) < depth {
            let sample = self.nodes[slot(child)].sample;
            container = self.push(Node::new(depth, NONE, sample));
            open.push(container);
        }
        self.attach(container, child);
    }

    /// Nodes from the root down, each container before its children.
    fn downwards(&self) -> Vec<u32> {
        let mut nodes = Vec::with_capacity(self.nodes.len());
        nodes.push(self.root);
        let mut at = 0;
        while let Some(&node) = nodes.get(at) {
            nodes.extend(self.children(node));
            at += 1;
        }
        nodes
    }

    fn measure(&mut self, shapes: &impl Shapes, meter: &mut PeakMeter) {
        let downwards = self.downwards();
        for &node in downwards.iter().rev() {
            self.measure_stacks(node, shapes);
        }
        for &node in &downwards {
            let is_outside = self.nodes[slot(node)].depth == 0 && self.is_wrapped(node);
            let has_several_stacks = self.stack_holders(node).nth(1).is_some();
            let start = index32(self.vocabularies.len());
            let mut next = self.nodes[slot(node)].child_first;
            while next != NONE {
                self.measure_group(node, next, is_outside, has_several_stacks, shapes);
                next = self.nodes[slot(next)].next;
            }
            self.node(node).vocabularies = (start, index32(self.vocabularies.len()));
        }
        for &node in downwards.iter().rev() {
            let any = self.children(node).any(|child| self.nodes[slot(child)].has_vocabulary);
            self.node(node).has_vocabulary |= any;
        }
        meter.note(self.held().list(&downwards));
    }

    /// Fills in the fields of a node that depend on the stacks below it.
    fn measure_stacks(&mut self, node: u32, shapes: &impl Shapes) {
        // Ordered, so that the same names give the same order in every run.
        let mut widths: BTreeSet<u64> = BTreeSet::new();
        let mut dimension_max = 0;
        let mut has_stack = false;
        let mut first_shard = u32::MAX;
        for child in self.children(node).map(|child| &self.nodes[slot(child)]) {
            let room = LOOK_MAX.saturating_sub(widths.len());
            widths.extend(self.widths[range(child.widths)].iter().take(room));
            dimension_max = dimension_max.max(child.dimension_max);
            has_stack |= child.has_stack;
            first_shard = first_shard.min(child.first_shard);
        }
        if let Some(item) = self.item(node) {
            let entry = self.items[slot(item)];
            first_shard = entry.first_shard;
            has_stack = entry.is_stack;
            for shape in shapes.shapes(item).flatten().filter(|_| entry.is_stack) {
                dimension_max = shape.iter().copied().fold(dimension_max, u64::max);
                if let [length] = *shape
                    && length > 1
                    && widths.len() < LOOK_MAX
                {
                    widths.insert(length);
                }
            }
        }
        let start = index32(self.widths.len());
        self.widths.extend(widths);
        let widths = (start, index32(self.widths.len()));
        let entry = self.node(node);
        (entry.widths, entry.dimension_max) = (widths, dimension_max);
        (entry.has_stack, entry.first_shard) = (has_stack, first_shard);
    }

    /// Fills in the role of the group `child` in its container `node`, and whether it holds a
    /// vocabulary.
    fn measure_group(
        &mut self,
        node: u32,
        child: u32,
        is_outside: bool,
        has_several_stacks: bool,
        shapes: &impl Shapes,
    ) {
        let Some(item) = self.item(child).filter(|&item| !self.items[slot(item)].is_stack) else {
            return;
        };
        let container = &self.nodes[slot(node)];
        let widths = &self.widths[range(container.widths)];
        let flow = Flow::of(widths, container.dimension_max, shapes.shapes(item).take(LOOK_MAX));
        let path = self.body(item);
        let name = path.get(slot(container.depth)..).unwrap_or("").to_ascii_lowercase();
        let vocabulary_width = flow.vocabulary_width;
        self.vocabularies.extend(vocabulary_width);
        let entry = self.node(child);
        entry.role = Some(flow.role(&name, is_outside, has_several_stacks));
        entry.has_vocabulary = vocabulary_width.is_some();
    }

    /// The children of a container that hold stacks.
    fn stack_holders(&self, node: u32) -> impl Iterator<Item = u32> + '_ {
        self.children(node).filter(|&child| self.nodes[slot(child)].has_stack)
    }

    /// True if all stacks below `node` are in a single container below it. Then the groups beside
    /// that container were put on top of it.
    fn is_wrapped(&self, node: u32) -> bool {
        let mut holders = self.stack_holders(node);
        match (holders.next(), holders.next()) {
            (Some(only), None) => self.item(only).is_none_or(|item| self.body(item).contains('.')),
            _ => false,
        }
    }

    /// Appends the items of the tree in order.
    fn walk(self, ordered: &mut Vec<u32>, meter: &mut PeakMeter) {
        let mut open = vec![self.root];
        while let Some(node) = open.pop() {
            ordered.extend(self.item(node));
            let sorted = self.sorted(node, meter);
            open.extend(sorted.iter().rev().map(|key| key.child));
            meter.note(self.held().list(&sorted).grown_list(&open));
        }
    }

    /// True if `node` is a stack beside a vocabulary of its width: it reads tokens.
    fn reads_vocabulary(&self, container: u32, node: u32) -> bool {
        let widths = &self.vocabularies[range(self.nodes[slot(container)].vocabularies)];
        let own = &self.widths[range(self.nodes[slot(node)].widths)];
        self.item(node).is_some() && widths.iter().any(|width| own.contains(width))
    }

    /// The name of a node in its container, which has depth `depth`.
    fn name(&self, depth: u32, node: u32) -> &'a str {
        let path = self.body(self.nodes[slot(node)].sample);
        path.get(slot(depth)..).unwrap_or("").trim_start_matches('.')
    }

    /// The children of a container in order.
    fn sorted(&self, container: u32, meter: &mut PeakMeter) -> Vec<Key> {
        let depth = self.nodes[slot(container)].depth;
        let name = |child: u32| self.name(depth, child);
        let mut stack_names = TextIndex::default();
        for child in self.stack_holders(container) {
            if stack_names.find(name(child), name).is_none() {
                stack_names.insert(child, name);
            }
        }
        let mut keyed = Vec::with_capacity(self.children(container).count());
        keyed.extend(self.children(container).map(|child| {
            let node = &self.nodes[slot(child)];
            let has_stack = node.has_stack;
            let plain_start = match has_stack {
                true => plain_start(name(child), |plain| stack_names.find(plain, name).is_some()),
                false => 0,
            };
            Key {
                role: node.role.unwrap_or(Role::Middle),
                is_decoder: has_stack && name(child).contains(words::DECODER),
                tokens_last: has_stack && (node.has_vocabulary || self.reads_vocabulary(container, child)),
                has_no_stack: !has_stack,
                shard: if has_stack { node.first_shard } else { 0 },
                plain_start: index32(plain_start),
                child,
            }
        }));
        meter.note(self.held().list(&keyed).grown(stack_names.bytes()));
        keyed.sort_unstable_by(|left, right| {
            let (left_name, right_name) = (name(left.child), name(right.child));
            let plain = |key: &Key, name: &'a str| &name[slot(key.plain_start)..];
            (left.rank().cmp(&right.rank()))
                .then_with(|| name_parts::compare_natural(plain(left, left_name), plain(right, right_name)))
                .then_with(|| left_name.len().cmp(&right_name.len()))
                .then_with(|| name_parts::compare_natural(left_name, right_name))
                .then_with(|| left.child.cmp(&right.child))
        });
        keyed
    }
}

/// The sort key of a child, before its name.
struct Key {
    role: Role,
    is_decoder: bool,
    tokens_last: bool,
    has_no_stack: bool,
    shard: u32,
    /// Start of the plain part of the name.
    plain_start: u32,
    child: u32,
}

impl Key {
    fn rank(&self) -> (Role, bool, bool, bool, u32) {
        (self.role, self.is_decoder, self.tokens_last, self.has_no_stack, self.shard)
    }
}

/// Start of a sibling stack's name inside `name`, else 0: `single_transformer_blocks` contains
/// `transformer_blocks` and comes after it.
fn plain_start(name: &str, is_sibling: impl Fn(&str) -> bool) -> usize {
    let starts = name.rmatch_indices('_').take(8).map(|(at, _)| at + 1);
    starts.into_iter().find(|&start| is_sibling(&name[start..])).unwrap_or(0)
}
