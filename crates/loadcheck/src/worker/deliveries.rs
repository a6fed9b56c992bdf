//! When layers were handed out, in a fixed amount of memory.
//!
//! Every row is the end of a group of layers that were handed out one after the other. Groups are
//! of one layer at first; once there are too many, they double: a load of any number of layers
//! fits, and the ends that stay are exact. All rows are allocated and touched before the baseline
//! is taken.

use std::time::{Duration, Instant};

use crate::report::{Deliveries, Delivery};

/// Rows at most: 24 bytes each.
const ROWS_MAX: usize = 1024;

/// The end of a group.
#[derive(Clone, Copy)]
struct Row {
    layer: usize,
    elapsed: Duration,
}

/// Notes when each layer was handed out.
pub(super) struct DeliveryLog {
    rows: Vec<Row>,
    /// The last layer, if it does not end a group.
    pending: Option<Row>,
    layer_count: u64,
    layers_per_row: u64,
}

impl DeliveryLog {
    /// With room for [`ROWS_MAX`].
    pub(super) fn new() -> Self {
        let mut rows = vec![Row { layer: 1, elapsed: Duration::from_nanos(1) }; ROWS_MAX];
        rows.clear();
        Self { rows, pending: None, layer_count: 0, layers_per_row: 1 }
    }

    /// The layer at this place of the plan was handed out now.
    pub(super) fn note(&mut self, layer: usize, since: Instant) {
        self.push(Row { layer, elapsed: since.elapsed() });
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
        let rows = self.rows.iter().chain(&self.pending).map(|row| Delivery {
            layer: name(row.layer).to_owned(),
            elapsed_us: u64::try_from(row.elapsed.as_micros()).unwrap_or(u64::MAX),
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
            log.push(Row { layer, elapsed });
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
        }
    }
}
