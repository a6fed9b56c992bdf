//! Checks of a machine: what was found, what follows from it, and how to change it.

use serde::{Deserialize, Serialize};

/// One check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Check {
    /// Its name: `cgroup`, `swap`, `memlock`, `address_space`, `overcommit`, `shm`, `cpu`,
    /// `kernel`, `direct_io`, `page_cache`, `io_uring`, `huge_pages`, `peak_reset`, `exact_memory`,
    /// `pressure`, `cuda`, `nvml`.
    pub(crate) check: String,
    /// Whether the feature can be used.
    pub(crate) state: State,
    /// The finding.
    pub(crate) found: String,
    /// The consequence; `null` if there is no restriction.
    pub(crate) consequence: Option<String>,
    /// How to change it: a command, or a request to an administrator; `null` if there is nothing to
    /// do.
    pub(crate) fix: Option<String>,
}

/// Whether a feature can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub(crate) enum State {
    /// It can be used.
    Ok,
    /// It can be used, with a restriction.
    Limited,
    /// It cannot be used.
    Missing,
}

impl Check {
    /// It can be used.
    pub(crate) fn ok(check: &str, found: impl Into<String>) -> Self {
        Self { check: check.to_owned(), state: State::Ok, found: found.into(), consequence: None, fix: None }
    }

    /// It can be used, with a restriction.
    pub(crate) fn limited(check: &str, found: impl Into<String>, consequence: impl Into<String>) -> Self {
        Self { state: State::Limited, consequence: Some(consequence.into()), ..Self::ok(check, found) }
    }

    /// It cannot be used.
    pub(crate) fn missing(check: &str, found: impl Into<String>, consequence: impl Into<String>) -> Self {
        Self { state: State::Missing, ..Self::limited(check, found, consequence) }
    }

    /// Adds how to change it.
    pub(crate) fn fix(mut self, fix: impl Into<String>) -> Self {
        self.fix = Some(fix.into());
        self
    }
}
