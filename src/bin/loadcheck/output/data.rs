//! The formats for programs: one JSON object, JSON lines, comma-separated values.

use serde::Serialize;
use serde_json::{Value, json};

use crate::report::{CommandName, Layer, Report, Run};

/// The whole report, indented.
pub(crate) fn json(report: &Report) -> String {
    serde_json::to_string_pretty(report).expect("a report holds only strings, numbers and lists of them")
        + "\n"
}

/// One object a line, each with `schema` and `type`: `run`, `limit`, `hash`, `layer`, `plan`, `synth`, and last
/// `summary`, which has the verdict and any error.
pub(crate) fn json_lines(report: &Report) -> String {
    let mut lines = Vec::new();
    let mut push = |kind: &str, value: Value| {
        let mut object = serde_json::Map::new();
        object.insert("schema".to_owned(), json!(report.schema));
        object.insert("type".to_owned(), json!(kind));
        if let Value::Object(fields) = value {
            object.extend(fields);
        }
        lines.push(Value::Object(object).to_string());
    };
    report.runs.iter().for_each(|run| push("run", value(run)));
    report.limits.iter().for_each(|limit| push("limit", value(limit)));
    report.hashes.iter().for_each(|hash| push("hash", value(hash)));
    report.layers.iter().for_each(|layer| push("layer", value(layer)));
    report.plan.iter().for_each(|plan| push("plan", value(plan)));
    report.synth.iter().for_each(|synth| push("synth", value(synth)));
    push(
        "summary",
        json!({
            "tool": report.tool, "command": report.command, "verdict": report.verdict, "error": report.error,
            "source": report.source, "exec": report.exec, "unavailable": report.unavailable,
        }),
    );
    lines.join("\n") + "\n"
}

fn value(part: &impl Serialize) -> Value {
    serde_json::to_value(part).expect("parts of a report are plain data")
}

const RUN_COLUMNS: [&str; 18] = [
    "run",
    "strategy",
    "outcome",
    "io",
    "device",
    "budget_bytes",
    "window",
    "prefetch",
    "seconds",
    "start_host_bytes",
    "peak_host_bytes",
    "start_rss_bytes",
    "peak_rss_bytes",
    "peak_file_bytes",
    "peak_pinned_bytes",
    "resident_bytes",
    "read_bytes",
    "promise_kept",
];

/// One row a run (`run`, `exec`), a layer (`plan`, `inspect`) or a checkpoint (`synth`). Empty is "not measured".
pub(crate) fn csv(report: &Report) -> String {
    let (header, rows): (Vec<&str>, Vec<Vec<String>>) = match report.command {
        CommandName::Run | CommandName::Exec => (
            RUN_COLUMNS.to_vec(),
            report.runs.iter().enumerate().map(|(index, run)| run_row(index, run)).collect(),
        ),
        CommandName::Plan | CommandName::Inspect => {
            (vec!["layer", "stack", "tensors", "bytes"], report.layers.iter().map(layer_row).collect())
        }
        CommandName::Synth => {
            let row = |synth: &crate::report::Synth| {
                let numbers = [synth.bytes, synth.files, synth.tensors].map(|number| number.to_string());
                let mut row = vec![synth.model.clone(), synth.target.clone()];
                row.extend(numbers);
                row.push(synth.seconds.to_string());
                row
            };
            (
                vec!["model", "target", "bytes", "files", "tensors", "seconds"],
                report.synth.iter().map(row).collect(),
            )
        }
        CommandName::Unknown => return String::new(),
    };
    if rows.is_empty() {
        return String::new();
    }
    let mut text = header.join(",") + "\n";
    for row in rows {
        let cells: Vec<String> = row.iter().map(|cell| quoted(cell)).collect();
        text.push_str(&cells.join(","));
        text.push('\n');
    }
    text
}

fn run_row(index: usize, run: &Run) -> Vec<String> {
    let number = |value: Option<u64>| value.map(|value| value.to_string()).unwrap_or_default();
    let params = run.params.as_ref();
    let outcome = value(&run.outcome).as_str().unwrap_or_default().to_owned();
    vec![
        (index + 1).to_string(),
        run.strategy.clone(),
        outcome,
        params.map(|params| params.io.clone()).unwrap_or_default(),
        params.map(|params| params.device.clone()).unwrap_or_default(),
        number(params.map(|params| params.budget_bytes)),
        params
            .map(|params| params.window.map_or_else(|| "all".to_owned(), |window| window.to_string()))
            .unwrap_or_default(),
        number(params.map(|params| params.prefetch)),
        run.seconds.map(|seconds| seconds.to_string()).unwrap_or_default(),
        number(run.baseline.host_bytes),
        number(run.peak.host_bytes),
        number(run.baseline.rss_bytes),
        number(run.peak.rss_bytes),
        number(run.peak.file_bytes),
        number(run.peak.pinned_bytes),
        number(run.resident_bytes),
        number(run.io.read_bytes),
        run.promise.as_ref().map(|promise| promise.kept.to_string()).unwrap_or_default(),
    ]
}

fn layer_row(layer: &Layer) -> Vec<String> {
    vec![
        super::escape::escape(&layer.id).into_owned(),
        layer.stack.as_deref().map(|stack| super::escape::escape(stack).into_owned()).unwrap_or_default(),
        layer.tensors.len().to_string(),
        layer.bytes.to_string(),
    ]
}

/// Quotes as RFC 4180 asks.
fn quoted(cell: &str) -> String {
    if cell.contains([',', '"', '\n', '\r']) {
        format!("\"{}\"", cell.replace('"', "\"\""))
    } else {
        cell.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_are_quoted_only_where_they_must() {
        assert_eq!(quoted("a.b"), "a.b");
        assert_eq!(quoted("a,\"b\""), "\"a,\"\"b\"\"\"");
    }

    #[test]
    fn a_row_has_as_many_cells_as_the_header() {
        assert_eq!(run_row(0, &Run::default()).len(), RUN_COLUMNS.len());
    }

    #[test]
    fn every_line_is_an_object_of_the_schema() {
        let mut report = Report::new(CommandName::Run);
        report.runs = vec![Run::default(), Run::default()];
        let kinds: Vec<String> = json_lines(&report)
            .lines()
            .map(|line| {
                let object: Value = serde_json::from_str(line).unwrap();
                assert_eq!(object["schema"], "loadcheck/1");
                object["type"].as_str().unwrap().to_owned()
            })
            .collect();
        assert_eq!(kinds, ["run", "run", "summary"]);
    }
}
