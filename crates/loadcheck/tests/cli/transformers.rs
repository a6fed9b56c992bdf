//! transformers loads what a conversion has made, bit by bit as it loads the source, and without
//! any help. Runs where an interpreter has torch, transformers and safetensors: `python3`, or the
//! one that ONELAYER_PYTHON names; says aloud where not.
#![allow(clippy::print_stdout, reason = "a test says what it counted")]

use std::process::Command;

use onelayer_testing::skipped;

#[test]
fn transformers_loads_the_target_as_it_loads_the_source() {
    let python = std::env::var("ONELAYER_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let mut command = Command::new(&python);
    command.args(["-c", "import safetensors.torch, torch, transformers"]);
    if !command.output().is_ok_and(|output| output.status.success()) {
        skipped(format_args!(
            "{python} has no torch, transformers and safetensors: no other loader has read a conversion"
        ));
        return;
    }
    let root = onelayer_testing::repository();
    let output = Command::new(&python)
        .arg(root.join("scripts/check_transformers.py"))
        .args(["--program", env!("CARGO_BIN_EXE_loadcheck"), "--made"])
        .output()
        .expect("the interpreter was started before");
    let text = String::from_utf8_lossy(&output.stdout);
    println!("{text}");
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("12 checkpoints in 6 ways: 0 wrong"), "{text}");
}
