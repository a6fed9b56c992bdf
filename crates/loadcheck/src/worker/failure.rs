//! Why a load ended early.

use std::path::Path;

use onelayer::LoadError;

use crate::library_errors;
use crate::problem::Problem;
use crate::report::Outcome;

/// Why a load ended early.
pub(super) enum Failure {
    /// Somebody asked for it.
    Cancelled,
    /// Something went wrong.
    Failed(Problem),
}

impl Failure {
    /// From an error of the library; `rules` is the file of layer rules.
    pub(super) fn of(error: &LoadError, rules: Option<&Path>) -> Self {
        match error {
            LoadError::Cancelled => Self::Cancelled,
            error => Self::Failed(library_errors::load(error, rules)),
        }
    }
}

/// How a load ended, as a report has it.
pub(super) fn outcome_of(failure: Option<Failure>) -> (Outcome, Option<Problem>) {
    match failure {
        None => (Outcome::Completed, None),
        Some(Failure::Cancelled) => (Outcome::Interrupted, None),
        Some(Failure::Failed(problem)) => (Outcome::Failed, Some(problem)),
    }
}
