//! The parts of a report that are drawn: a selection of runs, and for each the curve, the layers,
//! the peaks and the limits.

use super::{bytes, growth};
use crate::numbers::{seconds, stated, to_f64};
use crate::output::escape::escape_and_cut;
use crate::output::facts::place;
use crate::report::{Changes, CommandName, Place, Report, Run, Samples};

/// Runs that are drawn at most.
pub(super) const PANELS_MAX: usize = 6;
/// Up to this number of runs, all are drawn; otherwise two.
const RUNS_ALL_MAX: usize = 4;
/// Limits from the command line that are drawn.
const LIMITS_MAX: usize = 4;
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
    /// With two reports: the first one.
    pub(super) before: Option<Before>,
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
    pub(super) name: String,
    /// Its terms, if it is a sum.
    pub(super) terms: Option<String>,
}

/// A peak.
pub(super) struct Mark {
    pub(super) seconds: Option<f64>,
    pub(super) bytes: f64,
    /// With its name and place.
    pub(super) long: String,
}

/// The end of a layer, or of several.
pub(super) struct LayerEnd {
    pub(super) seconds: f64,
    /// The last layer.
    pub(super) name: String,
    pub(super) layers: u64,
    /// Bytes of the layers, as delivered.
    pub(super) bytes: Option<u64>,
    /// Bytes that were read since the end before, and the part that was in the page cache.
    pub(super) read_bytes: Option<u64>,
    pub(super) from_cache_bytes: Option<u64>,
}

/// The run of the first of two reports, of which unreclaimable memory is drawn.
pub(super) struct Before {
    /// The names of both reports.
    pub(super) names: [String; 2],
    pub(super) dots: Vec<Dot>,
    pub(super) host_peak: Option<Mark>,
    pub(super) ends: Vec<LayerEnd>,
}

/// The runs that are drawn, and a sentence about the others.
pub(super) fn panels(report: &Report) -> (Vec<Panel<'_>>, Option<String>) {
    if let Some(changes) = &report.changes {
        return (overlays(report, changes), None);
    }
    let runs: Vec<(usize, &Run)> = report.runs.iter().enumerate().collect();
    let count = runs.len();
    let (chosen, said) = if report.command == CommandName::Compare {
        let rows = one_of_each(&runs);
        let more = rows.len().saturating_sub(PANELS_MAX);
        let many = count > rows.len();
        let said = match (many, more) {
            (_, 1..) => Some(format!(
                "The first {PANELS_MAX} of {} rows; of each the run with the highest peak.",
                rows.len()
            )),
            (true, 0) => Some("Of each row, the run with the highest peak.".to_owned()),
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

/// Two runs each, one of either report.
fn overlays<'a>(report: &'a Report, changes: &Changes) -> Vec<Panel<'a>> {
    let names = changes.files.each_ref().map(|name| escape_and_cut(name, NAME_CHARACTERS_MAX).into_owned());
    let pairs = report.runs.chunks_exact(2).take(PANELS_MAX);
    let is_single = report.runs.len() == 2;
    let panel = |pair: &'a [Run]| {
        let name = escape_and_cut(&pair[1].strategy, NAME_CHARACTERS_MAX).into_owned();
        overlaid(report, if is_single { String::new() } else { name }, &names, [&pair[0], &pair[1]])
    };
    pairs.map(panel).collect()
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
        return vec![heading(highest, "the highest peak and the median time")];
    }
    vec![heading(highest, "the highest peak"), heading(median, "the median time")]
}

fn panel<'a>(report: &Report, heading: String, run: &'a Run) -> Panel<'a> {
    let (peak, start) = (&run.peak, &run.baseline);
    Panel {
        heading,
        run,
        dots: dots_of(run),
        limits: limits(report, run),
        host_peak: host_peak(run),
        rss_peak: mark("RSS peak", (peak.rss_bytes, start.rss_bytes), peak.rss_at.as_ref()),
        vram_peak: mark("device peak", (peak.vram_bytes, start.vram_bytes), peak.vram_at.as_ref())
            .map(|mark| mark.long),
        ends: ends(run),
        before: None,
    }
}

/// One over the other: two lines of unreclaimable memory. Limits on RSS say nothing about them.
fn overlaid<'a>(report: &Report, heading: String, names: &[String; 2], runs: [&'a Run; 2]) -> Panel<'a> {
    let [before, after] = runs;
    let limits = stated_limits(report).filter(|limit| limit.name != "--max-peak-rss").collect();
    Panel {
        limits,
        rss_peak: None,
        vram_peak: None,
        before: Some(Before {
            names: names.clone(),
            dots: dots_of(before),
            host_peak: host_peak(before),
            ends: ends(before),
        }),
        ..panel(report, heading, after)
    }
}

fn host_peak(run: &Run) -> Option<Mark> {
    let both = (run.peak.host_bytes, run.baseline.host_bytes);
    mark("peak of unreclaimable memory", both, run.peak.at.as_ref())
}

/// A peak, how far it lies over the start, and where it was.
fn mark(name: &str, (value, start): (Option<u64>, Option<u64>), at: Option<&Place>) -> Option<Mark> {
    let value = value?;
    let over = growth(Some(value), start).map(|over| format!(" ({over} over start)"));
    let at_place = at.map(|at| {
        let name = if at.layer.is_some() || at.tensor.is_some() {
            format!(", {}", escape_and_cut(&place(at), NAME_CHARACTERS_MAX))
        } else {
            String::new()
        };
        format!(" at {}{name}", seconds(at.seconds))
    });
    Some(Mark {
        seconds: at.map(|at| at.seconds),
        bytes: to_f64(value),
        long: format!("{name} {}{}{}", bytes(value), over.unwrap_or_default(), at_place.unwrap_or_default()),
    })
}

/// The samples, in order of time.
fn dots_of(run: &Run) -> Vec<Dot> {
    let mut dots = run.samples.as_ref().map_or_else(Vec::new, dots);
    dots.sort_by(|one, other| one.seconds.total_cmp(&other.seconds));
    dots
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

/// The promised limit on RSS, the limits from the command line on unreclaimable memory and RSS, and
/// that of the container.
fn limits(report: &Report, run: &Run) -> Vec<Line> {
    let promised = run.promise.as_ref().zip(run.baseline.rss_bytes).map(|(promise, start)| {
        let budget = run.params.as_ref().map(|params| stated(params.budget_bytes));
        let kept =
            run.resident_host_bytes.filter(|kept| *kept > 0).map(|kept| format!(" + layers {}", bytes(kept)));
        Line {
            bytes: to_f64(start.saturating_add(promise.limit_bytes)),
            name: "RSS limit".to_owned(),
            terms: budget.map(|budget| {
                format!("start {} + budget {budget} + 16 MiB{}", bytes(start), kept.unwrap_or_default())
            }),
        }
    });
    promised.into_iter().chain(stated_limits(report)).collect()
}

/// The limits that do not come from the load.
fn stated_limits(report: &Report) -> impl Iterator<Item = Line> {
    let demanded = report.limits.iter().filter(|limit| matches!(limit.metric.as_str(), "host" | "rss"));
    let demanded = demanded.filter_map(|limit| {
        let name = if limit.metric == "host" { "--max-memory" } else { "--max-peak-rss" };
        Some((name, limit.limit_bytes?))
    });
    let group = report.host.as_ref().and_then(|host| host.cgroup.as_ref()?.limit_bytes);
    let all = demanded.take(LIMITS_MAX).chain(group.map(|limit_bytes| ("container limit", limit_bytes)));
    all.map(|(name, limit)| Line { bytes: to_f64(limit), name: name.to_owned(), terms: None })
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
            bytes: row.bytes,
            read_bytes: row.read_bytes,
            from_cache_bytes: row.from_cache_bytes,
        });
    }
    ends
}

impl Panel<'_> {
    /// RSS before the load, from which growth is counted.
    pub(super) fn start_bytes(&self) -> Option<f64> {
        let start = self.run.baseline.rss_bytes.map(to_f64);
        start.filter(|_| !self.dots.is_empty() && self.before.is_none())
    }

    /// True if there was memory of a kind, by its index in [`Dot::edges`], and it is drawn.
    pub(super) fn has_kind(&self, edge: usize) -> bool {
        let kinds = |dot: &Dot| [dot.anon, dot.shmem, dot.file][edge];
        self.before.is_none() && self.dots.iter().any(|dot| kinds(dot).is_some_and(|bytes| bytes > 0.0))
    }

    /// The most device memory of the curve and of the run; `None` if there is no curve.
    pub(super) fn top_vram_bytes(&self) -> Option<f64> {
        let highest = self.dots.iter().filter_map(|dot| dot.vram).reduce(f64::max)?;
        let highest = self.run.peak.vram_bytes.map_or(highest, |peak| highest.max(to_f64(peak)));
        self.before.is_none().then_some(highest)
    }

    /// The time of the last sample or layer.
    pub(super) fn end_seconds(&self) -> f64 {
        let end = |dots: &[Dot], ends: &[LayerEnd]| {
            let dot = dots.last().map_or(0.0, |dot| dot.seconds);
            ends.last().map_or(dot, |end| dot.max(end.seconds))
        };
        let before = self.before.as_ref().map_or(0.0, |before| end(&before.dots, &before.ends));
        end(&self.dots, &self.ends).max(before)
    }

    /// The highest value of curves and peaks.
    pub(super) fn top_bytes(&self) -> f64 {
        let peaks = [&self.host_peak, &self.rss_peak].into_iter().flatten();
        let highest = |values: &mut dyn Iterator<Item = f64>| values.fold(0.0, f64::max);
        let peak = highest(&mut peaks.map(|mark| mark.bytes));
        let line = highest(&mut self.dots.iter().filter_map(|dot| dot.host));
        match &self.before {
            None => {
                let edges = self.dots.iter().flat_map(|dot| dot.edges().into_iter().flatten());
                highest(&mut edges.chain([line, peak]))
            }
            Some(before) => {
                let other = before.host_peak.as_ref().map(|mark| mark.bytes);
                highest(&mut before.dots.iter().filter_map(|dot| dot.host).chain(other).chain([line, peak]))
            }
        }
    }

    /// Unreclaimable memory at a time: the last sample until then.
    pub(super) fn host_at(&self, seconds: f64) -> Option<f64> {
        let index = self.dots.partition_point(|dot| dot.seconds <= seconds);
        self.dots[..index].iter().rev().find_map(|dot| dot.host)
    }

    /// The highest unreclaimable memory of the samples between two times.
    pub(super) fn host_between(&self, from: f64, to: f64) -> Option<f64> {
        let inside = |dot: &&Dot| dot.seconds > from && dot.seconds <= to;
        self.dots.iter().filter(inside).filter_map(|dot| dot.host).reduce(f64::max)
    }
}

/// At most `count_max` samples, evenly over the time until `end`. From each interval the sample
/// with the most host memory is kept, with the most device memory of any.
pub(super) fn thinned(dots: &[Dot], end: f64, count_max: usize) -> Vec<Dot> {
    if dots.len() <= count_max {
        return dots.to_vec();
    }
    let end = end.max(f64::MIN_POSITIVE);
    let places = f64::from(u32::try_from(count_max).unwrap_or(u32::MAX));
    let place = |dot: &Dot| (dot.seconds / end * places).floor().min(places - 1.0);
    let weight = |dot: &Dot| dot.host.or(dot.edges()[2]).unwrap_or(0.0);
    let mut kept: Vec<Dot> = Vec::with_capacity(count_max);
    for dot in dots {
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
    let last = dots.last().filter(|last| kept.last().is_some_and(|kept| kept.seconds < last.seconds));
    kept.extend(last);
    kept
}
