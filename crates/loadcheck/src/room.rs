//! Whether the host memory of a load fits in a limit, and what would help. Derived from headers:
//! nothing is loaded.

use onelayer::checkpoint::Checkpoint;
use onelayer::plan::FloatType;

use crate::args::Quantise;
use crate::config::LoadConfig;
use crate::machine::available;
use crate::measuring::SLACK_BYTES;
use crate::planned::plan_of;
use crate::report::{Alternative, LimitOf, Plan, Room};
use crate::sizes::Size;

/// The room for a load: in `stated_bytes` if a limit is stated, else in the memory that is free
/// here. `None` where that is not known.
pub(crate) fn room(
    checkpoint: &Checkpoint,
    config: &LoadConfig,
    plan: &Plan,
    stated_bytes: Option<u64>,
) -> Option<Room> {
    let (limit_bytes, limit_of) = match stated_bytes {
        Some(bytes) => (bytes, LimitOf::Stated),
        None => available()?,
    };
    let needed_bytes = needed_bytes(plan);
    let fits = needed_bytes <= limit_bytes;
    let mut alternatives = Vec::new();
    if !fits {
        let help = |flags: &[(&str, LoadConfig)]| {
            flags.iter().find_map(|(flags, config)| {
                let plan = plan_of(checkpoint, config, None).ok()?.plan;
                let needed_bytes = self::needed_bytes(&plan);
                let flags = (*flags).to_owned();
                (needed_bytes <= limit_bytes).then_some(Alternative { flags, needed_bytes })
            })
        };
        alternatives.extend(help(&with_window(config)));
        alternatives.extend(help(&with_less_weight(config)));
    }
    Some(Room { needed_bytes, limit_bytes, limit_of, fits, alternatives })
}

/// What a load takes at most: its budget, the layers that stay on the host, and the program itself.
fn needed_bytes(plan: &Plan) -> u64 {
    let resident_bytes = plan.resident_host_bytes.unwrap_or(0);
    plan.host_bytes.saturating_add(resident_bytes).saturating_add(SLACK_BYTES)
}

/// Fewer layers at once, the most first; then with less staging too.
fn with_window(config: &LoadConfig) -> Vec<(&'static str, LoadConfig)> {
    let window = |layers| LoadConfig { window: Some(layers), window_bytes: None, ..config.clone() };
    let small = |config: LoadConfig| LoadConfig { budget: Size::Bytes(16 << 20), ..config };
    let mut tries = Vec::new();
    if config.window.is_none_or(|layers| layers > 2) {
        tries.push(("--window 2", window(2)));
    }
    if config.window.is_none_or(|layers| layers > 1) {
        tries.push(("--window 1", window(1)));
    }
    tries.push(("--window 1 --budget 16MiB", small(window(1))));
    tries
}

/// The same layers at once, in fewer bytes.
fn with_less_weight(config: &LoadConfig) -> Vec<(&'static str, LoadConfig)> {
    if config.quantise.is_some() {
        return Vec::new();
    }
    let quantised = |form: &str| {
        form.parse::<Quantise>().ok().map(|form| LoadConfig { quantise: Some(form), ..config.clone() })
    };
    let narrow = LoadConfig { dtype: Some(FloatType::Bf16), ..config.clone() };
    let narrow = config.dtype.is_none().then_some(("--dtype bf16", narrow));
    let int8 = quantised("int8").map(|config| ("--quantise int8", config));
    let int4 = quantised("int4").map(|config| ("--quantise int4", config));
    [narrow, int8, int4].into_iter().flatten().collect()
}
