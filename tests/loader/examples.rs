//! The examples are run, and say what they should: what a user copies works.
//!
//! Cargo builds examples with the tests, unless it is told which test to build: then `cargo build
//! -p onelayer --examples` comes first.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

#[cfg(feature = "cuda")]
use onelayer_testing::cuda_sim;

use std::path::PathBuf;
use std::process::Command;

use onelayer_testing::fixture;

/// An example as it was built beside this test.
fn example(name: &str) -> Command {
    let tests = std::env::current_exe().unwrap();
    let path: PathBuf = tests.ancestors().nth(2).unwrap().join("examples").join(name);
    assert!(path.is_file(), "{} is not built: `cargo build -p onelayer --examples`", path.display());
    Command::new(path)
}

/// Runs it to a good end, and gives what it has printed.
fn printed(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let (text, errors) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{text}\n{errors}", output.status);
    text
}

#[test]
fn layers_streams_every_layer() {
    let text = printed(example("layers").arg(fixture("llama")));
    assert!(text.starts_with("model.embed_tokens "), "{text}");
    assert!(text.contains("model.layers.3 ") && text.contains("lm_head "), "{text}");
    assert!(text.lines().last().unwrap().contains("GiB/s"), "{text}");
}

#[test]
fn passes_go_on_and_say_what_binds() {
    let text = printed(example("passes").arg(fixture("llama")));
    assert_eq!(text.matches("  model.layers.3 (").count(), 3, "{text}");
    assert!(text.contains("kept layers: ") && text.contains("token 2: "), "{text}");
    assert!(text.contains("waited for disk: "), "{text}");
}

#[test]
fn load_and_look_up_finds_and_suggests() {
    let names = ["model.norm.weight", "model.norm.wieght"];
    let text = printed(example("load_and_look_up").arg(fixture("llama")).args(names));
    assert!(text.contains("model.norm.weight: BF16 [64], 128 bytes"), "{text}");
    assert!(text.contains("did you mean \"model.norm.weight\"?"), "{text}");
    assert!(text.contains("the rest: "), "{text}");
}

#[test]
fn progress_ends_with_all_of_it_or_where_it_was_cancelled() {
    let text = printed(example("progress").arg(fixture("llama")));
    let last = text.lines().rev().nth(1).unwrap();
    let (done, rest) = last.split_once(" of ").unwrap();
    assert_eq!(done, rest.split(' ').next().unwrap(), "{text}");
    let text = printed(example("progress").arg(fixture("llama")).arg("cancel"));
    assert!(text.contains("cancelled\n") && text.contains("\n2 layers in "), "{text}");
}

#[test]
fn budget_refusal_says_what_would_do_and_does_it() {
    let text = printed(example("budget_refusal").arg(fixture("llama")));
    assert!(text.starts_with("refused: host budget of 1 MiB is below the floor of 5 MiB"), "{text}");
    assert!(text.contains(" loaded within 5 MiB"), "{text}");
}

#[cfg(feature = "cuda")]
#[test]
fn own_destinations_are_filled_on_a_simulated_device() {
    for mode in cuda_sim::MODES {
        let mut command = example("own_destinations");
        command.arg(fixture("llama"));
        let outcome = cuda_sim::SimRun::new(command).set("MODE", mode).run();
        outcome.assert_success();
        outcome.report().assert_clean();
        assert!(outcome.stdout.contains("model.layers.0: 9 tensors in "), "{}", outcome.stdout);
    }
}
