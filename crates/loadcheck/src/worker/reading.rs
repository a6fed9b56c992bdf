//! From the library's decisions and counters to the report's.

use onelayer::checkpoint::Checkpoint;
use onelayer::load::LoadReport;
use onelayer::plan::{IoDecision, LoadPlan};

use crate::report::{FileReading, IoCounters};

/// How each file is to be read, where that was decided.
pub(super) fn files(checkpoint: &Checkpoint, plan: &LoadPlan) -> Vec<FileReading> {
    plan.decisions().iter().map(|decision| file(checkpoint, decision)).collect()
}

fn file(checkpoint: &Checkpoint, decision: &IoDecision) -> FileReading {
    FileReading {
        file: checkpoint.shard(decision.shard).path.display().to_string(),
        bytes: decision.file_bytes,
        mode: decision.mode.to_string(),
        reason: decision.reason.name().to_owned(),
        why: decision.reason.to_string(),
        file_system: decision.file_system.map(|kind| kind.to_string()),
        resident_share: decision.resident_share(),
        residency_by: decision.residency_by.map(|by| by.name().to_owned()),
        new_pages: decision.cache_effect.name().to_owned(),
    }
}

/// What was moved, `from_storage` of it by a device as far as that is known. `wanted_bytes` are
/// those of all tensors in their files, for a load that came to its end.
pub(super) fn counters(
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

/// To four digits; nothing where there is nothing to divide by.
fn ratio(value: u64, by: u64) -> Option<f64> {
    let scaled = (u128::from(value) * 10_000).checked_div(u128::from(by))?;
    Some(f64::from(u32::try_from(scaled).ok()?) / 10_000.0)
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
