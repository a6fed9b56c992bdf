//! Injected failures, and the number of calls of each function.

use std::collections::BTreeMap;

use crate::code::Code;

/// The name that counts queued copies and fills when they run.
pub(crate) const WORK: &str = "work";

/// One rule of `CUDA_SIM_FAIL`: `function:n:code`, with `*` for all functions, and `n+` or `*` for
/// several calls.
#[derive(Clone, Debug)]
pub(crate) struct Fault {
    function: String,
    first: u64,
    last: u64,
    pub(crate) code: Code,
    /// `!`: the context is lost, whatever the code.
    pub(crate) is_sticky: bool,
    /// `~`: the call still does its work.
    pub(crate) is_done: bool,
}

/// Parses a comma-separated list of rules.
pub(crate) fn parse(text: &str) -> Result<Vec<Fault>, String> {
    text.split(',').filter(|rule| !rule.is_empty()).map(parse_rule).collect()
}

fn parse_rule(rule: &str) -> Result<Fault, String> {
    let wrong = || format!("a fault is function:n:code, not {rule}");
    // `function@n=code` is the same.
    let plain = rule.replace(['@', '='], ":");
    let mut parts = plain.split(':');
    let (Some(function), Some(when), Some(code), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return Err(wrong());
    };
    let (first, last) = match when.strip_suffix('+') {
        _ if when == "*" => (1, u64::MAX),
        Some(first) => (first.parse().map_err(|_| wrong())?, u64::MAX),
        None => {
            let only = when.parse().map_err(|_| wrong())?;
            (only, only)
        }
    };
    let digits = code.trim_end_matches(['!', '~']);
    let code_number = digits.parse().map_err(|_| wrong())?;
    Ok(Fault {
        function: function.to_owned(),
        first,
        last,
        code: Code(code_number),
        is_sticky: code.contains('!'),
        is_done: code.contains('~'),
    })
}

/// The rules and the counts of calls.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    rules: Vec<Fault>,
    calls: BTreeMap<&'static str, u64>,
    total: u64,
}

impl Faults {
    pub(crate) fn new(rules: Vec<Fault>) -> Self {
        Self { rules, ..Self::default() }
    }

    /// Counts a call. Returns its number among the calls of its function, and the matching rule.
    pub(crate) fn count(&mut self, function: &'static str) -> (u64, Option<Fault>) {
        let number = self.calls.entry(function).or_default();
        *number += 1;
        let number = *number;
        let is_call = function != WORK;
        self.total += u64::from(is_call);
        let falls = |rule: &&Fault| match rule.function.as_str() {
            "*" => is_call && (rule.first..=rule.last).contains(&self.total),
            name => name == function && (rule.first..=rule.last).contains(&number),
        };
        (number, self.rules.iter().find(falls).cloned())
    }

    /// Number of calls of all functions so far.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// Number of calls of each function.
    pub(crate) fn calls(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.calls.iter().map(|(&function, &calls)| (function, calls))
    }
}
