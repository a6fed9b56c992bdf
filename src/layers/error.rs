//! What can go wrong while grouping.

/// What can go wrong while grouping.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayersError {}
