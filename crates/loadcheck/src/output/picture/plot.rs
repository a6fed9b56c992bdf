//! One plot: areas of memory by kind, or the lines of two runs; the layers as bands; limits and
//! peaks. Below it device memory at another scale, since it is often a hundred times as much.

use std::fmt::Write as _;

use super::axis::Axis;
use super::bands::{self, Cell, LANE_GAP, LANE_HEIGHT};
use super::frame::{Frame, height_of, scale};
use super::labels::{number, text_width, write_text};
use super::panel::{Dot, LayerEnd, Line, Panel};

/// A run, with its axes.
pub(super) struct Plot<'a> {
    pub(super) panel: &'a Panel<'a>,
    pub(super) dots: Vec<Dot>,
    /// Those of the run before, if there is one.
    pub(super) before: Vec<Dot>,
    pub(super) cell_count_max: usize,
    pub(super) memory: Axis,
    /// The axis of device memory, if it is drawn.
    pub(super) vram: Option<Axis>,
    pub(super) time: Axis,
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

    pub(super) fn x(&self, frame: &Frame, seconds: f64) -> f64 {
        frame.left + self.time.share(seconds) * frame.width
    }

    pub(super) fn y(&self, frame: &Frame, bytes: f64) -> f64 {
        height_of(&self.memory, frame, bytes)
    }

    /// The layers of each run that is drawn, of the one before first, and the classes of their cells.
    pub(super) fn lanes(&self) -> Vec<([&'static str; 2], &[LayerEnd])> {
        let before = self.panel.before.as_ref();
        let before = before.map(|before| (["even-before", "odd-before"], before.ends.as_slice()));
        let all = before.into_iter().chain([(["even", "odd"], self.panel.ends.as_slice())]);
        all.filter(|(_, ends)| !ends.is_empty()).collect()
    }

    /// Height of the lanes under the frame.
    pub(super) fn lanes_height(&self) -> f64 {
        self.lanes().iter().map(|_| LANE_HEIGHT + LANE_GAP).sum()
    }

    pub(super) fn cells(&self, ends: &[LayerEnd], frame: &Frame) -> Vec<Cell> {
        bands::cells(ends, frame, self.cell_count_max, |seconds| self.x(frame, seconds))
    }

    /// Draws everything inside the frame, the lanes under it, and the texts of the axes beside it.
    pub(super) fn draw(&self, frame: &Frame, text_size: f64, out: &mut String) {
        self.axes(frame, text_size, out);
        for (class, edge) in [("file", 2), ("shmem", 1), ("anon", 0)] {
            if self.panel.has_kind(edge) {
                self.area(frame, &self.memory, class, |dot| dot.edges()[edge], out);
            }
        }
        let is_single = self.panel.before.is_none();
        if is_single {
            self.line(frame, "edge", &self.dots, |dot| dot.edges()[2], out);
            bands::shade(&self.cells(&self.panel.ends, frame), frame, out);
        }
        self.line(frame, "before", &self.before, |dot| dot.host, out);
        self.line(frame, "host", &self.dots, |dot| dot.host, out);
        let mut top = frame.top + frame.height + LANE_GAP;
        for (classes, ends) in self.lanes() {
            let host_at = |seconds| self.panel.host_at(seconds).filter(|_| is_single);
            let place = (classes, top, is_single.then_some(frame));
            bands::lane(&self.cells(ends, frame), place, host_at, out);
            top += LANE_HEIGHT + LANE_GAP;
        }
        self.levels(frame, text_size, out);
    }

    /// Draws device memory inside the frame, with its scale beside it.
    pub(super) fn draw_vram(&self, axis: &Axis, frame: &Frame, text_size: f64, out: &mut String) {
        let grid = scale(axis, frame, text_size, out);
        let _ = writeln!(out, "<path class=\"grid\" d=\"{grid}\"/>");
        self.area(frame, axis, "vram", |dot| dot.vram, out);
        bands::shade(&self.cells(&self.panel.ends, frame), frame, out);
    }

    fn axes(&self, frame: &Frame, text_size: f64, out: &mut String) {
        let right = frame.left + frame.width;
        let bottom = frame.top + frame.height + self.lanes_height();
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
        (frame, axis): (&Frame, &Axis),
        dots: &[Dot],
        value: impl Fn(&Dot) -> Option<f64>,
    ) -> Vec<(String, f64, f64)> {
        let mut paths: Vec<(String, f64, f64)> = Vec::new();
        let mut is_broken = true;
        for dot in dots {
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

    fn line(
        &self,
        frame: &Frame,
        class: &str,
        dots: &[Dot],
        value: impl Fn(&Dot) -> Option<f64>,
        out: &mut String,
    ) {
        for (d, ..) in self.paths((frame, &self.memory), dots, value) {
            let _ = writeln!(out, "<path class=\"{class}\" d=\"M{d}\"/>");
        }
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
        for (points, from, to) in self.paths((frame, axis), &self.dots, value) {
            let _ = writeln!(
                out,
                "<path class=\"{class}\" d=\"M{} {bottom} {points} {} {bottom}z\"/>",
                number(from),
                number(to)
            );
        }
    }
}
