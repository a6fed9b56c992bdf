//! A load that happened, to one device or to several: from the library's counters to a report.

use onelayer::checkpoint::Checkpoint;
use onelayer::load::{LayerStream, LoadError, LoadReport, LoadedLayer};
use onelayer::plan::MemoryTerms;
use onelayer::source::{Fallback, Queueing};
use onelayer::{Pinning, RingMode};

use super::failure::{Failure, outcome_of};
use super::monitor::add_missed;
use super::protocol::{Crossing, Finished, MeasureTask, Message, tell};
use super::vram::Counted;
use crate::measuring::{AfterLoad, Measurement, promised_bytes, split};
use crate::report::{
    Deliveries, FileReading, IoCounters, PlaceShare, QuantisedTensor, Ring, Run, TensorHash, Verified,
};

/// Fallbacks that are named one by one.
const NOTED_FALLBACKS_MAX: usize = 3;

/// A load that happened, and whose memory has been given back.
pub(super) struct Loaded {
    /// The counters of all its streams together; `None` if none was opened.
    pub(super) report: Option<LoadReport>,
    /// The memory of its first stream.
    pub(super) memory: Option<MemoryTerms>,
    pub(super) resident_bytes: u64,
    pub(super) resident_host_bytes: u64,
    pub(super) after_load: AfterLoad,
    pub(super) crossings: Vec<Crossing>,
    pub(super) failure: Option<Failure>,
    pub(super) verified: Option<Verified>,
    pub(super) deliveries: Option<Deliveries>,
    pub(super) quantised: Vec<QuantisedTensor>,
    /// How each file was to be read, where that was decided.
    pub(super) files: Vec<FileReading>,
    /// Bytes of all tensors in their files, as often as they were wanted.
    pub(super) wanted_bytes: u64,
    /// Each tier's part of a load by a device map.
    pub(super) tiers: Vec<PlaceShare>,
    pub(super) notes: Vec<String>,
}

impl Loaded {
    /// The report of the run.
    pub(super) fn finish(
        self,
        task: &MeasureTask,
        mut measurement: Measurement,
        counted: Option<Counted>,
    ) -> Finished {
        measurement.after_unload = split(measurement.after_unload);
        let wanted_bytes = self.failure.is_none().then_some(self.wanted_bytes);
        let mismatch = self.verified.as_ref().and_then(Verified::problem).map(Failure::Failed);
        let (outcome, problem) = outcome_of(self.failure.or(mismatch));
        let activity = &measurement.summary.activity;
        let io = |report: &LoadReport| IoCounters {
            major_faults: activity.major_faults.value(),
            ..counters(report, activity.read_bytes.value(), wanted_bytes, self.files)
        };
        let readers = self.memory.as_ref().map(|memory| u64::from(memory.ring().readers));
        let promised_bytes = promised_bytes(task.budgets.host_bytes, self.resident_host_bytes);
        let mut run = Run {
            outcome,
            params: Some(task.load.params(&task.budgets, readers)),
            verified: self.verified,
            quantised: self.quantised,
            resident_bytes: Some(self.resident_bytes),
            resident_host_bytes: Some(self.resident_host_bytes),
            places: self.tiers,
            ring: self
                .report
                .as_ref()
                .zip(self.memory.as_ref())
                .map(|(report, memory)| ring_of(report, memory)),
            promise: measurement.promise(promised_bytes),
            deliveries: self.deliveries,
            ..measurement.run("stream", self.after_load.elapsed, Some(&self.after_load))
        };
        // The kernel may count the ring's pages too: the larger number has them once.
        let pinned_bytes = self.report.as_ref().map(|report| report.pinned_bytes);
        run.peak.pinned_bytes = run.peak.pinned_bytes.max(pinned_bytes);
        run.io = self.report.as_ref().map(io).unwrap_or_default();
        let mut crossings = self.crossings;
        add_missed(&mut crossings, &task.watches, &measurement.summary);
        let mut unavailable = measurement.unavailable();
        if let Some(counted) = counted {
            run.samples = run
                .samples
                .map(|samples| samples.with_vram(&counted.steps_since(measurement.baseline_taken)));
            counted.put_into(&mut run, &mut unavailable);
        }
        Finished { run, unavailable, crossings, notes: self.notes, problem }
    }
}

/// The bytes that were moved. `from_storage` are those that a device delivered, if that is known;
/// `wanted_bytes` those of all tensors in their files, for a load that completed.
fn counters(
    report: &LoadReport,
    from_storage: Option<u64>,
    wanted_bytes: Option<u64>,
    files: Vec<FileReading>,
) -> IoCounters {
    let read_bytes = report.read_bytes;
    let ways = report.ways;
    IoCounters {
        read_bytes: Some(read_bytes),
        from_cache_bytes: from_storage.map(|storage| read_bytes.saturating_sub(storage)),
        major_faults: None,
        wanted_bytes,
        read_amplification: wanted_bytes.and_then(|wanted| ratio(read_bytes, wanted)),
        direct_bytes: Some(ways.direct_bytes),
        buffered_bytes: Some(ways.buffered_bytes),
        mapped_bytes: Some(ways.mapped_bytes),
        corrected_bytes: Some(ways.corrected_bytes),
        dropped_behind_bytes: Some(ways.dropped_behind_bytes),
        files,
    }
}

/// To four digits; `None` if `by` is 0.
fn ratio(value: u64, by: u64) -> Option<f64> {
    let scaled = (u128::from(value) * 10_000).checked_div(u128::from(by))?;
    Some(f64::from(u32::try_from(scaled).ok()?) / 10_000.0)
}

/// Tells the hash of every tensor of a layer whose bytes can be read.
pub(super) fn tell_hashes(layer: &LoadedLayer) -> Result<(), LoadError> {
    for tensor in layer.tensors() {
        if let Some(hash) = tensor.hash()? {
            let name = tensor.name().to_owned();
            tell(&Message::Hash(TensorHash { name, blake3: hash.to_hex().to_string() }));
        }
    }
    Ok(())
}

/// The errors of quantising.
pub(super) fn quantised(checkpoint: &Checkpoint, stream: &LayerStream) -> Vec<QuantisedTensor> {
    let errors = stream.progress().quantisation_errors();
    errors.iter().map(|error| QuantisedTensor::new(checkpoint.tensor(error.tensor).name, error)).collect()
}

/// The ring that the load had. A driver that pins less than all of it may leave fewer slots.
fn ring_of(report: &LoadReport, memory: &MemoryTerms) -> Ring {
    let shape = memory.ring();
    let slots = match report.pinning {
        Pinning::FewerSlots { slots, .. } => slots,
        _ => shape.slots,
    };
    let mode = match report.ring_mode {
        RingMode::HugePages => "huge_pages",
        _ => "small_pages",
    };
    Ring {
        mode: Some(mode.to_owned()),
        slots: u64::from(slots),
        slot_bytes: shape.slot_bytes,
        pinning: report.pinning.name().to_owned(),
        pinning_reason: report.pinning.reason().map(str::to_owned),
        pinned_bytes: report.pinned_bytes,
    }
}

/// Notes for people on a stream that did not run as asked for.
pub(super) fn notes_of(checkpoint: &Checkpoint, report: &LoadReport) -> Vec<String> {
    let fallback = |fallback: &Fallback| {
        format!(
            "{} was read {} instead of {}: {}",
            checkpoint.shard(fallback.shard).path.display(),
            fallback.to,
            fallback.from,
            fallback.reason
        )
    };
    let mut notes: Vec<String> = report.fallbacks.iter().take(NOTED_FALLBACKS_MAX).map(fallback).collect();
    let more = report.fallbacks.len().saturating_sub(NOTED_FALLBACKS_MAX);
    if more > 0 {
        notes.push(format!("{more} more files were read in another way than asked for"));
    }
    notes.extend(report.pinning.reason().map(|reason| match &report.pinning {
        Pinning::SlotBySlot { .. } => format!("the ring was pinned slot by slot, not as a whole: {reason}"),
        Pinning::FewerSlots { slots, .. } => {
            format!("only {slots} slots of the ring could be pinned, the rest was left out: {reason}")
        }
        _ => format!("the ring could not be pinned, so copies to the device are slower: {reason}"),
    }));
    notes.extend(report.queueing.reason().map(|reason| match &report.queueing {
        Queueing::Refused { .. } => {
            format!("reads went through no queue, but each through a thread: {reason}")
        }
        _ => format!("reads went through a queue that does not know the ring: {reason}"),
    }));
    notes
}

#[cfg(test)]
mod tests {
    use super::ratio;

    #[test]
    fn a_ratio_to_nothing_is_none() {
        assert_eq!(ratio(3, 2), Some(1.5));
        assert_eq!(ratio(10_001, 10_000), Some(1.0001));
        assert_eq!(ratio(3, 0), None);
    }
}
