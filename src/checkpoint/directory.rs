//! Chooses the files of a directory that make up a checkpoint.
//!
//! Directories often hold several copies: sharded and consolidated, in several precisions, for
//! several libraries. One rule chooses among them. Sets are never mixed, and a note names files
//! that were left out. Safetensors files come before PyTorch files, and these before GGUF files. In
//! this order:
//!
//! 1. `model_index.json`: a pipeline, one component per folder (see `pipeline.rs`);
//! 2. an index, `*.safetensors.index*.json` or `*.bin.index*.json`;
//! 3. `model.safetensors`, `pytorch_model.bin` or `diffusion_pytorch_model.*`;
//! 4. a numbered set, `NAME-00001-of-00004.safetensors`; all numbers must be there;
//! 5. a variant of 3, such as `model.fp16.safetensors`;
//! 6. all `*.safetensors` files together; of PyTorch and GGUF files the only one.
//!
//! If several files match a rule: without a variant (`fp16` in `model.fp16...`) before with one,
//! `model` before `diffusion_pytorch_model` before other names, then alphabetically. Hidden files
//! are ignored, and so is the state of a training run (`optimizer.pt`, `training_args.bin`, ...).

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::error::CheckpointError;
use crate::units::to_u64;
use onelayer_system::folder::names_in;

/// File names of one format.
#[derive(Debug, PartialEq, Eq)]
struct Family {
    name: &'static str,
    suffixes: &'static [&'static str],
    /// The part of an index's name in front of `.json` or of a variant.
    index_mark: &'static str,
    /// The usual name of a checkpoint of one file, up to its suffix.
    usual: &'static str,
    /// True if files without usual names belong together.
    is_joined: bool,
}

static FAMILIES: [Family; 3] = [
    Family {
        name: "safetensors",
        suffixes: &[".safetensors"],
        index_mark: ".safetensors.index",
        usual: "model",
        is_joined: true,
    },
    Family {
        name: "PyTorch",
        suffixes: &[".bin", ".pt", ".pth", ".ckpt"],
        index_mark: ".bin.index",
        usual: "pytorch_model",
        is_joined: false,
    },
    Family {
        name: "GGUF",
        suffixes: &[".gguf"],
        index_mark: ".gguf.index",
        usual: "model",
        is_joined: false,
    },
];

/// PyTorch files of a training run that are no weights, up to their first `.`, `_` or `-`.
const TRAINING_STATE: [&str; 6] = ["optimizer", "scheduler", "rng", "random", "scaler", "training"];

/// The most missing files that an error lists.
pub(super) const LISTED_MAX: usize = 64;

/// The choice in a directory.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Choice {
    /// The `model_index.json` of a pipeline.
    Pipeline(PathBuf),
    /// An index, and the names of all safetensors files beside it.
    Index(PathBuf, Vec<OsString>),
    /// These files, sorted by name.
    Files(Vec<PathBuf>),
}

/// True for names such as `model.safetensors.index.json` and `model.safetensors.index.fp16.json`.
pub(super) fn is_index_name(name: &str) -> bool {
    name.ends_with(".json") && FAMILIES.iter().any(|family| name.contains(family.index_mark))
}

/// The complete set of a numbered GGUF file, if its name is that of one: readers of GGUF open a set
/// by the name of one of its files.
pub(super) fn gguf_set(path: &Path) -> Result<Option<Vec<PathBuf>>, CheckpointError> {
    let (Some(raw), Some(directory)) = (path.file_name(), path.parent()) else { return Ok(None) };
    let name = Name { raw: raw.to_owned(), text: raw.to_string_lossy().into_owned(), family: &FAMILIES[2] };
    let Some(chosen) = name.numbered().filter(|_| name.text.ends_with(".gguf")) else { return Ok(None) };
    let directory = if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
    let listing = Listing::read(directory)?;
    let set = listing.set_of(chosen, name.family);
    check_complete(directory, chosen, &set)?;
    Ok(Some(set.iter().map(|name| directory.join(&name.raw)).collect()))
}

/// Chooses in `directory`; notes name the files that were left out.
pub(super) fn choose(
    directory: &Path,
    pipelines: bool,
    notes: &mut Vec<String>,
) -> Result<Choice, CheckpointError> {
    let listing = Listing::read(directory)?;
    if pipelines && listing.has_pipeline {
        listing.note(directory, "model_index.json", &listing.weights, notes);
        return Ok(Choice::Pipeline(directory.join("model_index.json")));
    }
    for family in &FAMILIES {
        if let Some(choice) = listing.choose_in(directory, family, notes)? {
            return Ok(choice);
        }
    }
    Err(listing.nothing(directory))
}

/// Sort key: the smallest is chosen.
fn rank(name: &Name) -> (bool, u8, &str) {
    let base = match name.stem().split('.').next() {
        Some(base) if base == name.family.usual => 0,
        Some("diffusion_pytorch_model") => 1,
        _ => 2,
    };
    (name.variant().is_some(), base, &name.text)
}

/// A file name, as it is and as text.
#[derive(Debug, PartialEq, Eq)]
struct Name {
    raw: OsString,
    text: String,
    family: &'static Family,
}

/// A name such as `model-00001-of-00004.safetensors`, taken apart.
#[derive(Clone, Copy)]
struct Numbered<'a> {
    /// `model-`
    head: &'a str,
    /// `00001`
    number: &'a str,
    /// `00004`
    count: &'a str,
    /// `.safetensors`
    suffix: &'static str,
}

impl Name {
    /// The name up to `.safetensors`, numbers included.
    fn stem(&self) -> &str {
        let ends = self.family.suffixes.iter().filter_map(|suffix| self.text.find(suffix));
        &self.text[..ends.min().unwrap_or(self.text.len())]
    }

    fn suffix(&self) -> Option<&'static str> {
        self.family.suffixes.iter().copied().find(|suffix| self.text.ends_with(suffix))
    }

    /// `fp16` in `model.fp16.safetensors`, `model.fp16-00001-of-00002.safetensors`,
    /// `model.safetensors.index.fp16.json` and `model.fp16.safetensors.index.json`.
    fn variant(&self) -> Option<&str> {
        if let Some((_, variant)) = self.stem().split_once('.') {
            return Some(variant);
        }
        let (_, tail) = self.text.split_once(self.family.index_mark)?;
        tail.strip_suffix(".json")?.strip_prefix('.')
    }

    fn numbered(&self) -> Option<Numbered<'_>> {
        let suffix = self.suffix()?;
        let (front, count) = self.text.strip_suffix(suffix)?.rsplit_once("-of-")?;
        let head = front.trim_end_matches(|character: char| character.is_ascii_digit());
        let number = &front[head.len()..];
        let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let separated = head.ends_with(['-', '_']);
        (separated && is_number(number) && is_number(count)).then_some(Numbered {
            head,
            number,
            count,
            suffix,
        })
    }
}

/// The entries of a directory that the rule asks about, sorted.
#[derive(Debug, Default)]
struct Listing {
    weights: Vec<Name>,
    indices: Vec<Name>,
    has_pipeline: bool,
    /// Weights in other formats.
    foreign: Vec<String>,
}

impl Listing {
    fn read(directory: &Path) -> Result<Self, CheckpointError> {
        let io_error = |source| CheckpointError::Io { path: directory.to_owned(), operation: "list", source };
        let mut listing = Self::default();
        for raw in names_in(directory).map_err(io_error)? {
            let raw = raw.map_err(io_error)?;
            let text = raw.to_string_lossy().into_owned();
            if text.starts_with('.') || !is_interesting(&text) {
                continue;
            }
            // A dangling link is kept, so that the missing shard is reported.
            if directory.join(&raw).is_dir() {
                continue;
            }
            if text == "model_index.json" {
                listing.has_pipeline = true;
                continue;
            }
            let index_of = |family: &&Family| text.ends_with(".json") && text.contains(family.index_mark);
            if let Some(family) = FAMILIES.iter().find(index_of) {
                listing.indices.push(Name { raw, text, family });
            } else if let Some(family) = family_of(&text) {
                listing.weights.push(Name { raw, text, family });
            } else {
                listing.foreign.push(text);
            }
        }
        listing.weights.sort_by(|left, right| left.raw.cmp(&right.raw));
        listing.foreign.sort();
        Ok(listing)
    }

    /// The files of one family.
    fn of(&self, family: &'static Family) -> impl Iterator<Item = &Name> {
        self.weights.iter().filter(move |name| name.family == family)
    }

    /// Rules 2 to 6 for the files of one family; `None` if there are none.
    fn choose_in(
        &self,
        directory: &Path,
        family: &'static Family,
        notes: &mut Vec<String>,
    ) -> Result<Option<Choice>, CheckpointError> {
        let mut indices: Vec<&Name> = self.indices.iter().filter(|name| name.family == family).collect();
        indices.sort_by(|left, right| rank(left).cmp(&rank(right)));
        if let Some((chosen, others)) = indices.split_first() {
            self.note(directory, &chosen.text, others.iter().copied(), notes);
            let beside = self.of(family).map(|name| name.raw.clone()).collect();
            return Ok(Some(Choice::Index(directory.join(&chosen.raw), beside)));
        }
        let chosen = match self.single(family, |name| name.variant().is_none()) {
            Some(single) => vec![single],
            None => match self.numbered(directory, family)? {
                Some(set) => set,
                None => match self.single(family, |_| true) {
                    Some(single) => vec![single],
                    None => self.of(family).collect(),
                },
            },
        };
        let Some(first) = chosen.first() else { return Ok(None) };
        if chosen.len() > 1 && !family.is_joined && first.numbered().is_none() {
            return Err(ambiguous(directory, family, &chosen));
        }
        // Binary search, since there may be many files.
        let is_chosen = |name: &Name| chosen.binary_search_by(|other| other.raw.cmp(&name.raw)).is_ok();
        let others = self.of(family).filter(|name| !is_chosen(name));
        self.note(directory, &first.text, others, notes);
        let mut files: Vec<PathBuf> = chosen.iter().map(|name| directory.join(&name.raw)).collect();
        files.sort();
        Ok(Some(Choice::Files(files)))
    }

    /// Rules 3 and 5: the best file with one of the two usual names.
    fn single(&self, family: &'static Family, fits: impl Fn(&Name) -> bool) -> Option<&Name> {
        self.of(family)
            .filter(|name| rank(name).1 < 2 && name.numbered().is_none() && fits(name))
            .min_by(|left, right| rank(left).cmp(&rank(right)))
    }

    /// Rule 4: all files of the best numbered set.
    fn numbered(
        &self,
        directory: &Path,
        family: &'static Family,
    ) -> Result<Option<Vec<&Name>>, CheckpointError> {
        let best = self
            .of(family)
            .filter(|name| name.numbered().is_some())
            .min_by(|left, right| rank(left).cmp(&rank(right)));
        let Some(chosen) = best.and_then(Name::numbered) else { return Ok(None) };
        let set = self.set_of(chosen, family);
        check_complete(directory, chosen, &set)?;
        Ok(Some(set))
    }

    /// The files that differ from `chosen` in their number alone.
    fn set_of(&self, chosen: Numbered<'_>, family: &'static Family) -> Vec<&Name> {
        let key =
            |numbered: Numbered<'_>| (numbered.head.to_owned(), numbered.count.to_owned(), numbered.suffix);
        let wanted = key(chosen);
        self.of(family).filter(|name| name.numbered().map(key).as_ref() == Some(&wanted)).collect()
    }

    fn note<'a>(
        &self,
        directory: &Path,
        chosen: &str,
        others: impl IntoIterator<Item = &'a Name>,
        notes: &mut Vec<String>,
    ) {
        let others = others.into_iter().map(|name| name.text.as_str());
        if let Some(note) = not_read(directory, chosen, others) {
            notes.push(note);
        }
    }

    fn nothing(&self, directory: &Path) -> CheckpointError {
        let found = match (self.foreign.first(), unfinished_download(directory)) {
            (_, Some(partial)) => format!("an interrupted download, {}", partial.display()),
            (Some(first), None) => format!("{first}, a format that is not read"),
            (None, None) => "no such file".to_owned(),
        };
        let expected = "an index, *.safetensors, PyTorch (*.bin, *.pt, *.pth, *.ckpt) or *.gguf files";
        CheckpointError::NoWeights { path: directory.to_owned(), expected, found }
    }
}

/// True for names that the rule or its errors need.
fn is_interesting(name: &str) -> bool {
    const FOREIGN: [&str; 3] = [".h5", ".msgpack", ".npz"];
    family_of(name).is_some()
        || is_index_name(name)
        || name == "model_index.json"
        || FOREIGN.iter().any(|suffix| name.ends_with(suffix))
}

/// The family of a file of weights.
fn family_of(name: &str) -> Option<&'static Family> {
    let is_of = |family: &&Family| family.suffixes.iter().any(|suffix| name.ends_with(suffix));
    let family = FAMILIES.iter().find(is_of)?;
    let first = name.split(['.', '_', '-']).next().unwrap_or(name);
    let is_state = family.name == "PyTorch" && TRAINING_STATE.contains(&first);
    (!is_state).then_some(family)
}

/// The error for several files of which none is the usual one.
fn ambiguous(directory: &Path, family: &Family, files: &[&Name]) -> CheckpointError {
    let is_rank = |name: &&&Name| name.text.starts_with("consolidated.") && name.text.ends_with(".pth");
    let advice = match (family.name, files.iter().filter(is_rank).count()) {
        (_, 2..) => "each is one rank's part of every tensor: merge them with the model's own script first",
        ("GGUF", _) => "these are several models, or one in several precisions: name one file",
        _ => "name one file",
    };
    CheckpointError::Ambiguous {
        path: directory.to_owned(),
        files: files.iter().take(LISTED_MAX).map(|name| name.text.clone()).collect(),
        count: to_u64(files.len()),
        advice,
    }
}

/// A note that names the files left out; `None` if there are none.
pub(super) fn not_read<'a>(
    directory: &Path,
    chosen: &str,
    others: impl Iterator<Item = &'a str>,
) -> Option<String> {
    const SHOWN: usize = 4;
    let others: Vec<&str> = others.collect();
    let shown = others.get(..SHOWN).unwrap_or(&others);
    let more = match others.len() - shown.len() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    (!others.is_empty())
        .then(|| format!("{}: {chosen} wins; not read: {}{more}", directory.display(), shown.join(", ")))
}

/// Checks that no file of a numbered set is missing. Names give the number of files; counting may
/// start at 0 or 1.
fn check_complete(directory: &Path, chosen: Numbered<'_>, set: &[&Name]) -> Result<(), CheckpointError> {
    let mut numbers: Vec<u64> = Vec::with_capacity(set.len());
    for name in set {
        match name.numbered().and_then(|numbered| numbered.number.parse().ok()) {
            Some(number) => numbers.push(number),
            None => return Ok(()),
        }
    }
    numbers.sort_unstable();
    numbers.dedup();
    let Ok(expected_count) = chosen.count.parse::<u64>() else { return Ok(()) };
    let missing_count = expected_count.saturating_sub(to_u64(numbers.len()));
    if missing_count == 0 {
        return Ok(());
    }
    let first = u64::from(numbers.first() != Some(&0));
    let width = chosen.number.len();
    let missing = (first..first.saturating_add(expected_count))
        .filter(|number| numbers.binary_search(number).is_err())
        .take(LISTED_MAX)
        .map(|number| format!("{}{number:0width$}-of-{}{}", chosen.head, chosen.count, chosen.suffix))
        .collect();
    let path = directory.to_owned();
    Err(CheckpointError::MissingShards { path, missing, missing_count, expected_count })
}

/// In a hub cache, `snapshots/REVISION` holds links to `blobs`, and an unfinished download is a
/// blob named `*.incomplete`.
fn unfinished_download(directory: &Path) -> Option<PathBuf> {
    let snapshots = directory.parent().filter(|parent| parent.ends_with("snapshots"))?;
    let blobs = snapshots.parent()?.join("blobs");
    let names = names_in(&blobs).ok()?.filter_map(|name| Some(blobs.join(name.ok()?)));
    names.filter(|path| path.extension().is_some_and(|extension| extension == "incomplete")).min()
}
