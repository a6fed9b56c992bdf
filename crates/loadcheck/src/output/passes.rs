//! Text about passes: how long each took and what binds.

use crate::numbers::{bytes, grouped, rate, seconds};
use crate::report::{Passes, Shares};

/// More passes than this are alike: the rest is in the JSON.
const LINES_MAX: usize = 8;

/// Two lines about all passes, and one for each of the first and the last.
pub(super) fn lines(passes: &Passes) -> Vec<String> {
    let kept = match passes.kept_bytes {
        0 => String::new(),
        kept_bytes => format!(", kept layers {}", bytes(Some(kept_bytes))),
    };
    let number = u64::try_from(passes.each.len()).unwrap_or(u64::MAX);
    let mut lines = vec![format!(
        "passes    {} of {}, window {}{kept}",
        grouped(number),
        grouped(passes.asked),
        bytes(Some(passes.window_bytes))
    )];
    let hidden = passes.each.len().saturating_sub(LINES_MAX);
    for (index, pass) in passes.each.iter().enumerate() {
        // The last one stands for those that are left out.
        if hidden > 0 && (LINES_MAX - 1..passes.each.len() - 1).contains(&index) {
            continue;
        }
        let moved =
            rate(pass.read_bytes, pass.seconds).map(|rate| format!(", {rate} read")).unwrap_or_default();
        lines.push(format!(
            "  pass {:<4}{:>9}{moved}; {}",
            index + 1,
            seconds(pass.seconds),
            shares(&pass.shares)
        ));
    }
    if hidden > 0 {
        lines.push(format!("  {hidden} between are left out (all of them: --json)"));
    }
    lines.push(format!("binds     {}", shares(&passes.shares)));
    lines
}

/// `disk 82 %, engine 3 %`: what is worth naming, largest first.
pub(super) fn shares(shares: &Shares) -> String {
    let mut named: Vec<_> = shares.named().into_iter().filter(|(_, share)| *share >= 0.005).collect();
    named.sort_by(|one, other| other.1.total_cmp(&one.1));
    match &named[..] {
        [] => "nothing: nobody waited".to_owned(),
        named => {
            let parts: Vec<_> =
                named.iter().map(|(name, share)| format!("{name} {:.0} %", 100.0 * share)).collect();
            parts.join(", ")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Pass;

    fn passes(number: usize) -> Passes {
        let shares = Shares { disk: 0.817, engine: 0.031, fill: 0.004, link: 0.0 };
        let pass = Pass { seconds: 0.5, read_bytes: 1 << 30, shares };
        Passes {
            asked: 20,
            window_bytes: 64 << 20,
            kept_bytes: 1 << 20,
            engine_seconds: 0.0,
            binds: Some("disk".to_owned()),
            shares,
            each: vec![pass; number],
        }
    }

    #[test]
    fn what_binds_is_named_largest_first() {
        let text = lines(&passes(2)).join("\n");
        assert!(text.starts_with("passes    2 of 20, window 64 MiB, kept layers 1 MiB\n"), "{text}");
        assert!(text.ends_with("\nbinds     disk 82 %, engine 3 %"), "{text}");
        assert_eq!(shares(&Shares::default()), "nothing: nobody waited");
    }

    #[test]
    fn many_passes_are_a_few_lines() {
        let lines = lines(&passes(20));
        assert_eq!(lines.len(), 1 + LINES_MAX + 2);
        assert!(lines[LINES_MAX].starts_with("  pass 20 "), "{lines:?}");
        assert!(lines[LINES_MAX + 1].contains("12 between"), "{lines:?}");
    }
}
