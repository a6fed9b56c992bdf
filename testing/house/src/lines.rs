//! Lines of code: lines that hold a token, comments and docs aside.

use std::collections::BTreeSet;

use proc_macro2::{TokenStream, TokenTree};
use quote::ToTokens;
use syn::spanned::Spanned as _;
use syn::visit::{self, Visit};

/// Lines of code of what is there.
#[must_use]
pub fn count(code: &impl ToTokens) -> usize {
    let mut lines = BTreeSet::new();
    collect(code.to_token_stream(), &mut lines);
    lines.len()
}

fn collect(tokens: TokenStream, lines: &mut BTreeSet<usize>) {
    let mut tokens = tokens.into_iter().peekable();
    while let Some(token) = tokens.next() {
        if is_punct(&token, '#') {
            if tokens.peek().is_some_and(|next| is_punct(next, '!')) {
                tokens.next();
            }
            if tokens.peek().is_some_and(is_doc) {
                tokens.next();
                continue;
            }
        }
        let span = token.span();
        match token {
            TokenTree::Group(group) => {
                lines.insert(group.span_open().start().line);
                lines.insert(group.span_close().end().line);
                collect(group.stream(), lines);
            }
            _ => lines.extend(span.start().line..=span.end().line),
        }
    }
}

fn is_punct(token: &TokenTree, character: char) -> bool {
    matches!(token, TokenTree::Punct(punct) if punct.as_char() == character)
}

fn is_doc(token: &TokenTree) -> bool {
    let TokenTree::Group(group) = token else { return false };
    matches!(group.stream().into_iter().next(), Some(TokenTree::Ident(word)) if word == "doc")
}

/// A function and its lines of code, from `fn` to the closing brace.
#[derive(Clone, Debug)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// Where it begins.
    pub line: usize,
    /// Lines of code.
    pub lines: usize,
}

/// All functions of a file.
#[must_use]
pub fn functions(file: &syn::File) -> Vec<Function> {
    let mut found = Found(Vec::new());
    found.visit_file(file);
    found.0
}

struct Found(Vec<Function>);

impl Found {
    fn add(&mut self, signature: &syn::Signature, body: &syn::Block) {
        let mut lines = BTreeSet::new();
        collect(signature.to_token_stream(), &mut lines);
        collect(body.to_token_stream(), &mut lines);
        let line = signature.span().start().line;
        self.0.push(Function { name: signature.ident.to_string(), line, lines: lines.len() });
    }
}

impl<'ast> Visit<'ast> for Found {
    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.add(&item.sig, &item.block);
        visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.add(&item.sig, &item.block);
        visit::visit_impl_item_fn(self, item);
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        if let Some(body) = &item.default {
            self.add(&item.sig, body);
        }
        visit::visit_trait_item_fn(self, item);
    }
}
