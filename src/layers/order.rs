//! The default order of execution: what is in front of the stacks, the stacks, what is behind them.
//!
//! Layers form a tree of containers (`model` holds `embed_tokens`, `layers` and `norm`); siblings are sorted at every
//! node. Where a group stands is read from shapes as far as possible: a matrix that maps into the width of the
//! stacks is in front, one that maps out of it is behind, a group of vectors is a closing norm. Words decide only
//! what shapes cannot: see [`words`]. It is a default; an override replaces it. Pipelines keep their components apart.

use std::cmp::Ordering;
use std::collections::{BTreeSet, HashSet};

use super::lists::{index32, slot};
use super::names;

/// The words that settle what names and shapes leave open.
mod words {
    /// In front: an embedding has the shape of a head.
    pub(super) const FRONT: &str = "emb";
    /// Behind.
    pub(super) const BACK: [&str; 3] = ["head", "out", "final"];
    /// Behind, and before a head.
    pub(super) const NORM: &str = "norm";
    /// After its encoder.
    pub(super) const DECODER: &str = "decoder";
}

/// How many tensors of a group, and how many widths of a container, are looked at.
const LOOK_MAX: usize = 64;

/// A stack or a group, to be put in order.
#[derive(Clone, Copy, Debug)]
pub(super) struct Item<'a> {
    /// Where it is: the path of the stack, or of the group.
    pub(super) path: &'a str,
    /// True for a stack.
    pub(super) is_stack: bool,
    /// The first file that holds a part of it; 0 where files are unknown.
    pub(super) first_shard: u32,
}

/// What the order needs to know of the tensors.
pub(super) trait Shapes {
    /// Shapes of the tensors of an item: of the first member of a stack, of all of a group.
    fn shapes(&self, item: usize) -> impl Iterator<Item = Option<&[u64]>>;
}

/// Where a group stands among its siblings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Role {
    Front,
    Middle,
    Norm,
    Back,
}

/// Positions of `items` in the default order.
pub(super) fn order(items: &[Item<'_>], shapes: &impl Shapes) -> Vec<u32> {
    let mut sorted: Vec<u32> = (0..index32(items.len())).collect();
    let split = |item: u32| {
        let path = items[slot(item)].path;
        path.split_at(names::body_start(path))
    };
    sorted.sort_by(|&left, &right| {
        let ((left_component, left_body), (right_component, right_body)) = (split(left), split(right));
        (names::compare_natural(left_component, right_component))
            .then_with(|| compare_paths(left_body, right_body))
            .then_with(|| left.cmp(&right))
    });
    let mut ordered = Vec::with_capacity(items.len());
    for component in sorted.chunk_by(|&left, &right| split(left).0 == split(right).0) {
        Tree::of(items, component, shapes).walk(&mut ordered);
    }
    ordered
}

/// Compares paths component by component, so that everything below a container is in one run.
fn compare_paths(left: &str, right: &str) -> Ordering {
    let key = |byte: u8| if byte == b'.' { 0 } else { u16::from(byte) + 1 };
    left.bytes().map(key).cmp(right.bytes().map(key))
}

/// A container, or an item at a leaf.
#[derive(Debug, Default)]
struct Node {
    /// Length of the container's path; one more than the path for a leaf.
    depth: usize,
    item: Option<u32>,
    /// Some item below, for the node's name.
    sample: u32,
    children: Vec<u32>,
    /// Lengths of the vectors of the stacks below: the widths that layers speak to each other in.
    widths: Vec<u64>,
    /// Longest dimension in the stacks below.
    dimension_max: u64,
    has_stack: bool,
    /// Holds an embedding table longer than any dimension of its layers.
    has_vocabulary: bool,
    /// Width of the vocabularies right in this container, to find the stack that reads them.
    vocabulary_widths: Vec<u64>,
    first_shard: u32,
    role: Option<Role>,
}

struct Tree<'a> {
    items: &'a [Item<'a>],
    nodes: Vec<Node>,
    root: u32,
}

impl<'a> Tree<'a> {
    /// The tree of one component, whose items come sorted by path.
    fn of(items: &'a [Item<'a>], sorted: &[u32], shapes: &impl Shapes) -> Self {
        let mut tree = Self { items, nodes: vec![Node::default()], root: 0 };
        let mut open = vec![0_u32];
        let mut previous: Option<u32> = None;
        for &item in sorted {
            let agreed =
                previous.map_or(0, |other| names::common_container(tree.body(other), tree.body(item)));
            tree.close(&mut open, agreed);
            let depth = tree.body(item).len() + 1;
            open.push(tree.push(Node { depth, item: Some(item), sample: item, ..Node::default() }));
            previous = Some(item);
        }
        tree.close(&mut open, 0);
        tree.measure(shapes);
        tree
    }

    fn body(&self, item: u32) -> &'a str {
        let path = self.items[slot(item)].path;
        &path[names::body_start(path)..]
    }

    fn push(&mut self, node: Node) -> u32 {
        self.nodes.push(node);
        index32(self.nodes.len() - 1)
    }

    fn node(&mut self, node: u32) -> &mut Node {
        &mut self.nodes[slot(node)]
    }

    /// Attaches every open node deeper than `depth` to its container, which is made where it is missing.
    fn close(&mut self, open: &mut Vec<u32>, depth: usize) {
        let mut last: Option<u32> = None;
        while let Some(node) = open.pop_if(|node| self.nodes[slot(*node)].depth > depth) {
            if let Some(child) = last.replace(node) {
                self.node(node).children.push(child);
            }
        }
        let Some(child) = last else { return };
        let top = *open.last().expect("the root has depth 0 and stays open");
        if self.nodes[slot(top)].depth < depth {
            let sample = self.nodes[slot(child)].sample;
            open.push(self.push(Node { depth, sample, children: vec![child], ..Node::default() }));
        } else {
            self.node(top).children.push(child);
        }
    }

    /// Nodes from the root down, each container before its children.
    fn downwards(&self) -> Vec<u32> {
        let mut nodes = vec![self.root];
        let mut at = 0;
        while let Some(&node) = nodes.get(at) {
            nodes.extend(&self.nodes[slot(node)].children);
            at += 1;
        }
        nodes
    }

    fn measure(&mut self, shapes: &impl Shapes) {
        let downwards = self.downwards();
        for &node in downwards.iter().rev() {
            self.measure_stacks(node, shapes);
        }
        for &node in &downwards {
            let is_outside = self.nodes[slot(node)].depth == 0 && self.is_wrapped(node);
            let has_several_stacks = self.stack_holders(node).nth(1).is_some();
            for at in 0..self.nodes[slot(node)].children.len() {
                let child = self.nodes[slot(node)].children[at];
                self.measure_group(node, child, is_outside, has_several_stacks, shapes);
            }
        }
        for &node in downwards.iter().rev() {
            let children = &self.nodes[slot(node)].children;
            let any = children.iter().any(|&child| self.nodes[slot(child)].has_vocabulary);
            self.node(node).has_vocabulary |= any;
        }
    }

    /// What is known of a node from the stacks below it.
    fn measure_stacks(&mut self, node: u32, shapes: &impl Shapes) {
        let children = self.nodes[slot(node)].children.clone();
        // Ordered, so that the same names give the same order in every run.
        let mut widths: BTreeSet<u64> = BTreeSet::new();
        let mut dimension_max = 0;
        let mut has_stack = false;
        let mut first_shard = u32::MAX;
        for child in children.iter().map(|&child| &self.nodes[slot(child)]) {
            let room = LOOK_MAX.saturating_sub(widths.len());
            widths.extend(child.widths.iter().take(room));
            dimension_max = dimension_max.max(child.dimension_max);
            has_stack |= child.has_stack;
            first_shard = first_shard.min(child.first_shard);
        }
        if let Some(item) = self.nodes[slot(node)].item {
            let entry = self.items[slot(item)];
            first_shard = entry.first_shard;
            has_stack = entry.is_stack;
            for shape in shapes.shapes(slot(item)).flatten().filter(|_| entry.is_stack) {
                dimension_max = shape.iter().copied().fold(dimension_max, u64::max);
                if let [length] = *shape
                    && length > 1
                    && widths.len() < LOOK_MAX
                {
                    widths.insert(length);
                }
            }
        }
        let entry = self.node(node);
        *entry = Node {
            widths: widths.into_iter().collect(),
            dimension_max,
            has_stack,
            first_shard,
            ..std::mem::take(entry)
        };
    }

    /// Where the group `child` stands below its container `node`, and whether it holds a vocabulary.
    fn measure_group(
        &mut self,
        node: u32,
        child: u32,
        is_outside: bool,
        has_several_stacks: bool,
        shapes: &impl Shapes,
    ) {
        let Some(item) = self.nodes[slot(child)].item.filter(|&item| !self.items[slot(item)].is_stack) else {
            return;
        };
        let container = &self.nodes[slot(node)];
        let flow = Flow::of(container, shapes.shapes(slot(item)).take(LOOK_MAX));
        let path = self.body(item);
        let name = path.get(container.depth..).unwrap_or("").to_ascii_lowercase();
        let vocabulary_width = flow.vocabulary_width;
        self.node(node).vocabulary_widths.extend(vocabulary_width);
        let entry = self.node(child);
        entry.role = Some(flow.role(&name, is_outside, has_several_stacks));
        entry.has_vocabulary = vocabulary_width.is_some();
    }

    /// The children of a container that hold stacks.
    fn stack_holders(&self, node: u32) -> impl Iterator<Item = &Node> {
        let children = self.nodes[slot(node)].children.iter();
        children.map(|&child| &self.nodes[slot(child)]).filter(|child| child.has_stack)
    }

    /// True if all stacks below `node` are in one and the same container below it, so that what stands beside
    /// that container was put on top of it.
    fn is_wrapped(&self, node: u32) -> bool {
        let mut holders = self.stack_holders(node);
        match (holders.next(), holders.next()) {
            (Some(only), None) => only.item.is_none_or(|item| self.body(item).contains('.')),
            _ => false,
        }
    }

    /// Appends the items of the tree in order.
    fn walk(mut self, ordered: &mut Vec<u32>) {
        let mut open = vec![self.root];
        while let Some(node) = open.pop() {
            ordered.extend(self.nodes[slot(node)].item);
            let depth = self.nodes[slot(node)].depth;
            let children = std::mem::take(&mut self.node(node).children);
            open.extend(self.sorted(node, children, depth).into_iter().rev());
        }
    }

    /// True if `node` is a stack beside a vocabulary of its width: what reads tokens, not what feeds images to it.
    fn reads_vocabulary(&self, container: u32, node: &Node) -> bool {
        let widths = &self.nodes[slot(container)].vocabulary_widths;
        node.item.is_some() && widths.iter().any(|width| node.widths.contains(width))
    }

    fn sorted(&self, container: u32, children: Vec<u32>, depth: usize) -> Vec<u32> {
        if children.len() < 2 {
            return children;
        }
        let name = |at: usize| {
            let path = self.body(self.nodes[slot(children[at])].sample);
            path.get(depth..).unwrap_or("").trim_start_matches('.')
        };
        let stack_names: HashSet<&str> =
            (0..children.len()).filter(|&at| self.nodes[slot(children[at])].has_stack).map(name).collect();
        let mut keyed: Vec<_> = (children.iter().enumerate())
            .map(|(at, &child)| {
                let node = &self.nodes[slot(child)];
                let role = node.role.unwrap_or(Role::Middle);
                let is_decoder = node.has_stack && name(at).contains(words::DECODER);
                let tokens_last =
                    node.has_stack && (node.has_vocabulary || self.reads_vocabulary(container, node));
                let shard = if node.has_stack { node.first_shard } else { 0 };
                let plain = if node.has_stack { plain_name(name(at), &stack_names) } else { name(at) };
                ((role, is_decoder, tokens_last, !node.has_stack, shard), plain, name(at), child)
            })
            .collect();
        keyed.sort_by(|left, right| {
            (left.0.cmp(&right.0))
                .then_with(|| names::compare_natural(left.1, right.1))
                .then_with(|| left.2.len().cmp(&right.2.len()))
                .then_with(|| names::compare_natural(left.2, right.2))
                .then_with(|| left.3.cmp(&right.3))
        });
        keyed.into_iter().map(|(_, _, _, child)| child).collect()
    }
}

/// A sibling stack's name that `name` qualifies: `single_transformer_blocks` is `transformer_blocks`, qualified,
/// and comes after it. Else `name` itself.
fn plain_name<'n>(name: &'n str, siblings: &HashSet<&str>) -> &'n str {
    (name.rmatch_indices('_').take(8).map(|(at, _)| &name[at + 1..]))
        .find(|plain| siblings.contains(plain))
        .unwrap_or(name)
}

/// How the matrices of a group connect to the width of the stacks beside it.
#[derive(Default)]
struct Flow {
    maps_in: bool,
    maps_out: bool,
    /// It maps out and has a bias as long as its output: a linear layer, not a table.
    has_output_bias: bool,
    only_vectors: bool,
    is_known: bool,
    /// Width of a table longer than any dimension of the stacks.
    vocabulary_width: Option<u64>,
}

impl Flow {
    fn of<'s>(container: &Node, shapes: impl Iterator<Item = Option<&'s [u64]>>) -> Self {
        let mut flow = Self { only_vectors: true, ..Self::default() };
        let mut outputs = Vec::new();
        let mut biases = Vec::new();
        let is_width = |length: u64| container.widths.contains(&length);
        for shape in shapes.flatten() {
            flow.is_known = true;
            match *shape {
                [] => {}
                [length] => biases.push(length),
                [first, second, ..] => {
                    flow.only_vectors = false;
                    flow.maps_in |= is_width(first) && !is_width(second);
                    if is_width(second) && !is_width(first) {
                        flow.maps_out = true;
                        outputs.push(first);
                        if shape.len() == 2 && first > container.dimension_max {
                            flow.vocabulary_width = Some(second);
                        }
                    }
                }
            }
        }
        flow.has_output_bias = outputs.iter().any(|output| biases.contains(output));
        flow.vocabulary_width = flow.vocabulary_width.filter(|_| !flow.has_output_bias);
        flow
    }

    /// The role of a group called `name` (lower case) in its container.
    fn role(&self, name: &str, is_outside: bool, has_several_stacks: bool) -> Role {
        let is_front_word = name.contains(words::FRONT);
        let is_back_word = words::BACK.iter().any(|word| name.contains(word));
        let is_norm_word = name.contains(words::NORM);
        if self.is_known && self.only_vectors {
            let own_parameters = name.is_empty();
            return if is_front_word || own_parameters { Role::Front } else { Role::Norm };
        }
        if self.maps_in && !(self.maps_out && (is_back_word || is_norm_word)) {
            return Role::Front;
        }
        if self.maps_out && self.has_output_bias {
            return Role::Back;
        }
        match (is_front_word, is_back_word) {
            (true, true) => Role::Back,
            (true, false) => Role::Front,
            (false, _) if is_norm_word => Role::Norm,
            (false, true) => Role::Back,
            (false, false) if is_outside => Role::Back,
            (false, false) if has_several_stacks && !self.maps_out => Role::Middle,
            (false, false) => Role::Front,
        }
    }
}
