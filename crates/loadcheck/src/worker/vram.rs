//! Device memory during a load, counted by whoever can: NVML for this process, NVML for the device,
//! the CUDA driver for the device. All that answer are reported; the first one that does is the
//! headline.
//!
//! Only the first tells this process from others. The other two see everybody, so their growth is
//! this load's alone on a device that nobody else uses meanwhile.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use onelayer::{Device, Target};
use onelayer_probe::{GpuMemory, NvmlError};

use crate::report::{Place, Unavailable, Vram};

/// The driver answers in microseconds; NVML takes a lock of its own, so it is asked less often: at
/// every so many looks.
const LOOKS_PER_NVML_SAMPLE: u32 = 4;
/// NVML is asked on behalf of layers no more often than this.
const LAYER_INTERVAL: Duration = Duration::from_millis(20);
/// Changes that are kept; of more, every second one goes.
const STEPS_MAX: usize = 8192;

/// One way of counting.
#[derive(Debug)]
struct Series {
    method: &'static str,
    baseline: Option<u64>,
    now: Option<u64>,
    peak: Option<u64>,
    peak_at: Option<Place>,
    after_load: Option<u64>,
    after_unload: Option<u64>,
    /// Why a number is missing.
    reason: Option<String>,
}

impl Series {
    fn new(method: &'static str) -> Self {
        Self {
            method,
            baseline: None,
            now: None,
            peak: None,
            peak_at: None,
            after_load: None,
            after_unload: None,
            reason: None,
        }
    }

    fn offer(&mut self, answer: Result<u64, String>, place: impl FnOnce() -> Place) {
        match answer {
            Ok(bytes) => {
                self.now = Some(bytes);
                if self.peak < Some(bytes) {
                    self.peak = Some(bytes);
                    self.peak_at = Some(place());
                }
            }
            Err(reason) => {
                self.now = None;
                self.reason.get_or_insert(reason);
            }
        }
    }

    fn report(&self) -> Vram {
        let growth = |after: u64, before: u64| {
            let (after, before) = (i64::try_from(after).ok()?, i64::try_from(before).ok()?);
            after.checked_sub(before)
        };
        let both = self.after_unload.zip(self.baseline);
        Vram {
            method: self.method.to_owned(),
            baseline_bytes: self.baseline,
            peak_bytes: self.peak,
            after_load_bytes: self.after_load,
            after_unload_bytes: self.after_unload,
            after_unload_growth_bytes: both.and_then(|(after, before)| growth(after, before)),
        }
    }
}

/// Who is asked.
trait Counters: Send {
    fn nvml_process(&mut self) -> Result<u64, String>;
    fn nvml_device(&mut self) -> Result<u64, String>;
    fn driver(&mut self) -> Result<u64, String>;
}

/// The real ones.
struct Asked {
    device: Device,
    nvml: Result<GpuMemory, NvmlError>,
    pid: u32,
}

impl Counters for Asked {
    fn nvml_process(&mut self) -> Result<u64, String> {
        let pid = self.pid;
        self.nvml
            .as_mut()
            .map_err(|error| error.to_string())?
            .of_process(pid)
            .map_err(|error| error.to_string())
    }

    fn nvml_device(&mut self) -> Result<u64, String> {
        self.nvml.as_ref().map_err(ToString::to_string)?.used_bytes().map_err(|error| error.to_string())
    }

    fn driver(&mut self) -> Result<u64, String> {
        match self.device.memory() {
            Ok(Some(memory)) => Ok(memory.used_bytes()),
            Ok(None) => Err("the device has no memory of its own".to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }
}

/// Watches the memory of one device. Asked from the thread that takes layers and from the one
/// beside it.
pub(super) struct VramMeter(Mutex<Inner>);

struct Inner {
    counters: Box<dyn Counters>,
    /// Best first.
    series: [Series; 3],
    looks: u32,
    /// When the headline changed, and to what; `None` if nobody wants to know.
    steps: Option<Vec<(Instant, u64)>>,
    /// When NVML was asked last on behalf of a layer.
    layer_asked: Option<Instant>,
}

impl VramMeter {
    /// For a device with memory of its own. Takes the baseline: the device's context is open, and
    /// so is NVML after this, so neither counts as the load's.
    pub(super) fn open(device: &Device) -> Option<Self> {
        if matches!(device.target(), Target::Host | Target::None) {
            return None;
        }
        let memory = device.memory().ok().flatten();
        let info = device.info().ok();
        let uuid = info.as_ref().and_then(|info| info.uuid.as_deref());
        let place = info.as_ref().and_then(|info| info.pci_bus_id.as_deref());
        let nvml = GpuMemory::open(uuid, place, memory.map_or(0, |memory| memory.total_bytes));
        let asked = Asked { device: device.clone(), nvml, pid: std::process::id() };
        Some(Self::with(Box::new(asked)))
    }

    fn with(counters: Box<dyn Counters>) -> Self {
        let series = ["nvml_process", "nvml_device", "driver"].map(Series::new);
        let mut inner = Inner { counters, series, looks: 0, steps: None, layer_asked: None };
        inner.sample(true, Place::default);
        for series in &mut inner.series {
            series.baseline = series.now;
        }
        Self(Mutex::new(inner))
    }

    /// Keeps the changes of the headline, too. Their list is allocated and touched here: before the
    /// baseline of host memory.
    pub(super) fn keep_steps(&self) {
        let mut steps = vec![(Instant::now(), 1); STEPS_MAX];
        steps.clear();
        let mut inner = self.inner();
        inner.steps = Some(steps);
        inner.note_step();
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A look in passing; returns the headline's peak so far.
    pub(super) fn look(&self, place: impl Fn() -> Place) -> Option<u64> {
        let mut inner = self.inner();
        inner.looks = inner.looks.wrapping_add(1);
        let with_nvml = inner.looks.is_multiple_of(LOOKS_PER_NVML_SAMPLE);
        inner.sample(with_nvml, place);
        inner.headline().peak
    }

    /// A layer is about to be dropped: what it takes is seen, however short the load. NVML is asked
    /// for the first one, and not more often than once in [`LAYER_INTERVAL`] then, so that many
    /// small layers are not held up.
    pub(super) fn layer_end(&self, place: impl Fn() -> Place) {
        let mut inner = self.inner();
        let with_nvml = inner.layer_asked.is_none_or(|asked| asked.elapsed() >= LAYER_INTERVAL);
        if with_nvml {
            inner.layer_asked = Some(Instant::now());
        }
        inner.sample(with_nvml, place);
    }

    /// The headline now, of everything that is loaded.
    pub(super) fn after_load(&self, place: impl Fn() -> Place) -> Option<u64> {
        let mut inner = self.inner();
        inner.sample(true, place);
        for series in &mut inner.series {
            series.after_load = series.now;
        }
        inner.headline().after_load
    }

    /// The headline now, everything given back.
    pub(super) fn after_unload(&self) -> Option<u64> {
        let mut inner = self.inner();
        // What comes after the load is no peak of it.
        let peaks = inner.series.each_ref().map(|series| (series.peak, series.peak_at.clone()));
        inner.sample(true, Place::default);
        for (series, (peak, at)) in inner.series.iter_mut().zip(peaks) {
            series.after_unload = series.now;
            (series.peak, series.peak_at) = (peak, at);
        }
        inner.headline().after_unload
    }

    /// The headline before the load.
    pub(super) fn baseline(&self) -> Option<u64> {
        self.inner().headline().baseline
    }

    /// Everything that was counted.
    pub(super) fn finish(&self) -> Counted {
        let inner = self.inner();
        let headline = inner.headline();
        let missing = |series: &Series| {
            let reason = series.reason.clone().filter(|_| series.is_incomplete())?;
            Some(Unavailable { metric: format!("vram.{}", series.method), reason })
        };
        let mut unavailable: Vec<Unavailable> = inner.series.iter().filter_map(missing).collect();
        if headline.peak.is_none() {
            let reason = headline.reason.clone().unwrap_or_else(|| "nothing was counted".to_owned());
            unavailable.push(Unavailable { metric: "peak.vram_bytes".to_owned(), reason });
        }
        let counted = inner.series.iter().filter(|series| series.peak.is_some());
        Counted {
            method: headline.peak.map(|_| headline.method.to_owned()),
            baseline_bytes: headline.baseline,
            peak_bytes: headline.peak,
            peak_at: headline.peak_at.clone(),
            vram: counted.map(Series::report).collect(),
            steps: inner.steps.clone().unwrap_or_default(),
            unavailable,
        }
    }
}

impl Series {
    fn is_incomplete(&self) -> bool {
        [self.baseline, self.peak, self.after_load, self.after_unload].contains(&None)
    }
}

impl Inner {
    fn sample(&mut self, with_nvml: bool, place: impl Fn() -> Place) {
        let [process, device, driver] = &mut self.series;
        driver.offer(self.counters.driver(), &place);
        if with_nvml {
            process.offer(self.counters.nvml_process(), &place);
            device.offer(self.counters.nvml_device(), &place);
        }
        self.note_step();
    }

    /// Notes the headline, if it is another one than before.
    fn note_step(&mut self) {
        let now = self.headline().now;
        let (Some(steps), Some(bytes)) = (&mut self.steps, now) else { return };
        if steps.last().is_some_and(|(_, last)| *last == bytes) {
            return;
        }
        if steps.len() == STEPS_MAX {
            for index in 0..STEPS_MAX / 2 {
                steps[index] = steps[index * 2];
            }
            steps.truncate(STEPS_MAX / 2);
        }
        steps.push((Instant::now(), bytes));
    }

    /// The best one that answered before the load: from then on it does not change.
    fn headline(&self) -> &Series {
        let [.., driver] = &self.series;
        self.series.iter().find(|series| series.baseline.is_some()).unwrap_or(driver)
    }
}

/// What was counted.
pub(super) struct Counted {
    /// How the headline was counted; `None` if nobody counted.
    pub(super) method: Option<String>,
    pub(super) baseline_bytes: Option<u64>,
    pub(super) peak_bytes: Option<u64>,
    pub(super) peak_at: Option<Place>,
    /// Every way that gave a number.
    pub(super) vram: Vec<Vram>,
    /// When the headline changed, and to what, if that was to be kept.
    pub(super) steps: Vec<(Instant, u64)>,
    pub(super) unavailable: Vec<Unavailable>,
}

impl Counted {
    /// The changes, by the time since `start`.
    pub(super) fn steps_since(&self, start: Instant) -> Vec<(Duration, u64)> {
        self.steps.iter().map(|(at, bytes)| (at.saturating_duration_since(start), *bytes)).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    /// A device that holds so much; whoever is `None` does not answer.
    struct Fake {
        held: Arc<AtomicU64>,
        offsets: [Option<u64>; 3],
    }

    impl Fake {
        fn answer(&self, which: usize) -> Result<u64, String> {
            let offset = self.offsets[which].ok_or_else(|| "does not answer".to_owned())?;
            Ok(self.held.load(Ordering::Relaxed) + offset)
        }
    }

    impl Counters for Fake {
        fn nvml_process(&mut self) -> Result<u64, String> {
            self.answer(0)
        }
        fn nvml_device(&mut self) -> Result<u64, String> {
            self.answer(1)
        }
        fn driver(&mut self) -> Result<u64, String> {
            self.answer(2)
        }
    }

    fn meter(offsets: [Option<u64>; 3]) -> (VramMeter, Arc<AtomicU64>) {
        let held = Arc::new(AtomicU64::new(100));
        (VramMeter::with(Box::new(Fake { held: Arc::clone(&held), offsets })), held)
    }

    #[test]
    fn the_best_that_answers_is_the_headline_and_all_are_reported() {
        for (offsets, expected) in [
            ([Some(0), Some(1000), Some(2000)], ("nvml_process", 150)),
            ([None, Some(1000), Some(2000)], ("nvml_device", 1150)),
            ([None, None, Some(2000)], ("driver", 2150)),
        ] {
            let (meter, held) = meter(offsets);
            held.store(150, Ordering::Relaxed);
            meter.after_load(Place::default);
            let counted = meter.finish();
            assert_eq!((counted.method.as_deref(), counted.peak_bytes), (Some(expected.0), Some(expected.1)));
            let there = offsets.iter().flatten().count();
            assert_eq!((counted.vram.len(), counted.unavailable.len()), (there, 3 - there));
        }
        let (meter, _) = meter([None; 3]);
        let counted = meter.finish();
        assert_eq!((counted.method, counted.peak_bytes, counted.vram.len()), (None, None, 0));
        assert!(counted.unavailable.iter().any(|entry| entry.metric == "peak.vram_bytes"), "never a zero");
    }

    #[test]
    fn what_happens_between_two_samples_of_one_is_seen_by_the_other() {
        let (meter, held) = meter([None, Some(0), Some(0)]);
        held.store(900, Ordering::Relaxed);
        meter.look(|| Place { seconds: 1.0, ..Place::default() });
        held.store(500, Ordering::Relaxed);
        for _ in 0..LOOKS_PER_NVML_SAMPLE {
            meter.look(Place::default);
        }
        meter.after_load(Place::default);
        held.store(1700, Ordering::Relaxed);
        meter.after_unload();
        let [device, driver] = &meter.finish().vram[..] else { panic!("two ways answered") };
        assert_eq!((device.peak_bytes, driver.peak_bytes), (Some(500), Some(900)), "not what comes after");
        assert_eq!((driver.baseline_bytes, driver.after_load_bytes), (Some(100), Some(500)));
        assert_eq!((driver.after_unload_bytes, driver.after_unload_growth_bytes), (Some(1700), Some(1600)));
    }

    #[test]
    fn changes_are_noted_and_their_number_is_bounded() {
        let (meter, held) = meter([None, None, Some(0)]);
        let start = Instant::now();
        meter.look(Place::default);
        assert!(meter.finish().steps.is_empty(), "nobody has asked for them");
        meter.keep_steps();
        let bytes = |meter: &VramMeter| -> Vec<u64> {
            meter.finish().steps_since(start).iter().map(|(_, bytes)| *bytes).collect()
        };
        for look in [100, 150, 150, 120] {
            held.store(look, Ordering::Relaxed);
            meter.look(Place::default);
        }
        assert_eq!(bytes(&meter), [100, 150, 120]);
        for look in 0..20_000 {
            held.store(look, Ordering::Relaxed);
            meter.look(Place::default);
        }
        let kept = bytes(&meter);
        assert!(kept.len() <= STEPS_MAX && kept.last() == Some(&19_999), "{}", kept.len());
        assert!(kept[3..].is_sorted(), "by time");
    }

    #[test]
    fn less_than_at_the_start_is_negative_growth() {
        let (meter, held) = meter([Some(0), None, None]);
        meter.after_load(Place::default);
        held.store(40, Ordering::Relaxed);
        assert_eq!((meter.baseline(), meter.after_unload()), (Some(100), Some(40)));
        assert_eq!(meter.finish().vram[0].after_unload_growth_bytes, Some(-60));
    }
}
