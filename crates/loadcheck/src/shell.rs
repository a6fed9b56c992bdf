//! Words of a shell: templates of commands (`--cmd 'python load.py {source}'`), and quoting.
//!
//! A template is split into words as a POSIX shell would, and never given to a shell. `{source}`
//! and `{strategy}` are filled in afterwards: a path with blanks or quotes stays one word.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::Path;

use crate::output::escape::is_harmful;
use crate::problem::{Code, Problem};

/// Stands for the path of the checkpoint.
const SOURCE: &str = "{source}";
/// Stands for the name of a strategy.
const STRATEGY: &str = "{strategy}";

/// The words of a command as a report has them.
pub(crate) fn as_text(words: &[OsString]) -> Vec<String> {
    words.iter().map(|word| word.to_string_lossy().into_owned()).collect()
}

/// A command with places to fill in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CommandTemplate {
    words: Vec<String>,
}

impl CommandTemplate {
    /// Splits `text` into words.
    ///
    /// # Errors
    /// [`Code::Usage`] if there is no word in it, or a quote is left open.
    pub(crate) fn parse(text: &str) -> Result<Self, Problem> {
        let refused = |message: &str| Problem::new(Code::Usage, message).at(format!("--cmd {text}"));
        match shlex::split(text) {
            Some(words) if words.is_empty() => Err(refused("--cmd holds no command")),
            Some(words) => Ok(Self { words }),
            None => Err(refused("--cmd cannot be split into words: a quote or a backslash is left open")),
        }
    }

    /// True if `{strategy}` stands in it.
    pub(crate) fn names_strategy(&self) -> bool {
        self.words.iter().any(|word| word.contains(STRATEGY))
    }

    /// True if `{source}` stands in it.
    pub(crate) fn names_source(&self) -> bool {
        self.words.iter().any(|word| word.contains(SOURCE))
    }

    /// The words of the command, everything filled in. Without a strategy, `{strategy}` stays as it
    /// is.
    pub(crate) fn words(&self, source: &Path, strategy: Option<&str>) -> Vec<OsString> {
        let mut places = vec![(SOURCE, source.as_os_str())];
        places.extend(strategy.map(|name| (STRATEGY, OsStr::new(name))));
        self.words.iter().map(|word| filled(word, &places)).collect()
    }
}

/// `word` with all places filled in. What is put in is not looked at again.
fn filled(word: &str, places: &[(&str, &OsStr)]) -> OsString {
    let (mut bytes, mut rest) = (Vec::new(), word);
    while !rest.is_empty() {
        let first = places.iter().filter_map(|(name, value)| Some((rest.find(name)?, *name, *value)));
        let Some((start, name, value)) = first.min_by_key(|(start, ..)| *start) else { break };
        bytes.extend_from_slice(&rest.as_bytes()[..start]);
        bytes.extend_from_slice(value.as_bytes());
        rest = &rest[start + name.len()..];
    }
    bytes.extend_from_slice(rest.as_bytes());
    OsString::from_vec(bytes)
}

/// A word quoted for a shell, for hints. Characters that a terminal would act on are written as
/// escapes, in the `$'...'` form of bash, zsh and ksh; `shlex` would leave them as they are.
pub(crate) fn shell_word(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:@,+%".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    if !word.chars().any(is_harmful) {
        return format!("'{}'", word.replace('\'', "'\\''"));
    }
    let mut quoted = String::from("$'");
    for character in word.chars() {
        if is_harmful(character) {
            let mut bytes = [0; 4];
            let bytes = character.encode_utf8(&mut bytes).bytes();
            quoted.extend(bytes.map(|byte| format!("\\x{byte:02x}")));
        } else {
            if matches!(character, '\'' | '\\') {
                quoted.push('\\');
            }
            quoted.push(character);
        }
    }
    quoted.push('\'');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str, source: &str, strategy: Option<&str>) -> Vec<String> {
        let words = CommandTemplate::parse(text).unwrap().words(Path::new(source), strategy);
        words.into_iter().map(|word| word.into_string().unwrap()).collect()
    }

    #[test]
    fn words_are_split_first_and_filled_in_then() {
        assert_eq!(words("load {source}", "a b'c", None), ["load", "a b'c"]);
        assert_eq!(words("load 'x y' --in={source}/z", "/m", None), ["load", "x y", "--in=/m/z"]);
        assert_eq!(words("l {source}{source} {strategy}", "s", Some("t")), ["l", "ss", "t"]);
        assert_eq!(words("l {strategy}", "s", None), ["l", "{strategy}"]);
        // What is put in may look like a place.
        assert_eq!(
            words("l {source} {strategy}", "{strategy}", Some("{source}")),
            ["l", "{strategy}", "{source}"]
        );
        assert_eq!(words("l $HOME `id` ; {source}", "s", None), ["l", "$HOME", "`id`", ";", "s"]);
    }

    #[test]
    fn a_path_that_is_no_text_stays_whole() {
        let source = OsString::from_vec(b"/m/\xff".to_vec());
        let found = CommandTemplate::parse("l {source}.x").unwrap().words(Path::new(&source), None);
        assert_eq!(found[1].as_bytes(), b"/m/\xff.x");
    }

    #[test]
    fn what_is_no_command_is_refused() {
        for text in ["", "  ", "load 'x", "load \\"] {
            assert_eq!(CommandTemplate::parse(text).unwrap_err().code, Code::Usage, "{text}");
        }
        assert!(CommandTemplate::parse("l {strategy}").unwrap().names_strategy());
        assert!(!CommandTemplate::parse("l {source} {Strategy}").unwrap().names_strategy());
    }

    #[test]
    fn hints_can_be_pasted() {
        assert_eq!(shell_word("./a-b"), "./a-b");
        assert_eq!(shell_word("it's $HOME"), "'it'\\''s $HOME'");
        assert_eq!(shell_word(""), "''");
        assert_eq!(shell_word("a\nb\u{1b}[2J'\\\u{202e}"), r"$'a\x0ab\x1b[2J\'\\\xe2\x80\xae'");
    }
}
