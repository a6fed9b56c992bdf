//! Comments and Markdown wrap at 100 columns.

use std::fs;
use std::path::Path;

use house::{repository, text, tree};

/// Records are kept as they were written.
fn is_record(path: &Path) -> bool {
    path.starts_with(repository().join("benches/results"))
}

fn wide(end: &str, find: fn(&str) -> Vec<usize>) -> Vec<String> {
    let files = tree::files(repository(), end);
    assert!(files.len() > 10, "the files are there");
    let mut wide = Vec::new();
    for path in files.iter().filter(|path| !is_record(path)) {
        let text = fs::read_to_string(path).unwrap();
        // Pages that a test makes have the text of their sources.
        let is_made = text.starts_with("<!-- Made from ");
        for line in find(&text).into_iter().filter(|_| !is_made) {
            wide.push(format!("{}:{line}", path.strip_prefix(repository()).unwrap().display()));
        }
    }
    wide
}

#[test]
fn comments_wrap() {
    let wide = wide(".rs", text::wide_comments);
    assert!(wide.is_empty(), "comments wider than {} columns:\n{}", text::COLUMNS, wide.join("\n"));
}

#[test]
fn markdown_wraps() {
    let wide = wide(".md", text::wide_markdown);
    assert!(wide.is_empty(), "lines wider than {} columns:\n{}", text::COLUMNS, wide.join("\n"));
}

#[test]
fn what_cannot_be_broken_stays() {
    let word = "x".repeat(120);
    assert_eq!(text::wide_comments(&format!("// {word}\n")), [0; 0]);
    assert_eq!(text::wide_comments(&format!("// {}\n", "word ".repeat(30))), [1]);
    assert_eq!(text::wide_markdown(&format!("| {} |\n", "word ".repeat(30))), [0; 0]);
    assert_eq!(text::wide_markdown(&format!("```\n{0}\n```\n{0}\n", "word ".repeat(30))), [4]);
}
