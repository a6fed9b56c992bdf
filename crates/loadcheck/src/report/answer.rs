//! The answer of a command: one sentence, and one word for programs.

use serde::{Deserialize, Serialize};

/// The answer of a command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Answer {
    /// The finding in one word, for programs.
    pub(crate) outcome: Finding,
    /// The finding in one sentence, for people.
    pub(crate) sentence: String,
}

/// What was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub(crate) enum Finding {
    /// Measured or done, and nothing is wrong.
    Ok,
    /// It fits in memory.
    Fits,
    /// It does not fit in memory.
    DoesNotFit,
    /// A limit or the promise was exceeded.
    OverLimit,
    /// A limit lies inside the spread of what was measured.
    Unclear,
    /// Memory grows from cycle to cycle.
    Grows,
    /// A checkpoint is not what it should be.
    Differs,
    /// An error ended the command.
    Error,
}

/// `plan` and `fits`: whether the host memory of a load fits, derived from the headers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Room {
    /// Unreclaimable memory that the load needs at most: budget, layers that stay, the program.
    pub(crate) needed_bytes: u64,
    /// Memory that there is.
    pub(crate) limit_bytes: u64,
    /// Who says so.
    pub(crate) limit_of: LimitOf,
    /// Whether it fits.
    pub(crate) fits: bool,
    /// Other flags with which it does, if it does not.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) alternatives: Vec<Alternative>,
}

/// Who says how much memory there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub(crate) enum LimitOf {
    /// The command line.
    Stated,
    /// What is free below the limit of the control group that the program runs in.
    Cgroup,
    /// The free memory of the machine.
    Machine,
}

/// Flags with which a load fits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Alternative {
    /// As on the command line.
    pub(crate) flags: String,
    /// Unreclaimable memory that the load needs with them.
    pub(crate) needed_bytes: u64,
}
