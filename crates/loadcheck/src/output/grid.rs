//! Aligned columns without lines: comfy-table does the widths and the wrapping, this file the
//! looks.

use comfy_table::{Cell, CellAlignment, ContentArrangement, Table, presets};

use super::escape;

/// Columns are left aligned unless told otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Align {
    /// Text.
    Left,
    /// Numbers.
    Right,
}

/// Lays out rows under a header, one string a line, no trailing blanks. Columns that are empty
/// throughout are left out. With a width, long cells of the last columns wrap inside it. Cells are
/// escaped, and very long ones cut.
pub(crate) fn grid(header: &[(&str, Align)], rows: &[Vec<String>], width: Option<u16>) -> Vec<String> {
    let used: Vec<usize> = (0..header.len())
        .filter(|column| rows.iter().any(|row| row.get(*column).is_some_and(|cell| !cell.is_empty())))
        .collect();
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    if let Some(width) = width {
        table.set_content_arrangement(ContentArrangement::Dynamic).set_width(width);
    }
    let cell = |text: &str, align| {
        let alignment = if align == Align::Right { CellAlignment::Right } else { CellAlignment::Left };
        Cell::new(escape::cell(text)).set_alignment(alignment)
    };
    let has_header = header.iter().any(|(title, _)| !title.is_empty());
    if has_header {
        table.add_row(
            used.iter().map(|column| cell(header[*column].0, header[*column].1)).collect::<Vec<Cell>>(),
        );
    }
    for row in rows {
        let texts =
            used.iter().map(|column| (row.get(*column).map_or("", String::as_str), header[*column].1));
        table.add_row(texts.map(|(text, align)| cell(text, align)).collect::<Vec<Cell>>());
    }
    for (position, column) in table.column_iter_mut().enumerate() {
        column.set_padding((if position == 0 { 2 } else { 1 }, 1));
    }
    table.lines().map(|line| line.trim_end().to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A name without a place to break, each of whose characters is shown as six.
    #[test]
    fn a_name_of_any_length_is_laid_out_at_once() {
        let row = vec!["\u{7f}".repeat(1 << 16), "1 MiB".to_owned()];
        let started = std::time::Instant::now();
        let lines = grid(&[("", Align::Left), ("", Align::Right)], &[row], Some(80));
        assert!(started.elapsed().as_secs() < 2, "{:?}", started.elapsed());
        assert!(lines.len() < 40 && lines.concat().contains(" ... "), "{} lines", lines.len());
    }

    #[test]
    fn columns_line_up_and_empty_ones_vanish() {
        let header = [("", Align::Left), ("peak", Align::Right), ("never", Align::Left), ("at", Align::Left)];
        let row = |cells: [&str; 4]| cells.map(String::from).to_vec();
        let rows = [row(["host", "5 MiB", "", "x"]), row(["rss", "10 MiB", "", "a\u{1b}b"])];
        let lines = grid(&header, &rows, None);
        assert_eq!(lines, ["          peak  at", "  host   5 MiB  x", "  rss   10 MiB  a\\u{1b}b"]);
    }

    #[test]
    fn long_cells_wrap_inside_the_width() {
        let rows = [vec!["a".to_owned(), "several words that do not fit".to_owned()]];
        let lines = grid(&[("", Align::Left), ("", Align::Left)], &rows, Some(24));
        assert!(lines.len() > 1 && lines.iter().all(|line| line.len() <= 24), "{lines:?}");
    }
}
