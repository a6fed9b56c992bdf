//! Text of the commands that describe: `plan` (derived numbers), `inspect` (headers), `synth` (what
//! was written).

use super::grid::{Align, grid};
use super::terminal::Role;
use super::text::{Look, source_line, strategy_line};
use super::{escape::escape, placed, reading};
use crate::listing::{Layer, Listing, Tensor};
use crate::numbers::{bytes, count, grouped, rate, seconds};
use crate::report::Report;

/// Layers are listed in full up to so many lines, stacks folded into one line each beyond.
const LINES_MAX: usize = 40;

/// `loadcheck plan`
pub(crate) fn plan(report: &Report, look: &Look) -> Vec<String> {
    let (Some(plan), Some(source)) = (&report.plan, &report.source) else { return Vec::new() };
    let mut lines = vec![source_line(source), strategy_line(&plan.params)];
    lines.extend(reading::lines(&plan.files));
    lines.push(String::new());
    lines
        .push(look.paint.paint(Role::Strong, "host memory, derived from the headers (nothing was measured)"));
    let mut rows: Vec<Vec<String>> =
        plan.memory.iter().map(|term| vec![bytes(Some(term.bytes)), term.name.clone()]).collect();
    rows.push(vec![
        bytes(Some(plan.host_bytes)),
        format!("sum; the budget is {}", bytes(Some(plan.params.budget_bytes))),
    ]);
    lines.extend(grid(&[("", Align::Right), ("", Align::Left)], &rows, look.width));
    if let Some(resident) = plan.resident_bytes.filter(|resident| *resident > 0) {
        let place = if plan.resident_host_bytes == Some(0) { "on the device" } else { "beside the budget" };
        lines.push(format!("resident layers, {place}: at most {} (derived)", bytes(Some(resident))));
        lines
            .extend(plan.resident.iter().map(|term| format!("  {}: {}", term.name, bytes(Some(term.bytes)))));
    }
    if plan.ring.pinned_bytes > 0 {
        lines.push(format!(
            "pinned: {}, the whole ring if the driver allows it (derived)",
            bytes(Some(plan.ring.pinned_bytes))
        ));
    }
    if let Some(smallest) = plan.smallest_budget_bytes {
        lines.push(format!("smallest budget: {} (derived)", bytes(Some(smallest))));
    }
    lines.push(format!(
        "{}, {} in all; {} over-read; {} in the order of {} (derived)",
        count(plan.reads, "read"),
        bytes(Some(plan.read_bytes)),
        bytes(Some(plan.over_read_bytes)),
        count(plan.jumps, "jump"),
        plan.order
    ));
    if let Some(rank) = &plan.rank {
        lines.push(format!(
            "rank {} of {}: {} in part, {} whole; {} wanted, {} of gaps (derived)",
            rank.rank,
            rank.world,
            count(rank.part_tensors, "tensor"),
            grouped(rank.whole_tensors),
            bytes(Some(rank.wanted_bytes)),
            bytes(Some(rank.gap_bytes)),
        ));
    }
    lines.push(String::new());
    match &report.placement {
        Some(placement) => lines.extend(placed::lines(placement, look)),
        None => lines.extend(layer_lines(&report.layers, look)),
    }
    lines
}

/// `loadcheck inspect`
pub(crate) fn inspect(report: &Report, look: &Look) -> Vec<String> {
    let Some(source) = &report.source else { return Vec::new() };
    let mut lines = vec![source_line(source)];
    if let Some(smallest) = report.plan.as_ref().and_then(|plan| plan.smallest_budget_bytes) {
        lines.push(format!("budget    at least {} (derived)", bytes(Some(smallest))));
    }
    lines.push(String::new());
    lines.extend(layer_lines(&report.layers, look));
    lines.push(String::new());
    let header = [("dtype", Align::Left), ("tensors", Align::Right), ("bytes", Align::Right)];
    let dtypes: Vec<Vec<String>> = source
        .dtypes
        .iter()
        .map(|share| vec![share.dtype.clone(), grouped(share.tensors), bytes(Some(share.bytes))])
        .collect();
    lines.extend(headed(grid(&header, &dtypes, look.width), look));
    lines.push(String::new());
    let header = [
        ("largest tensors", Align::Left),
        ("dtype", Align::Left),
        ("shape", Align::Left),
        ("bytes", Align::Right),
    ];
    lines.extend(headed(grid(&header, &largest_tensors(&report.layers), look.width), look));
    lines
}

/// `loadcheck synth`
pub(crate) fn synth(report: &Report) -> Vec<String> {
    let Some(synth) = &report.synth else { return Vec::new() };
    let speed = rate(synth.bytes, synth.seconds).map(|rate| format!(", {rate}")).unwrap_or_default();
    vec![format!(
        "{}: {}, {}, {} in {}{speed}",
        escape(&synth.target),
        count(synth.files, "file"),
        count(synth.tensors, "tensor"),
        bytes(Some(synth.bytes)),
        seconds(synth.seconds)
    )]
}

/// Dims the first line.
fn headed(mut lines: Vec<String>, look: &Look) -> Vec<String> {
    if let Some(first) = lines.first_mut() {
        *first = look.paint.paint(Role::Dim, first);
    }
    lines
}

fn layer_lines(listing: &Listing, look: &Look) -> Vec<String> {
    let header = [("layer", Align::Left), ("tensors", Align::Right), ("bytes", Align::Right)];
    let fold = listing.len() > LINES_MAX && !look.verbose;
    let (mut rows, mut hidden) = (Vec::new(), 0);
    let mut layers = listing.iter().map(|layer| Folded::of(&layer)).peekable();
    while let Some(mut row) = layers.next() {
        while let Some(next) = layers.next_if(|next| fold && row.stack.is_some() && row.stack == next.stack) {
            row.add(next);
        }
        if rows.len() < LINES_MAX || look.verbose {
            rows.push(row.cells());
        } else {
            hidden += 1;
        }
    }
    let mut lines = headed(grid(&header, &rows, look.width), look);
    if hidden > 0 {
        lines.push(format!("  ... and {} more (all of them: -v or --json)", grouped(hidden)));
    }
    lines
}

/// Neighbours of one stack, in one line: `model.layers.0 .. model.layers.31  (32 layers, each:)`.
struct Folded<'a> {
    first: &'a str,
    last: &'a str,
    stack: Option<&'a str>,
    layers: u64,
    tensors: (u64, u64),
    bytes: (u64, u64),
}

impl<'a> Folded<'a> {
    fn of(layer: &Layer<'a>) -> Self {
        let tensors = count_u64(layer.tensors.len());
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

    fn cells(&self) -> Vec<String> {
        let range = |(least, most): (u64, u64), show: &dyn Fn(u64) -> String| {
            if least == most { show(most) } else { format!("{} - {}", show(least), show(most)) }
        };
        let name = if self.layers == 1 {
            self.first.to_owned()
        } else {
            format!("{} .. {}  ({} layers, each:)", self.first, self.last, self.layers)
        };
        vec![name, range(self.tensors, &grouped), range(self.bytes, &|size| bytes(Some(size)))]
    }
}

fn largest_tensors(listing: &Listing) -> Vec<Vec<String>> {
    let shape = |shape: &[u64]| {
        let shown: Vec<String> = shape.iter().take(8).map(u64::to_string).collect();
        format!("[{}{}]", shown.join(", "), if shape.len() > 8 { ", ..." } else { "" })
    };
    let row = |tensor: Tensor<'_>| {
        vec![tensor.name.to_owned(), tensor.dtype.to_owned(), shape(tensor.shape), bytes(Some(tensor.bytes))]
    };
    listing.largest_tensors(5).into_iter().map(row).collect()
}

fn count_u64(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}
