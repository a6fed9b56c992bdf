//! Makes names from files safe to print: a tensor's name may hold every character of a JSON string.

use std::borrow::Cow;

/// `text` with harmful characters replaced by escapes such as `\u{1b}`: those that move the cursor,
/// change colours, or hide or reorder text. Other characters stay.
pub(crate) fn escape(text: &str) -> Cow<'_, str> {
    if text.chars().any(is_harmful) { Cow::Owned(visible(text).collect()) } else { Cow::Borrowed(text) }
}

/// The characters of an escaped text.
fn visible(text: &str) -> impl Iterator<Item = char> {
    text.chars().flat_map(|character| {
        let (escaped, plain) = if is_harmful(character) {
            (Some(character.escape_unicode()), None)
        } else {
            (None, Some(character))
        };
        escaped.into_iter().flatten().chain(plain)
    })
}

/// `text` escaped, with its middle left out if it has more than `characters_max` characters: names
/// from files may have any length.
pub(crate) fn escape_and_cut(text: &str, characters_max: usize) -> Cow<'_, str> {
    const GAP: &str = " ... ";
    // No byte becomes more than six characters (DEL does). The middle of a long text is not read.
    if text.len() <= characters_max / 6 || visible(text).nth(characters_max).is_none() {
        return escape(text);
    }
    let kept = characters_max.saturating_sub(GAP.len());
    let (head, tail) = (kept - kept / 3, kept / 3);
    let beginning = visible(text).take(head);
    let last = text.char_indices().rev().take(tail).last().map_or("", |(start, _)| &text[start..]);
    let end = visible(last).skip(visible(last).count() - tail);
    Cow::Owned(beginning.chain(GAP.chars()).chain(end).collect())
}

/// The most characters of a cell of a table: names may have any length, and the time of the layout
/// grows with its square.
const CELL_CHARACTERS_MAX: usize = 1024;

/// A text for a cell of a table, escaped and cut.
pub(crate) fn cell(text: &str) -> Cow<'_, str> {
    escape_and_cut(text, CELL_CHARACTERS_MAX)
}

/// Control characters (C0, DEL, C1), line and paragraph separators, direction marks and overrides,
/// invisible characters, tags.
pub(crate) fn is_harmful(character: char) -> bool {
    character.is_control()
        || matches!(
            character,
            '\u{61c}'
                | '\u{ad}'
                | '\u{180e}'
                | '\u{200b}'..='\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{feff}'
                | '\u{fff9}'..='\u{fffb}'
                | '\u{e0000}'..='\u{e007f}'
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_lose_their_middle() {
        assert_eq!(escape_and_cut("0123456789", 10), "0123456789");
        assert_eq!(escape_and_cut("0123456789abcdefghij", 11), "0123 ... ij");
        assert_eq!(escape_and_cut(&"größe".repeat(1000), 14).chars().count(), 14);
        assert_eq!(escape_and_cut("\u{1b}\u{1b}\u{1b}", 11), "\\u{1 ... b}");
    }

    #[test]
    fn harmful_characters_become_visible() {
        for (text, expected) in [
            ("model.layers.0", "model.layers.0"),
            ("größe.权重", "größe.权重"),
            ("a\u{1b}[31mb", "a\\u{1b}[31mb"),
            ("a\r\nb\tc\u{7f}\u{9b}", "a\\u{d}\\u{a}b\\u{9}c\\u{7f}\\u{9b}"),
            ("a\u{202e}b\u{2066}c\u{200f}", "a\\u{202e}b\\u{2066}c\\u{200f}"),
            ("a\u{200b}b\u{feff}\u{e0041}", "a\\u{200b}b\\u{feff}\\u{e0041}"),
        ] {
            assert_eq!(escape(text), expected);
        }
    }
}
