//! A converter's manifest: an accepted one names only files in its directory, each once, with valid
//! hashes and sizes. It is the same after writing and reading it.
//!
//! Input: the text of a manifest.

#![allow(clippy::unwrap_used, reason = "a check that cannot go on panics")]

use std::collections::BTreeSet;
use std::path::{Component, Path};

use onelayer::convert::{ConvertError, Manifest};

use super::scratch::Scratch;

/// Checks one input.
pub fn check(data: &[u8]) {
    thread_local!(static SCRATCH: Scratch = Scratch::new());
    SCRATCH.with(|scratch| {
        let manifest = match Manifest::read(scratch.holding(data)) {
            Ok(manifest) => manifest,
            Err(ConvertError::BadManifest { .. }) => return,
            Err(error) => panic!("{error}"),
        };
        check_manifest(&manifest);
        let text = serde_json::to_vec(&manifest).unwrap();
        assert_eq!(Manifest::read(scratch.holding(&text)).unwrap(), manifest);
    });
}

fn check_manifest(manifest: &Manifest) {
    let mut names = BTreeSet::new();
    let mut name = |name: &str| {
        let parts: Vec<Component<'_>> = Path::new(name).components().collect();
        let is_inside = parts.iter().all(|part| matches!(part, Component::Normal(_)));
        assert!(is_inside && !parts.is_empty() && !name.contains(['\0', '\\']), "{name:?}");
        assert!(names.insert(name.to_owned()), "{name:?} is there twice");
    };
    let hash = |hash: &str| {
        let is_digit = |digit: u8| digit.is_ascii_digit() || (b'a'..=b'f').contains(&digit);
        assert!(hash.len() == 64 && hash.bytes().all(is_digit), "{hash:?}");
    };
    for file in &manifest.files {
        name(&file.name);
        hash(&file.blake3);
        file.sha256.iter().for_each(|text| hash(text));
        for tensor in &file.tensors {
            hash(&tensor.blake3);
            tensor.sha256.iter().for_each(|text| hash(text));
        }
        let tensor_bytes: u128 = file.tensors.iter().map(|tensor| u128::from(tensor.bytes)).sum();
        assert!(tensor_bytes <= u128::from(file.bytes), "{}: more bytes of tensors than bytes", file.name);
    }
    for file in &manifest.side_files {
        name(&file.name);
        hash(&file.blake3);
        file.sha256.iter().for_each(|text| hash(text));
    }
}
