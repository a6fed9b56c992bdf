//! What is ordered before what: vector clocks over streams.
//!
//! Each stream has one, the host has one. A stream's grows with its own work, with every event it
//! waits for, and with all that the host knows to be over. That work happens to have run already
//! orders nothing.

use std::collections::BTreeMap;

/// A place in a stream: right behind its `sequence`-th piece of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Point {
    pub(crate) stream: usize,
    pub(crate) sequence: u64,
}

/// For each stream, up to where its work is ordered before.
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

    /// The first place of this one that the other does not cover.
    pub(crate) fn first_beyond(&self, other: &Self) -> Option<Point> {
        self.points().find(|&point| !other.covers(point))
    }
}
