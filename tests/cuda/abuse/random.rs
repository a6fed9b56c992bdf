//! Callers and faults that a seed chooses: loads with any options, layers used and dropped in any
//! way, calls that fail.
//!
//! Whatever happens, every byte that is read is right or there is an error; nothing hangs, nothing
//! is misused, and what can be given back is.

use super::*;

/// What a caller has of its own.
struct Own<'a> {
    raw: &'a Raw,
    /// The context that layers are loaded into.
    context: u64,
    /// What this thread has current, and shall have.
    current: u64,
    stream: Option<u64>,
}

impl Own<'_> {
    /// Does what an engine does, in the context of the layers.
    fn within<T>(&self, work: impl FnOnce() -> T) -> T {
        self.raw.set_current(self.context);
        let result = work();
        self.raw.set_current(self.current);
        result
    }

    fn assert_untouched(&self) {
        if text("ONELAYER_FAULTS").is_empty() {
            assert_eq!(self.raw.current(), self.current, "the thread's own context");
        }
    }
}

/// What a kernel has written, and what it should have.
struct Written {
    result: u64,
    expected: Vec<u8>,
    stream: u64,
}

/// One load with options and a caller that the dice choose.
fn random_load(case: &Case, own: &Own<'_>, dice: &mut Dice) -> Result<(), LoadError> {
    let dtype = dice.of(&[None, None, Some(FloatType::Bf16), Some(FloatType::F32)]);
    let window = 1 + dice.below(4) as u32;
    let hand_out = dice.of(&[HandOut::AtOnce, HandOut::WhenComplete]);
    let mut builder = Loader::builder(Target::Cuda(0))
        .host_budget(dice.of(&[7 << 20, 6 << 20, 9 << 20, 40 << 20]))
        .window(if dice.is(15) { Window::All } else { Window::Layers(window) })
        .prefetch(dice.of(&[0, 1, 2, 7, u32::MAX]))
        .hand_out(hand_out)
        .readers(1 + dice.below(4) as u32)
        .stall_timeout(Duration::from_secs(20))
        .layer_map(one_stack())
        .io(dice.of(&[IoMode::Auto, IoMode::Buffered, IoMode::Mmap, IoMode::Direct]));
    if let Some(dtype) = dtype {
        builder = builder.dtype(dtype);
    }
    // SAFETY: context and stream outlive the loader and its layers, which are dropped in this function.
    builder = unsafe { builder.cuda_context(own.context) };
    let stream = own.stream;
    if let Some(stream) = stream.filter(|_| dice.is(40)) {
        // SAFETY: as above.
        builder = unsafe { builder.cuda_stream(stream) };
    }
    let mut regions = BTreeMap::new();
    if dice.is(30) {
        for layer in builder.plan(&case.checkpoint)?.layers() {
            if layer.arena_bytes == 0 || dice.is(50) {
                continue;
            }
            if let Some(address) = own.within(|| own.raw.allocate(layer.arena_bytes as usize)) {
                regions.insert(layer.id.to_string(), (address, layer.arena_bytes));
            }
        }
        let given = regions.clone();
        let panics = dice.is(4);
        let destination = move |layer: &onelayer::plan::PlannedLayer| {
            assert!(!panics, "a callback of the caller's panics");
            given.get(layer.id.as_str()).map(|&(address, len_bytes)| DeviceRegion { address, len_bytes })
        };
        // SAFETY: the regions are freed at the end of this function.
        builder = unsafe { builder.destinations(destination) };
    }
    let mut written = Vec::new();
    let outcome = builder.build().and_then(|loader| {
        own.assert_untouched();
        run_stream(case, own, dice, &loader, dtype, &mut written)
    });
    own.assert_untouched();
    own.within(|| {
        for Written { result, expected, stream } in written {
            let mut found = vec![0_u8; expected.len()];
            let code = raw!(
                own.raw,
                "cuMemcpyDtoHAsync_v2",
                (*mut u8, u64, usize, u64),
                found.as_mut_ptr(),
                result,
                found.len(),
                stream
            );
            if code == 0 && own.raw.synchronize(stream) {
                assert!(found == expected, "a kernel has seen something else");
            }
            if own.raw.settle() {
                own.raw.free(result);
            } else {
                std::mem::forget(found);
            }
        }
        if own.raw.settle() {
            regions.values().for_each(|&(address, _)| own.raw.free(address));
        }
    });
    match outcome {
        Err(LoadError::Cancelled | LoadError::Panicked { .. }) => Ok(()),
        outcome => outcome,
    }
}

fn run_stream(
    case: &Case,
    own: &Own<'_>,
    dice: &mut Dice,
    loader: &Loader,
    dtype: Option<FloatType>,
    written: &mut Vec<Written>,
) -> Result<(), LoadError> {
    let layers_max = loader.plan(&case.checkpoint)?.window();
    let kept_max = match layers_max {
        Window::Layers(layers) => layers as usize - 1,
        Window::All | Window::Bytes(_) => usize::MAX,
    };
    let mut layers = loader.stream(&case.checkpoint)?;
    own.assert_untouched();
    let give_up_at = if dice.is(25) { dice.below(5) } else { usize::MAX };
    let cancels = dice.is(50);
    let mut kept: Vec<LoadedLayer> = Vec::new();
    let mut tensors: Vec<LoadedTensor> = Vec::new();
    let mut outcome = Ok(());
    let mut taken = 0;
    loop {
        if taken == give_up_at {
            if cancels {
                layers.cancel_handle().cancel();
            } else {
                break;
            }
        }
        let layer = match layers.next() {
            None => break,
            Some(Ok(layer)) => layer,
            Some(Err(error)) => {
                outcome = Err(error);
                break;
            }
        };
        own.assert_untouched();
        taken += 1;
        outcome = use_layer(case, own, dice, &layer, dtype, written);
        own.assert_untouched();
        match dice.below(5) {
            0 | 1 => drop(layer),
            2 => std::thread::scope(|scope| {
                scope.spawn(|| drop(layer));
            }),
            3 => {
                tensors.extend(layer.tensors().next());
                drop(layer);
            }
            _ => kept.push(layer),
        }
        while kept.len() + tensors.len() > kept_max {
            if !kept.is_empty() && dice.is(50) {
                drop(kept.swap_remove(dice.below(kept.len())));
            } else if !tensors.is_empty() {
                drop(tensors.swap_remove(dice.below(tensors.len())));
            }
        }
        if outcome.is_err() {
            break;
        }
    }
    let layers = if dice.is(50) { Some(layers) } else { None };
    for layer in &kept {
        let checked = case.check_layer(layer, dtype);
        outcome = outcome.and(checked);
    }
    std::thread::scope(|scope| {
        scope.spawn(move || drop(kept));
        drop(tensors);
    });
    drop(layers);
    own.assert_untouched();
    outcome
}

/// What callers do with a layer: nothing, read it (from several threads), let kernels read it and
/// say when they are over.
fn use_layer(
    case: &Case,
    own: &Own<'_>,
    dice: &mut Dice,
    layer: &LoadedLayer,
    dtype: Option<FloatType>,
    written: &mut Vec<Written>,
) -> Result<(), LoadError> {
    match dice.below(6) {
        0 => return Ok(()),
        1 => return case.check_layer(layer, dtype),
        2 => {
            return std::thread::scope(|scope| {
                let threads = [(); 3].map(|()| scope.spawn(|| case.check_layer(layer, dtype)));
                threads.into_iter().try_for_each(|thread| thread.join().unwrap())
            });
        }
        3 => {
            for tensor in layer.tensors() {
                let hash = tensor.hash()?.unwrap();
                let expected = case.expected(tensor.name(), dtype);
                let name = format!("{:?} {dtype:?}", tensor.entry());
                case.check(&tensor, dtype)?;
                assert_eq!(hash.as_bytes(), blake3::hash(&expected).as_bytes(), "{name}");
            }
            return Ok(());
        }
        _ => {}
    }
    let stream = own.stream.filter(|_| dice.is(80)).unwrap_or(0);
    // SAFETY: a live stream of the context, or the legacy default one. Where that is refused, nothing
    // uses the layer.
    own.within(|| unsafe { layer.let_wait(stream) })?;
    for tensor in layer.tensors() {
        let expected = case.expected(tensor.name(), dtype);
        if expected.is_empty() {
            continue;
        }
        let address = tensor.device_pointer().unwrap();
        own.within(|| {
            let Some(result) = own.raw.allocate(expected.len()) else { return };
            if own.raw.kernel(address, result, expected.len(), stream) {
                written.push(Written { result, expected, stream });
            } else if own.raw.settle() {
                own.raw.free(result);
            }
        });
    }
    for _ in 0..dice.below(4) {
        // Refused or not: the layer must stay until the kernels are over.
        let _ = own.within(|| match dice.is(50) {
            // SAFETY: a live stream, the one of all kernels that use the layer.
            true => unsafe { layer.release_after(After::Stream(stream)) },
            false => match own.raw.event(stream) {
                Some(event) => {
                    // SAFETY: a live event behind all kernels that use the layer.
                    let ordered = unsafe { layer.release_after(After::Event(event)) };
                    raw!(own.raw, "cuEventDestroy_v2", (u64), event);
                    ordered
                }
                None => Ok(()),
            },
        });
    }
    Ok(())
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).ok());
    names.filter(|name| name.starts_with("onelayer-")).count()
}

#[test]
#[ignore = "scenario"]
fn scenario_random() {
    if text("ONELAYER_FAULTS").is_empty() {
        return random_loads();
    }
    // Contexts that this thread cannot leave in the end are no fault of the library's: it never ends.
    let (sender, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let outcome = std::panic::catch_unwind(random_loads);
        sender.send(outcome.is_ok()).unwrap();
        loop {
            std::thread::park();
        }
    });
    std::process::exit(i32::from(!ended.recv().unwrap()));
}

fn random_loads() {
    let mut dice = Dice(number("ONELAYER_SEED"));
    let case = Case::random(&mut dice);
    let raw = Raw::new();
    let mut device = 0;
    let mut primary = 0;
    raw!(raw, "cuDeviceGet", (*mut i32, i32), &raw mut device, 0);
    let has_primary = raw!(raw, "cuDevicePrimaryCtxRetain", (*mut u64, i32), &raw mut primary, device) == 0;
    let other = raw.context();
    let mut own = Own { raw: &raw, context: primary, current: 0, stream: None };
    if let Some(other) = other {
        own.context = if dice.is(40) { other } else { primary };
        own.current = dice.of(&[0, primary, other]);
    }
    own.stream = own.within(|| raw.stream());
    let free_before = own.within(|| raw.free_bytes());
    let mut ending = String::from("complete");
    let mut files = 0;
    for round in 0..number("ONELAYER_ROUNDS") {
        if let Err(error) = random_load(&case, &own, &mut dice) {
            ending = format!("error: {error}");
        }
        if ending == "complete" && text("ONELAYER_FAULTS").is_empty() {
            let free_after = own.within(|| raw.free_bytes());
            assert_eq!(free_after, free_before, "round {round}");
            if round == 0 {
                files = open_files();
            }
            // A thread that has been joined may be listed for a moment.
            for _ in 0..100 {
                if threads() == 0 {
                    break;
                }
                std::thread::sleep(Duration::from_millis(2));
            }
            assert_eq!(threads(), 0, "round {round}");
            assert!(open_files() <= files, "round {round}");
        }
    }
    if let Some(stream) = own.stream {
        own.within(|| raw!(raw, "cuStreamDestroy_v2", (u64), stream));
    }
    raw.set_current(0);
    if let Some(other) = other {
        raw!(raw, "cuCtxDestroy_v2", (u64), other);
    }
    if has_primary {
        raw!(raw, "cuDevicePrimaryCtxRelease_v2", (i32), device);
    }
    println!("outcome: {ending}");
}

fn random_run(seed: u64, rounds: u64, change: impl FnOnce(SimRun) -> SimRun) -> SimOutcome {
    let run = SimRun::again(module_path!(), "scenario_random")
        .env("ONELAYER_SEED", seed.to_string())
        .env("ONELAYER_ROUNDS", rounds.to_string())
        .set("SEED", seed)
        .set("DELAY_US", 50);
    change(run).run()
}

fn plain_random(seed: u64, rounds: u64) {
    let mut dice = Dice(seed ^ 0xABCD);
    let (mode, pools) = (dice.of(&MODES), if dice.is(25) { 0 } else { 1 });
    let pinned = if dice.is(15) { "4M" } else { "1G" };
    let outcome =
        random_run(seed, rounds, |run| run.set("MODE", mode).set("POOLS", pools).set("PINNED", pinned));
    let is_well = outcome.status.success() && outcome.stdout.contains("outcome: complete");
    assert!(is_well, "seed {seed}: {:?}\n{}\n{}", outcome.status, outcome.stdout, outcome.stderr);
    outcome.report().assert_clean();
}

/// A few of what `fuzz_plain` and `fuzz_faults` do for as long as one likes.
#[test]
fn random_callers_and_faults() {
    (1..7).for_each(|seed| plain_random(seed, 2));
    let words: Vec<String> = (1..25).filter_map(faulty_random).collect();
    assert!(words.is_empty(), "{}", words.join("\n"));
}

/// `ONELAYER_START=1 ONELAYER_COUNT=1000 cargo test -p onelayer --test cuda
/// abuse::random::fuzz_plain -- --ignored --exact --nocapture`
#[test]
#[ignore = "long"]
fn fuzz_plain() {
    let start = number("ONELAYER_START");
    let mut failed = Vec::new();
    for seed in start..start + number("ONELAYER_COUNT") {
        if std::panic::catch_unwind(|| plain_random(seed, 4)).is_err() {
            failed.push(seed);
        }
    }
    assert!(failed.is_empty(), "{failed:?}");
}

/// What a load calls, by what a refusal means.
const WORK_CALLS: [&str; 18] = [
    "cuCtxPushCurrent_v2",
    "cuCtxSynchronize",
    "cuEventCreate",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuMemAllocFromPoolAsync",
    "cuMemAlloc_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemGetInfo_v2",
    "cuMemHostRegister_v2",
    "cuMemPoolCreate",
    "cuStreamCreate",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "work",
];
const RELEASE_CALLS: [&str; 7] = [
    "cuEventDestroy_v2",
    "cuMemFreeAsync",
    "cuMemFree_v2",
    "cuMemHostUnregister",
    "cuMemPoolDestroy",
    "cuMemPoolTrimTo",
    "cuStreamDestroy_v2",
];

/// Some faults, as the driver's setting. Second: true if something may have to be leaked.
fn random_faults(dice: &mut Dice) -> (String, bool) {
    let mut rules = Vec::new();
    let mut may_leak = false;
    for _ in 0..dice.of(&[1, 1, 2, 2, 3]) {
        let is_release = dice.is(25);
        let function = match is_release {
            true => dice.of(&RELEASE_CALLS),
            false => dice.of(&WORK_CALLS),
        };
        let most = dice.of(&[3, 20, 60]);
        let at = 1 + dice.below(most);
        let plus = if dice.is(30) { "+" } else { "" };
        let fatal = dice.of(&[4, 700, 719]);
        let code = if function == "work" { fatal } else { dice.of(&[1, 2, 600, 999, fatal]) };
        may_leak |= plus == "+" || is_release;
        let mark = match dice.below(10) {
            0 if code == fatal => "!",
            1 if !is_release && function.starts_with("cuMemcpy") => "~",
            _ => "",
        };
        rules.push(format!("{function}:{at}{plus}:{code}{mark}"));
    }
    if dice.is(20) {
        let code = dice.of(&[1, 2, 999, 700]);
        rules.push(format!("*:{}:{code}", 1 + dice.below(600)));
    }
    (rules.join(","), may_leak || rules.len() > 1)
}

fn faulty_random(seed: u64) -> Option<String> {
    let mut dice = Dice(seed ^ 0x5EED);
    let (mode, pools) = (dice.of(&MODES), if dice.is(30) { 0 } else { 1 });
    let lost = dice.of(&["work", "calls", "all"]);
    let (rules, may_leak) = random_faults(&mut dice);
    let what = format!("seed {seed}: {mode}, pools {pools}, lost {lost}, {rules}");
    let run = std::panic::catch_unwind(|| {
        random_run(seed, 2, |run| {
            let run = run.set("MODE", mode).set("POOLS", pools).set("LOST", lost).fail(&rules);
            run.env("ONELAYER_FAULTS", "1").timeout(Duration::from_secs(40))
        })
    });
    let Ok(outcome) = run else { return Some(format!("{what}: hangs")) };
    let words = || format!("{what}: {:?}\n{}\n{}", outcome.status, outcome.stdout, outcome.stderr);
    if !outcome.status.success() || !outcome.stdout.contains("outcome: ") {
        return Some(words());
    }
    let report = outcome.reports.first()?;
    let mut violations = report.violations();
    // What nobody can give back any more goes with its context.
    violations.retain(|violation| !may_leak || violation.kind != "context_released_in_use");
    // What is given back is given back, in whatever context, if none can be entered.
    // The context that this process has made for itself pops itself when it is destroyed.
    violations.retain(|violation| violation.kind != "unbalanced_pop");
    let enters = !rules.contains("cuCtxPushCurrent_v2") && !rules.contains('*');
    violations.retain(|violation| enters || !matches!(&*violation.kind, "no_context" | "wrong_context"));
    if !violations.is_empty() {
        return Some(format!("{}\n{:?}", words(), &violations[..violations.len().min(3)]));
    }
    (!may_leak && !report.leaks().is_empty()).then(|| format!("{}\n{:?}", words(), report.leaks()))
}

/// `ONELAYER_START=1 ONELAYER_COUNT=1000 cargo test -p onelayer --test cuda
/// abuse::random::fuzz_faults -- --ignored --exact --nocapture`
#[test]
#[ignore = "long"]
fn fuzz_faults() {
    let start = number("ONELAYER_START");
    let seeds = start..start + number("ONELAYER_COUNT");
    let found = seeds.filter_map(faulty_random).inspect(|words| eprintln!("{words}")).count();
    assert_eq!(found, 0);
}
