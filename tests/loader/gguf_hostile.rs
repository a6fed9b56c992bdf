//! Hostile and broken GGUF files: every row is refused with the expected kind of error, in time,
//! with a message that names the file and the place.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests too")]

use std::time::{Duration, Instant};

use onelayer::checkpoint::{Checkpoint, CheckpointError, OpenOptions};
use onelayer_testing::gguf_file::{Value, text_bytes};

use super::gguf_corpus::{cut_rows, good, named_rows};

/// The kind of an error: the name of its variant.
fn kind(error: &CheckpointError) -> String {
    let text = format!("{error:?}");
    text.split([' ', '{']).next().unwrap_or_default().to_owned()
}

#[test]
fn hostile_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let named = named_rows();
    assert!(named.len() >= 150, "{} rows", named.len());
    for (label, bytes, expected_kind, text) in named.into_iter().chain(cut_rows()) {
        std::fs::write(&path, bytes).unwrap();
        let start = Instant::now();
        let error = Checkpoint::open(&path).expect_err(&label);
        let (took, message) = (start.elapsed(), error.to_string());
        assert_eq!(kind(&error), expected_kind, "{label}: {message}");
        assert!(message.contains(text), "{label}: expected `{text}` in: {message}");
        assert!(message.contains(&path.display().to_string()), "{label}: no file in: {message}");
        assert!(expected_kind != "InvalidFile" || message.contains("at byte "), "{label}: {message}");
        assert!(
            !message.contains('\n') && message.len() <= 500 + path.as_os_str().len(),
            "{label}: {message}"
        );
        assert!(took < Duration::from_secs(1), "{label}: {took:?}");
        assert!(error.is_invalid(), "{label}: {message}");
    }
    std::fs::write(&path, good().bytes()).unwrap();
    assert_eq!(Checkpoint::open(&path).unwrap().tensor_count(), 1);
}

/// Long lists are read in time, and refused beyond the limit on headers.
#[test]
fn long_lists_take_no_time() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let texts = text_bytes(b"").repeat(1_000_000);
    let arrays = Value::array(0, 0, b"").bytes.repeat(300_000);
    for value in [Value::array(8, 1_000_000, &texts), Value::array(9, 300_000, &arrays)] {
        std::fs::write(&path, good().key("x", value).bytes()).unwrap();
        let start = Instant::now();
        assert_eq!(Checkpoint::open(&path).unwrap().tensor_count(), 1);
        assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
        let error = OpenOptions::new().header_bytes_max(1 << 20).open(&path).unwrap_err();
        assert_eq!(kind(&error), "OverLimit", "{error}");
    }
}
