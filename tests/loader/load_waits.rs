//! Waiting in slices: a caller that has to look elsewhere now and then gets its layers, the end and
//! every error as one that waits without end does.
#![allow(clippy::unwrap_used, clippy::as_conversions, reason = "a test that cannot go on panics")]

use std::fs::OpenOptions;
use std::time::{Duration, Instant};

use onelayer::{
    Awaited, Checkpoint, LayerStream, LoadError, LoadedLayer, Loader, LoaderBuilder, Target, Window,
};
use onelayer_testing::{small_decoder, write_sharded};

const SLICE: Duration = Duration::from_millis(20);
/// Longer than anything here takes.
const LONG: Duration = Duration::from_secs(60);

fn checkpoint(layers: usize, unit: usize) -> (tempfile::TempDir, Checkpoint) {
    let folder = tempfile::tempdir().unwrap();
    write_sharded(folder.path(), &small_decoder(layers, unit));
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    (folder, checkpoint)
}

fn one_layer_at_a_time() -> LoaderBuilder {
    Loader::builder(Target::Host).window(Window::Layers(1)).stall_timeout(LONG)
}

fn take(stream: &mut LayerStream) -> LoadedLayer {
    match stream.next_within(LONG) {
        Ok(Awaited::Layer(layer)) => layer,
        other => panic!("a layer comes: {other:?}"),
    }
}

#[test]
fn layers_come_as_they_do_without_an_end_to_the_wait() {
    let (_folder, checkpoint) = checkpoint(5, 100_000);
    let loader = one_layer_at_a_time().build().unwrap();
    let expected: Vec<_> =
        loader.stream(&checkpoint).unwrap().map(|layer| layer.unwrap().id().clone()).collect();
    let mut stream = loader.stream(&checkpoint).unwrap();
    let mut found = Vec::new();
    loop {
        match stream.next_within(Duration::from_micros(50)).unwrap() {
            Awaited::Layer(layer) => found.push(layer.id().clone()),
            Awaited::NotYet => {}
            Awaited::Ended => break,
        }
    }
    assert_eq!(found, expected);
    assert!(matches!(stream.next_within(LONG), Ok(Awaited::Ended)), "an end stays one");
    assert!(stream.next().is_none());
    assert_eq!(stream.report().layers, expected.len() as u64);
}

#[test]
fn a_wait_that_ends_too_early_says_so_and_loses_nothing() {
    let (_folder, checkpoint) = checkpoint(3, 50_000);
    let mut stream = one_layer_at_a_time().prefetch(0).build().unwrap().stream(&checkpoint).unwrap();
    let first = take(&mut stream);
    let start = Instant::now();
    for _ in 0..5 {
        assert!(matches!(stream.next_within(SLICE), Ok(Awaited::NotYet)), "the window is full");
    }
    assert!(start.elapsed() >= 5 * SLICE);
    assert!(stream.report().caller_waited >= 5 * SLICE, "waiting in vain is waiting");
    // It was asked for once, however often the caller came back.
    let before = first.index();
    drop(first);
    let second = take(&mut stream);
    assert_eq!(second.index(), before + 1);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(stream.progress().layers_done(), 2, "nothing is read before it is asked for");
    drop(second);
    assert!(stream.all(|layer| layer.is_ok()), "the iterator goes on where the slices ended");
}

#[test]
fn no_time_at_all_is_a_question() {
    let (_folder, checkpoint) = checkpoint(3, 50_000);
    let mut stream = one_layer_at_a_time().prefetch(0).build().unwrap().stream(&checkpoint).unwrap();
    let deadline = Instant::now() + LONG;
    let mut count = 0;
    while count < stream.plan().layers().len() && Instant::now() < deadline {
        match stream.next_within(Duration::ZERO).unwrap() {
            Awaited::Layer(_) => count += 1,
            _ => std::thread::yield_now(),
        }
    }
    assert_eq!(count, stream.plan().layers().len());
}

#[test]
fn a_caller_that_hoards_is_told_so_across_its_slices() {
    let (_folder, checkpoint) = checkpoint(4, 50_000);
    let timeout = Duration::from_millis(400);
    let mut stream =
        one_layer_at_a_time().stall_timeout(timeout).build().unwrap().stream(&checkpoint).unwrap();
    let first = take(&mut stream);
    let (start, mut slices) = (Instant::now(), 0);
    let error = loop {
        match stream.next_within(SLICE) {
            Ok(Awaited::NotYet) => slices += 1,
            Ok(other) => panic!("the window is full: {other:?}"),
            Err(error) => break error,
        }
        assert!(start.elapsed() < LONG, "never told");
    };
    let LoadError::Stalled { held, waited, .. } = &error else { panic!("{error}") };
    assert_eq!(held.as_slice(), [first.id().clone()]);
    assert!(*waited >= timeout && start.elapsed() >= timeout, "{waited:?}");
    assert!(slices > 3, "told after {slices} slices");
    assert!(matches!(stream.next_within(SLICE), Ok(Awaited::Ended)));
}

#[test]
fn a_caller_that_works_between_its_slices_does_not_stall() {
    let (_folder, checkpoint) = checkpoint(4, 50_000);
    let timeout = Duration::from_millis(300);
    let mut stream =
        one_layer_at_a_time().stall_timeout(timeout).build().unwrap().stream(&checkpoint).unwrap();
    let first = take(&mut stream);
    assert!(matches!(stream.next_within(SLICE), Ok(Awaited::NotYet)));
    std::thread::sleep(2 * timeout);
    assert!(matches!(stream.next_within(SLICE), Ok(Awaited::NotYet)), "it worked meanwhile");
    drop(first);
    drop(take(&mut stream));
}

#[test]
fn a_cancel_and_a_changed_file_end_a_wait_in_slices() {
    let (_folder, checkpoint) = checkpoint(6, 400_000);
    let mut stream = one_layer_at_a_time().build().unwrap().stream(&checkpoint).unwrap();
    let held = take(&mut stream);
    assert!(matches!(stream.next_within(SLICE), Ok(Awaited::NotYet)));
    stream.cancel_handle().cancel();
    assert!(matches!(stream.next_within(LONG), Err(LoadError::Cancelled)));
    assert!(matches!(stream.next_within(LONG), Ok(Awaited::Ended)));
    drop(held);

    let (folder, checkpoint) = self::checkpoint(6, 400_000);
    let mut stream = one_layer_at_a_time().prefetch(0).build().unwrap().stream(&checkpoint).unwrap();
    drop(take(&mut stream));
    let path = folder.path().join("model-00002-of-00002.safetensors");
    OpenOptions::new().write(true).open(path).unwrap().set_len(5000).unwrap();
    let error = loop {
        match stream.next_within(SLICE) {
            Ok(Awaited::Ended) => panic!("a truncated file is noticed"),
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert!(error.is_file_changed(), "{error}");
}
