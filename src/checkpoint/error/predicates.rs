//! Questions about a [`CheckpointError`]: its class, its file, its tensor, its single problems.

use std::io;
use std::path::Path;

use super::{CheckpointError, JsonSection};

impl CheckpointError {
    /// True if something is missing: the path, a shard, or all weights.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        match self {
            Self::NotFound { .. }
            | Self::DanglingLink { .. }
            | Self::NoWeights { .. }
            | Self::MissingShards { .. }
            | Self::NotCached { .. } => true,
            Self::Io { source, .. } => source.kind() == io::ErrorKind::NotFound,
            Self::Several { problems } => problems.iter().all(Self::is_missing),
            _ => false,
        }
    }

    /// True if the files break the format or are not a checkpoint. False for missing files and for
    /// errors of the operating system.
    #[must_use]
    pub fn is_invalid(&self) -> bool {
        match self {
            Self::Io { .. } | Self::FileChanged { .. } | Self::InvalidRepository { .. } => false,
            Self::Several { problems } => problems.iter().any(Self::is_invalid),
            other => !other.is_missing(),
        }
    }

    /// The file or directory at fault, if there is one. For several problems, that of the first.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Io { path, .. }
            | Self::NotFound { path }
            | Self::DanglingLink { path, .. }
            | Self::NotRegular { path, .. }
            | Self::NoWeights { path, .. }
            | Self::Ambiguous { path, .. }
            | Self::UnknownFormat { path, .. }
            | Self::InvalidFile { path, .. }
            | Self::NotStreamable { path, .. }
            | Self::OutsideStorage { path, .. }
            | Self::NoSuchPart { path, .. }
            | Self::HeaderExceedsFile { path, .. }
            | Self::OverLimit { path, .. }
            | Self::TooMany { path, .. }
            | Self::Syntax { path, .. }
            | Self::DuplicateKey { path, .. }
            | Self::MissingField { path, .. }
            | Self::UnknownDType { path, .. }
            | Self::SizeOverflow { path, .. }
            | Self::PartialByte { path, .. }
            | Self::ReversedOffsets { path, .. }
            | Self::SizeMismatch { path, .. }
            | Self::Hole { path, .. }
            | Self::Overlap { path, .. }
            | Self::Truncated { path, .. }
            | Self::TrailingBytes { path, .. }
            | Self::FileChanged { path, .. }
            | Self::NotAnIndex { path, .. }
            | Self::UnsafeName { path, .. }
            | Self::MissingShards { path, .. }
            | Self::MissingTensor { path, .. }
            | Self::UnindexedTensor { path, .. }
            | Self::WrongShard { path, .. }
            | Self::DuplicateTensor { path, .. }
            | Self::NotCached { path, .. } => Some(path),
            Self::InvalidRepository { .. } => None,
            Self::Several { problems } => problems.first().and_then(Self::path),
        }
    }

    /// The tensor at fault, if there is one. For several problems, that of the first.
    #[must_use]
    pub fn tensor(&self) -> Option<&str> {
        match self {
            Self::MissingField { tensor, .. }
            | Self::UnknownDType { tensor, .. }
            | Self::SizeOverflow { tensor, .. }
            | Self::PartialByte { tensor, .. }
            | Self::ReversedOffsets { tensor, .. }
            | Self::SizeMismatch { tensor, .. }
            | Self::Hole { tensor, .. }
            | Self::Overlap { tensor, .. }
            | Self::Truncated { tensor, .. }
            | Self::MissingTensor { tensor, .. }
            | Self::UnindexedTensor { tensor, .. }
            | Self::WrongShard { tensor, .. }
            | Self::DuplicateTensor { tensor, .. }
            | Self::NotStreamable { tensor, .. }
            | Self::OutsideStorage { tensor, .. }
            | Self::Syntax { section: JsonSection::Tensor(tensor), .. }
            | Self::DuplicateKey { section: JsonSection::Tensor(tensor), .. } => Some(tensor),
            Self::Several { problems } => problems.first().and_then(Self::tensor),
            _ => None,
        }
    }

    /// The single problems, most basic first: those of [`CheckpointError::Several`], or this one.
    #[must_use]
    pub fn problems(&self) -> &[Self] {
        match self {
            Self::Several { problems } => problems,
            other => std::slice::from_ref(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::kept;
    use super::*;

    #[test]
    fn messages_stay_on_one_line_of_500_bytes() {
        let error = CheckpointError::Overlap {
            path: "model.safetensors".into(),
            tensor: kept(&"é".repeat(100_000)),
            other: kept(&"x".repeat(100_000)),
            expected_start: u64::MAX,
            found_start: 0,
        };
        let message = error.to_string();
        assert!(message.len() <= 500, "{}", message.len());
        assert!(message.contains("model.safetensors") && message.contains("65536 bytes"), "{message}");
    }

    #[test]
    fn lists_say_how_much_they_left_out() {
        let missing: Vec<String> = (0..64).map(|number| format!("{number}.safetensors")).collect();
        let error = CheckpointError::MissingShards {
            path: "index.json".into(),
            missing,
            missing_count: 413,
            expected_count: 500,
        };
        assert!(error.to_string().contains("413 of 500 files missing"), "{error}");
        assert!(error.to_string().contains("and 409 more"), "{error}");
        assert!(error.is_missing() && !error.is_invalid());
    }

    #[test]
    fn several_is_missing_only_if_all_are() {
        let missing = || CheckpointError::NotFound { path: "a".into() };
        let invalid = || CheckpointError::NotAnIndex { path: "b".into(), found: "a list".to_owned() };
        assert!(CheckpointError::Several { problems: vec![missing(), missing()] }.is_missing());
        let mixed = CheckpointError::Several { problems: vec![missing(), invalid()] };
        assert!(!mixed.is_missing() && mixed.is_invalid());
        assert_eq!(mixed.problems().len(), 2);
        assert!(mixed.to_string().ends_with("(and 1 more)"), "{mixed}");
    }

    #[test]
    fn the_file_and_the_tensor_at_fault_can_be_asked_for() {
        let truncated = || CheckpointError::Truncated {
            path: "a".into(),
            tensor: "t".to_owned(),
            expected_bytes: 2,
            found_bytes: 1,
        };
        let missing = || CheckpointError::NotFound { path: "b".into() };
        let parts = |error: &CheckpointError| {
            let path = error.path().map(|path| path.display().to_string());
            (path, error.tensor().map(ToOwned::to_owned))
        };
        assert_eq!(parts(&truncated()), (Some("a".to_owned()), Some("t".to_owned())));
        assert_eq!(parts(&missing()), (Some("b".to_owned()), None));
        let several = CheckpointError::Several { problems: vec![truncated(), missing()] };
        assert_eq!(parts(&several), parts(&truncated()));
        let nowhere = CheckpointError::InvalidRepository { found: String::new(), reason: "" };
        assert_eq!(parts(&nowhere), (None, None));
    }
}
