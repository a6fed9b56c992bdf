//! Unsafe code is in the files that `docs/unsafe.md` names, as often as it says, and each of those
//! files says why.
//!
//! That each block has a proof beside it is a lint (`clippy::undocumented_unsafe_blocks`). After a
//! change on purpose: `UPDATE_UNSAFE=1 cargo test -p house unsafe_code`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use house::{repository, tree};
use proc_macro2::{TokenStream, TokenTree};

const HEAD: &str = "# Unsafe code\n\n\
    Every file that has any, with the number of `unsafe` in it (blocks, functions, implementations,\n\
    attributes) and why it is there. Everywhere else it is an error (`unsafe_code = \"deny\"`), and a\n\
    block without a proof beside it does not pass the lints of `scripts/check`. The list is made and\n\
    compared by `cargo test -p house`.\n\n\
    | file | `unsafe` | why |\n|---|---:|---|\n";

/// Where there is code.
const FOLDERS: [&str; 8] = ["benches", "bindings", "crates", "examples", "fuzz", "src", "testing", "tests"];

/// How often the keyword stands there, types of functions aside. Comments and texts are no words.
fn count(tokens: TokenStream) -> u64 {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let is_type = |rest: &[TokenTree]| {
        matches!(rest, [_, TokenTree::Ident(word), TokenTree::Literal(_), TokenTree::Ident(function), TokenTree::Group(_), ..]
            if word == "extern" && function == "fn")
    };
    let of = |(index, token): (usize, &TokenTree)| match token {
        TokenTree::Ident(word) => u64::from(word == "unsafe" && !is_type(&tokens[index..])),
        TokenTree::Group(group) => count(group.stream()),
        TokenTree::Punct(_) | TokenTree::Literal(_) => 0,
    };
    tokens.iter().enumerate().map(of).sum()
}

/// The reason of the attribute that allows unsafe code, in the file or in the nearest module around
/// it.
fn reason(path: &Path) -> Option<String> {
    let folder = path.parent().unwrap();
    let around = [path.to_owned(), folder.join("mod.rs"), folder.with_extension("rs"), folder.join("lib.rs")];
    around.iter().filter_map(|path| fs::read_to_string(path).ok()).find_map(|text| reason_in(&text))
}

fn reason_in(text: &str) -> Option<String> {
    let attributes = text.split("allow(").skip(1).chain(text.split("expect(").skip(1));
    let mut inside = attributes.filter_map(|rest| rest.split_once(")]")).map(|(inside, _)| inside);
    let of_unsafe = inside.find(|inside| inside.contains("unsafe_code"))?;
    of_unsafe.split_once("reason = \"")?.1.rsplit_once('"').map(|(reason, _)| reason.to_owned())
}

#[test]
fn unsafe_code_is_where_the_list_says() {
    let mut rows = BTreeMap::new();
    let mut total = 0;
    for path in FOLDERS.iter().flat_map(|folder| tree::files(&repository().join(folder), ".rs")) {
        let text = fs::read_to_string(&path).unwrap();
        let found = count(text.parse().unwrap_or_else(|error| panic!("{}: {error}", path.display())));
        if found > 0 {
            let shown = path.strip_prefix(repository()).unwrap().to_str().unwrap().to_owned();
            rows.insert(shown, (found, reason(&path).unwrap_or_default()));
            total += found;
        }
    }
    let without: Vec<&String> =
        rows.iter().filter(|(_, (_, why))| why.is_empty()).map(|(path, _)| path).collect();
    assert!(without.is_empty(), "no reason at the head of {without:?}");
    let mut list = HEAD.to_owned();
    for (path, (found, why)) in &rows {
        let _ = writeln!(list, "| `{path}` | {found} | {why} |");
    }
    let _ = writeln!(list, "| **{} files** | **{total}** | |", rows.len());
    super::compare(&repository().join("docs/unsafe.md"), &list, "UPDATE_UNSAFE");
}
