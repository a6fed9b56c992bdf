//! Errors of a conversion or a verification as problems, for people and scripts.

use std::error::Error as _;
use std::io;
use std::path::Path;

use onelayer::convert::ConvertError;
use onelayer::load::LoadError;

use crate::library_errors::{self, chain, placed};
use crate::problem::{Code, Problem};

/// The stage in which it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Before anything was written: a failed write means that the request cannot be met.
    Preparing,
    /// While files were written or compared.
    Running,
}

/// True if it was cancelled.
pub(crate) fn is_cancelled(error: &ConvertError) -> bool {
    matches!(error, ConvertError::Load(LoadError::Cancelled))
}

/// The problems for an error. `map` is the file of layer rules.
pub(crate) fn problems(error: &ConvertError, stage: Stage, map: Option<&Path>) -> Vec<Problem> {
    use ConvertError as E;
    let message = chain(error);
    let refused = |path: &Path| placed(Code::TargetRefused, &message, Some(path));
    let problem = match error {
        E::Checkpoint(error) => return library_errors::checkpoint(error),
        E::Layers(error) => library_errors::layers(error, map),
        E::Plan(error) => library_errors::plan(error),
        E::Load(error) => library_errors::load(error, map),
        E::NoTensors { path } => placed(Code::CannotBeMet, &message, Some(path)),
        E::NothingSelected { .. } => Problem::new(Code::NothingSelected, message)
            .at("--select, --exclude")
            .help("`loadcheck inspect` lists layers and names"),
        E::CannotCast { tensor, .. } => Problem::new(Code::CannotCast, message).at(tensor),
        E::SameDirectory { path } | E::OfSource { path } => refused(path),
        E::Exists { path, .. } | E::OtherConversion { path, .. } => refused(path),
        E::Locked { path, .. } => placed(Code::TargetLocked, &message, Some(path))
            .help("wait for it; several processes share the work with --part"),
        E::NoSpace { path, .. } => placed(Code::NoSpace, &message, Some(path)),
        E::Write { path, .. } if stage == Stage::Preparing => refused(path),
        E::Write { path, source, .. } => write_failed(&message, path, source),
        E::HeaderTooLong { file, .. } => Problem::new(Code::CannotBeMet, message).at(file),
        E::TooManySideFiles { path, .. } => placed(Code::CannotBeMet, &message, Some(path)),
        E::Read { path, .. } => placed(Code::SourceUnreadable, &message, Some(path)),
        E::Incomplete { path, .. } => placed(Code::PartsMissing, &message, Some(path)),
        E::BadManifest { path, .. } => placed(Code::BadManifest, &message, Some(path)),
        _ if error.source().is_some() || stage == Stage::Running => Problem::new(Code::WriteFailed, message),
        _ => Problem::new(Code::CannotBeMet, message),
    };
    vec![problem]
}

fn write_failed(message: &str, path: &Path, source: &io::Error) -> Problem {
    let problem = placed(Code::WriteFailed, message, Some(path));
    match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            problem.help("make room; the same command continues after the finished files")
        }
        _ => problem.help("the same command continues after the finished files"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit::Exit;

    fn only(error: &ConvertError, stage: Stage) -> Problem {
        let mut problems = problems(error, stage, None);
        assert_eq!(problems.len(), 1);
        problems.remove(0)
    }

    #[test]
    fn every_kind_has_its_code() {
        let path = || "a/target".into();
        let full = || io::Error::from(io::ErrorKind::StorageFull);
        for (error, stage, code, exit) in [
            (ConvertError::NoTensors { path: path() }, Stage::Preparing, "LC0207", Exit::Usage),
            (ConvertError::NothingSelected { tensors: 3 }, Stage::Preparing, "LC0208", Exit::Usage),
            (ConvertError::SameDirectory { path: path() }, Stage::Preparing, "LC0210", Exit::Usage),
            (ConvertError::OfSource { path: path() }, Stage::Running, "LC0210", Exit::Usage),
            (ConvertError::Exists { path: path(), found: "a file" }, Stage::Preparing, "LC0210", Exit::Usage),
            (ConvertError::Exists { path: path(), found: "a file" }, Stage::Running, "LC0210", Exit::Usage),
            (
                ConvertError::OtherConversion { path: path(), what: "x".into() },
                Stage::Preparing,
                "LC0210",
                Exit::Usage,
            ),
            (
                ConvertError::Locked { path: path(), process: "7".into() },
                Stage::Running,
                "LC0212",
                Exit::Usage,
            ),
            (
                ConvertError::NoSpace { path: path(), needed_bytes: 9, free_bytes: 1 },
                Stage::Running,
                "LC0211",
                Exit::Usage,
            ),
            (
                ConvertError::Write { path: path(), operation: "create it", source: full() },
                Stage::Preparing,
                "LC0210",
                Exit::Usage,
            ),
            (
                ConvertError::Write { path: path(), operation: "write to it", source: full() },
                Stage::Running,
                "LC0509",
                Exit::LoadFailed,
            ),
            (
                ConvertError::Read { path: path(), operation: "read it", source: full() },
                Stage::Running,
                "LC0303",
                Exit::Source,
            ),
            (
                ConvertError::Incomplete { path: path(), first: "f".into(), missing_count: 2 },
                Stage::Running,
                "LC0511",
                Exit::LoadFailed,
            ),
            (
                ConvertError::BadManifest { path: path(), reason: "no".into() },
                Stage::Preparing,
                "LC0305",
                Exit::Source,
            ),
            (
                ConvertError::CannotCast { tensor: "t".into(), dtype: "BOOL".into(), wanted: "bf16".into() },
                Stage::Preparing,
                "LC0214",
                Exit::Usage,
            ),
        ] {
            let problem = only(&error, stage);
            assert_eq!((problem.code.as_str(), problem.code.exit()), (code, exit), "{error}");
            assert!(!problem.message.starts_with("a/target"), "the path is the place: {}", problem.message);
        }
    }

    #[test]
    fn the_cause_is_part_of_the_message() {
        let source = io::Error::from_raw_os_error(28);
        let error = ConvertError::Write { path: "t/f".into(), operation: "write to it", source };
        let problem = only(&error, Stage::Running);
        assert!(problem.message.contains("cannot write to it: No space left"), "{}", problem.message);
        assert_eq!(problem.place.as_deref(), Some("t/f"));
        assert!(problem.help.is_some_and(|help| help.contains("make room")));
    }

    #[test]
    fn cancelling_is_no_failure() {
        assert!(is_cancelled(&ConvertError::Load(LoadError::Cancelled)));
        assert!(!is_cancelled(&ConvertError::NothingSelected { tensors: 1 }));
    }
}
