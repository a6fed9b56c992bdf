//! The lines across a plot (limits, RSS at the start), the dots of the peaks, and the texts of
//! both. No text covers another.

use std::fmt::Write as _;

use super::frame::Frame;
use super::labels::{Area, Room, number, text_width, write_text};
use super::panel::{Dot, Line, Mark};
use super::plot::Plot;
use super::xml;

/// A peak with its place in the plot.
struct Peak<'a> {
    mark: &'a Mark,
    /// Class and radius of the dot.
    dot: (&'static str, f64),
    place: (f64, f64),
    /// Texts of which the first that fits is written.
    texts: Vec<String>,
}

impl Plot<'_> {
    /// Draws lines, dots and texts.
    pub(super) fn levels(&self, frame: &Frame, text_size: f64, out: &mut String) {
        let (right, bottom) = (frame.left + frame.width, frame.top + frame.height);
        let room = Room::new(Area { left: frame.left, right, top: frame.top - text_size, bottom });
        let mut labels = Labels { room, text_size, texts: String::new(), out };
        let limits: Vec<&Line> = self.panel.limits.iter().filter(|limit| self.shows(limit)).collect();
        for limit in &limits {
            let y = self.y(frame, limit.bytes);
            labels.level("limit", frame, y);
            labels.room.block(Area { left: frame.left, right, top: y - 1.5, bottom: y + 1.5 });
        }
        let peaks = self.peaks(frame);
        for Peak { place: (x, y), .. } in &peaks {
            labels.room.block(Area { left: x - 6.0, right: x + 6.0, top: y - 6.0, bottom: y + 6.0 });
        }
        for limit in limits {
            let text = format!("{} {}", limit.name, self.memory.text(limit.bytes));
            let [far_above, far_below, near_above, near_below] =
                labels.beside(frame, self.y(frame, limit.bytes), &text);
            labels.write("warn", &text, &[far_above, near_above, far_below, near_below]);
        }
        for peak in &peaks {
            let fits = |text: &String| {
                let places = around(peak.place, frame, text_width(text, text_size), text_size);
                labels.write("halo", text, &places)
            };
            let _ = peak.texts.iter().any(fits);
        }
        if let Some(start) = self.panel.start_bytes() {
            let (y, text) = (self.y(frame, start), format!("start {}", self.memory.text(start)));
            labels.level("start", frame, y);
            let [far_above, far_below, near_above, near_below] = labels.beside(frame, y, &text);
            labels.write("halo", &text, &[near_above, near_below, far_above, far_below]);
        }
        let texts = labels.texts;
        for Peak { mark, dot: (class, radius), place: (x, y), .. } in peaks.iter().rev() {
            let _ = writeln!(
                out,
                "<circle class=\"{class}\" cx=\"{}\" cy=\"{}\" r=\"{radius}\"><title>{}</title></circle>",
                number(*x),
                number(*y),
                xml(&mark.long)
            );
        }
        out.push_str(&texts);
    }

    /// The peaks that are drawn, most important first.
    fn peaks(&self, frame: &Frame) -> Vec<Peak<'_>> {
        let place = |mark: &Mark, dots: &[Dot]| {
            let seconds = mark.seconds.or_else(|| highest(dots))?;
            Some((self.x(frame, seconds), self.y(frame, mark.bytes)))
        };
        let text = |name: &str, mark: &Mark| {
            let value = self.memory.text(mark.bytes);
            if name.is_empty() { vec![value] } else { vec![format!("{name} {value}"), value] }
        };
        let [earlier, later] = match &self.panel.before {
            Some(before) => before.names.each_ref().map(String::as_str),
            None => ["", "unreclaimable"],
        };
        let host = self.panel.host_peak.as_ref().and_then(|mark| {
            let place = place(mark, &self.dots)?;
            Some(Peak { mark, dot: ("peak", 5.0), place, texts: text(later, mark) })
        });
        let before = self.panel.before.as_ref().and_then(|before| {
            let mark = before.host_peak.as_ref()?;
            let place = place(mark, &self.before)?;
            Some(Peak { mark, dot: ("peak-before", 5.0), place, texts: text(earlier, mark) })
        });
        // Without a time it has no place: no sample saw it.
        let rss = self.panel.rss_peak.as_ref().and_then(|mark| {
            let place = (self.x(frame, mark.seconds?), self.y(frame, mark.bytes));
            let texts = vec![format!("RSS {}", self.memory.text(mark.bytes))];
            Some(Peak { mark, dot: ("ring", 4.0), place, texts })
        });
        host.into_iter().chain(before).chain(rss).collect()
    }
}

/// The time of the highest sample.
fn highest(dots: &[Dot]) -> Option<f64> {
    let height = |dot: &Dot| dot.host.unwrap_or(0.0);
    dots.iter().max_by(|one, other| height(one).total_cmp(&height(other))).map(|dot| dot.seconds)
}

/// Places for a text of this width around a dot: over it, beside it, under it.
fn around((x, y): (f64, f64), frame: &Frame, width: f64, text_size: f64) -> [(f64, f64); 8] {
    let rightmost = (frame.left + frame.width - width - 2.0).max(frame.left + 2.0);
    let middle = (x - width / 2.0).clamp(frame.left + 2.0, rightmost);
    let (before, after) = (x - 10.0 - width, x + 10.0);
    let (up, down) = (y - 3.0, y + text_size);
    [
        (middle, y - 11.0),
        (after, up),
        (before, up),
        (after, down),
        (before, down),
        (middle, down + 10.0),
        (middle, y - 11.0 - text_size * 1.4),
        (middle, down + 10.0 + text_size * 1.4),
    ]
}

/// Texts inside a plot that do not overlap.
struct Labels<'a> {
    room: Room,
    text_size: f64,
    /// Written after the dots.
    texts: String,
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
        write_text(&mut self.texts, (class, self.text_size, ""), place, &xml(text));
        true
    }
}
