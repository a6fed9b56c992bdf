//! `fit`: every limit that was tried, largest first, and the smallest that work.

use super::document::{Document, Part, Table, Text, View, fact, name, role};
use super::facts;
use super::terminal::Role;
use crate::args::CacheArg;
use crate::numbers::{bytes, limit_bytes, median, seconds};
use crate::report::{Fit, Fitted, Report, Try, TryOutcome};

/// The document of `fit`: the lines of `--emit` if they were asked for, otherwise the log.
pub(super) fn document(report: &Report, view: View) -> Document {
    match &report.fit {
        Some(fit) if view.is_page => page(report, fit, view),
        Some(fit) if fit.emit.is_some() => {
            let mut document = Document::default();
            document.extend((!fit.emitted.is_empty()).then(|| Part::Verbatim(fit.emitted.clone())));
            document
        }
        Some(fit) => log(report, fit, view),
        None => Document::default(),
    }
}

fn page(report: &Report, fit: &Fit, view: View) -> Document {
    let mut document = Document::default();
    add_facts(report, fit, view, &mut document);
    let limit = |limit: Option<u64>| limit.map_or_else(|| "-".to_owned(), limit_bytes);
    document.table(
        Table::of(&fit.loaders)
            .left("loader", |fitted| name(&fitted.strategy))
            .right("smallest that works", |fitted| limit(fitted.smallest_bytes))
            .right("smallest comfortable", |fitted| limit(fitted.comfortable_bytes))
            .right("without a limit", |fitted| fitted.unlimited_seconds.map(seconds))
            .table(),
    );
    document.extend((!fit.emitted.is_empty()).then(|| Part::Verbatim(fit.emitted.clone())));
    document
}

/// Every limit that was tried. Empty if none was.
pub(super) fn log(report: &Report, fit: &Fit, view: View) -> Document {
    let mut document = Document::default();
    if fit.loaders.iter().all(|fitted| fitted.tries.is_empty()) {
        return document;
    }
    add_facts(report, fit, view, &mut document);
    for fitted in &fit.loaders {
        match &fitted.command {
            Some(command) => {
                document.fact("loader", format!("{}: {}", fitted.strategy, command.join(" ")));
            }
            None if fit.loaders.len() > 1 => document.fact("loader", fitted.strategy.as_str()),
            None => {}
        }
        document.table(tries(fitted));
        add_answers(fitted, &mut document);
    }
    document
}

fn add_facts(report: &Report, fit: &Fit, view: View, document: &mut Document) {
    document.extend(report.source.as_ref().map(|source| facts::source(source, view)));
    let has_ours = fit.loaders.iter().any(|fitted| fitted.command.is_none());
    let plan = report.plan.as_ref().filter(|_| has_ours && view.shows_how());
    document.extend(plan.map(|plan| facts::strategy(&plan.params)));
    document.extend(facts::device(report));
    let asked = fit.cache.unwrap_or(CacheArg::Cold);
    let shares = fit.loaders.iter().flat_map(|fitted| &fitted.tries).map(|tried| tried.cached_share);
    let found = facts::cache_text(asked, shares).unwrap_or_else(|| "as it was before each run".to_owned());
    let charge = if asked == CacheArg::Warm { ", outside the limit" } else { "" };
    document.fact("cache", format!("{found}{charge}"));
}

/// A row for each limit, the largest first.
fn tries(fitted: &Fitted) -> Table {
    let mut limits: Vec<Option<u64>> = fitted.tries.iter().map(|tried| tried.limit_bytes).collect();
    limits.sort_by_key(|limit| std::cmp::Reverse(limit.unwrap_or(u64::MAX)));
    limits.dedup();
    let at = |limit: Option<u64>| fitted.tries.iter().filter(move |tried| tried.limit_bytes == limit);
    let middle = |values: Vec<f64>| (!values.is_empty()).then(|| median(&values));
    let worked = |tries: &[&Try]| {
        let worked = tries.iter().filter(|tried| tried.outcome == TryOutcome::Ok);
        worked.filter_map(|tried| tried.seconds).collect()
    };
    let slowdowns = |tries: &[&Try]| tries.iter().filter_map(|tried| tried.slowdown).collect();
    Table::of(limits.into_iter().map(|limit| (limit, at(limit).collect::<Vec<&Try>>())))
        .right("limit", |(limit, _)| limit.map_or_else(|| "none".to_owned(), limit_bytes))
        .left("", |(_, tries)| outcomes(tries))
        .right("time", |(_, tries)| middle(worked(tries)).map(seconds))
        .right("slower", |(_, tries)| middle(slowdowns(tries)).map(|ratio| format!("{ratio:.1}x")))
        .right("unreclaimable", |(_, tries)| {
            tries.iter().filter_map(|tried| tried.peak_host_bytes).max().map(bytes)
        })
        .right("read again", |(_, tries)| {
            let most = tries.iter().filter_map(|tried| tried.refault_bytes).max();
            most.filter(|more| *more > 0).map(bytes)
        })
        .table()
}

/// `ok (3 runs)`, `killed by the limit`, `flaky: 1 of 3 ok, else killed by the limit`.
fn outcomes(tries: &[&Try]) -> String {
    let works = tries.iter().filter(|tried| tried.outcome == TryOutcome::Ok).count();
    let failed = tries.iter().find(|tried| tried.outcome != TryOutcome::Ok).map(|tried| word(tried.outcome));
    match (failed, tries.len()) {
        (None, 1) => "ok".to_owned(),
        (None, count) => format!("ok ({count} runs)"),
        (Some(word), 1) => word.to_owned(),
        (Some(word), count) if works == 0 => format!("{word} ({count} runs)"),
        (Some(word), count) => format!("flaky: {works} of {count} ok, else {word}"),
    }
}

fn word(outcome: TryOutcome) -> &'static str {
    match outcome {
        TryOutcome::Ok => "ok",
        TryOutcome::Killed => "killed by the limit",
        TryOutcome::Refused => "refused",
        TryOutcome::TooSlow => "stopped: too slow",
        TryOutcome::Failed => "failed",
        TryOutcome::Interrupted => "interrupted",
    }
}

/// One run in one line, as it happens: `420 MiB  ok  1.20 s`.
pub(crate) fn try_line(tried: &Try) -> String {
    let limit = tried.limit_bytes.map_or_else(|| "no limit".to_owned(), limit_bytes);
    let time = tried.seconds.filter(|_| tried.outcome == TryOutcome::Ok);
    let time = time.map(|time| format!("  {}", seconds(time))).unwrap_or_default();
    format!("{limit:>10}  {}{time}", word(tried.outcome))
}

/// The smallest limits, or why there are none.
fn add_answers(fitted: &Fitted, document: &mut Document) {
    let is_cut_short = fitted
        .tries
        .last()
        .is_some_and(|tried| matches!(tried.outcome, TryOutcome::Failed | TryOutcome::Interrupted));
    let strong = |limit| role(Role::Strong, limit_bytes(limit));
    match (fitted.smallest_bytes, fitted.comfortable_bytes) {
        (None, _) if is_cut_short || fitted.hi_bytes.is_none() => {
            document.line(role(Role::Warning, "partial: the search did not come to its end"));
        }
        (None, _) => {
            let most = fitted.tries.iter().filter_map(|tried| tried.limit_bytes).max();
            let most = most.or(fitted.hi_bytes).map(limit_bytes).unwrap_or_default();
            document.line(role(Role::Bad, format!("no limit up to {most} works")));
        }
        (Some(smallest), comfortable) => {
            document.line(Text::from("smallest that works   ") + strong(smallest) + below(fitted, smallest));
            let comfortable = match comfortable {
                Some(limit) => strong(limit) + "   at most 1.1x the time without a limit",
                None => "-   slower than 1.1x wherever it was tried".into(),
            };
            document.line(Text::from("smallest comfortable  ") + comfortable);
        }
    }
    if !fitted.flaky_bytes.is_empty() {
        let limits: Vec<String> = fitted.flaky_bytes.iter().copied().map(limit_bytes).collect();
        let text = format!("{}: worked in some runs and not in others", limits.join(", "));
        document.push(fact("flaky", role(Role::Warning, text)));
    }
}

/// The largest smaller limit that failed.
fn below(fitted: &Fitted, smallest: u64) -> String {
    let failed = fitted
        .tries
        .iter()
        .filter(|tried| tried.outcome != TryOutcome::Ok && tried.limit_bytes < Some(smallest));
    match failed.filter_map(|tried| Some((tried.limit_bytes?, tried.outcome))).max_by_key(|(limit, _)| *limit)
    {
        Some((limit, outcome)) => format!("   {} is not enough: {}", limit_bytes(limit), word(outcome)),
        None => "   nothing smaller was tried".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_at_a_limit_are_one_line() {
        let tried = |outcome| Try { outcome, ..Try::default() };
        let (ok, killed, slow) =
            (tried(TryOutcome::Ok), tried(TryOutcome::Killed), tried(TryOutcome::TooSlow));
        assert_eq!(outcomes(&[&ok]), "ok");
        assert_eq!(outcomes(&[&ok, &ok]), "ok (2 runs)");
        assert_eq!(outcomes(&[&killed, &killed]), "killed by the limit (2 runs)");
        assert_eq!(outcomes(&[&ok, &slow, &ok]), "flaky: 2 of 3 ok, else stopped: too slow");
    }

    #[test]
    fn the_state_of_the_page_cache_is_what_was_found() {
        let tried = |cached_share| Try {
            outcome: TryOutcome::Ok,
            cached_share: Some(cached_share),
            ..Try::default()
        };
        let loader = Fitted { tries: vec![tried(0.0), tried(0.5)], ..Fitted::default() };
        let mut report = Report::new(crate::report::CommandName::Fit);
        report.fit = Some(Fit { cache: Some(CacheArg::Cold), loaders: vec![loader], ..Fit::default() });
        let document = document(&report, View::default());
        let text = crate::output::text::draw(&document, crate::output::terminal::Paint::NONE, None);
        assert!(text.contains("cache     cold before each run (checked: 50 % cached)"), "{text}");
    }
}
