//! What a verification has found so far.

use std::path::Path;

use super::{CheckpointError, ConvertError, Difference, VerifyReport};

/// Differences that are listed.
const DIFFERENCES_MAX: usize = 1000;

/// A report on its way.
#[derive(Debug, Default)]
pub(super) struct Findings {
    pub(super) report: VerifyReport,
    /// Differences beyond those that are listed.
    more: u64,
}

impl Findings {
    /// Something is not as it should be.
    pub(super) fn differ(&mut self, place: &str, what: String) {
        if self.report.differences.len() < DIFFERENCES_MAX {
            self.report.differences.push(Difference { place: place.to_owned(), what });
        } else {
            self.more += 1;
        }
    }

    /// A person should know this.
    pub(super) fn note(&mut self, note: String) {
        self.report.notes.push(note);
    }

    /// A checkpoint cannot be opened: what is wrong with its files are differences.
    ///
    /// # Errors
    /// The error itself, if the system refused to read, or if nothing says that there should be a
    /// checkpoint.
    pub(super) fn refused(
        &mut self,
        error: CheckpointError,
        root: Option<&Path>,
        has_manifest: bool,
    ) -> Result<(), ConvertError> {
        let is_nothing =
            matches!(error, CheckpointError::NotFound { .. } | CheckpointError::NoWeights { .. });
        let is_damage = error.is_invalid() || error.is_missing();
        if !is_damage || (is_nothing && !has_manifest) {
            return Err(error.into());
        }
        for problem in error.problems() {
            let text = problem.to_string();
            // Messages begin with the path of the file.
            let (place, what) = text.split_once(": ").unwrap_or(("checkpoint", &text));
            let below = root.and_then(|root| Path::new(place).strip_prefix(root).ok()?.to_str());
            self.differ(below.filter(|below| !below.is_empty()).unwrap_or(place), what.to_owned());
        }
        Ok(())
    }

    /// The report.
    pub(super) fn finish(mut self) -> VerifyReport {
        if self.more > 0 {
            let what = format!("{} more differences are not listed", self.more);
            self.report.differences.push(Difference { place: "report".to_owned(), what });
        }
        self.report
    }
}
