//! The flags that were given, to print a further command that does the same.

use std::ffi::{OsStr, OsString};

use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command, CommandFactory as _};

use super::Cli;

/// A further command that is worth running.
#[derive(Clone, Debug, Default)]
pub(crate) struct Next {
    /// Its name.
    pub(crate) command: &'static str,
    /// Its sources and targets. Empty: those of the command that was given.
    pub(crate) places: Vec<String>,
    /// Flags that are added, with their values. They replace what was given.
    pub(crate) flags: Vec<(&'static str, Option<String>)>,
    /// Flags that are left out.
    pub(crate) without: &'static [&'static str],
    /// Limits are kept.
    pub(crate) keeps_limits: bool,
    /// Flags are those listed above, and none that was given.
    pub(crate) is_bare: bool,
    /// What it is for.
    pub(crate) why: &'static str,
}

/// An argument that stood on the command line.
#[derive(Clone, Debug)]
struct Word {
    id: String,
    /// The name of a flag; `None` is a place.
    flag: Option<String>,
    section: Option<String>,
    /// The values of each time it was given.
    values: Vec<OsString>,
}

/// The arguments that stood on the command line.
#[derive(Clone, Debug, Default)]
pub(crate) struct Given(Vec<Word>);

impl Given {
    /// Takes them from what clap has parsed.
    pub(crate) fn of(matches: &ArgMatches) -> Self {
        let cli = Cli::command();
        let Some((name, matches)) = matches.subcommand() else { return Self::default() };
        let Some(command) = cli.find_subcommand(name) else { return Self::default() };
        let is_given =
            |arg: &&Arg| matches.value_source(arg.get_id().as_str()) == Some(ValueSource::CommandLine);
        Self(command.get_arguments().filter(is_given).map(|arg| word(arg, matches)).collect())
    }

    /// The words of `next`, with the flags of the given command that it knows and that change what
    /// is measured.
    pub(crate) fn words(&self, next: &Next) -> Vec<OsString> {
        let cli = Cli::command();
        let target = cli.find_subcommand(next.command);
        let mut words: Vec<OsString> = vec!["loadcheck".into()];
        let mut places: Vec<OsString> = next.places.iter().map(OsString::from).collect();
        if places.is_empty() {
            let given = self.0.iter().filter(|word| word.flag.is_none());
            places = given.flat_map(|word| word.values.clone()).collect();
        }
        let is_command =
            |place: &OsString| place.to_str().is_some_and(|name| cli.find_subcommand(name).is_some());
        if next.command != "run" || places.iter().any(is_command) {
            words.push(next.command.into());
        }
        words.extend(places);
        let kept = self.0.iter().filter(|word| !next.is_bare && next.keeps(word, target));
        for word in kept {
            let flag = OsString::from(format!("--{}", word.flag.as_deref().unwrap_or_default()));
            if word.values.is_empty() {
                words.push(flag.clone());
            }
            for value in &word.values {
                words.extend([flag.clone(), value.clone()]);
            }
        }
        for (flag, value) in &next.flags {
            words.push(format!("--{flag}").into());
            words.extend(value.as_ref().map(OsString::from));
        }
        words
    }
}

impl Next {
    fn keeps(&self, word: &Word, target: Option<&Command>) -> bool {
        let Some(flag) = word.flag.as_deref() else { return false };
        let section = word.section.as_deref().unwrap_or_default();
        let is_wanted = match section {
            "Output" | "Terminal" => false,
            _ => self.keeps_limits || !section.starts_with("Limits"),
        };
        let is_replaced = self.without.contains(&flag) || self.flags.iter().any(|(name, _)| *name == flag);
        let is_known = target
            .into_iter()
            .flat_map(Command::get_arguments)
            .any(|arg| arg.get_id().as_str() == word.id && arg.get_help_heading() == word.section.as_deref());
        is_wanted && is_known && !is_replaced
    }
}

fn word(arg: &Arg, matches: &ArgMatches) -> Word {
    let id = arg.get_id().as_str();
    let mut values = Vec::new();
    if arg.is_positional() || arg.get_action().takes_values() {
        for occurrence in matches.get_raw_occurrences(id).into_iter().flatten() {
            let parts: Vec<&OsStr> = occurrence.collect();
            if arg.get_value_delimiter().is_some() {
                values.push(parts.join(OsStr::new(",")));
            } else {
                values.extend(parts.into_iter().map(OsStr::to_owned));
            }
        }
    }
    Word {
        id: id.to_owned(),
        flag: arg.get_long().map(str::to_owned),
        section: arg.get_help_heading().map(str::to_owned),
        values,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn next(line: &str, next: &Next) -> String {
        let matches = Cli::command().try_get_matches_from(line.split(' ')).unwrap();
        let words = Given::of(&matches).words(next);
        words.iter().map(|word| word.to_str().unwrap()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn what_changes_the_load_is_kept() {
        let gate =
            Next { command: "run", flags: vec![("max-memory", Some("64Mi".to_owned()))], ..Next::default() };
        for (line, expected) in [
            ("loadcheck run m --window 1 --json -q", "loadcheck m --window 1 --max-memory 64Mi"),
            ("loadcheck run m --max-host 1Mi --hash", "loadcheck m --hash --max-memory 64Mi"),
            ("loadcheck run plan --dtype f16", "loadcheck run plan --dtype f16 --max-memory 64Mi"),
            ("loadcheck plan m --vram 1Gi,2Gi --tp 0/2", "loadcheck m --tp 0/2 --max-memory 64Mi"),
        ] {
            assert_eq!(next(line, &gate), expected);
        }
        let again = Next { command: "plan", keeps_limits: true, ..Next::default() };
        assert_eq!(next("loadcheck plan m --vram 1Gi,2Gi", &again), "loadcheck plan m --vram 1Gi,2Gi");
        let bare = Next { command: "verify", places: vec!["t".to_owned()], is_bare: true, ..Next::default() };
        assert_eq!(next("loadcheck convert m t --budget 1Gi", &bare), "loadcheck verify t");
    }
}
