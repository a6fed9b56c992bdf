//! Layers in a picture: bands behind the curve, and a lane of named cells under it. Layers that end
//! at about the same time share a cell, so that a pointer can hit each.

use std::fmt::Write as _;

use super::frame::Frame;
use super::labels::{number, text_width, write_text};
use super::panel::LayerEnd;
use super::{bytes, xml};
use crate::numbers::{count, seconds, to_f64, whole};

/// The narrowest cell that a pointer can hit, in pixels.
const CELL_WIDTH_MIN: f64 = 4.0;
/// Height of a lane, and of the gap above it.
pub(super) const LANE_HEIGHT: f64 = 15.0;
pub(super) const LANE_GAP: f64 = 3.0;
/// Size of the names in a lane.
const NAME_SIZE: f64 = 10.5;
/// A cell of several layers is named by the last one if that has at least this share of it.
const LAST_SHARE_MIN: f64 = 0.8;

/// Layers that end at about the same time.
pub(super) struct Cell {
    pub(super) from: f64,
    pub(super) to: f64,
    /// The end of the last one.
    pub(super) seconds: f64,
    first: String,
    last: String,
    /// Where the last layer begins.
    last_from: f64,
    rows: u64,
    pub(super) layers: u64,
}

impl Cell {
    /// The layers in it.
    pub(super) fn name(&self) -> String {
        match (self.rows, self.layers) {
            (_, 0 | 1) => self.last.clone(),
            (rows, layers) if rows == layers => {
                format!("{} to {} ({})", self.first, self.last, count(layers, "layer"))
            }
            (_, layers) => format!("{}, the last one {}", count(layers, "layer"), self.last),
        }
    }

    /// The last parts of the name that fit into it: `model.layers.12`, `layers.12` or `12`. Of several
    /// layers the last one, if it takes nearly all of the cell.
    fn name_that_fits(&self) -> Option<&str> {
        if self.to - self.last_from < LAST_SHARE_MIN * (self.to - self.from) {
            return None;
        }
        let mut name = self.last.as_str();
        loop {
            if text_width(name, NAME_SIZE) <= self.to - self.from - 4.0 {
                return Some(name);
            }
            name = name.split_once('.')?.1;
        }
    }
}

/// Layers grouped by their end, so that each cell is wide enough. At most `count_max` cells.
pub(super) fn cells(ends: &[LayerEnd], frame: &Frame, count_max: usize, x: impl Fn(f64) -> f64) -> Vec<Cell> {
    let most = to_f64(u64::try_from(count_max.max(1)).unwrap_or(u64::MAX));
    let width_min = (frame.width / most).max(CELL_WIDTH_MIN);
    let mut cells: Vec<Cell> = Vec::new();
    let mut open: Option<Cell> = None;
    for end in ends {
        let (x, before) = (x(end.seconds), open.as_ref().map(|cell| cell.to));
        let mut cell = open.take().unwrap_or_else(|| Cell {
            from: cells.last().map_or(frame.left, |cell| cell.to),
            to: x,
            seconds: end.seconds,
            first: end.name.clone(),
            last: String::new(),
            last_from: frame.left,
            rows: 0,
            layers: 0,
        });
        (cell.to, cell.seconds, cell.last) = (x, end.seconds, end.name.clone());
        cell.last_from = before.unwrap_or(cell.from);
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

/// Every second cell, shaded over the height of the frame.
pub(super) fn shade(cells: &[Cell], frame: &Frame, out: &mut String) {
    let (top, height) = (number(frame.top), number(frame.height));
    let mut d = String::new();
    for cell in cells.iter().skip(1).step_by(2) {
        let (from, width) = (number(cell.from), number(cell.to - cell.from));
        let _ = write!(d, "M{from} {top}h{width}v{height}h-{width}z");
    }
    if !d.is_empty() {
        let _ = writeln!(out, "<path class=\"band\" d=\"{d}\"/>");
    }
}

/// The lane of a run. A browser shows the title of a cell under the pointer; with `frame` the
/// cells reach up over the whole plot.
pub(super) fn lane(
    cells: &[Cell],
    (classes, top, frame): ([&str; 2], f64, Option<&Frame>),
    host_at: impl Fn(f64) -> Option<f64>,
    out: &mut String,
) {
    if cells.is_empty() {
        return;
    }
    let mut names = String::new();
    for (index, cell) in cells.iter().enumerate() {
        let class = classes[index % 2];
        let (x, width) = (number(cell.from), number((cell.to - cell.from).max(1.0)));
        let (y, height) = (number(top), number(LANE_HEIGHT));
        let _ = writeln!(
            out,
            "<rect class=\"{class}\" x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\"/>"
        );
        if let Some(name) = cell.name_that_fits() {
            let middle = ((cell.from + cell.to) / 2.0, top + LANE_HEIGHT - 4.0);
            write_text(&mut names, ("ink", NAME_SIZE, " text-anchor=\"middle\""), middle, &xml(name));
        }
    }
    out.push_str(&names);
    let begin = frame.map_or(top, |frame| frame.top);
    out.push_str("<g class=\"cells\" fill=\"none\" pointer-events=\"all\">\n");
    for cell in cells {
        let host = host_at(cell.seconds);
        let host = host.map(|host| format!(", unreclaimable memory then {}", bytes(whole(host))));
        let title =
            format!("{}: delivered at {}{}", cell.name(), seconds(cell.seconds), host.unwrap_or_default());
        let _ = writeln!(
            out,
            "<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"><title>{}</title></rect>",
            number(cell.from),
            number(begin),
            number((cell.to - cell.from).max(1.0)),
            number(top + LANE_HEIGHT - begin),
            xml(&title)
        );
    }
    out.push_str("</g>\n");
}
