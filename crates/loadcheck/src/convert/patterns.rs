//! `--select` and `--exclude`: patterns that take layers by their id, or tensors by their name.

use std::sync::atomic::{AtomicBool, Ordering};

use regex::Regex;

use crate::config::bad_pattern;
use crate::problem::Problem;

/// Which tensors are converted.
#[derive(Debug, Default)]
pub(crate) struct Selection {
    select: Vec<Pattern>,
    exclude: Vec<Pattern>,
}

#[derive(Debug)]
struct Pattern {
    text: String,
    matcher: Matcher,
    has_matched: AtomicBool,
}

#[derive(Debug)]
enum Matcher {
    /// The layer whose id is the pattern.
    Layer,
    /// Full names, not anchored.
    Names(Regex),
}

impl Selection {
    /// Parses patterns: ids of layers where `is_layer` is true, regular expressions otherwise.
    ///
    /// # Errors
    /// A problem for each that is neither.
    pub(crate) fn new(
        select: &[String],
        exclude: &[String],
        is_layer: &dyn Fn(&str) -> bool,
    ) -> Result<Self, Vec<Problem>> {
        let mut problems = Vec::new();
        let mut read = |flag: &str, texts: &[String]| -> Vec<Pattern> {
            let patterns = texts.iter().map(|text| Pattern::new(flag, text, is_layer(text)));
            patterns.filter_map(|pattern| pattern.map_err(|problem| problems.push(problem)).ok()).collect()
        };
        let selection = Self { select: read("--select", select), exclude: read("--exclude", exclude) };
        if problems.is_empty() { Ok(selection) } else { Err(problems) }
    }

    /// True if there are no patterns.
    pub(crate) fn is_everything(&self) -> bool {
        self.select.is_empty() && self.exclude.is_empty()
    }

    /// True if the tensor with this name, of this layer, is converted.
    pub(crate) fn takes(&self, tensor: &str, layer: &str) -> bool {
        // Every pattern is tested, to find those that never match.
        let any = |patterns: &[Pattern]| {
            patterns.iter().filter(|pattern| pattern.matches(tensor, layer)).count() > 0
        };
        let (selected, excluded) = (any(&self.select), any(&self.exclude));
        (selected || self.select.is_empty()) && !excluded
    }

    /// A line for each pattern that has not matched anything yet.
    pub(crate) fn idle(&self) -> impl Iterator<Item = String> {
        let flagged = |flag: &'static str, patterns: &'_ [Pattern]| {
            let idle = patterns.iter().filter(|pattern| !pattern.has_matched.load(Ordering::Relaxed));
            idle.map(|pattern| format!("{flag} {:?} matches no tensor", pattern.text)).collect::<Vec<_>>()
        };
        flagged("--select", &self.select).into_iter().chain(flagged("--exclude", &self.exclude))
    }
}

impl Pattern {
    fn new(flag: &str, text: &str, is_layer: bool) -> Result<Self, Problem> {
        let matcher = if is_layer {
            Matcher::Layer
        } else {
            Matcher::Names(Regex::new(text).map_err(|error| bad_pattern(flag, &error))?)
        };
        Ok(Self { text: text.to_owned(), matcher, has_matched: AtomicBool::new(false) })
    }

    fn matches(&self, tensor: &str, layer: &str) -> bool {
        let matches = match &self.matcher {
            Matcher::Layer => layer == self.text,
            Matcher::Names(regex) => regex.is_match(tensor),
        };
        if matches {
            self.has_matched.store(true, Ordering::Relaxed);
        }
        matches
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::Code;

    fn selection(select: &[&str], exclude: &[&str]) -> Selection {
        let owned = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        let is_layer = |text: &str| ["model.layers.1", "model.layers.10", "odd("].contains(&text);
        Selection::new(&owned(select), &owned(exclude), &is_layer).unwrap()
    }

    #[test]
    fn the_id_of_a_layer_is_no_regular_expression() {
        let layer = selection(&["model.layers.1"], &[]);
        assert!(layer.takes("model.layers.1.w", "model.layers.1"));
        assert!(!layer.takes("model.layers.10.w", "model.layers.10"));
        let prefix = selection(&["model.layers"], &[]);
        assert!(prefix.takes("model.layers.10.w", "model.layers.10") && !prefix.takes("lm_head", "lm_head"));
        assert!(selection(&["odd("], &[]).takes("odd(.w", "odd("));
        let refused = Selection::new(&["odd(".into()], &["[".into()], &|_| false).unwrap_err();
        assert_eq!(refused.len(), 2);
        assert!(refused.iter().all(|problem| problem.code == Code::BadPattern));
        assert!(refused[1].message.starts_with("--exclude: "), "{}", refused[1].message);
    }

    #[test]
    fn exclude_wins_over_select() {
        let all = selection(&[], &[]);
        assert!(all.is_everything() && all.takes("a", "a"));
        let some = selection(&["a", "b"], &["c$", "model.layers.1"]);
        assert!(!some.is_everything());
        for (name, layer, expected) in [
            ("xax", "x", true),
            ("b", "b", true),
            ("d", "d", false),
            ("abc", "abc", false),
            ("model.layers.1.a", "model.layers.1", false),
            ("model.layers.10.a", "model.layers.10", true),
        ] {
            assert_eq!(some.takes(name, layer), expected, "{name}");
        }
    }

    #[test]
    fn patterns_that_match_nothing_are_known() {
        let some = selection(&["a", "b"], &["a", "never"]);
        some.takes("ab", "ab");
        let idle: Vec<String> = some.idle().collect();
        assert_eq!(idle, ["--exclude \"never\" matches no tensor"]);
    }
}
