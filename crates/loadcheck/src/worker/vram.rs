//! Device memory during a load, counted in three ways: by NVML for this process, by NVML for the
//! device, by the CUDA driver for the device. All counts are reported; the first way that answers
//! is the preferred one.
//!
//! Only the first way tells this process from others. The other two include everybody, so their
//! growth is this load's alone only on a device that nobody else uses meanwhile.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use onelayer::{Device, Target};
use onelayer_probe::GpuMemory;

use crate::report::{Place, Run, Unavailable, Vram};

/// NVML takes a lock of its own, so it is asked at every so many looks. The driver answers in
/// microseconds.
const LOOKS_PER_NVML_SAMPLE: u32 = 4;
/// The shortest time between two questions to NVML at the end of a layer.
const LAYER_INTERVAL: Duration = Duration::from_millis(20);
/// Changes that are kept. When there are more, every second one is dropped.
const STEPS_MAX: usize = 8192;

/// A way of counting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Method {
    NvmlProcess,
    NvmlDevice,
    Driver,
}

/// The counts of one method.
#[derive(Debug)]
struct Series {
    method: Method,
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
    fn new(method: Method) -> Self {
        let (baseline, now, peak, after_load, after_unload) = (None, None, None, None, None);
        Self { method, baseline, now, peak, peak_at: None, after_load, after_unload, reason: None }
    }

    fn name(&self) -> &'static str {
        match self.method {
            Method::NvmlProcess => "nvml_process",
            Method::NvmlDevice => "nvml_device",
            Method::Driver => "driver",
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
            method: self.name().to_owned(),
            baseline_bytes: self.baseline,
            peak_bytes: self.peak,
            after_load_bytes: self.after_load,
            after_unload_bytes: self.after_unload,
            after_unload_growth_bytes: both.and_then(|(after, before)| growth(after, before)),
        }
    }
}

/// Counts bytes by a method, or says why it cannot.
type Count = dyn FnMut(Method) -> Result<u64, String> + Send;

/// Measures the memory of one device, for the thread that takes layers and the monitor beside it.
pub(super) struct VramMeter(Mutex<Inner>);

struct Inner {
    count: Box<Count>,
    /// The preferred method first.
    series: [Series; 3],
    looks: u32,
    /// When the preferred count changed, and to what; `None` if that is not kept.
    steps: Option<Vec<(Instant, u64)>>,
    /// When NVML was asked last at the end of a layer.
    layer_asked: Option<Instant>,
}

impl VramMeter {
    /// For a device with memory of its own. Takes the baseline with the device's context and NVML
    /// open, so that neither counts as the load's.
    pub(super) fn open(device: &Device) -> Option<Self> {
        if matches!(device.target(), Target::Host | Target::None) {
            return None;
        }
        let memory = device.memory().ok().flatten();
        let info = device.info().ok();
        let uuid = info.as_ref().and_then(|info| info.uuid.as_deref());
        let place = info.as_ref().and_then(|info| info.pci_bus_id.as_deref());
        let mut nvml = GpuMemory::open(uuid, place, memory.map_or(0, |memory| memory.total_bytes));
        let (device, pid) = (device.clone(), std::process::id());
        Some(Self::with(Box::new(move |method| {
            let nvml = nvml.as_mut().map_err(|error| error.to_string());
            match method {
                Method::NvmlProcess => nvml?.of_process(pid).map_err(|error| error.to_string()),
                Method::NvmlDevice => nvml?.used_bytes().map_err(|error| error.to_string()),
                Method::Driver => match device.memory() {
                    Ok(Some(memory)) => Ok(memory.used_bytes()),
                    Ok(None) => Err("the device has no memory of its own".to_owned()),
                    Err(error) => Err(error.to_string()),
                },
            }
        })))
    }

    fn with(count: Box<Count>) -> Self {
        let series = [Method::NvmlProcess, Method::NvmlDevice, Method::Driver].map(Series::new);
        let mut inner = Inner { count, series, looks: 0, steps: None, layer_asked: None };
        inner.sample(true, Place::default);
        for series in &mut inner.series {
            series.baseline = series.now;
        }
        Self(Mutex::new(inner))
    }

    /// Also keeps the changes of the preferred count. Their list is allocated and touched here,
    /// before the baseline of host memory.
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

    /// Takes a sample; returns the peak of the preferred count so far.
    pub(super) fn look(&self, place: impl Fn() -> Place) -> Option<u64> {
        let mut inner = self.inner();
        inner.looks = inner.looks.wrapping_add(1);
        let with_nvml = inner.looks.is_multiple_of(LOOKS_PER_NVML_SAMPLE);
        inner.sample(with_nvml, place);
        inner.preferred().peak
    }

    /// Takes a sample before a layer is dropped, so that its memory is seen however short the load
    /// is. NVML is asked at most once in [`LAYER_INTERVAL`], so that many small layers are not
    /// slowed down.
    pub(super) fn layer_end(&self, place: impl Fn() -> Place) {
        let mut inner = self.inner();
        let with_nvml = inner.layer_asked.is_none_or(|asked| asked.elapsed() >= LAYER_INTERVAL);
        if with_nvml {
            inner.layer_asked = Some(Instant::now());
        }
        inner.sample(with_nvml, place);
    }

    /// The preferred count when everything is loaded.
    pub(super) fn after_load(&self, place: impl Fn() -> Place) -> Option<u64> {
        let mut inner = self.inner();
        inner.sample(true, place);
        for series in &mut inner.series {
            series.after_load = series.now;
        }
        inner.preferred().after_load
    }

    /// The preferred count when everything is given back.
    pub(super) fn after_unload(&self) -> Option<u64> {
        let mut inner = self.inner();
        // A peak after the load is none of it.
        let peaks = inner.series.each_ref().map(|series| (series.peak, series.peak_at.clone()));
        inner.sample(true, Place::default);
        for (series, (peak, at)) in inner.series.iter_mut().zip(peaks) {
            series.after_unload = series.now;
            (series.peak, series.peak_at) = (peak, at);
        }
        inner.preferred().after_unload
    }

    /// The preferred count before the load.
    pub(super) fn baseline(&self) -> Option<u64> {
        self.inner().preferred().baseline
    }

    /// All counts.
    pub(super) fn finish(&self) -> Counted {
        let inner = self.inner();
        let preferred = inner.preferred();
        let missing = |series: &Series| {
            let reason = series.reason.clone().filter(|_| series.is_incomplete())?;
            Some(Unavailable { metric: format!("vram.{}", series.name()), reason })
        };
        let mut unavailable: Vec<Unavailable> = inner.series.iter().filter_map(missing).collect();
        if preferred.peak.is_none() {
            let reason = preferred.reason.clone().unwrap_or_else(|| "nothing was counted".to_owned());
            unavailable.push(Unavailable { metric: "peak.vram_bytes".to_owned(), reason });
        }
        let counted = inner.series.iter().filter(|series| series.peak.is_some());
        Counted {
            method: preferred.peak.map(|_| preferred.name().to_owned()),
            baseline_bytes: preferred.baseline,
            peak_bytes: preferred.peak,
            peak_at: preferred.peak_at.clone(),
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
        for series in &mut self.series {
            if with_nvml || series.method == Method::Driver {
                series.offer((self.count)(series.method), &place);
            }
        }
        self.note_step();
    }

    /// Notes the preferred count if it changed.
    fn note_step(&mut self) {
        let now = self.preferred().now;
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

    /// The first method that answered before the load; it does not change from then on.
    fn preferred(&self) -> &Series {
        let [.., driver] = &self.series;
        self.series.iter().find(|series| series.baseline.is_some()).unwrap_or(driver)
    }
}

/// The counts of a load.
pub(super) struct Counted {
    /// The preferred method; `None` if none answered.
    pub(super) method: Option<String>,
    pub(super) baseline_bytes: Option<u64>,
    pub(super) peak_bytes: Option<u64>,
    pub(super) peak_at: Option<Place>,
    /// Every method that gave a number.
    pub(super) vram: Vec<Vram>,
    /// When the preferred count changed, and to what, if that was kept.
    pub(super) steps: Vec<(Instant, u64)>,
    pub(super) unavailable: Vec<Unavailable>,
}

impl Counted {
    /// Puts the counts into a report of the run.
    pub(super) fn put_into(self, run: &mut Run, unavailable: &mut Vec<Unavailable>) {
        run.baseline.vram_bytes = self.baseline_bytes;
        run.peak.vram_bytes = self.peak_bytes;
        run.peak.vram_method = self.method;
        run.peak.vram_at = self.peak_at;
        run.vram = self.vram;
        unavailable.extend(self.unavailable);
    }

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

    /// A meter of a device that holds so much; a method whose offset is `None` does not answer.
    fn meter(offsets: [Option<u64>; 3]) -> (VramMeter, Arc<AtomicU64>) {
        let held = Arc::new(AtomicU64::new(100));
        let now = Arc::clone(&held);
        let count = move |method| {
            let [process, device, driver] = offsets;
            let offset = match method {
                Method::NvmlProcess => process,
                Method::NvmlDevice => device,
                Method::Driver => driver,
            };
            offset
                .map(|offset| now.load(Ordering::Relaxed) + offset)
                .ok_or_else(|| "does not answer".to_owned())
        };
        (VramMeter::with(Box::new(count)), held)
    }

    #[test]
    fn the_best_that_answers_is_the_preferred_and_all_are_reported() {
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
