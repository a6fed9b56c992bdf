//! When layers were handed out and what had been read by then, in a fixed amount of memory.
//!
//! Every row is the end of a group of layers that were handed out one after the other. Groups are
//! of one layer at first; once there are too many, they double: a load of any number of layers
//! fits, and the ends that stay are exact. All rows are allocated and touched before the baseline
//! is taken.

use std::time::{Duration, Instant};

use crate::report::{Deliveries, Delivery};

/// Rows at most: 56 bytes each.
const ROWS_MAX: usize = 1024;

/// The end of a group.
#[derive(Clone, Copy)]
struct Row {
    layer: usize,
    elapsed: Duration,
    moved: Moved,
}

/// Bytes since the start of the load. Sums, so that rows can be left out.
#[derive(Clone, Copy, Default)]
pub(super) struct Moved {
    /// Of the layers that were handed out.
    pub(super) delivered_bytes: u64,
    /// Read from files.
    pub(super) read_bytes: u64,
    /// Fetched from storage, by the kernel's count; `None` if it does not count.
    pub(super) storage_bytes: Option<u64>,
}

/// Notes when each layer was handed out.
pub(super) struct DeliveryLog {
    rows: Vec<Row>,
    /// The last layer, if it does not end a group.
    pending: Option<Row>,
    layer_count: u64,
    layers_per_row: u64,
    delivered_bytes: u64,
}

impl DeliveryLog {
    /// With room for [`ROWS_MAX`].
    pub(super) fn new() -> Self {
        let touched = Row { layer: 1, elapsed: Duration::from_nanos(1), moved: Moved::default() };
        let mut rows = vec![touched; ROWS_MAX];
        rows.clear();
        Self { rows, pending: None, layer_count: 0, layers_per_row: 1, delivered_bytes: 0 }
    }

    /// The layer at this place of the plan was handed out now, with so many bytes. `moved` says what
    /// had been read.
    pub(super) fn note(&mut self, layer: (usize, u64), since: Instant, moved: impl FnOnce() -> Moved) {
        let elapsed = since.elapsed();
        self.delivered_bytes += layer.1;
        let moved = Moved { delivered_bytes: self.delivered_bytes, ..moved() };
        self.push(Row { layer: layer.0, elapsed, moved });
    }

    fn push(&mut self, row: Row) {
        self.layer_count += 1;
        if !self.layer_count.is_multiple_of(self.layers_per_row) {
            self.pending = Some(row);
            return;
        }
        if self.rows.len() == ROWS_MAX {
            // The second of two neighbours ends both; this one is halfway through a group of twice as many.
            for index in 0..ROWS_MAX / 2 {
                self.rows[index] = self.rows[index * 2 + 1];
            }
            self.rows.truncate(ROWS_MAX / 2);
            self.layers_per_row *= 2;
            self.pending = Some(row);
            return;
        }
        self.pending = None;
        self.rows.push(row);
    }

    /// The rows for a report, with the names of layers.
    pub(super) fn finish<'a>(&self, name: impl Fn(usize) -> &'a str) -> Deliveries {
        let (mut before, mut cached_before) = (Moved::default(), 0);
        let rows = self.rows.iter().chain(&self.pending).map(|row| {
            // Storage is counted when a read is issued, files when it is done: the difference may
            // shrink while reads are on their way.
            let cached = row.moved.storage_bytes.map(|storage| row.moved.read_bytes.saturating_sub(storage));
            let cached = cached.map(|cached| cached.max(cached_before));
            let delivery = Delivery {
                layer: name(row.layer).to_owned(),
                elapsed_us: u64::try_from(row.elapsed.as_micros()).unwrap_or(u64::MAX),
                bytes: Some(row.moved.delivered_bytes - before.delivered_bytes),
                read_bytes: Some(row.moved.read_bytes.saturating_sub(before.read_bytes)),
                from_cache_bytes: cached.map(|cached| cached - cached_before),
            };
            (before, cached_before) = (row.moved, cached.unwrap_or(cached_before));
            delivery
        });
        Deliveries { layers: self.layer_count, layers_per_row: self.layers_per_row, rows: rows.collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log_of(layers: usize) -> (DeliveryLog, Deliveries) {
        let names: Vec<String> = (0..layers).map(|layer| layer.to_string()).collect();
        let mut log = DeliveryLog::new();
        for layer in 0..layers {
            let elapsed = Duration::from_micros(u64::try_from(layer).unwrap() * 10);
            let sum = u64::try_from(layer + 1).unwrap() * 10;
            let moved =
                Moved { delivered_bytes: sum, read_bytes: 2 * sum, storage_bytes: Some(2 * sum - sum / 4) };
            log.push(Row { layer, elapsed, moved });
            assert!(log.rows.len() <= ROWS_MAX && log.rows.capacity() == ROWS_MAX, "it never allocates");
        }
        let found = log.finish(|layer| &names[layer]);
        (log, found)
    }

    #[test]
    fn a_few_layers_have_a_row_each() {
        let (_, found) = log_of(3);
        assert_eq!((found.layers, found.layers_per_row), (3, 1));
        let rows: Vec<_> = found.rows.iter().map(|row| (row.layer.as_str(), row.elapsed_us)).collect();
        assert_eq!(rows, [("0", 0), ("1", 10), ("2", 20)]);
        assert!(log_of(0).1.rows.is_empty());
    }

    #[test]
    fn many_layers_share_rows_and_each_row_is_the_end_of_its_group() {
        for layers in [ROWS_MAX, ROWS_MAX + 1, ROWS_MAX + 2, 2 * ROWS_MAX + 1, 100_000, 100_001] {
            let (_, found) = log_of(layers);
            let each = usize::try_from(found.layers_per_row).unwrap();
            assert_eq!(found.rows.len(), layers.div_ceil(each), "{layers} by {each}");
            assert!(found.rows.len() <= ROWS_MAX + 1);
            for (index, row) in found.rows.iter().enumerate() {
                let last = ((index + 1) * each).min(layers) - 1;
                assert_eq!(row.layer, last.to_string(), "row {index} of {layers} by {each}");
                assert_eq!(row.elapsed_us, u64::try_from(last).unwrap() * 10);
            }
            let sum = |of: fn(&Delivery) -> Option<u64>| found.rows.iter().map(|row| of(row).unwrap()).sum();
            let all: u64 = u64::try_from(layers).unwrap() * 10;
            let sums: [u64; 3] =
                [sum(|row| row.bytes), sum(|row| row.read_bytes), sum(|row| row.from_cache_bytes)];
            assert_eq!(sums, [all, 2 * all, all / 4], "nothing is lost with the rows that are left out");
        }
    }
}
