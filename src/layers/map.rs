//! The override file: a small TOML that replaces what the rule decided.

/// An override of the grouping rule, read from TOML.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LayerMap {}
