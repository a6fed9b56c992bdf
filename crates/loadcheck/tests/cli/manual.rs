//! README and manual, taken literally: the commands of their console blocks run, and print what is
//! shown below them.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use onelayer_testing::{repository, skipped};

/// A command of a console block, and the lines that are shown below it.
struct Shown {
    command: String,
    /// The exit codes that the comment beside the command allows.
    exit_codes: Vec<i32>,
    output: Vec<String>,
}

/// The commands of a page.
fn commands(page: &str) -> Vec<Shown> {
    let mut found: Vec<Shown> = Vec::new();
    let mut is_console = false;
    for line in page.lines() {
        if line.starts_with("```") {
            is_console = line == "```console";
        } else if let Some(line) = line.strip_prefix("$ ").filter(|_| is_console) {
            let (command, comment) = line.split_once("  #").unwrap_or((line, ""));
            let code = comment.split("exit code ").nth(1).and_then(|rest| rest.get(..1)?.parse().ok());
            let exit_codes = [0].into_iter().chain(code).collect();
            found.push(Shown { command: command.trim().to_owned(), exit_codes, output: Vec::new() });
        } else if is_console {
            let shown = found.last_mut().expect("a block begins with a command");
            shown.output.push(line.to_owned());
        }
    }
    found
}

/// README and the pages of the manual, with their names.
fn pages() -> Vec<(String, String)> {
    let docs = fs::read_dir(repository().join("docs")).unwrap().map(|entry| entry.unwrap().path());
    let mut paths: Vec<_> = docs.filter(|path| path.extension().is_some_and(|end| end == "md")).collect();
    paths.push(repository().join("README.md"));
    paths.sort();
    let name = |path: &Path| path.file_name().unwrap().to_string_lossy().into_owned();
    paths.iter().map(|path| (name(path), fs::read_to_string(path).unwrap())).collect()
}

/// A server that answers for two seconds.
const SERVER: &str = "sh -c \"for request in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do echo request done; sleep 0.1; done\"";

/// What stands for large checkpoints and for programs of the reader.
const STAND_INS: [(&str, &str); 15] = [
    ("cargo run --release -- ", "loadcheck "),
    ("synth mistral-7b /tmp/mistral --layers 4", "synth tiny-llama mistral"),
    ("fits /tmp/mistral 1GB --window 1", "fits mistral 1GB --window 1"),
    ("fits /tmp/mistral 1GB", "fits mistral 20MiB"),
    ("leak /tmp/mistral /tmp/layers", "leak mistral mistral"),
    ("leak ", "leak --cycles 12 "),
    ("--cycles 100", ""),
    ("/tmp/", ""),
    ("./model", "mistral"),
    ("./layers", "layers"),
    ("./whole", "whole"),
    ("python load_test.py", "true"),
    ("./serve {source}", SERVER),
    ("-- ./serve", SERVER),
    ("model-Q4_K_M.gguf", "fixtures/gguf/tiny.gguf"),
];

/// Commands that are not `loadcheck`, by their beginning, and why they do not run here.
const OTHERS: [(&str, &str); 12] = [
    ("./scripts/check", "runs this test"),
    ("cargo install --path crates/loadcheck", "the program is built already"),
    ("cargo test ", "this is one of them"),
    ("scripts/manual", "installs mdbook"),
    ("pip install .", "scripts/python-check builds and tests the package"),
    ("scripts/python-wheel", "as above"),
    ("bindings/c/install ", "bindings/c/tests/programs.rs runs it"),
    ("vllm serve ", "needs vLLM and a GPU"),
    ("python -m sglang.launch_server ", "needs SGLang and a GPU"),
    ("python -m zipfile ", "needs a wheel that is downloaded"),
    ("ONELAYER_VLLM=", "as above"),
    ("ONELAYER_SGLANG=", "as above"),
];

fn loadcheck(folder: &Path, arguments: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_loadcheck"));
    let words = shlex::split(arguments).expect("quotes are closed");
    command.args(words).current_dir(folder).output().expect("the program starts")
}

/// The command on a small checkpoint.
fn small(command: &str) -> String {
    let command =
        STAND_INS.iter().fold(command.to_owned(), |text, (large, small)| text.replace(large, small));
    command.replace("fixtures/", &format!("{}/fixtures/", repository().display()))
}

/// Each shown line begins like a line of the output, in that order. Numbers differ by machine.
fn assert_shown(shown: &Shown, output: &str) {
    let mut words = output.lines().filter_map(|line| line.split_whitespace().next());
    for line in &shown.output {
        let Some(word) = line.split_whitespace().next() else { continue };
        assert!(
            words.any(|real| real == word),
            "{}: no line that begins like {line:?} in\n{output}",
            shown.command
        );
    }
}

#[test]
fn the_commands_of_readme_and_manual_run_on_a_small_checkpoint() {
    let can_try_limits = onelayer_probe::ChildGroup::create(Some(1 << 30))
        .map_err(|error| skipped(format_args!("`loadcheck fit`: {error}")))
        .is_ok();
    let (mut ran, mut compared) = (0, 0);
    for (name, page) in pages() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        if !page.contains("$ loadcheck synth ") {
            loadcheck(folder.path(), "synth tiny-llama mistral");
        }
        for shown in commands(&page) {
            let command = small(&shown.command);
            let Some(arguments) = command.strip_prefix("loadcheck ") else {
                let is_known = OTHERS.iter().any(|(begin, _)| command.starts_with(begin));
                assert!(is_known, "{name}: nothing runs {command:?}, and OTHERS does not say why");
                continue;
            };
            if arguments.starts_with("fit ") && !can_try_limits {
                continue;
            }
            let output = loadcheck(folder.path(), arguments);
            let errors = String::from_utf8_lossy(&output.stderr);
            let code = output.status.code().unwrap_or(-1);
            assert!(shown.exit_codes.contains(&code), "{name}: {command}: exit code {code}\n{errors}");
            assert_shown(&shown, &String::from_utf8_lossy(&output.stdout));
            ran += 1;
            compared += usize::from(!shown.output.is_empty());
        }
    }
    assert!(ran > 40 && compared > 3, "{ran} commands ran, {compared} with output");
}

#[test]
fn the_readme_is_short_and_has_the_two_commands_that_do_all() {
    let readme = fs::read_to_string(repository().join("README.md")).unwrap();
    assert!(readme.lines().count() <= 150, "{} lines: details belong to docs/", readme.lines().count());
    for wanted in ["cargo run --release -- fixtures/checkpoints/llama --budget 8MiB", "./scripts/check"] {
        assert!(commands(&readme).iter().any(|shown| shown.command == wanted), "{wanted}");
    }
    assert!(repository().join("scripts/check").exists());
}

#[test]
fn lines_that_are_not_printed_are_found() {
    let shown = Shown {
        command: "loadcheck".to_owned(),
        exit_codes: vec![0],
        output: vec!["a 1".to_owned(), "c 3".to_owned()],
    };
    assert_shown(&shown, "a 7\nb\nc");
    for wrong in ["a", "c\na"] {
        assert!(std::panic::catch_unwind(|| assert_shown(&shown, wrong)).is_err(), "{wrong}");
    }
}

/// Scripts that no test runs are at least programs.
#[test]
fn every_script_can_be_read_by_python() {
    let root = repository();
    let mut scripts = vec![root.join("scripts/power-cut"), root.join("scripts/page-check")];
    for folder in ["benches", "benches/peers", "docs", "scripts", "scripts/gpu_check", "scripts/page_check"] {
        let entries = fs::read_dir(root.join(folder)).unwrap().map(|entry| entry.unwrap().path());
        scripts.extend(entries.filter(|path| path.extension().is_some_and(|extension| extension == "py")));
    }
    assert!(scripts.len() > 13);
    for script in scripts {
        let program = "import ast, sys; ast.parse(open(sys.argv[1]).read())";
        let output = Command::new("python3").args(["-c", program]).arg(&script).output().unwrap();
        assert!(output.status.success(), "{}: {}", script.display(), String::from_utf8_lossy(&output.stderr));
    }
}
