//! The local cache of the Hugging Face hub: `org/name@revision` -> a directory. Nothing is fetched.
//!
//! ```text
//! ROOT/models--org--name/refs/main                           text: the commit that `main` was, at download
//!                       /snapshots/COMMIT/model.safetensors  link to ../../blobs/HASH
//!                       /blobs/HASH, HASH.incomplete         the bytes; a download that is not finished
//! ```
//!
//! Layout: <https://huggingface.co/docs/huggingface_hub/guides/manage-cache>. The caller passes the
//! cache directory, since this library does not read the environment. [`HubCache::locate`] applies
//! the hub's own rule to the values of its variables.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::error::{CheckpointError, kept};
use super::options::OpenOptions;
use super::{file, open, path_rule};

/// The most bytes of a reference file. It holds one commit.
const REFERENCE_BYTES_MAX: u64 = 4096;

/// The revision of a name that gives none.
const DEFAULT_REVISION: &str = "main";

/// A cache of the Hugging Face hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubCache {
    /// The directory with the `models--...` folders.
    root: PathBuf,
}

/// The environment variables that name the cache directory. Empty means unset.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheVariables {
    /// `HF_HUB_CACHE`: the cache itself.
    pub hf_hub_cache: Option<OsString>,
    /// `HUGGINGFACE_HUB_CACHE`: the older name of `HF_HUB_CACHE`.
    pub huggingface_hub_cache: Option<OsString>,
    /// `HF_HOME`: the cache is its `hub`.
    pub hf_home: Option<OsString>,
    /// `XDG_CACHE_HOME`: the cache is its `huggingface/hub`.
    pub xdg_cache_home: Option<OsString>,
    /// `HOME`: the cache is its `.cache/huggingface/hub`. A leading `~` in the other values is this
    /// directory.
    pub home: Option<OsString>,
}

impl HubCache {
    /// The cache in the directory `root`.
    #[must_use]
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The directory that the hub's own tools would use: the first variable that is set decides, in
    /// the order of [`CacheVariables`]. `None` if none is set. Variables inside the values are not
    /// expanded.
    #[must_use]
    pub fn locate(variables: &CacheVariables) -> Option<PathBuf> {
        let home = variables.home.as_ref().filter(|value| !value.is_empty()).map(PathBuf::from);
        let expanded = |value: &Option<OsString>| {
            let path = PathBuf::from(value.as_ref().filter(|value| !value.is_empty())?);
            match (path.strip_prefix("~"), &home) {
                (Ok(rest), Some(home)) => Some(home.join(rest)),
                _ => Some(path),
            }
        };
        expanded(&variables.hf_hub_cache)
            .or_else(|| expanded(&variables.huggingface_hub_cache))
            .or_else(|| Some(expanded(&variables.hf_home)?.join("hub")))
            .or_else(|| Some(expanded(&variables.xdg_cache_home)?.join("huggingface/hub")))
            .or_else(|| Some(home.as_ref()?.join(".cache/huggingface/hub")))
    }

    /// The directory of `org/name`, `name`, `org/name@revision` or `name@revision`. A revision is a
    /// branch or tag that was downloaded under that name, or a whole commit.
    ///
    /// # Errors
    /// [`CheckpointError::InvalidRepository`] and [`CheckpointError::UnsafeName`] if `name` is
    /// malformed, [`CheckpointError::NotCached`] if the revision is not in the cache. For an
    /// incomplete download, [`CheckpointError::DanglingLink`] or
    /// [`CheckpointError::MissingShards`].
    pub fn resolve(&self, name: &str) -> Result<PathBuf, CheckpointError> {
        let (repository, revision) = name.split_once('@').unwrap_or((name, DEFAULT_REVISION));
        check_repository(repository)
            .map_err(|reason| CheckpointError::InvalidRepository { found: kept(name), reason })?;
        let folder = self.root.join(format!("models--{}", repository.replace('/', "--")));
        let not_cached = |path: PathBuf, found: &str| CheckpointError::NotCached {
            path,
            repository: repository.to_owned(),
            revision: kept(revision),
            found: found.to_owned(),
        };
        // The revision becomes a part of a path, so the rule for names from files applies.
        let checked = path_rule::relative(revision).map_err(|reason| CheckpointError::UnsafeName {
            path: folder.clone(),
            key: "the revision".to_owned(),
            found: kept(revision),
            reason,
        })?;
        if !folder.is_dir() {
            return Err(not_cached(folder, "nothing of that repository"));
        }
        let reference = folder.join("refs").join(checked);
        let commit = match reference.is_file() {
            true => read_reference(&reference)?,
            false if is_commit(checked) => checked.to_owned(),
            false => return Err(not_cached(reference, "no such reference")),
        };
        let snapshot = folder.join("snapshots").join(commit);
        if !snapshot.is_dir() {
            return Err(not_cached(snapshot, "no snapshot of it"));
        }
        open::check_present(&snapshot, &OpenOptions::new())?;
        Ok(snapshot)
    }
}

/// Reads the commit from a reference file.
fn read_reference(path: &Path) -> Result<String, CheckpointError> {
    let text = file::read_small(path, REFERENCE_BYTES_MAX, "reference")?;
    let commit = text.trim_ascii();
    if is_commit(commit) {
        return Ok(commit.to_owned());
    }
    let (path, found) = (path.to_owned(), kept(commit));
    let (key, reason) = ("the reference".to_owned(), "it is not a commit in hexadecimal digits");
    Err(CheckpointError::UnsafeName { path, key, found, reason })
}

/// True for a SHA-1 or SHA-256 in hexadecimal digits.
fn is_commit(text: &str) -> bool {
    matches!(text.len(), 40 | 64) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// The hub's rule for names of repositories.
fn check_repository(name: &str) -> Result<(), &'static str> {
    const NAME_BYTES_MAX: usize = 96;
    if name.len() > NAME_BYTES_MAX {
        return Err("it is longer than 96 bytes");
    }
    if name.split('/').count() > 2 {
        return Err("it has more than one `/`");
    }
    if name.contains("--") || name.contains("..") {
        return Err("it has `--` or `..` in it");
    }
    for part in name.split('/') {
        if part.is_empty() {
            return Err("a part of it is empty");
        }
        if part.starts_with(['-', '.']) || part.ends_with(['-', '.']) {
            return Err("a part of it starts or ends with `-` or `.`");
        }
        if !part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte)) {
            return Err("it has characters other than letters, digits, `-`, `_` and `.`");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_variable_that_is_set_decides() {
        let mut variables = CacheVariables::default();
        assert_eq!(HubCache::locate(&variables), None);
        let some = |text: &str| Some(OsString::from(text));
        let located = |variables: &CacheVariables| HubCache::locate(variables).unwrap();
        variables.home = some("/home/me");
        assert_eq!(located(&variables), Path::new("/home/me/.cache/huggingface/hub"));
        variables.xdg_cache_home = some("/xdg");
        assert_eq!(located(&variables), Path::new("/xdg/huggingface/hub"));
        variables.hf_home = some("~/hf");
        assert_eq!(located(&variables), Path::new("/home/me/hf/hub"));
        variables.huggingface_hub_cache = some("/old");
        assert_eq!(located(&variables), Path::new("/old"));
        variables.hf_hub_cache = some("/new");
        assert_eq!(located(&variables), Path::new("/new"));
        variables.hf_hub_cache = some("");
        assert_eq!(located(&variables), Path::new("/old"));
    }

    #[test]
    fn a_reference_may_be_as_long_as_its_limit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("main");
        let limit = usize::try_from(REFERENCE_BYTES_MAX).unwrap();
        let commit = "0123456789abcdef0123456789abcdef01234567";
        std::fs::write(&path, format!("{commit:<limit$}")).unwrap();
        assert_eq!(read_reference(&path).unwrap(), commit);
        std::fs::write(&path, format!("{commit:<0$}", limit + 1)).unwrap();
        assert!(matches!(read_reference(&path), Err(CheckpointError::OverLimit { .. })));
    }

    #[test]
    fn names_of_repositories_follow_the_hubs_rule() {
        for name in ["gpt2", "org/name", "TheOrg/Model-7B_v0.1", "1/2"] {
            assert_eq!(check_repository(name), Ok(()), "{name}");
        }
        let long = "x".repeat(97);
        for name in
            ["", "/", "a/", "/a", "a/b/c", "../x", "a--b/c", "a/..", "a/.b", "a/b-", "a b/c", "a\0/b", &long]
        {
            assert!(check_repository(name).is_err(), "{name}");
        }
    }
}
