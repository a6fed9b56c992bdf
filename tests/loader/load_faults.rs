//! When a load cannot go on: a hoarding caller, a cancelled load, a file that changes, a stream
//! that is dropped. Whatever happens, the caller gets a typed error or a clean end, and nothing
//! stays behind.
#![allow(clippy::unwrap_used, clippy::as_conversions, reason = "a test that cannot go on panics")]

use std::fs::OpenOptions;
use std::io::{Seek, SeekFrom, Write};
use std::time::{Duration, Instant};

use onelayer::{Checkpoint, IoMode, LoadError, Loader, Target, Window};
use onelayer_testing::{small_decoder, write_sharded};

const MODES: [IoMode; 5] = [IoMode::Auto, IoMode::Buffered, IoMode::Mmap, IoMode::Direct, IoMode::Uring];

fn checkpoint(layers: usize, unit: usize) -> (tempfile::TempDir, Checkpoint) {
    let folder = tempfile::tempdir().unwrap();
    write_sharded(folder.path(), &small_decoder(layers, unit));
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    (folder, checkpoint)
}

fn threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let name = |task: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_to_string(task.ok()?.path().join("comm")).ok()
    };
    tasks.filter_map(name).filter(|name| name.starts_with("onelayer-")).count()
}

#[test]
fn a_caller_that_hoards_is_told_what_it_holds() {
    let (_folder, checkpoint) = checkpoint(6, 50_000);
    let loader =
        Loader::builder(Target::Host).window(Window::Layers(2)).stall_timeout(Duration::from_millis(300));
    let mut stream = loader.build().unwrap().stream(&checkpoint).unwrap();
    let hoard = [stream.next().unwrap().unwrap(), stream.next().unwrap().unwrap()];
    let start = Instant::now();
    let error = stream.next().unwrap().unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(5));
    let LoadError::Stalled { held, window: 2, .. } = &error else { panic!("{error}") };
    assert!(held.iter().eq(hoard.iter().map(|layer| layer.id())), "{error}");
    assert!(stream.next().is_none(), "the stream has ended");
    assert!(hoard[0].tensors().all(|tensor| tensor.as_bytes().is_some()), "what was handed out stays valid");
}

#[test]
fn a_layer_dropped_elsewhere_lets_the_load_go_on() {
    let (_folder, checkpoint) = checkpoint(6, 50_000);
    let loader =
        Loader::builder(Target::Host).window(Window::Layers(1)).stall_timeout(Duration::from_secs(20));
    let mut count = 0;
    for layer in loader.build().unwrap().stream(&checkpoint).unwrap() {
        let layer = layer.unwrap();
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(30));
            drop(layer);
        });
        count += 1;
    }
    assert_eq!(count, 9);
}

#[test]
fn cancelling_ends_the_stream_with_a_typed_error() {
    let (_folder, checkpoint) = checkpoint(8, 500_000);
    let loader = Loader::builder(Target::Host).window(Window::Layers(1)).build().unwrap();
    let mut stream = loader.stream(&checkpoint).unwrap();
    let first = stream.next().unwrap().unwrap();
    let handle = stream.cancel_handle();
    let canceller = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        handle.cancel();
    });
    // The window is full, so this waits until the other thread cancels.
    assert!(matches!(stream.next(), Some(Err(LoadError::Cancelled))));
    canceller.join().unwrap();
    assert!(stream.next().is_none());
    drop(first);
}

#[test]
fn a_layer_that_is_ready_is_not_handed_out_after_a_cancel() {
    let (_folder, checkpoint) = checkpoint(8, 50_000);
    let loader = Loader::builder(Target::Host).window(Window::Layers(4)).prefetch(3).build().unwrap();
    let mut stream = loader.stream(&checkpoint).unwrap();
    while stream.progress().layers_done() < 3 {
        std::thread::yield_now();
    }
    let first = stream.next().unwrap().unwrap();
    stream.cancel_handle().cancel();
    assert!(matches!(stream.next(), Some(Err(LoadError::Cancelled))));
    assert!(stream.next().is_none());
    assert_eq!(stream.report().layers, 1);
    assert!(first.tensors().all(|tensor| tensor.as_bytes().is_some()));
}

#[test]
fn a_cancel_after_the_last_layer_changes_nothing() {
    let (_folder, checkpoint) = checkpoint(2, 1000);
    let mut stream = Loader::builder(Target::Host).build().unwrap().stream(&checkpoint).unwrap();
    let count = stream.plan().layers().len();
    assert!(stream.by_ref().take(count).all(|layer| layer.is_ok()));
    stream.cancel_handle().cancel();
    assert!(stream.next().is_none());
}

#[test]
fn without_prefetch_nothing_is_read_before_it_is_asked_for() {
    let (_folder, checkpoint) = checkpoint(4, 50_000);
    let stream = |prefetch: u32| {
        let loader = Loader::builder(Target::Host).window(Window::Layers(3)).prefetch(prefetch);
        loader.build().unwrap().stream(&checkpoint).unwrap()
    };
    let mut lazy = stream(0);
    // An eager one runs beside it, so that the time that passes is enough for a read.
    let eager = stream(1);
    while eager.progress().layers_done() < 1 {
        std::thread::yield_now();
    }
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(lazy.progress().read_bytes(), 0);
    let layer = lazy.next().unwrap().unwrap();
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(lazy.progress().layers_done(), 1);
    assert_eq!(eager.progress().layers_done(), 1, "one ahead, and no more");
    drop(layer);
}

#[test]
fn a_device_budget_holds_whatever_the_caller_keeps() {
    let (_folder, checkpoint) = checkpoint(5, 1_000_000);
    let build = |bytes: u64| {
        let builder = Loader::builder(Target::Host).window(Window::Layers(2)).device_budget(bytes);
        // Embedding, norm and head: the two large layers are no neighbours.
        let builder = builder.select(|tensor| !tensor.name.contains(".layers."));
        builder.stall_timeout(Duration::from_millis(200)).build().unwrap()
    };
    let needed = build(u64::MAX).plan(&checkpoint).unwrap().memory().resident_bytes();
    let refused = build(needed - 1).stream(&checkpoint).unwrap_err();
    assert!(refused.is_over_budget(), "{refused}");

    // In order, the budget that the plan asks for is enough.
    assert!(build(needed).stream(&checkpoint).unwrap().all(|layer| layer.is_ok()));

    // For a caller who keeps the embedding it is not.
    let mut stream = build(needed).stream(&checkpoint).unwrap();
    let embedding = stream.next().unwrap().unwrap();
    let last = stream.find_map(Result::err).expect("the head does not fit beside the embedding");
    let LoadError::DeviceBudgetFull { held, device_budget_bytes, .. } = &last else { panic!("{last}") };
    assert_eq!((held.as_slice(), *device_budget_bytes), (&[embedding.id().clone()][..], needed));
    assert!(last.is_over_budget());
}

#[test]
fn a_stall_timeout_may_be_endless() {
    let (_folder, checkpoint) = checkpoint(2, 50_000);
    let loader = Loader::builder(Target::Host).window(Window::Layers(1)).stall_timeout(Duration::MAX);
    let mut stream = loader.build().unwrap().stream(&checkpoint).unwrap();
    let first = stream.next().unwrap().unwrap();
    let dropper = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        drop(first);
    });
    // Full for longer than the stream takes to notice.
    stream.next().unwrap().unwrap();
    dropper.join().unwrap();
}

#[test]
fn a_report_ends_with_the_last_layer() {
    let (_folder, checkpoint) = checkpoint(3, 50_000);
    let mut stream = Loader::builder(Target::Host).build().unwrap().stream(&checkpoint).unwrap();
    let count = stream.plan().layers().len();
    drop(stream.next());
    assert_eq!(stream.report().layers, 1, "what is ready is not handed out yet");
    assert_eq!(stream.by_ref().take(count - 1).filter(Result::is_ok).count(), count - 1);
    let report = stream.report();
    assert_eq!((report.layers, report.tensor_bytes), (count as u64, checkpoint.tensor_bytes()));
    assert!(report.read_bytes >= report.tensor_bytes && report.elapsed > Duration::ZERO);
    std::thread::sleep(Duration::from_millis(20));
    assert!(stream.next().is_none());
    assert_eq!(stream.report(), report, "what the caller does afterwards is not the load's");
}

#[test]
fn a_dropped_stream_leaves_no_thread() {
    let (_folder, checkpoint) = checkpoint(8, 500_000);
    let before = threads();
    for io in MODES {
        for taken in 0..3 {
            let loader = Loader::builder(Target::Host).io(io).host_budget(8 << 20).build().unwrap();
            let mut stream = loader.stream(&checkpoint).unwrap();
            let kept: Vec<_> = stream.by_ref().take(taken).map(Result::unwrap).collect();
            drop(stream);
            assert_eq!(kept.len(), taken);
            assert!(kept.iter().all(|layer| layer.tensors().all(|tensor| tensor.hash().unwrap().is_some())));
        }
    }
    // Other tests of this file run beside this one: their threads end, ours must not add up.
    let deadline = Instant::now() + Duration::from_secs(20);
    while threads() > before && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(threads() <= before + 16, "threads stay behind");
}

/// Takes one layer, lets `damage` happen to the second shard, and returns what the rest of the load
/// says.
fn damaged(io: IoMode, damage: impl Fn(&std::path::Path)) -> LoadError {
    let (folder, checkpoint) = checkpoint(8, 900_000);
    let loader =
        Loader::builder(Target::Host).io(io).host_budget(8 << 20).window(Window::Layers(1)).prefetch(0);
    let mut stream = loader.build().unwrap().stream(&checkpoint).unwrap();
    drop(stream.next().unwrap().unwrap());
    damage(&folder.path().join("model-00002-of-00002.safetensors"));
    stream.find_map(Result::err).expect("a damaged file is noticed")
}

#[test]
fn a_file_that_changes_during_the_load_is_an_error_and_no_signal() {
    for io in MODES {
        let truncated = damaged(io, |path| {
            OpenOptions::new().write(true).open(path).unwrap().set_len(5000).unwrap();
        });
        assert!(truncated.is_file_changed(), "{io:?}: {truncated}");
        let regrown = damaged(io, |path| {
            let file = OpenOptions::new().write(true).open(path).unwrap();
            let len = file.metadata().unwrap().len();
            file.set_len(5000).unwrap();
            file.set_len(len).unwrap();
        });
        assert!(regrown.is_file_changed(), "{io:?}: {regrown}");
        let rewritten = damaged(io, |path| {
            let mut file = OpenOptions::new().write(true).open(path).unwrap();
            file.seek(SeekFrom::End(-10)).unwrap();
            file.write_all(b"0123456789").unwrap();
        });
        assert!(rewritten.is_file_changed(), "{io:?}: {rewritten}");
        let replaced = damaged(io, |path| {
            let other = path.with_extension("new");
            std::fs::copy(path, &other).unwrap();
            std::fs::rename(&other, path).unwrap();
        });
        assert!(replaced.is_file_changed(), "{io:?}: {replaced}");
        let message = replaced.to_string();
        assert!(message.contains("model-00002-of-00002.safetensors"), "{message}");
    }
}

#[test]
fn a_budget_that_cannot_work_names_the_smallest_that_does() {
    let (_folder, checkpoint) = checkpoint(3, 100_000);
    for io in MODES {
        let build = |bytes| Loader::builder(Target::Host).io(io).host_budget(bytes).build().unwrap();
        let error = build(1 << 20).stream(&checkpoint).expect_err("a ring of 1 MiB cannot work");
        assert!(error.is_over_budget());
        let LoadError::Plan(onelayer::plan::PlanError::BudgetTooSmall { smallest_bytes, .. }) = error else {
            panic!("{error}")
        };
        assert!(build(smallest_bytes - 1).plan(&checkpoint).is_err());
        let layers = build(smallest_bytes).stream(&checkpoint).unwrap().map(Result::unwrap);
        assert_eq!(layers.count(), 6);
    }
}
