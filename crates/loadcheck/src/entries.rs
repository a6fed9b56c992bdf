//! The loaders that `compare` and `fit` measure, from `-s` and `--cmd`.
//!
//! `-s` names one of our strategies, or is free text for a template with `{strategy}`.

use std::ffi::OsString;
use std::path::Path;

use crate::problem::{Code, Problem};
use crate::shell::CommandTemplate;
use crate::strategies::Strategy;

const STRATEGY: &str = "{strategy}";

/// A loader that is measured: a row of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Its name, unique in a table.
    pub(crate) name: String,
    /// How it loads.
    pub(crate) what: What,
}

/// How it loads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// A way of loading of this program's.
    Strategy(Strategy),
    /// A command, its words.
    Command(Vec<OsString>),
}

/// The commands that are asked for.
#[derive(Clone, Copy)]
pub(crate) struct Commands<'a> {
    /// As given to `--cmd`.
    pub(crate) templates: &'a [String],
    /// Their names, in the same order; those that have none are numbered.
    pub(crate) names: &'a [String],
}

/// The rows that are asked for: strategies, then commands, each in the order of the command line.
///
/// With `{strategy}` in a template the names of `-s` are free text for it; else they are names of
/// ours, and those of `usual` if none is given.
///
/// # Errors
/// Everything that is wrong with them.
pub(crate) fn entries(
    names: &[String],
    usual: &[Strategy],
    commands: Commands<'_>,
    source: &Path,
) -> Result<Vec<Entry>, Vec<Problem>> {
    let mut problems = Vec::new();
    if commands.names.len() > commands.templates.len() {
        problems.push(Problem::new(Code::Usage, "there are more --name than --cmd"));
    }
    let templates: Vec<CommandTemplate> = (commands.templates.iter())
        .filter_map(|text| CommandTemplate::parse(text).map_err(|problem| problems.push(problem)).ok())
        .collect();
    let needs_source = templates.iter().any(CommandTemplate::names_source);
    if needs_source && source.as_os_str().is_empty() {
        problems.push(no_source("--cmd has {source}"));
    }
    let takes_names = templates.iter().filter(|template| template.names_strategy()).count();
    if takes_names > 0 && names.is_empty() {
        problems.push(
            Problem::new(Code::Usage, format!("--cmd has {STRATEGY}, and nothing is there to put in"))
                .help("-s NAME, once for each row"),
        );
    }
    let mut entries = Vec::new();
    if takes_names == 0 {
        if names.is_empty() {
            let entry = |&strategy: &Strategy| Entry {
                name: strategy.name().to_owned(),
                what: What::Strategy(strategy),
            };
            entries.extend(usual.iter().map(entry));
        }
        for name in names {
            match Strategy::parse(name) {
                Ok(strategy) => entries.push(Entry { name: name.clone(), what: What::Strategy(strategy) }),
                Err(problem) => problems.push(problem),
            }
        }
    }
    let count = templates.len();
    for (index, template) in templates.iter().enumerate() {
        let own_name = match commands.names.get(index) {
            Some(name) => name.clone(),
            None if count == 1 => "cmd".to_owned(),
            None => format!("cmd{}", index + 1),
        };
        if !template.names_strategy() {
            entries.push(Entry { name: own_name, what: What::Command(template.words(source, None)) });
            continue;
        }
        for name in names {
            let what = What::Command(template.words(source, Some(name)));
            let name = if takes_names == 1 { name.clone() } else { format!("{name} ({own_name})") };
            entries.push(Entry { name, what });
        }
    }
    make_unique(&mut entries);
    if problems.is_empty() { Ok(entries) } else { Err(problems) }
}

/// A SOURCE is needed, and none is given.
pub(crate) fn no_source(why: &str) -> Problem {
    let message = format!("{why}, and no SOURCE is given");
    Problem::new(Code::Usage, message).help("name a checkpoint before the flags")
}

/// The second of a name is called `name #2`: the same thing twice shows how much the machine
/// varies.
fn make_unique(entries: &mut [Entry]) {
    for index in 0..entries.len() {
        let (before, rest) = entries.split_at_mut(index);
        let entry = &mut rest[0];
        let plain = entry.name.clone();
        let mut number = 2_u32;
        while before.iter().any(|other| other.name == entry.name) {
            entry.name = format!("{plain} #{number}");
            number += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::strategies::SimpleStrategy;

    fn rows(names: &[&str], templates: &[&str]) -> Result<Vec<(String, Vec<String>)>, Vec<Problem>> {
        let own = |list: &[&str]| list.iter().map(|text| (*text).to_owned()).collect::<Vec<String>>();
        let usual = [Strategy::Stream, Strategy::Simple(SimpleStrategy::Mmap)];
        let entries = entries(
            &own(names),
            &usual,
            Commands { templates: &own(templates), names: &[] },
            Path::new("a b/model"),
        )?;
        Ok(entries
            .into_iter()
            .map(|entry| match entry.what {
                What::Strategy(strategy) => (entry.name, vec![format!("<{}>", strategy.name())]),
                What::Command(words) => {
                    (entry.name, words.into_iter().map(|word| word.into_string().unwrap()).collect())
                }
            })
            .collect())
    }

    fn row(name: &str, words: &[&str]) -> (String, Vec<String>) {
        (name.to_owned(), words.iter().map(|word| (*word).to_owned()).collect())
    }

    #[test]
    fn the_usual_ways_are_measured_if_nothing_is_named() {
        let ours = [row("stream", &["<stream>"]), row("mmap", &["<mmap>"])];
        assert_eq!(rows(&[], &[]).unwrap(), ours);
        let with_command = [ours.as_slice(), &[row("cmd", &["cat", "a b/model"])]].concat();
        assert_eq!(rows(&[], &["cat {source}"]).unwrap(), with_command);
    }

    #[test]
    fn names_are_free_text_where_a_template_takes_them() {
        let found =
            rows(&["load_file", "it's"], &["py -c 'x = {}' {strategy}.py {source}/{strategy}"]).unwrap();
        assert_eq!(
            found,
            [
                row("load_file", &["py", "-c", "x = {}", "load_file.py", "a b/model/load_file"]),
                row("it's", &["py", "-c", "x = {}", "it's.py", "a b/model/it's"]),
            ]
        );
        let found = rows(&["x"], &["a {strategy}", "b", "c {strategy}"]).unwrap();
        let names: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["x (cmd1)", "cmd2", "x (cmd3)"]);
    }

    #[test]
    fn words_are_split_before_anything_is_put_in() {
        let found = rows(&["{source} $(x)"], &[r#"a "b {strategy}" c\ d 'ü{'{"k":1}é{source}"#]).unwrap();
        assert_eq!(found[0].1, ["a", "b {source} $(x)", "c d", "ü{{k:1}éa b/model"]);
    }

    #[test]
    fn the_same_twice_is_two_rows() {
        let found = rows(&["mmap", "mmap", "stream", "mmap"], &[]).unwrap();
        let names: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["mmap", "mmap #2", "stream", "mmap #3"]);
        assert_eq!(Strategy::parse("mmap"), Ok(Strategy::Simple(SimpleStrategy::Mmap)));
    }

    #[test]
    fn everything_wrong_is_said_at_once() {
        let problems = rows(&["steam"], &["a 'b", "", "   "]).unwrap_err();
        assert_eq!(problems.len(), 4, "{problems:?}");
        assert!(problems.iter().all(|problem| problem.code == Code::Usage));
        let problems = rows(&[], &["a {strategy}"]).unwrap_err();
        assert!(problems[0].help.as_deref().unwrap().contains("-s NAME"), "{problems:?}");
    }
}
