//! The commands that describe a checkpoint: `plan` (derived numbers), `inspect` (headers) and
//! `synth` (files that were written).

use super::document::{Document, Table, Text, View, name, role};
use super::terminal::Role;
use super::{facts, placed};
use crate::listing::{Layer, Listing};
use crate::numbers::{bytes, count, grouped, rate, seconds, stated};
use crate::report::{MemoryTerm, Report};
use onelayer::units::to_u64;

/// Layers that a terminal shows. If there are more, neighbours of one stack share a row.
const ROWS_MAX: usize = 40;
/// The largest tensors that `inspect` shows.
const LARGEST_MAX: usize = 5;
/// Dimensions of a shape that are shown.
const DIMENSIONS_MAX: usize = 8;

/// The document of `plan`.
pub(super) fn plan(report: &Report, view: View) -> Document {
    let mut document = Document::default();
    let (Some(plan), Some(source)) = (&report.plan, &report.source) else { return document };
    document.push(facts::source(source, view));
    if view.shows_how() {
        document.push(facts::strategy(&plan.params));
        document.extend(facts::reading(&plan.files));
    }
    document.gap();
    document
        .line(role(Role::Strong, "unreclaimable memory, derived from the headers (nothing was measured)"));
    let sum = format!("sum; the budget is {}", stated(plan.params.budget_bytes));
    document.table(facts::memory_terms(&plan.memory, Some((plan.host_bytes, sum))));
    if let Some(resident) = plan.resident_bytes.filter(|resident| *resident > 0) {
        let place = if plan.resident_host_bytes == Some(0) { "on the device" } else { "beside the budget" };
        document.line(format!("resident layers, {place}: at most {} (derived)", bytes(resident)));
        plan.resident
            .iter()
            .for_each(|term| document.line(format!("  {}: {}", term.name, bytes(term.bytes))));
    }
    if plan.ring.pinned_bytes > 0 {
        let pinned = bytes(plan.ring.pinned_bytes);
        document.line(format!("pinned: {pinned}, the whole ring if the driver allows it (derived)"));
    }
    if let Some(smallest) = plan.smallest_budget_bytes {
        document.line(format!("smallest budget: {} (derived)", bytes(smallest)));
    }
    if view.shows_how() {
        document.line(format!(
            "{}, {} in all; {} over-read; {} in the order of {} (derived)",
            count(plan.reads, "read"),
            bytes(plan.read_bytes),
            bytes(plan.over_read_bytes),
            count(plan.jumps, "jump"),
            plan.order
        ));
    }
    if let Some(rank) = &plan.rank {
        document.line(format!(
            "rank {} of {}: {} in part, {} whole; {} wanted, {} of gaps (derived)",
            rank.rank,
            rank.world,
            count(rank.part_tensors, "tensor"),
            grouped(rank.whole_tensors),
            bytes(rank.wanted_bytes),
            bytes(rank.gap_bytes),
        ));
    }
    document.gap();
    match &report.placement {
        Some(placement) => placed::add(placement, view, &mut document),
        None => layers(&report.layers, view, &mut document),
    }
    if let Some(rank) = plan.rank.as_ref().filter(|_| report.placement.is_none()) {
        let own = bytes(plan.tensor_bytes);
        document.line(format!(
            "  of these, rank {} of {} loads {own}: sizes above are whole",
            rank.rank, rank.world
        ));
    }
    document
}

/// The document of `fits`: what the sum is made of.
pub(super) fn fits(report: &Report, view: View) -> Document {
    let mut document = Document::default();
    let (Some(plan), Some(source), Some(room)) = (&report.plan, &report.source, &report.room) else {
        return document;
    };
    document.push(facts::source(source, view));
    let resident_bytes = plan.resident_host_bytes.unwrap_or(0);
    let rest_bytes = room.needed_bytes.saturating_sub(plan.host_bytes.saturating_add(resident_bytes));
    let term = |name: &str, bytes| MemoryTerm { name: name.to_owned(), bytes };
    let terms = [
        term("layers that stay on the host", resident_bytes),
        term("staging and plan, within --budget", plan.host_bytes),
        term("the program, at most", rest_bytes),
    ];
    let sum = "unreclaimable memory at most, derived from the headers (nothing was measured)";
    document.table(facts::memory_terms(&terms, Some((room.needed_bytes, sum.to_owned()))));
    document.extend(Some(facts::strategy(&plan.params)).filter(|_| view.verbose));
    document
}

/// The document of `inspect`. A page has the layers alone.
pub(super) fn inspect(report: &Report, view: View) -> Document {
    let mut document = Document::default();
    let Some(source) = &report.source else { return document };
    document.push(facts::source(source, view));
    if view.is_page {
        layers(&report.layers, view, &mut document);
        return document;
    }
    if let Some(smallest) = report.plan.as_ref().and_then(|plan| plan.smallest_budget_bytes) {
        document.fact("budget", format!("at least {} (derived)", bytes(smallest)));
    }
    document.gap();
    layers(&report.layers, view, &mut document);
    document.gap();
    document.table(
        Table::of(&source.dtypes)
            .left("dtype", |share| share.dtype.clone())
            .right("tensors", |share| grouped(share.tensors))
            .right("bytes", |share| bytes(share.bytes))
            .table(),
    );
    document.gap();
    document.table(
        Table::of(report.layers.largest_tensors(LARGEST_MAX))
            .left("largest tensors", |tensor| name(tensor.name))
            .left("dtype", |tensor| tensor.dtype)
            .left("shape", |tensor| shape(tensor.shape))
            .right("bytes", |tensor| bytes(tensor.bytes))
            .table(),
    );
    document
}

fn shape(shape: &[u64]) -> String {
    let shown: Vec<String> = shape.iter().take(DIMENSIONS_MAX).map(u64::to_string).collect();
    format!("[{}{}]", shown.join(", "), if shape.len() > DIMENSIONS_MAX { ", ..." } else { "" })
}

/// The document of `synth`.
pub(super) fn synth(report: &Report) -> Document {
    let mut document = Document::default();
    if let Some(synth) = &report.synth {
        let (files, tensors) = (count(synth.files, "file"), count(synth.tensors, "tensor"));
        let speed = rate(synth.bytes, synth.seconds).map(|rate| format!(", {rate}")).unwrap_or_default();
        let (size, time) = (bytes(synth.bytes), seconds(synth.seconds));
        document.line(name(&synth.target) + format!(": {files}, {tensors}, {size} in {time}{speed}"));
    }
    document
}

/// Adds the table of layers; for a terminal, a stack shares a row where there are many.
fn layers(listing: &Listing, view: View, document: &mut Document) {
    let show_all = view.is_page || view.verbose;
    let fold = listing.len() > ROWS_MAX && !show_all;
    let (mut rows, mut hidden) = (Vec::new(), 0);
    let mut layers = listing.iter().map(|layer| LayerRow::of(&layer)).peekable();
    while let Some(mut row) = layers.next() {
        while let Some(next) = layers.next_if(|next| fold && row.stack.is_some() && row.stack == next.stack) {
            row.add(next);
        }
        if rows.len() < ROWS_MAX || show_all {
            rows.push(row);
        } else {
            hidden += 1;
        }
    }
    let table = Table::of(rows)
        .left("layer", LayerRow::name)
        .right("tensors", |row| range(row.tensors, grouped))
        .right("bytes", |row| range(row.bytes, bytes));
    document.table(table.table());
    document.hidden(hidden, "-v or --json");
}

/// A layer, or neighbours of one stack: `model.layers.0 .. model.layers.31  (32 layers, each:)`.
struct LayerRow<'a> {
    first: &'a str,
    last: &'a str,
    stack: Option<&'a str>,
    layers: u64,
    tensors: (u64, u64),
    bytes: (u64, u64),
}

impl<'a> LayerRow<'a> {
    fn of(layer: &Layer<'a>) -> Self {
        let tensors = to_u64(layer.tensors.len());
        Self {
            first: layer.id,
            last: layer.id,
            stack: layer.stack,
            layers: 1,
            tensors: (tensors, tensors),
            bytes: (layer.bytes, layer.bytes),
        }
    }

    fn add(&mut self, next: Self) {
        let widened = |range: (u64, u64), more: (u64, u64)| (range.0.min(more.0), range.1.max(more.1));
        self.last = next.last;
        self.layers += next.layers;
        self.tensors = widened(self.tensors, next.tensors);
        self.bytes = widened(self.bytes, next.bytes);
    }

    fn name(&self) -> Text {
        match self.layers {
            1 => name(self.first),
            layers => {
                name(format!("{} .. {}", self.first, self.last)) + format!("  ({layers} layers, each:)")
            }
        }
    }
}

fn range((least, most): (u64, u64), show: impl Fn(u64) -> String) -> String {
    if least == most { show(most) } else { format!("{} - {}", show(least), show(most)) }
}
