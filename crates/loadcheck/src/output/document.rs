//! A report as people read it: facts, tables, lines and notes.
//!
//! ```text
//! Report ── one builder for each command ── Document ── text      (terminal, plain)
//!                                                   └── markdown  (pages, job summaries)
//! ```
//!
//! Texts hold names exactly as files spell them; only the renderers escape.

use std::ops::Add;

use super::terminal::Role;

/// What a document is made for.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct View {
    /// A page, which has room for long and wide tables. Otherwise a terminal.
    pub(crate) is_page: bool,
    /// A terminal of fewer than 100 columns.
    pub(crate) is_narrow: bool,
    /// More detail.
    pub(crate) verbose: bool,
}

impl View {
    /// A page.
    pub(crate) const PAGE: Self = Self { is_page: true, is_narrow: false, verbose: false };

    /// How it was done is shown, beside what came of it.
    pub(crate) fn shows_how(self) -> bool {
        self.is_page || self.verbose
    }
}

/// The parts of a document, top to bottom.
#[derive(Debug, Default)]
pub(crate) struct Document(Vec<Part>);

/// One part.
#[derive(Debug)]
pub(crate) enum Part {
    /// A value under a label: `source    ./model (4 files)`.
    Fact(String, Text),
    /// A line.
    Line(Text),
    /// The answer: a sentence that wraps.
    Answer(Role, String),
    /// A lead, and a text that wraps beside it.
    Wrapped(Text, String),
    /// Rows under a header.
    Table(Table),
    /// Lines to be copied into a file or a shell.
    Verbatim(Vec<String>),
    /// An empty line.
    Gap,
}

impl Document {
    /// Adds a part.
    pub(crate) fn push(&mut self, part: Part) {
        self.0.push(part);
    }

    /// Puts parts before all others.
    pub(crate) fn begin(&mut self, parts: impl IntoIterator<Item = Part>) {
        self.0.splice(0..0, parts);
    }

    /// Adds parts.
    pub(crate) fn extend(&mut self, parts: impl IntoIterator<Item = Part>) {
        self.0.extend(parts);
    }

    /// Adds a fact.
    pub(crate) fn fact(&mut self, label: &str, value: impl Into<Text>) {
        self.push(fact(label, value));
    }

    /// Adds a line.
    pub(crate) fn line(&mut self, text: impl Into<Text>) {
        self.push(Part::Line(text.into()));
    }

    /// Adds a table, unless it has no rows.
    pub(crate) fn table(&mut self, table: Table) {
        if !table.rows.is_empty() {
            self.push(Part::Table(table));
        }
    }

    /// Adds an empty line.
    pub(crate) fn gap(&mut self) {
        self.push(Part::Gap);
    }

    /// Adds how many rows a table does not show, if there are any, and `how` to see them.
    pub(crate) fn hidden(&mut self, rows: u64, how: &str) {
        if rows > 0 {
            self.line(format!("  ... and {} more (all of them: {how})", crate::numbers::grouped(rows)));
        }
    }

    /// True if there is nothing to show.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The parts.
    pub(crate) fn parts(&self) -> &[Part] {
        &self.0
    }
}

/// A fact.
pub(crate) fn fact(label: &str, value: impl Into<Text>) -> Part {
    Part::Fact(label.to_owned(), value.into())
}

/// What a piece of text is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Style {
    /// Words.
    Plain,
    /// A name or a command: on a page in back quotes.
    Name,
    /// Words with emphasis.
    Role(Role),
}

/// A text whose pieces differ in style.
#[derive(Clone, Debug, Default)]
pub(crate) struct Text(Vec<(Style, String)>);

impl Text {
    /// The pieces.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = (Style, &str)> {
        self.0.iter().map(|(style, text)| (*style, text.as_str()))
    }

    /// The words without their styles.
    pub(crate) fn plain(&self) -> String {
        self.pieces().map(|(_, text)| text).collect()
    }

    /// True if there are no words.
    pub(crate) fn is_empty(&self) -> bool {
        self.pieces().all(|(_, text)| text.is_empty())
    }
}

/// A name or a command.
pub(crate) fn name(text: impl Into<String>) -> Text {
    Text(vec![(Style::Name, text.into())])
}

/// Words with emphasis.
pub(crate) fn role(role: Role, text: impl Into<String>) -> Text {
    Text(vec![(Style::Role(role), text.into())])
}

impl From<String> for Text {
    fn from(text: String) -> Self {
        Self(vec![(Style::Plain, text)])
    }
}

impl From<&str> for Text {
    fn from(text: &str) -> Self {
        text.to_owned().into()
    }
}

/// Nothing is an empty cell.
impl<T: Into<Text>> From<Option<T>> for Text {
    fn from(text: Option<T>) -> Self {
        text.map_or_else(Self::default, Into::into)
    }
}

impl<T: Into<Text>> Add<T> for Text {
    type Output = Self;

    fn add(mut self, more: T) -> Self {
        self.0.extend(more.into().0);
        self
    }
}

/// Which side of its column a cell is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Align {
    /// Text.
    Left,
    /// Numbers.
    Right,
}

/// Rows under a header. Columns whose cells are all empty are left out.
#[derive(Debug)]
pub(crate) struct Table {
    header: Vec<(&'static str, Align)>,
    rows: Vec<Row>,
}

#[derive(Debug)]
struct Row {
    cells: Vec<Text>,
    role: Option<Role>,
}

impl Table {
    /// Begins a table with a row for each item.
    pub(crate) fn of<T>(items: impl IntoIterator<Item = T>) -> TableOf<T> {
        let items: Vec<T> = items.into_iter().collect();
        let rows = items.iter().map(|_| Row { cells: Vec::new(), role: None }).collect();
        TableOf { items, table: Self { header: Vec::new(), rows } }
    }

    /// A table of these rows, each with a cell for each column.
    pub(crate) fn of_rows<const N: usize>(header: [(&'static str, Align); N], rows: Vec<[Text; N]>) -> Self {
        let rows = rows.into_iter().map(|cells| Row { cells: cells.into(), role: None }).collect();
        Self { header: header.into(), rows }
    }

    /// Gives a row emphasis, if there is such a row.
    pub(crate) fn emphasise(mut self, row: Option<usize>, role: Role) -> Self {
        if let Some(row) = row.and_then(|row| self.rows.get_mut(row)) {
            row.role = Some(role);
        }
        self
    }

    /// The columns that are not empty: their titles and alignment.
    pub(crate) fn header(&self) -> Vec<(&'static str, Align)> {
        self.used().into_iter().map(|column| self.header[column]).collect()
    }

    /// The cells of each row in those columns, and its emphasis.
    pub(crate) fn rows(&self) -> impl Iterator<Item = (Option<Role>, Vec<&Text>)> {
        let used = self.used();
        self.rows.iter().map(move |row| (row.role, used.iter().map(|column| &row.cells[*column]).collect()))
    }

    fn used(&self) -> Vec<usize> {
        let is_used = |column: &usize| self.rows.iter().any(|row| !row.cells[*column].is_empty());
        (0..self.header.len()).filter(is_used).collect()
    }
}

/// A table to which columns are still added.
pub(crate) struct TableOf<T> {
    items: Vec<T>,
    table: Table,
}

impl<T> TableOf<T> {
    /// Adds a column of texts.
    pub(crate) fn left<C: Into<Text>>(self, title: &'static str, cell: impl Fn(&T) -> C) -> Self {
        self.column(title, Align::Left, cell)
    }

    /// Adds a column of numbers.
    pub(crate) fn right<C: Into<Text>>(self, title: &'static str, cell: impl Fn(&T) -> C) -> Self {
        self.column(title, Align::Right, cell)
    }

    fn column<C: Into<Text>>(mut self, title: &'static str, align: Align, cell: impl Fn(&T) -> C) -> Self {
        self.table.header.push((title, align));
        for (item, row) in self.items.iter().zip(&mut self.table.rows) {
            row.cells.push(cell(item).into());
        }
        self
    }

    /// The table.
    pub(crate) fn table(self) -> Table {
        self.table
    }
}
