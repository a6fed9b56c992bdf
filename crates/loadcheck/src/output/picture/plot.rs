//! One plot: areas of memory by kind, the line of host memory, limits, peaks, and a cell for each
//! layer. Below it device memory at another scale, since it is often a hundred times as much.

use std::fmt::Write as _;

use super::axis::Axis;
use super::labels::{Area, Room, number, text_width, write_text};
use super::panel::{Dot, Line, Panel};
use super::{bytes, xml};
use crate::numbers::{count, seconds, to_f64, whole};

/// Up to this number, ticks of layers are tall; more would hide the curve.
const TALL_TICKS_MAX: usize = 60;
/// The narrowest cell that a pointer can hit, in pixels.
const CELL_WIDTH_MIN: f64 = 4.0;

/// A rectangle of the drawing.
#[derive(Clone, Copy)]
pub(super) struct Frame {
    pub(super) left: f64,
    pub(super) top: f64,
    pub(super) width: f64,
    pub(super) height: f64,
}

/// A run, with its axes.
pub(super) struct Plot<'a> {
    pub(super) panel: &'a Panel<'a>,
    pub(super) dots: Vec<Dot>,
    pub(super) cell_count_max: usize,
    pub(super) memory: Axis,
    /// The axis of device memory, if it is drawn.
    pub(super) vram: Option<Axis>,
    pub(super) time: Axis,
}

/// Layers that end at about the same time.
pub(super) struct Cell {
    from: f64,
    to: f64,
    seconds: f64,
    first: String,
    last: String,
    rows: u64,
    pub(super) layers: u64,
}

impl Plot<'_> {
    /// True if this limit is inside the picture.
    pub(super) fn shows(&self, limit: &Line) -> bool {
        limit.bytes <= self.memory.end
    }

    /// True if any limit is inside the picture.
    pub(super) fn has_limit(&self) -> bool {
        self.panel.limits.iter().any(|limit| self.shows(limit))
    }

    fn x(&self, frame: &Frame, seconds: f64) -> f64 {
        frame.left + self.time.share(seconds) * frame.width
    }

    fn y(&self, frame: &Frame, bytes: f64) -> f64 {
        height_of(&self.memory, frame, bytes)
    }

    /// Draws everything inside the frame, and the texts of the axes beside it.
    pub(super) fn draw(&self, frame: &Frame, text_size: f64, out: &mut String) {
        self.axes(frame, text_size, out);
        for (class, edge) in [("file", 2), ("shmem", 1), ("anon", 0)] {
            if self.panel.has_kind(edge) {
                self.area(frame, &self.memory, class, |dot| dot.edges()[edge], out);
            }
        }
        for (d, ..) in self.paths(frame, &self.memory, |dot| dot.edges()[2]) {
            let _ = writeln!(out, "<path class=\"edge\" d=\"M{d}\"/>");
        }
        let cells = self.cells(frame);
        // Ticks end below the texts.
        let highest = (self.memory.share(self.panel.top_bytes()) * frame.height).max(10.0);
        self.ticks(frame, &cells, highest, out);
        for (d, ..) in self.paths(frame, &self.memory, |dot| dot.host) {
            let _ = writeln!(out, "<path class=\"host\" d=\"M{d}\"/>");
        }
        self.levels(frame, text_size, out);
        self.cells_of_layers(frame, &cells, out);
        self.peaks(frame, out);
    }

    /// Draws device memory inside the frame, with its scale beside it.
    pub(super) fn draw_vram(&self, axis: &Axis, frame: &Frame, text_size: f64, out: &mut String) {
        let grid = scale(axis, frame, text_size, out);
        let _ = writeln!(out, "<path class=\"grid\" d=\"{grid}\"/>");
        self.area(frame, axis, "vram", |dot| dot.vram, out);
        self.ticks(frame, &self.cells(frame), frame.height, out);
    }

    fn axes(&self, frame: &Frame, text_size: f64, out: &mut String) {
        let (right, bottom) = (frame.left + frame.width, frame.top + frame.height);
        let mut grid = scale(&self.memory, frame, text_size, out);
        for (value, text) in self.time.ticks() {
            let x = self.x(frame, value);
            let _ = write!(grid, "M{} {}v5", number(x), number(bottom));
            // The last text must not leave the drawing.
            let half = text_width(&text, text_size) / 2.0;
            let (at, anchor) = if x + half > right + 10.0 { (right, "end") } else { (x, "middle") };
            let anchor = format!(" text-anchor=\"{anchor}\"");
            write_text(out, ("soft", text_size, &anchor), (at, bottom + 5.0 + text_size), &text);
        }
        let _ = writeln!(out, "<path class=\"grid\" d=\"{grid}\"/>");
    }

    /// Each unbroken section of a curve: its points, start and end.
    fn paths(
        &self,
        frame: &Frame,
        axis: &Axis,
        value: impl Fn(&Dot) -> Option<f64>,
    ) -> Vec<(String, f64, f64)> {
        let mut paths: Vec<(String, f64, f64)> = Vec::new();
        let mut is_broken = true;
        for dot in &self.dots {
            let Some(bytes) = value(dot) else {
                is_broken = true;
                continue;
            };
            let x = self.x(frame, dot.seconds);
            let point = format!("{} {}", number(x), number(height_of(axis, frame, bytes)));
            match paths.last_mut().filter(|_| !is_broken) {
                Some((path, _, end)) => {
                    let _ = write!(path, " {point}");
                    *end = x;
                }
                None => paths.push((point, x, x)),
            }
            is_broken = false;
        }
        paths
    }

    fn area(
        &self,
        frame: &Frame,
        axis: &Axis,
        class: &str,
        value: impl Fn(&Dot) -> Option<f64>,
        out: &mut String,
    ) {
        let bottom = number(frame.top + frame.height);
        for (points, from, to) in self.paths(frame, axis, value) {
            let _ = writeln!(
                out,
                "<path class=\"{class}\" d=\"M{} {bottom} {points} {} {bottom}z\"/>",
                number(from),
                number(to)
            );
        }
    }

    /// Layers grouped by their end, so that each cell is wide enough for the pointer.
    pub(super) fn cells(&self, frame: &Frame) -> Vec<Cell> {
        let most = to_f64(u64::try_from(self.cell_count_max.max(1)).unwrap_or(u64::MAX));
        let width_min = (frame.width / most).max(CELL_WIDTH_MIN);
        let mut cells: Vec<Cell> = Vec::new();
        let mut open: Option<Cell> = None;
        for end in &self.panel.ends {
            let x = self.x(frame, end.seconds);
            let mut cell = open.take().unwrap_or_else(|| Cell {
                from: cells.last().map_or(frame.left, |cell| cell.to),
                to: x,
                seconds: end.seconds,
                first: end.name.clone(),
                last: String::new(),
                rows: 0,
                layers: 0,
            });
            (cell.to, cell.seconds, cell.last) = (x, end.seconds, end.name.clone());
            (cell.rows, cell.layers) = (cell.rows + 1, cell.layers + end.layers);
            if x - cell.from < width_min {
                open = Some(cell);
            } else {
                cells.push(cell);
            }
        }
        cells.extend(open);
        cells
    }

    /// A tick at the end of each cell: tall if there are few.
    fn ticks(&self, frame: &Frame, cells: &[Cell], highest: f64, out: &mut String) {
        if cells.is_empty() {
            return;
        }
        let tall = cells.len() <= TALL_TICKS_MAX && cells.len() * 12 <= self.cell_count_max * 8;
        let height = if tall { highest } else { 10.0 };
        let bottom = frame.top + frame.height;
        let mut d = String::new();
        cells.iter().for_each(|cell| {
            let _ = write!(d, "M{} {}v-{}", number(cell.to), number(bottom), number(height));
        });
        let _ = writeln!(out, "<path class=\"tick\" d=\"{d}\"/>");
    }

    /// Invisible rectangles whose titles a browser shows under the pointer.
    fn cells_of_layers(&self, frame: &Frame, cells: &[Cell], out: &mut String) {
        if cells.is_empty() {
            return;
        }
        let (top, height) = (number(frame.top), number(frame.height));
        out.push_str("<g class=\"cells\" fill=\"none\" pointer-events=\"all\">\n");
        for cell in cells {
            let _ = writeln!(
                out,
                "<rect x=\"{}\" y=\"{top}\" width=\"{}\" height=\"{height}\"><title>{}</title></rect>",
                number(cell.from),
                number((cell.to - cell.from).max(1.0)),
                xml(&self.cell_text(cell))
            );
        }
        out.push_str("</g>\n");
    }

    fn cell_text(&self, cell: &Cell) -> String {
        let what = match (cell.rows, cell.layers) {
            (_, 0 | 1) => cell.last.clone(),
            (rows, layers) if rows == layers => {
                format!("{} to {} ({})", cell.first, cell.last, count(layers, "layer"))
            }
            (_, layers) => format!("{}, the last one {}", count(layers, "layer"), cell.last),
        };
        let host = self.panel.host_at(cell.seconds).map(|host| format!(", host then {}", bytes(whole(host))));
        format!("{what}: delivered at {}{}", seconds(cell.seconds), host.unwrap_or_default())
    }

    /// Limits, the start and the number of the peak, with names if there is room.
    fn levels(&self, frame: &Frame, text_size: f64, out: &mut String) {
        let (right, bottom) = (frame.left + frame.width, frame.top + frame.height);
        let room = Room::new(Area { left: frame.left, right, top: frame.top - text_size, bottom });
        let mut labels = Labels { room, text_size, out };
        let limits: Vec<&Line> = self.panel.limits.iter().filter(|limit| self.shows(limit)).collect();
        for limit in &limits {
            let y = self.y(frame, limit.bytes);
            labels.level("limit", frame, y);
            labels.room.block(Area { left: frame.left, right, top: y - 1.5, bottom: y + 1.5 });
        }
        let peak = self.panel.host_peak.as_ref().zip(self.host_peak_place(frame));
        for (x, y) in peak.map(|(_, place)| place).into_iter().chain(self.rss_peak_place(frame)) {
            labels.room.block(Area { left: x - 6.0, right: x + 6.0, top: y - 6.0, bottom: y + 6.0 });
        }
        for limit in limits {
            let places = |labels: &Labels<'_>, text: &str| {
                let [far_above, far_below, near_above, near_below] =
                    labels.beside(frame, self.y(frame, limit.bytes), text);
                [far_above, near_above, far_below, near_below]
            };
            let _ = [&limit.long, &limit.short].into_iter().any(|text| {
                let places = places(&labels, text);
                labels.write("warn", text, &places)
            });
        }
        if let Some((mark, (x, y))) = peak {
            let width = text_width(&mark.value, text_size);
            let rightmost = (right - width - 2.0).max(frame.left + 2.0);
            let middle = (x - width / 2.0).clamp(frame.left + 2.0, rightmost);
            let (before, after) = (x - 10.0 - width, x + 10.0);
            let (up, down) = (y - 3.0, y + text_size);
            let places = [
                (middle, y - 11.0),
                (after, up),
                (before, up),
                (after, down),
                (before, down),
                (middle, down + 10.0),
            ];
            labels.write("halo", &mark.value, &places);
        }
        if let Some(start) = self.panel.start_bytes() {
            let (y, text) = (self.y(frame, start), format!("start {}", bytes(whole(start))));
            labels.level("start", frame, y);
            let [far_above, far_below, near_above, near_below] = labels.beside(frame, y, &text);
            labels.write("halo", &text, &[near_above, near_below, far_above, far_below]);
        }
    }

    /// The place of the host peak: at the highest sample if its time is unknown.
    fn host_peak_place(&self, frame: &Frame) -> Option<(f64, f64)> {
        let mark = self.panel.host_peak.as_ref()?;
        let highest = |one: &Dot, other: &Dot| one.host.unwrap_or(0.0).total_cmp(&other.host.unwrap_or(0.0));
        let seconds = mark
            .seconds
            .or_else(|| self.dots.iter().max_by(|one, other| highest(one, other)).map(|dot| dot.seconds))?;
        Some((self.x(frame, seconds), self.y(frame, mark.bytes)))
    }

    fn rss_peak_place(&self, frame: &Frame) -> Option<(f64, f64)> {
        let mark = self.panel.rss_peak.as_ref()?;
        Some((self.x(frame, mark.seconds?), self.y(frame, mark.bytes)))
    }

    fn peaks(&self, frame: &Frame, out: &mut String) {
        let rss = self.panel.rss_peak.as_ref().zip(self.rss_peak_place(frame));
        let rss = rss.map(|(mark, place)| (mark, "ring", 4.0, place));
        let host = self.panel.host_peak.as_ref().zip(self.host_peak_place(frame));
        let host = host.map(|(mark, place)| (mark, "peak", 5.0, place));
        for (mark, class, radius, (x, y)) in rss.into_iter().chain(host) {
            let _ = writeln!(
                out,
                "<circle class=\"{class}\" cx=\"{}\" cy=\"{}\" r=\"{radius}\"><title>{}</title></circle>",
                number(x),
                number(y),
                xml(&mark.long)
            );
        }
    }
}

/// The y coordinate of a number of bytes.
fn height_of(axis: &Axis, frame: &Frame, bytes: f64) -> f64 {
    frame.top + (1.0 - axis.share(bytes)) * frame.height
}

/// Writes the texts of a scale of bytes, left of the frame; returns its grid lines.
fn scale(axis: &Axis, frame: &Frame, text_size: f64, out: &mut String) -> String {
    let mut grid = String::new();
    for (value, text) in axis.ticks() {
        let y = height_of(axis, frame, value);
        let _ = write!(grid, "M{} {}H{}", number(frame.left), number(y), number(frame.left + frame.width));
        let place = (frame.left - 7.0, y + text_size * 0.36);
        write_text(out, ("soft", text_size, " text-anchor=\"end\""), place, &text);
    }
    grid
}

/// Texts inside a plot that do not overlap.
struct Labels<'a> {
    room: Room,
    text_size: f64,
    out: &'a mut String,
}

impl Labels<'_> {
    /// A line from side to side.
    fn level(&mut self, class: &str, frame: &Frame, y: f64) {
        let (left, right) = (number(frame.left), number(frame.left + frame.width));
        let _ = writeln!(self.out, "<path class=\"{class}\" d=\"M{left} {}H{right}\"/>", number(y));
    }

    /// Places for a text beside a level: at the right above and below it, at the left above and
    /// below it.
    fn beside(&self, frame: &Frame, y: f64, text: &str) -> [(f64, f64); 4] {
        let width = text_width(text, self.text_size);
        let (near, far) = (frame.left + 6.0, frame.left + frame.width - 6.0 - width);
        let (above, below) = (y - 6.0, y + self.text_size + 3.0);
        [(far, above), (far, below), (near, above), (near, below)]
    }

    /// Writes `text` at the first free place (its left end and baseline). False if there is none.
    fn write(&mut self, class: &str, text: &str, places: &[(f64, f64)]) -> bool {
        let width = text_width(text, self.text_size);
        let area = |(left, baseline): &(f64, f64)| Area::of_text(*left, *baseline, width, self.text_size);
        let areas: Vec<Area> = places.iter().map(area).collect();
        let Some(found) = self.room.take(&areas) else { return false };
        let place = (found.left, found.top + self.text_size);
        write_text(self.out, (class, self.text_size, ""), place, &xml(text));
        true
    }
}
