//! `plan --vram`: what is on each GPU, on the host and on the disk, and the most that fits.

use super::document::{Document, Table, View, role};
use super::facts::tier_name;
use super::terminal::Role;
use crate::numbers::{bytes, grouped};
use crate::report::{PlacedLayer, Placement, PrecisionNeed, TierShare};
use onelayer::units::to_u64;

/// Rows of layers that a terminal shows.
const ROWS_MAX: usize = 40;

/// The largest batch that is searched for: there is no limit then.
const BATCH_MAX: u64 = 1 << 20;

/// Adds the placement.
pub(super) fn add(placement: &Placement, view: View, document: &mut Document) {
    let head = "placement, derived from headers and config.json (nothing was measured)";
    document.line(role(Role::Strong, head));
    document.line(workload(placement));
    document.table(tiers(&placement.tiers));
    if let Some(largest) = largest(placement) {
        document.line(largest);
    }
    document.gap();
    let mut rows = alike(&placement.layers, view.verbose);
    let rows_max = if view.verbose { usize::MAX } else { ROWS_MAX };
    let hidden = to_u64(rows.len().saturating_sub(rows_max));
    rows.truncate(rows_max);
    document.table(layers(rows));
    document.hidden(hidden, "-v or --json");
    document.gap();
    document.table(precisions(&placement.precisions));
}

fn workload(placement: &Placement) -> String {
    let kept = match (placement.context_tokens, placement.cache_bytes) {
        (0, _) => "no context".to_owned(),
        (_, None) => "cache unknown".to_owned(),
        (_, Some(kept)) => format!("cache {}", bytes(kept)),
    };
    let context = match placement.context_tokens {
        0 => String::new(),
        tokens => format!("; {} tokens x {} at once", grouped(tokens), grouped(placement.batch)),
    };
    format!("weights {}, {kept}{context}", bytes(placement.weight_bytes))
}

fn tiers(tiers: &[TierShare]) -> Table {
    let part = |value: u64| (value > 0).then(|| bytes(value));
    Table::of(tiers)
        .left("", |share| tier_name(&share.tier))
        .right("layers", |share| grouped(share.layers))
        .right("weights", |share| bytes(share.weight_bytes))
        .right("cache", |share| part(share.cache_bytes))
        .right("work (est.)", |share| part(share.activation_estimate_bytes))
        .right("landing", |share| part(share.landing_bytes))
        .right("sum", |share| bytes(share.needed_bytes))
        .right("limit", |share| share.limit_bytes.map_or_else(|| "none".to_owned(), bytes))
        .right("free", |share| bytes(share.free_bytes))
        .table()
}

fn largest(placement: &Placement) -> Option<String> {
    let largest = &placement.largest;
    if placement.cache_unknown.is_some() {
        return None;
    }
    let number = |value: Option<u64>| value.map_or_else(|| "none".to_owned(), grouped);
    let has_gpus = placement.tiers.iter().any(|share| !matches!(share.tier.as_str(), "cpu" | "disk"));
    let both = |what: &str, on_gpus: Option<u64>, anywhere: Option<u64>| match has_gpus {
        true => format!("{what} {} on GPUs alone, {} anywhere", number(on_gpus), number(anywhere)),
        false => format!("{what} {}", number(anywhere)),
    };
    let mut parts = vec![both("context", largest.context_tokens_on_gpus, largest.context_tokens)];
    if placement.context_tokens > 0 {
        parts.push(both("batch", largest.batch_on_gpus, largest.batch).replace(&grouped(BATCH_MAX), "any"));
    }
    Some(format!("largest that fits: {}", parts.join("; ")))
}

/// Runs of neighbours that share a row: equal layers of one stack, in one place.
fn alike(layers: &[PlacedLayer], each: bool) -> Vec<&[PlacedLayer]> {
    let stack = |layer: &PlacedLayer| layer.id.rsplit_once('.').map(|(stack, _)| stack.to_owned());
    let is_alike = |one: &PlacedLayer, other: &PlacedLayer| {
        !each
            && one.tier == other.tier
            && one.cache_bytes == other.cache_bytes
            && one.weight_bytes == other.weight_bytes
            && stack(one) == stack(other)
    };
    layers.chunk_by(is_alike).collect()
}

fn layers(rows: Vec<&[PlacedLayer]>) -> Table {
    Table::of(rows)
        .left("layers", |row| match row {
            [one] => one.id.clone(),
            several => format!("{} .. {}", several[0].id, several[several.len() - 1].id),
        })
        .left("place", |row| tier_name(&row[0].tier))
        .right("weights", |row| match row.len() {
            1 => bytes(row[0].weight_bytes),
            count => format!("{count} x {}", bytes(row[0].weight_bytes)),
        })
        .right("kept", |row| row[0].cache_bytes.filter(|kept| *kept > 0).map(bytes))
        .left("by", |row| {
            let window = row[0].window_tokens.map(|tokens| format!(", window {}", grouped(tokens)));
            let attention = row[0].attention.as_ref();
            attention.map(|attention| format!("{attention}{}", window.unwrap_or_default()))
        })
        .table()
}

fn precisions(needs: &[PrecisionNeed]) -> Table {
    Table::of(needs)
        .left("in another precision (derived)", |need| need.precision.clone())
        .right("weights", |need| bytes(need.weight_bytes))
        .left("all on GPUs", |need| if need.on_gpus { "yes" } else { "no" })
        .right("largest context", |need| need.context_tokens_on_gpus.map(grouped))
        .table()
}
