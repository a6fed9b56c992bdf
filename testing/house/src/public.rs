//! The public items of a library: what a program can name, with signatures, as text.
//!
//! Modules and `pub use` are followed from `lib.rs`. What macros and derives add is not shown, but
//! the derives are.

use std::collections::BTreeSet;

use quote::ToTokens;
use syn::{Fields, ImplItem, Item, Type, UseTree, Visibility};

use crate::imports::{Path, absolute, leaves};
use crate::tree::{Root, attributes};

/// A line for each public item, field, variant and method, sorted.
#[must_use]
pub fn items(root: &Root) -> Vec<String> {
    let mut listing = Listing { root, lines: BTreeSet::new(), types: BTreeSet::new(), seen: BTreeSet::new() };
    listing.module(&Path::new(), "");
    listing.methods();
    listing.lines.into_iter().collect()
}

struct Listing<'a> {
    root: &'a Root,
    lines: BTreeSet<String>,
    /// Names of public types: their methods are listed.
    types: BTreeSet<String>,
    seen: BTreeSet<(Path, String)>,
}

impl Listing<'_> {
    fn module(&mut self, name: &Path, shown: &str) {
        let Some(module) = self.root.modules.get(name) else { return };
        for item in &module.file.items {
            if is_hidden(item) {
                continue;
            }
            match item {
                Item::Mod(child) if is_public(&child.vis) => {
                    let word = child.ident.to_string();
                    let shown = join(shown, &word);
                    self.lines.insert(format!("mod {shown}"));
                    let path = name.iter().cloned().chain([word]).collect();
                    self.module(&path, &shown);
                }
                Item::Use(item) if is_public(&item.vis) => self.exported(name, &item.tree, shown),
                item => self.item(item, shown, None),
            }
        }
    }

    /// What `pub use` hands on: an item of this library is listed where it is handed on to.
    fn exported(&mut self, module: &Path, tree: &UseTree, shown: &str) {
        for (name, path) in leaves(tree) {
            if name == "*" {
                self.lines.insert(format!("use {}::*", path.join("::")));
            } else {
                self.follow(module, &path, &name, shown);
            }
        }
    }

    fn follow(&mut self, module: &Path, path: &Path, name: &str, shown: &str) {
        let whole = absolute(self.root, module, path, true).unwrap_or_default();
        let found =
            whole.split_last().and_then(|(wanted, at)| Some((wanted, at, self.root.modules.get(at)?)));
        let Some((wanted, at, found)) = found else {
            self.lines.insert(format!("use {} as {}", path.join("::"), join(shown, name)));
            return;
        };
        let at = at.to_vec();
        if !self.seen.insert((at.clone(), format!("{shown}::{name}"))) {
            return;
        }
        for item in &found.file.items {
            match item {
                Item::Use(item) => {
                    let leaves = leaves(&item.tree);
                    let further = leaves.into_iter().find(|(shown, _)| shown == wanted);
                    if let Some((_, further)) = further {
                        self.follow(&at, &further, name, shown);
                    }
                }
                item if name_of(item).as_ref() == Some(wanted) => self.item(item, shown, Some(name)),
                _ => {}
            }
        }
    }

    fn item(&mut self, item: &Item, shown: &str, name: Option<&str>) {
        let Some(own) = name_of(item) else { return };
        let path = join(shown, name.unwrap_or(&own));
        match item {
            Item::Struct(item) if is_public(&item.vis) => {
                self.types.insert(own);
                self.lines.insert(format!("struct {path}{}{}", text(&item.generics), derives(&item.attrs)));
                self.fields(&path, &item.fields, false);
            }
            Item::Enum(item) if is_public(&item.vis) => {
                self.types.insert(own);
                self.lines.insert(format!("enum {path}{}{}", text(&item.generics), derives(&item.attrs)));
                for variant in &item.variants {
                    let path = format!("{path}::{}", variant.ident);
                    self.lines.insert(path.clone());
                    self.fields(&path, &variant.fields, true);
                }
            }
            Item::Fn(item) if is_public(&item.vis) => {
                self.lines.insert(format!("{path}: {}", text(&item.sig)));
            }
            Item::Const(item) if is_public(&item.vis) => {
                self.lines.insert(format!("const {path}: {}", text(&item.ty)));
            }
            Item::Static(item) if is_public(&item.vis) => {
                self.lines.insert(format!("static {path}: {}", text(&item.ty)));
            }
            Item::Type(item) if is_public(&item.vis) => {
                self.lines.insert(format!("type {path} = {}", text(&item.ty)));
            }
            Item::Trait(item) if is_public(&item.vis) => {
                self.lines.insert(format!("trait {path}{}", text(&item.generics)));
                for member in &item.items {
                    if let syn::TraitItem::Fn(member) = member {
                        self.lines.insert(format!("{path}: {}", text(&member.sig)));
                    }
                }
            }
            _ => {}
        }
    }

    fn fields(&mut self, path: &str, fields: &Fields, all: bool) {
        for (number, field) in fields.iter().enumerate() {
            if all || is_public(&field.vis) {
                let name = field.ident.as_ref().map_or_else(|| number.to_string(), ToString::to_string);
                self.lines.insert(format!("{path}.{name}: {}", text(&field.ty)));
            }
        }
    }

    /// Methods and traits of the public types, wherever they are written.
    fn methods(&mut self) {
        for module in self.root.modules.values() {
            for item in &module.file.items {
                let Item::Impl(item) = item else { continue };
                let Type::Path(of) = &*item.self_ty else { continue };
                let Some(of) = of.path.segments.last().map(|segment| segment.ident.to_string()) else {
                    continue;
                };
                if !self.types.contains(&of) {
                    continue;
                }
                if let Some((implemented, _)) = &item.trait_ {
                    self.lines.insert(format!("impl {} for {of}", text(implemented)));
                    continue;
                }
                for member in &item.items {
                    match member {
                        ImplItem::Fn(member) if is_public(&member.vis) => {
                            self.lines.insert(format!("{of}: {}", text(&member.sig)));
                        }
                        ImplItem::Const(member) if is_public(&member.vis) => {
                            self.lines.insert(format!("const {of}::{}: {}", member.ident, text(&member.ty)));
                        }
                        _ => {}
                    }
                }
            }
        }
    }
}

fn is_public(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}

fn is_hidden(item: &Item) -> bool {
    attributes(item).iter().any(|attribute| text(attribute).contains("doc (hidden)"))
}

fn derives(attributes: &[syn::Attribute]) -> String {
    let lists = attributes.iter().filter_map(|attribute| match &attribute.meta {
        syn::Meta::List(list) if list.path.is_ident("derive") => Some(format!(" [{}]", text(&list.tokens))),
        syn::Meta::Path(path) if path.is_ident("non_exhaustive") => Some(" non_exhaustive".to_owned()),
        _ => None,
    });
    lists.collect()
}

fn name_of(item: &Item) -> Option<String> {
    let name = match item {
        Item::Const(item) => &item.ident,
        Item::Enum(item) => &item.ident,
        Item::Fn(item) => &item.sig.ident,
        Item::Mod(item) => &item.ident,
        Item::Static(item) => &item.ident,
        Item::Struct(item) => &item.ident,
        Item::Trait(item) => &item.ident,
        Item::Type(item) => &item.ident,
        _ => return None,
    };
    Some(name.to_string())
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}::{name}") }
}

/// Tokens as one line, with the blanks that people write.
fn text(tokens: &impl ToTokens) -> String {
    let mut text = tokens.to_token_stream().to_string().replace('\n', " ");
    for (found, wanted) in [
        (" ::", "::"),
        (":: ", "::"),
        (" <", "<"),
        ("< ", "<"),
        (" >", ">"),
        (" ,", ","),
        ("& ", "&"),
        (" :", ":"),
    ] {
        text = text.replace(found, wanted);
    }
    text
}
