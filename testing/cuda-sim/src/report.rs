//! The report: lines of `key value`, written when the process ends.
#![allow(unsafe_code, reason = "places a function that the loader calls at exit")]

use std::fmt::Write as _;

use crate::ledger::Direction;
use crate::sim::{Sim, lock_if_possible, to_u64};

/// The loader calls the functions in this section when the process exits, after the program's exit
/// handlers.
#[used]
#[unsafe(link_section = ".fini_array")]
static AT_EXIT: extern "C" fn() = at_exit;

extern "C" fn at_exit() {
    let Some(mut state) = lock_if_possible() else { return };
    let Some(sim) = state.as_mut() else { return };
    if !sim.is_initialised || sim.process != std::process::id() {
        return;
    }
    sim.write_report();
}

impl Sim {
    /// Writes the report to the file in the settings.
    pub(crate) fn write_report(&mut self) {
        let Some(path) = self.config.report_path.clone() else { return };
        let text = self.report();
        if path == "-" {
            let _ = std::io::Write::write_all(&mut std::io::stderr(), text.as_bytes());
            return;
        }
        let path = path.replace("%p", &std::process::id().to_string());
        // Renamed when complete, so that readers see a whole report or none.
        let part = format!("{path}.part");
        if std::fs::write(&part, text).is_ok() {
            let _ = std::fs::rename(&part, &path);
        }
    }

    /// The report as text.
    pub(crate) fn report(&self) -> String {
        let mut text = String::new();
        let mut line = |key: &str, value: &dyn std::fmt::Display| {
            let _ = writeln!(text, "{key} {value}");
        };
        let config = &self.config;
        line("report.version", &1);
        line("driver.name", &config.name);
        line("driver.version", &config.driver_version);
        line("process", &std::process::id());
        line("mode", &format!("{:?}", config.mode).to_lowercase());
        line("seed", &config.seed);
        line("devices", &self.devices.len());
        line("calls.total", &self.faults.total());
        for (function, calls) in self.faults.calls() {
            line(&format!("calls.{function}"), &calls);
        }
        line("faults.total", &self.ledger.injected.len());
        for (index, fault) in self.ledger.injected.iter().enumerate() {
            line(&format!("fault.{index}"), &format!("{} {} {}", fault.function, fault.number, fault.code));
        }
        for direction in Direction::ALL {
            let (copies, name) = (self.ledger.copies(direction), direction.name());
            line(&format!("copies.{name}.queued"), &copies.queued);
            line(&format!("copies.{name}.run"), &copies.run);
            line(&format!("copies.{name}.bytes"), &copies.bytes);
            line(&format!("copies.{name}.pageable"), &copies.pageable);
            line(&format!("copies.{name}.in_flight_most"), &copies.in_flight_most);
            line(&format!("copies.{name}.in_flight_bytes_most"), &copies.in_flight_bytes_most);
        }
        line("peak.allocated_bytes", &self.ledger.allocated.most);
        line("peak.device_bytes", &self.ledger.taken.most);
        line("peak.pinned_bytes", &self.ledger.pinned.most);
        line("peak.contexts_pushed", &self.ledger.contexts_pushed_most);
        for (what, count) in self.leaks() {
            line(&format!("leaks.{what}"), &count);
        }
        let (copies, frees) = self.pending(|_| true);
        line("pending.copies", &copies);
        line("pending.frees", &frees);
        line("dropped.copies", &self.ledger.work_dropped);
        for (index, device) in self.devices.iter().enumerate() {
            line(&format!("device.{index}.lost"), &device.lost.map_or(0, |code| code.0));
            line(&format!("device.{index}.taken_bytes"), &device.taken_bytes);
        }
        line("violations.total", &self.ledger.violation_count);
        for (index, violation) in self.ledger.violations.iter().enumerate() {
            let text = violation.text.replace('\n', " ");
            let value =
                format!("{} call={} faults={} {text}", violation.kind, violation.call, violation.faults);
            line(&format!("violation.{index}"), &value);
        }
        line("end", &1);
        text
    }

    /// Live objects, and objects destroyed with their context.
    fn leaks(&self) -> Vec<(&'static str, u64)> {
        let live = self.allocations.values().filter(|allocation| allocation.freed_at.is_none());
        let (allocations, bytes) =
            live.fold((0, 0), |(count, bytes), allocation| (count + 1, bytes + allocation.len_bytes));
        let references: u64 = self.devices.iter().map(|device| device.primary_references).sum();
        let own_contexts = self.contexts.values().filter(|context| !context.is_primary).count();
        let pools = self.pools.values().filter(|pool| !pool.is_default && !pool.is_destroyed).count();
        let mut leaks = vec![
            ("context_references", references + to_u64(own_contexts)),
            ("streams", self.live_streams()),
            ("events", to_u64(self.events.len())),
            ("pools", to_u64(pools)),
            ("allocations", allocations),
            ("device_bytes", bytes),
            ("pinned_ranges", to_u64(self.pinned.len())),
            ("nvml_references", self.nvml_references),
        ];
        for (what, count) in &mut leaks {
            *count += self.ledger.went_with_context.get(what).copied().unwrap_or(0);
        }
        leaks
    }
}
