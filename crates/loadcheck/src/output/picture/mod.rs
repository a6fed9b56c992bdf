//! Memory over time, drawn: a picture (SVG), and a page (HTML) with that picture and the numbers.
//!
//! ```text
//! Report ── panel: what to draw ── plot: one plot ──┬── drawing: one picture (SVG)
//!                 │                 axis, bands,    └── figure: a plot on the page ──┐
//!                 │                 levels, labels,                                  ├── page (HTML)
//!                 │                 keys                                             │
//!                 └── tables: layers, numbers ───────────────────────────────────────┘
//! ```
//!
//! No fonts, no network. The page reads without scripts; `page.js` adds a crosshair and the sorting
//! of tables. Sizes are bounded for every report: samples are thinned, layers share cells, names
//! are cut. Texts from files are escaped twice: for people (no control characters or direction
//! marks) and for XML.

use std::fmt::Write as _;

use super::escape::escape_and_cut;
use crate::numbers::bytes_fine as bytes;
use crate::report::{CommandName, Report};

mod axis;
mod bands;
mod drawing;
mod figure;
mod frame;
mod keys;
mod labels;
mod levels;
mod page;
mod panel;
mod plot;
mod tables;

/// Characters of a checkpoint's name, a command, a sentence.
const TEXT_CHARACTERS_MAX: usize = 500;

/// Every colour: its name, on a light page, on a dark page. They can be told apart with any colour
/// vision (after Okabe and Ito), and order, lines and words carry the same information.
const COLOURS: [(&str, &str, &str); 14] = [
    ("paper", "#ffffff", "#11151a"),
    ("ink", "#1b1f24", "#e3e7ec"),
    ("soft", "#57606a", "#9aa5b1"),
    ("grid", "#dfe3e8", "#2a313a"),
    ("anon", "#5b9cca", "#2f7fb8"),
    ("shmem", "#cc79a7", "#b8608f"),
    ("file", "#cfe5f4", "#23475f"),
    ("vram", "#009e73", "#0e8a68"),
    ("edge", "#4d9fd0", "#5fb0df"),
    ("host", "#12324a", "#f4f6f8"),
    ("before", "#a8620c", "#d9a441"),
    ("limit", "#c24a00", "#ff8c3a"),
    ("good", "#0b6e4f", "#3fc795"),
    ("bad", "#b3261e", "#ff7b72"),
];

/// Styles of the parts. Each colour is also given without its variable, for programs that do not
/// know CSS variables.
const LOOK: [(&str, &str); 24] = [
    (".paper", "fill:@paper"),
    (".ink", "fill:@ink"),
    (".soft", "fill:@soft"),
    (".grid", "fill:none;stroke:@grid"),
    (".anon", "fill:@anon"),
    (".shmem", "fill:@shmem"),
    (".file", "fill:@file"),
    (".vram", "fill:@vram"),
    (".edge", "fill:none;stroke:@edge"),
    (".host", "fill:none;stroke:@host;stroke-width:1.8;stroke-linejoin:round"),
    (".before", "fill:none;stroke:@before;stroke-width:1.8;stroke-linejoin:round"),
    (".limit", "fill:none;stroke:@limit;stroke-width:1.8;stroke-dasharray:7 4"),
    (".start", "fill:none;stroke:@soft;stroke-dasharray:2 3"),
    (".band", "fill:@ink;fill-opacity:.06"),
    (".even", "fill:@ink;fill-opacity:.08"),
    (".odd", "fill:@ink;fill-opacity:.2"),
    (".even-before", "fill:@before;fill-opacity:.18"),
    (".odd-before", "fill:@before;fill-opacity:.4"),
    (".peak", "fill:@host;stroke:@paper;stroke-width:1.5"),
    (".peak-before", "fill:@before;stroke:@paper;stroke-width:1.5"),
    (".ring", "fill:@paper;stroke:@edge;stroke-width:2"),
    (".halo", "fill:@ink;stroke:@paper;stroke-width:3.5;stroke-linejoin:round;paint-order:stroke"),
    (".warn", "fill:@limit;stroke:@paper;stroke-width:3.5;stroke-linejoin:round;paint-order:stroke"),
    (".cells rect:hover", "fill:@ink;fill-opacity:.14"),
];

/// The picture alone.
pub(crate) fn svg(report: &Report) -> String {
    drawing::standalone(report)
}

/// The page.
pub(crate) fn html(report: &Report) -> String {
    page::html(report)
}

/// The style sheet: colours as variables, for light and dark screens. Paper is light.
fn style() -> String {
    let mut text = String::from(":root{color-scheme:light dark");
    for (name, light, _) in COLOURS {
        let _ = write!(text, ";--{name}:{light}");
    }
    text.push_str("}\n@media screen and (prefers-color-scheme:dark){:root{");
    let dark: Vec<String> = COLOURS.iter().map(|(name, _, dark)| format!("--{name}:{dark}")).collect();
    text.push_str(&dark.join(";"));
    text.push_str("}}\n.plot text{font-family:system-ui,-apple-system,\"Segoe UI\",Roboto,\"DejaVu Sans\",sans-serif}\n");
    for (selector, properties) in LOOK {
        let _ = writeln!(text, ".plot {selector}{{{}}}", coloured(properties));
    }
    text
}

/// `fill:@ink` as `fill:#1b1f24;fill:var(--ink)`.
fn coloured(properties: &str) -> String {
    let property = |property: &str| match property.split_once(":@") {
        Some((name, colour)) => {
            let light =
                COLOURS.iter().find(|(known, ..)| *known == colour).map_or("", |(_, light, _)| *light);
            format!("{name}:{light};{name}:var(--{colour})")
        }
        None => property.to_owned(),
    };
    properties.split(';').map(property).collect::<Vec<_>>().join(";")
}

/// Text for XML and HTML, in an element or in a quoted attribute.
fn xml(text: &str) -> String {
    let mut safe = String::with_capacity(text.len() + 8);
    for character in escape_and_cut(text, TEXT_CHARACTERS_MAX).chars() {
        match character {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            // Not allowed in XML.
            '\u{fffe}' | '\u{ffff}' => safe.extend(character.escape_unicode()),
            other => safe.push(other),
        }
    }
    safe
}

/// Text as a picture shows it: no control characters, not too long.
fn shown(text: &str) -> String {
    escape_and_cut(text, TEXT_CHARACTERS_MAX).into_owned()
}

/// `value` minus `start`, in the same format.
fn growth(value: Option<u64>, start: Option<u64>) -> Option<String> {
    let (value, start) = value.zip(start)?;
    Some(match value.checked_sub(start) {
        Some(more) => bytes(more),
        None => format!("-{}", bytes(start - value)),
    })
}

/// What was loaded, or which command was run.
fn title(report: &Report) -> String {
    if let Some(changes) = &report.changes {
        return changes.files.join(" and ");
    }
    match (&report.source, &report.exec) {
        (Some(source), _) => source.given.clone(),
        (None, Some(exec)) => exec.command.join(" "),
        (None, None) => format!("loadcheck {}", report.command.name()),
    }
}

/// The settings of the load, each in a few words.
fn circumstances(report: &Report) -> Vec<String> {
    let mut facts = Vec::new();
    let source = report.source.as_ref();
    if report.changes.is_some() {
        // Settings may differ: a table has those that do.
        return source.map(|source| source.given.clone()).into_iter().collect();
    }
    facts.extend(source.and_then(|source| source.bytes).map(crate::numbers::bytes));
    let Some(run) = report.runs.first() else { return facts };
    let params = report.runs.iter().find_map(|run| run.params.as_ref());
    if report.command != CommandName::Compare {
        facts.push(run.strategy.clone());
    }
    if let Some(params) = params {
        facts.push(format!("device {}", params.device));
        facts.push(format!("io {}", params.io));
        facts.push(format!("budget {}", crate::numbers::stated(params.budget_bytes)));
        facts
            .push(params.window.map_or_else(|| "window all".to_owned(), |window| format!("window {window}")));
        facts.extend(params.dtype.as_ref().map(|dtype| format!("dtype {dtype}")));
    }
    if report.command != CommandName::Exec {
        facts.push(cache(run));
    }
    if report.runs.len() > 1 {
        facts.push(format!("{} runs", report.runs.len()));
    }
    facts
}

/// The page cache before a run.
fn cache(run: &crate::report::Run) -> String {
    use crate::args::CacheArg;
    let asked = match run.cache.asked {
        CacheArg::Cold => "cold",
        CacheArg::Warm => "warm",
        CacheArg::Asis => return "cache as it was".to_owned(),
    };
    match run.cache.cached_share {
        Some(share) => format!("cache {asked} ({:.0} % cached)", share * 100.0),
        None => format!("cache {asked} (unchecked)"),
    }
}

#[cfg(test)]
mod tests;
