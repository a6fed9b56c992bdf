//! Which numbered lists are stacks of layers: the rule, from the structure and the shapes of the children alone.
//!
//! Two passes, both linear: `measure` describes every list from the innermost outwards, `choose` takes stacks from
//! the outermost inwards. No name is compared with any word. docs/layers.md tells the rule in prose and gives
//! its scores; `grouping` calls this file and assigns the tensors.

use std::collections::HashMap;

use super::lists::{Lists, NO_CHILD, index32, slot};
use super::names;
use crate::units::to_u64;

/// The thresholds of the rule, most in percent. The default is what the figures in docs/layers.md are for; anything
/// else is for measuring how much they matter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Rule {
    /// Share of children that must have two modules or more, else the list is too shallow for a stack.
    pub deep_percent: u32,
    /// Share of children (two at least) that must have a suffix in common.
    pub common_percent: u32,
    /// Share of children that must agree on the shape of a suffix for that suffix to count as uniform.
    pub agreement_percent: u32,
    /// Share of suffixes that must be uniform for a list to count as uniform.
    pub uniform_percent: u32,
    /// A list is a mere container of inner stacks only if less than this share of the names below a child
    /// is outside of them.
    pub own_names_percent: u32,
    /// The same for tensor elements, in a list whose shapes change from child to child.
    pub own_elements_percent: u32,
    /// The same for tensor elements, in a list whose shapes are uniform.
    pub own_elements_uniform_percent: u32,
    /// Share of a child's suffixes that its siblings must share for an inner list to count as a stack.
    pub alike_percent: u32,
    /// The same where the outer list is uniform.
    pub alike_uniform_percent: u32,
    /// A list whose children hold chains of blocks this many times as long as itself is a list of networks, however
    /// many names stand beside the chains.
    pub chain_ratio: u32,
}

impl Default for Rule {
    fn default() -> Self {
        Self {
            deep_percent: 50,
            common_percent: 25,
            agreement_percent: 80,
            uniform_percent: 50,
            own_names_percent: 50,
            own_elements_percent: 75,
            own_elements_uniform_percent: 25,
            alike_percent: 50,
            alike_uniform_percent: 90,
            chain_ratio: 4,
        }
    }
}

/// How sure the rule is of a stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Confidence {
    /// The override file says so.
    Given,
    /// Several children of the same structure and the same shapes.
    High,
    /// Several children of the same structure; their shapes change, as in a pyramid of widths.
    Medium,
    /// A single child, or shapes unknown.
    Low,
}

/// What became of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// A stack.
    Stack(Confidence),
    /// Not a stack; lists inside it may be.
    Transparent,
    /// Inside a member of a stack.
    Inside,
}

/// What `measure` found out about one list. Shares are in thousandths.
#[derive(Clone, Copy, Debug, Default)]
struct Facts {
    children: u32,
    deep: bool,
    common: bool,
    /// Suffixes whose shape most children agree on; `None` without shapes.
    uniform: Option<u32>,
    /// Children that look like a residual block: a module of vectors (a norm) beside two weight matrices.
    /// Without shapes: four modules or more.
    blocks: bool,
    /// Children with two weight matrices or more.
    matrices: bool,
    /// Share of a child's suffixes that half of its siblings have too.
    alike: u32,
    /// Share of a child's names (and elements) outside inner lists of alike children.
    own: Own,
    /// The same, counting only inner lists of alike blocks.
    own_beside_blocks: Own,
    /// Children of the longest inner list of alike blocks.
    blocks_longest: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct Own {
    names: u32,
    elements: u32,
}

impl Facts {
    /// True if this list, seen from an outer one, holds alike children.
    fn is_inner_stack(&self, rule: &Rule) -> bool {
        self.children >= 2 && self.deep && self.alike >= 10 * rule.alike_percent
    }

    /// The same, for an outer list that looks like a stack itself: only near-identical blocks count.
    fn is_inner_block_stack(&self, rule: &Rule) -> bool {
        self.is_inner_stack(rule) && self.blocks && self.alike >= 10 * rule.alike_uniform_percent
    }

    /// A list of several modules, worth telling apart inside a layer.
    fn is_sub_unit_list(&self) -> bool {
        self.children >= 2 && self.deep
    }
}

/// The verdict on every list.
#[derive(Debug)]
pub(super) struct Verdicts {
    facts: Vec<Facts>,
    verdicts: Vec<Verdict>,
}

impl Verdicts {
    /// Judges all lists. `given` has the override's word on a list, if any: stack or not.
    pub(super) fn judge(lists: &Lists<'_>, rule: &Rule, given: impl Fn(u32) -> Option<bool>) -> Self {
        let mut by_level: Vec<u32> = (0..index32(lists.count())).collect();
        by_level.sort_by_key(|&list| lists.list(list).level);
        let mut facts = vec![Facts::default(); lists.count()];
        for &list in by_level.iter().rev() {
            facts[slot(list)] = Measure::of(lists, list, rule, &facts);
        }
        let mut verdicts = vec![Verdict::Transparent; lists.count()];
        for &list in &by_level {
            let parent = lists.list(list).parent;
            let inside =
                parent != NO_CHILD && verdicts[slot(lists.child(parent).list)] != Verdict::Transparent;
            verdicts[slot(list)] = if inside {
                Verdict::Inside
            } else {
                match given(list) {
                    Some(true) => Verdict::Stack(Confidence::Given),
                    Some(false) => Verdict::Transparent,
                    None => choose(&facts[slot(list)], rule),
                }
            };
        }
        Self { facts, verdicts }
    }

    /// The verdict on a list.
    pub(super) fn of(&self, list: u32) -> Verdict {
        self.verdicts[slot(list)]
    }

    /// True if the list is inside a layer and its children are worth telling apart.
    pub(super) fn is_sub_unit_list(&self, list: u32) -> bool {
        self.of(list) == Verdict::Inside && self.facts[slot(list)].is_sub_unit_list()
    }
}

/// The rule itself, once a list is described.
fn choose(facts: &Facts, rule: &Rule) -> Verdict {
    if !facts.deep {
        return Verdict::Transparent;
    }
    let uniform = facts.uniform.is_none_or(|share| share >= 10 * rule.uniform_percent);
    // A single child says nothing about shapes, so it is read as strictly as a uniform list.
    let strict = uniform || facts.children == 1;
    let (own, elements_percent) = if strict {
        (facts.own_beside_blocks, rule.own_elements_uniform_percent)
    } else {
        (facts.own, rule.own_elements_percent)
    };
    // A few children with a long chain of blocks in each are whole networks, whatever else they have.
    let holds_networks = strict && facts.blocks_longest / facts.children >= rule.chain_ratio;
    let is_mostly_inner = own.names < 10 * rule.own_names_percent || holds_networks;
    if is_mostly_inner && own.elements < 10 * elements_percent {
        return Verdict::Transparent;
    }
    match (facts.children, facts.uniform) {
        (1, _) if facts.blocks => Verdict::Stack(Confidence::Low),
        (1, _) => Verdict::Transparent,
        _ if !facts.common => Verdict::Transparent,
        (_, None) => Verdict::Stack(Confidence::Low),
        (_, Some(_)) if uniform => Verdict::Stack(Confidence::High),
        _ if facts.matrices => Verdict::Stack(Confidence::Medium),
        _ => Verdict::Transparent,
    }
}

/// One spelling of a suffix below the children of one list.
struct Suffix {
    /// The suffix with its indices made alike.
    indexless: u32,
    module: u32,
    /// Children that have it.
    children: u32,
    /// Shapes seen, with how many children have each.
    shapes: Vec<(u64, u32)>,
}

/// A module of one child: what it was last seen in, and the highest rank of its tensors there.
#[derive(Clone, Copy)]
struct Module {
    child: u32,
    rank_max: usize,
}

/// A suffix with its indices made alike: the child it was last seen in, inside and outside of inner lists, and how
/// many children have it.
#[derive(Clone, Copy, Default)]
struct Indexless {
    seen: [u32; 3],
    children: u32,
}

const ALL: usize = 0;
const OUTSIDE: usize = 1;
const OUTSIDE_BLOCKS: usize = 2;

/// The running description of one list. Children are numbered from 1, so that 0 is "never seen".
#[derive(Default)]
struct Measure<'a> {
    suffix_of: HashMap<&'a str, u32>,
    suffixes: Vec<Suffix>,
    module_of: HashMap<&'a str, u32>,
    modules: Vec<Module>,
    indexless_of: HashMap<u64, u32>,
    indexless: Vec<Indexless>,
    /// Indexless suffixes of each child, one child after the other.
    child_suffixes: Vec<u32>,
    child_ends: Vec<usize>,
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
    fn of(lists: &Lists<'a>, list: u32, rule: &Rule, inner: &[Facts]) -> Facts {
        let children = lists.children(list);
        if children.iter().all(|&child| lists.tensors(child).len() < 2) {
            // One tensor is one module at most, so the list is shallow, and nothing else matters.
            return Facts { children: index32(children.len()), ..Facts::default() };
        }
        let mut measure = Self { shaped: true, ..Self::default() };
        for (number, &child) in (1_u32..).zip(children) {
            measure.add_child(lists, child, number, rule, inner);
        }
        measure.facts(index32(children.len()), rule)
    }

    fn add_child(&mut self, lists: &Lists<'a>, child: u32, number: u32, rule: &Rule, inner: &[Facts]) {
        let level = usize::from(lists.list(lists.child(child).list).level);
        let mut touched = Vec::new();
        let mut names = [0_u64; 3];
        let mut elements = [0_u64; 3];
        for &tensor in lists.tensors(child) {
            let shape = lists.shape(tensor);
            self.shaped &= shape.is_some();
            let suffix = self.suffix(lists.suffix(child, tensor));
            let entry = &mut self.suffixes[slot(suffix)];
            let (indexless, module) = (entry.indexless, entry.module);
            entry.children += 1;
            entry.vote(shape);
            let state = &mut self.modules[slot(module)];
            if state.child != number {
                *state = Module { child: number, rank_max: 0 };
                touched.push(module);
            }
            state.rank_max = state.rank_max.max(shape.map_or(0, <[u64]>::len));

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
        self.child_ends.push(self.child_suffixes.len());
        self.close_modules(&touched);
    }

    /// What a tensor counts for, by the inner lists that it is in: always for the child, and for the child's own
    /// part unless one of them is a stack of its own.
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

    /// Counts what kind of child the modules just seen make.
    fn close_modules(&mut self, touched: &[u32]) {
        let ranks = || touched.iter().map(|&module| self.modules[slot(module)].rank_max);
        let matrices = ranks().filter(|&rank| rank >= 2).count();
        let has_norm = ranks().any(|rank| rank == 1);
        let is_block = if self.shaped { has_norm && matrices >= 2 } else { touched.len() >= 4 };
        self.deep += u32::from(touched.len() >= 2);
        self.blocks += u32::from(is_block);
        self.matrices += u32::from(matrices >= 2);
    }

    fn suffix(&mut self, text: &'a str) -> u32 {
        if let Some(&suffix) = self.suffix_of.get(text) {
            return suffix;
        }
        let indexless = *self.indexless_of.entry(names::indexless_hash(text)).or_insert_with(|| {
            self.indexless.push(Indexless::default());
            index32(self.indexless.len() - 1)
        });
        let module = *self.module_of.entry(names::module_of(text)).or_insert_with(|| {
            self.modules.push(Module { child: 0, rank_max: 0 });
            index32(self.modules.len() - 1)
        });
        self.suffixes.push(Suffix { indexless, module, children: 0, shapes: Vec::new() });
        let suffix = index32(self.suffixes.len() - 1);
        self.suffix_of.insert(text, suffix);
        suffix
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
            let suffixes = &self.child_suffixes[start..end];
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

    /// Where shapes are unknown, only names can be weighed.
    fn without_shapes_no_elements(&self, own: Own) -> Own {
        if self.shaped { own } else { Own { elements: 0, ..own } }
    }

    /// Share of the suffixes, among those of two children or more, on whose shape the children agree.
    fn uniform(&self, rule: &Rule) -> u32 {
        let mut shared = 0;
        let mut agreed = 0;
        for suffix in self.suffixes.iter().filter(|suffix| suffix.children >= 2) {
            let commonest = suffix.shapes.iter().map(|&(_, count)| count).max().unwrap_or(0);
            shared += 1;
            agreed += u64::from(
                u64::from(commonest) * 100 >= u64::from(suffix.children) * u64::from(rule.agreement_percent),
            );
        }
        thousandths(agreed, shared)
    }
}

impl Suffix {
    /// How many different shapes are told apart. With more than this many nothing is uniform, except in lists so
    /// long that the bound stands for "no agreement" all the same.
    const SHAPES_MAX: usize = 16;

    fn vote(&mut self, shape: Option<&[u64]>) {
        let key = shape_key(shape);
        if let Some((_, count)) = self.shapes.iter_mut().find(|(seen, _)| *seen == key) {
            *count += 1;
        } else if self.shapes.len() < Self::SHAPES_MAX {
            self.shapes.push((key, 1));
        }
    }
}

/// A number that tells shapes apart.
fn shape_key(shape: Option<&[u64]>) -> u64 {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    shape.hash(&mut hasher);
    hasher.finish()
}

fn element_count(shape: Option<&[u64]>) -> u64 {
    shape.map_or(0, |shape| shape.iter().fold(1, |product: u64, &length| product.saturating_mul(length)))
}

/// `part / whole` in thousandths; 1000 of nothing, so that an empty child owns all it has.
fn thousandths(part: u64, whole: u64) -> u32 {
    let share = if whole == 0 { 1000 } else { u128::from(part) * 1000 / u128::from(whole) };
    u32::try_from(share).expect("a part is not larger than its whole")
}
