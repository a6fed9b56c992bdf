//! The state of the simulated driver. Every exported function accesses it through [`call`].

use std::cell::Cell;
use std::collections::BTreeMap;
use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use self::context::{Context, Entry};
use self::host::Pinned;
use self::memory::{Allocation, Device};
use self::pool::Pool;
use self::scheduler::{DefaultStreams, Event, Stream};
use crate::clock::Clock;
use crate::code::{Answer, Code};
use crate::config::{Config, Mode};
use crate::faults::Faults;
use crate::ledger::{Injected, Ledger};
use crate::random::Random;

mod context;
mod copy;
mod execute;
mod host;
mod memory;
mod pool;
mod scheduler;

/// The kind of a call, which decides its result in a lost context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    /// A query that needs no context.
    Query,
    /// Makes a context current.
    Enter,
    /// Frees something.
    Release,
    /// Any other call.
    Work,
}

/// The whole state.
#[derive(Debug)]
pub(crate) struct Sim {
    pub(crate) config: Config,
    pub(crate) faults: Faults,
    pub(crate) ledger: Ledger,
    pub(crate) random: Random,
    pub(crate) is_initialised: bool,
    /// The process that initialised the driver. Only it writes a report.
    pub(crate) process: u32,
    pub(crate) nvml_references: u64,
    pub(crate) devices: Vec<Device>,
    pub(crate) contexts: BTreeMap<usize, Context>,
    pub(crate) stacks: BTreeMap<u64, Vec<Entry>>,
    pub(crate) streams: BTreeMap<usize, Stream>,
    pub(crate) default_streams: DefaultStreams,
    pub(crate) events: BTreeMap<usize, Event>,
    pub(crate) pools: BTreeMap<usize, Pool>,
    pub(crate) allocations: BTreeMap<u64, Allocation>,
    /// Freed ranges: start and length.
    pub(crate) freed: BTreeMap<u64, u64>,
    pub(crate) pinned: BTreeMap<usize, Pinned>,
    /// The work that the host knows to be done.
    pub(crate) host: Clock,
    handles: usize,
    log: Option<std::fs::File>,
}

/// The first handle. Handles are never reused, so a stale one is detected.
const FIRST_HANDLE: usize = 0x51AB_0000_0000;
const HANDLE_STEP: usize = 0x40;

static SIM: Mutex<Option<Sim>> = Mutex::new(None);

/// The number of a thread. Its drop reports the end of the thread.
struct Thread(Cell<u64>);

impl Drop for Thread {
    fn drop(&mut self) {
        if let Some(sim) = SIM.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            sim.end_thread(self.0.get());
        }
    }
}

thread_local! {
    static THREAD: Thread = {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Thread(Cell::new(NEXT.fetch_add(1, Ordering::Relaxed)))
    };
}

/// Locks the state. The first call creates it from the settings.
pub(crate) fn lock() -> Locked {
    let mut state = SIM.lock().unwrap_or_else(PoisonError::into_inner);
    if state.is_none() {
        *state = Some(start(""));
    }
    Locked(state)
}

/// Like [`lock`], at exit, when another thread may hold the lock for ever.
pub(crate) fn lock_if_possible() -> Option<MutexGuard<'static, Option<Sim>>> {
    for _ in 0..200 {
        match SIM.try_lock() {
            Ok(state) => return Some(state),
            Err(std::sync::TryLockError::Poisoned(state)) => return Some(state.into_inner()),
            Err(std::sync::TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(10)),
        }
    }
    None
}

/// Resets the state with other settings; false if the driver is in use.
pub(crate) fn configure(text: &str) -> bool {
    let mut state = SIM.lock().unwrap_or_else(PoisonError::into_inner);
    if state.is_some() {
        return false;
    }
    *state = Some(start(text));
    true
}

fn start(text: &str) -> Sim {
    let made = Config::read(text).and_then(|config| Sim::new(config).map_err(|error| error.to_string()));
    made.unwrap_or_else(|problem| {
        let _ = writeln!(std::io::stderr(), "simulated CUDA driver: {problem}");
        std::process::abort()
    })
}

/// The locked state.
pub(crate) struct Locked(MutexGuard<'static, Option<Sim>>);

impl std::ops::Deref for Locked {
    type Target = Sim;

    fn deref(&self) -> &Sim {
        self.0.as_ref().expect("made by `lock`")
    }
}

impl std::ops::DerefMut for Locked {
    fn deref_mut(&mut self) -> &mut Sim {
        self.0.as_mut().expect("made by `lock`")
    }
}

/// One call of the driver API.
pub(crate) fn call(function: &'static str, class: Class, body: impl FnOnce(&mut Sim) -> Answer) -> u32 {
    let mut sim = lock();
    let answer = sim.answer(function, class, body);
    let code = answer.err().map_or(0, |code| code.0);
    sim.write_log(function, code);
    code
}

/// Like [`call`] for a waiting call: sometimes delays it first, so that other threads overtake it.
pub(crate) fn waiting_call(function: &'static str, body: impl FnOnce(&mut Sim) -> Answer) -> u32 {
    let delay_us = {
        let mut sim = lock();
        let longest = usize::try_from(sim.config.delay_us).unwrap_or(0);
        let is_held_up = sim.config.mode != Mode::Eager && longest > 0 && sim.random.once_in(4);
        if is_held_up { sim.random.below(longest + 1) } else { 0 }
    };
    if delay_us > 0 {
        std::thread::sleep(Duration::from_micros(to_u64(delay_us)));
    }
    call(function, Class::Work, body)
}

impl Sim {
    fn new(config: Config) -> std::io::Result<Self> {
        let log = config.log_path.as_ref().map(std::fs::File::create).transpose()?;
        let mut sim = Self {
            faults: Faults::new(config.faults.clone()),
            ledger: Ledger::default(),
            random: Random::new(config.seed),
            is_initialised: false,
            process: 0,
            nvml_references: 0,
            devices: Vec::new(),
            contexts: BTreeMap::new(),
            stacks: BTreeMap::new(),
            streams: BTreeMap::new(),
            default_streams: BTreeMap::new(),
            events: BTreeMap::new(),
            pools: BTreeMap::new(),
            allocations: BTreeMap::new(),
            freed: BTreeMap::new(),
            pinned: BTreeMap::new(),
            host: Clock::default(),
            handles: 0,
            log,
            config,
        };
        for device in 0..sim.config.device_count {
            let sizes = &sim.config.memory_bytes;
            let total = sizes.get(device).or(sizes.last()).copied().unwrap_or(0);
            let other = sim.config.other_bytes;
            let pool = sim.new_pool(device, true);
            sim.devices.push(Device::new(device, total, other, pool)?);
        }
        Ok(sim)
    }

    fn answer(
        &mut self,
        function: &'static str,
        class: Class,
        body: impl FnOnce(&mut Self) -> Answer,
    ) -> Answer {
        let (number, fault) = self.faults.count(function);
        if let Some(fault) = fault {
            let loses = fault.is_sticky || (self.config.is_fatal_sticky && fault.code.is_fatal());
            self.ledger.injected.push(Injected { function, number, code: fault.code.0 });
            if fault.is_done {
                let _ = body(self);
            } else if loses && class == Class::Release {
                self.lose_current(fault.code);
                let _ = body(self);
            }
            if loses {
                self.lose_current(fault.code);
            }
            return Err(fault.code);
        }
        if !self.is_initialised && !matches!(function, "cuInit" | "cuDriverGetVersion") {
            self.violation("not_initialised", String::from("called before cuInit"));
            return Err(Code::NOT_INITIALIZED);
        }
        if let Some(code) = self.lost_answer(class) {
            if class == Class::Release {
                let _ = body(self);
            }
            return Err(code);
        }
        body(self)
    }

    fn write_log(&mut self, function: &str, code: u32) {
        let (thread, number) = (self.thread(), self.faults.total());
        if let Some(log) = &mut self.log {
            let _ = writeln!(log, "{number} thread {thread} {function} {code}");
        }
    }

    /// This thread's number; threads that are ending share one.
    pub(crate) fn thread(&self) -> u64 {
        THREAD.try_with(|thread| thread.0.get()).unwrap_or(u64::MAX)
    }

    /// Records misuse.
    pub(crate) fn violation(&mut self, kind: &'static str, text: String) {
        let call = self.faults.total();
        if let Some(log) = &mut self.log {
            let _ = writeln!(log, "{call} violation {kind}: {text}");
        }
        self.ledger.violation(kind, text, call);
    }

    pub(crate) fn new_handle(&mut self, _what: &'static str) -> usize {
        self.handles += 1;
        FIRST_HANDLE + self.handles * HANDLE_STEP
    }

    /// A new number, never reused.
    pub(crate) fn next_identity(&mut self) -> u64 {
        to_u64(self.new_handle("identity"))
    }

    /// Records a call with an unknown handle.
    pub(crate) fn unknown_handle(&mut self, what: &str, handle: usize) {
        let last = FIRST_HANDLE + self.handles * HANDLE_STEP;
        let was_given = (FIRST_HANDLE..=last).contains(&handle);
        let text = if was_given { "destroyed, or no" } else { "never made as a" };
        self.violation("unknown_handle", format!("{handle:#x} is {text} {what}"));
    }
}

/// Sizes of this machine fit 64 bits.
pub(crate) fn to_u64(number: usize) -> u64 {
    u64::try_from(number).expect("usize has at most 64 bits")
}
