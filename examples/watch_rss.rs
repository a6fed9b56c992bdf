//! `watch_rss [--interval-ms N] -- CMD [ARGS]`: runs a command and watches its memory from outside.
//!
//! An independent check of `loadcheck`'s numbers, so it shares no code with the library. It reads
//! `/proc/<pid>/status`, keeps the last value of each process, and prints one line of JSON on
//! stdout after the command has ended. The command's stdout goes to stderr. The exit code is the
//! command's, or 128 + N after signal N.
//!
//! Changes after the last sample of a process are not seen; its high-water mark (`VmHWM`) covers
//! everything before.

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

/// The numbers of one process, in bytes.
#[derive(Clone, Debug, Default)]
struct Seen {
    name: String,
    rss_peak: u64,
    anon_last: u64,
    anon_max: u64,
    file_last: u64,
    file_max: u64,
    shmem_max: u64,
}

/// Numbers of one `status` file: name, VmHWM, RssAnon, RssFile, RssShmem.
struct Status {
    name: String,
    rss_peak: u64,
    anon: u64,
    file: u64,
    shmem: u64,
}

fn read_status(pid: u32) -> Option<Status> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = |key: &str| text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
    let bytes = |key: &str| line(key)?.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024);
    Some(Status {
        name: line("Name")?.trim().to_owned(),
        rss_peak: bytes("VmHWM")?,
        anon: bytes("RssAnon")?,
        file: bytes("RssFile")?,
        shmem: bytes("RssShmem")?,
    })
}

/// `root` and all of its descendants, found by reading the parent of every process on the machine.
/// A process stays known once seen, so one whose parent has ended is not lost.
fn family(root: u32, known: &BTreeMap<(u32, u64), Seen>) -> Vec<(u32, u64)> {
    let mut parents = Vec::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { continue };
        let Some((_, rest)) = stat.rsplit_once(") ") else { continue };
        let fields: Vec<&str> = rest.split(' ').collect();
        let (Some(parent), Some(start)) = (fields.get(1), fields.get(19)) else { continue };
        if let (Ok(parent), Ok(start)) = (parent.parse::<u32>(), start.parse::<u64>()) {
            parents.push((pid, parent, start));
        }
    }
    let mut found: Vec<(u32, u64)> = parents
        .iter()
        .filter(|(pid, _, start)| *pid == root || known.contains_key(&(*pid, *start)))
        .map(|(pid, _, start)| (*pid, *start))
        .collect();
    let mut index = 0;
    while index < found.len() {
        let parent = found[index].0;
        for (pid, its_parent, start) in &parents {
            if *its_parent == parent && !found.contains(&(*pid, *start)) {
                found.push((*pid, *start));
            }
        }
        index += 1;
    }
    found
}

/// Watches until the command has ended; returns its exit code.
fn watch(command: &[String], interval: Duration) -> Result<u8, String> {
    let stderr = std::io::stderr().as_fd().try_clone_to_owned().map_err(|error| error.to_string())?;
    let start = Instant::now();
    let mut child = Command::new(&command[0])
        .args(&command[1..])
        .stdout(Stdio::from(stderr))
        .spawn()
        .map_err(|error| format!("cannot start {}: {error}", command[0]))?;
    let mut seen: BTreeMap<(u32, u64), Seen> = BTreeMap::new();
    let (mut samples, mut anon_sum_max, mut rss_sum_max) = (0_u64, 0_u64, 0_u64);
    let mut members = family(child.id(), &seen);
    let mut next_search = Instant::now();
    let status = loop {
        if Instant::now() >= next_search {
            let begin = Instant::now();
            members = family(child.id(), &seen);
            // A search over many processes is slow, so it takes at most a fifth of the time.
            next_search = Instant::now() + (begin.elapsed() * 4).max(interval);
        }
        let (mut anon_sum, mut rss_sum) = (0, 0);
        for member in &members {
            let Some(status) = read_status(member.0) else { continue };
            let entry = seen.entry(*member).or_default();
            entry.name = status.name;
            entry.rss_peak = entry.rss_peak.max(status.rss_peak);
            (entry.anon_last, entry.file_last) = (status.anon, status.file);
            entry.anon_max = entry.anon_max.max(status.anon);
            entry.file_max = entry.file_max.max(status.file);
            entry.shmem_max = entry.shmem_max.max(status.shmem);
            anon_sum += status.anon;
            rss_sum += status.anon + status.file + status.shmem;
        }
        samples += 1;
        anon_sum_max = anon_sum_max.max(anon_sum);
        rss_sum_max = rss_sum_max.max(rss_sum);
        if let Some(status) = child.try_wait().map_err(|error| error.to_string())? {
            break status;
        }
        std::thread::sleep(interval);
    };
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    let processes: Vec<_> = seen
        .iter()
        .map(|((pid, _), seen)| {
            serde_json::json!({
                "pid": pid, "name": seen.name, "rss_peak_bytes": seen.rss_peak,
                "anon_peak_bytes": seen.anon_max, "anon_last_bytes": seen.anon_last,
                "file_peak_bytes": seen.file_max, "file_last_bytes": seen.file_last,
                "shmem_peak_bytes": seen.shmem_max,
            })
        })
        .collect();
    let largest = |pick: fn(&Seen) -> u64| seen.values().map(pick).max();
    let report = serde_json::json!({
        "command": command, "exit_code": code, "seconds": start.elapsed().as_secs_f64(),
        "interval_ms": interval.as_secs_f64() * 1e3, "samples": samples,
        "largest_process": { "rss_peak_bytes": largest(|seen| seen.rss_peak), "anon_peak_bytes": largest(|seen| seen.anon_max) },
        "sum": { "rss_peak_bytes": rss_sum_max, "anon_peak_bytes": anon_sum_max },
        "processes": processes,
    });
    print(&report.to_string());
    Ok(u8::try_from(code).unwrap_or(u8::MAX))
}

#[allow(clippy::print_stdout, reason = "prints its report")]
fn print(line: &str) {
    println!("{line}");
}

#[allow(clippy::print_stderr, reason = "prints usage errors")]
fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (options, command) = match arguments.iter().position(|argument| argument == "--") {
        Some(index) => (&arguments[..index], &arguments[index + 1..]),
        None => (&arguments[..], &[][..]),
    };
    let interval = match options {
        [] => Some(Duration::from_millis(2)),
        [flag, number] if flag == "--interval-ms" => number.parse().ok().map(Duration::from_millis),
        _ => None,
    };
    let (Some(interval), false) = (interval, command.is_empty()) else {
        eprintln!("usage: watch_rss [--interval-ms N] -- CMD [ARGS]");
        return ExitCode::from(2);
    };
    match watch(command, interval) {
        Ok(code) => ExitCode::from(code),
        Err(message) => {
            eprintln!("watch_rss: {message}");
            ExitCode::from(2)
        }
    }
}
