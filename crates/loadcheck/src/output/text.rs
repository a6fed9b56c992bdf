//! Draws a document for a terminal or a plain file: aligned columns without lines, colours where
//! they are allowed.

use comfy_table::{Cell, CellAlignment, ContentArrangement, presets};

use super::document::{Align, Document, Part, Style, Table, Text};
use super::escape;
use super::terminal::{Paint, Role};

/// The document as text, which ends with a newline unless it is empty. Notes and cells wrap inside
/// `width`.
pub(crate) fn draw(document: &Document, paint: Paint, width: Option<u16>) -> String {
    let mut lines = Vec::new();
    for part in document.parts() {
        match part {
            Part::Fact(label, value) => {
                let lead = format!("{:<8}  ", escape::escape(label));
                lines.extend(line(&lead, value, paint, width));
            }
            Part::Line(text) => lines.extend(line("", text, paint, width)),
            Part::Answer(role, sentence) => {
                let plain = wrapped(&Text::default(), sentence, Paint::NONE, width);
                lines.extend(plain.iter().map(|line| paint.paint(*role, line)));
            }
            Part::Wrapped(lead, text) => lines.extend(wrapped(lead, text, paint, width)),
            Part::Table(table) => match width {
                Some(width) if width < RECORDS_BELOW && least_width(table) > usize::from(width) => {
                    lines.extend(records(table, paint, width));
                }
                _ => lines.extend(columns(table, paint, width)),
            },
            Part::Verbatim(text) => lines.extend(text.iter().map(|line| escape::escape(line).into_owned())),
            Part::Gap => lines.push(String::new()),
        }
    }
    if !lines.is_empty() {
        lines.push(String::new());
    }
    lines.join("\n")
}

/// A line with its colours if it fits; otherwise its words, wrapped.
fn line(lead: &str, text: &Text, paint: Paint, width: Option<u16>) -> Vec<String> {
    let plain = text.plain();
    let len = lead.chars().count() + plain.chars().count();
    if width.is_none_or(|width| len <= usize::from(width)) {
        return vec![format!("{lead}{}", painted(text, paint))];
    }
    let indented = plain.len() - plain.trim_start().len();
    let lead = format!("{lead}{}", " ".repeat(indented));
    wrapped(&lead.as_str().into(), plain.trim_start(), Paint::NONE, width)
}

/// Columns below which a table that would break words becomes a list.
const RECORDS_BELOW: u16 = 60;

/// The width in which a table breaks no word and no number from its unit.
fn least_width(table: &Table) -> usize {
    let header = table.header();
    let longest = |text: &str| text.split(' ').map(|word| word.chars().count()).max().unwrap_or(0);
    let mut widths: Vec<usize> = header.iter().map(|(title, _)| longest(title)).collect();
    for (_, cells) in table.rows() {
        for (index, cell) in cells.iter().enumerate() {
            let plain = cell.plain();
            let is_number = header[index].1 == Align::Right;
            widths[index] =
                widths[index].max(if is_number { plain.chars().count() } else { longest(&plain) });
        }
    }
    widths.iter().map(|width| width + 2).sum::<usize>() + 1
}

/// A table as a list: the first cell of each row, and below it the others with their titles.
fn records(table: &Table, paint: Paint, width: u16) -> Vec<String> {
    let header = table.header();
    let mut lines = Vec::new();
    for (role, cells) in table.rows() {
        for (index, cell) in cells.into_iter().enumerate().filter(|(_, cell)| !cell.is_empty()) {
            let title = header[index].0;
            let lead = match (index, title) {
                (0, _) => "  ".to_owned(),
                (_, "") => "    ".to_owned(),
                _ => format!("    {title:<10} "),
            };
            let text = escape::cell(&cell.plain()).into_owned();
            let part = wrapped(&lead.as_str().into(), &text, Paint::NONE, Some(width));
            let paints = role.filter(|_| index == 0);
            lines.extend(part.into_iter().map(|line| match paints {
                Some(role) => paint.paint(role, &line),
                None => line,
            }));
        }
    }
    lines
}

fn painted(text: &Text, paint: Paint) -> String {
    let piece = |(style, text): (Style, &str)| match style {
        Style::Plain | Style::Name => escape::escape(text).into_owned(),
        Style::Role(role) => paint.paint(role, &escape::escape(text)),
    };
    text.pieces().map(piece).collect()
}

/// `text` after `lead`, broken between words; the lines that follow begin below the text.
fn wrapped(lead: &Text, text: &str, paint: Paint, width: Option<u16>) -> Vec<String> {
    let column = lead.plain().chars().count();
    let room = width.map_or(usize::MAX, |width| usize::from(width).saturating_sub(column));
    let (mut lines, mut line, mut used) = (Vec::new(), painted(lead, paint), 0);
    for word in escape::escape(text).split(' ') {
        let len = word.chars().count();
        if used > 0 && used + 1 + len > room {
            lines.push(std::mem::replace(&mut line, " ".repeat(column)));
            used = 0;
        }
        if used > 0 {
            line.push(' ');
            used += 1;
        }
        line.push_str(word);
        used += len;
    }
    lines.push(line);
    lines
}

/// One string for each line, without trailing blanks. With a width, long cells wrap inside it.
fn columns(table: &Table, paint: Paint, width: Option<u16>) -> Vec<String> {
    let header = table.header();
    let mut drawn = comfy_table::Table::new();
    drawn.load_style(presets::NOTHING);
    if let Some(width) = width {
        drawn.set_content_arrangement(ContentArrangement::Dynamic).set_width(width);
    }
    let cell = |text: &str, align| {
        let alignment = if align == Align::Right { CellAlignment::Right } else { CellAlignment::Left };
        Cell::new(escape::cell(text)).set_alignment(alignment)
    };
    let mut roles = Vec::new();
    if header.iter().any(|(title, _)| !title.is_empty()) {
        roles.push(Some(Role::Dim));
        drawn.add_row(header.iter().map(|(title, align)| cell(title, *align)).collect::<Vec<Cell>>());
    }
    for (role, cells) in table.rows() {
        roles.push(role);
        let cells = cells.iter().zip(&header).map(|(text, (_, align))| cell(&text.plain(), *align));
        drawn.add_row(cells.collect::<Vec<Cell>>());
    }
    for (position, column) in drawn.column_iter_mut().enumerate() {
        column.set_padding((if position == 0 { 2 } else { 1 }, 1));
    }
    let mut lines: Vec<String> = drawn.lines().map(|line| line.trim_end().to_owned()).collect();
    // Where cells were wrapped, rows and lines do not correspond.
    if lines.len() == roles.len() {
        for (line, role) in lines.iter_mut().zip(roles) {
            *line = role.map_or_else(|| line.clone(), |role| paint.paint(role, line));
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows<const N: usize>(header: [(&'static str, Align); N], rows: &[[&str; N]]) -> Table {
        Table::of_rows(header, rows.iter().map(|row| row.map(Text::from)).collect())
    }

    /// A name without a place to break, each of whose characters is shown as six.
    #[test]
    fn a_name_of_any_length_is_laid_out_at_once() {
        let name = "\u{7f}".repeat(1 << 16);
        let table = rows([("", Align::Left), ("", Align::Right)], &[[&name, "1 MiB"]]);
        let started = std::time::Instant::now();
        let lines = columns(&table, Paint::NONE, Some(80));
        assert!(started.elapsed().as_secs() < 2, "{:?}", started.elapsed());
        assert!(lines.len() < 40 && lines.concat().contains(" ... "), "{} lines", lines.len());
    }

    #[test]
    fn columns_line_up_and_empty_ones_vanish() {
        let header = [("", Align::Left), ("peak", Align::Right), ("never", Align::Left), ("at", Align::Left)];
        let table = rows(header, &[["host", "5 MiB", "", "x"], ["rss", "10 MiB", "", "a\u{1b}b"]]);
        let lines = columns(&table, Paint::NONE, None);
        assert_eq!(lines, ["          peak  at", "  host   5 MiB  x", "  rss   10 MiB  a\\u{1b}b"]);
    }

    #[test]
    fn a_narrow_terminal_gets_a_list_and_whole_words() {
        let header =
            [("", Align::Left), ("peak", Align::Right), ("over start", Align::Right), ("at", Align::Left)];
        let table = rows(header, &[["unreclaimable", "13.9 MiB", "12.7 MiB", "model.layers.4"]]);
        let mut document = Document::default();
        document.table(table);
        document.fact("source", "./model (4 files, 291 tensors, 32 layers)");
        let text = draw(&document, Paint::NONE, Some(40));
        let expected = [
            "  unreclaimable",
            "    peak       13.9 MiB",
            "    over start 12.7 MiB",
            "    at         model.layers.4",
            "source    ./model (4 files, 291 tensors,",
            "          32 layers)",
        ];
        assert_eq!(text.lines().collect::<Vec<_>>(), expected);
        assert!(draw(&document, Paint::NONE, Some(80)).starts_with("                     peak"));
    }

    #[test]
    fn long_cells_wrap_inside_the_width() {
        let table = rows([("", Align::Left), ("", Align::Left)], &[["a", "several words that do not fit"]]);
        let lines = columns(&table, Paint::NONE, Some(24));
        assert!(lines.len() > 1 && lines.iter().all(|line| line.len() <= 24), "{lines:?}");
    }

    #[test]
    fn notes_break_between_words_inside_the_width() {
        let text = "pages of files may be reclaimed while they are clean";
        let lines = |text, width| wrapped(&"note: ".into(), text, Paint::NONE, width);
        assert_eq!(lines(text, None), [format!("note: {text}")]);
        let broken = lines(text, Some(24));
        assert!(broken.iter().all(|line| line.len() <= 24), "{broken:?}");
        let words = broken.join(" ").split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(words, format!("note: {text}"));
        assert!(broken[1].starts_with("      ") && broken[1].len() > 6, "{broken:?}");
        assert_eq!(lines("averylongword", Some(8)), ["note: averylongword"]);
    }
}
