//! Two saved reports of the same command: what changed in memory, time and settings.

use crate::numbers::{bytes, mean, stated, to_f64};
use crate::problem::{Code, Problem};
use crate::report::{Change, ChangedSetting, Changes, CommandName, Compared, Outcome, Params, Report, Run};

/// A report on both. Host, source, command and limits are those of the second one.
///
/// # Errors
/// Reports that cannot be compared: of different commands, of one without peaks, or without a run.
pub(crate) fn changes(before: Report, after: Report, files: [String; 2]) -> Result<Report, Problem> {
    if let Some(problem) = refusal(&before, &after, &files) {
        return Err(problem);
    }
    let rows = rows(&before, &after);
    let (mut metrics, mut runs) = (Vec::new(), Vec::new());
    for row in &rows {
        metrics.extend(row.metrics(&before, &after));
        if let Some((one, other)) = row.highest(&before).zip(row.highest(&after)) {
            runs.extend([one.clone(), other.clone()]);
        }
    }
    let settings = settings(&before, &after);
    Ok(Report {
        changes: Some(Changes { files, metrics, settings }),
        host: after.host,
        source: after.source,
        exec: after.exec,
        limits: after.limits,
        runs,
        ..Report::new(CommandName::Report)
    })
}

/// Why these two cannot be compared, if so.
fn refusal(before: &Report, after: &Report, files: &[String; 2]) -> Option<Problem> {
    let [one, other] = files;
    let problem = |message: String, help: &str| Some(Problem::new(Code::CannotBeMet, message).help(help));
    if before.command != after.command {
        let (first, second) = (before.command.name(), after.command.name());
        let message = format!("{one} is a report of `{first}`, and {other} one of `{second}`");
        return problem(message, "two reports of the same command can be compared");
    }
    match before.command {
        CommandName::Run | CommandName::Exec | CommandName::Compare => {}
        command => {
            let message = format!("reports of `{}` are not compared", command.name());
            return problem(message, "two reports of `run`, of `exec` or of `compare` can be");
        }
    }
    let empty = [(before, one), (after, other)].into_iter().find(|(report, _)| report.runs.is_empty());
    empty.and_then(|(_, name)| problem(format!("{name} has no run"), "it ended before anything was measured"))
}

/// A size of a run, if it was measured.
type SizeOf = fn(&Run) -> Option<u64>;

/// The sizes that are compared: the names of their metrics.
const SIZES: [(&str, SizeOf); 6] = [
    ("host", |run| run.peak.host_bytes),
    ("rss", |run| run.peak.rss_bytes),
    ("pinned", |run| run.peak.pinned_bytes),
    ("vram", |run| run.peak.vram_bytes),
    ("after", |run| run.after_unload.as_ref()?.rss_bytes),
    ("read", |run| run.io.read_bytes),
];

/// Runs that belong together: all of them, or those of a row that both comparisons have.
struct Row {
    strategy: Option<String>,
}

fn rows(before: &Report, after: &Report) -> Vec<Row> {
    if before.command != CommandName::Compare {
        return vec![Row { strategy: None }];
    }
    let is_in_both = |row: &&Compared| after.comparison.iter().any(|other| other.strategy == row.strategy);
    let shared = before.comparison.iter().filter(is_in_both);
    shared.map(|row| Row { strategy: Some(row.strategy.clone()) }).collect()
}

impl Row {
    fn runs<'a>(&self, report: &'a Report) -> impl Iterator<Item = &'a Run> {
        let strategy = self.strategy.clone();
        report.runs.iter().filter(move |run| strategy.as_ref().is_none_or(|name| run.strategy == *name))
    }

    fn highest<'a>(&self, report: &'a Report) -> Option<&'a Run> {
        self.runs(report).max_by_key(|run| run.peak.host_bytes)
    }

    fn metrics(&self, before: &Report, after: &Report) -> Vec<Change> {
        let change = |metric: &str| Change {
            strategy: self.strategy.clone(),
            metric: metric.to_owned(),
            ..Change::default()
        };
        let most = |report, of: SizeOf| self.runs(report).filter_map(of).max();
        let mut metrics: Vec<Change> = SIZES
            .into_iter()
            .map(|(name, of)| Change {
                before_bytes: most(before, of),
                after_bytes: most(after, of),
                ..change(name)
            })
            .collect();
        let (earlier, later) = (self.seconds(before), self.seconds(after));
        metrics.push(Change { before_seconds: earlier, after_seconds: later, ..change("time") });
        let cpu = |report| self.mean(report, |run| run.cpu_seconds);
        metrics.push(Change { before_seconds: cpu(before), after_seconds: cpu(after), ..change("cpu") });
        let rate = |report, seconds: Option<f64>| {
            let moved = most(report, |run| run.io.read_bytes).map(to_f64);
            moved.zip(seconds).filter(|(_, seconds)| *seconds > 0.0).map(|(moved, seconds)| moved / seconds)
        };
        metrics.push(Change {
            before_bytes_per_second: rate(before, earlier),
            after_bytes_per_second: rate(after, later),
            ..change("rate")
        });
        metrics.retain(|change| !is_nothing(change.both()));
        metrics
    }

    /// The mean over the runs that completed; of a comparison the median.
    fn seconds(&self, report: &Report) -> Option<f64> {
        let row = report.comparison.iter().find(|row| Some(&row.strategy) == self.strategy.as_ref());
        match row {
            Some(row) => row.seconds.as_ref().map(|time| time.median),
            None => self.mean(report, |run| run.seconds),
        }
    }

    fn mean(&self, report: &Report, of: fn(&Run) -> Option<f64>) -> Option<f64> {
        let is_whole = |run: &&Run| matches!(run.outcome, Outcome::Completed | Outcome::Stopped);
        let values: Vec<f64> = self.runs(report).filter(is_whole).filter_map(of).collect();
        (!values.is_empty()).then(|| mean(&values))
    }
}

/// Neither measured, or 0 in both: no page-locked memory, for example.
fn is_nothing((before, after): (Option<f64>, Option<f64>)) -> bool {
    let none = |value: Option<f64>| value.is_none_or(|value| value <= 0.0);
    none(before) && none(after)
}

/// Settings and circumstances that differ.
fn settings(before: &Report, after: &Report) -> Vec<ChangedSetting> {
    let pairs = facts(before).into_iter().zip(facts(after));
    let differ = pairs.filter(|((_, one), (_, other))| one != other);
    let setting = |((name, before), (_, after)): ((&str, _), (_, _))| ChangedSetting {
        setting: name.to_owned(),
        before,
        after,
    };
    differ.map(setting).collect()
}

/// Everything about a report that is not measured: names, and values as people read them.
fn facts(report: &Report) -> Vec<(&'static str, Option<String>)> {
    let params = report.runs.iter().find_map(|run| run.params.as_ref());
    let of = |value: fn(&Params) -> Option<String>| params.and_then(value);
    let host = report.host.as_ref();
    let source = report.source.as_ref();
    let rows = report.comparison.iter().map(|row| row.strategy.as_str()).collect::<Vec<_>>().join(", ");
    let cache = report.runs.first().map(|run| crate::args::name_of(run.cache.asked));
    vec![
        ("source", source.map(|source| source.given.clone())),
        ("bytes of the source", source.and_then(|source| source.bytes).map(bytes)),
        ("command", report.exec.as_ref().map(|exec| exec.command.join(" "))),
        ("rows", Some(rows)),
        ("budget", of(|params| Some(stated(params.budget_bytes)))),
        ("window", of(window)),
        ("prefetch", of(|params| Some(params.prefetch.to_string()))),
        ("passes", of(|params| params.passes.map(|passes| passes.to_string()))),
        ("device", of(|params| Some(params.device.clone()))),
        ("GPU", host.and_then(|host| host.gpus.first()).map(|gpu| gpu.name.clone())),
        ("device budget", of(|params| params.device_budget_bytes.map(stated))),
        ("device reserve", of(|params| params.device_reserve_bytes.map(stated))),
        ("io", of(|params| Some(params.io.clone()))),
        ("readers", of(|params| params.readers.map(|readers| readers.to_string()))),
        ("cache", cache),
        ("dtype", of(|params| params.dtype.clone())),
        ("quantise", of(|params| params.quantise.clone())),
        ("rank", of(|params| params.tp.clone())),
        ("hash", of(|params| params.hash.then(|| "yes".to_owned()))),
        ("verify", of(|params| params.verify.then(|| "yes".to_owned()))),
        ("runs", Some(report.runs.len().to_string())),
        ("container limit", host.and_then(|host| host.cgroup.as_ref()?.limit_bytes).map(bytes)),
        ("memory of the machine", host.and_then(|host| host.ram_bytes).map(bytes)),
        ("kernel", host.and_then(|host| host.kernel.clone())),
        ("loadcheck", Some(report.tool.version.clone())),
    ]
}

fn window(params: &Params) -> Option<String> {
    Some(match (params.window, params.window_bytes) {
        (Some(layers), _) => layers.to_string(),
        (None, Some(size)) => stated(size),
        (None, None) => "all".to_owned(),
    })
}
