//! What is reported of a machine: what was tried, what was found, what follows, and how to change
//! it.

use serde::{Deserialize, Serialize};

/// One thing that was tried.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Check {
    /// What: `cgroup`, `swap`, `memlock`, `address_space`, `overcommit`, `shm`, `cpu`, `kernel`,
    /// `direct_io`, `page_cache`, `io_uring`, `huge_pages`, `peak_reset`, `exact_memory`,
    /// `pressure`, `cuda`, `nvml`.
    pub(crate) check: String,
    /// Whether it can be used.
    pub(crate) state: State,
    /// What was found.
    pub(crate) found: String,
    /// What follows; `null` if all is well.
    pub(crate) consequence: Option<String>,
    /// How to change it: a command, or what to ask for; `null` if there is nothing to do.
    pub(crate) fix: Option<String>,
}

/// Whether something can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub(crate) enum State {
    /// It can.
    Ok,
    /// It can, with a restriction.
    Limited,
    /// It cannot.
    Missing,
}

impl Check {
    /// All is well.
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

    /// Adds what to do.
    pub(crate) fn fix(mut self, fix: impl Into<String>) -> Self {
        self.fix = Some(fix.into());
        self
    }
}
