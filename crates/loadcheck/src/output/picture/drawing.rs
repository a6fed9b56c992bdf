//! The picture: title, legend, and under them one plot for each run that is drawn, all at the same
//! scale. For a page, each plot alone.

use std::fmt::Write as _;

use super::axis::Axis;
use super::frame::Frame;
use super::keys::{MARK_WIDTH, keys};
use super::labels::{fitted, lines, number, text_width, write_text};
use super::panel::{Line, Panel, panels, thinned};
use super::plot::Plot;
use super::{bytes, circumstances, style, title, xml};
use crate::numbers::whole;
use crate::report::{Outcome, Report};

/// The kind of screen.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    Wide,
    Narrow,
}

/// Sizes that follow from the shape, in pixels.
struct Sizes {
    width: f64,
    left: f64,
    plot_height: f64,
    /// Height of the plot of device memory.
    vram_height: f64,
    /// Samples of all plots together.
    dots: usize,
    /// Cells of layers of all plots together.
    cells: usize,
    time_ticks: u32,
}

const MARGIN: f64 = 14.0;
const TEXT: f64 = 12.5;
const TITLE: f64 = 18.0;
/// A page has its own margins: of the one at the right only the end of the last number stays.
const RIGHT_TRIMMED: f64 = 4.0;
/// A limit is drawn if it is at most so many times the highest value.
const LIMIT_REACH: f64 = 4.0;

impl Shape {
    fn sizes(self, panel_count: usize) -> Sizes {
        let is_single = panel_count <= 1;
        match self {
            Self::Wide => Sizes {
                width: 960.0,
                left: 62.0,
                plot_height: if is_single { 310.0 } else { 190.0 },
                vram_height: 80.0,
                dots: 600,
                cells: 180,
                time_ticks: 10,
            },
            Self::Narrow => Sizes {
                width: 372.0,
                left: 46.0,
                plot_height: if is_single { 250.0 } else { 160.0 },
                vram_height: 60.0,
                dots: 300,
                cells: 60,
                time_ticks: 5,
            },
        }
    }
}

/// A complete SVG file, with title and style.
pub(super) fn standalone(report: &Report) -> String {
    let (body, size) = picture(report, Shape::Wide, true);
    let name = xml(&format!("Memory over time: {}", title(report)));
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"plot\" width=\"{0}\" height=\"{1}\" viewBox=\"0 0 {0} {1}\" \
         role=\"img\" aria-label=\"{name}\">\n<title>{name}</title>\n<style>\n{2}</style>\n\
         <rect class=\"paper\" width=\"100%\" height=\"100%\"/>\n{body}</svg>\n",
        number(size.0),
        number(size.1),
        style()
    )
}

/// The SVG element of one plot, for a page that has title, legend and style. Its frame is in an
/// attribute, for the script.
pub(super) fn inline(plot: &Plot<'_>, shape: Shape, panel_count: usize, label: &str) -> String {
    let class = if shape == Shape::Wide { "wide" } else { "narrow" };
    let mut sheet = Sheet { out: String::new(), sizes: shape.sizes(panel_count), y: 0.0 };
    let (frame, bottom) = sheet.plot(plot, true);
    let data = [frame.left, frame.top, frame.width, frame.height, bottom].map(number).join(" ");
    format!(
        "<svg class=\"plot {class}\" viewBox=\"{MARGIN} 0 {} {}\" role=\"img\" aria-label=\"{}\" \
         data-frame=\"{data}\">\n{}</svg>\n",
        number(sheet.sizes.width - MARGIN - RIGHT_TRIMMED),
        number(sheet.y + 6.0),
        xml(label),
        sheet.out
    )
}

/// The plots of a page, at one scale.
pub(super) fn page_plots<'a>(panels: &'a [Panel<'a>], shape: Shape) -> Vec<Plot<'a>> {
    plots(panels, &shape.sizes(panels.len()))
}

/// A drawing that is filled from top to bottom.
struct Sheet {
    out: String,
    sizes: Sizes,
    y: f64,
}

fn picture(report: &Report, shape: Shape, is_titled: bool) -> (String, (f64, f64)) {
    let (panels, said) = panels(report);
    let sizes = shape.sizes(panels.len());
    let mut sheet = Sheet { out: String::new(), sizes, y: 6.0 };
    if is_titled {
        sheet.title(report);
    }
    let plots = plots(&panels, &sheet.sizes);
    if panels.is_empty() {
        let why = report.error.as_ref().map(|problem| format!(": {}", problem.message)).unwrap_or_default();
        sheet.line("ink", TEXT, "", &format!("nothing was measured{why}"));
    } else {
        sheet.legend(&plots);
        let count = plots.len();
        for (index, plot) in plots.iter().enumerate() {
            sheet.panel(plot, index + 1 == count);
        }
    }
    if let Some(said) = said.filter(|_| is_titled) {
        sheet.line("soft", TEXT, "", &said);
    }
    (sheet.out, (sheet.sizes.width, sheet.y + 8.0))
}

/// All plots, at one scale.
fn plots<'a>(panels: &'a [Panel<'a>], sizes: &Sizes) -> Vec<Plot<'a>> {
    let count = panels.len().max(1);
    let top = panels.iter().map(Panel::top_bytes).fold(0.0, f64::max);
    // A limit far above the curve would flatten it.
    let reach = top * LIMIT_REACH;
    let levels = panels.iter().flat_map(|panel| &panel.limits).map(|limit| limit.bytes);
    let highest = levels.filter(|level| *level <= reach).fold(top * 1.04, f64::max);
    let end = panels.iter().map(Panel::end_seconds).fold(0.0, f64::max);
    let vram = panels.iter().filter_map(Panel::top_vram_bytes).reduce(f64::max);
    let dots = sizes.dots / count;
    let plot = |panel: &'a Panel<'a>| Plot {
        panel,
        dots: thinned(&panel.dots, end, dots),
        before: panel.before.as_ref().map(|before| thinned(&before.dots, end, dots)).unwrap_or_default(),
        cell_count_max: sizes.cells / count,
        memory: Axis::bytes(highest * 1.07, 6),
        vram: vram.filter(|_| panel.top_vram_bytes().is_some()).map(|top| Axis::bytes(top * 1.07, 3)),
        time: Axis::seconds(end, sizes.time_ticks),
    };
    panels.iter().map(plot).collect()
}

impl Sheet {
    fn inner_width(&self) -> f64 {
        self.sizes.width - 2.0 * MARGIN
    }

    /// A line of text that fits the sheet.
    fn line(&mut self, class: &str, size: f64, attributes: &str, text: &str) {
        self.y += size * 1.45;
        let text = xml(&fitted(&super::shown(text), size, self.inner_width()));
        write_text(&mut self.out, (class, size, attributes), (MARGIN, self.y), &text);
    }

    fn title(&mut self, report: &Report) {
        self.line("ink", TITLE, " font-weight=\"600\"", &title(report));
        let facts: Vec<String> = circumstances(report).iter().map(|fact| super::shown(fact)).collect();
        for line in lines(&facts, " · ", TEXT, self.inner_width()) {
            self.line("soft", TEXT, "", &line);
        }
    }

    /// The meaning of the colours and lines that are drawn.
    fn legend(&mut self, plots: &[Plot<'_>]) {
        let (mut x, step) = (MARGIN, TEXT * 1.6);
        self.y += step + 4.0;
        for key in keys(plots) {
            let (mark, text) = (key.mark(), key.text(plots));
            let width = MARK_WIDTH + 6.0 + text_width(&text, TEXT);
            if x > MARGIN && x + width > self.sizes.width - MARGIN {
                (x, self.y) = (MARGIN, self.y + step);
            }
            let _ = write!(self.out, "<g transform=\"translate({} {})\">{mark}", number(x), number(self.y));
            write_text(&mut self.out, ("ink", TEXT, ""), (MARK_WIDTH + 6.0, 0.0), &xml(&text));
            self.out.truncate(self.out.trim_end().len());
            self.out.push_str("</g>\n");
            x += width + 16.0;
        }
        self.y += 6.0;
    }

    fn frame(&self) -> Frame {
        let left = self.sizes.left;
        Frame { left, top: self.y, width: self.sizes.width - left - MARGIN, height: self.sizes.plot_height }
    }

    /// The name and unit of a scale, above it.
    fn axis_name(&mut self, kind: &str, unit: &str) {
        self.y += TEXT * 1.8;
        write_text(&mut self.out, ("soft", TEXT, ""), (MARGIN, self.y), &format!("{kind} ({unit})"));
        self.y += 11.0;
    }

    fn panel(&mut self, plot: &Plot<'_>, is_last: bool) {
        let panel = plot.panel;
        if !panel.heading.is_empty() {
            self.y += 4.0;
            self.line("ink", TEXT + 1.0, " font-weight=\"600\"", &panel.heading);
        }
        for line in lines(&facts(plot), " · ", TEXT, self.inner_width()) {
            self.line("ink", TEXT, "", &line);
        }
        if panel.dots.is_empty() {
            let why = "no samples: the run ended before it could report them, or none were kept";
            self.line("soft", TEXT, "", why);
            self.y += 8.0;
            return;
        }
        self.plot(plot, is_last);
    }

    /// The plot with its axes. Returns its frame, and the lower end of everything that has its axis of
    /// time.
    fn plot(&mut self, plot: &Plot<'_>, is_last: bool) -> (Frame, f64) {
        let kind = match (&plot.panel.before, &plot.vram) {
            (Some(_), _) => "unreclaimable memory",
            (None, Some(_)) => "host memory",
            (None, None) => "memory",
        };
        self.axis_name(kind, plot.memory.unit);
        let frame = self.frame();
        plot.draw(&frame, TEXT, &mut self.out);
        let mut bottom = frame.top + frame.height + plot.lanes_height();
        self.y = bottom + TEXT * 1.5;
        if let Some(axis) = &plot.vram {
            self.axis_name("device memory", axis.unit);
            let frame = Frame { height: self.sizes.vram_height, ..self.frame() };
            plot.draw_vram(axis, &frame, TEXT, &mut self.out);
            bottom = frame.top + frame.height;
            self.y = bottom + TEXT * 0.5;
        }
        if is_last {
            self.y += TEXT * 1.4;
            let (middle, text) =
                (frame.left + frame.width / 2.0, format!("time since the start ({})", plot.time.unit));
            let look = ("soft", TEXT, " text-anchor=\"middle\"");
            write_text(&mut self.out, look, (middle, self.y), &text);
        }
        (frame, bottom)
    }
}

/// The facts above a plot.
fn facts(plot: &Plot<'_>) -> Vec<String> {
    let panel = plot.panel;
    let mut facts = Vec::new();
    let ended = match panel.run.outcome {
        Outcome::Completed | Outcome::Stopped => None,
        Outcome::Failed => Some("failed"),
        Outcome::Killed => Some("killed"),
        Outcome::Refused => Some("not started"),
        Outcome::Interrupted => Some("interrupted"),
    };
    facts.extend(ended.map(str::to_owned));
    match &panel.before {
        None => {
            facts.extend(panel.host_peak.iter().chain(&panel.rss_peak).map(|mark| mark.long.clone()));
            facts.extend(panel.vram_peak.clone());
        }
        Some(before) => {
            let marks = before.names.iter().zip([&before.host_peak, &panel.host_peak]);
            let named = marks.filter_map(|(name, mark)| Some(format!("{name}: {}", mark.as_ref()?.long)));
            facts.extend(named);
        }
    }
    facts.extend(limit_facts(plot));
    facts
}

/// The terms of limits, and the limits that are far above the curve.
pub(super) fn limit_facts(plot: &Plot<'_>) -> Vec<String> {
    let fact = |limit: &Line| {
        let terms = limit.terms.as_ref().map(|terms| format!(" = {terms}")).unwrap_or_default();
        let level = match plot.shows(limit) {
            true => plot.memory.text(limit.bytes),
            false => format!("{} (above the picture)", bytes(whole(limit.bytes))),
        };
        let is_told = !terms.is_empty() || !plot.shows(limit);
        is_told.then(|| format!("{} {level}{terms}", limit.name))
    };
    let is_drawn = !plot.panel.dots.is_empty();
    plot.panel.limits.iter().filter(|_| is_drawn).filter_map(fact).collect()
}
