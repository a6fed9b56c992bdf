//! Says aloud what a test did not do.
//!
//! Not by `eprintln!`: the harness catches what it prints and throws it away when the test passes.

use std::fmt::Display;
use std::io::Write as _;

/// Writes one line, past the harness: which test this is, and why it, or a part of it, does not
/// run.
pub fn skipped(why: impl Display) {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    let why = why.to_string();
    // At once, so that lines of others do not come in between.
    let line = format!("SKIPPED {test}: {}\n", why.trim_end());
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// Says again what a child process of this test has said to a parent that caught it.
pub fn skipped_by_child(stderr: &[u8]) {
    for line in String::from_utf8_lossy(stderr).lines() {
        if let Some((_, why)) = line.strip_prefix("SKIPPED ").and_then(|line| line.split_once(": ")) {
            skipped(why);
        }
    }
}
