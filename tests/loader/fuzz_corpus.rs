//! The fuzz targets without a fuzzer: every committed input, and changes of them that are the same
//! on every machine.
//!
//! What is checked is in `fuzz/src`; `scripts/fuzz` runs the same, led by coverage, for as long as
//! one likes. An input that once broke something is in `fuzz/corpus`, so it is tried here for ever.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test that cannot go on panics, or says so")]

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;

use onelayer_testing::Random;

#[path = "../../fuzz/src/lib.rs"]
mod targets;

/// Changed inputs of each target.
const CHANGED: usize = 2000;
/// Bytes of an input, at most.
const INPUT_BYTES_MAX: usize = 4096;
/// Bytes of all corpora together, at most.
const CORPORA_BYTES_MAX: usize = 1 << 20;

fn root() -> PathBuf {
    onelayer_testing::repository().join("fuzz")
}

/// The inputs of a target by name, in the order of their names.
fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    let files = fs::read_dir(root().join("corpus").join(target)).unwrap();
    let mut inputs: Vec<(String, Vec<u8>)> = files
        .map(|file| file.unwrap())
        .map(|file| (file.file_name().into_string().unwrap(), fs::read(file.path()).unwrap()))
        .collect();
    inputs.sort();
    inputs
}

/// The words of a dictionary, in libFuzzer's form: `"text"` in a line, `\xNN`, `\"` and `\\` in it.
fn words(target: &str) -> Vec<Vec<u8>> {
    let text = fs::read_to_string(root().join("dictionaries").join(format!("{target}.dict"))).unwrap();
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let word = |line: &str| {
        let inner = line.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).expect("a word in quotes");
        let (mut word, mut rest) = (Vec::new(), inner.as_bytes());
        while let Some((&byte, after)) = rest.split_first() {
            let (byte, taken) = match (byte, after.first()) {
                (b'\\', Some(b'x')) => {
                    (u8::from_str_radix(std::str::from_utf8(&after[1..3]).unwrap(), 16).unwrap(), 3)
                }
                (b'\\', Some(&quoted)) => (quoted, 1),
                _ => (byte, 0),
            };
            word.push(byte);
            rest = &after[taken..];
        }
        word
    };
    lines.map(word).collect()
}

/// Changes inputs as a fuzzer would, without looking at what becomes of them.
struct Mutator {
    numbers: Random,
    inputs: Vec<Vec<u8>>,
    words: Vec<Vec<u8>>,
}

impl Mutator {
    fn input(&mut self) -> Vec<u8> {
        let at = self.numbers.place(self.inputs.len());
        let mut input = self.inputs[at].clone();
        for _ in 0..=self.numbers.place(4) {
            self.change(&mut input);
        }
        input.truncate(INPUT_BYTES_MAX);
        input
    }

    fn change(&mut self, input: &mut Vec<u8>) {
        let numbers = &mut self.numbers;
        let at = numbers.place(input.len() + 1);
        let end = (at + 1 + numbers.place(16)).min(input.len());
        match numbers.below(8) {
            0 if at < input.len() => input[at] = numbers.byte(),
            1 if at < input.len() => input[at] ^= 1 << numbers.below(8),
            2 => input.insert(at, numbers.byte()),
            3 => drop(input.drain(at.min(end)..end)),
            4 => {
                let piece = input[at.min(end)..end].to_vec();
                let place = numbers.place(input.len() + 1);
                input.splice(place..place, piece);
            }
            5 => {
                // The rest of another one.
                let other = &self.inputs[numbers.place(self.inputs.len())];
                let from = numbers.place(other.len() + 1);
                input.truncate(at);
                input.extend_from_slice(&other[from..]);
            }
            6 if !self.words.is_empty() => {
                let word = self.words[numbers.place(self.words.len())].clone();
                input.splice(at..at, word);
            }
            _ if !self.words.is_empty() => {
                let word = self.words[numbers.place(self.words.len())].clone();
                let end = (at + word.len()).min(input.len());
                input.splice(at.min(end)..end, word);
            }
            _ => {}
        }
    }
}

/// Runs the check; a panic says which input it was.
fn run(target: &str, check: fn(&[u8]), name: &str, input: &[u8]) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| check(input))) {
        println!("{target}, {name}: b\"{}\"", input.escape_ascii());
        std::panic::resume_unwind(panic);
    }
}

fn replay(target: &str) {
    let (_, check) = *targets::TARGETS.iter().find(|(name, _)| *name == target).unwrap();
    let inputs = corpus(target);
    assert!(inputs.len() >= 10, "{} inputs", inputs.len());
    for (name, input) in &inputs {
        run(target, check, name, input);
    }
    let inputs = inputs.into_iter().map(|(_, input)| input).collect();
    let mut mutator = Mutator { numbers: Random(1), inputs, words: words(target) };
    for number in 0..CHANGED {
        let input = mutator.input();
        run(target, check, &format!("change {number}"), &input);
    }
}

#[test]
fn device_maps() {
    replay("device_map");
}

#[test]
fn headers() {
    replay("header");
}

#[test]
fn header_structures() {
    replay("header_structure");
}

#[test]
fn indices() {
    replay("index");
}

#[test]
fn layer_maps() {
    replay("layer_map");
}

#[test]
fn layers() {
    replay("layers");
}

#[test]
fn manifests() {
    replay("manifest");
}

#[test]
fn gguf_files() {
    replay("gguf");
}

#[test]
fn plans() {
    replay("plan");
}

#[test]
fn torch_files() {
    replay("torch");
}

#[test]
fn every_target_is_here_and_corpora_are_small() {
    let source =
        fs::read_to_string(onelayer_testing::repository().join("tests/loader/fuzz_corpus.rs")).unwrap();
    let mut corpora_bytes = 0;
    for (target, _) in targets::TARGETS {
        assert!(source.contains(&format!("replay(\"{target}\")")), "{target} is not replayed");
        assert!(root().join("fuzz_targets").join(format!("{target}.rs")).is_file(), "{target} is not fuzzed");
        corpora_bytes += corpus(target).iter().map(|(_, input)| input.len()).sum::<usize>();
    }
    assert!(corpora_bytes <= CORPORA_BYTES_MAX, "{corpora_bytes} bytes");
    let folders = fs::read_dir(root().join("corpus")).unwrap().count();
    assert_eq!(folders, targets::TARGETS.len(), "a corpus for each target");
}
