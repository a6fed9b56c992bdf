//! `--emit`: the limits that were found, as lines that can be pasted.
//!
//! The request is the smallest comfortable limit, or else the smallest that works; the limit is
//! allowed is that and the headroom. Where a shell puts the lines into a command (`docker`,
//! `args`), they hold flags and nothing else.

use onelayer::units::MIB;

use crate::args::EmitArg;
use crate::config::LoadConfig;
use crate::report::{Fitted, Params};
use crate::shell::shell_word;
use crate::strategies::Strategy;

/// The lines for one loader; none if no limit works.
pub(crate) fn lines(
    emit: EmitArg,
    fitted: &Fitted,
    headroom_percent: u64,
    ours: Option<(&Params, &LoadConfig)>,
) -> Vec<String> {
    let Some(needed_bytes) = fitted.comfortable_bytes.or(fitted.smallest_bytes) else { return Vec::new() };
    let needed = mebibytes(needed_bytes, 0);
    let allowed = mebibytes(needed_bytes, headroom_percent);
    let comment = format!("# {}, +{headroom_percent} %", fitted.strategy);
    match emit {
        EmitArg::K8s => vec![format!(
            "resources: {{requests: {{memory: {needed}Mi}}, limits: {{memory: {allowed}Mi}}}}   {comment}"
        )],
        // Memory and swap together as much as memory alone: no swap.
        EmitArg::Docker => vec![format!("--memory={allowed}m --memory-swap={allowed}m")],
        // No MemoryHigh: it slows a service down long before MemoryMax would kill it, also where all
        // is well.
        EmitArg::Systemd => {
            vec![
                comment,
                "[Service]".to_owned(),
                format!("MemoryMax={allowed}M"),
                "MemorySwapMax=0".to_owned(),
            ]
        }
        EmitArg::Args => vec![arguments(fitted, headroom_percent, ours)],
    }
}

/// Flags for `loadcheck run`, or of another loader for `loadcheck exec`: the load as it was run,
/// and a gate.
fn arguments(fitted: &Fitted, headroom_percent: u64, ours: Option<(&Params, &LoadConfig)>) -> String {
    let mut words = Vec::new();
    let is_ours = fitted.command.is_none() && fitted.strategy == Strategy::Stream.name();
    if let Some((params, load)) = ours.filter(|_| is_ours) {
        words.push(format!("--budget={}", exact(params.budget_bytes)));
        words.push(format!("--io={}", params.io));
        words.push(format!("--device={}", params.device));
        words.push(match (params.window, params.window_bytes) {
            (Some(window), _) => format!("--window={window}"),
            (None, Some(bytes)) => format!("--window={bytes}B"),
            (None, None) => "--window=all".to_owned(),
        });
        words.push(format!("--prefetch={}", params.prefetch));
        words.extend(params.dtype.as_ref().map(|dtype| format!("--dtype={dtype}")));
        words.extend(params.quantise.as_ref().map(|form| format!("--quantise={form}")));
        words.extend(load.quantise_only.as_ref().map(|only| shell_word(&format!("--quantise-only={only}"))));
        words.extend(params.device_budget_bytes.map(|bytes| format!("--device-budget={}", exact(bytes))));
        words.extend(load.readers.map(|readers| format!("--readers={readers}")));
        // In quotes where a shell needs them: they are for pasting, and mean nothing to `$(...)`.
        words.extend(load.select.as_ref().map(|select| shell_word(&format!("--select={select}"))));
        let layers = load.layers.as_ref().map(|path| path.0.display());
        words.extend(layers.map(|path| shell_word(&format!("--layers={path}"))));
    }
    // Sampled, so the highest of all runs: a short load is not seen the same in each.
    let sampled = fitted.tries.iter().filter_map(|tried| tried.peak_host_bytes);
    if let Some(host_bytes) = sampled.chain(fitted.unlimited_host_bytes).max() {
        words.push(format!("--max-memory={}MiB", mebibytes(host_bytes, headroom_percent)));
    }
    words.join(" ")
}

/// So many bytes and per cent more, in whole mebibytes, rounded up.
fn mebibytes(bytes: u64, more_percent: u64) -> u64 {
    let hundredfold = u128::from(bytes) * u128::from(more_percent.saturating_add(100));
    u64::try_from(hundredfold.div_ceil(100 * u128::from(MIB))).unwrap_or(u64::MAX)
}

/// A size without rounding: in mebibytes where they are whole.
fn exact(bytes: u64) -> String {
    if bytes.is_multiple_of(MIB) { format!("{}MiB", bytes / MIB) } else { format!("{bytes}B") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::LoadArgs;

    fn fitted() -> Fitted {
        Fitted {
            strategy: "copy".to_owned(),
            smallest_bytes: Some(1228 * MIB + 1),
            unlimited_host_bytes: Some(1000 * MIB),
            ..Fitted::default()
        }
    }

    #[test]
    fn lines_can_be_pasted() {
        let emitted = |emit| lines(emit, &fitted(), 25, None).join("\n");
        assert_eq!(
            emitted(EmitArg::K8s),
            "resources: {requests: {memory: 1229Mi}, limits: {memory: 1536Mi}}   # copy, +25 %"
        );
        assert_eq!(emitted(EmitArg::Docker), "--memory=1536m --memory-swap=1536m");
        assert_eq!(emitted(EmitArg::Systemd), "# copy, +25 %\n[Service]\nMemoryMax=1536M\nMemorySwapMax=0");
        assert_eq!(emitted(EmitArg::Args), "--max-memory=1250MiB");
    }

    #[test]
    fn our_own_flags_are_those_of_the_load() {
        let ours = Fitted { strategy: "stream".to_owned(), ..fitted() };
        let params = Params {
            budget_bytes: 64 * MIB,
            prefetch: 2,
            window: Some(1),
            window_bytes: None,
            passes: None,
            io: "direct".to_owned(),
            device: "host".to_owned(),
            readers: None,
            hash: false,
            verify: false,
            dtype: Some("bf16".to_owned()),
            quantise: Some("int8".to_owned()),
            tp: None,
            device_budget_bytes: None,
            device_reserve_bytes: None,
        };
        let (load, _) = LoadConfig::new(&LoadArgs::looking_at("model".into()), "model".into());
        let of_ours = |params: &Params, load: &LoadConfig| {
            lines(EmitArg::Args, &ours, 0, Some((params, load))).concat()
        };
        let common =
            "--budget=64MiB --io=direct --device=host --window=1 --prefetch=2 --dtype=bf16 --quantise=int8";
        assert_eq!(of_ours(&params, &load), format!("{common} --max-memory=1000MiB"));
        let others = lines(EmitArg::Args, &fitted(), 0, Some((&params, &load)));
        assert_eq!(others, ["--max-memory=1000MiB"], "another's");
        let (params, load) = (
            Params { device_budget_bytes: Some(MIB + 1), ..params },
            LoadConfig { readers: Some(3), select: Some("a b$".to_owned()), ..load },
        );
        assert_eq!(
            of_ours(&params, &load),
            format!("{common} --device-budget=1048577B --readers=3 '--select=a b$' --max-memory=1000MiB")
        );
        assert_eq!(exact(5000), "5000B");
    }

    #[test]
    fn comfort_comes_first_and_nothing_found_is_nothing_said() {
        let comfortable = Fitted { comfortable_bytes: Some(2000 * MIB), ..fitted() };
        assert_eq!(lines(EmitArg::Docker, &comfortable, 0, None), ["--memory=2000m --memory-swap=2000m"]);
        let nothing = Fitted { smallest_bytes: None, ..fitted() };
        for emit in [EmitArg::K8s, EmitArg::Docker, EmitArg::Systemd, EmitArg::Args] {
            assert!(lines(emit, &nothing, 25, None).is_empty());
        }
        assert_eq!(mebibytes(u64::MAX, 1000), 193_514_046_488_576);
    }
}
