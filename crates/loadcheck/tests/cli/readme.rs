//! The README's words, taken literally: its commands run, its files exist.

use std::path::Path;
use std::process::Command;

use onelayer_testing::skipped;

const README: &str = include_str!("../../../../README.md");

/// The lines of all console blocks that a user would type.
fn commands() -> impl Iterator<Item = &'static str> {
    README
        .lines()
        .filter_map(|line| line.strip_prefix("$ "))
        .map(|line| line.split("  #").next().unwrap_or(line).trim())
}

fn loadcheck(folder: &Path, arguments: &str) -> std::process::Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_loadcheck"));
    let words = shlex::split(arguments).expect("quotes are closed");
    command.args(words).current_dir(folder).output().expect("the program starts")
}

#[test]
fn the_first_command_runs_as_it_stands() {
    let root = onelayer_testing::repository();
    let first = commands().next().expect("the README has a command");
    let arguments =
        first.strip_prefix("cargo run --release -- ").expect("the first command runs the program");
    let output = loadcheck(root, arguments);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("host") && text.contains("promise"), "{text}");
}

/// A server that answers for two seconds.
const SERVER: &str = "sh -c \"for request in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do echo request done; sleep 0.1; done\"";

/// The other commands, on a small checkpoint instead of a large one, and on a loader that exists.
#[test]
fn the_other_commands_run_on_a_small_checkpoint() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut run = 0;
    let can_try_limits = onelayer_probe::ChildGroup::create(Some(1 << 30))
        .map_err(|error| skipped(format_args!("`loadcheck fit`: {error}")))
        .is_ok();
    for line in commands().filter_map(|line| line.strip_prefix("loadcheck ")) {
        let line = line
            .replace("synth gemma-7b /tmp/gemma-7b", "synth tiny-llama model")
            .replace("/tmp/gemma-7b", "model")
            .replace("/tmp/mistral-4-layers", "model")
            .replace("/tmp/layers", "layers")
            .replace("fixtures/", &format!("{}/fixtures/", onelayer_testing::repository().display()))
            .replace("python load_test.py", "true")
            .replace("./serve {source}", SERVER);
        // A few cycles show that it runs.
        let line = match line.strip_prefix("leak ") {
            Some(rest) => format!("leak {} --cycles 12", rest.replace("--cycles 100", "")),
            None => line,
        };
        if line.starts_with("fit ") && !can_try_limits {
            continue;
        }
        let output = loadcheck(folder.path(), &line);
        assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
        run += 1;
    }
    assert!(run >= 9, "the README shows what the program does");
}

#[test]
fn the_files_it_names_exist() {
    let root = onelayer_testing::repository();
    let links = README.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    for link in links.filter(|link| !link.starts_with("http")) {
        assert!(root.join(link.split('#').next().unwrap_or(link)).exists(), "{link}");
    }
    assert!(root.join("scripts/check").exists() && commands().any(|line| line == "./scripts/check"));
}

/// Scripts that no test runs are at least programs.
#[test]
fn every_script_can_be_read_by_python() {
    let root = onelayer_testing::repository();
    let mut scripts = vec![root.join("scripts/power-cut")];
    for folder in ["benches", "benches/peers", "docs", "scripts", "scripts/gpu_check"] {
        let entries = std::fs::read_dir(root.join(folder)).unwrap().map(|entry| entry.unwrap().path());
        scripts.extend(entries.filter(|path| path.extension().is_some_and(|extension| extension == "py")));
    }
    assert!(scripts.len() > 13);
    for script in scripts {
        let program = "import ast, sys; ast.parse(open(sys.argv[1]).read())";
        let output = Command::new("python3").args(["-c", program]).arg(&script).output().unwrap();
        assert!(output.status.success(), "{}: {}", script.display(), String::from_utf8_lossy(&output.stderr));
    }
}
