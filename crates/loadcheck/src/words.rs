//! The words of the command line before they are parsed: the word `run` put in where it was left
//! out, and what must be known even if parsing fails.

mod advice;

use std::ffi::OsString;

use clap::CommandFactory as _;

pub(crate) use self::advice::advise;
use crate::args::Cli;

/// True if the words ask for JSON, even if they cannot be parsed as a whole.
pub(crate) fn wants_json(words: &[OsString]) -> bool {
    let mut before_separator = words.iter().take_while(|word| *word != "--").peekable();
    while let Some(word) = before_separator.next() {
        let is_format = word == "--format" && before_separator.peek().is_some_and(|next| *next == "json");
        if word == "--json" || word == "--format=json" || is_format {
            return true;
        }
    }
    false
}

/// The value of `--color`, for help and messages of the parser itself.
pub(crate) fn help_colour(words: &[OsString]) -> clap::ColorChoice {
    let mut rest = words.iter().take_while(|word| *word != "--").map(|word| word.to_string_lossy());
    while let Some(word) = rest.next() {
        let value = match word.strip_prefix("--color") {
            Some("") => rest.next().map(std::borrow::Cow::into_owned),
            Some(value) => value.strip_prefix('=').map(str::to_owned),
            None => None,
        };
        match value.as_deref() {
            Some("always") => return clap::ColorChoice::Always,
            Some("never") => return clap::ColorChoice::Never,
            _ => {}
        }
    }
    clap::ColorChoice::Auto
}

/// Puts in the word `run` where it was left out: where the first word that is neither a flag nor
/// the value of a global flag is not the name of a command.
///
/// A word that is almost a command, and no path, is left to clap: its answer suggests the right
/// one.
pub(crate) fn with_command(mut words: Vec<OsString>) -> Vec<OsString> {
    // `help plan` is what people try first.
    if words.get(1).is_some_and(|word| word == "help") && !std::path::Path::new("help").exists() {
        words.remove(1);
        words.push("--help".into());
        return words;
    }
    let cli = Cli::command();
    let mut rest = words.iter().skip(1);
    while let Some(word) = rest.next() {
        let text = word.to_string_lossy();
        if let Some(flag) = text.strip_prefix("--").filter(|flag| !flag.is_empty()) {
            let (name, has_value) = flag.split_once('=').map_or((flag, false), |(name, _)| (name, true));
            match cli.get_arguments().find(|argument| argument.get_long() == Some(name)) {
                Some(argument) if argument.get_action().takes_values() && !has_value => drop(rest.next()),
                Some(_) if name == "help" => return words,
                Some(_) => {}
                None if name == "version" => return words,
                None => break,
            }
        } else if matches!(&*text, "-h" | "-V") {
            return words;
        } else if !matches!(&*text, "-q" | "-v") {
            if cli.find_subcommand(&*text).is_some() || is_slip(&words, &text) {
                return words;
            }
            break;
        }
    }
    if words.len() > 1 {
        words.insert(1, "run".into());
    }
    words
}

/// True if `word` cannot be a source and clap knows a command that looks like it.
fn is_slip(words: &[OsString], word: &str) -> bool {
    use clap::error::{ContextKind, ErrorKind};
    if word.starts_with('-') || word.contains(['/', '.', '@']) || std::path::Path::new(word).exists() {
        return false;
    }
    match Cli::command().try_get_matches_from(words) {
        Err(error) if error.kind() == ErrorKind::InvalidSubcommand => {
            error.get(ContextKind::SuggestedSubcommand).is_some()
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> String {
        let words = with_command(line.split(' ').map(OsString::from).collect());
        words.iter().map(|word| word.to_str().unwrap()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn run_may_be_left_out() {
        for (line, expected) in [
            ("loadcheck ./model", "loadcheck run ./model"),
            ("loadcheck --json ./model", "loadcheck run --json ./model"),
            ("loadcheck --budget 8MiB ./model", "loadcheck run --budget 8MiB ./model"),
            ("loadcheck org/name", "loadcheck run org/name"),
            ("loadcheck -q ./model", "loadcheck run -q ./model"),
            ("loadcheck -- plan", "loadcheck run -- plan"),
            ("loadcheck --color always ./model", "loadcheck run --color always ./model"),
        ] {
            assert_eq!(words(line), expected);
        }
        assert_eq!(words("loadcheck help plan"), "loadcheck plan --help");
        assert_eq!(words("loadcheck help"), "loadcheck --help");
        for line in [
            "loadcheck",
            "loadcheck -h",
            "loadcheck --version",
            "loadcheck plan ./model",
            "loadcheck --color always plan ./model",
            "loadcheck --color=always -q plan ./model",
            "loadcheck insepct ./model",
        ] {
            assert_eq!(words(line), line);
        }
    }

    #[test]
    fn json_and_colour_are_known_before_parsing() {
        let split = |line: &str| -> Vec<OsString> { line.split(' ').map(OsString::from).collect() };
        for line in ["x --json", "x --format json y", "x --format=json --nonsense"] {
            assert!(wants_json(&split(line)), "{line}");
        }
        for line in ["x", "x --format csv", "x exec -- y --json", "x --jsonl"] {
            assert!(!wants_json(&split(line)), "{line}");
        }
        assert_eq!(help_colour(&split("x --color always -h")), clap::ColorChoice::Always);
        assert_eq!(help_colour(&split("x --color=never")), clap::ColorChoice::Never);
        assert_eq!(help_colour(&split("x --colors=never")), clap::ColorChoice::Auto);
    }
}
