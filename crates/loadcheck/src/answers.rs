//! The answer of each command in one sentence, from its report.

mod changed;

use crate::numbers::{bytes, container, count, limit_bytes, ratio, seconds, stated, sum};
use crate::report::{
    Answer, CommandName, Compared, Convert, Finding, Fitted, Leak, LimitOf, Placement, Report, Room,
    SlopeVerdict, State, Verdict,
};
use onelayer::units::to_u64;

/// What the command has found. `None` where there is nothing to say.
pub(crate) fn answer(report: &Report) -> Option<Answer> {
    if let Some((outcome, sentence)) = found_in_spite_of(report) {
        return Some(Answer { outcome, sentence });
    }
    if let Some(problem) = &report.error {
        return Some(Answer { outcome: Finding::Error, sentence: problem.message.clone() });
    }
    let (outcome, sentence) = match report.command {
        CommandName::Run | CommandName::Exec => measured(report)?,
        CommandName::Plan | CommandName::Fits => planned(report)?,
        CommandName::Inspect => inspected(report)?,
        CommandName::Compare => (Finding::Ok, compared(&report.comparison)?),
        CommandName::Fit => fitted(report)?,
        CommandName::Leak => leaked(report, report.leak.as_ref()?)?,
        CommandName::Convert => converted(report, report.convert.as_ref()?),
        CommandName::Verify => verified(report)?,
        CommandName::Doctor => (Finding::Ok, examined(report)),
        CommandName::Report => (Finding::Ok, changed::changed(report.changes.as_ref()?)),
        CommandName::Synth | CommandName::Unknown => return None,
    };
    Some(Answer { outcome, sentence })
}

/// What was found although the command ended with an error: a kill by a memory limit, and growth
/// before an interruption.
fn found_in_spite_of(report: &Report) -> Option<(Finding, String)> {
    report.error.as_ref()?;
    if report.exec.as_ref().is_some_and(|exec| exec.oom_kills > Some(0)) {
        let peak = report.runs.iter().filter_map(|run| run.peak.host_bytes).max();
        let limit = report.host.as_ref().and_then(|host| host.cgroup.as_ref()?.limit_bytes);
        let limit =
            limit.map_or("a memory limit".to_owned(), |limit| format!("the limit of {}", bytes(limit)));
        let peak = peak.map(|peak| format!(" at {}", bytes(peak))).unwrap_or_default();
        let sentence = format!("Killed{peak} by {limit}: it needs more memory.");
        return Some((Finding::OverLimit, sentence));
    }
    let leak = report.leak.as_ref()?;
    let (finding, sentence) = leaked(report, leak).filter(|(finding, _)| *finding == Finding::Grows)?;
    let (growth, counted, all) = (sentence.trim_end_matches('.'), leak.counted, leak.cycles);
    Some((finding, format!("{growth} (it ended after {counted} of {all} cycles).")))
}

/// `Loading needs 37 MiB of unreclaimable memory; a container of 128 MiB is enough.`
fn measured(report: &Report) -> Option<(Finding, String)> {
    let is_attached = report.is_attached();
    let peak_bytes = report.runs.iter().filter_map(|run| run.peak.host_bytes).max();
    let Some(peak_bytes) = peak_bytes else {
        let sentence = match is_attached {
            true => "Its memory cannot be measured: a thread of the kernel, or a process of another user.",
            false => "It ended before its memory could be measured.",
        };
        let sentence = sentence.to_owned();
        return (!report.runs.is_empty()).then_some((Finding::Unclear, sentence));
    };
    let what = match report.command {
        CommandName::Exec if is_attached => "While it was measured, the process needed",
        CommandName::Exec => "The command needs",
        _ => "Loading needs",
    };
    let at = report.runs.iter().find_map(|run| Some((run.peak.at.as_ref()?.seconds, run.seconds?)));
    let still = at.filter(|(at, all)| is_attached && *at >= 0.9 * all && *all > 1.0);
    let still = still.map_or("", |_| ", and most at the end: `loadcheck leak --pid` tells whether it grows");
    let needs = format!("{what} {} of unreclaimable memory{still}", bytes(peak_bytes));
    if report.runs.iter().any(|run| run.promise.as_ref().is_some_and(|promise| !promise.kept)) {
        return Some((Finding::OverLimit, format!("{needs}, and more than the memory that was promised.")));
    }
    let over: Vec<&str> = report
        .limits
        .iter()
        .filter(|limit| !limit.passed)
        .map(|limit| if limit.metric == "host" { "memory" } else { limit.metric.as_str() })
        .collect();
    match report.verdict {
        Verdict::Inconclusive => {
            Some((Finding::Unclear, format!("{needs}; a limit lies inside the spread of the runs.")))
        }
        _ if over == ["memory"] => {
            let limit = report.limits.iter().find_map(|limit| limit.limit_bytes.filter(|_| !limit.passed));
            let limit =
                limit.map_or("its limit".to_owned(), |limit| format!("the limit of {}", stated(limit)));
            Some((Finding::OverLimit, format!("{needs}: over {limit}.")))
        }
        _ if !over.is_empty() => {
            Some((Finding::OverLimit, format!("{needs}; over the limit on {}.", over.join(", "))))
        }
        _ if !report.limits.is_empty() => Some((Finding::Ok, format!("{needs}: within its limits."))),
        _ if is_attached => Some((Finding::Ok, format!("{needs}."))),
        _ => {
            let limit = container(peak_bytes).1.replace("Mi", " MiB");
            Some((Finding::Ok, format!("{needs}; a container of {limit} is enough.")))
        }
    }
}

/// `Fits in 8 GB: yes, 5.1 GiB to spare.`
fn planned(report: &Report) -> Option<(Finding, String)> {
    if let Some(placement) = &report.placement {
        return Some(match left_on_disk(placement) {
            Some(on_disk) => (Finding::DoesNotFit, on_disk),
            None => (Finding::Fits, placed(placement)),
        });
    }
    let room = report.room.as_ref()?;
    let limit = limit_of(room);
    let needed = bytes(room.needed_bytes);
    if room.fits {
        let spare = bytes(room.limit_bytes - room.needed_bytes);
        return Some((Finding::Fits, format!("Fits in {limit}: needs {needed} at most, {spare} to spare.")));
    }
    let short = bytes(room.needed_bytes - room.limit_bytes);
    let helps: Vec<String> = (room.alternatives.iter())
        .map(|other| format!("with {} it does ({})", other.flags, bytes(other.needed_bytes)))
        .collect();
    let helps = if helps.is_empty() { String::new() } else { format!("; {}", helps.join(", or ")) };
    let sentence = format!("Does not fit in {limit}: needs {needed}, {short} short{helps}.");
    Some((Finding::DoesNotFit, sentence))
}

fn limit_of(room: &Room) -> String {
    match room.limit_of {
        LimitOf::Stated => stated(room.limit_bytes),
        LimitOf::Cgroup => format!("the {} that are free in this container", bytes(room.limit_bytes)),
        LimitOf::Machine => format!("the {} that are free on this machine", bytes(room.limit_bytes)),
    }
}

/// `Fits: GPU 0 with 335 KiB to spare, the host with 956 MiB.`
fn placed(placement: &Placement) -> String {
    let used = placement.tiers.iter().filter(|share| share.layers > 0);
    let parts = used.map(|share| {
        let name = match share.tier.as_str() {
            "cpu" => "the host".to_owned(),
            device => format!("GPU {device}"),
        };
        let spare = share.free_bytes.map(|free| format!(", {} to spare", bytes(free)));
        format!("{} on {name}{}", count(share.layers, "layer"), spare.unwrap_or_default())
    });
    format!("Fits: {}.", parts.collect::<Vec<_>>().join("; "))
}

/// What neither a GPU nor the host holds.
fn left_on_disk(placement: &Placement) -> Option<String> {
    let disk = placement.tiers.iter().find(|share| share.tier == "disk" && share.layers > 0)?;
    let (layers, weights) = (count(disk.layers, "layer"), bytes(disk.weight_bytes));
    Some(format!("Does not fit: {layers} ({weights}) stay on the disk."))
}

fn inspected(report: &Report) -> Option<(Finding, String)> {
    let source = report.source.as_ref()?;
    let (size, tensors) = (bytes(source.bytes?), count(source.tensors?, "tensor"));
    let layers = count(source.layers?, "layer");
    let smallest = report.plan.as_ref().and_then(|plan| plan.smallest_budget_bytes);
    let budget = smallest.map(|smallest| format!("; a budget of {} is enough", bytes(smallest)));
    Some((Finding::Ok, format!("{size} in {tensors} and {layers}{}.", budget.unwrap_or_default())))
}

/// `stream was 1.4x faster than read and used 4.5x less memory.`
fn compared(rows: &[Compared]) -> Option<String> {
    let done = || rows.iter().filter(|row| row.completed > 0);
    let (first, others) = (done().next()?, done().skip(1));
    let time = |row: &Compared| row.seconds.as_ref().map(|time| time.median);
    let mut sentences = Vec::new();
    for other in others {
        let faster = match time(first).zip(time(other)).filter(|(mine, theirs)| *mine > 0.0 && *theirs > 0.0)
        {
            None => None,
            Some((mine, theirs)) if theirs >= mine * 1.05 => {
                Some(format!("{} faster than", ratio(theirs / mine)))
            }
            Some((mine, theirs)) if mine >= theirs * 1.05 => {
                Some(format!("{} slower than", ratio(mine / theirs)))
            }
            Some(_) => Some("as fast as".to_owned()),
        };
        let memory = match (first.peak.host_bytes, other.peak.host_bytes) {
            (Some(mine), Some(theirs)) if mine > 0 && theirs > 0 => {
                let (mine, theirs) = (crate::numbers::to_f64(mine), crate::numbers::to_f64(theirs));
                match theirs / mine {
                    share if share >= 1.05 => Some(format!("used {} less memory", ratio(share))),
                    share if share <= 0.95 => Some(format!("used {} more memory", ratio(1.0 / share))),
                    _ => Some("used as much memory".to_owned()),
                }
            }
            _ => None,
        };
        sentences.push(match (faster, memory) {
            // Its pages are reclaimable: to compare the rest would say nothing.
            (Some(faster), _)
                if other.host_ratio.is_none() && other.peak.file_bytes > other.peak.host_bytes =>
            {
                format!("{faster} {}, which keeps file pages", other.strategy)
            }
            (Some(faster), Some(memory)) => format!("{faster} {} and {memory}", other.strategy),
            (Some(faster), None) => format!("{faster} {}", other.strategy),
            _ => continue,
        });
    }
    match sentences.len() {
        0 => time(first).map(|time| format!("{} took {}.", first.strategy, seconds(time))),
        _ => Some(format!("{} was {}.", first.strategy, sentences.join("; "))),
    }
}

/// `512 MiB is the smallest limit that works (3 runs, to within 5 %); 640 MiB is comfortable.`
fn fitted(report: &Report) -> Option<(Finding, String)> {
    let fit = report.fit.as_ref()?;
    let several = fit.loaders.len() > 1;
    let one = |fitted: &Fitted| {
        let who = if several { format!("{}: ", fitted.strategy) } else { String::new() };
        let Some(smallest) = fitted.smallest_bytes else {
            return format!("{who}no limit that was tried works");
        };
        let comfortable = match fitted.comfortable_bytes {
            Some(limit) if limit == smallest => "; it costs no time".to_owned(),
            Some(limit) => format!("; from {} on it costs no time", limit_bytes(limit)),
            None => "; it costs time wherever it was tried".to_owned(),
        };
        let sure = fitted.precision_bytes.map(|off| format!(", found to within {}", bytes(off)));
        let sure = format!("{}{}", count(fit.runs, "run"), sure.unwrap_or_default());
        format!("{who}{} is the smallest limit that works ({sure}){comfortable}", limit_bytes(smallest))
    };
    let is_found = fit.loaders.iter().all(|fitted| fitted.smallest_bytes.is_some());
    let sentences: Vec<String> = fit.loaders.iter().map(one).collect();
    let outcome = if is_found { Finding::Fits } else { Finding::DoesNotFit };
    (!sentences.is_empty()).then(|| (outcome, format!("{}.", sentences.join(". "))))
}

/// `host grows by 1 MiB a cycle: out of memory after about 24 000 cycles.`
fn leaked(report: &Report, leak: &Leak) -> Option<(Finding, String)> {
    let leaks = leak.slopes.iter().filter(|slope| slope.verdict == SlopeVerdict::Leak);
    let steepest = leaks.max_by(|one, other| {
        one.bytes_per_cycle.partial_cmp(&other.bytes_per_cycle).unwrap_or(std::cmp::Ordering::Equal)
    });
    if let Some((slope, growth)) = steepest.and_then(|slope| Some((slope, slope.bytes_per_cycle?))) {
        let host = report.host.as_ref();
        let group_bytes = host.and_then(|host| host.cgroup.as_ref()?.limit_bytes);
        let ram_bytes = host.and_then(|host| host.ram_bytes);
        let limit_bytes = group_bytes.into_iter().chain(ram_bytes).min();
        let held_bytes = slope.points_bytes.last().copied().unwrap_or(0);
        let left_bytes = limit_bytes.map(|limit| crate::numbers::to_f64(limit.saturating_sub(held_bytes)));
        let cycles = left_bytes.map(|left| crate::numbers::whole(left / growth)).map(round);
        let end = match (slope.kind.as_str(), cycles) {
            ("vram" | "file", _) | (_, None) => String::new(),
            (_, Some(cycles)) => {
                let time = leak.cycle_seconds.map(|cycle| long_time(cycle * crate::numbers::to_f64(cycles)));
                let time = time.unwrap_or_else(|| format!("{} cycles", crate::numbers::grouped(cycles)));
                format!(": out of memory after about {time}")
            }
        };
        let growth = crate::numbers::signed(growth);
        let cycle = leak.cycle_seconds.map_or("a cycle".to_owned(), |time| format!("in {}", seconds(time)));
        return Some((Finding::Grows, format!("{} grows by {growth} {cycle}{end}.", kind_name(&slope.kind))));
    }
    let unclear = leak.slopes.iter().any(|slope| slope.verdict == SlopeVerdict::Unclear);
    let most = leak.slopes.iter().map(|slope| slope.max_bytes_per_cycle).max()?;
    let cycles = count(leak.counted, "cycle");
    if unclear {
        let sentence =
            format!("Unclear after {cycles}: growth may be above or below the limit; try more cycles.");
        return Some((Finding::Unclear, sentence));
    }
    leak.slopes.iter().any(|slope| slope.verdict == SlopeVerdict::Flat).then(|| {
        (Finding::Ok, format!("No leak: in {cycles} nothing grows by more than {} a cycle.", bytes(most)))
    })
}

/// `45 seconds`, `45 minutes`, `7 hours`, `12 days`.
fn long_time(seconds: f64) -> String {
    let (value, unit) = match seconds {
        seconds if seconds < 120.0 => (seconds, "seconds"),
        seconds if seconds < 7200.0 => (seconds / 60.0, "minutes"),
        seconds if seconds < 172_800.0 => (seconds / 3600.0, "hours"),
        seconds => (seconds / 86_400.0, "days"),
    };
    format!("{value:.0} {unit}")
}

/// As people call it, at the beginning of a sentence.
fn kind_name(kind: &str) -> &str {
    match kind {
        "host" => "Unreclaimable memory",
        "rss" => "Resident memory",
        "file" => "Mapped memory of files",
        "pinned" => "Pinned memory",
        "vram" => "Device memory",
        "live" => "The library's own memory",
        other => other,
    }
}

/// Two digits: the rest is not known.
fn round(value: u64) -> u64 {
    let step = 10_u64.pow(value.checked_ilog10().unwrap_or(0).saturating_sub(1));
    value / step * step
}

fn converted(report: &Report, convert: &Convert) -> (Finding, String) {
    let files = count(to_u64(convert.files.len()), "file");
    let size = bytes(sum(convert.files.iter().map(|file| file.bytes)));
    let Some(result) = &convert.result else {
        let free = bytes(convert.free_bytes);
        let sentence = format!("Would write {files}, {size}; {free} are free. Nothing was written.");
        return (Finding::Ok, sentence);
    };
    let peak = report.runs.iter().filter_map(|run| run.peak.host_bytes).max();
    let memory = peak.map(|peak| format!(", with {} of unreclaimable memory", bytes(peak)));
    let checked = report
        .verification
        .as_ref()
        .map(|found| if found.differences.is_empty() { "; every tensor is as in the source" } else { "" });
    let kept = match result.files_kept {
        0 => String::new(),
        kept => format!(" ({kept} by an earlier run)"),
    };
    let verb = if result.complete { "Converted to" } else { "Wrote a part of" };
    let (memory, checked) = (memory.unwrap_or_default(), checked.unwrap_or_default());
    (Finding::Ok, format!("{verb} {files}{kept}, {size}{memory}{checked}."))
}

fn verified(report: &Report) -> Option<(Finding, String)> {
    let found = report.verification.as_ref()?;
    let (tensors, size) = (count(found.tensors, "tensor"), bytes(found.bytes));
    let changed: Vec<String> = [(found.cast, "cast"), (found.quantised, "quantised")]
        .into_iter()
        .filter(|(tensors, _)| *tensors > 0)
        .map(|(tensors, how)| format!("{tensors} {how}"))
        .collect();
    let sentence = match (&found.against, found.bytes) {
        // To change a type may lose digits; what was made of them is right.
        (Some(against), _) if !changed.is_empty() => {
            let changed = changed.join(", ");
            format!("Every tensor is what the conversion makes of {against}: {tensors} ({changed}), {size}.")
        }
        (Some(against), _) => format!("Every tensor is as in {against}: {tensors}, {size} read."),
        (None, 0) => {
            "Headers and index are in order; the weights were not checked: there is no hash to check them by."
                .to_owned()
        }
        (None, _) => format!("Every byte that has a known hash is as it should be: {size} read."),
    };
    Some((Finding::Ok, sentence))
}

fn examined(report: &Report) -> String {
    let all = report.doctor.len();
    let missing: Vec<&str> = (report.doctor.iter())
        .filter(|check| check.state != State::Ok)
        .map(|check| check.check.as_str())
        .collect();
    match missing.as_slice() {
        [] => format!("Everything works here: {all} checks."),
        _ => format!("{} of {all} checks are ok here; not: {}.", all - missing.len(), missing.join(", ")),
    }
}
