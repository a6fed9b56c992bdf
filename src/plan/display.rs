//! The plan as text: terms of the peak, then a line per layer. `{:#}` also prints every read, copy
//! and move.
//!
//! The text is stable: the same checkpoint and limits print the same bytes on every machine, so
//! plans can be compared and kept as golden files. (Decisions on how to read are part of the
//! limits, and depend on the page cache.) Layer names are printed as they are; a program that
//! prints to a terminal escapes them.

use std::fmt;

use super::{
    Cast, IoGroup, LoadPlan, Placement, PlannedLayer, QuantisedPart, ReadOp, ReadOrder, ResidentKind,
    TermKind,
};
use crate::units::HumanBytes;

impl fmt::Display for LoadPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "plan     {} layers, {} of tensors, {} reads, {} copies; {} over-read at most",
            self.layers.len(),
            HumanBytes(self.tensor_bytes()),
            self.reads.count(),
            self.reads().map(|read| self.copies(&read).count()).sum::<usize>(),
            HumanBytes(self.over_read_bytes()),
        )?;
        self.fmt_tensors(f)?;
        writeln!(
            f,
            "reading  {} by {} threads, window {}",
            self.io,
            self.memory.ring().readers,
            self.window
        )?;
        if self.order == ReadOrder::Files {
            writeln!(f, "order    as the files have them, {} jumps", self.jumps())?;
        }
        // One line for all files that are read the same way.
        for group in IoGroup::of(&self.decisions) {
            writeln!(f, "  {group}")?;
        }
        self.fmt_memory(f)?;
        for layer in &self.layers {
            self.fmt_layer(f, layer)?;
        }
        Ok(())
    }
}

impl LoadPlan {
    /// Lines about tensors that are moved, divided, narrowed or quantised.
    fn fmt_tensors(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let moves = self.moves.len();
        if moves > 0 {
            let moved_bytes = self.moves.iter().map(|step| step.len_bytes).sum();
            writeln!(f, "moving   {moves} tensors, {}, on the device", HumanBytes(moved_bytes))?;
        }
        if let Some(rank) = self.rank() {
            let (all, parts) = (self.placements.len(), self.part_count());
            let (wanted, gaps) = (HumanBytes(self.source_bytes()), HumanBytes(self.gap_bytes()));
            writeln!(
                f,
                "rank     {rank}: {parts} tensors in part, {} whole; {wanted} wanted, {gaps} of gaps",
                all - parts
            )?;
        }
        if let Some(dtype) = self.dtype {
            let narrowed = || self.placements.iter().filter(|placement| placement.cast.is_some());
            writeln!(
                f,
                "dtype    {dtype}: {} tensors narrowed, {} of {} kept",
                narrowed().count(),
                HumanBytes(narrowed().map(Placement::len_bytes).sum()),
                HumanBytes(narrowed().map(|placement| placement.extent.len_bytes()).sum()),
            )?;
        }
        if let Some(first) = self.quantised().first() {
            let halves = || self.placements.iter().filter(|placement| placement.quantised.is_some());
            let values = halves().filter(|half| half.quantised.is_some_and(|form| !form.is_scales()));
            writeln!(
                f,
                "quantise {}: {} tensors, {} of {} kept, scales included",
                first.to,
                self.quantised().len(),
                HumanBytes(halves().map(Placement::len_bytes).sum()),
                HumanBytes(values.map(|half| half.extent.len_bytes()).sum()),
            )?;
        }
        Ok(())
    }

    /// The budget, and every term of the peak.
    fn fmt_memory(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let memory = &self.memory;
        let ring = memory.ring();
        let (budget, smallest) = (memory.budget_bytes(), memory.smallest_budget_bytes());
        writeln!(f, "budget   {} (smallest {})", HumanBytes(budget), HumanBytes(smallest))?;
        for term in memory.terms() {
            write!(f, "  {:<20} {:>9}", term.kind, HumanBytes(term.bytes))?;
            match term.kind {
                TermKind::Ring => writeln!(f, "  {} slots of {}", ring.slots, HumanBytes(ring.slot_bytes))?,
                _ => writeln!(f)?,
            }
        }
        writeln!(f, "  {:<20} {:>9}  of the budget", "sum", HumanBytes(memory.budgeted_bytes()))?;
        let place = match memory.resident_kind() {
            ResidentKind::Device => "on the device",
            ResidentKind::Host | ResidentKind::Nowhere => "beside the budget",
        };
        writeln!(f, "resident {} at most, {place}", HumanBytes(memory.resident_bytes()))?;
        if !self.passes.is_one() {
            for term in memory.resident_terms() {
                writeln!(f, "  {:<20} {:>9}", term.kind, HumanBytes(term.bytes))?;
            }
            writeln!(f, "passes   {}", self.passes)?;
        }
        Ok(())
    }

    fn fmt_layer(&self, f: &mut fmt::Formatter<'_>, layer: &PlannedLayer) -> fmt::Result {
        writeln!(
            f,
            "layer    {:<40} {:>9}  {} tensors, {} reads{}",
            layer.id,
            HumanBytes(layer.tensor_bytes),
            layer.placements.len(),
            layer.reads.len(),
            if layer.is_kept { ", kept" } else { "" },
        )?;
        if !f.alternate() {
            return Ok(());
        }
        for read in layer.reads.clone().map(|index| self.read(index)) {
            self.fmt_read(f, &read)?;
        }
        for step in self.moves(layer) {
            writeln!(
                f,
                "  move   arena+{} -> arena+{}, {} bytes",
                step.source_arena_offset_bytes, step.target_arena_offset_bytes, step.len_bytes
            )?;
        }
        Ok(())
    }

    fn fmt_read(&self, f: &mut fmt::Formatter<'_>, read: &ReadOp) -> fmt::Result {
        let request = &read.request;
        writeln!(
            f,
            "  read   shard {} {} (wanted {})",
            request.shard.index(),
            request.extent,
            request.payload
        )?;
        for step in self.gathers(read) {
            writeln!(
                f,
                "    gather slot+{}, {} of {} bytes, in runs of {}",
                step.slot_offset_bytes,
                step.wanted_bytes(),
                step.source_len_bytes,
                step.gather.run_bytes()
            )?;
        }
        for step in self.permuting(read) {
            let unit_bytes = step.permutation.unit_bytes();
            writeln!(
                f,
                "    permute slot+{}, {} bytes, in units of {unit_bytes}",
                step.slot_offset_bytes, step.len_bytes
            )?;
        }
        for step in self.casts(read) {
            writeln!(
                f,
                "    {} slot+{}, {} bytes, to {}",
                name(step.cast),
                step.slot_offset_bytes,
                step.source_len_bytes,
                step.cast.to()
            )?;
        }
        for step in self.quantising(read) {
            let (rows, to) = (step.source_len_bytes / step.form.source_row_bytes(), step.form.to());
            let what = match step.form.part() {
                QuantisedPart::Values => ", values",
                QuantisedPart::Scales => ", scales",
                QuantisedPart::ValuesWithScales | QuantisedPart::ScalesOfSame => "",
            };
            writeln!(
                f,
                "    quantise slot+{}, {rows} rows from {}, to {to}{what}",
                step.slot_offset_bytes, step.first_row
            )?;
        }
        for copy in self.copies(read) {
            writeln!(
                f,
                "    copy slot+{} -> arena+{}, {} bytes",
                copy.slot_offset_bytes, copy.arena_offset_bytes, copy.len_bytes
            )?;
        }
        Ok(())
    }
}

/// The effect of a cast on the size of an element.
const fn name(cast: Cast) -> &'static str {
    match (cast.is_narrowing(), cast.is_widening()) {
        (true, _) => "narrow",
        (_, true) => "widen",
        (false, false) => "cast",
    }
}
