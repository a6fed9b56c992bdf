#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a bench: the JSON goes to stdout")]
//! Measures the limits of this machine without this library, to compare loads with them.
//!
//! `cargo bench -p onelayer --bench device_limits -- [--device N] [--quick] [--only SECTION ...]
//! [--file FILE ...] [--threads N ...] [--seconds N]`
//!
//! Prints one JSON object. Sections: `h2d` (host to device from registered huge pages, by chunk,
//! ring and streams), `probe` (one row of it, to be measured again beside a load), `h2d_pageable`,
//! `d2h`, `registration`, `allocation`, and with files `fill` (page cache to ring by threads),
//! `fill_and_copy` (both at once), `disk` (cold). `--quick` makes one short pass of few rows. Rows
//! that no longer fit `--seconds` are left out, and `cut_short` lists their sections.
//!
//! GB are 10^9 bytes. Exit codes: 0 measured (a row that failed holds `error`), 2 wrong usage, 4 no
//! usable driver or device, with `{"error": ...}`; the sections `fill` and `disk` alone need none.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};

use self::copies::Bench;
use self::driver::{Answer, Gpu};
use self::files::Files;
use self::rate::Effort;

#[path = "gpu/copies.rs"]
mod copies;
#[path = "gpu/costs.rs"]
mod costs;
#[path = "gpu/driver.rs"]
mod driver;
#[path = "gpu/files.rs"]
mod files;
#[path = "support/plain.rs"]
mod plain;
#[path = "gpu/rate.rs"]
mod rate;
#[path = "support/residency.rs"]
mod residency;

const DEVICE_SECTIONS: [&str; 6] = ["h2d", "h2d_pageable", "d2h", "registration", "allocation", "probe"];
const FILE_SECTIONS: [&str; 2] = ["fill", "disk"];
/// Sections that need files and a device.
const BOTH: &str = "fill_and_copy";

struct Options {
    device: u32,
    effort: Effort,
    sections: Vec<String>,
    files: Files,
}

impl Options {
    fn wants(&self, section: &str) -> bool {
        self.sections.iter().any(|wanted| wanted == section)
    }
}

fn main() -> ExitCode {
    let options = match parse(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(problem) => {
            println!("{}", json!({ "error": problem }));
            eprintln!("device_limits: {problem}");
            return ExitCode::from(2);
        }
    };
    let mut report = Map::new();
    report.insert("schema".into(), json!("device_limits/1"));
    report.insert("quick".into(), json!(options.effort.quick));
    let measured = measure(&options, &mut report);
    if let Err(error) = &measured {
        report.insert("error".into(), json!(error.to_string()));
        eprintln!("device_limits: {error}");
    }
    println!("{}", Value::Object(report));
    ExitCode::from(if measured.is_ok() { 0 } else { 4 })
}

fn measure(options: &Options, report: &mut Map<String, Value>) -> Answer<()> {
    let needs_device = options.wants(BOTH) || DEVICE_SECTIONS.iter().any(|section| options.wants(section));
    if needs_device {
        let gpu = Gpu::open(options.device)?;
        report.insert("device".into(), describe(&gpu)?);
        let bench = Bench::new(&gpu, &options.effort)?;
        let mut add = |section: &str, rows: &dyn Fn() -> Vec<Value>| add(options, report, section, rows);
        add("probe", &|| copies::probe(&bench, &options.effort));
        add("h2d", &|| copies::registered(&bench, &options.effort));
        add("h2d_pageable", &|| copies::pageable(&bench, &options.effort));
        add("d2h", &|| copies::back(&bench, &options.effort));
        add("registration", &|| costs::registration(&gpu, &options.effort));
        add("allocation", &|| costs::allocation(&gpu, &options.effort));
        warm(options, report);
        add_files(options, report, Some((&gpu, &bench)));
    } else {
        warm(options, report);
        add_files(options, report, None);
    }
    Ok(())
}

fn describe(gpu: &Gpu) -> Answer<Value> {
    let identity = gpu.identity()?;
    let (free, total) = gpu.memory()?;
    let attributes: Map<_, _> =
        identity.attributes.iter().map(|(name, value)| ((*name).to_owned(), json!(value))).collect();
    Ok(json!({
        "name": identity.name,
        "uuid": identity.uuid,
        "cuda_version": identity.cuda_version,
        "free_bytes": free,
        "total_bytes": total,
        "attributes": attributes,
        "init_seconds": gpu.init_time.as_secs_f64(),
        "context_seconds": gpu.context_time.as_secs_f64(),
    }))
}

fn add_files(options: &Options, report: &mut Map<String, Value>, device: Option<(&Gpu, &Bench<'_>)>) {
    let (files, effort) = (&options.files, &options.effort);
    add(options, report, "fill", &|| files::fill(files, effort));
    if let Some((gpu, bench)) = device {
        add(options, report, BOTH, &|| files::fill_and_copy(files, gpu, bench, effort));
    }
    // Last: it drops the files from the page cache.
    add(options, report, "disk", &|| files::disk(files, effort));
}

fn warm(options: &Options, report: &mut Map<String, Value>) {
    if options.wants("fill") || options.wants(BOTH) {
        let share = options.files.warm();
        let share = share.map_or_else(|error| json!({ "error": error.to_string() }), |share| json!(share));
        report.insert("fill_cached_share".into(), share);
    }
}

fn add(options: &Options, report: &mut Map<String, Value>, section: &str, rows: &dyn Fn() -> Vec<Value>) {
    if !options.wants(section) {
        return;
    }
    let rows = if options.effort.is_over() { Vec::new() } else { rows() };
    if options.effort.is_over() {
        let cut = report.entry("cut_short").or_insert_with(|| json!([]));
        cut.as_array_mut().expect("made as a list").push(json!(section));
    }
    report.insert(section.to_owned(), json!(rows));
}

fn parse(words: impl Iterator<Item = String>) -> Result<Options, String> {
    let start = Instant::now();
    let (mut device, mut quick, mut seconds) = (0, false, 120);
    let (mut sections, mut paths, mut threads) = (Vec::new(), Vec::new(), Vec::new());
    let mut words = words.peekable();
    while let Some(word) = words.next() {
        // The words that follow, up to the next flag.
        let mut values = Vec::new();
        while let Some(value) = words.next_if(|next| !next.starts_with("--")) {
            values.push(value);
        }
        match (word.as_str(), values.as_slice()) {
            ("--quick" | "--bench", []) => quick |= word == "--quick",
            ("--device", [value]) => device = number(&word, value)?,
            ("--seconds", [value]) => seconds = number(&word, value)?,
            ("--only", [_, ..]) => sections = values,
            ("--file", [_, ..]) => paths = values.iter().map(PathBuf::from).collect(),
            ("--threads", [_, ..]) => {
                threads = values.iter().map(|value| number(&word, value)).collect::<Result<_, _>>()?;
            }
            _ => return Err(format!("{word} {}: not understood", values.join(" "))),
        }
    }
    if let Some(path) = paths.iter().find(|path| !path.is_file()) {
        return Err(format!("{}: no such file", path.display()));
    }
    if threads.contains(&0) {
        return Err("--threads 0: at least one reads".to_owned());
    }
    let sections = chosen(sections, !paths.is_empty())?;
    if threads.is_empty() {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        threads = [1, 2, 4, 6, 8, 12, 16].into_iter().filter(|count| *count <= cores.max(2)).collect();
    }
    let deadline = start + Duration::from_secs(seconds);
    Ok(Options { device, effort: Effort { quick, deadline }, sections, files: Files { paths, threads } })
}

fn number<T: std::str::FromStr>(flag: &str, value: &str) -> Result<T, String> {
    value.parse().map_err(|_| format!("{flag} {value}: not a number"))
}

/// The requested sections. Default: all but `probe`, and those with files only if files are given.
fn chosen(asked: Vec<String>, has_files: bool) -> Result<Vec<String>, String> {
    let with_files = FILE_SECTIONS.iter().chain([&BOTH]);
    if asked.is_empty() {
        let device = DEVICE_SECTIONS.iter().filter(|section| **section != "probe");
        let files = with_files.filter(|_| has_files);
        return Ok(device.chain(files).map(|section| (*section).to_owned()).collect());
    }
    for section in &asked {
        let needs_files = with_files.clone().any(|known| known == section);
        if !needs_files && !DEVICE_SECTIONS.contains(&section.as_str()) {
            return Err(format!("--only {section}: no such section"));
        }
        if needs_files && !has_files {
            return Err(format!("--only {section}: needs --file"));
        }
    }
    Ok(asked)
}
