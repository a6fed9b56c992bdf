//! What a path is that is no checkpoint, and what to name instead. Looks at names and at the first
//! bytes; reads no more.

use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use crate::problem::Problem;

/// Endings of files of weights that are read.
const WEIGHTS: [&str; 6] = [".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf"];
/// Folders that are looked into for models, and how deep.
const FOLDERS_MAX: usize = 500;
const DEPTH_MAX: usize = 4;
/// Models that are named.
const MODELS_MAX: usize = 5;

const OTHER_COPY: &str = "name the checkpoint that it was made from: safetensors, PyTorch or GGUF";
const UNPACK: &str = "unpack it, and name the directory with the weights";

/// Endings of files that people name, what they are, and what to do.
const KINDS: [(&str, &str, &str); 25] = [
    (
        ".incomplete",
        "a download that has not ended",
        "download it again: `hf download` goes on where it stopped",
    ),
    (".part", "a download that has not ended", "download it again"),
    (".onnx", "an ONNX model", OTHER_COPY),
    (".onnx_data", "the weights of an ONNX model", OTHER_COPY),
    (".tflite", "a TensorFlow Lite model", OTHER_COPY),
    (".pb", "a TensorFlow graph", OTHER_COPY),
    (".h5", "an HDF5 file of Keras or TensorFlow", OTHER_COPY),
    (".keras", "a Keras model", OTHER_COPY),
    (".msgpack", "a Flax checkpoint", OTHER_COPY),
    (".mlmodel", "a Core ML model", OTHER_COPY),
    (".engine", "a TensorRT engine", OTHER_COPY),
    (".plan", "a TensorRT engine", OTHER_COPY),
    (".npz", "a NumPy archive", OTHER_COPY),
    (".npy", "a NumPy array", OTHER_COPY),
    (".tar", "an archive", UNPACK),
    (".gz", "a compressed file", UNPACK),
    (".tgz", "an archive", UNPACK),
    (".zip", "an archive", UNPACK),
    (".zst", "a compressed file", UNPACK),
    (".xz", "a compressed file", UNPACK),
    (".7z", "an archive", UNPACK),
    (".json", "a JSON file that is no index", "name the directory that it lies in"),
    (".txt", "a text", "name a file of weights, its directory or its index"),
    (".md", "a text", "name a file of weights, its directory or its index"),
    (".py", "a program", "`loadcheck exec -- python FILE` measures it"),
];

/// The kind of a file by its name: what it is, and what to do.
fn kind_of(name: &str) -> Option<(&'static str, &'static str)> {
    let name = name.to_lowercase();
    let kind = KINDS.iter().find(|(ending, ..)| name.ends_with(ending));
    kind.map(|(_, what, help)| (*what, *help))
}

/// Says what a file is that is no checkpoint, if its name tells or the beginning `is_unknown`.
pub(crate) fn explain_file(problem: Problem, path: &Path, is_unknown: bool) -> Problem {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    if let Some((what, help)) = kind_of(&name).filter(|_| !name.contains(".index")) {
        return Problem { message: format!("{what}, which is not read"), ..problem }.help(help);
    }
    if !is_unknown {
        return problem;
    }
    let is_weights = WEIGHTS.iter().any(|ending| name.to_lowercase().ends_with(ending));
    match beginning(path).as_deref() {
        Some(text) if text.starts_with(b"version https://git-lfs") => {
            problem.help("`git lfs pull` fetches the file that this one stands for")
        }
        Some(text) if text.trim_ascii_start().starts_with(b"<") => {
            problem.help("the address gave a page instead of a file: download it again, signed in if needed")
        }
        Some([]) => problem.help("download or copy it again"),
        _ if is_weights => problem,
        _ => {
            let message = "no file of weights: neither safetensors nor PyTorch nor GGUF";
            Problem { message: message.to_owned(), ..problem }
                .help("name a file of weights, its directory or its index")
        }
    }
}

/// The first bytes of a file.
fn beginning(path: &Path) -> Option<Vec<u8>> {
    let mut text = Vec::new();
    fs::File::open(path).ok()?.take(64).read_to_end(&mut text).ok()?;
    Some(text)
}

/// Says what there is in a folder without weights.
pub(crate) fn explain_folder(problem: Problem, folder: &Path) -> Problem {
    let (mut models, mut left) = (Vec::new(), FOLDERS_MAX);
    find_models(folder, DEPTH_MAX, &mut left, &mut models);
    if !models.is_empty() {
        let more = models.len().saturating_sub(MODELS_MAX);
        let more = if more > 0 { format!(", and {more} more") } else { String::new() };
        let names: Vec<String> = models.iter().take(MODELS_MAX).map(|model| name_of(model)).collect();
        return problem.help(format!("name one of the models below it: {}{more}", names.join(", ")));
    }
    let names = names_in(folder);
    if let Some(name) = names.iter().find(|name| name.ends_with(".incomplete")) {
        return problem
            .help(format!("{name} is a download that has not ended: `hf download` goes on with it"));
    }
    let known =
        names.iter().filter(|name| !name.ends_with(".json")).find_map(|name| Some((name, kind_of(name)?)));
    match known.filter(|(_, (_, help))| *help == OTHER_COPY || *help == UNPACK) {
        Some((name, (what, help))) => problem.help(format!("{name} is {what}, which is not read: {help}")),
        None if names.is_empty() => problem.help("the directory is empty: name one with weights"),
        None => problem,
    }
}

/// Names the download that did not end, where files of a set are missing: beside them, or in the
/// hub's cache among the blobs.
pub(crate) fn explain_missing(problem: Problem, path: &Path) -> Problem {
    if path.file_name().is_some_and(|name| name == "config.json") {
        return explain_file(problem, path, false);
    }
    let folder = if path.is_dir() { path } else { path.parent().unwrap_or(Path::new("")) };
    let blobs = folder.join("../../blobs");
    match incomplete(&names_in(folder)).or_else(|| incomplete(&names_in(&blobs))) {
        Some(help) => problem.help(help),
        None => problem,
    }
}

/// That a download has not ended, if one of the names says so.
fn incomplete(names: &[String]) -> Option<String> {
    let name = names.iter().find(|name| name.ends_with(".incomplete"))?;
    Some(format!("{name} is a download that has not ended: `hf download` goes on with it"))
}

/// The names in a folder, sorted. Empty if it cannot be read.
fn names_in(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.take(FOLDERS_MAX).map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Adds the folders below that hold weights, in the order of their names. Looks into `left` folders
/// at most.
fn find_models(folder: &Path, depth: usize, left: &mut usize, models: &mut Vec<PathBuf>) {
    let names = names_in(folder);
    for path in names.iter().filter(|name| !name.starts_with('.')).map(|name| folder.join(name)) {
        if *left == 0 || !path.is_dir() || path.is_symlink() {
            continue;
        }
        *left -= 1;
        let is_weights =
            |name: &String| name == "model_index.json" || WEIGHTS.iter().any(|ending| name.ends_with(ending));
        if names_in(&path).iter().any(is_weights) {
            models.push(path);
        } else if depth > 1 {
            find_models(&path, depth - 1, left, models);
        }
    }
}

/// How a model is named on the command line: a snapshot of the hub's cache by its repository.
fn name_of(model: &Path) -> String {
    let parts: Vec<&str> = model.iter().filter_map(|part| part.to_str()).collect();
    match parts.as_slice() {
        [.., repository, "snapshots", commit] if repository.starts_with("models--") => {
            let name = repository.trim_start_matches("models--").replace("--", "/");
            format!("{name}@{commit}")
        }
        _ => model.display().to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_known_by_their_endings() {
        assert_eq!(kind_of("Model.ONNX").unwrap().0, "an ONNX model");
        assert_eq!(kind_of("a.safetensors.incomplete").unwrap().0, "a download that has not ended");
        assert!(kind_of("a.safetensors").is_none() && kind_of("model").is_none());
    }

    #[test]
    fn snapshots_are_named_as_repositories() {
        assert_eq!(name_of(Path::new("/c/hub/models--org--a-b/snapshots/0e9e")), "org/a-b@0e9e");
        assert_eq!(name_of(Path::new("models/x")), "models/x");
    }
}
