//! Installs the library, and builds and runs C and C++ programs with it.
//!
//! Cargo builds no shared library for tests, so each test binary runs the install script once.
#![allow(dead_code, unreachable_pub, reason = "each test file uses its own part")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

use onelayer_testing::skipped;

/// Compiler flags for C and C++ programs.
const C: [&str; 7] = ["gcc", "-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", "-g"];
const CPP: [&str; 7] = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-pedantic", "-g"];

pub fn package() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A folder of the repository's fixtures.
pub fn fixture(name: &str) -> PathBuf {
    package().join("../../fixtures/checkpoints").join(name)
}

/// The prefix where the library is installed.
pub fn prefix() -> &'static Path {
    static PREFIX: OnceLock<PathBuf> = OnceLock::new();
    PREFIX.get_or_init(|| {
        let scratch = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let (build, prefix) = (scratch.join("capi-build"), scratch.join("capi-prefix"));
        let mut install = Command::new(package().join("install"));
        install.arg("--prefix").arg(&prefix).arg("--debug");
        // The cargo that runs the tests may hold a lock on its target folder.
        install.args(["--", "--locked"]).env("CARGO_TARGET_DIR", &build);
        succeed(&mut install);
        prefix
    })
}

/// True if the program is installed. If not, says that the test is skipped.
pub fn is_installed(program: &str) -> bool {
    let answer = Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    let is_there = answer.is_ok_and(|status| status.success());
    if !is_there {
        skipped(format_args!("there is no {program}"));
    }
    is_there
}

/// True if programs can be built here; see [`is_installed`].
pub fn can_compile() -> bool {
    ["gcc", "g++", "pkg-config"].into_iter().all(is_installed)
}

/// The output of pkg-config for the installed library.
pub fn pkg_config(words: &[&str]) -> Vec<String> {
    let mut command = Command::new("pkg-config");
    command.args(words).arg("onelayer").env("PKG_CONFIG_PATH", prefix().join("lib/pkgconfig"));
    let answer = String::from_utf8(succeed(&mut command).stdout).unwrap();
    answer.split_whitespace().map(str::to_owned).collect()
}

/// Compiles a program of `folder` (of this package) against the installed library.
pub fn compile(source: &Path) -> PathBuf {
    compile_with(source, "", &pkg_config(&["--cflags", "--libs"]))
}

/// Like [`compile`], with other flags and another name of the executable.
pub fn compile_with(source: &Path, suffix: &str, flags: &[String]) -> PathBuf {
    let words = if source.extension().is_some_and(|extension| extension == "cpp") { CPP } else { C };
    let name = format!("{}{suffix}", source.file_name().unwrap().to_str().unwrap().replace('.', "-"));
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).arg(source).args(flags).arg("-o").arg(&program);
    succeed(&mut command);
    program
}

/// A program of the tests.
pub fn source(name: &str) -> PathBuf {
    package().join("tests/programs").join(name)
}

/// Runs a program with the installed library on its path.
pub fn run(program: &Path) -> Command {
    with_library(Command::new(program))
}

/// Runs a program under valgrind, which exits with 9 if the program misuses or leaks memory.
pub fn run_in_valgrind(program: &Path) -> Command {
    let mut command = Command::new("valgrind");
    command.args(["--quiet", "--error-exitcode=9", "--leak-check=full"]);
    // The standard library keeps interior pointers for the main thread, which valgrind calls
    // possible leaks.
    command.args(["--show-leak-kinds=definite,indirect", "--errors-for-leak-kinds=definite,indirect"]);
    command.arg(program);
    with_library(command)
}

fn with_library(mut command: Command) -> Command {
    command.env("LD_LIBRARY_PATH", prefix().join("lib"));
    command
}

/// Runs a command, which must succeed.
pub fn succeed(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let (out, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{out}\n{error}", output.status);
    output
}

/// FNV-1a, 64 bits, as the programs compute it.
pub fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash: u64, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    })
}

/// The expected output of the programs, from the reference reader: sorted lines.
pub fn expected(folder: &Path) -> Vec<String> {
    let mut lines = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            let bytes = fs::read(&path).unwrap();
            let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            lines.extend(
                file.tensors().into_iter().map(|(name, view)| {
                    format!("{:016x} {} {name}", checksum(view.data()), view.data().len())
                }),
            );
        }
    }
    lines.sort();
    lines
}

/// The output of a program: sorted lines.
pub fn lines(output: &Output) -> Vec<String> {
    sorted_lines(std::str::from_utf8(&output.stdout).unwrap())
}

pub fn sorted_lines(text: &str) -> Vec<String> {
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    lines.sort();
    lines
}
