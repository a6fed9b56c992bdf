//! The thresholds of the rule that finds stacks, and how sure it is of one.
//!
//! docs/layers.md explains the rule and gives its scores.

/// The thresholds of the rule, most in percent. The scores in docs/layers.md are for the default;
/// other values serve to measure how much a threshold matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Rule {
    /// Share of children that must have two or more modules. Otherwise the list is too shallow for
    /// a stack.
    pub deep_percent: u32,
    /// Share of children (at least two) that must have a suffix in common.
    pub common_percent: u32,
    /// Share of children that must agree on the shape of a suffix for that suffix to count as
    /// uniform.
    pub agreement_percent: u32,
    /// Share of suffixes that must be uniform for the list to count as uniform.
    pub uniform_percent: u32,
    /// A list is only a container of inner stacks if less than this share of a child's names is
    /// outside of them.
    pub own_names_percent: u32,
    /// The same for tensor elements, in a list whose shapes change from child to child.
    pub own_elements_percent: u32,
    /// The same for tensor elements, in a list whose shapes are uniform.
    pub own_elements_uniform_percent: u32,
    /// Share of a child's suffixes that its siblings must share for an inner list to count as a
    /// stack.
    pub alike_percent: u32,
    /// The same where the outer list is uniform.
    pub alike_uniform_percent: u32,
    /// A list is a list of networks if its children hold chains of blocks this many times as long
    /// as the list.
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

/// How certain it is that a list is a stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Confidence {
    /// Given by the override file.
    Given,
    /// Several children of the same structure and the same shapes.
    High,
    /// Several children of the same structure with different shapes, as in a pyramid of widths.
    Medium,
    /// A single child, or unknown shapes.
    Low,
}
