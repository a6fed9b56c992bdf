//! The parts of a report that are drawn: a selection of runs, and for each the curve, the layers,
//! the peaks and the limits.

use super::{bytes, growth};
use crate::numbers::{seconds, to_f64};
use crate::output::escape::escape_and_cut;
use crate::output::facts::place;
use crate::report::{CommandName, Place, Report, Run, Samples};

/// Runs that are drawn at most.
pub(super) const PANELS_MAX: usize = 6;
/// Up to this number of runs, all are drawn; otherwise two.
const RUNS_ALL_MAX: usize = 4;
/// Characters of a name in a picture.
pub(super) const NAME_CHARACTERS_MAX: usize = 40;

/// One run, as it is drawn.
pub(super) struct Panel<'a> {
    /// The name of the run; empty if there is only one.
    pub(super) heading: String,
    pub(super) run: &'a Run,
    /// In order of time.
    pub(super) dots: Vec<Dot>,
    pub(super) limits: Vec<Line>,
    pub(super) host_peak: Option<Mark>,
    pub(super) rss_peak: Option<Mark>,
    /// In words.
    pub(super) vram_peak: Option<String>,
    /// Ends of layers, in order of time.
    pub(super) ends: Vec<LayerEnd>,
}

/// One sample.
#[derive(Clone, Copy)]
pub(super) struct Dot {
    pub(super) seconds: f64,
    pub(super) host: Option<f64>,
    pub(super) anon: Option<f64>,
    pub(super) file: Option<f64>,
    pub(super) shmem: Option<f64>,
    pub(super) vram: Option<f64>,
}

impl Dot {
    /// The upper edges of anonymous memory, of shared memory on top of it, and of file pages on top
    /// of both.
    pub(super) fn edges(&self) -> [Option<f64>; 3] {
        let shared = self.anon.zip(self.shmem).map(|(below, own)| below + own);
        [self.anon, shared, shared.zip(self.file).map(|(below, own)| below + own)]
    }
}

/// A limit.
pub(super) struct Line {
    pub(super) bytes: f64,
    /// In a few words.
    pub(super) short: String,
    /// With its terms.
    pub(super) long: String,
}

/// A peak.
pub(super) struct Mark {
    pub(super) seconds: Option<f64>,
    pub(super) bytes: f64,
    /// The number.
    pub(super) value: String,
    /// With its name and place.
    pub(super) long: String,
}

/// The end of a layer, or of several.
pub(super) struct LayerEnd {
    pub(super) seconds: f64,
    /// The last layer.
    pub(super) name: String,
    pub(super) layers: u64,
}

/// The runs that are drawn, and a sentence about the others.
pub(super) fn panels(report: &Report) -> (Vec<Panel<'_>>, Option<String>) {
    let runs: Vec<(usize, &Run)> = report.runs.iter().enumerate().collect();
    let count = runs.len();
    let (chosen, said) = if report.command == CommandName::Compare {
        let rows = one_of_each(&runs);
        let more = rows.len().saturating_sub(PANELS_MAX);
        let many = count > rows.len();
        let said = match (many, more) {
            (_, 1..) => Some(format!(
                "The first {PANELS_MAX} of {} rows; of each the run with the highest host peak.",
                rows.len()
            )),
            (true, 0) => Some("Of each row, the run with the highest host peak.".to_owned()),
            (false, 0) => None,
        };
        (rows.into_iter().take(PANELS_MAX).collect(), said)
    } else if count <= RUNS_ALL_MAX {
        let heading =
            |index: usize| if count == 1 { String::new() } else { format!("run {} of {count}", index + 1) };
        (runs.into_iter().map(|(index, run)| (heading(index), run)).collect(), None)
    } else {
        (highest_and_median(&runs), Some(format!("Two of {count} runs are drawn.")))
    };
    let panels: Vec<Panel<'_>> =
        chosen.into_iter().map(|(heading, run)| panel(report, heading, run)).collect();
    (panels, said)
}

/// Of each way of loading, the run with the highest host peak.
fn one_of_each<'a>(runs: &[(usize, &'a Run)]) -> Vec<(String, &'a Run)> {
    let mut rows: Vec<(String, &Run)> = Vec::new();
    for (_, run) in runs {
        match rows.iter_mut().find(|(strategy, _)| *strategy == run.strategy) {
            Some((_, kept)) if run.peak.host_bytes > kept.peak.host_bytes => *kept = run,
            Some(_) => {}
            None => rows.push((run.strategy.clone(), run)),
        }
    }
    rows.into_iter()
        .map(|(name, run)| (escape_and_cut(&name, NAME_CHARACTERS_MAX).into_owned(), run))
        .collect()
}

/// The run with the highest host peak, and the one with the median time.
fn highest_and_median<'a>(runs: &[(usize, &'a Run)]) -> Vec<(String, &'a Run)> {
    let count = runs.len();
    let mut by_time: Vec<_> = runs.to_vec();
    by_time.sort_by(|(_, one), (_, other)| {
        one.seconds.unwrap_or(f64::INFINITY).total_cmp(&other.seconds.unwrap_or(f64::INFINITY))
    });
    let median = by_time[(count - 1) / 2];
    let highest = runs
        .iter()
        .copied()
        .reduce(|one, other| if other.1.peak.host_bytes > one.1.peak.host_bytes { other } else { one });
    let highest = highest.unwrap_or(median);
    let heading =
        |(index, run): (usize, &'a Run), what: &str| (format!("run {} of {count}, {what}", index + 1), run);
    if highest.0 == median.0 {
        return vec![heading(highest, "the highest host peak and the median time")];
    }
    vec![heading(highest, "the highest host peak"), heading(median, "the median time")]
}

fn panel<'a>(report: &Report, heading: String, run: &'a Run) -> Panel<'a> {
    let mark = |name: &str, value: Option<u64>, start: Option<u64>, at: &Option<Place>| {
        let value = value?;
        let over = growth(Some(value), start).map(|over| format!(" ({over} over start)"));
        let over = over.unwrap_or_default();
        let at_place = at.as_ref().map(|at| {
            let layer = at.layer.is_some() || at.tensor.is_some();
            let name = if layer {
                format!(", {}", escape_and_cut(&place(at), NAME_CHARACTERS_MAX))
            } else {
                String::new()
            };
            format!(" at {}{name}", seconds(at.seconds))
        });
        Some(Mark {
            seconds: at.as_ref().map(|at| at.seconds),
            bytes: to_f64(value),
            value: bytes(value),
            long: format!("{name} {}{over}{}", bytes(value), at_place.unwrap_or_default()),
        })
    };
    let mut dots = run.samples.as_ref().map_or_else(Vec::new, dots);
    dots.sort_by(|one, other| one.seconds.total_cmp(&other.seconds));
    Panel {
        heading,
        run,
        dots,
        limits: limits(report, run),
        host_peak: mark("host peak", run.peak.host_bytes, run.baseline.host_bytes, &run.peak.at),
        rss_peak: mark("RSS peak", run.peak.rss_bytes, run.baseline.rss_bytes, &run.peak.rss_at),
        vram_peak: mark("device peak", run.peak.vram_bytes, run.baseline.vram_bytes, &run.peak.vram_at)
            .map(|mark| mark.long),
        ends: ends(run),
    }
}

/// The samples, by the names of their columns.
fn dots(samples: &Samples) -> Vec<Dot> {
    let column = |name: &str| samples.columns.iter().position(|column| column == name);
    let elapsed = column("elapsed_us");
    let [host, anon, file, shmem, vram] =
        ["host_bytes", "anon_bytes", "file_bytes", "shmem_bytes", "vram_bytes"].map(column);
    let cell = |row: &[Option<u64>], column: Option<usize>| {
        column.and_then(|column| row.get(column).copied().flatten()).map(to_f64)
    };
    let dot = |row: &Vec<Option<u64>>| {
        Some(Dot {
            seconds: cell(row, elapsed)? / 1e6,
            host: cell(row, host),
            anon: cell(row, anon),
            file: cell(row, file),
            shmem: cell(row, shmem),
            vram: cell(row, vram),
        })
    };
    samples.rows.iter().filter_map(dot).collect()
}

/// The promised limit, and the limits from the command line on host memory and RSS.
fn limits(report: &Report, run: &Run) -> Vec<Line> {
    let promised = run.promise.as_ref().zip(run.baseline.rss_bytes).map(|(promise, start)| {
        let level = start.saturating_add(promise.limit_bytes);
        let budget = run.params.as_ref().map(|params| bytes(params.budget_bytes));
        let kept =
            run.resident_host_bytes.filter(|kept| *kept > 0).map(|kept| format!(" + layers {}", bytes(kept)));
        let parts =
            budget.map(|budget| format!(" = start + budget {budget} + 16 MiB{}", kept.unwrap_or_default()));
        let short = format!("RSS limit {}", bytes(level));
        Line { bytes: to_f64(level), long: format!("{short}{}", parts.unwrap_or_default()), short }
    });
    let demanded = report.limits.iter().filter(|limit| matches!(limit.metric.as_str(), "host" | "rss"));
    let demanded = demanded.filter_map(|limit| {
        let level = limit.limit_bytes?;
        let name = if limit.metric == "host" { "--max-memory" } else { "--max-peak-rss" };
        let short = format!("{name} {}", bytes(level));
        Some(Line { bytes: to_f64(level), long: short.clone(), short })
    });
    promised.into_iter().chain(demanded.take(4)).collect()
}

fn ends(run: &Run) -> Vec<LayerEnd> {
    let Some(deliveries) = &run.deliveries else { return Vec::new() };
    let each = deliveries.layers_per_row.max(1);
    let mut left = deliveries.layers;
    let mut ends: Vec<LayerEnd> = Vec::with_capacity(deliveries.rows.len());
    for row in &deliveries.rows {
        let layers = left.min(each);
        left -= layers;
        let before = ends.last().map_or(0.0, |end| end.seconds);
        ends.push(LayerEnd {
            seconds: (to_f64(row.elapsed_us) / 1e6).max(before),
            name: escape_and_cut(&row.layer, NAME_CHARACTERS_MAX).into_owned(),
            layers,
        });
    }
    ends
}

impl Panel<'_> {
    /// RSS before the load, from which growth is counted.
    pub(super) fn start_bytes(&self) -> Option<f64> {
        self.run.baseline.rss_bytes.map(to_f64).filter(|_| !self.dots.is_empty())
    }

    /// True if there was memory of a kind, by its index in [`Dot::edges`].
    pub(super) fn has_kind(&self, edge: usize) -> bool {
        self.dots.iter().any(|dot| [dot.anon, dot.shmem, dot.file][edge].is_some_and(|bytes| bytes > 0.0))
    }

    /// The most device memory of the curve and of the run; `None` if there is no curve.
    pub(super) fn top_vram_bytes(&self) -> Option<f64> {
        let highest = self.dots.iter().filter_map(|dot| dot.vram).reduce(f64::max)?;
        Some(self.run.peak.vram_bytes.map_or(highest, |peak| highest.max(to_f64(peak))))
    }

    /// The time of the last sample or layer.
    pub(super) fn end_seconds(&self) -> f64 {
        let dot = self.dots.last().map_or(0.0, |dot| dot.seconds);
        self.ends.last().map_or(dot, |end| dot.max(end.seconds))
    }

    /// The highest value of curves and peaks.
    pub(super) fn top_bytes(&self) -> f64 {
        let values = self.dots.iter().flat_map(|dot| dot.edges().into_iter().chain([dot.host]).flatten());
        let peaks = [&self.host_peak, &self.rss_peak].into_iter().flatten().map(|mark| mark.bytes);
        values.chain(peaks).fold(0.0, f64::max)
    }

    /// At most `count_max` samples, evenly over time. From each interval the sample with the most
    /// host memory is kept, with the most device memory of any.
    pub(super) fn thinned(&self, count_max: usize) -> Vec<Dot> {
        if self.dots.len() <= count_max {
            return self.dots.clone();
        }
        let end = self.end_seconds().max(f64::MIN_POSITIVE);
        let places = f64::from(u32::try_from(count_max).unwrap_or(u32::MAX));
        let place = |dot: &Dot| (dot.seconds / end * places).floor().min(places - 1.0);
        let weight = |dot: &Dot| dot.host.or(dot.edges()[2]).unwrap_or(0.0);
        let mut kept: Vec<Dot> = Vec::with_capacity(count_max);
        for dot in &self.dots {
            match kept.last_mut() {
                Some(last) if place(last) >= place(dot) => {
                    // Device memory has its own curve.
                    let vram = [last.vram, dot.vram].into_iter().flatten().reduce(f64::max);
                    if weight(dot) > weight(last) {
                        *last = *dot;
                    }
                    last.vram = vram;
                }
                _ => kept.push(*dot),
            }
        }
        // The last sample shows the memory after everything was freed.
        let last =
            self.dots.last().filter(|last| kept.last().is_some_and(|kept| kept.seconds < last.seconds));
        kept.extend(last);
        kept
    }

    /// Host memory at a time: the last sample until then.
    pub(super) fn host_at(&self, seconds: f64) -> Option<f64> {
        let index = self.dots.partition_point(|dot| dot.seconds <= seconds);
        self.dots[..index].iter().rev().find_map(|dot| dot.host)
    }
}
