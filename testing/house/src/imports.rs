//! Which file uses which, and the circles among them.
//!
//! A name is followed to the file that defines it, through `pub use` of the modules between. A path
//! is understood if it begins with `crate`, `super` or `self`, or is in a `use` and begins with a
//! child module.

use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Item, UseTree};

use crate::tree::{Module, Root};

/// The words of a path.
pub(crate) type Path = Vec<String>;

/// The files that each file uses, by module path.
#[must_use]
pub fn uses(root: &Root) -> BTreeMap<Path, BTreeSet<Path>> {
    let exports: BTreeMap<&Path, BTreeMap<String, Path>> =
        root.modules.iter().map(|(name, module)| (name, exports_of(root, name, module))).collect();
    let mut uses = BTreeMap::new();
    for (name, module) in &root.modules {
        let mut paths = Paths { root, module: name.clone(), found: Vec::new() };
        paths.visit_file(&module.file);
        let targets = paths.found.iter().filter_map(|path| defined_in(root, &exports, path, 0));
        uses.insert(name.clone(), targets.filter(|target| target != name).collect());
    }
    uses
}

/// Groups of two files and more that use each other, in a circle. A module and its parent may.
#[must_use]
pub fn circles(uses: &BTreeMap<Path, BTreeSet<Path>>) -> Vec<Vec<Path>> {
    let is_family = |a: &Path, b: &Path| a.starts_with(b) || b.starts_with(a);
    let next = |from: &Path| -> Vec<&Path> {
        uses.get(from).into_iter().flatten().filter(|to| !is_family(from, to)).collect()
    };
    let reach: BTreeMap<&Path, BTreeSet<&Path>> = uses
        .keys()
        .map(|start| {
            let (mut seen, mut open) = (BTreeSet::new(), next(start));
            while let Some(path) = open.pop() {
                if let Some((path, _)) = uses.get_key_value(path)
                    && seen.insert(path)
                {
                    open.extend(next(path));
                }
            }
            (start, seen)
        })
        .collect();
    let mut circles: BTreeSet<Vec<Path>> = BTreeSet::new();
    for (start, reached) in &reach {
        let circle: Vec<Path> = reached
            .iter()
            .filter(|other| reach[**other].contains(*start))
            .map(|other| (*other).clone())
            .collect();
        if circle.len() > 1 {
            circles.insert(circle);
        }
    }
    circles.into_iter().collect()
}

/// What a module hands on by `use`: name and whole path.
fn exports_of(root: &Root, name: &Path, module: &Module) -> BTreeMap<String, Path> {
    let mut exports = BTreeMap::new();
    for item in &module.file.items {
        let Item::Use(item) = item else { continue };
        for (shown, path) in leaves(&item.tree) {
            if let Some(path) = absolute(root, name, &path, true) {
                exports.insert(shown, path);
            }
        }
    }
    exports
}

/// Names and paths of a `use`.
pub(crate) fn leaves(tree: &UseTree) -> Vec<(String, Path)> {
    fn walk(tree: &UseTree, before: &Path, found: &mut Vec<(String, Path)>) {
        let with = |word: String| before.iter().cloned().chain([word]).collect::<Path>();
        match tree {
            UseTree::Path(path) => walk(&path.tree, &with(path.ident.to_string()), found),
            UseTree::Name(name) if name.ident == "self" => {
                found.push((before.last().cloned().unwrap_or_default(), before.clone()));
            }
            UseTree::Name(name) => found.push((name.ident.to_string(), with(name.ident.to_string()))),
            UseTree::Rename(rename) => {
                found.push((rename.rename.to_string(), with(rename.ident.to_string())))
            }
            UseTree::Glob(_) => found.push(("*".to_owned(), before.clone())),
            UseTree::Group(group) => group.items.iter().for_each(|tree| walk(tree, before, found)),
        }
    }
    let mut found = Vec::new();
    walk(tree, &Path::new(), &mut found);
    found
}

/// The whole path from the root of what a module calls so.
pub(crate) fn absolute(root: &Root, module: &Path, path: &[String], is_use: bool) -> Option<Path> {
    let (mut at, mut rest) = (module.clone(), path);
    match rest.first()?.as_str() {
        "crate" => (at, rest) = (Path::new(), &rest[1..]),
        "self" => rest = &rest[1..],
        "super" => {
            while rest.first().is_some_and(|word| word == "super") {
                at.pop()?;
                rest = &rest[1..];
            }
        }
        first if is_use => {
            let child: Path = at.iter().cloned().chain([first.to_owned()]).collect();
            root.modules.contains_key(&child).then_some(())?;
        }
        _ => return None,
    }
    at.extend(rest.iter().cloned());
    Some(at)
}

/// The module whose file defines what the path names.
fn defined_in(
    root: &Root,
    exports: &BTreeMap<&Path, BTreeMap<String, Path>>,
    path: &Path,
    depth: usize,
) -> Option<Path> {
    let known = (0..=path.len()).rev().find(|&len| root.modules.contains_key(&path[..len]))?;
    let module = path[..known].to_vec();
    let further = path.get(known).and_then(|name| exports.get(&module)?.get(name));
    match further {
        Some(further) if depth < 8 && *further != *path => {
            let whole: Path = further.iter().chain(&path[known + 1..]).cloned().collect();
            defined_in(root, exports, &whole, depth + 1).or(Some(module))
        }
        _ => Some(module),
    }
}

/// All paths of a file.
struct Paths<'a> {
    root: &'a Root,
    module: Path,
    found: Vec<Path>,
}

impl<'ast> Visit<'ast> for Paths<'_> {
    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        // A module that hands on what its children define does not use it.
        let hands_on = !matches!(item.vis, syn::Visibility::Inherited);
        for (_, path) in leaves(&item.tree) {
            let path = absolute(self.root, &self.module, &path, true);
            self.found.extend(path.filter(|path| !(hands_on && path.starts_with(&self.module))));
        }
    }

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if item.content.is_some() {
            self.module.push(item.ident.to_string());
            visit::visit_item_mod(self, item);
            self.module.pop();
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let words: Path = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        if words.len() > 1 {
            self.found.extend(absolute(self.root, &self.module, &words, false));
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, called: &'ast syn::Macro) {
        self.visit_tokens(called.tokens.clone());
        visit::visit_macro(self, called);
    }
}

impl Paths<'_> {
    /// Looks for paths in the arguments of a macro, which are tokens: words with `::` between.
    fn visit_tokens(&mut self, tokens: TokenStream) {
        let (mut words, mut colons) = (Path::new(), 0);
        for token in tokens.into_iter().map(Some).chain([None]) {
            match token {
                Some(TokenTree::Punct(mark)) if mark.as_char() == ':' => {
                    colons += 1;
                    continue;
                }
                Some(TokenTree::Ident(word)) if colons == 2 => words.push(word.to_string()),
                other => {
                    if words.len() > 1 {
                        self.found.extend(absolute(self.root, &self.module, &words, false));
                    }
                    words.clear();
                    match other {
                        Some(TokenTree::Ident(word)) => words.push(word.to_string()),
                        Some(TokenTree::Group(group)) => self.visit_tokens(group.stream()),
                        _ => {}
                    }
                }
            }
            colons = 0;
        }
    }
}
