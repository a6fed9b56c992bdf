//! The contents of the report: violations, injected faults, counters.

use std::collections::BTreeMap;

/// Number of violations whose text is kept; further ones are only counted.
const TEXTS_MAX: usize = 200;

/// Detected misuse.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Violation {
    pub(crate) kind: &'static str,
    pub(crate) text: String,
    /// Number of the call that detected it.
    pub(crate) call: u64,
    /// Number of faults injected before it.
    pub(crate) faults: usize,
}

/// An injected fault.
#[derive(Debug)]
pub(crate) struct Injected {
    pub(crate) function: &'static str,
    pub(crate) number: u64,
    pub(crate) code: u32,
}

/// Direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Direction {
    HostToDevice,
    DeviceToHost,
    DeviceToDevice,
    Fill,
}

impl Direction {
    pub(crate) const ALL: [Self; 4] =
        [Self::HostToDevice, Self::DeviceToHost, Self::DeviceToDevice, Self::Fill];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::HostToDevice => "host_to_device",
            Self::DeviceToHost => "device_to_host",
            Self::DeviceToDevice => "device_to_device",
            Self::Fill => "fill",
        }
    }
}

/// Copies of one direction.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Copies {
    pub(crate) queued: u64,
    pub(crate) run: u64,
    pub(crate) bytes: u64,
    /// The number of them from or to memory that is not pinned.
    pub(crate) pageable: u64,
    in_flight: u64,
    in_flight_bytes: u64,
    pub(crate) in_flight_most: u64,
    pub(crate) in_flight_bytes_most: u64,
}

/// A current value and its peak.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Gauge {
    pub(crate) now: u64,
    pub(crate) most: u64,
}

impl Gauge {
    pub(crate) fn add(&mut self, amount: u64) {
        self.now += amount;
        self.most = self.most.max(self.now);
    }

    pub(crate) fn subtract(&mut self, amount: u64) {
        self.now = self.now.saturating_sub(amount);
    }
}

#[derive(Debug, Default)]
pub(crate) struct Ledger {
    pub(crate) violations: Vec<Violation>,
    pub(crate) violation_count: u64,
    pub(crate) injected: Vec<Injected>,
    copies: BTreeMap<Direction, Copies>,
    /// Bytes of live allocations.
    pub(crate) allocated: Gauge,
    /// Used device memory: plain allocations, pools and contexts.
    pub(crate) taken: Gauge,
    pub(crate) pinned: Gauge,
    /// Objects that were alive when their context was destroyed.
    pub(crate) went_with_context: BTreeMap<&'static str, u64>,
    /// Maximum number of contexts pushed on one thread.
    pub(crate) contexts_pushed_most: usize,
    /// Work dropped with a lost context.
    pub(crate) work_dropped: u64,
}

impl Ledger {
    pub(crate) fn violation(&mut self, kind: &'static str, text: String, call: u64) {
        self.violation_count += 1;
        if self.violations.len() < TEXTS_MAX {
            let faults = self.injected.len();
            self.violations.push(Violation { kind, text, call, faults });
        }
    }

    pub(crate) fn copies(&self, direction: Direction) -> Copies {
        self.copies.get(&direction).copied().unwrap_or_default()
    }

    pub(crate) fn copy_queued(&mut self, direction: Direction, len_bytes: u64, is_pageable: bool) {
        let copies = self.copies.entry(direction).or_default();
        copies.queued += 1;
        copies.pageable += u64::from(is_pageable);
        copies.in_flight += 1;
        copies.in_flight_bytes += len_bytes;
        copies.in_flight_most = copies.in_flight_most.max(copies.in_flight);
        copies.in_flight_bytes_most = copies.in_flight_bytes_most.max(copies.in_flight_bytes);
    }

    pub(crate) fn copy_over(&mut self, direction: Direction, len_bytes: u64, has_run: bool) {
        let copies = self.copies.entry(direction).or_default();
        copies.in_flight -= 1;
        copies.in_flight_bytes -= len_bytes;
        if has_run {
            copies.run += 1;
            copies.bytes += len_bytes;
        }
    }
}
