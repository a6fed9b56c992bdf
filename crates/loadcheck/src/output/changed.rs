//! `report` with two files: both values of every metric, and the settings that differ.

use super::document::{Document, Table, View, name};
use crate::numbers::{bytes, rate, ratio_change, seconds, whole};
use crate::report::{Change, ChangedSetting, Changes, Report, metric_name};

/// The document.
pub(super) fn document(report: &Report, _view: View) -> Document {
    let mut document = Document::default();
    let Some(changes) = &report.changes else { return document };
    for (label, file) in ["before", "after"].into_iter().zip(&changes.files) {
        document.fact(label, name(file.as_str()));
    }
    document.gap();
    document.table(metrics(changes));
    if !changes.settings.is_empty() {
        document.gap();
        document.table(settings(changes));
    }
    document
}

/// Every metric.
pub(super) fn metrics(changes: &Changes) -> Table {
    Table::of(&changes.metrics)
        .left("row", |change| change.strategy.clone())
        .left("", |change| words(&change.metric).to_owned())
        .right("before", |change| value(change, change.both().0))
        .right("after", |change| value(change, change.both().1))
        .right("change", |change| change.ratio().map(ratio_change))
        .table()
}

/// Every setting that differs.
pub(super) fn settings(changes: &Changes) -> Table {
    let cell = |value: &Option<String>| value.clone().unwrap_or_else(|| "-".to_owned());
    Table::of(&changes.settings)
        .left("differs", |setting: &&ChangedSetting| setting.setting.clone())
        .left("before", move |setting| cell(&setting.before))
        .left("after", move |setting| cell(&setting.after))
        .table()
}

/// A metric as people read it.
fn words(metric: &str) -> &str {
    match metric {
        "rss" => "RSS",
        "vram" => "VRAM",
        "after" => "RSS after",
        "cpu" => "CPU time",
        other => metric_name(other),
    }
}

/// One side of a change, in its unit.
fn value(change: &Change, side: Option<f64>) -> String {
    let Some(value) = side else { return "-".to_owned() };
    if change.before_seconds.or(change.after_seconds).is_some() {
        return seconds(value);
    }
    match change.before_bytes_per_second.or(change.after_bytes_per_second) {
        Some(_) => rate(whole(value), 1.0).unwrap_or_default(),
        None => bytes(whole(value)),
    }
}
