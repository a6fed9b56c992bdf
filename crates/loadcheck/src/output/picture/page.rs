//! The page: the answer, the drawings, the layers and the numbers as tables. Everything is HTML and
//! SVG; the script adds a crosshair and the sorting of tables. Nothing but that script and the
//! style sheet of the page is allowed by its policy.

use std::fmt::Write as _;

use sha2::{Digest as _, Sha256};

use super::drawing::{Shape, page_plots};
use super::figure::figures;
use super::panel::{Panel, panels};
use super::{bytes, circumstances, style, tables, title, xml};
use crate::numbers::{rate, seconds};
use crate::output::changed;
use crate::output::document::Part;
use crate::output::facts;
use crate::report::{CommandName, Finding, Report, Run, Verdict};

/// Notes and errors on a page, at most.
const LINES_MAX: usize = 10;
const LAYOUT: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// The whole page.
pub(super) fn html(report: &Report) -> String {
    let name = xml(&title(report));
    let sheet = format!("\n{}{LAYOUT}", style());
    let script = format!("\n{SCRIPT}");
    let policy = format!(
        "default-src 'none'; style-src '{}'; script-src '{}'; base-uri 'none'; form-action 'none'",
        hash(&sheet),
        hash(&script)
    );
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"{policy}\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<title>{name}: memory over time</title>\n\
         <style>{sheet}</style>\n</head>\n<body>\n"
    );
    head(report, &name, &mut page);
    page.push_str("<main>\n");
    let (panels, said) = panels(report);
    if !panels.is_empty() {
        page.push_str("<section>\n<h2>Memory over time</h2>\n");
        figures(&page_plots(&panels, Shape::Wide), &page_plots(&panels, Shape::Narrow), &mut page);
        remarks(&panels, said, &mut page);
        page.push_str("</section>\n");
    }
    sections(report, &panels, &mut page);
    notes(report, &mut page);
    let origin = xml(&origin(report));
    let _ = write!(page, "</main>\n<footer>{origin}</footer>\n<script>{script}</script>\n</body>\n</html>\n");
    page
}

/// What a policy calls an element with this text.
fn hash(text: &str) -> String {
    format!("sha256-{}", base64(&Sha256::digest(text)))
}

/// RFC 4648.
pub(super) fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for group in bytes.chunks(3) {
        let byte = |index: usize| u32::from(group.get(index).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for place in 0..4_usize {
            let digit = usize::try_from(bits >> (18 - 6 * place) & 63).unwrap_or(0);
            text.push(if place <= group.len() { char::from(DIGITS[digit]) } else { '=' });
        }
    }
    text
}

/// The name, the answer, the settings, and the most important numbers.
fn head(report: &Report, name: &str, page: &mut String) {
    let (class, word) = verdict(report);
    let answer = report.answer.as_ref().map_or_else(|| title(report), |answer| answer.sentence.clone());
    let facts: Vec<String> = circumstances(report).iter().map(|fact| xml(fact)).collect();
    let _ = writeln!(
        page,
        "<header>\n<p class=\"name\"><span class=\"word {class}\">{word}</span>{name}</p>\n<h1>{}</h1>\n\
         <p class=\"soft\">{}</p>",
        xml(&answer),
        facts.join(" · ")
    );
    for problem in report.errors.iter().take(LINES_MAX) {
        let place = problem.place.as_ref().map(|place| format!(" ({})", xml(place))).unwrap_or_default();
        let code = problem.code.as_str();
        let _ = writeln!(page, "<p class=\"fail\"><b>{code}</b> {}{place}</p>", xml(&problem.message));
    }
    if let ([run], None) = (report.runs.as_slice(), &report.changes) {
        tiles(report.command, run, page);
    }
    page.push_str("</header>\n");
}

/// The numbers that most readers look for.
fn tiles(command: CommandName, run: &Run, page: &mut String) {
    let speed = run.io.read_bytes.zip(run.seconds).filter(|_| command != CommandName::Exec);
    let promise = run.promise.as_ref().map(|promise| {
        let word = if promise.kept { "kept" } else { "broken" };
        (bytes(promise.growth_bytes), format!("of {} promised, {word}", bytes(promise.limit_bytes)))
    });
    let peak = |value: Option<u64>, note: &str| value.map(|value| (bytes(value), note.to_owned()));
    let took = if command == CommandName::Exec { "while it was measured" } else { "to load everything" };
    let tiles = [
        ("Unreclaimable", peak(run.peak.host_bytes, "peak; sizes a container")),
        ("RSS", peak(run.peak.rss_bytes, "peak, with pages of files")),
        ("RSS over start", promise),
        ("Device", peak(run.peak.vram_bytes, "peak of device memory")),
        ("Time", run.seconds.map(|time| (seconds(time), took.to_owned()))),
        (
            "Rate",
            speed.and_then(|(moved, time)| {
                Some((rate(moved, time)?, format!("{} read", crate::numbers::bytes(moved))))
            }),
        ),
    ];
    page.push_str("<dl class=\"tiles\">\n");
    for (name, value) in tiles {
        if let Some((value, note)) = value {
            let _ = writeln!(page, "<div><dt>{name}</dt><dd><b>{value}</b> <span>{note}</span></dd></div>");
        }
    }
    page.push_str("</dl>\n");
}

fn verdict(report: &Report) -> (&'static str, &'static str) {
    let is_unclear = report.answer.as_ref().is_some_and(|answer| answer.outcome == Finding::Unclear);
    match report.verdict {
        _ if report.changes.is_some() => ("open", "CHANGES"),
        Verdict::Pass if is_unclear => ("open", "UNCLEAR"),
        Verdict::Pass => ("pass", "PASS"),
        Verdict::Fail => ("fail", "FAIL"),
        Verdict::Inconclusive => ("open", "INCONCLUSIVE"),
        Verdict::Error => ("fail", "ERROR"),
    }
}

/// How it was measured and what is not drawn.
fn remarks(panels: &[Panel<'_>], said: Option<String>, page: &mut String) {
    let mut lines: Vec<String> = said.into_iter().collect();
    let has_areas = panels.iter().any(|panel| panel.before.is_none());
    let interval =
        panels.iter().find_map(|panel| panel.run.samples.as_ref()).map(|samples| samples.interval_ms);
    lines.extend(interval.map(|ms| {
        format!(
            "Memory of the process, a sample every {ms} ms{}",
            if has_areas { "; the RSS peak is the kernel's own." } else { "." }
        )
    }));
    let above = "The kernel can take back what lies above the line of unreclaimable memory.";
    lines.extend(has_areas.then(|| above.to_owned()));
    let is_drawn = |panel: &Panel<'_>| panel.top_vram_bytes().is_some();
    if panels.iter().any(|panel| panel.run.peak.vram_bytes.is_some() && !is_drawn(panel)) {
        lines.push("Device memory is not drawn: its peak is in the table.".to_owned());
    }
    let lines: Vec<String> = lines.iter().map(|line| xml(line)).collect();
    let _ = writeln!(page, "<p class=\"soft\">{}</p>", lines.join(" "));
}

/// The tables: changes, or layers, numbers and limits.
fn sections(report: &Report, panels: &[Panel<'_>], page: &mut String) {
    let plain = |_| "";
    if let Some(changes) = &report.changes {
        page.push_str("<section>\n<h2>What changed</h2>\n");
        let [before, after] = &changes.files;
        tables::plain(&format!("From {before} to {after}"), &changed::metrics(changes), plain, page);
        tables::plain("Settings that differ", &changed::settings(changes), plain, page);
        page.push_str("</section>\n");
        return;
    }
    if panels.iter().any(|panel| !panel.ends.is_empty()) {
        page.push_str("<section>\n<h2>Layers</h2>\n");
        tables::layers(panels, page);
        page.push_str("</section>\n");
    }
    if !panels.is_empty() {
        page.push_str("<section>\n<h2>Numbers</h2>\n");
        tables::numbers(report.command, panels, page);
        further_numbers(report, panels, page);
        page.push_str("</section>\n");
    }
    if !report.limits.is_empty() {
        page.push_str("<section>\n<h2>Limits</h2>\n");
        let class = |row: usize| if report.limits[row].passed { "pass" } else { "fail" };
        tables::plain("Limits from the command line", &facts::limits(report), class, page);
        page.push_str("</section>\n");
    }
}

/// Numbers of all runs, and of the last one.
fn further_numbers(report: &Report, panels: &[Panel<'_>], page: &mut String) {
    if report.runs.len() > panels.len() {
        let highest = |value: &dyn Fn(&Run) -> Option<u64>| bytes(report.runs.iter().filter_map(value).max());
        let text = format!(
            "Over all {} runs: unreclaimable memory at most {}, RSS at most {}.",
            report.runs.len(),
            highest(&|run| run.peak.host_bytes),
            highest(&|run| run.peak.rss_bytes)
        );
        let _ = writeln!(page, "<p class=\"soft\">{text}</p>");
    }
    let moved = report.runs.last().and_then(|run| facts::moved(&run.io));
    let facts = facts::device(report).into_iter().chain(moved).chain(facts::verified(report));
    for fact in facts {
        if let Part::Fact(label, value) = fact {
            let _ = writeln!(page, "<p class=\"soft\">{label}: {}</p>", xml(&value.plain()));
        }
    }
}

fn notes(report: &Report, page: &mut String) {
    if report.notes.is_empty() {
        return;
    }
    page.push_str("<section>\n<h2>Notes</h2>\n<ul>\n");
    for note in report.notes.iter().take(LINES_MAX) {
        let _ = writeln!(page, "<li>{}</li>", xml(note));
    }
    page.push_str("</ul>\n</section>\n");
}

/// Which program measured, and where.
fn origin(report: &Report) -> String {
    let host = report.host.as_ref();
    let kernel = host.and_then(|host| host.kernel.as_ref()).map(|kernel| format!(" · kernel {kernel}"));
    let memory = host
        .and_then(|host| host.ram_bytes)
        .map(|size| format!(" · {} of memory", crate::numbers::bytes(size)));
    format!(
        "{} {}{}{}",
        report.tool.name,
        report.tool.version,
        kernel.unwrap_or_default(),
        memory.unwrap_or_default()
    )
}

#[cfg(test)]
mod tests {
    use super::base64;

    #[test]
    fn base64_is_that_of_the_standard() {
        let vectors = ["", "f", "fo", "foo", "foob", "fooba", "foobar"];
        let expected = ["", "Zg==", "Zm8=", "Zm9v", "Zm9vYg==", "Zm9vYmE=", "Zm9vYmFy"];
        assert_eq!(vectors.map(|text| base64(text.as_bytes())), expected);
    }
}
