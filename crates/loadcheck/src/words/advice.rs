//! Advice for command lines that clap does not understand: the flag of another command, a word too
//! many, a negative number.

use std::ffi::OsString;
use std::path::Path;

use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, Error, ErrorKind};
use clap::{Command, CommandFactory as _};

use crate::args::Cli;

/// Flags that people try, and what is meant. An empty command stands for every one.
const MEANT: [(&str, &str, &str); 11] = [
    ("run", "vram", "`--max-vram SIZE` limits device memory; `loadcheck plan --vram SIZE` places layers"),
    ("run", "host", "`--max-memory SIZE` limits memory; `loadcheck plan --host SIZE` places layers"),
    ("synth", "list", "`loadcheck synth --help` lists the presets"),
    ("plan", "limit", "`--max-memory SIZE`: does it fit?"),
    ("", "list", "`loadcheck synth --help` lists the presets, `loadcheck inspect` the layers"),
    ("", "memory", "`--max-memory SIZE` limits what a load may take; `loadcheck fits SOURCE SIZE` predicts"),
    ("", "mem", "`--max-memory SIZE` limits what a load may take; `loadcheck fits SOURCE SIZE` predicts"),
    ("", "ram", "`--max-memory SIZE` limits what a load may take; `loadcheck fits SOURCE SIZE` predicts"),
    ("", "gpu", "`--device cuda:0` loads to the first GPU"),
    ("", "model", "name the model without a flag: `loadcheck ./model`"),
    ("", "version", "`loadcheck --version`"),
];

/// The error, with advice in place of what clap would say.
pub(crate) fn advise(mut error: Error, words: &[OsString], ran_by_default: bool) -> Error {
    if error.kind() != ErrorKind::UnknownArgument {
        return error;
    }
    let Some(ContextValue::String(wrong)) = error.get(ContextKind::InvalidArg) else { return error };
    let wrong = wrong.clone();
    let cli = Cli::command();
    let command = words.iter().skip(1).find_map(|word| cli.find_subcommand(word.to_str()?));
    let name = command.map_or("", Command::get_name);
    if let Some(flag) = wrong.strip_prefix("--") {
        let flag = flag.split_once('=').map_or(flag, |(flag, _)| flag);
        let meant = MEANT.iter().find(|(of, known, _)| *known == flag && (of.is_empty() || *of == name));
        let known = meant.map(|(.., help)| (*help).to_owned()).or_else(|| others(&cli, flag));
        let similar = match error.get(ContextKind::SuggestedArg) {
            Some(ContextValue::String(similar)) => Some(format!("is `{similar}` meant?")),
            _ => None,
        };
        error.remove(ContextKind::SuggestedArg);
        tip(&mut error, known.or(similar));
        return error;
    }
    let text = |word: Option<&OsString>| word.map(|word| word.to_string_lossy().into_owned());
    match text(words.get(2)) {
        _ if wrong.starts_with('-') && wrong[1..].starts_with(|c: char| c.is_ascii_digit()) => {
            tip(&mut error, Some("a size or a number is not negative".to_owned()));
        }
        Some(first) if ran_by_default && !Path::new(&first).exists() && !first.contains(['/', '.']) => {
            let message = format!("there is no command `{first}`, and no file or directory of that name\n");
            return cli.clone().error(ErrorKind::InvalidSubcommand, message);
        }
        _ if name == "run" => {
            tip(
                &mut error,
                Some("`run` takes one SOURCE; `loadcheck leak A B` loads one after the other".to_owned()),
            );
        }
        _ => tip(&mut error, None),
    }
    error
}

/// That other commands know a flag.
fn others(cli: &Command, flag: &str) -> Option<String> {
    let knows = |command: &&Command| {
        command.get_arguments().any(|arg| {
            arg.get_long() == Some(flag)
                || arg.get_all_aliases().into_iter().flatten().any(|alias| alias == flag)
        })
    };
    let names: Vec<String> =
        cli.get_subcommands().filter(knows).map(|command| format!("`{}`", command.get_name())).collect();
    (!names.is_empty()).then(|| format!("`--{flag}` is a flag of {}", names.join(", ")))
}

/// Replaces the advice that is there.
fn tip(error: &mut Error, text: Option<String>) {
    error.remove(ContextKind::Suggested);
    if let Some(text) = text {
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![StyledStr::from(text)]));
    }
}
