//! Decides which numbered lists are stacks of layers, by the structure and the shapes of their
//! children.
//!
//! Two passes, both linear: every list is described from the innermost outwards, then stacks are
//! chosen from the outermost inwards. docs/layers.md explains the rule and gives its scores.

use super::facts::{Facts, Measure};
use super::lists::{LEVELS_MAX, Lists, NO_CHILD};
use super::positions::{bucket, index32, slot};
use super::{Confidence, Rule};
use crate::footprint::{Held, PeakMeter};

/// The kind of a numbered list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ListKind {
    /// A stack.
    Stack(Confidence),
    /// Not a stack; lists inside it may be.
    Transparent,
    /// Inside a member of a stack.
    Inside,
}

/// The kind of every list.
#[derive(Debug)]
pub(super) struct ListKinds {
    kinds: Vec<ListKind>,
    /// Lists of several modules.
    is_plural: Vec<bool>,
}

impl ListKinds {
    /// Classifies all lists. `given` is the override's decision on a list, if any: stack or not.
    pub(super) fn classify(
        lists: &Lists<'_>,
        rule: &Rule,
        given: impl Fn(u32) -> Option<bool>,
        meter: &mut PeakMeter,
    ) -> Self {
        let level = |list: u32| u32::from(lists.list(list).level);
        let (by_level, _) = bucket(LEVELS_MAX, (0..index32(lists.count())).map(|list| (level(list), list)));
        let mut facts = vec![Facts::default(); lists.count()];
        let flat = Held::default().list(&by_level).list(&facts);
        meter.keep(flat);
        for &list in by_level.iter().rev() {
            facts[slot(list)] = Measure::of(lists, list, rule, &facts, meter);
        }
        let mut kinds = vec![ListKind::Transparent; lists.count()];
        for &list in &by_level {
            let parent = lists.list(list).parent;
            let inside = parent != NO_CHILD && kinds[slot(lists.child(parent).list)] != ListKind::Transparent;
            kinds[slot(list)] = if inside {
                ListKind::Inside
            } else {
                match given(list) {
                    Some(true) => ListKind::Stack(Confidence::Given),
                    Some(false) => ListKind::Transparent,
                    None => choose(&facts[slot(list)], rule),
                }
            };
        }
        let is_plural: Vec<bool> = facts.iter().map(Facts::is_plural).collect();
        let kept = Held::default().list(&kinds).list(&is_plural);
        meter.keep(kept);
        meter.release(flat.bytes());
        Self { kinds, is_plural }
    }

    /// The kind of a list.
    pub(super) fn of(&self, list: u32) -> ListKind {
        self.kinds[slot(list)]
    }

    /// True if the list is inside a layer and its children are sub-units.
    pub(super) fn is_sub_unit_list(&self, list: u32) -> bool {
        self.of(list) == ListKind::Inside && self.is_plural[slot(list)]
    }
}

/// The rule itself.
fn choose(facts: &Facts, rule: &Rule) -> ListKind {
    if !facts.deep {
        return ListKind::Transparent;
    }
    let uniform = facts.uniform.is_none_or(|share| share >= 10 * rule.uniform_percent);
    // A single child tells nothing about uniformity, so the stricter thresholds apply.
    let strict = uniform || facts.children == 1;
    let (own, elements_percent) = if strict {
        (facts.own_beside_blocks, rule.own_elements_uniform_percent)
    } else {
        (facts.own, rule.own_elements_percent)
    };
    // A few children, each with a long chain of blocks, are whole networks.
    let holds_networks = strict && facts.blocks_longest / facts.children >= rule.chain_ratio;
    let is_mostly_inner = own.names < 10 * rule.own_names_percent || holds_networks;
    if is_mostly_inner && own.elements < 10 * elements_percent {
        return ListKind::Transparent;
    }
    match (facts.children, facts.uniform) {
        (1, _) if facts.blocks => ListKind::Stack(Confidence::Low),
        (1, _) => ListKind::Transparent,
        _ if !facts.common => ListKind::Transparent,
        (_, None) => ListKind::Stack(Confidence::Low),
        (_, Some(_)) if uniform => ListKind::Stack(Confidence::High),
        _ if facts.matrices => ListKind::Stack(Confidence::Medium),
        _ => ListKind::Transparent,
    }
}
