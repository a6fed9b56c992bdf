//! What can be wrong with a checkpoint.

/// What can be wrong with a checkpoint.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// placeholder: the helper replaces it
    #[error("not implemented")]
    NotImplemented,
}
