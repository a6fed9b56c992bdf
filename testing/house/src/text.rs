//! Widths of comments and Markdown.

/// Columns of comments and of Markdown.
pub const COLUMNS: usize = 100;

/// Lines of a Rust file whose comment is too wide, by number, indentation aside as rustfmt counts.
/// A word that is too long stays, and so do examples, tables and
/// drawings, which align by blanks.
#[must_use]
pub fn wide_comments(text: &str) -> Vec<usize> {
    let (mut is_code, mut found) = (false, Vec::new());
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        let Some(comment) = line.strip_prefix("//") else {
            is_code = false;
            continue;
        };
        let words = comment.trim_start_matches(['/', '!', ' ']);
        if words.starts_with("```") {
            is_code = !is_code;
        }
        let is_free = is_code || words.starts_with('|') || line.contains("  ");
        if !is_free && could_be_shorter(line, "// ") {
            found.push(number);
        }
    }
    found
}

/// Lines of a Markdown file that are too wide, by number; tables, code, HTML and links by
/// reference aside.
#[must_use]
pub fn wide_markdown(text: &str) -> Vec<usize> {
    let (mut is_code, mut found) = (false, Vec::new());
    for (number, line) in (1..).zip(text.lines()) {
        let words = line.trim_start();
        if words.starts_with("```") {
            is_code = !is_code;
        }
        let is_free =
            is_code || words.starts_with(['|', '<']) || words.starts_with("![") || words.starts_with("#");
        if !is_free && could_be_shorter(line, "  ") {
            found.push(number);
        }
    }
    found
}

/// True if the line is too wide and has a blank where it could be broken.
fn could_be_shorter(line: &str, prefix: &str) -> bool {
    let count = line.chars().count();
    let words = line.trim_start();
    let longest = words.split(' ').map(|word| word.chars().count()).max().unwrap_or(0);
    let indent = count - words.chars().count() + prefix.len();
    count > COLUMNS && longest + indent <= COLUMNS
}
