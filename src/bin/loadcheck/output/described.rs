//! Text of the commands that describe: `plan` (derived numbers), `inspect` (headers), `synth` (what was written).

use super::escape::escape;
use super::grid::{Align, grid};
use super::numbers::{bytes, count, grouped, rate, seconds};
use super::terminal::Role;
use super::text::{Look, source_line, strategy_line};
use crate::report::{Layer, Report};

/// Layers are listed in full up to so many lines, stacks folded into one line each beyond.
const LINES_MAX: usize = 40;

/// `loadcheck plan`
pub(crate) fn plan(report: &Report, look: &Look) -> Vec<String> {
    let (Some(plan), Some(source)) = (&report.plan, &report.source) else { return Vec::new() };
    let mut lines = vec![source_line(source), strategy_line(&plan.params), String::new()];
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
        lines
            .push(format!("resident layers, beside the budget: at most {} (derived)", bytes(Some(resident))));
    }
    if let Some(smallest) = plan.smallest_budget_bytes {
        lines.push(format!("smallest budget: {} (derived)", bytes(Some(smallest))));
    }
    lines.push(format!(
        "{}, {} in all; {} over-read (derived)",
        count(plan.reads, "read"),
        bytes(Some(plan.read_bytes)),
        bytes(Some(plan.over_read_bytes))
    ));
    lines.push(String::new());
    lines.extend(layer_lines(&report.layers, look));
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

fn layer_lines(layers: &[Layer], look: &Look) -> Vec<String> {
    let header = [("layer", Align::Left), ("tensors", Align::Right), ("bytes", Align::Right)];
    let fold = layers.len() > LINES_MAX && !look.verbose;
    let rows: Vec<Vec<String>> = if fold {
        let runs = layers.chunk_by(|left, right| left.stack.is_some() && left.stack == right.stack);
        runs.map(folded).collect()
    } else {
        layers.iter().map(|layer| folded(std::slice::from_ref(layer))).collect()
    };
    let hidden = rows.len().saturating_sub(LINES_MAX);
    let shown = if look.verbose { rows.as_slice() } else { &rows[..rows.len() - hidden] };
    let mut lines = headed(grid(&header, shown, look.width), look);
    if hidden > 0 && !look.verbose {
        lines.push(format!("  ... and {} more (all of them: -v or --json)", grouped(count_u64(hidden))));
    }
    lines
}

/// One line for neighbours of one stack: `model.layers.0 .. model.layers.31  x 32`.
fn folded(layers: &[Layer]) -> Vec<String> {
    let (first, last) = (&layers[0], &layers[layers.len() - 1]);
    let range = |values: &mut dyn Iterator<Item = u64>, show: &dyn Fn(u64) -> String| {
        let values: Vec<u64> = values.collect();
        let (least, most) =
            (values.iter().min().copied().unwrap_or(0), values.iter().max().copied().unwrap_or(0));
        if least == most { show(most) } else { format!("{} - {}", show(least), show(most)) }
    };
    let name = if layers.len() == 1 {
        first.id.clone()
    } else {
        format!("{} .. {}  ({} layers, each:)", first.id, last.id, layers.len())
    };
    let tensors = range(&mut layers.iter().map(|layer| count_u64(layer.tensors.len())), &grouped);
    let sizes = range(&mut layers.iter().map(|layer| layer.bytes), &|size| bytes(Some(size)));
    vec![name, tensors, sizes]
}

fn largest_tensors(layers: &[Layer]) -> Vec<Vec<String>> {
    let mut tensors: Vec<_> = layers.iter().flat_map(|layer| &layer.tensors).collect();
    tensors.sort_by(|left, right| right.bytes.cmp(&left.bytes).then_with(|| left.name.cmp(&right.name)));
    let shape = |shape: &[u64]| {
        let shown: Vec<String> = shape.iter().take(8).map(u64::to_string).collect();
        format!("[{}{}]", shown.join(", "), if shape.len() > 8 { ", ..." } else { "" })
    };
    let row = |tensor: &&crate::report::Tensor| {
        vec![tensor.name.clone(), tensor.dtype.clone(), shape(&tensor.shape), bytes(Some(tensor.bytes))]
    };
    tensors.iter().take(5).map(row).collect()
}

fn count_u64(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}
