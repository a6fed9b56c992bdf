//! The picture: title, legend, and under them one plot for each run that is drawn, all at the same
//! scale.

use std::fmt::Write as _;

use super::axis::Axis;
use super::labels::{fitted, lines, number, text_width, write_text};
use super::panel::{Panel, panels};
use super::plot::{Frame, Plot};
use super::{circumstances, style, title, xml};
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

impl Shape {
    fn sizes(self, panel_count: usize) -> Sizes {
        let is_single = panel_count <= 1;
        match self {
            Self::Wide => Sizes {
                width: 960.0,
                left: 62.0,
                plot_height: if is_single { 330.0 } else { 190.0 },
                vram_height: 80.0,
                dots: 600,
                cells: 180,
                time_ticks: 10,
            },
            Self::Narrow => Sizes {
                width: 400.0,
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

/// An SVG element for a page that has title and style.
pub(super) fn inline(report: &Report, shape: Shape) -> String {
    let (body, size) = picture(report, shape, false);
    format!(
        "<svg class=\"plot\" viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"Memory over time; the numbers are in the table\">\n\
         {body}</svg>\n",
        number(size.0),
        number(size.1)
    )
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
        sheet.legend(&panels, &plots);
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
    let reach = top * 6.0;
    let levels = panels.iter().flat_map(|panel| &panel.limits).map(|limit| limit.bytes);
    let highest = levels.filter(|level| *level <= reach).fold(top * 1.04, f64::max);
    let end = panels.iter().map(Panel::end_seconds).fold(0.0, f64::max);
    let vram = panels.iter().filter_map(Panel::top_vram_bytes).reduce(f64::max);
    let plot = |panel: &'a Panel<'a>| Plot {
        panel,
        dots: panel.thinned(sizes.dots / count),
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
    fn legend(&mut self, panels: &[Panel<'_>], plots: &[Plot<'_>]) {
        let has = |edge: usize| panels.iter().any(|panel| panel.has_kind(edge));
        let any = |is: &dyn Fn(&Panel<'_>) -> bool| panels.iter().any(is);
        let fill = |class: &str| {
            (format!("<rect class=\"{class}\" x=\"0\" y=\"-10\" width=\"16\" height=\"11\" rx=\"2\"/>"), 16.0)
        };
        let line = |class: &str| (format!("<path class=\"{class}\" d=\"M0-4.5h20\"/>"), 20.0);
        let circle = |class: &str, radius: u32| {
            (format!("<circle class=\"{class}\" cx=\"6\" cy=\"-4.5\" r=\"{radius}\"/>"), 12.0)
        };
        let is_shared = plots.iter().any(|plot| plot.cells(&self.frame()).iter().any(|cell| cell.layers > 1));
        let layers = if is_shared { "layers delivered, several per tick" } else { "a layer delivered" };
        let has_host = any(&|panel| panel.dots.iter().any(|dot| dot.host.is_some()));
        let entries = [
            (has(0), fill("anon"), "anonymous"),
            (has(1), fill("shmem"), "shared"),
            (has(2), fill("file"), "pages of files"),
            (any(&|panel| panel.top_vram_bytes().is_some()), fill("vram"), "device"),
            (has_host, line("host"), "host: memory that cannot be reclaimed"),
            (any(&|panel| panel.host_peak.is_some()), circle("peak", 5), "host peak"),
            (any(&|panel| panel.rss_peak.is_some()), circle("ring", 4), "RSS peak"),
            (any(&|panel| panel.start_bytes().is_some()), line("start"), "RSS at the start"),
            (plots.iter().any(Plot::has_limit), line("limit"), "limit"),
            (
                any(&|panel| !panel.ends.is_empty()),
                ("<path class=\"tick\" d=\"M4-11v13\"/>".to_owned(), 8.0),
                layers,
            ),
        ];
        let (mut x, step) = (MARGIN, TEXT * 1.6);
        self.y += step + 4.0;
        for (_, (mark, mark_width), text) in entries.into_iter().filter(|(is_drawn, ..)| *is_drawn) {
            let width = mark_width + 6.0 + text_width(text, TEXT);
            if x > MARGIN && x + width > self.sizes.width - MARGIN {
                (x, self.y) = (MARGIN, self.y + step);
            }
            let _ = write!(self.out, "<g transform=\"translate({} {})\">{mark}", number(x), number(self.y));
            write_text(&mut self.out, ("ink", TEXT, ""), (mark_width + 6.0, 0.0), text);
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
        let kind = if plot.vram.is_some() { "host memory" } else { "memory" };
        self.axis_name(kind, plot.memory.unit);
        let frame = self.frame();
        plot.draw(&frame, TEXT, &mut self.out);
        self.y = frame.top + frame.height + TEXT * 1.5;
        if let Some(axis) = &plot.vram {
            self.axis_name("device memory", axis.unit);
            let frame = Frame { height: self.sizes.vram_height, ..self.frame() };
            plot.draw_vram(axis, &frame, TEXT, &mut self.out);
            self.y = frame.top + frame.height + TEXT * 0.5;
        }
        if is_last {
            self.y += TEXT * 1.4;
            let (middle, text) =
                (frame.left + frame.width / 2.0, format!("time since the start ({})", plot.time.unit));
            let look = ("soft", TEXT, " text-anchor=\"middle\"");
            write_text(&mut self.out, look, (middle, self.y), &text);
        }
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
    facts.extend(panel.host_peak.iter().chain(&panel.rss_peak).map(|mark| mark.long.clone()));
    facts.extend(panel.vram_peak.clone());
    if !panel.dots.is_empty() {
        let far = panel.limits.iter().filter(|limit| !plot.shows(limit));
        facts.extend(far.map(|limit| format!("{} (above the picture)", limit.short)));
    }
    facts
}
