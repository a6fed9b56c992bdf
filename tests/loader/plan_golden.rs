//! Golden plans: what is planned for real checkpoints, to the letter. A change here is a change of
//! behaviour.
#![allow(clippy::unwrap_used, clippy::as_conversions, reason = "a test that cannot go on panics")]

use onelayer::plan::{FloatType, Landing, PlanLimits, ResidentKind, TermKind};
use onelayer::{Checkpoint, IoMode, Layers, LoadPlan, Loader, Target, Window};
use onelayer_testing::fixture;

fn plan(name: &str, io: IoMode, window: Window) -> LoadPlan {
    let checkpoint = Checkpoint::open(fixture(name)).unwrap();
    let loader = Loader::builder(Target::Host).host_budget(8 << 20).io(io).window(window).readers(2);
    loader.build().unwrap().plan(&checkpoint).unwrap()
}

#[test]
fn one_file() {
    insta::assert_snapshot!(plan("gemma2", IoMode::Buffered, Window::All));
}

#[test]
fn shards_with_every_read_and_copy() {
    insta::assert_snapshot!(format!("{:#}", plan("llama_sharded", IoMode::Direct, Window::Layers(2))));
}

#[test]
fn mapped_windows_are_a_term_of_the_peak() {
    insta::assert_snapshot!(plan("qwen2_moe", IoMode::Mmap, Window::Layers(1)));
}

#[test]
fn hashes_are_a_term_where_nothing_else_is_kept() {
    let checkpoint = Checkpoint::open(fixture("llama")).unwrap();
    let hashes = |target| {
        let plan = Loader::builder(target).hash(true).build().unwrap().plan(&checkpoint).unwrap();
        plan.memory().terms().iter().find(|term| term.kind == TermKind::Hashes).map(|term| term.bytes)
    };
    assert_eq!(hashes(Target::None), Some(32 * checkpoint.tensor_count() as u64));
    assert_eq!(hashes(Target::Host), None);
}

/// The same as above, for a device: neighbours land together, and `f32` arrives as `f16`.
#[test]
fn landing_in_phase_and_narrowing() {
    let plan = |name| {
        let checkpoint = Checkpoint::open(fixture(name)).unwrap();
        let layers = Layers::group(&checkpoint).unwrap();
        let mut limits = PlanLimits::new(8 << 20);
        (limits.landing, limits.resident) = (Landing::InPhase, ResidentKind::Device);
        (limits.options.window, limits.options.io, limits.options.dtype) =
            (Window::Layers(2), IoMode::Direct, Some(FloatType::F16));
        LoadPlan::build(&checkpoint, &layers, &limits, |_| true).unwrap()
    };
    insta::assert_snapshot!("in_phase", format!("{:#}", plan("llama_sharded")));
    insta::assert_snapshot!("narrowed", format!("{:#}", plan("gpt2")));
}
