//! What can go wrong while reading.

/// What can go wrong while reading.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {}
