//! Memory over time, in a fixed amount of memory.
//!
//! A [`Timeline`] holds a fixed number of rows. When it is full, neighbouring rows are merged in
//! pairs, and each row then stands for twice as many samples. A row keeps the sample with the most
//! host memory, so no peak is averaged away. All rows are allocated and touched before the
//! baseline; adding one allocates nothing.

use std::time::Duration;

use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};

use super::{Measured, ProcessMemory};

/// The default number of timeline rows, 48 bytes each.
pub const TIMELINE_ROWS_DEFAULT: usize = 512;

/// The columns of a row, in a report's order.
const COLUMNS: [&str; 6] = ["seconds", "host_bytes", "rss_bytes", "anon_bytes", "file_bytes", "shmem_bytes"];

/// One kept sample. `None`: the number could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TimelineRow {
    /// Time since the baseline.
    pub elapsed: Duration,
    /// Unreclaimable memory.
    pub host_bytes: Option<u64>,
    /// Resident memory.
    pub rss_bytes: Option<u64>,
    /// Resident anonymous memory.
    pub anon_bytes: Option<u64>,
    /// Resident pages of mapped files.
    pub file_bytes: Option<u64>,
    /// Resident shared memory.
    pub shmem_bytes: Option<u64>,
}

/// A stored row. `MISSING`: the number could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Packed {
    elapsed_ns: u64,
    bytes: [u64; 5],
}

const MISSING: u64 = u64::MAX;

impl Packed {
    fn new(elapsed: Duration, memory: &ProcessMemory) -> Self {
        let pack = |measured: Measured<u64>| measured.value().unwrap_or(MISSING);
        Self {
            elapsed_ns: u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX),
            bytes: [
                pack(memory.host_bytes),
                pack(memory.rss_bytes),
                pack(memory.anon_bytes),
                pack(memory.file_bytes),
                pack(memory.shmem_bytes),
            ],
        }
    }

    fn unpack(self) -> TimelineRow {
        let [host, rss, anon, file, shmem] = self.bytes.map(|bytes| (bytes != MISSING).then_some(bytes));
        TimelineRow {
            elapsed: Duration::from_nanos(self.elapsed_ns),
            host_bytes: host,
            rss_bytes: rss,
            anon_bytes: anon,
            file_bytes: file,
            shmem_bytes: shmem,
        }
    }

    /// Orders by host memory, then by resident memory; a missing number is below every other.
    fn weight(&self) -> (Option<u64>, Option<u64>) {
        let row = self.unpack();
        (row.host_bytes, row.rss_bytes)
    }

    /// The heavier of two neighbours, the earlier one if they are equal.
    fn merge(self, later: Self) -> Self {
        if later.weight() > self.weight() { later } else { self }
    }
}

/// Memory over time, with a bounded number of rows.
#[derive(Clone, Debug)]
pub struct Timeline {
    rows: Vec<Packed>,
    row_count_max: usize,
    samples_per_row: u64,
    pending: Option<Packed>,
    pending_count: u64,
}

impl Timeline {
    /// A timeline of at most `row_count_max` rows, rounded to an even number of at least 2. 0 keeps
    /// no rows.
    #[must_use]
    pub fn new(row_count_max: usize) -> Self {
        let row_count_max = if row_count_max == 0 { 0 } else { (row_count_max & !1).max(2) };
        let mut rows = vec![Packed { elapsed_ns: 1, bytes: [1; 5] }; row_count_max];
        rows.clear();
        Self { rows, row_count_max, samples_per_row: 1, pending: None, pending_count: 0 }
    }

    /// Adds one sample.
    pub fn push(&mut self, elapsed: Duration, memory: &ProcessMemory) {
        if self.row_count_max == 0 {
            return;
        }
        let sample = Packed::new(elapsed, memory);
        self.pending = Some(self.pending.map_or(sample, |pending| pending.merge(sample)));
        self.pending_count += 1;
        if self.pending_count < self.samples_per_row {
            return;
        }
        if self.rows.len() == self.row_count_max {
            // The pending row holds half as many samples as a row now needs, so it stays pending.
            self.halve();
            return;
        }
        self.rows.extend(self.pending.take());
        self.pending_count = 0;
    }

    fn halve(&mut self) {
        let half = self.rows.len() / 2;
        for index in 0..half {
            self.rows[index] = self.rows[index * 2].merge(self.rows[index * 2 + 1]);
        }
        self.rows.truncate(half);
        self.samples_per_row *= 2;
    }

    /// The number of samples per row (fewer in the last one).
    #[must_use]
    pub fn samples_per_row(&self) -> u64 {
        self.samples_per_row
    }

    /// The rows, oldest first.
    pub fn rows(&self) -> impl Iterator<Item = TimelineRow> + '_ {
        self.rows.iter().chain(&self.pending).map(|row| row.unpack())
    }
}

/// `{samples_per_row, columns: [...], rows: [[...], ...]}`, with `null` for missing numbers.
impl Serialize for Timeline {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let rows: Vec<_> = self
            .rows()
            .map(|row| {
                let seconds = row.elapsed.as_secs_f64();
                (seconds, row.host_bytes, row.rss_bytes, row.anon_bytes, row.file_bytes, row.shmem_bytes)
            })
            .collect();
        let mut object = serializer.serialize_struct("Timeline", 3)?;
        object.serialize_field("samples_per_row", &self.samples_per_row)?;
        object.serialize_field("columns", &COLUMNS)?;
        object.serialize_field("rows", &rows)?;
        object.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Reason;

    fn memory(host_bytes: u64) -> ProcessMemory {
        let mut memory = ProcessMemory::unavailable(Reason::ProcessEnded);
        memory.host_bytes = Measured::Value(host_bytes);
        memory
    }

    #[test]
    fn a_full_timeline_keeps_its_size_its_order_and_every_peak() {
        let mut timeline = Timeline::new(8);
        for tick in 0..1000_u64 {
            let host_bytes = if tick == 137 { 5000 } else { tick };
            timeline.push(Duration::from_millis(tick), &memory(host_bytes));
            assert!(timeline.rows().count() <= 9);
            assert_eq!(timeline.rows.capacity(), 8, "a timeline never allocates");
        }
        assert_eq!(timeline.samples_per_row(), 128);
        let rows: Vec<_> = timeline.rows().collect();
        assert!(rows.is_sorted_by_key(|row| row.elapsed));
        assert!(rows.iter().any(|row| row.host_bytes == Some(5000)), "{rows:?}");
        assert_eq!(rows.last().unwrap().host_bytes, Some(999));
    }

    #[test]
    fn a_short_run_keeps_every_sample_and_none_is_none() {
        let mut timeline = Timeline::new(4);
        for tick in 0..3 {
            timeline.push(Duration::from_millis(tick), &memory(tick));
        }
        assert_eq!(timeline.rows().map(|row| row.host_bytes.unwrap()).collect::<Vec<_>>(), [0, 1, 2]);
        let mut none = Timeline::new(0);
        none.push(Duration::ZERO, &memory(1));
        assert_eq!(none.rows().count(), 0);
    }

    #[test]
    fn a_missing_number_is_null_in_the_rows() {
        let mut timeline = Timeline::new(2);
        timeline.push(Duration::from_millis(1500), &memory(7));
        let text = serde_json::to_string(&timeline).unwrap();
        assert!(text.ends_with("\"rows\":[[1.5,7,null,null,null,null]]}"), "{text}");
    }
}
