//! Texts in a picture: their estimated width, and free places for them.

use std::fmt::Write as _;

/// Writes a text element that begins, or is anchored, at `(x, baseline)`. The text is already
/// escaped; `attributes` begins with a blank unless it is empty.
pub(super) fn write_text(
    out: &mut String,
    (class, size, attributes): (&str, f64, &str),
    (x, baseline): (f64, f64),
    text: &str,
) {
    let (x, y) = (number(x), number(baseline));
    let _ = writeln!(
        out,
        "<text class=\"{class}\" x=\"{x}\" y=\"{y}\" font-size=\"{size}\"{attributes}>{text}</text>"
    );
}

/// A coordinate, to a tenth of a pixel.
pub(super) fn number(value: f64) -> String {
    let text = format!("{value:.1}");
    text.strip_suffix(".0").map_or(text.clone(), str::to_owned)
}

/// An upper estimate of the width of a text in pixels, for any font.
pub(super) fn text_width(text: &str, size: f64) -> f64 {
    text.chars().map(character_width).sum::<f64>() * size
}

fn character_width(character: char) -> f64 {
    match character {
        'i' | 'j' | 'l' | 't' | 'f' | 'I' | '.' | ',' | ':' | ';' | '\'' | '|' | '!' | '(' | ')' | '['
        | ']' | ' ' | '·' | '/' => 0.38,
        'm' | 'w' | 'M' | 'W' | '%' | '@' => 0.95,
        'A'..='Z' | '+' | '=' | '<' | '>' | '_' => 0.72,
        _ if character.is_ascii() => 0.62,
        _ => 1.05,
    }
}

/// `text` with its middle left out if it is wider than `width`.
pub(super) fn fitted(text: &str, size: f64, width: f64) -> String {
    if text_width(text, size) <= width {
        return text.to_owned();
    }
    let characters: Vec<char> = text.chars().collect();
    let shortened = |kept: usize| {
        let tail = kept / 2;
        let (head, end) = (&characters[..kept - tail], &characters[characters.len() - tail..]);
        head.iter().chain(&['…']).chain(end).collect::<String>()
    };
    // Binary search for the most characters that fit.
    let (mut fits, mut too_wide) = (0, characters.len());
    while too_wide - fits > 1 {
        let middle = usize::midpoint(fits, too_wide);
        if text_width(&shortened(middle), size) <= width { fits = middle } else { too_wide = middle }
    }
    shortened(fits)
}

/// Parts in lines that are at most `width` wide. A part that is wider than a line is broken between
/// its words, and a word that is wider loses its middle.
pub(super) fn lines(parts: &[String], separator: &str, size: f64, width: f64) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for part in parts.iter().filter(|part| !part.is_empty()) {
        if let Some(last) = lines.last_mut() {
            let longer = format!("{last}{separator}{part}");
            if text_width(&longer, size) <= width {
                *last = longer;
                continue;
            }
        }
        let words: Vec<String> = part.split(' ').map(str::to_owned).collect();
        if text_width(part, size) > width && words.len() > 1 {
            lines.extend(self::lines(&words, " ", size, width));
        } else {
            lines.push(fitted(part, size, width));
        }
    }
    lines
}

/// An area that is taken.
#[derive(Clone, Copy)]
pub(super) struct Area {
    pub(super) left: f64,
    pub(super) right: f64,
    pub(super) top: f64,
    pub(super) bottom: f64,
}

impl Area {
    /// The area of a line of text that starts at `left`.
    pub(super) fn of_text(left: f64, baseline: f64, width: f64, size: f64) -> Self {
        Self { left, right: left + width, top: baseline - size, bottom: baseline + size * 0.3 }
    }

    pub(super) fn meets(&self, other: &Self) -> bool {
        self.left < other.right
            && other.left < self.right
            && self.top < other.bottom
            && other.top < self.bottom
    }

    fn is_in(&self, frame: &Self) -> bool {
        self.left >= frame.left
            && self.right <= frame.right
            && self.top >= frame.top
            && self.bottom <= frame.bottom
    }
}

/// Areas that are taken inside a frame.
pub(super) struct Room {
    frame: Area,
    taken: Vec<Area>,
}

impl Room {
    pub(super) fn new(frame: Area) -> Self {
        Self { frame, taken: Vec::new() }
    }

    /// Takes the first free place, if there is one.
    pub(super) fn take(&mut self, places: &[Area]) -> Option<Area> {
        let is_free =
            |area: &&Area| area.is_in(&self.frame) && !self.taken.iter().any(|other| other.meets(area));
        let found = places.iter().find(is_free).copied();
        self.taken.extend(found);
        found
    }

    /// Marks an area as taken.
    pub(super) fn block(&mut self, area: Area) {
        self.taken.push(area);
    }
}
