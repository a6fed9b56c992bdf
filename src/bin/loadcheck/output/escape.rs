//! Makes names that come from files safe to print: a tensor's name may hold anything a JSON string can.

use std::borrow::Cow;

/// `text` without anything that moves the cursor, changes colours, hides or reorders what is printed: such
/// characters appear as `\u{1b}`. Everything else, other scripts included, stays as it is.
pub(crate) fn escape(text: &str) -> Cow<'_, str> {
    if !text.chars().any(is_harmful) {
        return Cow::Borrowed(text);
    }
    let mut safe = String::with_capacity(text.len() + 8);
    for character in text.chars() {
        if is_harmful(character) {
            safe.extend(character.escape_unicode());
        } else {
            safe.push(character);
        }
    }
    Cow::Owned(safe)
}

/// `text` escaped, and if that takes more than `characters_max` characters, with its middle left out: a name in a message
/// may be as long as a file's author likes.
pub(crate) fn escape_and_cut(text: &str, characters_max: usize) -> Cow<'_, str> {
    const GAP: &str = " ... ";
    let safe = escape(text);
    let count = safe.chars().count();
    if count <= characters_max {
        return safe;
    }
    let kept = characters_max.saturating_sub(GAP.len());
    let (head, tail) = (kept - kept / 3, kept / 3);
    let beginning = safe.chars().take(head);
    let end = safe.chars().skip(count - tail);
    Cow::Owned(beginning.chain(GAP.chars()).chain(end).collect())
}

/// Control characters (C0, DEL, C1), line and paragraph separators, direction marks and overrides, invisible
/// characters, tags.
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
