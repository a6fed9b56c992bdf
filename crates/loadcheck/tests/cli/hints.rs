//! The last line of a report, `Next: ...`, is a command: it keeps the flags that it was printed for
//! and succeeds when it is run.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::process::Output;

use onelayer_testing::fixture;

use crate::support::{assert_code, loadcheck, stderr};

/// The words of the hint, without what they are for.
fn hint(output: &Output) -> Vec<String> {
    let text = stderr(output);
    let line = text.lines().find_map(|line| line.strip_prefix("Next: ")).unwrap_or_else(|| panic!("{text}"));
    let words = shlex::split(line.split("   (").next().unwrap()).unwrap();
    assert_eq!(words[0], "loadcheck");
    words[1..].to_vec()
}

/// A place with `model/`, whose weights can be quantised.
fn model() -> tempfile::TempDir {
    let place = tempfile::tempdir().unwrap();
    std::fs::create_dir(place.path().join("model")).unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(fixture("llama").join(name), place.path().join("model").join(name)).unwrap();
    }
    place
}

#[test]
fn hints_keep_their_flags_and_work() {
    for (line, kept) in [
        ("model --window 1", "--window 1"),
        ("model --device none", "--device none"),
        ("model --quantise int8 --window 1", "--quantise int8 --window 1"),
        ("model --dtype f16 --window 1 --select layers", "--dtype f16 --window 1 --select layers"),
        ("model --max-host 1GiB --hash", "--hash --max-memory 1GiB"),
        ("plan model --window 1 --budget 8MiB", "--budget 8MiB --window 1"),
        ("plan model --passes 2 --max-memory 4GiB", "--passes 2"),
        ("fits model 4GiB --window 2", "--window 2"),
        ("inspect model", ""),
        ("compare model --runs 1 -s stream -s read --device none", "--device none --strategy stream"),
        ("leak model --cycles 12 --window 1", "--window 1 --cycles 12"),
        ("verify model", "--device none"),
        ("convert model out --dry-run --budget 20MiB", "--budget 20MiB"),
        ("convert model out --dtype f16", "--against model"),
        ("synth tiny-llama made --layers 1", "made"),
    ] {
        let place = model();
        let start = |words: &[String]| loadcheck(place.path()).args(words).output().unwrap();
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        let output = start(&words);
        assert_code(&output, 0);
        let words = hint(&output);
        assert!(words.join(" ").contains(kept), "{line}: {words:?}");
        let next = start(&words);
        assert!(next.status.success(), "{line}: {words:?}: {}", stderr(&next));
        // The hint of the hint, too.
        if stderr(&next).contains("Next: ") {
            let words = hint(&next);
            let last = start(&words);
            assert!(last.status.success(), "{line}: {words:?}: {}", stderr(&last));
        }
    }
}

#[test]
fn what_cannot_succeed_is_not_recommended() {
    let place = model();
    let run = |line: &str| loadcheck(place.path()).args(line.split(' ')).output().unwrap();
    for line in ["plan model --device cuda:0", "plan model --max-memory 16MiB", "fits model 16MiB"] {
        assert!(!stderr(&run(line)).contains("Next:"), "{line}");
    }
    std::fs::write(place.path().join("loadcheck.json"), "{}").unwrap();
    let output = run("model --max-host 1GiB");
    assert!(!stderr(&output).contains("Next:"), "{}", stderr(&output));
}
