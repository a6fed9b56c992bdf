//! Packages, their files, and which module each file is.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use syn::punctuated::Punctuated;
use syn::{Attribute, Item, ItemMod, Meta};

/// A library or a program: the files of one tree of modules.
#[derive(Debug)]
pub struct Root {
    /// The folder of its package, from the top of the repository, and `lib` or the program's name.
    pub name: String,
    /// Its files by module path; the root has the empty path.
    pub modules: BTreeMap<Vec<String>, Module>,
}

/// A file.
#[derive(Debug)]
pub struct Module {
    /// From the top of the repository.
    pub path: PathBuf,
    /// Its tree, without what is only for tests.
    pub file: syn::File,
}

impl Root {
    /// The tree of modules that begins with this file. Files that are only for tests are left out.
    #[must_use]
    pub fn read(top: &Path, file: &Path, name: &str) -> Self {
        let mut modules = BTreeMap::new();
        let folder = file.parent().unwrap().to_owned();
        read_module(top, file.to_owned(), folder, Vec::new(), &mut modules);
        Self { name: name.to_owned(), modules }
    }
}

fn read_module(
    top: &Path,
    file: PathBuf,
    folder: PathBuf,
    name: Vec<String>,
    modules: &mut BTreeMap<Vec<String>, Module>,
) {
    let text = fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let parsed = parse(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    for item in &parsed.items {
        let Item::Mod(child @ ItemMod { content: None, .. }) = item else { continue };
        let word = child.ident.to_string();
        let mut child_name = name.clone();
        child_name.push(word.clone());
        let (path, child_folder) = match path_attribute(&child.attrs) {
            Some(path) => {
                let path = file.parent().unwrap().join(path);
                let child_folder = path.parent().unwrap().to_owned();
                (path, child_folder)
            }
            None => {
                let plain = folder.join(format!("{word}.rs"));
                let path = if plain.exists() { plain } else { folder.join(&word).join("mod.rs") };
                (path, folder.join(&word))
            }
        };
        read_module(top, path, child_folder, child_name, modules);
    }
    let path = file.strip_prefix(top).unwrap_or(&file).to_owned();
    modules.insert(name, Module { path, file: parsed });
}

/// The tree of a file, without items that are only for tests.
///
/// # Errors
/// If it is not Rust.
pub fn parse(text: &str) -> syn::Result<syn::File> {
    let mut file = syn::parse_file(text)?;
    drop_tests(&mut file.items);
    Ok(file)
}

fn drop_tests(items: &mut Vec<Item>) {
    items.retain(|item| !is_only_for_tests(attributes(item)));
    for item in items {
        if let Item::Mod(ItemMod { content: Some((_, items)), .. }) = item {
            drop_tests(items);
        }
    }
}

/// True under `#[cfg(test)]`, `#[cfg(all(test, ...))]`, `#[cfg(any(test, fuzzing))]` and `#[test]`.
fn is_only_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        Meta::List(list) if list.path.is_ident("cfg") => list.parse_args().is_ok_and(|of| needs_tests(&of)),
        meta => meta.path().is_ident("test"),
    })
}

/// True if a condition of `cfg` holds in tests and under a fuzzer alone.
fn needs_tests(condition: &Meta) -> bool {
    let Meta::List(list) = condition else {
        return condition.path().is_ident("test") || condition.path().is_ident("fuzzing");
    };
    let parse = Punctuated::<Meta, syn::Token![,]>::parse_terminated;
    let Ok(parts) = list.parse_args_with(parse) else { return false };
    if list.path.is_ident("all") {
        parts.iter().any(needs_tests)
    } else {
        list.path.is_ident("any") && parts.iter().all(needs_tests)
    }
}

fn path_attribute(attributes: &[Attribute]) -> Option<String> {
    attributes.iter().find_map(|attribute| match &attribute.meta {
        Meta::NameValue(pair) if pair.path.is_ident("path") => {
            let value = &pair.value;
            Some(quote::quote!(#value).to_string().trim_matches('"').to_owned())
        }
        _ => None,
    })
}

/// The attributes of an item.
#[must_use]
pub fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::ExternCrate(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::ForeignMod(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// Every library and program of a checkout: `src/lib.rs`, `src/main.rs`, `src/bin/NAME/main.rs`.
#[must_use]
pub fn roots(top: &Path) -> Vec<Root> {
    let mut manifests = vec![top.join("Cargo.toml")];
    for group in ["bindings", "crates", "testing"] {
        manifests.extend(folders(&top.join(group)).into_iter().map(|folder| folder.join("Cargo.toml")));
    }
    let mut roots = Vec::new();
    for manifest in manifests.iter().filter(|manifest| manifest.exists()) {
        let package = manifest.parent().unwrap();
        let shown = package.strip_prefix(top).unwrap().to_str().unwrap();
        let shown = if shown.is_empty() { "." } else { shown };
        let source = package.join("src");
        let mut files =
            vec![("lib".to_owned(), source.join("lib.rs")), ("main".to_owned(), source.join("main.rs"))];
        for program in folders(&source.join("bin")) {
            let name = program.file_name().unwrap().to_string_lossy().into_owned();
            files.push((name, program.join("main.rs")));
        }
        for (kind, file) in files.iter().filter(|(_, file)| file.exists()) {
            roots.push(Root::read(top, file, &format!("{shown} {kind}")));
        }
    }
    roots
}

fn folders(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut found: Vec<PathBuf> =
        entries.map(|entry| entry.unwrap().path()).filter(|path| path.is_dir()).collect();
    found.sort();
    found
}

/// The files below a folder that end so, without what git and cargo keep there.
#[must_use]
pub fn files(folder: &Path, end: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let Ok(entries) = fs::read_dir(folder) else { return found };
    for path in entries.map(|entry| entry.unwrap().path()) {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_symlink() || name == "target" || name == "node_modules" || name.starts_with('.') {
            continue;
        }
        if path.is_dir() {
            found.extend(files(&path, end));
        } else if name.ends_with(end) {
            found.push(path);
        }
    }
    found.sort();
    found
}
