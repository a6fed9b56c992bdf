//! What nobody should do to a CUDA device, done to the simulated one: faults that stay or come in
//! pairs, layers that are kept too long or dropped too early and elsewhere, callers with contexts,
//! streams and memory of their own.
//!
//! Each test runs this executable once more, as a process of its own that finds the simulated
//! driver; the tests that say `scenario` are what runs there, and do nothing by themselves.
#![allow(
    clippy::unwrap_used,
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    clippy::multiple_unsafe_ops_per_block,
    reason = "a test that cannot go on panics; handles of an engine"
)]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a scenario tells its parent")]
#![allow(unsafe_code, reason = "an engine's promises")]

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::time::Duration;

use onelayer::layers::LayerMap;
use onelayer::load::{LoadError, LoadedLayer, LoadedTensor};
use onelayer::plan::{FloatType, IoMode};
use onelayer::{After, Checkpoint, DeviceRegion, HandOut, Loader, Target, Window};
use onelayer_testing::cuda_sim::{MODES, SimOutcome, SimRun};
use onelayer_testing::{TestTensor, small_decoder, write_sharded};

/// Numbers from a seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let word = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((word ^ (word >> 31)) % end as u64) as usize
    }

    fn is(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }
}

fn text(name: &str) -> String {
    std::env::var(name).unwrap_or_default()
}

fn number(name: &str) -> u64 {
    text(name).parse().unwrap_or_else(|_| panic!("{name} is no number"))
}

/// The driver as a foreign engine calls it, which takes refusals as they come.
struct Raw(libloading::Library);

macro_rules! raw {
    ($raw:expr, $name:literal, ($($kind:ty),*), $($argument:expr),*) => {{
        // SAFETY: C signatures as in cuda.h; handles come from the driver itself.
        let function = unsafe {
            $raw.0.get::<unsafe extern "C" fn($($kind),*) -> u32>(concat!($name, "\0").as_bytes())
        };
        // SAFETY: as above.
        unsafe { (function.unwrap())($($argument),*) }
    }};
}

// Behind the macro that it uses.
mod random;

impl Raw {
    fn new() -> Self {
        // SAFETY: the simulated driver has no initialisers that do harm.
        let raw = Self(unsafe { libloading::Library::new("libcuda.so.1") }.expect("the simulated driver"));
        raw!(raw, "cuInit", (u32), 0);
        raw
    }

    /// A context of its own on device 0, current on this thread.
    fn context(&self) -> Option<u64> {
        let mut context = 0;
        let code = raw!(self, "cuCtxCreate_v2", (*mut u64, u32, i32), &raw mut context, 0, 0);
        (code == 0).then_some(context)
    }

    /// Refusals are not taken for an answer: the calls that follow would go astray.
    fn set_current(&self, context: u64) {
        let _ = (0..3).any(|_| raw!(self, "cuCtxSetCurrent", (u64), context) == 0);
    }

    fn current(&self) -> u64 {
        let mut context = 0;
        raw!(self, "cuCtxGetCurrent", (*mut u64), &raw mut context);
        context
    }

    fn stream(&self) -> Option<u64> {
        let mut stream = 0;
        let code = raw!(self, "cuStreamCreate", (*mut u64, u32), &raw mut stream, 1);
        (code == 0).then_some(stream)
    }

    fn allocate(&self, len: usize) -> Option<u64> {
        let mut address = 0;
        let code = raw!(self, "cuMemAlloc_v2", (*mut u64, usize), &raw mut address, len);
        (code == 0).then_some(address)
    }

    fn free(&self, address: u64) {
        raw!(self, "cuMemFree_v2", (u64), address);
    }

    /// A kernel that reads one place and writes another, queued in a stream. False if it was
    /// refused.
    fn kernel(&self, source: u64, target: u64, len: usize, stream: u64) -> bool {
        raw!(self, "cuMemcpyDtoDAsync_v2", (u64, u64, usize, u64), target, source, len, stream) == 0
    }

    fn event(&self, stream: u64) -> Option<u64> {
        let mut event = 0;
        if raw!(self, "cuEventCreate", (*mut u64, u32), &raw mut event, 2) != 0 {
            return None;
        }
        if raw!(self, "cuEventRecord", (u64, u64), event, stream) != 0 {
            raw!(self, "cuEventDestroy_v2", (u64), event);
            return None;
        }
        Some(event)
    }

    fn synchronize(&self, stream: u64) -> bool {
        raw!(self, "cuStreamSynchronize", (u64), stream) == 0
    }

    /// True once everything that was queued is over. Refusals are not taken for an answer.
    fn settle(&self) -> bool {
        (0..3).any(|_| matches!(raw!(self, "cuCtxSynchronize", (),), 0 | 4 | 700 | 719))
    }

    /// Once everything that was queued is over.
    fn free_bytes(&self) -> usize {
        raw!(self, "cuCtxSynchronize", (),);
        let (mut free, mut total) = (0, 0);
        raw!(self, "cuMemGetInfo_v2", (*mut usize, *mut usize), &raw mut free, &raw mut total);
        free
    }
}

/// A checkpoint and its bytes.
struct Case {
    folder: tempfile::TempDir,
    checkpoint: Checkpoint,
    tensors: BTreeMap<String, TestTensor>,
}

impl Case {
    fn of(shards: &[Vec<TestTensor>]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        write_sharded(folder.path(), shards);
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let tensors = shards.concat().into_iter().map(|tensor| (tensor.name.clone(), tensor)).collect();
        Self { folder, checkpoint, tensors }
    }

    fn decoder(layers: usize, unit: usize) -> Self {
        Self::of(&small_decoder(layers, unit))
    }

    /// Layers of any sizes: none, odd, larger than a ring, of floats at odd places.
    fn random(dice: &mut Dice) -> Self {
        let mut shards = vec![Vec::new(); 1 + dice.below(3)];
        let mut left: usize = 14 << 20;
        for layer in 0..1 + dice.below(7) {
            let shard = dice.below(shards.len());
            let most = dice.of(&[0, 6, 6, 6, 6, 6, 6, 60]);
            let tensors = dice.below(most + 1);
            for number in 0..=tensors {
                let most = dice.of(&[0, 1, 3, 255, 256, 300, 5000, 66_000, 400_000, 2_500_000]);
                let len =
                    dice.below(most + 1).min(left) / 8 * 8 + if dice.is(50) { dice.below(8) } else { 0 };
                left -= len.min(left);
                let seed = (layer * 1000 + number) as u64 + dice.0 % 1000;
                let mut tensor =
                    TestTensor::random(format!("model.layers.{layer}.t{number}.weight"), len, seed);
                let width = dice.of(&[1, 1, 4, 8]);
                if width > 1 {
                    tensor.bytes.truncate(len / width * width);
                    // No infinities and no NaNs: their payloads are a subject of their own.
                    tensor.bytes.chunks_exact_mut(width).for_each(|element| element[width - 1] &= 0xBF);
                    if width == 8 {
                        // The crate that checks the results rounds from the upper half alone.
                        tensor.bytes.chunks_exact_mut(8).for_each(|element| element[..4].fill(0));
                    }
                    tensor.dtype = if width == 4 { "F32" } else { "F64" };
                    tensor.shape = vec![(len / width) as u64];
                }
                shards[shard].push(tensor);
            }
        }
        shards.retain(|shard| !shard.is_empty());
        Self::of(&shards)
    }

    fn expected(&self, name: &str, dtype: Option<FloatType>) -> Vec<u8> {
        let tensor = &self.tensors[name];
        let bytes = &tensor.bytes;
        match (tensor.dtype, dtype) {
            ("F32", Some(FloatType::Bf16)) => {
                let floats = bytes.as_chunks().0.iter().map(|&element| f32::from_le_bytes(element));
                floats.flat_map(|float| half::bf16::from_f32(float).to_le_bytes()).collect()
            }
            ("F64", Some(FloatType::F32)) => {
                let floats = bytes.as_chunks().0.iter().map(|&element| f64::from_le_bytes(element));
                floats.flat_map(|float| (float as f32).to_le_bytes()).collect()
            }
            ("F64", Some(FloatType::Bf16)) => {
                let floats = bytes.as_chunks().0.iter().map(|&element| f64::from_le_bytes(element));
                floats.flat_map(|float| half::bf16::from_f64(float).to_le_bytes()).collect()
            }
            _ => bytes.clone(),
        }
    }

    /// Reads a tensor back and compares it.
    fn check(&self, tensor: &LoadedTensor, dtype: Option<FloatType>) -> Result<(), LoadError> {
        let expected = self.expected(tensor.name(), dtype);
        let mut found = vec![0; expected.len()];
        assert!(tensor.read(0, &mut found)?);
        if found != expected {
            let first = found.iter().zip(&expected).position(|(a, b)| a != b);
            let at = first.unwrap() & !7;
            let wide = self.tensors[tensor.name()].bytes.get(at * 4..at * 4 + 32);
            let (found, expected) = (&found[at..], &expected[at..]);
            let [found, expected] = [found, expected].map(|bytes| &bytes[..bytes.len().min(8)]);
            panic!("{:?} is wrong at {at}: {found:x?}, not {expected:x?} {wide:x?}", tensor.entry());
        }
        Ok(())
    }

    fn check_layer(&self, layer: &LoadedLayer, dtype: Option<FloatType>) -> Result<(), LoadError> {
        layer.tensors().try_for_each(|tensor| self.check(&tensor, dtype))
    }
}

/// Each `model.layers.N` is a layer, whatever is in it.
fn one_stack() -> LayerMap {
    LayerMap::parse("stacks = [\"model.layers\"]").unwrap()
}

/// Runs a scenario and wants no misuse and, unless leaks are what it is about, nothing left behind.
fn runs_well(scenario: &str, may_leak: bool, change: impl Fn(SimRun) -> SimRun) {
    let outcome = change(SimRun::again(module_path!(), scenario).set("DELAY_US", 50)).run();
    outcome.assert_success();
    let report = outcome.report();
    let violations = report.violations();
    let is_leak = |kind: &str| may_leak && kind == "context_released_in_use";
    assert!(violations.iter().all(|violation| is_leak(&violation.kind)), "{violations:?}");
    assert!(may_leak || report.leaks().is_empty(), "{:?}", report.leaks());
}

/// Layers of one size, with one large tensor each.
fn equal_layers(layers: u64, len: usize) -> Case {
    let tensors = |layer| {
        [("mlp.weight", len - 256), ("norm.weight", 256)].map(|(name, len)| {
            TestTensor::random(format!("model.layers.{layer}.{name}"), len, layer * 2 + len as u64 % 2)
        })
    };
    let case = Case::of(&[(0..layers).flat_map(tensors).collect()]);
    assert_eq!(builder().plan(&case.checkpoint).unwrap().layers().len() as u64, layers);
    case
}

/// The device's primary context, current on this thread for the rest of the process.
fn primary(raw: &Raw) -> u64 {
    let (mut device, mut context) = (0, 0);
    raw!(raw, "cuDeviceGet", (*mut i32, i32), &raw mut device, 0);
    raw!(raw, "cuDevicePrimaryCtxRetain", (*mut u64, i32), &raw mut context, device);
    raw.set_current(context);
    context
}

fn leave_primary(raw: &Raw) {
    raw.set_current(0);
    raw!(raw, "cuDevicePrimaryCtxRelease_v2", (i32), 0);
}

fn builder() -> onelayer::LoaderBuilder {
    Loader::builder(Target::Cuda(0)).host_budget(6 << 20)
}

#[test]
fn memory_of_the_caller_is_free_when_its_layer_is_dropped() {
    for mode in MODES {
        for pools in [1, 0] {
            runs_well("scenario_own_memory_after_ours", false, |run| {
                run.set("MODE", mode).set("POOLS", pools)
            });
        }
    }
}

/// Arenas of ours come before memory of the caller's, so that there is something to use again.
#[test]
#[ignore = "scenario"]
fn scenario_own_memory_after_ours() {
    let raw = Raw::new();
    primary(&raw);
    let case = equal_layers(8, 1 << 20);
    let regions: Vec<u64> = (0..8).map(|_| raw.allocate(2 << 20).unwrap()).collect();
    let given = regions.clone();
    let destination = move |layer: &onelayer::plan::PlannedLayer| {
        let number: usize = layer.id.as_str().rsplit('.').next()?.parse().ok()?;
        (number % 2 == 1).then(|| DeviceRegion { address: given[number], len_bytes: 2 << 20 })
    };
    let builder = builder().window(Window::Layers(1)).hand_out(HandOut::AtOnce);
    // SAFETY: a region is freed when its layer has been dropped.
    let loader = unsafe { builder.destinations(destination) }.build().unwrap();
    let mut stream = loader.stream(&case.checkpoint).unwrap();
    for (number, address) in regions.into_iter().enumerate() {
        drop(stream.next().unwrap().unwrap());
        raw.free(address);
        assert!(number < 8);
    }
    assert!(stream.next().is_none());
    drop((stream, loader));
    leave_primary(&raw);
}

#[test]
fn memory_of_the_caller_is_free_when_a_load_has_failed() {
    for function in ["cuMemcpyDtoDAsync_v2:3:999", "cuMemcpyDtoDAsync_v2:2:999~", "cuEventCreate:*:2"] {
        for mode in MODES {
            runs_well("scenario_own_memory_and_a_failure", false, |run| {
                // The slots' events are there by then.
                run.set("MODE", mode).fail(&function.replace("cuEventCreate:*", "cuEventCreate:5+"))
            });
        }
    }
}

#[test]
#[ignore = "scenario"]
fn scenario_own_memory_and_a_failure() {
    let raw = Raw::new();
    primary(&raw);
    let mut tensors: Vec<TestTensor> =
        (0..9).map(|number| TestTensor::random(format!("layers.0.t{number}"), 301, number)).collect();
    tensors.push(TestTensor::random("layers.0.t9", 1 << 20, 9));
    let case = Case::of(&[tensors]);
    let plan = builder().plan(&case.checkpoint).unwrap();
    assert!(plan.moves(&plan.layers()[0]).len() > 4 && plan.memory().ring().slots == 4);
    let address = raw.allocate(2 << 20).unwrap();
    let destination =
        move |_: &onelayer::plan::PlannedLayer| Some(DeviceRegion { address, len_bytes: 2 << 20 });
    // SAFETY: the region is freed when the stream has ended.
    let loader = unsafe { builder().destinations(destination) }.build().unwrap();
    let mut stream = loader.stream(&case.checkpoint).unwrap();
    assert!(matches!(stream.next(), Some(Err(LoadError::Device(_)))));
    raw.free(address);
    drop((stream, loader));
    leave_primary(&raw);
}

/// What was refused is waited for, whatever was granted before.
#[test]
fn a_refused_release_lets_the_drop_wait() {
    for number in 1..10 {
        runs_well("scenario_two_releases", false, |run| run.fail(&format!("cuStreamWaitEvent:{number}:999")));
    }
}

#[test]
#[ignore = "scenario"]
fn scenario_two_releases() {
    let raw = Raw::new();
    primary(&raw);
    let streams = [(); 3].map(|()| raw.stream().unwrap());
    let case = equal_layers(2, 1 << 20);
    let result = raw.allocate(3 << 20).unwrap();
    let loader = builder().build().unwrap();
    let mut refused = 0;
    for layer in loader.stream(&case.checkpoint).unwrap() {
        let Ok(layer) = layer else { break };
        let address = layer.tensors().next().unwrap().device_pointer().unwrap();
        layer.wait_ready().unwrap();
        for (number, stream) in (0..).zip(streams) {
            assert!(raw.kernel(address, result + (number << 20), 1000, stream));
            // SAFETY: a live stream; all that uses the layer is queued in it, or in one that is told of next.
            refused += usize::from(unsafe { layer.release_after(After::Stream(stream)) }.is_err());
        }
    }
    assert!(refused <= 1);
    drop(loader);
    assert!(raw.settle());
    raw.free(result);
    for stream in streams {
        raw!(raw, "cuStreamDestroy_v2", (u64), stream);
    }
    leave_primary(&raw);
}

#[test]
fn cancelling_after_the_last_layer_is_harmless() {
    for (mode, seed) in [("lazy", 1), ("lazy", 2), ("thread", 1), ("thread", 2)] {
        runs_well("scenario_late_cancel", false, |run| {
            run.set("MODE", mode).set("SEED", seed).set("DELAY_US", 30_000)
        });
    }
}

#[test]
#[ignore = "scenario"]
fn scenario_late_cancel() {
    let case = equal_layers(3, 3 << 20);
    let loader = builder().hand_out(HandOut::AtOnce).window(Window::All).build().unwrap();
    for _ in 0..4 {
        let mut stream = loader.stream(&case.checkpoint).unwrap();
        let layers: Vec<LoadedLayer> = stream.by_ref().take(3).map(Result::unwrap).collect();
        stream.cancel_handle().cancel();
        assert!(stream.next().is_none(), "all was handed out");
        layers.iter().for_each(|layer| case.check_layer(layer, None).unwrap());
    }
}

/// Memory that nobody could wait for is never freed under those who use it.
#[test]
fn what_cannot_be_waited_for_is_not_freed() {
    for mode in MODES {
        for pools in [1, 0] {
            for rules in ["cuCtxSynchronize:*:999", "cuStreamSynchronize:1:999", "cuStreamSynchronize:*:2"] {
                runs_well("scenario_no_wait", true, |run| {
                    run.set("MODE", mode).set("POOLS", pools).fail(rules)
                });
            }
        }
    }
}

#[test]
#[ignore = "scenario"]
fn scenario_no_wait() {
    let raw = Raw::new();
    primary(&raw);
    let stream = raw.stream().unwrap();
    let case = equal_layers(3, 1 << 20);
    let results: Vec<u64> = (0..3).map(|_| raw.allocate(1 << 20).unwrap()).collect();
    let loader = builder().hand_out(HandOut::AtOnce).build().unwrap();
    for (layer, &result) in loader.stream(&case.checkpoint).unwrap().zip(&results) {
        let layer = layer.unwrap();
        // SAFETY: a live stream.
        unsafe { layer.let_wait(stream) }.unwrap();
        let address = layer.tensors().next().unwrap().device_pointer().unwrap();
        assert!(raw.kernel(address, result, 1 << 20, stream));
    }
    drop(loader);
    // The results stay: nothing says when they are over.
}

/// Pinned memory that the driver keeps is kept too: whatever came to lie at its address would pass
/// for pinned.
#[test]
fn memory_that_stays_pinned_stays_mapped() {
    for rules in ["cuMemHostUnregister:*:999", "cuMemHostUnregister:1:999"] {
        runs_well("scenario_stays_pinned", true, |run| run.fail(rules));
    }
}

#[test]
#[ignore = "scenario"]
fn scenario_stays_pinned() {
    let case = Case::decoder(6, 400_000);
    // Of several sizes, so that one comes to lie where another was.
    for host_budget_bytes in [40 << 20, 6 << 20, 9 << 20, 20 << 20] {
        let loader = builder().host_budget(host_budget_bytes).build().unwrap();
        for layer in loader.stream(&case.checkpoint).unwrap() {
            case.check_layer(&layer.unwrap(), None).unwrap();
        }
        let stream = loader.stream(&case.checkpoint).unwrap();
        assert_eq!(stream.report().pinning, onelayer::Pinning::Whole);
        drop(stream);
    }
}

/// What callers may do without promising anything.
#[test]
fn odd_callers_do_no_harm() {
    for mode in MODES {
        runs_well("scenario_odd_callers", false, |run| run.set("MODE", mode));
        let outcome = SimRun::again(module_path!(), "scenario_forgetful").set("MODE", mode).run();
        outcome.assert_success();
        assert!(outcome.report().violations().is_empty(), "{:?}", outcome.report().violations());
    }
}

#[test]
#[ignore = "scenario"]
fn scenario_odd_callers() {
    let refused = |builder: onelayer::LoaderBuilder, case: &Case| {
        builder.build().and_then(|loader| loader.load(&case.checkpoint).map(drop)).unwrap_err()
    };
    let case = Case::decoder(3, 200_000);
    let error = refused(Loader::builder(Target::Cuda(u32::MAX)), &case).to_string();
    assert!(error.starts_with("no CUDA device 4294967295: the driver shows 1"), "{error}");
    assert!(refused(builder().device_reserve(u64::MAX), &case).is_out_of_device_memory());
    assert!(matches!(refused(builder().host_budget(0), &case), LoadError::Plan(_)));
    assert!(matches!(refused(builder().device_budget(1), &case), LoadError::Plan(_)));

    // Ten loads at once in one context, each with its own idea of a window.
    let loader = builder().window(Window::Layers(99)).prefetch(u32::MAX).build().unwrap();
    std::thread::scope(|scope| {
        for number in 0..10 {
            let (case, loader) = (&case, &loader);
            scope.spawn(move || {
                let layers =
                    loader.stream(&case.checkpoint).unwrap().take(if number % 3 == 0 { 2 } else { 99 });
                layers.for_each(|layer| case.check_layer(&layer.unwrap(), None).unwrap());
            });
        }
    });

    // A file that is cut while it is loaded: an error, and what was handed out stays right.
    let cut = Case::decoder(6, 300_000);
    let loader = builder().window(Window::Layers(1)).prefetch(0).build().unwrap();
    let mut stream = loader.stream(&cut.checkpoint).unwrap();
    let first = stream.next().unwrap().unwrap();
    let second_shard = cut.folder.path().join("model-00002-of-00002.safetensors");
    let file = std::fs::File::options().write(true).open(second_shard).unwrap();
    file.set_len(file.metadata().unwrap().len() / 2).unwrap();
    cut.check_layer(&first, None).unwrap();
    drop(first);
    let error = stream.find_map(Result::err).expect("half of the bytes are gone");
    assert!(matches!(error, LoadError::Source(_)), "{error}");
    assert!(stream.next().is_none());

    // Thousands of tensors, few of them with bytes; a panic between two layers.
    let tiny = |number: usize| {
        let name = format!("model.layers.{}.t{}.weight", number % 12, number / 12);
        TestTensor::random(name, number % 3, number as u64)
    };
    let tiny = Case::of(&[(0..6000).map(tiny).collect()]);
    let loader = builder().hand_out(HandOut::AtOnce).layer_map(one_stack()).build().unwrap();
    let ended = std::panic::catch_unwind(AssertUnwindSafe(|| {
        for (number, layer) in loader.stream(&tiny.checkpoint).unwrap().enumerate() {
            let layer = layer.unwrap();
            tiny.check(&layer.tensors().nth(number).unwrap(), None).unwrap();
            assert!(number < 4, "the caller panics");
        }
    }));
    assert!(ended.is_err());
    let model = loader.load(&tiny.checkpoint).unwrap();
    let tensors = model.layers().flat_map(LoadedLayer::tensors).count();
    assert_eq!(tensors, 6000);
}

/// Streams, layers and tensors that are forgotten, and a fork in between.
#[test]
#[ignore = "scenario"]
fn scenario_forgetful() {
    let case = Case::decoder(5, 200_000);
    let loader = builder().window(Window::Layers(3)).build().unwrap();
    for round in 0..4 {
        let mut stream = loader.stream(&case.checkpoint).unwrap();
        let layer = stream.next().unwrap().unwrap();
        let tensor = layer.tensors().next().unwrap();
        let status = std::process::Command::new("true").status().unwrap();
        assert!(status.success(), "a fork");
        case.check(&tensor, None).unwrap();
        match round {
            0 => std::mem::forget(stream),
            1 => std::mem::forget(layer),
            2 => std::mem::forget(tensor),
            _ => {}
        }
    }
    // Whatever is left behind: the next load is like any other.
    for layer in loader.stream(&case.checkpoint).unwrap() {
        case.check_layer(&layer.unwrap(), None).unwrap();
    }
}

/// What the host has in its memory is the budget and the slack, however many layers there are and
/// however they are held.
#[test]
fn host_memory_is_what_was_budgeted() {
    for mode in MODES {
        runs_well("scenario_host_memory", false, |run| run.set("MODE", mode));
    }
}

#[test]
#[ignore = "scenario"]
fn scenario_host_memory() {
    const BUDGET_BYTES: u64 = 12 << 20;
    const SLACK_BYTES: u64 = 16 << 20;
    let case = Case::decoder(40, 200_000);
    let Case { folder, checkpoint, tensors } = case;
    drop((checkpoint, tensors));
    let loader = builder().host_budget(BUDGET_BYTES).window(Window::All).hand_out(HandOut::AtOnce);
    let loader = loader.build().unwrap();
    let rss_bytes = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        1024 * line.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
    };
    // The highest so far is forgotten.
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = rss_bytes();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let mut stream = loader.stream(&checkpoint).unwrap();
    let layers: Vec<LoadedLayer> = stream.by_ref().map(Result::unwrap).collect();
    let bytes: u64 = layers.iter().map(LoadedLayer::tensor_bytes).sum();
    assert!(bytes > 3 * (BUDGET_BYTES + SLACK_BYTES) / 2);
    layers.iter().for_each(|layer| {
        assert!(layer.tensors().all(|tensor| tensor.hash().unwrap().is_some()));
    });
    let peak = rss_bytes() - before;
    println!("peak: {peak}");
    assert!(peak <= BUDGET_BYTES + SLACK_BYTES, "{peak}");
}
