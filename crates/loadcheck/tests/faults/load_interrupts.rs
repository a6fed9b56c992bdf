//! Loads that somebody ends, and loads whose disk does not answer: a signal at any call, a cancel
//! at any byte, reads that never come back, reads that come back short, and a wall clock that
//! jumps.
//!
//! The program runs behind a library of ours that counts its calls on the checkpoint over all of
//! its processes (`load_support/shim.c`), so a point is a place in the load and not a time.
//! `ONELAYER_TRIALS=500 cargo test --test faults load_interrupts -- --nocapture` draws more points
//! than each run does.
#![allow(
    clippy::unwrap_used,
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    clippy::print_stdout,
    reason = "a test that cannot go on panics, and says what it counted"
)]

use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use crate::load_support::{End, SOURCES, Shim, World};
use crate::support::{loadcheck, stderr};
use onelayer::{Awaited, Checkpoint, IoMode, LoadError, Loader, Target, Window};
use onelayer_testing::{Random, small_decoder, write_sharded};

/// How soon a load ends that is asked to.
const PATIENCE: Duration = Duration::from_secs(2);
const SIGINT: u64 = 2;
const SIGKILL: u64 = 9;
const SIGTERM: u64 = 15;
/// A stall that no test waits for.
const FOR_EVER_MS: u64 = 3_600_000;

/// Where the scenario finds its checkpoint.
const CHECKPOINT: &str = "ONELAYER_TEST_CHECKPOINT";
/// How long each read of a tensor takes there.
const SLICES_STALL_MS: u64 = 3000;

/// One test at a time: times are measured.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> impl Drop {
    ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn trials(default: u64) -> u64 {
    std::env::var("ONELAYER_TRIALS").map_or(default, |text| text.parse().unwrap())
}

/// Prints how long things took, and fails if a hundredth of them took longer than they may.
#[track_caller]
fn conclude(what: &str, mut times: Vec<Duration>) {
    times.sort();
    let at = |share: usize| times[(times.len() - 1) * share / 100];
    println!(
        "{what}: {} points, p50 {:.2?}, p99 {:.2?}, longest {:.2?}",
        times.len(),
        at(50),
        at(99),
        at(100)
    );
    assert!(at(99) <= PATIENCE, "{what}: {:?}", at(99));
}

/// Calls on the checkpoint that an undisturbed load makes.
fn points(shim: &Shim, world: &World, io: &str) -> u64 {
    let place = world.place("counted");
    let (output, _, counted) = shim.run(world, io, &place, &[]);
    assert_eq!(world.judge(&output), Ok(End::Delivered), "{io}");
    assert!(counted.points > 30, "{io}: {counted:?}");
    counted.points
}

/// As Ctrl-C does it, to all processes of the program at once.
#[test]
fn a_signal_at_any_call_ends_it_in_time_and_leaves_nothing() {
    let _alone = alone();
    let Some(shim) = Shim::get() else { return };
    let world = World::new();
    let mut random = Random(11);
    let (mut times, mut too_late) = (Vec::new(), 0);
    let totals = SOURCES.map(|io| (io, points(shim, &world, io)));
    for trial in 0..trials(60) {
        let (io, total) = totals[trial as usize % totals.len()];
        let (signal, code) = random.of(&[(SIGINT, 130), (SIGINT, 130), (SIGTERM, 143), (SIGKILL, 137)]);
        // The first is a look for the source: nothing has begun by then, and the signal ends the program as
        // it ends any.
        let at = 2 + random.below(total - 1);
        let place = world.place("signalled");
        let settings = [("SHIM_SIGNAL", signal), ("SHIM_SIGNAL_AT", at)];
        let (output, took, counted) = shim.run(&world, io, &place, &settings);
        let what = format!("{io}, signal {signal} at call {at} of {total}");
        let end = world.judge(&output).unwrap_or_else(|problem| panic!("{what}: {problem}"));
        if !counted.is_fired() {
            // Threads that race make a call less now and then.
            assert_eq!(end, End::Delivered, "{what}");
            continue;
        }
        match signal {
            SIGKILL => assert_eq!(end, End::Killed, "{what}"),
            // Over by then, and right.
            _ if end == End::Delivered => {
                too_late += 1;
                continue;
            }
            _ => assert_eq!(
                (end, output.status.code()),
                (End::Interrupted, Some(code)),
                "{what}: {}",
                stderr(&output)
            ),
        }
        assert_eq!(World::leftovers(&place), [""; 0], "{what}");
        if took > PATIENCE / 2 {
            println!("{what}: {took:.2?}");
        }
        times.push(took);
    }
    println!("{too_late} loads were over when their signal came");
    assert!(too_late * 10 < times.len());
    conclude("from a signal to the end", times);
}

/// Every read from some point on hangs, whatever signals come: the program ends in time
/// nevertheless.
#[test]
fn a_disk_that_hangs_does_not_hold_up_an_interrupt() {
    let _alone = alone();
    let Some(shim) = Shim::get() else { return };
    let world = World::new();
    let mut random = Random(12);
    let mut times = Vec::new();
    for trial in 0..trials(5).min(50) {
        let io = SOURCES[trial as usize % SOURCES.len()];
        let total = points(shim, &world, io);
        let at = 1 + random.below(total - 12);
        let (signal, code) = random.of(&[(SIGINT, 130), (SIGTERM, 143)]);
        let place = world.place("stalled");
        // The signal comes once it hangs, from outside.
        let settings =
            [("SHIM_STALL_AT", at), ("SHIM_STALL_MS", FOR_EVER_MS), ("SHIM_SIGNAL_WHEN_STALLED", signal)];
        let (output, took, counted) = shim.run(&world, io, &place, &settings);
        let what =
            format!("{io}, signal {signal}, hanging from call {at} of {total} on: {}", stderr(&output));
        if !counted.is_fired() {
            continue;
        }
        assert_eq!(world.judge(&output), Ok(End::Interrupted), "{what}");
        assert_eq!(output.status.code(), Some(code), "{what}");
        assert_eq!(World::leftovers(&place), [""; 0], "{what}");
        times.push(took);
    }
    conclude("from a signal to the end, with a disk that hangs", times);
}

/// The first tensors take long to come: whoever waits is told so, and gets them.
#[test]
fn a_standstill_is_told() {
    let _alone = alone();
    let Some(shim) = Shim::get() else { return };
    let world = World::new();
    let place = world.place("told");
    let settings = [("SHIM_STALL_MS", 3500), ("SHIM_STALL_BYTES", 20_000), ("SHIM_STALL_MOST", 1)];
    for (mode, told) in [("plain", "  nothing arrived for 3 s  "), ("json", "\"standstill_seconds\":3.")] {
        let mut command = loadcheck(&place);
        command.arg("run").arg(&world.model).args(["--io", "buffered", "--device", "host", "--readers", "1"]);
        command.args(["--verify", "--hash", "--json", "--progress", mode]);
        let (output, _, counted) = shim.run_command(&world, command, &place, &settings);
        assert_eq!(world.judge(&output), Ok(End::Delivered), "{}", stderr(&output));
        assert_eq!(counted.stalls, 1);
        assert!(stderr(&output).contains(told), "{}", stderr(&output));
    }
}

/// In the library: whoever waits in slices gets every slice back in time, and may give up. What the
/// system has begun is waited for.
#[test]
fn a_caller_that_waits_in_slices_has_a_deadline_of_its_own() {
    let _alone = alone();
    let Some(shim) = Shim::get() else { return };
    let world = World::new();
    let mut command = onelayer_testing::again(module_path!(), "scenario_slices");
    command.arg("--ignored").env(CHECKPOINT, &world.model);
    shim.put_before(
        &mut command,
        &world,
        &[("SHIM_STALL_MS", SLICES_STALL_MS), ("SHIM_STALL_BYTES", 20_000)],
    );
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("given up after"), "{text}{}", stderr(&output));
    println!("{}", text.lines().find(|line| line.contains("given up after")).unwrap());
}

#[test]
#[ignore = "scenario"]
fn scenario_slices() {
    let Some(model) = std::env::var_os(CHECKPOINT) else { return };
    let checkpoint = Checkpoint::open(model).unwrap();
    let loader = Loader::builder(Target::Host).io(IoMode::Buffered).host_budget(8 << 20).build().unwrap();
    let start = Instant::now();
    let mut stream = loader.stream(&checkpoint).unwrap();
    for _ in 0..3 {
        let asked = Instant::now();
        assert!(matches!(stream.next_within(Duration::from_millis(100)), Ok(Awaited::NotYet)));
        assert!(asked.elapsed() < Duration::from_secs(1), "{:?}", asked.elapsed());
    }
    assert_eq!(stream.progress().read_bytes(), 0);
    let given_up = start.elapsed();
    stream.cancel_handle().cancel();
    assert!(matches!(stream.next(), Some(Err(LoadError::Cancelled))));
    drop(stream);
    let stall = Duration::from_millis(SLICES_STALL_MS);
    assert!(start.elapsed() < stall + PATIENCE, "{:?}", start.elapsed());
    println!("given up after {given_up:.2?}, over after {:.2?}: a read takes {stall:?}", start.elapsed());
}

/// A slow disk is no error: what it delivers late is right.
#[test]
fn a_slow_disk_is_waited_for() {
    let _alone = alone();
    let Some(shim) = Shim::get() else { return };
    let world = World::new();
    for io in SOURCES {
        let settings = [("SHIM_STALL_AT", 1), ("SHIM_STALL_MS", 20)];
        let (output, _, counted) = shim.run(&world, io, &world.place("slow"), &settings);
        assert_eq!(world.judge(&output), Ok(End::Delivered), "{io}: {}", stderr(&output));
        assert!(counted.stalls > 10, "{io}: {counted:?}");
    }
}

#[test]
fn short_and_interrupted_reads_come_to_the_right_bytes() {
    let _alone = alone();
    let Some(shim) = Shim::get() else { return };
    let world = World::new();
    let (mut short_reads, mut interrupts, mut loads) = (0, 0, 0);
    for io in SOURCES {
        let shortest = if io == "buffered" { 64 } else { 777 };
        for short in [shortest, 4096, 100_000] {
            let settings = [("SHIM_SHORT", short), ("SHIM_EINTR_EVERY", 3)];
            let (output, _, counted) = shim.run(&world, io, &world.place("short"), &settings);
            assert_eq!(world.judge(&output), Ok(End::Delivered), "{io}, {short}: {}", stderr(&output));
            assert!(counted.short_reads > 0 && counted.interrupts > 0, "{io}, {short}: {counted:?}");
            loads += 1;
            short_reads += counted.short_reads;
            interrupts += counted.interrupts;
        }
    }
    println!("{loads} loads with {short_reads} short and {interrupts} interrupted reads: 0 wrong bytes");
}

/// To and fro by a hundred years at each look: what waits does so by another clock.
#[test]
fn a_wall_clock_that_jumps_changes_nothing() {
    let _alone = alone();
    let Some(shim) = Shim::get() else { return };
    let world = World::new();
    for io in SOURCES {
        for seconds in [86_400, 3_155_760_000] {
            let settings = [("SHIM_CLOCK", seconds)];
            let (output, _, counted) = shim.run(&world, io, &world.place("clock"), &settings);
            assert_eq!(world.judge(&output), Ok(End::Delivered), "{io}: {}", stderr(&output));
            println!("{io}: {} looks at the clock", counted.clock_looks);
        }
    }
}

/// In the library: another thread cancels once so many bytes have been read, at any number of them.
#[test]
fn a_cancel_at_any_byte_ends_the_load_in_time() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    write_sharded(folder.path(), &small_decoder(8, 300_000));
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let modes = [IoMode::Auto, IoMode::Buffered, IoMode::Mmap, IoMode::Direct, IoMode::Uring];
    let mut random = Random(13);
    let mut times = Vec::new();
    for trial in 0..trials(100) {
        let window = random.of(&[Window::Layers(1), Window::Layers(3), Window::All]);
        let loader =
            Loader::builder(Target::Host).io(modes[trial as usize % 5]).host_budget(8 << 20).window(window);
        let mut stream = loader.build().unwrap().stream(&checkpoint).unwrap();
        let (handle, progress) = (stream.cancel_handle(), stream.progress());
        let at = random.below(checkpoint.tensor_bytes());
        let canceller = thread::spawn(move || {
            while progress.read_bytes() < at {
                std::hint::spin_loop();
            }
            let cancelled = Instant::now();
            handle.cancel();
            cancelled
        });
        let outcome = stream.by_ref().find_map(Result::err);
        drop(stream);
        let ended = Instant::now();
        let cancelled = canceller.join().unwrap();
        match outcome {
            Some(LoadError::Cancelled) => times.push(ended.saturating_duration_since(cancelled)),
            // It was over by then.
            None => {}
            Some(other) => panic!("{other}"),
        }
    }
    assert!(times.len() > 50, "{} cancels came in time", times.len());
    conclude("from a cancel to the end", times);
}
