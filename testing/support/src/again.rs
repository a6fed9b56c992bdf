//! A test that starts its own program again, for one test in a process of its own.

use std::path::Path;
use std::process::Command;

/// The full name of a test, as the harness knows it, from the module that it is in
/// (`module_path!()`), which begins with the name of the program.
#[must_use]
pub fn full_name(module: &str, test: &str) -> String {
    match module.split_once("::") {
        Some((_, module)) => format!("{module}::{test}"),
        None => test.to_owned(),
    }
}

/// This program, told to run one test and to show what it prints.
#[must_use]
pub fn again(module: &str, test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([&full_name(module, test), "--exact", "--nocapture", "--test-threads=1"]);
    command
}

/// For a test that looks at its whole process (threads, descriptors, memory), in a program whose
/// tests run side by side: runs the test again in a process of its own, and returns true. There it
/// returns false, and the test goes on.
///
/// # Panics
/// If the test fails there.
#[must_use]
pub fn in_own_process(module: &str, test: &str) -> bool {
    const IS_ALONE: &str = "ONELAYER_TEST_ALONE";
    if std::env::var_os(IS_ALONE).is_some() {
        return false;
    }
    let output = again(module, test).env(IS_ALONE, "1").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("1 passed"), "the child ran another test: {text}");
    println!("{text}");
    crate::skipped_by_child(&output.stderr);
    true
}

/// What the test `measured_child` of a module prints behind `measured `. It runs in a process of
/// its own, which finds `setting` in the variable.
///
/// # Panics
/// If that test fails or prints nothing of the kind.
#[must_use]
pub fn measured(module: &str, variable: &str, setting: &str) -> String {
    let output = again(module, "measured_child").env(variable, setting).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let line = text.lines().find_map(|line| line.split("measured ").nth(1));
    line.unwrap_or_else(|| panic!("{text}")).to_owned()
}

/// The top of the repository.
#[must_use]
pub fn repository() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}
