//! Describes a numbered list by the structure and the shapes of its children.
//!
//! Linear in the names below the list. No name is compared with any word.

use std::hash::BuildHasher;

use foldhash::quality::RandomState;
use hashbrown::HashTable;

use super::Rule;
use super::lists::Lists;
use super::name_parts;
use super::positions::{index32, slot};
use super::text_index::TextIndex;
use crate::footprint::{Held, PeakMeter, block_bytes};
use crate::units::to_u64;

/// The description of one list. Shares are in thousandths.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Facts {
    pub(super) children: u32,
    pub(super) deep: bool,
    pub(super) common: bool,
    /// Share of suffixes on whose shape most children agree; `None` without shapes.
    pub(super) uniform: Option<u32>,
    /// Half of the children look like a residual block: a module of vectors (a norm) beside two
    /// weight matrices. Without shapes: four modules or more.
    pub(super) blocks: bool,
    /// Half of the children have two weight matrices or more.
    pub(super) matrices: bool,
    /// Mean share of a child's suffixes that enough of its siblings have too.
    pub(super) alike: u32,
    /// Mean share of a child's names (and elements) outside inner lists of similar children.
    pub(super) own: Own,
    /// The same, but outside inner lists of similar blocks.
    pub(super) own_beside_blocks: Own,
    /// Length of the longest inner list of similar blocks.
    pub(super) blocks_longest: u32,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Own {
    pub(super) names: u32,
    pub(super) elements: u32,
}

impl Facts {
    /// True if the list, inside another one, has similar children.
    fn is_inner_stack(&self, rule: &Rule) -> bool {
        self.children >= 2 && self.deep && self.alike >= 10 * rule.alike_percent
    }

    /// The same, inside a list that looks like a stack itself: only nearly identical blocks count.
    fn is_inner_block_stack(&self, rule: &Rule) -> bool {
        self.is_inner_stack(rule) && self.blocks && self.alike >= 10 * rule.alike_uniform_percent
    }

    /// True for a list of several modules, which are sub-units inside a layer.
    pub(super) fn is_plural(&self) -> bool {
        self.children >= 2 && self.deep
    }
}

/// A suffix below the children of a list.
struct Suffix<'a> {
    text: &'a str,
    /// The suffix with indices ignored.
    indexless: u32,
    module: u32,
    /// Children that have it.
    children: u32,
    /// The first of its shapes, or [`NO_VOTE`].
    votes: u32,
}

/// A shape of a suffix, and the number of children that have it.
struct Vote {
    /// The first tensor that has it.
    sample: u32,
    children: u32,
    /// The next shape of the same suffix, or [`NO_VOTE`].
    next: u32,
}

/// "No more shapes".
const NO_VOTE: u32 = u32::MAX;

/// The most different shapes of a suffix that are counted. More of them mean that the children do
/// not agree.
const VOTES_MAX: usize = 16;

/// A module: the last child that has it, and the highest rank of its tensors in that child.
#[derive(Clone, Copy)]
struct Module<'a> {
    text: &'a str,
    child: u32,
    rank_max: u32,
}

/// A suffix with indices ignored: the last child that has it (for each way of counting), and the
/// number of children that have it.
#[derive(Clone, Copy, Default)]
struct Indexless {
    hash: u64,
    seen: [u32; 3],
    children: u32,
}

const ALL: usize = 0;
const OUTSIDE: usize = 1;
const OUTSIDE_BLOCKS: usize = 2;

/// Builds the description of one list. Children are numbered from 1, so that 0 means "not seen".
#[derive(Default)]
pub(super) struct Measure<'a> {
    suffix_of: TextIndex,
    suffixes: Vec<Suffix<'a>>,
    /// Suffixes in the order of the previous child's tensors, overwritten by those of the current
    /// child.
    sequence: Vec<u32>,
    votes: Vec<Vote>,
    module_of: TextIndex,
    modules: Vec<Module<'a>>,
    indexless_of: HashTable<u32>,
    /// Seeded at random, since names come from strangers.
    state: RandomState,
    indexless: Vec<Indexless>,
    /// Indexless suffixes of each child, one child after the other.
    child_suffixes: Vec<u32>,
    child_ends: Vec<u32>,
    deep: u32,
    blocks: u32,
    matrices: u32,
    /// Sums over the children, in thousandths.
    own: [u64; 3],
    own_elements: [u64; 3],
    shaped: bool,
    blocks_longest: u32,
}

impl<'a> Measure<'a> {
    pub(super) fn of(
        lists: &Lists<'a>,
        list: u32,
        rule: &Rule,
        inner: &[Facts],
        meter: &mut PeakMeter,
    ) -> Facts {
        let children = lists.children(list);
        if children.iter().all(|&child| lists.tensors(child).len() < 2) {
            // One tensor is at most one module, so the list is too shallow for a stack.
            return Facts { children: index32(children.len()), ..Facts::default() };
        }
        let mut measure = Self { shaped: true, ..Self::default() };
        for (number, &child) in (1_u32..).zip(children) {
            measure.add_child(lists, child, number, rule, inner);
        }
        meter.note(measure.held());
        measure.facts(index32(children.len()), rule)
    }

    /// Memory of the description.
    fn held(&self) -> Held {
        let named =
            Held::default().grown_list(&self.suffixes).grown_list(&self.votes).grown_list(&self.modules);
        let counted =
            named.grown_list(&self.indexless).grown_list(&self.child_suffixes).grown_list(&self.sequence);
        (counted.grown_list(&self.child_ends).grown(self.suffix_of.bytes()).grown(self.module_of.bytes()))
            .grown(block_bytes(to_u64(self.indexless_of.allocation_size())))
            // The modules of one child, and the overhead of small blocks.
            .and(to_u64(self.modules.len()).saturating_mul(8))
    }

    fn add_child(&mut self, lists: &Lists<'a>, child: u32, number: u32, rule: &Rule, inner: &[Facts]) {
        let level = usize::from(lists.list(lists.child(child).list).level);
        let mut touched = Vec::new();
        let mut names = [0_u64; 3];
        let mut elements = [0_u64; 3];
        for (place, &tensor) in lists.tensors(child).iter().enumerate() {
            let shape = lists.shape(tensor);
            self.shaped &= shape.is_some();
            let suffix = self.suffix_at(place, lists.suffix(child, tensor));
            let entry = &mut self.suffixes[slot(suffix)];
            let (indexless, module) = (entry.indexless, entry.module);
            entry.children += 1;
            self.vote(lists, suffix, tensor);
            let state = &mut self.modules[slot(module)];
            if state.child != number {
                *state = Module { child: number, rank_max: 0, ..*state };
                touched.push(module);
            }
            let rank = shape.map_or(0, |shape| u32::try_from(shape.len()).unwrap_or(u32::MAX));
            state.rank_max = state.rank_max.max(rank);

            let deeper = lists.around(tensor)[level + 1..].iter();
            let is_counted =
                self.is_counted(deeper.map(|&child| &inner[slot(lists.child(child).list)]), rule);
            let count = element_count(shape);
            for kind in [ALL, OUTSIDE, OUTSIDE_BLOCKS].into_iter().filter(|&kind| is_counted[kind]) {
                elements[kind] = elements[kind].saturating_add(count);
                let state = &mut self.indexless[slot(indexless)];
                if state.seen[kind] != number {
                    state.seen[kind] = number;
                    names[kind] += 1;
                    if kind == ALL {
                        state.children += 1;
                        self.child_suffixes.push(indexless);
                    }
                }
            }
        }
        for kind in [OUTSIDE, OUTSIDE_BLOCKS] {
            self.own[kind] += u64::from(thousandths(names[kind], names[ALL]));
            self.own_elements[kind] += u64::from(thousandths(elements[kind], elements[ALL]));
        }
        self.child_ends.push(index32(self.child_suffixes.len()));
        self.close_modules(&touched);
    }

    /// Where a tensor is counted: always for the whole child; for the parts outside inner stacks
    /// only if none of the inner lists around it is such a stack.
    fn is_counted<'f>(&mut self, inner: impl Iterator<Item = &'f Facts>, rule: &Rule) -> [bool; 3] {
        let mut counted = [true; 3];
        for facts in inner {
            counted[OUTSIDE] &= !facts.is_inner_stack(rule);
            if facts.is_inner_block_stack(rule) {
                counted[OUTSIDE_BLOCKS] = false;
                self.blocks_longest = self.blocks_longest.max(facts.children);
            }
        }
        counted
    }

    /// Classifies the child by its modules.
    fn close_modules(&mut self, touched: &[u32]) {
        let ranks = || touched.iter().map(|&module| self.modules[slot(module)].rank_max);
        let matrices = ranks().filter(|&rank| rank >= 2).count();
        let has_norm = ranks().any(|rank| rank == 1);
        let is_block = if self.shaped { has_norm && matrices >= 2 } else { touched.len() >= 4 };
        self.deep += u32::from(touched.len() >= 2);
        self.blocks += u32::from(is_block);
        self.matrices += u32::from(matrices >= 2);
    }

    /// The suffix of a child's tensor. Children mostly have the same suffixes in the same order.
    fn suffix_at(&mut self, place: usize, text: &'a str) -> u32 {
        match self.sequence.get(place) {
            Some(&suffix) if self.suffixes[slot(suffix)].text == text => suffix,
            Some(_) => {
                self.sequence[place] = self.suffix(text);
                self.sequence[place]
            }
            None => {
                let suffix = self.suffix(text);
                self.sequence.push(suffix);
                suffix
            }
        }
    }

    fn suffix(&mut self, text: &'a str) -> u32 {
        let Self { suffix_of, suffixes, module_of, modules, .. } = self;
        if let Some(suffix) = suffix_of.find(text, |at| suffixes[slot(at)].text) {
            return suffix;
        }
        let module_text = name_parts::module_of(text);
        let known = module_of.find(module_text, |at| modules[slot(at)].text);
        let module = known.unwrap_or(index32(modules.len()));
        if known.is_none() {
            modules.push(Module { text: module_text, child: 0, rank_max: 0 });
            module_of.insert(module, |at| modules[slot(at)].text);
        }
        let indexless = self.indexless(name_parts::indexless_hash(text));
        let suffix = index32(self.suffixes.len());
        let Self { suffix_of, suffixes, .. } = self;
        suffixes.push(Suffix { text, indexless, module, children: 0, votes: NO_VOTE });
        suffix_of.insert(suffix, |at| suffixes[slot(at)].text);
        suffix
    }

    fn indexless(&mut self, hash: u64) -> u32 {
        let Self { indexless_of, indexless, state, .. } = self;
        // Hashed again with a secret seed, since names come from strangers.
        let keyed = |hash: u64| state.hash_one(hash);
        if let Some(&at) = indexless_of.find(keyed(hash), |&at| indexless[slot(at)].hash == hash) {
            return at;
        }
        let at = index32(indexless.len());
        indexless.push(Indexless { hash, ..Indexless::default() });
        indexless_of.insert_unique(keyed(hash), at, |&at| keyed(indexless[slot(at)].hash));
        at
    }

    /// The shapes of a suffix, as positions in `votes`.
    fn votes(&self, suffix: u32) -> impl Iterator<Item = u32> + '_ {
        let known = |at: u32| (at != NO_VOTE).then_some(at);
        let first = known(self.suffixes[slot(suffix)].votes);
        std::iter::successors(first, move |&at| known(self.votes[slot(at)].next))
    }

    /// Counts the shape of one more child's tensor.
    fn vote(&mut self, lists: &Lists<'_>, suffix: u32, tensor: u32) {
        let shape = lists.shape(tensor);
        let known = self.votes(suffix).find(|&at| lists.shape(self.votes[slot(at)].sample) == shape);
        if let Some(at) = known {
            self.votes[slot(at)].children += 1;
        } else if self.votes(suffix).count() < VOTES_MAX {
            let entry = &mut self.suffixes[slot(suffix)];
            let next = std::mem::replace(&mut entry.votes, index32(self.votes.len()));
            self.votes.push(Vote { sample: tensor, children: 1, next });
        }
    }

    fn facts(&self, children: u32, rule: &Rule) -> Facts {
        let half =
            |count: u32, percent: u32| u64::from(count) * 100 >= u64::from(children) * u64::from(percent);
        let is_common = |count: u32| count >= 2 && half(count, rule.common_percent);
        let mean = |sum: u64| {
            u32::try_from(sum / u64::from(children.max(1))).expect("a mean of thousandths is at most 1000")
        };
        let own = |kind: usize| Own { names: mean(self.own[kind]), elements: mean(self.own_elements[kind]) };
        let mut alike = 0;
        let mut start = 0;
        for &end in &self.child_ends {
            let suffixes = &self.child_suffixes[slot(start)..slot(end)];
            let shared = suffixes.iter().filter(|&&at| is_common(self.indexless[slot(at)].children)).count();
            alike += u64::from(thousandths(to_u64(shared), to_u64(suffixes.len())));
            start = end;
        }
        Facts {
            children,
            deep: self.deep >= 1 && half(self.deep, rule.deep_percent),
            common: self.indexless.iter().any(|entry| is_common(entry.children)),
            uniform: self.shaped.then(|| self.uniform(rule)),
            blocks: self.blocks >= 1 && half(self.blocks, 50),
            matrices: self.matrices >= 1 && half(self.matrices, 50),
            alike: mean(alike),
            own: self.without_shapes_no_elements(own(OUTSIDE)),
            own_beside_blocks: self.without_shapes_no_elements(own(OUTSIDE_BLOCKS)),
            blocks_longest: self.blocks_longest,
        }
    }

    /// Without shapes only names count.
    fn without_shapes_no_elements(&self, own: Own) -> Own {
        if self.shaped { own } else { Own { elements: 0, ..own } }
    }

    /// Share of the suffixes of two or more children on whose shape the children agree.
    fn uniform(&self, rule: &Rule) -> u32 {
        let mut shared = 0;
        let mut agreed = 0;
        for (at, suffix) in (0..).zip(&self.suffixes).filter(|(_, suffix)| suffix.children >= 2) {
            let votes = self.votes(at).map(|vote| self.votes[slot(vote)].children);
            let commonest = votes.max().unwrap_or(0);
            shared += 1;
            agreed += u64::from(
                u64::from(commonest) * 100 >= u64::from(suffix.children) * u64::from(rule.agreement_percent),
            );
        }
        thousandths(agreed, shared)
    }
}

fn element_count(shape: Option<&[u64]>) -> u64 {
    shape.map_or(0, |shape| shape.iter().fold(1, |product: u64, &length| product.saturating_mul(length)))
}

/// `part / whole` in thousandths; 1000 if `whole` is zero, so that an empty child owns all it has.
fn thousandths(part: u64, whole: u64) -> u32 {
    let share = if whole == 0 { 1000 } else { u128::from(part) * 1000 / u128::from(whole) };
    u32::try_from(share).expect("a part is not larger than its whole")
}
