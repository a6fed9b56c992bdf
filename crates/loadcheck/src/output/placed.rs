//! Text of `plan --vram`: what is on each GPU, on the host and on the disk, and what fits at most.

use super::grid::{Align, grid};
use super::terminal::Role;
use super::text::Look;
use crate::numbers::{bytes, grouped};
use crate::report::{PlacedLayer, Placement, TierShare};

/// Runs of layers are listed up to so many lines.
const RUNS_MAX: usize = 40;

/// Lines for people.
pub(crate) fn lines(placement: &Placement, look: &Look) -> Vec<String> {
    let head = |text: &str| look.paint.paint(Role::Strong, text);
    let mut lines = vec![head("placement, derived from headers and config.json (nothing was measured)")];
    lines.push(workload_line(placement));
    lines.extend(tier_lines(placement, look));
    lines.extend(largest_line(placement));
    lines.push(String::new());
    let header = [
        ("layers", Align::Left),
        ("place", Align::Left),
        ("weights", Align::Right),
        ("kept", Align::Right),
        ("by", Align::Left),
    ];
    let runs = runs(&placement.layers, look.verbose);
    let shown: Vec<Vec<String>> =
        runs.iter().take(if look.verbose { usize::MAX } else { RUNS_MAX }).cloned().collect();
    lines.extend(grid(&header, &shown, look.width));
    if shown.len() < runs.len() {
        lines.push(format!("  ... and {} more lines (all of them: -v or --json)", runs.len() - shown.len()));
    }
    lines.push(String::new());
    lines.extend(precision_lines(placement, look));
    lines
}

fn workload_line(placement: &Placement) -> String {
    let kept = match (placement.context_tokens, &placement.cache_bytes) {
        (0, _) => "no context".to_owned(),
        (_, None) => "cache unknown".to_owned(),
        (_, Some(kept)) => format!("cache {}", bytes(Some(*kept))),
    };
    let context = match placement.context_tokens {
        0 => String::new(),
        tokens => format!("; {} tokens x {} at once", grouped(tokens), grouped(placement.batch)),
    };
    format!("weights {}, {kept}{context}", bytes(Some(placement.weight_bytes)))
}

fn tier_lines(placement: &Placement, look: &Look) -> Vec<String> {
    let header = [
        ("", Align::Left),
        ("layers", Align::Right),
        ("weights", Align::Right),
        ("cache", Align::Right),
        ("work (est.)", Align::Right),
        ("landing", Align::Right),
        ("sum", Align::Right),
        ("limit", Align::Right),
        ("free", Align::Right),
    ];
    let part = |value: u64| if value == 0 { String::new() } else { bytes(Some(value)) };
    let row = |share: &TierShare| {
        vec![
            place_name(&share.tier),
            grouped(share.layers),
            bytes(Some(share.weight_bytes)),
            part(share.cache_bytes),
            part(share.activation_estimate_bytes),
            part(share.landing_bytes),
            bytes(Some(share.needed_bytes)),
            share.limit_bytes.map_or_else(|| "none".to_owned(), |limit| bytes(Some(limit))),
            share.free_bytes.map_or_else(|| "-".to_owned(), |free| bytes(Some(free))),
        ]
    };
    let rows: Vec<Vec<String>> = placement.tiers.iter().map(row).collect();
    grid(&header, &rows, look.width)
}

/// `GPU 0`, `host`, `disk`.
fn place_name(tier: &str) -> String {
    match tier {
        "cpu" => "host".to_owned(),
        "disk" => tier.to_owned(),
        device => format!("GPU {device}"),
    }
}

fn largest_line(placement: &Placement) -> Option<String> {
    let largest = &placement.largest;
    let said = |value: Option<u64>| value.map_or_else(|| "none".to_owned(), grouped);
    if placement.cache_unknown.is_some() {
        return None;
    }
    let has_gpus = placement.tiers.iter().any(|share| !matches!(share.tier.as_str(), "cpu" | "disk"));
    let both = |what: &str, on_gpus: Option<u64>, anywhere: Option<u64>| match has_gpus {
        true => format!("{what} {} on GPUs alone, {} anywhere", said(on_gpus), said(anywhere)),
        false => format!("{what} {}", said(anywhere)),
    };
    let mut parts = vec![both("context", largest.context_tokens_on_gpus, largest.context_tokens)];
    if placement.context_tokens > 0 {
        parts.push(both("batch", largest.batch_on_gpus, largest.batch));
    }
    Some(format!("largest that fits: {}", parts.join("; ")))
}

/// Neighbours of one stack that are alike, in one line.
fn runs(layers: &[PlacedLayer], each: bool) -> Vec<Vec<String>> {
    let stack = |layer: &PlacedLayer| layer.id.rsplit_once('.').map(|(stack, _)| stack.to_owned());
    let is_alike = |one: &PlacedLayer, other: &PlacedLayer| {
        one.tier == other.tier
            && one.cache_bytes == other.cache_bytes
            && one.weight_bytes == other.weight_bytes
            && stack(one) == stack(other)
    };
    let same = |one: &PlacedLayer, other: &PlacedLayer| !each && is_alike(one, other);
    let cells = |run: &[PlacedLayer]| {
        let (first, last) = (&run[0], &run[run.len() - 1]);
        let (name, times) = match run.len() {
            1 => (first.id.clone(), String::new()),
            count => (format!("{} .. {}", first.id, last.id), format!("{count} x ")),
        };
        let window = first.window_tokens.map(|tokens| format!(", window {}", grouped(tokens)));
        let by = first.attention.as_ref().map(|name| format!("{name}{}", window.unwrap_or_default()));
        let kept = first.cache_bytes.filter(|kept| *kept > 0).map(|kept| bytes(Some(kept)));
        vec![
            name,
            place_name(&first.tier),
            format!("{times}{}", bytes(Some(first.weight_bytes))),
            kept.unwrap_or_default(),
            by.unwrap_or_default(),
        ]
    };
    layers.chunk_by(same).map(cells).collect()
}

fn precision_lines(placement: &Placement, look: &Look) -> Vec<String> {
    let header = [
        ("in another precision (derived)", Align::Left),
        ("weights", Align::Right),
        ("all on GPUs", Align::Left),
        ("largest context", Align::Right),
    ];
    let rows = placement.precisions.iter().map(|need| {
        vec![
            need.precision.clone(),
            bytes(Some(need.weight_bytes)),
            if need.on_gpus { "yes" } else { "no" }.to_owned(),
            need.context_tokens_on_gpus.map(grouped).unwrap_or_default(),
        ]
    });
    grid(&header, &rows.collect::<Vec<_>>(), look.width)
}
