//! Draws a document as Markdown, for pages and job summaries.

use super::document::{Align, Document, Part, Style, Table, Text};
use super::escape;
use super::terminal::Role;

/// The document as Markdown, an empty line between its parts.
pub(crate) fn draw(document: &Document) -> String {
    let block = |part: &Part| match part {
        Part::Fact(label, value) => Some(words(&format!("{} {}", plain(label), text(value)))),
        Part::Line(line) => Some(words(&text(line))),
        Part::Answer(_, sentence) => Some(format!("**{}**", words(&plain(sentence)))),
        Part::Wrapped(lead, rest) => Some(words(&format!("{}{}", text(lead), plain(rest)))),
        Part::Table(rows) => Some(table(rows)),
        Part::Verbatim(lines) => Some(verbatim(lines)),
        Part::Gap => None,
    };
    let blocks: Vec<String> = document.parts().iter().filter_map(block).collect();
    if blocks.is_empty() { String::new() } else { blocks.join("\n\n") + "\n" }
}

fn table(table: &Table) -> String {
    let header = table.header();
    let titles = header.iter().map(|(title, _)| (*title).to_owned()).collect();
    let rule = header.iter().map(|(_, align)| if *align == Align::Right { "---:" } else { "---" });
    let mut lines = vec![row(titles), format!("|{}|", rule.collect::<Vec<_>>().join("|"))];
    lines.extend(table.rows().map(|(_, cells)| row(cells.into_iter().map(text).collect())));
    lines.join("\n")
}

fn row(cells: Vec<String>) -> String {
    let cells: Vec<String> = cells.into_iter().map(|cell| format!(" {cell}").trim_end().to_owned()).collect();
    format!("|{} |", cells.join(" |"))
}

/// Back quotes would end the block.
fn verbatim(lines: &[String]) -> String {
    let lines: String =
        lines.iter().map(|line| format!("{}\n", escape::escape(line).replace('`', "'"))).collect();
    format!("```\n{lines}```")
}

fn text(text: &Text) -> String {
    let piece = |(style, text): (Style, &str)| match style {
        _ if text.is_empty() => String::new(),
        Style::Name => format!("`{}`", code(text)),
        Style::Role(Role::Bad | Role::Strong) => format!("**{}**", plain(text)),
        Style::Plain | Style::Role(_) => plain(text),
    };
    text.pieces().map(piece).collect()
}

/// One blank between two words: on a terminal, blanks align columns.
fn words(line: &str) -> String {
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Text inside back quotes, in a table too.
fn code(text: &str) -> String {
    escape::cell(text).replace('`', "'").replace('|', "\\|")
}

/// Text, in a table too.
fn plain(text: &str) -> String {
    escape::cell(text).replace('|', "\\|").replace('<', "&lt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::document::name;

    #[test]
    fn names_cannot_break_out() {
        assert_eq!(code("a`|`b"), "a'\\|'b");
        let header = [("", Align::Left), ("never", Align::Left), ("bytes", Align::Right)];
        let rows = vec![[name("a`|b"), Text::default(), Text::from("<b>|")]];
        let lines = table(&Table::of_rows(header, rows));
        assert_eq!(lines, "| | bytes |\n|---|---:|\n| `a'\\|b` | &lt;b>\\| |");
    }
}
