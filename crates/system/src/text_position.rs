//! Lines and columns for messages about files that people write.

/// A position in a text. Both numbers count from 1; columns count characters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TextPosition {
    /// Line.
    pub line: usize,
    /// Column.
    pub column: usize,
}

impl TextPosition {
    /// The position of a byte of `text`; the end of `text` if that byte begins no character.
    #[must_use]
    pub fn of_byte(text: &str, at: usize) -> Self {
        let before = text.get(..at).unwrap_or(text);
        let line_start = before.rfind('\n').map_or(0, |at| at + 1);
        Self { line: 1 + before.matches('\n').count(), column: 1 + before[line_start..].chars().count() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_and_columns_count_from_one() {
        let position = |at| {
            let TextPosition { line, column } = TextPosition::of_byte("é1\n\n23", at);
            (line, column)
        };
        assert_eq!(
            [0, 2, 3, 4, 5, 6, 7].map(position),
            [(1, 1), (1, 2), (1, 3), (2, 1), (3, 1), (3, 2), (3, 3)]
        );
        assert_eq!((position(1), position(100)), ((3, 3), (3, 3)), "no character begins there");
    }
}
