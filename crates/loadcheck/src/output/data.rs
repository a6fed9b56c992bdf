//! The formats for programs: one JSON object, JSON lines, comma-separated values.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::json;

use super::escape::{escape, is_harmful};
use super::{compared, leaked};
use crate::listing::Layer;
use crate::report::{Check, CommandName, ConvertFile, Difference, Fitted, Report, Run, Synth, Try};

/// Writes JSON on, and in it what a terminal would obey or hide as `\u009b`: serde does that below
/// 0x20 only. Such characters stand in strings and nowhere else, but for the newlines that indent,
/// and each string comes in writes of whole characters.
struct Visible<'a>(&'a mut dyn Write);

impl Write for Visible<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let is_to_escape = |character: char| character != '\n' && is_harmful(character);
        match str::from_utf8(bytes) {
            Ok(text) if !text.is_ascii() || text.contains('\u{7f}') => {
                for part in text.split_inclusive(is_to_escape) {
                    let harmful = part.chars().next_back().filter(|&last| is_to_escape(last));
                    let plain_len = part.len() - harmful.map_or(0, char::len_utf8);
                    self.0.write_all(&part.as_bytes()[..plain_len])?;
                    for unit in harmful.iter().flat_map(|last| last.encode_utf16(&mut [0; 2]).to_vec()) {
                        write!(self.0, "\\u{unit:04x}")?;
                    }
                }
            }
            _ => self.0.write_all(bytes)?,
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Writes the whole report, indented.
pub(crate) fn write_json(report: &Report, to: &mut dyn Write) -> io::Result<()> {
    serde_json::to_writer_pretty(Visible(to), report)?;
    to.write_all(b"\n")
}

/// The whole report, indented.
pub(crate) fn json(report: &Report) -> String {
    let mut bytes = Vec::new();
    write_json(report, &mut bytes).expect("a report holds only strings, numbers and lists of them");
    String::from_utf8(bytes).expect("JSON is text")
}

/// A line of [`write_json_lines`].
#[derive(Serialize)]
struct Line<'a, T> {
    schema: &'a str,
    #[serde(rename = "type")]
    kind: &'a str,
    #[serde(flatten)]
    fields: T,
}

/// Writes one object a line, each with `schema` and `type`: `run`, `comparison`, `limit`, `hash`,
/// `layer`, `plan`, `synth`, `convert`, `verification`, `fit` (one a loader), `slope`, `check`, and
/// last `summary`, which has the verdict and any error.
pub(crate) fn write_json_lines(report: &Report, to: &mut dyn Write) -> io::Result<()> {
    fn each<T: Serialize>(
        report: &Report,
        to: &mut dyn Write,
        kind: &str,
        parts: impl IntoIterator<Item = T>,
    ) -> io::Result<()> {
        for fields in parts {
            serde_json::to_writer(Visible(to), &Line { schema: &report.schema, kind, fields })?;
            to.write_all(b"\n")?;
        }
        Ok(())
    }
    each(report, to, "run", &report.runs)?;
    each(report, to, "comparison", &report.comparison)?;
    each(report, to, "limit", &report.limits)?;
    each(report, to, "hash", &report.hashes)?;
    each(report, to, "layer", report.layers.iter())?;
    each(report, to, "plan", &report.plan)?;
    each(report, to, "synth", &report.synth)?;
    each(report, to, "convert", &report.convert)?;
    each(report, to, "verification", &report.verification)?;
    each(report, to, "fit", report.fit.iter().flat_map(|fit| &fit.loaders))?;
    each(report, to, "slope", leaked::slopes(report))?;
    each(report, to, "check", &report.doctor)?;
    let summary = json!({
        "tool": report.tool, "command": report.command, "verdict": report.verdict, "error": report.error,
        "host": report.host, "source": report.source, "exec": report.exec, "unavailable": report.unavailable,
        "notes": report.notes,
    });
    each(report, to, "summary", [summary])
}

const RUN_COLUMNS: [&str; 25] = [
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
    "dtype",
    "pinning",
    "start_vram_bytes",
    "peak_vram_bytes",
    "vram_method",
    "mismatches",
    "cpu_seconds",
];

/// Writes one row a run (`run`, `exec`), a way of loading (`compare`), a layer (`plan`, `inspect`),
/// a checkpoint (`synth`), a file (`convert`), a difference (`verify`), a try (`fit`), a slope
/// (`leak`) or a check (`doctor`). Empty is "not measured".
pub(crate) fn write_csv(report: &Report, to: &mut dyn Write) -> io::Result<()> {
    type Rows<'a> = Box<dyn Iterator<Item = Vec<String>> + 'a>;
    let (header, rows): (&[&str], Rows<'_>) = match report.command {
        CommandName::Run | CommandName::Exec => {
            (&RUN_COLUMNS, Box::new(report.runs.iter().enumerate().map(|(index, run)| run_row(index, run))))
        }
        CommandName::Compare => {
            (&compared::CSV_COLUMNS, Box::new(report.comparison.iter().map(compared::csv_row)))
        }
        CommandName::Plan | CommandName::Inspect => (
            &["layer", "stack", "tensors", "bytes"],
            Box::new(report.layers.iter().map(|layer| layer_row(&layer))),
        ),
        CommandName::Synth => (
            &["model", "target", "bytes", "files", "tensors", "seconds"],
            Box::new(report.synth.iter().map(synth_row)),
        ),
        CommandName::Convert => (
            &["file", "state", "layers", "tensors", "bytes"],
            Box::new(report.convert.iter().flat_map(|convert| &convert.files).map(file_row)),
        ),
        CommandName::Verify => (
            &["place", "difference"],
            Box::new(report.verification.iter().flat_map(|found| &found.differences).map(difference_row)),
        ),
        CommandName::Fit => {
            (&TRY_COLUMNS, Box::new(report.fit.iter().flat_map(|fit| &fit.loaders).flat_map(try_rows)))
        }
        CommandName::Leak => (&leaked::CSV_COLUMNS, Box::new(leaked::slopes(report).map(leaked::csv_row))),
        CommandName::Doctor => (
            &["check", "state", "found", "consequence", "fix"],
            Box::new(report.doctor.iter().map(check_row)),
        ),
        CommandName::Unknown => return Ok(()),
    };
    let mut rows = rows.peekable();
    if rows.peek().is_some() {
        writeln!(to, "{}", header.join(","))?;
    }
    for row in rows {
        let cells: Vec<String> = row.iter().map(|cell| quoted(cell)).collect();
        writeln!(to, "{}", cells.join(","))?;
    }
    Ok(())
}

const TRY_COLUMNS: [&str; 10] = [
    "strategy",
    "limit_bytes",
    "outcome",
    "seconds",
    "slowdown",
    "peak_host_bytes",
    "peak_cgroup_bytes",
    "limit_hits",
    "refault_bytes",
    "cached_share",
];

fn try_rows(fitted: &Fitted) -> impl Iterator<Item = Vec<String>> {
    let number = |value: Option<u64>| value.map(|value| value.to_string()).unwrap_or_default();
    let float = |value: Option<f64>| value.map(|value| value.to_string()).unwrap_or_default();
    let row = move |tried: &Try| {
        vec![
            escaped(&fitted.strategy),
            number(tried.limit_bytes),
            json!(tried.outcome).as_str().unwrap_or_default().to_owned(),
            float(tried.seconds),
            float(tried.slowdown),
            number(tried.peak_host_bytes),
            number(tried.peak_cgroup_bytes),
            number(tried.limit_hits),
            number(tried.refault_bytes),
            float(tried.cached_share),
        ]
    };
    fitted.tries.iter().map(row)
}

fn escaped(text: &str) -> String {
    escape(text).into_owned()
}

fn check_row(check: &Check) -> Vec<String> {
    let state = json!(check.state).as_str().unwrap_or_default().to_owned();
    let text = |text: &Option<String>| text.as_deref().map(escaped).unwrap_or_default();
    let found = escaped(&check.found);
    vec![escaped(&check.check), state, found, text(&check.consequence), text(&check.fix)]
}

fn synth_row(synth: &Synth) -> Vec<String> {
    let numbers = [synth.bytes, synth.files, synth.tensors].map(|number| number.to_string());
    let mut row = [&synth.model, &synth.target].map(|name| escaped(name)).to_vec();
    row.extend(numbers);
    row.push(synth.seconds.to_string());
    row
}

fn file_row(file: &ConvertFile) -> Vec<String> {
    let state = json!(file.state).as_str().unwrap_or_default().to_owned();
    let layers = escaped(&file.layers.join(" "));
    let name = escaped(&file.name);
    vec![name, state, layers, file.tensors.to_string(), file.bytes.to_string()]
}

fn difference_row(difference: &Difference) -> Vec<String> {
    [&difference.place, &difference.what].map(|text| escaped(text)).into()
}

fn run_row(index: usize, run: &Run) -> Vec<String> {
    let number = |value: Option<u64>| value.map(|value| value.to_string()).unwrap_or_default();
    let params = run.params.as_ref();
    let outcome = json!(run.outcome).as_str().unwrap_or_default().to_owned();
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
        params.and_then(|params| params.dtype.clone()).unwrap_or_default(),
        run.ring.as_ref().map(|ring| ring.pinning.clone()).unwrap_or_default(),
        number(run.baseline.vram_bytes),
        number(run.peak.vram_bytes),
        run.peak.vram_method.clone().unwrap_or_default(),
        number(run.verified.as_ref().map(|verified| verified.mismatches)),
        run.cpu_seconds.map(|seconds| seconds.to_string()).unwrap_or_default(),
    ]
}

fn layer_row(layer: &Layer<'_>) -> Vec<String> {
    vec![
        escaped(layer.id),
        layer.stack.map(escaped).unwrap_or_default(),
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
    use serde_json::Value;

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
        let mut lines = Vec::new();
        write_json_lines(&report, &mut lines).unwrap();
        let kinds: Vec<String> = std::str::from_utf8(&lines)
            .unwrap()
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
