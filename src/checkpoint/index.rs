//! Reads the index of a sharded checkpoint: which tensor is in which file.
//!
//! ```text
//! { "metadata": { "total_size": n, ... }, "weight_map": { tensor: file, ... } }     as transformers writes it
//! { tensor: file, ... }                                                             as accelerate writes it
//! ```
//!
//! Only the text is checked here: syntax, names, duplicates. `open.rs` compares the index with the
//! headers of the shards, both ways.

use std::path::Path;

use super::error::{CheckpointError, JsonSection, kept};
use super::file;
use super::json::OpenKeys;
use super::json::{JsonFault, JsonReader};
use super::options::OpenOptions;
use super::path_rule;
use super::tensor::Span;
use super::text_sort::sort_by_text;
use crate::footprint::{Held, block_bytes, list_bytes};
use crate::units::{ByteRange, to_u64};

/// The most files of one checkpoint. The largest published ones have a few hundred. A hostile index
/// could list millions, and each costs a path and a system call.
pub(super) const FILES_MAX: usize = 1 << 16;

/// A checked `weight_map`, sorted by tensor.
#[derive(Debug, Default)]
pub(super) struct WeightMap {
    text: String,
    entries: Vec<Entry>,
    /// The distinct files, sorted.
    files: Vec<Span>,
    /// `metadata.total_size` as spelled, if it is a number.
    pub(super) total_size: Option<String>,
    /// Peak of memory while reading, this map included.
    read_peak_bytes: u64,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    tensor: Span,
    file: Span,
}

impl WeightMap {
    /// Reads an index.
    pub(super) fn read(path: &Path, options: &OpenOptions) -> Result<Self, CheckpointError> {
        let (file, identity) = file::open(path)?;
        let (found_bytes, limit_bytes) = (identity.len_bytes, options.header_bytes_max);
        if found_bytes > limit_bytes {
            let path = path.to_owned();
            return Err(CheckpointError::OverLimit { path, what: "index", found_bytes, limit_bytes });
        }
        let text = ByteRange::with_len(0, found_bytes).expect("a length fits behind 0");
        let outcome = Parser::new(path, file::json_reader(&file, text)).parse();
        file::check_unchanged(path, &file, identity)?;
        outcome.map_err(|error| match (error, file::sniff(&file)) {
            (CheckpointError::Syntax { path, .. }, Some(kind)) if !kind.starts_with("JSON") => {
                CheckpointError::NotAnIndex { path, found: kind.to_owned() }
            }
            (error, _) => error,
        })
    }

    /// The distinct file names, sorted.
    pub(super) fn files(&self) -> impl ExactSizeIterator<Item = &str> {
        self.files.iter().map(|&span| self.spelled(span))
    }

    /// Tensors and their files, sorted by tensor.
    pub(super) fn entries(&self) -> impl ExactSizeIterator<Item = (&str, &str)> {
        self.entries.iter().map(|entry| (self.spelled(entry.tensor), self.spelled(entry.file)))
    }

    /// Memory held, in bytes.
    pub(super) fn heap_bytes(&self) -> u64 {
        block_bytes(to_u64(self.text.capacity())) + list_bytes(&self.entries) + list_bytes(&self.files)
    }

    /// Peak of memory while reading, this map included, in bytes.
    pub(super) fn read_peak_bytes(&self) -> u64 {
        self.read_peak_bytes
    }

    /// Counts `scratch`, held beside the growing map, towards the peak.
    fn note_beside(&mut self, scratch: Held) {
        let text_bytes = block_bytes(to_u64(self.text.capacity()));
        let held = scratch.grown(text_bytes).grown_list(&self.entries);
        self.read_peak_bytes = self.read_peak_bytes.max(held.peak_bytes());
    }

    fn spelled(&self, span: Span) -> &str {
        &self.text[span.range()]
    }

    /// Sorts the entries and collects the files.
    ///
    /// # Errors
    /// A tensor that is listed twice.
    fn finish(&mut self) -> Result<(), String> {
        let text = &self.text;
        let spelled = |span: Span| &text[span.range()];
        if let Some(entry) = sort_by_text(&mut self.entries, |entry| spelled(entry.tensor).as_bytes()) {
            return Err(spelled(entry.tensor).to_owned());
        }
        let mut files: Vec<Span> = Vec::new();
        for entry in &self.entries {
            if files.last().is_none_or(|&last| spelled(last) != spelled(entry.file)) {
                files.push(entry.file);
            }
        }
        files.sort_unstable_by(|&left, &right| spelled(left).cmp(spelled(right)));
        files.dedup_by(|left, right| spelled(*left) == spelled(*right));
        self.files = files;
        Ok(())
    }
}

struct Parser<'a, R> {
    path: &'a Path,
    json: JsonReader<R>,
    keys: OpenKeys,
    map: WeightMap,
    has_weight_map: bool,
    /// The first key outside `weight_map` whose value is not a string.
    other_key: Option<String>,
    /// The first string outside `weight_map` that is not a file name. An error only if the map is
    /// flat.
    unsafe_name: Option<CheckpointError>,
}

impl<'a, R: std::io::Read> Parser<'a, R> {
    fn new(path: &'a Path, json: JsonReader<R>) -> Self {
        let (keys, map) = (OpenKeys::default(), WeightMap::default());
        Self { path, json, keys, map, has_weight_map: false, other_key: None, unsafe_name: None }
    }

    fn parse(mut self) -> Result<WeightMap, CheckpointError> {
        let index_fault = |path: &Path, fault: JsonFault| fault.at(path, JsonSection::Index);
        self.json.open_object("`{`, the start of an index").map_err(|fault| index_fault(self.path, fault))?;
        self.keys.open(true);
        let mut first = true;
        let mut key = String::new();
        loop {
            key.clear();
            let more = self.json.next_key(&mut first, &mut key);
            if !more.map_err(|fault| index_fault(self.path, fault))? {
                break;
            }
            if !self.keys.push(&key) {
                return Err(self.too_many("bytes of names", u64::from(u32::MAX)));
            }
            self.member(&key)?;
        }
        self.json.finish().map_err(|fault| index_fault(self.path, fault))?;
        self.keys.close().map_err(|key| index_fault(self.path, JsonFault::Duplicate(key)))?;
        self.map.note_beside(self.keys.held());
        // The keys are no longer needed, and the next step needs memory.
        self.keys = OpenKeys::default();
        self.check_kind()?;
        self.map.finish().map_err(|key| JsonFault::Duplicate(key).at(self.path, JsonSection::WeightMap))?;
        if self.map.files.len() > FILES_MAX {
            return Err(self.too_many("files", to_u64(FILES_MAX)));
        }
        Ok(self.map)
    }

    /// Reads one value of the outermost object.
    fn member(&mut self, key: &str) -> Result<(), CheckpointError> {
        let fault = |path: &Path, fault: JsonFault| fault.at(path, JsonSection::Index);
        if key == "weight_map" {
            // The entries so far were not a flat map.
            self.map.entries.clear();
            self.has_weight_map = true;
            return self.weight_map();
        }
        if key == "metadata" && self.json.next_is(b'{').map_err(|error| fault(self.path, error))? {
            return self.metadata().map_err(|error| fault(self.path, error));
        }
        let is_text = self.json.next_is(b'"').map_err(|error| fault(self.path, error))?;
        if is_text && !self.has_weight_map {
            let start = self.map.text.len();
            self.map.text.push_str(key);
            return self.entry(start, JsonSection::Index);
        }
        if !is_text && self.other_key.is_none() {
            self.other_key = Some(kept(key));
        }
        self.json.skip_value(&mut self.keys).map_err(|error| fault(self.path, error))
    }

    fn metadata(&mut self) -> Result<(), JsonFault> {
        self.json.open_object("an object")?;
        self.keys.open(true);
        let mut first = true;
        let mut key = String::new();
        loop {
            key.clear();
            if !self.json.next_key(&mut first, &mut key)? {
                return self.keys.close().map_err(JsonFault::Duplicate);
            }
            if !self.keys.push(&key) {
                return Err(self.json.unexpected("less than 4 GiB of keys"));
            }
            if key == "total_size" && self.json.next_is_number()? {
                self.json.number()?;
                self.map.total_size = Some(self.json.number_text().to_owned());
            } else {
                self.json.skip_value(&mut self.keys)?;
            }
        }
    }

    fn weight_map(&mut self) -> Result<(), CheckpointError> {
        let fault = |path: &Path, fault: JsonFault| fault.at(path, JsonSection::WeightMap);
        self.json
            .open_object("an object of tensors and their files")
            .map_err(|error| fault(self.path, error))?;
        let mut first = true;
        loop {
            let start = self.map.text.len();
            let more = self.json.next_key(&mut first, &mut self.map.text);
            if !more.map_err(|error| fault(self.path, error))? {
                return Ok(());
            }
            self.entry(start, JsonSection::WeightMap)?;
        }
    }

    /// Reads the file of the tensor whose name is the text from `start` on, and adds an entry.
    fn entry(&mut self, start: usize, section: JsonSection) -> Result<(), CheckpointError> {
        let middle = self.map.text.len();
        self.json
            .string(&mut self.map.text, "the name of a file")
            .map_err(|fault| fault.at(self.path, section))?;
        let found = &self.map.text[middle..];
        let skipped = match path_rule::relative(found) {
            Ok(rest) => found.len() - rest.len(),
            Err(reason) => {
                let (key, found) = (kept(&self.map.text[start..middle]), kept(found));
                let error = CheckpointError::UnsafeName { path: self.path.to_owned(), key, found, reason };
                if self.has_weight_map {
                    return Err(error);
                }
                self.map.text.truncate(start);
                self.unsafe_name.get_or_insert(error);
                return Ok(());
            }
        };
        let end = self.map.text.len();
        let (Some(tensor), Some(file)) = (Span::tail(start, middle), Span::tail(middle + skipped, end))
        else {
            return Err(self.too_many("bytes of names", u64::from(u32::MAX)));
        };
        // Neighbours mostly share their file, which is then stored once.
        match self.map.entries.last() {
            Some(last) if self.map.spelled(last.file) == self.map.spelled(file) => {
                let file = last.file;
                self.map.text.truncate(middle);
                self.map.entries.push(Entry { tensor, file });
            }
            _ => self.map.entries.push(Entry { tensor, file }),
        }
        Ok(())
    }

    /// Refuses JSON that is not an index.
    fn check_kind(&mut self) -> Result<(), CheckpointError> {
        if let (None, false, Some(error)) = (&self.other_key, self.has_weight_map, self.unsafe_name.take()) {
            return Err(error);
        }
        let found = match (&self.other_key, self.has_weight_map) {
            (_, true) if self.map.entries.is_empty() => "a weight_map without tensors".to_owned(),
            (_, true) => return Ok(()),
            (Some(key), false) => format!("no weight_map, and `{key}` names no file"),
            (None, false) if self.map.entries.is_empty() => "no weight_map".to_owned(),
            (None, false) => return Ok(()),
        };
        Err(CheckpointError::NotAnIndex { path: self.path.to_owned(), found })
    }

    fn too_many(&self, what: &'static str, limit: u64) -> CheckpointError {
        CheckpointError::TooMany { path: self.path.to_owned(), what, limit }
    }
}
