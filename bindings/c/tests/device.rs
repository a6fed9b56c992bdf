//! The C library on a simulated CUDA device, which copies as late as CUDA allows and records
//! misuse.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod support;

use onelayer_testing::cuda_sim::{MODES, SimRun};
use support::{can_compile, compile_with, expected, fixture, pkg_config, run, sorted_lines, source};

#[test]
fn tensors_on_a_device_in_the_order_of_a_stream() {
    if !can_compile() {
        return;
    }
    let mut flags = pkg_config(&["--cflags", "--libs"]);
    // The driver is found by LD_LIBRARY_PATH, which the simulation sets.
    flags.push(format!("-Wl,-rpath,{}", support::prefix().join("lib").display()));
    flags.push("-ldl".to_owned());
    let program = compile_with(&source("device.c"), "", &flags);
    for mode in MODES {
        for seed in 1..4 {
            let mut command = run(&program);
            command.env_remove("LD_LIBRARY_PATH").arg(fixture("llama"));
            let outcome = SimRun::new(command).set("MODE", mode).set("SEED", seed).run();
            outcome.assert_success();
            outcome.report().assert_clean();
            assert_eq!(sorted_lines(&outcome.stdout), expected(&fixture("llama")), "{mode}, {seed}");
        }
    }
}

#[test]
fn a_device_that_is_not_there_is_a_status() {
    if !can_compile() {
        return;
    }
    let mut flags = pkg_config(&["--cflags", "--libs"]);
    flags.push("-ldl".to_owned());
    let program = compile_with(&source("no_device.c"), "", &flags);
    support::succeed(run(&program).arg(fixture("llama")));
}
