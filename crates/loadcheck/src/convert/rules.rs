//! The file of `--dtype-rules`: which tensors become which type, by name.
//!
//! ```toml
//! [[rule]]
//! match = "norm"       # a regular expression on full names, not anchored
//! dtype = "keep"
//!
//! [[rule]]
//! match = "^vision_tower\\."
//! dtype = "bf16"
//! ```
//!
//! The first rule that matches a tensor applies. This file parses rules and counts their matches;
//! the library casts.

use std::sync::atomic::{AtomicU64, Ordering};

use onelayer::FloatType;
use onelayer::convert::Casting;
use onelayer_system::TextPosition;
use regex::Regex;
use serde::Deserialize;
use toml::Spanned;

use crate::args::reason_of;

/// Rules are written by hand: a larger file was given by mistake.
pub(crate) const RULES_BYTES_MAX: u64 = 256 << 10;

/// A list of rules.
#[derive(Debug)]
pub(crate) struct DtypeRules {
    rules: Vec<Rule>,
}

#[derive(Debug)]
struct Rule {
    pattern: Regex,
    casting: Casting,
    /// As the file spells it.
    dtype: String,
    position: TextPosition,
    /// How often it applied.
    decisions: AtomicU64,
}

/// Why a text is not a file of rules.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RulesError {
    /// Not TOML, or unknown keys or wrong types.
    #[error("line {}, column {}: {message}", position.line, position.column)]
    Syntax {
        /// Where.
        position: TextPosition,
        /// The parser's message on one line.
        message: String,
    },
    /// A regular expression that does not compile.
    #[error("line {}, column {}: `match` is no regular expression: {reason}", position.line, position.column)]
    Pattern {
        /// Where.
        position: TextPosition,
        /// Why not.
        reason: String,
    },
    /// A type that tensors cannot be cast to.
    #[error("line {}, column {}: `dtype` is {found:?}; write bf16, f16, f32 or keep", position.line, position.column)]
    Dtype {
        /// Where.
        position: TextPosition,
        /// The text that was found.
        found: String,
    },
    /// No rules.
    #[error("holds no [[rule]]")]
    Empty,
}

/// The file as serde sees it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    rule: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    #[serde(rename = "match")]
    pattern: Spanned<String>,
    dtype: Spanned<String>,
}

impl DtypeRules {
    /// Reads the text of a file.
    ///
    /// # Errors
    /// [`RulesError`], with line and column where there is one.
    pub(crate) fn parse(text: &str) -> Result<Self, RulesError> {
        let file: File = toml::from_str(text).map_err(|error| RulesError::Syntax {
            position: TextPosition::of_byte(text, error.span().unwrap_or_default().start),
            message: error.message().replace('\n', ", "),
        })?;
        if file.rule.is_empty() {
            return Err(RulesError::Empty);
        }
        let rules = file.rule.into_iter().map(|entry| Rule::read(entry, text)).collect::<Result<_, _>>()?;
        Ok(Self { rules })
    }

    /// The decision about the tensor with this name; `None` if no rule matches.
    pub(crate) fn decide(&self, name: &str) -> Option<Casting> {
        let rule = self.rules.iter().find(|rule| rule.pattern.is_match(name))?;
        rule.decisions.fetch_add(1, Ordering::Relaxed);
        Some(rule.casting)
    }

    /// A line for each rule that has not applied to any tensor yet.
    pub(crate) fn idle(&self) -> impl Iterator<Item = String> {
        let idle = self.rules.iter().filter(|rule| rule.decisions.load(Ordering::Relaxed) == 0);
        idle.map(|rule| {
            format!(
                "the dtype rule in line {} ({:?}) applies to no tensor: nothing matches it, or earlier rules apply",
                rule.position.line,
                rule.pattern.as_str()
            )
        })
    }

    /// A line for each rule, as the manifest lists them.
    pub(crate) fn lines(&self) -> impl Iterator<Item = String> {
        self.rules.iter().map(|rule| format!("rule {:?} = {}", rule.pattern.as_str(), rule.dtype))
    }
}

impl Rule {
    fn read(entry: Entry, text: &str) -> Result<Self, RulesError> {
        let position = TextPosition::of_byte(text, entry.pattern.span().start);
        let pattern = Regex::new(entry.pattern.get_ref())
            .map_err(|error| RulesError::Pattern { position, reason: reason_of(&error) })?;
        let dtype = entry.dtype.get_ref().clone();
        let casting = match FloatType::ALL.into_iter().find(|float| float.short_name() == dtype) {
            Some(float) => Casting::To(float),
            None if dtype == "keep" => Casting::Keep,
            None => {
                let position = TextPosition::of_byte(text, entry.dtype.span().start);
                return Err(RulesError::Dtype { position, found: dtype });
            }
        };
        Ok(Self { pattern, casting, dtype, position, decisions: AtomicU64::new(0) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(pattern: &str, dtype: &str) -> String {
        format!("[[rule]]\nmatch = '{pattern}'\ndtype = \"{dtype}\"\n\n")
    }

    #[test]
    fn the_first_rule_that_matches_decides() {
        let text = [rule("norm", "keep"), rule("^model\\.", "bf16"), rule("head", "f32"), rule("h", "f16")];
        let rules = DtypeRules::parse(&text.concat()).unwrap();
        assert_eq!(rules.decide("model.norm.weight"), Some(Casting::Keep));
        assert_eq!(rules.decide("model.head"), Some(Casting::To(FloatType::Bf16)));
        assert_eq!(rules.decide("lm_head"), Some(Casting::To(FloatType::F32)), "patterns are not anchored");
        assert_eq!(rules.decide("h"), Some(Casting::To(FloatType::F16)));
        assert_eq!(rules.decide("a.model.b"), None);
    }

    #[test]
    fn rules_that_decided_nothing_are_known() {
        let rules = DtypeRules::parse(&[rule("a", "bf16"), rule("ab", "f16")].concat()).unwrap();
        assert_eq!(rules.idle().count(), 2);
        rules.decide("ab");
        let idle: Vec<String> = rules.idle().collect();
        assert_eq!(idle.len(), 1, "the second one is in the shadow of the first: {idle:?}");
        assert!(idle[0].contains("line 6") && idle[0].contains("\"ab\""), "{idle:?}");
        assert_eq!(rules.lines().collect::<Vec<_>>(), ["rule \"a\" = bf16", "rule \"ab\" = f16"]);
    }

    #[test]
    fn mistakes_are_told_with_their_place() {
        for (text, expected) in [
            ("", "holds no [[rule]]"),
            ("rule = []", "holds no [[rule]]"),
            ("[[rules]]", "line 1, column 3: unknown field `rules`, expected `rule`"),
            ("\n[[rule]]\nmatch = 'x'", "line 2, column 1: missing field `dtype`"),
            ("[[rule]]\nmatch = 'x'\ndtype = 'bf16'\nto = 1", "line 4, column 1: unknown field `to`"),
            ("[[rule]]\nmatch = 7\ndtype = 'bf16'", "line 2, column 9: invalid type: integer `7`"),
            ("[[rule]]\nmatch = 'x'\ndtype = 'int8'", "line 3, column 9: `dtype` is \"int8\"; write bf16,"),
            ("[[rule]]\nmatch = 'x'\ndtype = 'BF16'", "line 3, column 9: `dtype` is \"BF16\""),
            (
                "[[rule]]\nmatch = 'é('\ndtype = 'bf16'",
                "line 2, column 9: `match` is no regular expression: ",
            ),
            ("[[rule]\n", "line 1, column "),
        ] {
            let message = DtypeRules::parse(text).unwrap_err().to_string();
            assert!(message.contains(expected), "{text:?}: {message}");
        }
    }
}
