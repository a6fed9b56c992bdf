//! The report as one JSON object, or as JSON lines.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::json;

use super::escape::is_harmful;
use crate::report::{KindSlope, Report};

/// Writes JSON, with characters that a terminal would obey or hide as `\u009b`: serde escapes those
/// below 0x20 only. They occur only inside strings, except for the newlines between values; serde
/// writes strings in whole characters.
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
pub(super) fn write(report: &Report, to: &mut dyn Write) -> io::Result<()> {
    serde_json::to_writer_pretty(Visible(to), report)?;
    to.write_all(b"\n")
}

/// The whole report, indented.
pub(super) fn text(report: &Report) -> String {
    let mut bytes = Vec::new();
    write(report, &mut bytes).expect("a report holds only strings, numbers and lists of them");
    String::from_utf8(bytes).expect("JSON is text")
}

/// A line of [`write_lines`].
#[derive(Serialize)]
struct Line<'a, T> {
    schema: &'a str,
    #[serde(rename = "type")]
    kind: &'a str,
    #[serde(flatten)]
    fields: T,
}

/// Writes one object a line, each with `schema` and `type`: `run`, `comparison`, `limit`, `hash`,
/// `layer`, `plan`, `synth`, `convert`, `verification`, `fit` (one for each loader), `slope`,
/// `change` and `setting` (of two reports), `check`, and last `summary`, which has the verdict and
/// any error.
pub(super) fn write_lines(report: &Report, to: &mut dyn Write) -> io::Result<()> {
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
    let slopes: Option<&[KindSlope]> = report.leak.as_ref().map(|leak| leak.slopes.as_slice());
    each(report, to, "slope", slopes.into_iter().flatten())?;
    each(report, to, "change", report.changes.iter().flat_map(|changes| &changes.metrics))?;
    each(report, to, "setting", report.changes.iter().flat_map(|changes| &changes.settings))?;
    each(report, to, "check", &report.doctor)?;
    let summary = json!({
        "tool": report.tool, "command": report.command, "verdict": report.verdict, "answer": report.answer, "error": report.error,
        "host": report.host, "source": report.source, "exec": report.exec, "unavailable": report.unavailable,
        "notes": report.notes,
    });
    each(report, to, "summary", [summary])
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::report::{CommandName, Run};

    #[test]
    fn every_line_is_an_object_of_the_schema() {
        let mut report = Report::new(CommandName::Run);
        report.runs = vec![Run::default(), Run::default()];
        let mut lines = Vec::new();
        write_lines(&report, &mut lines).unwrap();
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
