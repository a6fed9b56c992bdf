//! Text of `fit`: every limit that was tried, largest first, and what follows.

use onelayer::units::MIB;

use super::escape::escape;
use super::grid::{Align, grid};
use super::terminal::{Paint, Role, Terminal};
use super::text::{Look, cache_text, device_line, source_line, strategy_line};
use crate::args::CacheArg;
use crate::numbers::median;
use crate::numbers::{bytes, grouped, seconds, to_f64};
use crate::report::{Fit, Fitted, Report, Try, TryOutcome};

/// `loadcheck fit`: the lines that were asked for, or else the log.
pub(super) fn fit(report: &Report, look: &Look) -> Vec<String> {
    match &report.fit {
        Some(fit) if fit.emit.is_some() => fit.emitted.iter().map(|line| escape(line).into_owned()).collect(),
        Some(fit) => lines(report, fit, look),
        None => Vec::new(),
    }
}

/// The log, for stderr, where stdout has something else.
pub(crate) fn log(report: &Report, terminal: &Terminal) -> Vec<String> {
    let look = Look { paint: terminal.stderr_paint, width: None, verbose: terminal.verbose };
    let mut all = report.fit.as_ref().map(|fit| lines(report, fit, &look)).unwrap_or_default();
    if !all.is_empty() {
        all.extend(report.notes.iter().map(|note| format!("note: {}", escape(note))));
    }
    all
}

fn lines(report: &Report, fit: &Fit, look: &Look) -> Vec<String> {
    if fit.loaders.iter().all(|fitted| fitted.tries.is_empty()) {
        return Vec::new();
    }
    let mut lines: Vec<String> = report.source.as_ref().map(source_line).into_iter().collect();
    let has_ours = fit.loaders.iter().any(|fitted| fitted.command.is_none());
    lines.extend(report.plan.as_ref().filter(|_| has_ours).map(|plan| strategy_line(&plan.params)));
    lines.extend(device_line(report));
    let asked = fit.cache.unwrap_or(CacheArg::Cold);
    let shares = fit.loaders.iter().flat_map(|fitted| &fitted.tries).map(|tried| tried.cached_share);
    let found = cache_text(asked, shares).unwrap_or_else(|| "as it was before each run".to_owned());
    let charge = if asked == CacheArg::Warm { ", charged to nobody who is limited" } else { "" };
    lines.push(format!("cache     {found}{charge}"));
    let is_alone = fit.loaders.len() == 1;
    fit.loaders.iter().for_each(|fitted| lines.extend(loader(fitted, is_alone, look)));
    lines
}

/// One loader: its limits, and its answers.
fn loader(fitted: &Fitted, is_alone: bool, look: &Look) -> Vec<String> {
    let mut lines = Vec::new();
    match &fitted.command {
        Some(command) => {
            lines.push(format!("loader    {}: {}", escape(&fitted.strategy), escape(&command.join(" "))));
        }
        None if !is_alone => lines.push(format!("loader    {}", escape(&fitted.strategy))),
        None => {}
    }
    let header = [
        ("limit", Align::Right),
        ("", Align::Left),
        ("time", Align::Right),
        ("slower", Align::Right),
        ("host peak", Align::Right),
        ("read again", Align::Right),
    ];
    let mut table = grid(&header, &rows(fitted), look.width);
    if let Some(first) = table.first_mut() {
        *first = look.paint.paint(Role::Dim, first);
    }
    lines.extend(table);
    lines.extend(answers(fitted, look.paint));
    lines
}

/// A row a limit, the largest first.
fn rows(fitted: &Fitted) -> Vec<Vec<String>> {
    let mut limits: Vec<Option<u64>> = fitted.tries.iter().map(|tried| tried.limit_bytes).collect();
    limits.sort_by_key(|limit| std::cmp::Reverse(limit.unwrap_or(u64::MAX)));
    limits.dedup();
    let row = |limit: &Option<u64>| {
        let tries: Vec<&Try> = fitted.tries.iter().filter(|tried| tried.limit_bytes == *limit).collect();
        let worked: Vec<f64> = tries
            .iter()
            .filter(|tried| tried.outcome == TryOutcome::Ok)
            .filter_map(|tried| tried.seconds)
            .collect();
        let slowdowns: Vec<f64> = tries.iter().filter_map(|tried| tried.slowdown).collect();
        let most = |value: fn(&Try) -> Option<u64>| tries.iter().filter_map(|tried| value(tried)).max();
        vec![
            limit.map_or_else(|| "none".to_owned(), limit_text),
            outcomes(&tries),
            if worked.is_empty() { String::new() } else { seconds(median(&worked)) },
            if slowdowns.is_empty() { String::new() } else { format!("{:.1}x", median(&slowdowns)) },
            most(|tried| tried.peak_host_bytes).map(|peak| bytes(Some(peak))).unwrap_or_default(),
            most(|tried| tried.refault_bytes)
                .filter(|more| *more > 0)
                .map(|more| bytes(Some(more)))
                .unwrap_or_default(),
        ]
    };
    limits.iter().map(row).collect()
}

/// `ok (3 runs)`, `killed by the limit`, `1 of 3 ok, else killed by the limit`.
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
    let limit = tried.limit_bytes.map_or_else(|| "no limit".to_owned(), limit_text);
    let time = tried.seconds.filter(|_| tried.outcome == TryOutcome::Ok);
    format!(
        "{limit:>10}  {}{}",
        word(tried.outcome),
        time.map(|time| format!("  {}", seconds(time))).unwrap_or_default()
    )
}

/// What was found.
fn answers(fitted: &Fitted, paint: Paint) -> Vec<String> {
    let mut lines = Vec::new();
    let interrupted = fitted
        .tries
        .last()
        .is_some_and(|tried| matches!(tried.outcome, TryOutcome::Failed | TryOutcome::Interrupted));
    match (fitted.smallest_bytes, fitted.comfortable_bytes) {
        (None, _) if interrupted || fitted.hi_bytes.is_none() => {
            lines.push(paint.paint(Role::Warning, "partial: the search did not come to its end"));
        }
        (None, _) => {
            let most = fitted.tries.iter().filter_map(|tried| tried.limit_bytes).max();
            let text = format!(
                "no limit up to {} works",
                most.or(fitted.hi_bytes).map(limit_text).unwrap_or_default()
            );
            lines.push(paint.paint(Role::Bad, &text));
        }
        (Some(smallest), comfortable) => {
            let size = limit_text(smallest);
            let below = below(fitted, smallest);
            lines.push(format!("smallest that works   {}{below}", paint.paint(Role::Strong, &size)));
            lines.push(match comfortable {
                Some(comfortable) => {
                    let size = paint.paint(Role::Strong, &limit_text(comfortable));
                    format!("smallest comfortable  {size}   at most 1.1x the time without a limit")
                }
                None => "smallest comfortable  -   slower than 1.1x wherever it was tried".to_owned(),
            });
        }
    }
    if !fitted.flaky_bytes.is_empty() {
        let limits: Vec<String> = fitted.flaky_bytes.iter().map(|limit| limit_text(*limit)).collect();
        let text = format!("flaky     {}: worked in some runs and not in others", limits.join(", "));
        lines.push(paint.paint(Role::Warning, &text));
    }
    lines
}

/// A limit to the mebibyte: neighbours have to differ.
pub(crate) fn limit_text(limit_bytes: u64) -> String {
    if limit_bytes.is_multiple_of(MIB) {
        format!("{} MiB", grouped(limit_bytes / MIB))
    } else {
        format!("{:.2} MiB", to_f64(limit_bytes) / to_f64(MIB))
    }
}

/// What is known of smaller limits.
fn below(fitted: &Fitted, smallest: u64) -> String {
    let failed = fitted
        .tries
        .iter()
        .filter(|tried| tried.outcome != TryOutcome::Ok && tried.limit_bytes < Some(smallest));
    match failed.filter_map(|tried| Some((tried.limit_bytes?, tried.outcome))).max_by_key(|(limit, _)| *limit)
    {
        Some((limit, outcome)) => format!("   {} is not enough: {}", limit_text(limit), word(outcome)),
        None => "   nothing smaller was tried".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbouring_limits_differ() {
        assert_eq!(
            (limit_text(2418 * MIB), limit_text(35 * MIB)),
            ("2 418 MiB".to_owned(), "35 MiB".to_owned())
        );
        assert_eq!(limit_text(35 * MIB + (64 << 10)), "35.06 MiB");
    }

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
        let text = fit(&report, &Look { paint: Paint::NONE, width: None, verbose: false }).join("\n");
        assert!(text.contains("cache     cold before each run (checked: 50 % cached)"), "{text}");
    }
}
