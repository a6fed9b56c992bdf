//! The tables of a page: layers, numbers, limits, changes.

use std::fmt::Write as _;

use super::panel::{LayerEnd, Panel};
use super::{bytes, growth, xml};
use crate::numbers::{self, count, percent, rate, seconds, stated, to_f64, whole};
use crate::output::document::{Align, Table};
use crate::output::facts::place;
use crate::report::{CommandName, Run};

/// Rows of layers on a page, at most; neighbours share a row.
const LAYER_ROWS_MAX: usize = 160;
/// Rows of other tables.
const ROWS_MAX: usize = 64;

/// Writes a table. `sortable` tells the script that its columns can be sorted.
fn begin(caption: &str, columns: &[(String, Align)], is_sortable: bool, page: &mut String) {
    let class = if is_sortable { " class=\"sortable\"" } else { "" };
    let _ = writeln!(
        page,
        "<div class=\"scroll\" role=\"region\" aria-label=\"{0}\" tabindex=\"0\"><table{class}>\n<caption>{0}</caption>",
        xml(caption)
    );
    if columns.iter().all(|(title, _)| title.is_empty()) {
        page.push_str("<tbody>\n");
        return;
    }
    page.push_str("<thead><tr>");
    for (title, align) in columns {
        let class = if *align == Align::Right { " class=\"n\"" } else { "" };
        // A column of names without a title needs no header cell.
        let _ = match title.as_str() {
            "" => write!(page, "<td></td>"),
            title => write!(page, "<th scope=\"col\"{class}>{}</th>", xml(title)),
        };
    }
    page.push_str("</tr></thead>\n<tbody>\n");
}

fn end(page: &mut String) {
    page.push_str("</tbody>\n</table></div>\n");
}

/// A table of a document: the first column has the names of the rows.
pub(super) fn plain(
    caption: &str,
    table: &Table,
    class_of: impl Fn(usize) -> &'static str,
    page: &mut String,
) {
    let header = table.header();
    if header.is_empty() {
        return;
    }
    let columns: Vec<_> = header.iter().map(|(title, align)| ((*title).to_owned(), *align)).collect();
    begin(caption, &columns, false, page);
    for (index, (_, cells)) in table.rows().take(ROWS_MAX).enumerate() {
        let class = class_of(index);
        let cells = cells.iter().zip(&header).enumerate().map(|(column, (cell, (_, align)))| {
            let text = xml(&cell.plain());
            match (column, align) {
                (0, _) => format!("<th scope=\"row\" class=\"{class}\">{text}</th>"),
                (_, Align::Right) => format!("<td class=\"n\">{text}</td>"),
                (_, Align::Left) => format!("<td>{text}</td>"),
            }
        });
        let _ = writeln!(page, "<tr>{}</tr>", cells.collect::<String>());
    }
    end(page);
}

/// The names of the numbers of a run, and its values.
fn values(command: CommandName, run: &Run) -> [(&'static str, Option<String>); 14] {
    let at = run.peak.at.as_ref().map(|at| match (&at.layer, &at.tensor) {
        (None, None) => seconds(at.seconds),
        _ => format!("{}, {}", seconds(at.seconds), place(at)),
    });
    let promise = run.promise.as_ref().map(|promise| {
        let word = if promise.kept { "kept" } else { "BROKEN" };
        format!("{}, {word}", bytes(promise.limit_bytes))
    });
    let (peak, start, after) = (&run.peak, &run.baseline, run.after_unload.as_ref());
    let speed = run.io.read_bytes.zip(run.seconds).filter(|_| command != CommandName::Exec);
    let cached = run.io.from_cache_bytes.zip(run.io.read_bytes);
    [
        ("unreclaimable, peak", peak.host_bytes.map(bytes)),
        ("unreclaimable, over the start", growth(peak.host_bytes, start.host_bytes)),
        ("reached at", at),
        ("RSS, peak", peak.rss_bytes.map(bytes)),
        ("RSS, over the start", growth(peak.rss_bytes, start.rss_bytes)),
        ("promised at most", promise),
        ("budget", run.params.as_ref().map(|params| stated(params.budget_bytes))),
        ("layers kept in host memory", run.resident_host_bytes.filter(|kept| *kept > 0).map(bytes)),
        ("pinned", peak.pinned_bytes.filter(|pinned| *pinned > 0).map(bytes)),
        ("device memory, peak", peak.vram_bytes.map(bytes)),
        ("RSS after", after.and_then(|after| after.rss_bytes).map(bytes)),
        ("time", run.seconds.map(seconds)),
        ("rate", speed.and_then(|(moved, time)| rate(moved, time))),
        ("from the page cache", cached.and_then(|(cached, read)| share(cached, read))),
    ]
}

fn share(part: u64, whole: u64) -> Option<String> {
    (whole > 0).then(|| percent(to_f64(part) / to_f64(whole)))
}

/// The numbers of each run that is drawn, a column each.
pub(super) fn numbers(command: CommandName, panels: &[Panel<'_>], page: &mut String) {
    let mut columns = vec![(String::new(), Align::Left)];
    columns.extend(panels.iter().map(|panel| (panel.heading.clone(), Align::Left)));
    begin("Peaks, time and rate", &columns, false, page);
    let runs: Vec<_> = panels.iter().map(|panel| values(command, panel.run)).collect();
    for (row, (name, _)) in values(command, &Run::default()).iter().enumerate() {
        let cells = runs.iter().map(|run| run[row].1.as_deref());
        if cells.clone().any(|cell| cell.is_some()) {
            let cells = cells.map(|cell| format!("<td>{}</td>", cell.map_or_else(|| "-".to_owned(), xml)));
            let _ = writeln!(page, "<tr><th scope=\"row\">{name}</th>{}</tr>", cells.collect::<String>());
        }
    }
    end(page);
}

/// A row of the table of layers: of several layers if there are many.
struct LayerRow {
    name: String,
    bytes: Option<u64>,
    at: f64,
    took: f64,
    read_bytes: Option<u64>,
    from_cache_bytes: Option<u64>,
    highest: Option<f64>,
}

/// The number that a cell is sorted by, and its text.
type LayerCell = Option<(f64, String)>;

/// A column of the table of layers.
type LayerColumn = (&'static str, fn(&LayerRow) -> LayerCell);

const LAYER_COLUMNS: [LayerColumn; 7] = [
    ("size", |row| sized(row.bytes)),
    ("delivered at", |row| Some((row.at, seconds(row.at)))),
    ("time", |row| Some((row.took, seconds(row.took)))),
    ("read", |row| sized(row.read_bytes)),
    ("rate", |row| {
        let read = row.read_bytes.filter(|read| *read > 0)?;
        Some((to_f64(read) / row.took, rate(read, row.took)?))
    }),
    ("from cache", |row| {
        let (part, all) = (row.from_cache_bytes?, row.read_bytes?);
        Some((to_f64(part) / to_f64(all), share(part, all)?))
    }),
    ("unreclaimable", |row| row.highest.map(|highest| (highest, bytes(whole(highest))))),
];

fn sized(value: Option<u64>) -> LayerCell {
    value.map(|value| (to_f64(value), bytes(value)))
}

/// The layers of each run that is drawn, in the order of delivery.
pub(super) fn layers(panels: &[Panel<'_>], page: &mut String) {
    let drawn: Vec<_> = panels.iter().filter(|panel| !panel.ends.is_empty()).collect();
    for panel in &drawn {
        let rows = layer_rows(panel, LAYER_ROWS_MAX / drawn.len());
        let used: Vec<_> =
            LAYER_COLUMNS.iter().filter(|(_, cell)| rows.iter().any(|row| cell(row).is_some())).collect();
        let mut columns = vec![("layer".to_owned(), Align::Left)];
        columns.extend(used.iter().map(|(title, _)| ((*title).to_owned(), Align::Right)));
        let heading = if panel.heading.is_empty() { String::new() } else { format!(" of {}", panel.heading) };
        begin(&format!("Layers{heading}, in the order of delivery"), &columns, true, page);
        for row in &rows {
            let cells = used.iter().map(|(_, cell)| match cell(row) {
                Some((value, text)) => format!("<td class=\"n\" data-value=\"{value}\">{}</td>", xml(&text)),
                None => "<td class=\"n\">-</td>".to_owned(),
            });
            let cells: String = cells.collect();
            let _ = writeln!(page, "<tr><th scope=\"row\">{}</th>{cells}</tr>", xml(&row.name));
        }
        end(page);
    }
    if !drawn.is_empty() {
        page.push_str(
            "<p class=\"soft\">Time is counted from the delivery before. Read, rate and cache are of all bytes that \
             were read in that time, layers that are read ahead included; unreclaimable is the highest sample in \
             it.</p>\n",
        );
    }
}

fn layer_rows(panel: &Panel<'_>, count_max: usize) -> Vec<LayerRow> {
    let each = panel.ends.len().div_ceil(count_max.max(1)).max(1);
    let mut before = 0.0;
    let rows = panel.ends.chunks(each).filter_map(|group| {
        let (first, last) = (group.first()?, group.last()?);
        let number = numbers::sum(group.iter().map(|end| end.layers));
        let name = match (group.len(), number) {
            (1, 0 | 1) => last.name.clone(),
            (1, _) => format!("{}, the last one {}", count(number, "layer"), last.name),
            _ => format!("{} to {}", first.name, last.name),
        };
        let sum = |of: fn(&LayerEnd) -> Option<u64>| {
            group.iter().map(of).try_fold(0_u64, |sum, part| Some(sum.saturating_add(part?)))
        };
        let row = LayerRow {
            name,
            bytes: sum(|end| end.bytes),
            at: last.seconds,
            took: last.seconds - before,
            read_bytes: sum(|end| end.read_bytes),
            from_cache_bytes: sum(|end| end.from_cache_bytes),
            highest: panel.host_between(before, last.seconds),
        };
        before = last.seconds;
        Some(row)
    });
    rows.collect()
}
