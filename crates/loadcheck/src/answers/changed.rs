//! The answer of `report` with two files: what changed.

use crate::numbers::{bytes, ratio_change, seconds, whole};
use crate::report::{Change, Changes};

/// What is called a change, as a share: less is noise.
const CHANGE_MIN: f64 = 0.05;
/// Settings that are named.
const SETTINGS_MAX: usize = 4;

/// `Unreclaimable memory peaks at 41 MiB instead of 73 MiB (-44 %), and it took 1.4 s instead of
/// 1.2 s (+17 %); what differs: budget.`
pub(super) fn changed(changes: &Changes) -> String {
    let mut rows: Vec<&Option<String>> = changes.metrics.iter().map(|change| &change.strategy).collect();
    rows.dedup();
    let clauses = rows.into_iter().filter_map(|row| {
        let of = |metric: &str| {
            changes.metrics.iter().find(|change| change.metric == metric && &change.strategy == row)
        };
        let memory = of("host").and_then(memory);
        let both: Vec<String> = memory.into_iter().chain(of("time").and_then(time)).collect();
        let text = both.join(", and ");
        let text = row.as_ref().map_or_else(|| capitalised(&text), |name| format!("{name}: {text}"));
        (!both.is_empty()).then_some(text)
    });
    let mut sentence = clauses.collect::<Vec<_>>().join("; ");
    if sentence.is_empty() {
        "Neither memory nor time is in both reports".clone_into(&mut sentence);
    }
    format!("{sentence}; {}.", settings(changes))
}

fn capitalised(text: &str) -> String {
    let mut characters = text.chars();
    characters.next().map(|first| first.to_uppercase().chain(characters).collect()).unwrap_or_default()
}

fn memory(change: &Change) -> Option<String> {
    let (before, after) = change.both();
    let (before, after, ratio) = (bytes(whole(before?)), bytes(whole(after?)), change.ratio()?);
    Some(match is_change(ratio) {
        true => {
            format!("unreclaimable memory peaks at {after} instead of {before} ({})", ratio_change(ratio))
        }
        false => format!("unreclaimable memory peaks at {after} as before"),
    })
}

fn time(change: &Change) -> Option<String> {
    let (before, after) = change.both();
    let (before, after, ratio) = (seconds(before?), seconds(after?), change.ratio()?);
    Some(match is_change(ratio) {
        true => format!("it took {after} instead of {before} ({})", ratio_change(ratio)),
        false => format!("it took as long ({after})"),
    })
}

fn is_change(ratio: f64) -> bool {
    (ratio - 1.0).abs() >= CHANGE_MIN
}

fn settings(changes: &Changes) -> String {
    let names: Vec<&str> = changes.settings.iter().map(|setting| setting.setting.as_str()).collect();
    match names.len() {
        0 => "the settings are the same".to_owned(),
        count if count > SETTINGS_MAX => {
            let (named, more) = (names[..SETTINGS_MAX].join(", "), count - SETTINGS_MAX);
            format!("what differs: {named} and {more} more")
        }
        _ => format!("what differs: {}", names.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::ChangedSetting;

    fn sizes(before: u64, after: u64) -> Change {
        let metric = "host".to_owned();
        Change {
            metric,
            before_bytes: Some(before << 20),
            after_bytes: Some(after << 20),
            ..Change::default()
        }
    }

    fn times(before: f64, after: f64) -> Change {
        let metric = "time".to_owned();
        Change { metric, before_seconds: Some(before), after_seconds: Some(after), ..Change::default() }
    }

    #[test]
    fn it_says_what_changed_and_what_did_not() {
        let mut changes = Changes { metrics: vec![sizes(80, 40), times(1.0, 1.21)], ..Changes::default() };
        assert_eq!(
            changed(&changes),
            "Unreclaimable memory peaks at 40 MiB instead of 80 MiB (-50 %), and it took 1.21 s instead of 1 s \
             (+21 %); the settings are the same."
        );
        changes.metrics = vec![sizes(80, 81), times(1.0, 0.97)];
        let name =
            |setting: &str| ChangedSetting { setting: setting.to_owned(), ..ChangedSetting::default() };
        changes.settings = ["budget", "window", "io", "readers", "kernel"].map(name).into();
        assert_eq!(
            changed(&changes),
            "Unreclaimable memory peaks at 81 MiB as before, and it took as long (970 ms); what differs: budget, \
             window, io, readers and 1 more."
        );
        let of = |strategy: &str, change| Change { strategy: Some(strategy.to_owned()), ..change };
        changes.metrics = vec![of("stream", sizes(80, 81)), of("read", sizes(10, 20))];
        assert!(changed(&changes).starts_with(
            "stream: unreclaimable memory peaks at 81 MiB as before; read: unreclaimable memory peaks at 20 MiB"
        ));
        changes.metrics.clear();
        assert!(changed(&changes).starts_with("Neither memory nor time"));
    }
}
