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
                lines.push(format!("{:<8}  {}", escape::escape(label), painted(value, paint)));
            }
            Part::Line(text) => lines.push(painted(text, paint)),
            Part::Answer(role, sentence) => {
                let plain = wrapped(&Text::default(), sentence, Paint::NONE, width);
                lines.extend(plain.iter().map(|line| paint.paint(*role, line)));
            }
            Part::Wrapped(lead, text) => lines.extend(wrapped(lead, text, paint, width)),
            Part::Table(table) => lines.extend(columns(table, paint, width)),
            Part::Verbatim(text) => lines.extend(text.iter().map(|line| escape::escape(line).into_owned())),
            Part::Gap => lines.push(String::new()),
        }
    }
    if !lines.is_empty() {
        lines.push(String::new());
    }
    lines.join("\n")
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
