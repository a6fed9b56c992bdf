//! Opens all files of a checkpoint and compares them with each other.
//!
//! A checkpoint has one part, a pipeline one part per component. Files are opened one after the
//! other, and closed again. The problems of all files are collected before a set is refused.
//!
//! One thread reads all headers. 100 headers take 2 ms with 1 200 tensors, and 8 ms with 56 000
//! tensors, half of the whole opening. A pool of threads saves a few milliseconds at best, and a
//! table for each thread would double the memory.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::directory::{Choice, LISTED_MAX, choose, gguf_set, not_read};
use super::error::{CheckpointError, kept};
use super::file::{self, OneFile};
use super::identity::FileKind;
use super::index::{FILES_MAX, WeightMap};
use super::options::OpenOptions;
use super::pipeline;
use super::tensor::{Mark, Shard, TensorTable};
use super::{Checkpoint, FileFormat, Inner, gguf};
use crate::footprint::{Held, PeakMeter};
use crate::units::to_u64;

/// The most problems that are collected.
const PROBLEMS_MAX: usize = 32;

/// Opens and checks the checkpoint at `path`.
pub(super) fn open(path: &Path, options: &OpenOptions) -> Result<Checkpoint, CheckpointError> {
    let mut notes = Vec::new();
    let parts = parts(path, options, &mut notes)?;
    let mut meter = PeakMeter::default();
    for (_, map) in parts.iter().filter_map(|part| part.index.as_ref()) {
        meter.note(Held::default().and(map.read_peak_bytes()));
        meter.keep(Held::default().and(map.heap_bytes()));
    }
    let mut set = Set { options, table: TensorTable::default(), shards: Vec::new(), notes, meter };
    let mut problems = Vec::new();
    for part in &parts {
        match set.add(part) {
            Ok(()) => {}
            Err(CheckpointError::Several { problems: more }) => problems.extend(more),
            Err(problem) => problems.push(problem),
        }
    }
    report(problems)?;
    set.finish(path)
}

/// Checks that the files of the checkpoint in `directory` are there, without opening them.
pub(super) fn check_present(directory: &Path, options: &OpenOptions) -> Result<(), CheckpointError> {
    let parts = parts(directory, options, &mut Vec::new())?;
    report(parts.iter().filter_map(|part| part.check_present().err()).collect())
}

/// No problem, the one problem, or several.
fn report(mut problems: Vec<CheckpointError>) -> Result<(), CheckpointError> {
    problems.truncate(PROBLEMS_MAX);
    match problems.pop() {
        None => Ok(()),
        Some(only) if problems.is_empty() => Err(only),
        Some(last) => {
            problems.push(last);
            Err(CheckpointError::Several { problems })
        }
    }
}

/// Files that belong together.
struct Part {
    /// Put before the names of its tensors.
    prefix: String,
    /// Files, if there is no index.
    files: Vec<PathBuf>,
    /// The index that lists the files. Paths are built one at a time, since an index of a MiB can
    /// list 65 536 files.
    index: Option<(PathBuf, WeightMap)>,
}

/// The parts of the checkpoint at `path`.
fn parts(path: &Path, options: &OpenOptions, notes: &mut Vec<String>) -> Result<Vec<Part>, CheckpointError> {
    let kind = match path.metadata() {
        Ok(metadata) => FileKind::of(metadata.file_type()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Err(file::missing(path)),
        Err(source) => return Err(CheckpointError::Io { path: path.to_owned(), operation: "stat", source }),
    };
    let name = path.file_name().map_or(String::new(), |name| name.to_string_lossy().into_owned());
    match kind {
        FileKind::Directory => match choose(path, true, notes)? {
            Choice::Pipeline(index) => pipeline_parts(path, &index, options, notes),
            choice => Ok(vec![Part::new(path, String::new(), choice, options, notes)?]),
        },
        FileKind::Regular if name == pipeline::FILE_NAME => {
            pipeline_parts(path.parent().unwrap_or(Path::new("")), path, options, notes)
        }
        FileKind::Regular if name.ends_with(".json") => {
            let directory = path.parent().unwrap_or(Path::new(""));
            let choice = Choice::Index(path.to_owned(), Vec::new());
            Ok(vec![Part::new(directory, String::new(), choice, options, notes)?])
        }
        FileKind::Regular => {
            let set = gguf_set(path)?;
            if let Some(set) = set.as_ref().filter(|set| set.len() > 1) {
                notes.push(format!("{}: one of {} files, all are read", path.display(), set.len()));
            }
            let files = set.unwrap_or_else(|| vec![path.to_owned()]);
            Ok(vec![Part { prefix: String::new(), files, index: None }])
        }
        found => Err(CheckpointError::NotRegular { path: path.to_owned(), found }),
    }
}

/// One part per component that has weights.
fn pipeline_parts(
    directory: &Path,
    index: &Path,
    options: &OpenOptions,
    notes: &mut Vec<String>,
) -> Result<Vec<Part>, CheckpointError> {
    let mut parts = Vec::new();
    let mut problems = Vec::new();
    for component in pipeline::components(index, options)? {
        let folder = directory.join(&component);
        if !folder.is_dir() {
            notes.push(format!("{}: component without a folder", folder.display()));
            continue;
        }
        let prefix = format!("{component}/");
        let chosen = choose(&folder, false, notes);
        match chosen.and_then(|choice| Part::new(&folder, prefix, choice, options, notes)) {
            Ok(part) => parts.push(part),
            Err(CheckpointError::NoWeights { path, found, .. }) => {
                notes.push(format!("{}: component without weights ({found})", path.display()));
            }
            Err(problem) => problems.push(problem),
        }
    }
    report(problems)?;
    if parts.is_empty() {
        let (path, expected) = (directory.to_owned(), "weights in at least one component");
        let found = "none in any".to_owned();
        return Err(CheckpointError::NoWeights { path, expected, found });
    }
    Ok(parts)
}

impl Part {
    fn new(
        directory: &Path,
        prefix: String,
        choice: Choice,
        options: &OpenOptions,
        notes: &mut Vec<String>,
    ) -> Result<Self, CheckpointError> {
        match choice {
            Choice::Files(files) if files.len() > FILES_MAX => {
                let (path, limit) = (directory.to_owned(), to_u64(FILES_MAX));
                Err(CheckpointError::TooMany { path, what: "files", limit })
            }
            Choice::Files(files) => Ok(Self { prefix, files, index: None }),
            Choice::Index(path, beside) => {
                let map = WeightMap::read(&path, options)?;
                let name = path.file_name().map_or(String::new(), |name| name.to_string_lossy().into_owned());
                let beside: Vec<String> =
                    beside.iter().map(|name| name.to_string_lossy().into_owned()).collect();
                let listed: Vec<&str> = map.files().collect();
                let others = beside.iter().map(String::as_str);
                let others = others.filter(|other| listed.binary_search(other).is_err());
                notes.extend(not_read(directory, &name, others));
                Ok(Self { prefix, files: Vec::new(), index: Some((path, map)) })
            }
            Choice::Pipeline(path) => {
                let found = "the index of a pipeline inside a pipeline".to_owned();
                Err(CheckpointError::NotAnIndex { path, found })
            }
        }
    }

    /// The paths of its files.
    fn files(&self) -> impl Iterator<Item = Cow<'_, Path>> {
        let listed = self
            .index
            .iter()
            .flat_map(|(index, map)| map.files().map(|file| Cow::Owned(index.with_file_name(file))));
        self.files.iter().map(|file| Cow::Borrowed(file.as_path())).chain(listed)
    }

    fn file_count(&self) -> usize {
        self.files.len() + self.index.as_ref().map_or(0, |(_, map)| map.files().len())
    }

    /// Refuses the part if files are missing. The error lists them.
    fn check_present(&self) -> Result<(), CheckpointError> {
        let mut problems = Vec::new();
        let mut missing = Vec::new();
        let mut missing_count = 0_u64;
        for file in self.files() {
            match file.metadata() {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                _ => continue,
            }
            match (file::missing(&file), &self.index) {
                (CheckpointError::NotFound { .. }, Some(_)) => {
                    missing_count += 1;
                    if missing.len() < LISTED_MAX {
                        let name = file.file_name().unwrap_or_default();
                        missing.push(name.to_string_lossy().into_owned());
                    }
                }
                (problem, _) if problems.len() < PROBLEMS_MAX => problems.push(problem),
                _ => {}
            }
        }
        if let Some((index, _)) = &self.index
            && missing_count > 0
        {
            let (path, expected_count) = (index.clone(), to_u64(self.file_count()));
            let shards = CheckpointError::MissingShards { path, missing, missing_count, expected_count };
            problems.insert(0, shards);
        }
        report(problems)
    }
}

/// A checkpoint under construction.
struct Set<'a> {
    options: &'a OpenOptions,
    table: TensorTable,
    shards: Vec<Shard>,
    notes: Vec<String>,
    meter: PeakMeter,
}

impl Set<'_> {
    fn add(&mut self, part: &Part) -> Result<(), CheckpointError> {
        part.check_present()?;
        let (mark, first_shard) = (self.table.mark(), self.shards.len());
        let (mut problems, mut left_out) = (Vec::new(), 0);
        for path in part.files() {
            let first_keys = self.shards.get(first_shard).map(|shard| &shard.metadata);
            let one = OneFile { path: &path, prefix: &part.prefix, options: self.options, first_keys };
            match file::read(one, &mut self.table) {
                Ok(read) => {
                    self.notes.extend(read.notes.iter().map(|note| format!("{}: {note}", path.display())));
                    self.shards.push(read.shard);
                    left_out += read.left_out;
                }
                Err(problem) => problems.push(problem),
            }
            if problems.len() == PROBLEMS_MAX {
                break;
            }
        }
        report(problems)?;
        self.meter.note(self.table.held());
        self.table.merge_names(mark);
        // Reading a file has found duplicates within it.
        if part.file_count() > 1 {
            report(self.duplicates(mark).into_iter().collect())?;
        }
        let shards = &self.shards[first_shard..];
        if shards.iter().any(|shard| shard.format == FileFormat::Gguf) {
            gguf::check_split(shards, to_u64(self.table.sorted_since(mark).len()) + left_out)?;
        }
        if let Some((path, map)) = &part.index {
            let comparison = Comparison { set: self, path, map, prefix: &part.prefix, mark, first_shard };
            report(comparison.run())?;
            self.note_total_size(path, map, mark);
        }
        Ok(())
    }

    /// Finds tensors that are in two files.
    fn duplicates(&self, mark: Mark) -> Option<CheckpointError> {
        let mut ids = self.table.sorted_since(mark);
        let mut previous = self.table.entry(ids.next()?);
        let (mut found, mut count) = (None, 0);
        for id in ids {
            let tensor = self.table.entry(id);
            if tensor.name == previous.name {
                found.get_or_insert((previous, tensor));
                count += 1;
            }
            previous = tensor;
        }
        let (first, second) = found?;
        Some(CheckpointError::DuplicateTensor {
            path: self.shards[first.shard.index()].path.clone(),
            tensor: kept(first.name),
            other: self.shards[second.shard.index()].path.clone(),
            count,
        })
    }

    /// Notes a wrong `total_size`. It is often wrong, so nothing depends on it.
    fn note_total_size(&mut self, index: &Path, map: &WeightMap, mark: Mark) {
        let Some(stated) = &map.total_size else { return };
        let ids = self.table.sorted_since(mark);
        let found: u128 = ids.map(|id| u128::from(self.table.entry(id).extent.len_bytes())).sum();
        let whole = stated.strip_suffix(".0").unwrap_or(stated);
        if whole.parse() != Ok(found) {
            let index = index.display();
            self.notes.push(format!("{index}: total_size is {stated}, its tensors have {found} bytes"));
        }
    }

    fn finish(mut self, path: &Path) -> Result<Checkpoint, CheckpointError> {
        self.table.merge_names(Mark::default());
        self.table.shrink();
        let tensor_bytes = self.table.tensor_bytes().ok_or_else(|| CheckpointError::TooMany {
            path: path.to_owned(),
            what: "bytes of tensors",
            limit: u64::MAX,
        })?;
        self.shards.shrink_to_fit();
        let Self { table, shards, notes, meter, .. } = self;
        let opening_bytes = meter.peak_bytes();
        Ok(Checkpoint { inner: Arc::new(Inner { table, shards, notes, tensor_bytes, opening_bytes }) })
    }
}

/// Compares an index with the headers of its shards, both ways.
struct Comparison<'a> {
    set: &'a Set<'a>,
    path: &'a Path,
    map: &'a WeightMap,
    prefix: &'a str,
    mark: Mark,
    first_shard: usize,
}

/// The first of several, and their count.
type Tally<T> = Option<(T, u64)>;

fn count<T>(tally: &mut Tally<T>, example: T) {
    match tally {
        Some((_, count)) => *count += 1,
        None => *tally = Some((example, 1)),
    }
}

impl Comparison<'_> {
    /// True for a further name of a tensor.
    fn is_alias(&self, name: &str) -> bool {
        self.set.table.find_alias(&format!("{}{name}", self.prefix)).is_some()
    }

    /// Merges both sides, which are sorted by name.
    fn run(&self) -> Vec<CheckpointError> {
        let (mut missing, mut unindexed, mut misplaced) = (None, None, None);
        let files: Vec<&str> = self.map.files().collect();
        let mut indexed = self.map.entries().peekable();
        for id in self.set.table.sorted_since(self.mark) {
            let tensor = self.set.table.entry(id);
            let name = &tensor.name[self.prefix.len()..];
            while let Some(early) = indexed.next_if(|&(listed, _)| listed < name) {
                if !self.is_alias(early.0) {
                    count(&mut missing, early);
                }
            }
            match indexed.next_if(|&(listed, _)| listed == name) {
                None => count(&mut unindexed, tensor),
                Some((_, file)) if files[tensor.shard.index() - self.first_shard] != file => {
                    count(&mut misplaced, (tensor, file));
                }
                Some(_) => {}
            }
        }
        for late in indexed.filter(|&(name, _)| !self.is_alias(name)) {
            count(&mut missing, late);
        }
        let path = || self.path.to_owned();
        let shard = |tensor: super::TensorEntry<'_>| self.set.shards[tensor.shard.index()].path.clone();
        let missing = missing.map(|((tensor, shard), count)| {
            let (tensor, shard) = (kept(tensor), kept(shard));
            CheckpointError::MissingTensor { path: path(), tensor, shard, count }
        });
        let misplaced = misplaced.map(|((tensor, file), count)| {
            let (expected, found, tensor) =
                (kept(file), shard(tensor), kept(&tensor.name[self.prefix.len()..]));
            CheckpointError::WrongShard { path: path(), tensor, expected, found, count }
        });
        let unindexed = unindexed.map(|(tensor, count)| {
            let (shard, tensor) = (shard(tensor), kept(&tensor.name[self.prefix.len()..]));
            CheckpointError::UnindexedTensor { path: path(), tensor, shard, count }
        });
        [missing, misplaced, unindexed].into_iter().flatten().collect()
    }
}
