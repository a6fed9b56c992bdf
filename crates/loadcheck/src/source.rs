//! SOURCE, as it is given on the command line, to a path: an existing path beats `org/name` in the
//! local cache.
//!
//! The library takes paths and a cache directory; the environment is read here. Nothing is ever
//! fetched.

use std::env;
use std::ffi::OsStr;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use onelayer::checkpoint::{CacheVariables, HubCache};

use crate::library_errors;
use crate::problem::{Code, Problem};
use crate::report::Source;

/// A source that was found.
#[derive(Clone, Debug)]
pub(crate) struct Resolved {
    /// As it was given.
    pub(crate) given: String,
    /// The path to open.
    pub(crate) path: PathBuf,
    /// The commit, for a repository in the local cache.
    pub(crate) revision: Option<String>,
}

impl Resolved {
    /// `source`, with what it is called and where it was found.
    pub(crate) fn named(&self, source: Source) -> Source {
        Source {
            given: self.given.clone(),
            resolved: Some(self.path.display().to_string()),
            revision: self.revision.clone(),
            ..source
        }
    }
}

/// Finds what `given` means. `None` where it may be left out, and is.
///
/// # Errors
/// As those of [`resolve`].
pub(crate) fn resolve_if_given(given: &OsStr) -> Result<Option<Resolved>, Vec<Problem>> {
    if given.is_empty() { Ok(None) } else { resolve(given).map(Some) }
}

/// Finds what `given` means.
///
/// # Errors
/// Problems of the classes LC0301, LC0303 and LC0304.
pub(crate) fn resolve(given: &OsStr) -> Result<Resolved, Vec<Problem>> {
    let text = given.to_string_lossy().into_owned();
    let path = Path::new(given);
    match path.symlink_metadata() {
        Ok(_) => return Ok(Resolved { given: text, path: path.to_owned(), revision: None }),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {}
        // It may well be there.
        Err(error) => {
            return Err(vec![
                Problem::new(Code::SourceUnreadable, format!("cannot be looked up: {error}")).at(text),
            ]);
        }
    }
    if let Some((scheme, rest)) = text.split_once("://").filter(|(scheme, _)| *scheme != "hf") {
        let problem =
            Problem::new(Code::SourceMissing, format!("{scheme}:// addresses are not read by this version"));
        let help = match repository_of(rest) {
            Some(repository) => format!(
                "type `{repository}`: it is looked up in the local cache; `hf download {repository}` puts it there"
            ),
            None => "copy the checkpoint to a local directory first".to_owned(),
        };
        return Err(vec![problem.at(text.clone()).help(help)]);
    }
    let name = given.to_str().map(|given| given.strip_prefix("hf://").unwrap_or(given));
    let is_hub = text.starts_with("hf://");
    let problem = Problem::new(Code::SourceMissing, "no such file or directory").at(text.clone());
    match name.filter(|name| looks_like_repository(name)) {
        Some(name) if is_hub || name.contains('/') => in_cache(&text, name),
        // A name of one word is more often a slip than a repository: only what is there is one.
        Some(name) => in_cache(&text, name).map_err(|problems| {
            let is_there = problems.iter().all(|problem| problem.code != Code::NotInCache);
            let help = "neither a path here nor a model in the local Hugging Face cache";
            if is_there { problems } else { vec![problem.help(help)] }
        }),
        None => Err(vec![match repository_of(&text) {
            Some(repository) => problem.help(format!("type `{repository}`")),
            None => problem,
        }]),
    }
}

/// `org/name` of an address such as `huggingface.co/org/name/tree/main`.
fn repository_of(address: &str) -> Option<String> {
    let rest = address.strip_prefix("www.").unwrap_or(address);
    let rest = rest.strip_prefix("huggingface.co/").or_else(|| rest.strip_prefix("hf.co/"))?;
    let parts: Vec<&str> = rest.split('/').filter(|part| !part.is_empty()).collect();
    let (name, revision) = match parts.as_slice() {
        [org, name] => (format!("{org}/{name}"), None),
        [org, name, "tree" | "blob" | "resolve", revision, ..] => (format!("{org}/{name}"), Some(*revision)),
        [name] => ((*name).to_owned(), None),
        _ => return None,
    };
    let revision = revision.filter(|revision| *revision != "main");
    Some(revision.map_or(name.clone(), |revision| format!("{name}@{revision}")))
}

/// Names that end so are files, not repositories.
const FILE_SUFFIXES: [&str; 7] = [".safetensors", ".json", ".bin", ".pt", ".pth", ".ckpt", ".gguf"];

/// `name`, `org/name` or `org/name@revision`: at most one slash, no path of any other kind.
fn looks_like_repository(text: &str) -> bool {
    let name = text.split_once('@').map_or(text, |(name, _)| name);
    let parts: Vec<&str> = name.split('/').collect();
    let is_part = |part: &&str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
    };
    parts.len() <= 2
        && parts.iter().all(is_part)
        && !FILE_SUFFIXES.iter().any(|suffix| name.ends_with(suffix))
}

fn in_cache(given: &str, repository: &str) -> Result<Resolved, Vec<Problem>> {
    let Some(root) = HubCache::locate(&variables()) else {
        let problem = Problem::new(Code::NotInCache, "the local cache cannot be found: HOME is not set");
        return Err(vec![problem.at(given).help("set HF_HOME or HF_HUB_CACHE")]);
    };
    match HubCache::new(root).resolve(repository) {
        Ok(snapshot) => Ok(Resolved {
            given: given.to_owned(),
            revision: snapshot.file_name().map(|name| name.to_string_lossy().into_owned()),
            path: snapshot,
        }),
        Err(error) => Err(library_errors::checkpoint(&error)),
    }
}

/// The variables that locate the cache.
fn variables() -> CacheVariables {
    CacheVariables {
        hf_hub_cache: env::var_os("HF_HUB_CACHE"),
        huggingface_hub_cache: env::var_os("HUGGINGFACE_HUB_CACHE"),
        hf_home: env::var_os("HF_HOME"),
        xdg_cache_home: env::var_os("XDG_CACHE_HOME"),
        home: env::var_os("HOME"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repositories_have_at_most_one_slash() {
        for text in ["gpt2", "org/name", "org/name@main", "meta-llama/Llama-3.1-8B@refs/pr/1", "a_b/c.d"] {
            assert!(looks_like_repository(text), "{text}");
        }
        for text in
            ["", "./name", "../name", "/a/b", "a/b/c", "a//b", "a/", "a/m.safetensors", "a b/c", "a/.."]
        {
            assert!(!looks_like_repository(text), "{text}");
        }
    }

    #[test]
    fn addresses_of_the_hub_have_a_repository() {
        for (address, expected) in [
            ("huggingface.co/org/name", Some("org/name")),
            ("huggingface.co/org/name/", Some("org/name")),
            ("huggingface.co/gpt2", Some("gpt2")),
            ("www.huggingface.co/org/name/tree/main", Some("org/name")),
            ("hf.co/org/name/blob/v1/model.safetensors", Some("org/name@v1")),
            ("example.org/org/name", None),
            ("huggingface.co/", None),
        ] {
            assert_eq!(repository_of(address).as_deref(), expected, "{address}");
        }
    }
}
