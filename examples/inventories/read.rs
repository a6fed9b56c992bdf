//! Reads inventories of checkpoints: tensor names, shapes, and the boundaries given by their
//! authors.
//!
//! Three forms: a JSON inventory (`tensors`: name -> `[shape, dtype]`, `no_split_paths`), a Hugging
//! Face index (`weight_map`; names only), and the compact text of fixtures/inventories, one file
//! for many inventories:
//!
//! ```text
//! @gemma                                            a new inventory
//! !model.layers.{0-27}                              the author's no-split paths
//! model.layers.{0-27}.mlp.up_proj.weight<TAB>24576x3072
//! ```
//! Braces list indices (`{0-3,7}`); `-` is the shape of a scalar, `?` an unknown shape.
//! fixtures/make_inventories.py writes it.

use std::fs;
use std::path::{Path, PathBuf};

use onelayer::layers::NamedShape;
use serde_json::Value;

/// The tensors of one model, and the modules its author would not split.
#[derive(Debug, Default)]
pub(crate) struct Inventory {
    /// Name for reports.
    pub(crate) name: String,
    /// Tensor names with their shapes, in the order of the file.
    pub(crate) tensors: Vec<(String, Option<Vec<u64>>)>,
    /// Modules that the author does not split.
    pub(crate) no_split_paths: Vec<String>,
}

impl Inventory {
    /// The tensors as input of the grouping.
    pub(crate) fn named_shapes(&self) -> Vec<NamedShape<'_>> {
        self.tensors.iter().map(|(name, shape)| NamedShape { name, shape: shape.as_deref() }).collect()
    }

    /// The no-split paths whose last component is a number, so that they are layers.
    pub(crate) fn indexed_paths(&self) -> Vec<&str> {
        let is_indexed = |path: &&str| {
            let last = path.rsplit('.').next().unwrap_or("");
            !last.is_empty() && last.bytes().all(|byte| byte.is_ascii_digit())
        };
        self.no_split_paths.iter().map(String::as_str).filter(is_indexed).collect()
    }
}

/// The inventories of a folder or a compact file.
#[derive(Debug, Default)]
pub(crate) struct Folder {
    /// Its name without an extension.
    pub(crate) name: String,
    /// Its inventories, sorted by name.
    pub(crate) inventories: Vec<Inventory>,
    /// Files that could not be read, with the reason.
    pub(crate) unread: Vec<(PathBuf, String)>,
}

/// Reads `path`: one file, one folder of files, or a folder of these.
pub(crate) fn read_tree(path: &Path) -> Result<Vec<Folder>, String> {
    if path.is_file() {
        return Ok(vec![read_file_as_folder(path)]);
    }
    let mut folders = Vec::new();
    let mut own = Folder { name: stem(path), ..Folder::default() };
    for entry in entries(path)? {
        if entry.is_dir() {
            folders.extend(read_tree(&entry)?);
        } else if extension(&entry) == "inventories" {
            folders.push(read_file_as_folder(&entry));
        } else if extension(&entry) == "json" {
            add_file(&mut own, &entry);
        }
    }
    if !own.inventories.is_empty() || !own.unread.is_empty() {
        folders.push(own);
    }
    Ok(folders)
}

fn entries(path: &Path) -> Result<Vec<PathBuf>, String> {
    let listed = fs::read_dir(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let mut entries = Vec::new();
    for entry in listed {
        entries.push(entry.map_err(|error| format!("{}: {error}", path.display()))?.path());
    }
    entries.sort();
    Ok(entries)
}

fn stem(path: &Path) -> String {
    path.file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into_owned())
}

fn extension(path: &Path) -> &str {
    path.extension().and_then(|extension| extension.to_str()).unwrap_or("")
}

fn read_file_as_folder(path: &Path) -> Folder {
    let mut folder = Folder { name: stem(path), ..Folder::default() };
    add_file(&mut folder, path);
    folder
}

fn add_file(folder: &mut Folder, path: &Path) {
    let read = fs::read_to_string(path).map_err(|error| error.to_string());
    let parsed = read.and_then(|text| match extension(path) {
        "inventories" => parse_compact(&text),
        _ => parse_json(&text, &stem(path)).map(|inventory| vec![inventory]),
    });
    match parsed {
        Ok(inventories) => folder.inventories.extend(inventories),
        Err(reason) => folder.unread.push((path.to_path_buf(), reason)),
    }
}

fn parse_json(text: &str, name: &str) -> Result<Inventory, String> {
    let value: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let mut inventory = Inventory { name: name.to_owned(), ..Inventory::default() };
    if let Some(map) = value.get("weight_map").and_then(Value::as_object) {
        inventory.tensors = map.keys().map(|name| (name.clone(), None)).collect();
        return Ok(inventory);
    }
    let Some(tensors) = value.get("tensors").and_then(Value::as_object) else {
        return Err("neither `tensors` nor `weight_map` in it".to_owned());
    };
    for (name, entry) in tensors {
        let shape = entry.get(0).and_then(Value::as_array).ok_or_else(|| format!("`{name}` has no shape"))?;
        let lengths = shape.iter().map(Value::as_u64).collect::<Option<Vec<_>>>();
        let lengths = lengths.ok_or_else(|| format!("the shape of `{name}` holds no numbers"))?;
        inventory.tensors.push((name.clone(), Some(lengths)));
    }
    let paths = value.get("no_split_paths").and_then(Value::as_array);
    let paths = paths.ok_or("no `no_split_paths` in it")?.iter();
    inventory.no_split_paths = paths.filter_map(Value::as_str).map(str::to_owned).collect();
    Ok(inventory)
}

/// Reads the compact text.
pub(crate) fn parse_compact(text: &str) -> Result<Vec<Inventory>, String> {
    let mut inventories: Vec<Inventory> = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let wrong = |what: &str| format!("line {number}: {what}");
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some(name) = line.strip_prefix('@') {
            inventories.push(Inventory { name: name.to_owned(), ..Inventory::default() });
            continue;
        }
        let inventory = inventories.last_mut().ok_or_else(|| wrong("no inventory begun"))?;
        if let Some(pattern) = line.strip_prefix('!') {
            inventory.no_split_paths.extend(expand(pattern).map_err(|what| wrong(&what))?);
            continue;
        }
        let (pattern, shape) = line.split_once('\t').ok_or_else(|| wrong("no tab"))?;
        let shape = parse_shape(shape).map_err(|what| wrong(&what))?;
        let names = expand(pattern).map_err(|what| wrong(&what))?;
        inventory.tensors.extend(names.into_iter().map(|name| (name, shape.clone())));
    }
    Ok(inventories)
}

fn parse_shape(text: &str) -> Result<Option<Vec<u64>>, String> {
    match text {
        "?" => Ok(None),
        "-" => Ok(Some(Vec::new())),
        _ => {
            let lengths = text.split('x').map(str::parse).collect::<Result<Vec<_>, _>>();
            lengths.map(Some).map_err(|error| format!("shape `{text}`: {error}"))
        }
    }
}

/// All names of a pattern.
fn expand(pattern: &str) -> Result<Vec<String>, String> {
    let Some((before, rest)) = pattern.split_once('{') else { return Ok(vec![pattern.to_owned()]) };
    let (ranges, after) = rest.split_once('}').ok_or_else(|| format!("`{pattern}` has an open brace"))?;
    let tails = expand(after)?;
    let mut names = Vec::new();
    for range in ranges.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let number = |text: &str| text.parse::<u32>().map_err(|error| format!("index `{text}`: {error}"));
        for index in number(first)?..=number(last)? {
            names.extend(tails.iter().map(|tail| format!("{before}{index}{tail}")));
        }
    }
    Ok(names)
}
