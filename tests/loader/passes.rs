//! Streams for engines: the layers come again and again, what is kept is read once, and what binds
//! is told.
#![allow(clippy::unwrap_used, clippy::as_conversions, reason = "a test that cannot go on panics")]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use onelayer::live::{self, MemoryUse};
use onelayer::plan::PlanError;
use onelayer::{
    Binding, Checkpoint, FloatType, IoMode, Keep, LayerId, LoadError, LoadedLayer, Loader, LoaderBuilder,
    Passes, ReadOrder, Target, Waits, Window,
};
use onelayer_testing::{TestTensor, small_decoder, write_sharded};

/// Longer than anything here takes.
const LONG: Duration = Duration::from_secs(60);

struct Case {
    folder: tempfile::TempDir,
    checkpoint: Checkpoint,
    bytes: BTreeMap<String, Vec<u8>>,
}

fn case_of(shards: &[Vec<TestTensor>]) -> Case {
    let folder = tempfile::tempdir().unwrap();
    write_sharded(folder.path(), shards);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let bytes = shards.concat().into_iter().map(|tensor| (tensor.name, tensor.bytes)).collect();
    Case { folder, checkpoint, bytes }
}

/// An embedding, `layers` layers of about seven times `unit` bytes, norm and head.
fn case(layers: usize, unit: usize) -> Case {
    case_of(&small_decoder(layers, unit))
}

fn builder() -> LoaderBuilder {
    Loader::builder(Target::Host).host_budget(8 << 20).stall_timeout(LONG)
}

impl Case {
    fn check(&self, layer: &LoadedLayer) {
        assert!(layer.tensors().len() > 0);
        for tensor in layer.tensors() {
            assert!(
                tensor.as_bytes().unwrap() == self.bytes[tensor.name()],
                "pass {}: {} is wrong",
                layer.pass(),
                tensor.name()
            );
        }
    }

    fn layers(&self) -> usize {
        builder().build().unwrap().plan(&self.checkpoint).unwrap().layers().len()
    }

    /// Bytes of the layers of these names, in their files.
    fn bytes_of(&self, prefixes: &[&str]) -> u64 {
        let is_in = |name: &str| prefixes.iter().any(|prefix| name.starts_with(prefix));
        self.bytes.iter().filter(|(name, _)| is_in(name)).map(|(_, bytes)| bytes.len() as u64).sum()
    }
}

#[test]
fn every_layer_of_every_pass_is_right() {
    if onelayer_testing::in_own_process(module_path!(), "every_layer_of_every_pass_is_right") {
        return;
    }
    let case = case(5, 60_000);
    let count = case.layers();
    for io in [IoMode::Buffered, IoMode::Direct, IoMode::Mmap, IoMode::Uring, IoMode::Auto] {
        for window in [Window::Layers(1), Window::Layers(3), Window::Bytes(1 << 20), Window::All] {
            for (keep, prefetch) in [(Keep::Nothing, 2), (Keep::OutsideStacks, 0), (Keep::OutsideStacks, 20)]
            {
                let setting = builder().io(io).window(window).keep(keep.clone()).prefetch(prefetch);
                let mut stream =
                    setting.passes(Passes::Times(4)).build().unwrap().stream(&case.checkpoint).unwrap();
                let mut seen = Vec::new();
                for layer in &mut stream {
                    let layer = layer.unwrap();
                    case.check(&layer);
                    seen.push((layer.pass(), layer.index()));
                }
                let expected: Vec<_> =
                    (0..4).flat_map(|pass| (0..count).map(move |index| (pass, index))).collect();
                assert_eq!(seen, expected, "{io} {window} {keep:?} {prefetch}");
                assert_eq!(stream.report().passes, 4);
                let progress = stream.progress();
                assert_eq!(progress.tensor_bytes_done(), progress.tensor_bytes_total());
            }
        }
    }
    assert!(live::snapshot().allocations().is_empty());
}

#[test]
fn what_is_cast_or_hashed_is_right_in_every_pass() {
    if onelayer_testing::in_own_process(module_path!(), "what_is_cast_or_hashed_is_right_in_every_pass") {
        return;
    }
    let wide = |name: &str, seed| {
        let bytes = (0..40_000_u16).flat_map(|n| (f32::from(n % 997 + seed) * 0.25).to_le_bytes());
        TestTensor { name: name.to_owned(), dtype: "F32", shape: vec![40_000], bytes: bytes.collect() }
    };
    let tensors: Vec<_> = (0..4).map(|n| wide(&format!("model.layers.{n}.mlp.weight"), n)).collect();
    let case = case_of(&[tensors]);
    let loader = |target, passes| {
        Loader::builder(target)
            .host_budget(8 << 20)
            .dtype(FloatType::Bf16)
            .hash(true)
            .passes(passes)
            .build()
            .unwrap()
    };
    let hashes = |target, passes| {
        let stream = loader(target, passes).stream(&case.checkpoint).unwrap();
        let hash = |layer: LoadedLayer| {
            layer.tensors().next().unwrap().hash().unwrap().unwrap().to_hex().to_string()
        };
        stream.map(|layer| hash(layer.unwrap())).collect::<Vec<String>>()
    };
    let once = hashes(Target::Host, Passes::Times(1));
    for target in [Target::Host, Target::None] {
        assert_eq!(hashes(target, Passes::Times(3)), [&once[..], &once, &once].concat());
    }
}

/// While the engine has the last layers of a pass, the first one of the next is read.
#[test]
fn reading_ahead_goes_on_with_the_next_pass() {
    if onelayer_testing::in_own_process(module_path!(), "reading_ahead_goes_on_with_the_next_pass") {
        return;
    }
    let case = case(4, 300_000);
    let count = case.layers();
    let loader = builder().window(Window::Layers(2)).prefetch(2).passes(Passes::Endless).build().unwrap();
    let mut stream = loader.stream(&case.checkpoint).unwrap();
    let progress = stream.progress();
    let mut last = None;
    for layer in stream.by_ref().take(count) {
        last = Some(layer.unwrap());
    }
    let last = last.unwrap();
    assert_eq!((last.index(), last.pass()), (count - 1, 0));
    // The caller asks for nothing and drops nothing: what arrives now is of the next pass.
    let one_pass = case.bytes_of(&[""]);
    let first = builder().build().unwrap().plan(&case.checkpoint).unwrap().layers()[0].tensor_bytes;
    let deadline = Instant::now() + LONG;
    while progress.tensor_bytes_done() < one_pass + first {
        assert!(Instant::now() < deadline, "{} of {one_pass} + {first}", progress.tensor_bytes_done());
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(last);
    let again = stream.next().unwrap().unwrap();
    assert_eq!((again.index(), again.pass()), (0, 1));
    case.check(&again);
}

#[test]
fn kept_layers_are_read_once_and_stay_where_they_are() {
    if onelayer_testing::in_own_process(module_path!(), "kept_layers_are_read_once_and_stay_where_they_are") {
        return;
    }
    let case = case(4, 60_000);
    let kept = ["model.embed_tokens", "lm_head"];
    let keep = Keep::Layers(kept.iter().map(|name| LayerId::new(name)).collect());
    for (keep, prefixes) in [
        (keep, &["model.embed_tokens", "lm_head"][..]),
        (Keep::OutsideStacks, &["model.embed", "lm_head", "model.norm"]),
    ] {
        let loader =
            builder().io(IoMode::Buffered).window(Window::Layers(2)).keep(keep).passes(Passes::Times(5));
        let mut stream = loader.build().unwrap().stream(&case.checkpoint).unwrap();
        let mut addresses: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        for layer in &mut stream {
            let layer = layer.unwrap();
            let address = layer.tensors().next().unwrap().as_bytes().unwrap().as_ptr().addr();
            addresses.entry(layer.id().to_string()).or_default().push(address);
        }
        let (all, kept_bytes) = (case.bytes_of(&[""]), case.bytes_of(prefixes));
        // Buffered reads read payloads and the small holes between them, which there are none of.
        assert_eq!(stream.report().read_bytes, all + 4 * (all - kept_bytes));
        for name in kept {
            let places = &addresses[name];
            assert!(
                places.len() == 5 && places.iter().all(|place| *place == places[0]),
                "{name}: {places:?}"
            );
        }
        assert_eq!(stream.report().tensor_bytes, all + 4 * (all - kept_bytes));
    }
}

#[test]
fn everything_may_be_kept() {
    if onelayer_testing::in_own_process(module_path!(), "everything_may_be_kept") {
        return;
    }
    let case = case(3, 20_000);
    let all: Vec<_> = builder()
        .build()
        .unwrap()
        .plan(&case.checkpoint)
        .unwrap()
        .layers()
        .iter()
        .map(|l| l.id.clone())
        .collect();
    let loader = builder()
        .io(IoMode::Buffered)
        .window(Window::Layers(1))
        .keep(Keep::Layers(all))
        .passes(Passes::Times(6));
    let mut stream = loader.build().unwrap().stream(&case.checkpoint).unwrap();
    assert_eq!(stream.plan().memory().window().unwrap().bytes, 0);
    assert_eq!(stream.by_ref().map(|layer| case.check(&layer.unwrap())).count(), 6 * case.layers());
    assert_eq!(stream.report().read_bytes, case.bytes_of(&[""]));
}

/// Counted as the process has them: ring, window and one arena for each kept layer, from the second
/// pass to the last.
#[test]
fn no_arena_is_made_after_the_first_pass() {
    if onelayer_testing::in_own_process(module_path!(), "no_arena_is_made_after_the_first_pass") {
        return;
    }
    let case = case(5, 200_000);
    let count = case.layers();
    for window in [Window::Layers(2), Window::Bytes(4 << 20)] {
        let loader =
            builder().window(window).keep(Keep::OutsideStacks).passes(Passes::Times(20)).build().unwrap();
        let mut stream = loader.stream(&case.checkpoint).unwrap();
        let numbers = || live::snapshot().allocations().iter().map(|one| one.number).collect::<Vec<_>>();
        for layer in stream.by_ref().take(count) {
            layer.unwrap();
        }
        let after_first = numbers();
        assert_eq!(after_first.len(), 2 + 3, "{:?}", live::snapshot());
        let uses = live::snapshot();
        let windows: Vec<_> = uses
            .allocations()
            .iter()
            .filter(|one| one.used_for == MemoryUse::Window)
            .map(|one| one.bytes)
            .collect();
        assert_eq!(windows, [stream.plan().memory().window().unwrap().bytes]);
        for layer in stream.by_ref().take(19 * count - 1) {
            let layer = layer.unwrap();
            case.check(&layer);
            let (pass, now) = (layer.pass(), numbers());
            // In the last pass what is not needed any more goes, as soon as the load is over.
            let is_kept =
                if pass == 19 { now.iter().all(|one| after_first.contains(one)) } else { now == after_first };
            assert!(is_kept, "pass {pass}: {now:?}, after the first {after_first:?}");
        }
        let terms = stream.plan().memory().resident_terms().to_vec();
        assert_eq!(terms.iter().map(|term| term.kind.name()).collect::<Vec<_>>(), ["window", "kept layers"]);
        assert_eq!(terms.iter().map(|term| term.bytes).sum::<u64>(), stream.plan().memory().resident_bytes());
        drop(stream);
        assert!(live::snapshot().allocations().is_empty());
    }
}

/// The list names every layer that lies in the window.
#[test]
fn the_list_of_what_is_allocated_names_the_layers_of_the_window() {
    if onelayer_testing::in_own_process(
        module_path!(),
        "the_list_of_what_is_allocated_names_the_layers_of_the_window",
    ) {
        return;
    }
    let case = case(4, 20_000);
    let loader = builder().window(Window::Layers(3)).passes(Passes::Endless).build().unwrap();
    let mut stream = loader.stream(&case.checkpoint).unwrap();
    for _ in 0..2 * case.layers() {
        drop(stream.next().unwrap().unwrap());
    }
    let held = [stream.next().unwrap().unwrap(), stream.next().unwrap().unwrap()];
    let live = live::snapshot();
    let window = live.allocations().iter().find(|one| one.used_for == MemoryUse::Window).unwrap();
    let listed: Vec<_> = window.tensors.iter().map(|tensor| tensor.name.clone()).collect();
    for tensor in held.iter().flat_map(LoadedLayer::tensors) {
        assert!(listed.contains(&tensor.name().to_owned()), "{listed:?}");
    }
}

/// Layers of 1, 2, 4 and 8 units: as many are resident as fit, never more, and the longest of them
/// always can be.
#[test]
fn a_window_of_bytes_holds_as_many_layers_as_fit() {
    if onelayer_testing::in_own_process(module_path!(), "a_window_of_bytes_holds_as_many_layers_as_fit") {
        return;
    }
    const UNIT: usize = 256 << 10;
    let sizes = [1, 2, 4, 8, 1, 1, 1, 2, 8, 1];
    let tensors: Vec<_> = (0..)
        .zip(sizes)
        .map(|(n, units)| {
            TestTensor::random(format!("{}_block.weight", char::from(b'a' + n)), units * UNIT, n.into())
        })
        .collect();
    let case = case_of(&[tensors]);
    assert_eq!(case.layers(), sizes.len());
    for units in [8, 9, 12, 100] {
        let window_bytes = units * UNIT as u64;
        let loader = builder()
            .window(Window::Bytes(window_bytes))
            .passes(Passes::Times(12))
            .prefetch(8)
            .build()
            .unwrap();
        let mut stream = loader.stream(&case.checkpoint).unwrap();
        let total: u64 = stream.plan().layers().iter().map(|layer| layer.arena_bytes).sum();
        assert_eq!(stream.plan().memory().resident_bytes(), window_bytes.min(total));
        let mut most = 0;
        for layer in stream.by_ref() {
            let layer = layer.unwrap();
            let live = live::snapshot();
            let window = live.allocations().iter().find(|one| one.used_for == MemoryUse::Window).unwrap();
            let held: u64 = window.tensors.iter().map(|tensor| tensor.bytes).sum();
            assert!(held <= window_bytes, "{held} of {window_bytes}");
            most = most.max(window.tensors.len());
            case.check(&layer);
        }
        assert_eq!(stream.report().passes, 12);
        println!("{units} units: {most} layers at most");
    }
    let refused =
        builder().window(Window::Bytes(8 * UNIT as u64 - 1)).passes(Passes::Times(2)).build().unwrap();
    let refused = refused.plan(&case.checkpoint).unwrap_err();
    assert!(
        matches!(&refused, LoadError::Plan(PlanError::WindowTooSmall { layer, .. }) if layer == "i_block"),
        "{refused}"
    );
    assert!(refused.is_over_budget());
}

/// An engine that holds more than leaves room for the next layer is told so, with what it holds.
#[test]
fn an_engine_that_holds_the_window_is_told() {
    if onelayer_testing::in_own_process(module_path!(), "an_engine_that_holds_the_window_is_told") {
        return;
    }
    let case = case(4, 20_000);
    let short =
        |window| builder().window(window).passes(Passes::Endless).stall_timeout(Duration::from_millis(300));
    let mut stream = short(Window::Layers(2)).build().unwrap().stream(&case.checkpoint).unwrap();
    for _ in 0..case.layers() - 1 {
        stream.next().unwrap().unwrap();
    }
    let held = [stream.next().unwrap().unwrap(), stream.next().unwrap().unwrap()];
    let error = stream.next().unwrap().unwrap_err();
    let ids: Vec<_> = held.iter().map(|layer| layer.id().clone()).collect();
    assert!(matches!(&error, LoadError::Stalled { held, window: 2, .. } if *held == ids), "{error}");
    drop((held, stream));
    let mut stream = short(Window::Bytes(200_000)).build().unwrap().stream(&case.checkpoint).unwrap();
    let _held = stream.next().unwrap().unwrap();
    let error = stream.next().unwrap().unwrap_err();
    assert!(matches!(&error, LoadError::WindowFull { window_bytes: 200_000, .. }), "{error}");
}

#[test]
fn layers_come_in_the_order_that_the_engine_calls_them() {
    if onelayer_testing::in_own_process(module_path!(), "layers_come_in_the_order_that_the_engine_calls_them")
    {
        return;
    }
    let case = case(3, 20_000);
    let plan = builder().build().unwrap().plan(&case.checkpoint).unwrap();
    let mut order: Vec<LayerId> = plan.layers().iter().map(|layer| layer.id.clone()).collect();
    order.reverse();
    let loader = builder()
        .call_order(order.clone())
        .keep(Keep::OutsideStacks)
        .passes(Passes::Times(2))
        .build()
        .unwrap();
    let layers = loader.stream(&case.checkpoint).unwrap().map(|layer| {
        let layer = layer.unwrap();
        case.check(&layer);
        layer.id().clone()
    });
    assert_eq!(layers.collect::<Vec<_>>(), [&order[..], &order].concat());
    let refused =
        builder().call_order(order[1..].to_vec()).build().unwrap().plan(&case.checkpoint).unwrap_err();
    assert!(matches!(&refused, LoadError::Layers(_)), "{refused}");
    // What is not selected need not be named.
    let model = builder()
        .call_order(order[1..].to_vec())
        .select({
            let left_out = order[0].to_string();
            move |tensor| !tensor.name.starts_with(&left_out)
        })
        .build()
        .unwrap();
    assert_eq!(model.plan(&case.checkpoint).unwrap().layers().len(), order.len() - 1);
    let unknown =
        builder().keep(Keep::Layers(vec![LayerId::new("nowhere")])).passes(Passes::Times(2)).build().unwrap();
    assert!(matches!(unknown.plan(&case.checkpoint).unwrap_err(), LoadError::NotFound { .. }));
}

#[test]
fn a_file_that_changes_in_the_second_pass_is_an_error() {
    if onelayer_testing::in_own_process(module_path!(), "a_file_that_changes_in_the_second_pass_is_an_error")
    {
        return;
    }
    for io in [IoMode::Buffered, IoMode::Direct, IoMode::Mmap] {
        let case = case(4, 100_000);
        let loader =
            builder().io(io).window(Window::Layers(1)).prefetch(1).passes(Passes::Endless).build().unwrap();
        let mut stream = loader.stream(&case.checkpoint).unwrap();
        for layer in stream.by_ref().take(case.layers() + 1) {
            case.check(&layer.unwrap());
        }
        for shard in std::fs::read_dir(case.folder.path()).unwrap() {
            let path = shard.unwrap().path();
            if path.extension().is_some_and(|ending| ending == "safetensors") {
                let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
                file.set_len(1000).unwrap();
            }
        }
        let error = stream.by_ref().take(2 * case.layers()).find_map(Result::err).expect("it is noticed");
        assert!(error.is_file_changed(), "{io}: {error}");
        assert!(stream.next().is_none());
        drop(stream);
        assert!(live::snapshot().allocations().is_empty());
    }
}

#[test]
fn a_stream_that_is_dropped_in_the_middle_gives_everything_back() {
    if onelayer_testing::in_own_process(
        module_path!(),
        "a_stream_that_is_dropped_in_the_middle_gives_everything_back",
    ) {
        return;
    }
    let case = case(4, 100_000);
    for taken in [0, 1, case.layers() - 1, case.layers(), 2 * case.layers() + 2] {
        let loader = builder().window(Window::Layers(2)).keep(Keep::OutsideStacks).passes(Passes::Endless);
        let mut stream = loader.build().unwrap().stream(&case.checkpoint).unwrap();
        let mut last = None;
        for _ in 0..taken {
            drop(last.take());
            last = Some(stream.next().unwrap().unwrap());
        }
        drop(stream);
        if let Some(layer) = last {
            // A layer that was taken stays valid, and the memory that it lies in with it.
            case.check(&layer);
            assert_eq!(live::snapshot().allocations().len(), 1);
        }
        assert!(live::snapshot().allocations().is_empty());
    }
}

#[test]
fn an_endless_stream_is_cancelled() {
    if onelayer_testing::in_own_process(module_path!(), "an_endless_stream_is_cancelled") {
        return;
    }
    let case = case(3, 100_000);
    let mut stream = builder().passes(Passes::Endless).build().unwrap().stream(&case.checkpoint).unwrap();
    for _ in 0..4 * case.layers() {
        stream.next().unwrap().unwrap();
    }
    stream.cancel_handle().cancel();
    assert!(matches!(stream.next(), Some(Err(LoadError::Cancelled))));
    assert!(stream.next().is_none());
    drop(stream);
    assert!(live::snapshot().allocations().is_empty());
}

#[derive(Clone, Debug)]
struct Told {
    id: String,
    pass: u64,
    is_kept: bool,
    waits: Waits,
    busy: Duration,
    handed_out: Duration,
    released: Option<Duration>,
}

/// Every layer of every pass is told of, the pass times add up, and the report has the sum of all
/// waits.
#[test]
fn hooks_are_told_of_every_layer_and_every_pass() {
    if onelayer_testing::in_own_process(module_path!(), "hooks_are_told_of_every_layer_and_every_pass") {
        return;
    }
    let case = case(4, 100_000);
    let (layers, passes) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(Vec::new())));
    let loader = builder()
        .io(IoMode::Buffered)
        .window(Window::Layers(2))
        .keep(Keep::OutsideStacks)
        .passes(Passes::Times(3))
        .on_layer({
            let layers = Arc::clone(&layers);
            move |times| {
                layers.lock().unwrap().push(Told {
                    id: times.id.to_string(),
                    pass: times.pass,
                    is_kept: times.is_kept,
                    waits: times.waits,
                    busy: times.reading + times.filling,
                    handed_out: times.handed_out,
                    released: times.released,
                });
            }
        })
        .on_pass({
            let passes = Arc::clone(&passes);
            move |pass| passes.lock().unwrap().push(*pass)
        })
        .build()
        .unwrap();
    let start = Instant::now();
    let mut stream = loader.stream(&case.checkpoint).unwrap();
    let mut last = None;
    for layer in &mut stream {
        drop(last.replace(layer.unwrap()));
        std::thread::sleep(Duration::from_millis(2));
    }
    let report = stream.report();
    drop(stream);
    let elapsed = start.elapsed();
    let layers = layers.lock().unwrap().clone();
    assert_eq!(layers.len(), 3 * case.layers());
    for told in &layers {
        match (told.is_kept, told.released) {
            (true, released) => assert!(released.is_none()),
            (false, None) => {
                assert!(told.pass == 2, "only what is held at the end is not released: {told:?}")
            }
            (false, Some(released)) => {
                assert!(released >= told.handed_out + Duration::from_millis(1), "{told:?}");
            }
        }
        let is_read = !told.is_kept || told.pass == 0;
        assert_eq!(told.busy > Duration::ZERO, is_read, "{told:?}");
    }
    let mut sum = Waits::default();
    layers.iter().for_each(|told| sum += told.waits);
    assert_eq!(sum, report.waits);
    let passes = passes.lock().unwrap().clone();
    assert_eq!(passes.iter().map(|pass| pass.pass).collect::<Vec<_>>(), [0, 1, 2]);
    assert_eq!(passes.iter().map(|pass| pass.read_bytes).sum::<u64>(), report.read_bytes);
    assert!(passes.iter().map(|pass| pass.elapsed).sum::<Duration>() <= elapsed);
    for pass in &passes {
        let waited: Duration = Binding::ALL.into_iter().map(|binding| pass.waits.of(binding)).sum();
        assert!(waited <= pass.elapsed, "{pass:?}");
    }
    assert!(layers.iter().any(|told| told.id == "lm_head" && told.pass == 2));
}

#[test]
fn a_slow_engine_binds_and_a_fast_one_does_not() {
    if onelayer_testing::in_own_process(module_path!(), "a_slow_engine_binds_and_a_fast_one_does_not") {
        return;
    }
    let case = case(4, 100_000);
    let run = |work: Duration, reads: IoMode| {
        let loader = builder().io(reads).window(Window::Layers(2)).passes(Passes::Times(3)).build().unwrap();
        let mut stream = loader.stream(&case.checkpoint).unwrap();
        for layer in &mut stream {
            let layer = layer.unwrap();
            std::thread::sleep(work);
            drop(layer);
        }
        stream.report()
    };
    let slow = run(Duration::from_millis(20), IoMode::Buffered);
    assert_eq!(slow.waits.longest(), Some(Binding::Engine), "{slow:?}");
    assert!(slow.waits.engine > slow.elapsed / 4, "{slow:?}");
    let fast = run(Duration::ZERO, IoMode::Buffered);
    // On a busy machine it is kept waiting for a core now and then.
    assert!(fast.waits.engine < slow.waits.engine / 2, "{fast:?}, {slow:?}");
    assert_eq!(fast.waits.link, Duration::ZERO, "the host has no link: {fast:?}");
}

#[test]
fn a_hook_that_panics_ends_the_load() {
    if onelayer_testing::in_own_process(module_path!(), "a_hook_that_panics_ends_the_load") {
        return;
    }
    let case = case(3, 20_000);
    let told = Arc::new(AtomicU64::new(0));
    let loader = builder().passes(Passes::Endless).on_pass({
        let told = Arc::clone(&told);
        move |_| assert!(told.fetch_add(1, Ordering::SeqCst) < 2, "injected panic in a hook")
    });
    let mut stream = loader.build().unwrap().stream(&case.checkpoint).unwrap();
    let error = stream.by_ref().take(100).find_map(Result::err).expect("it ends");
    assert!(matches!(&error, LoadError::Panicked { message } if message.contains("in a hook")), "{error}");
    drop(stream);
    assert!(live::snapshot().allocations().is_empty());
}

/// One pass is what it was: the order of files for whoever asks, arenas of their own, nothing
/// shared.
#[test]
fn one_pass_has_no_window_of_its_own() {
    if onelayer_testing::in_own_process(module_path!(), "one_pass_has_no_window_of_its_own") {
        return;
    }
    let case = case(3, 20_000);
    let plan = |change: fn(LoaderBuilder) -> LoaderBuilder| {
        change(builder().window(Window::All).read_order(ReadOrder::Files))
            .build()
            .unwrap()
            .plan(&case.checkpoint)
            .unwrap()
    };
    let one = plan(|builder| builder.keep(Keep::OutsideStacks));
    assert_eq!((one.order(), one.memory().window()), (ReadOrder::Files, None));
    assert!(one.layers().iter().all(|layer| !layer.is_kept));
    let more = plan(|builder| builder.passes(Passes::Times(2)));
    assert_eq!(more.order(), ReadOrder::Layers);
    assert!(more.to_string().contains("passes   2"), "{more}");
    assert_eq!(plan(|builder| builder.passes(Passes::Times(0))).passes().count(), Some(1));
}
