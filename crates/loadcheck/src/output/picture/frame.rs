//! The rectangle of a plot, and the scale of bytes beside it.

use std::fmt::Write as _;

use super::axis::Axis;
use super::labels::{number, write_text};

/// A rectangle of the drawing.
#[derive(Clone, Copy)]
pub(super) struct Frame {
    pub(super) left: f64,
    pub(super) top: f64,
    pub(super) width: f64,
    pub(super) height: f64,
}

/// The y coordinate of a number of bytes.
pub(super) fn height_of(axis: &Axis, frame: &Frame, bytes: f64) -> f64 {
    frame.top + (1.0 - axis.share(bytes)) * frame.height
}

/// Writes the texts of a scale of bytes, left of the frame; returns its grid lines.
pub(super) fn scale(axis: &Axis, frame: &Frame, text_size: f64, out: &mut String) -> String {
    let mut grid = String::new();
    for (value, text) in axis.ticks() {
        let y = height_of(axis, frame, value);
        let _ = write!(grid, "M{} {}H{}", number(frame.left), number(y), number(frame.left + frame.width));
        let place = (frame.left - 7.0, y + text_size * 0.36);
        write_text(out, ("soft", text_size, " text-anchor=\"end\""), place, &text);
    }
    grid
}
