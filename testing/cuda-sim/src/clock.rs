//! The order of work: vector clocks over streams.
//!
//! Each stream and the host have a clock. A stream's clock grows with its own work, with each event
//! it waits for, and with all work that the host knows to be done. Work that has merely run by
//! chance is not ordered.

use std::collections::BTreeMap;

/// A point in a stream: right after its work number `sequence`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Point {
    pub(crate) stream: usize,
    pub(crate) sequence: u64,
}

/// For each stream, the point up to which its work is ordered before.
#[derive(Clone, Debug, Default)]
pub(crate) struct Clock(BTreeMap<usize, u64>);

impl Clock {
    pub(crate) fn covers(&self, point: Point) -> bool {
        self.0.get(&point.stream).is_some_and(|&sequence| sequence >= point.sequence)
    }

    pub(crate) fn raise(&mut self, point: Point) {
        let sequence = self.0.entry(point.stream).or_default();
        *sequence = point.sequence.max(*sequence);
    }

    pub(crate) fn merge(&mut self, other: &Self) {
        for point in other.points() {
            self.raise(point);
        }
    }

    pub(crate) fn points(&self) -> impl Iterator<Item = Point> {
        self.0.iter().map(|(&stream, &sequence)| Point { stream, sequence })
    }

    /// The first point of this clock that the other does not cover.
    pub(crate) fn first_beyond(&self, other: &Self) -> Option<Point> {
        self.points().find(|&point| !other.covers(point))
    }
}
