//! `loadcheck completions` and `loadcheck man`: generated from the definition of the command line.

use clap::CommandFactory as _;

use crate::args::{Cli, CompletionsArgs, ManArgs};
use crate::problem::{Code, Problem};

/// The completion script of a shell.
pub(crate) fn completions(args: &CompletionsArgs) -> Result<String, Problem> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "loadcheck", &mut script);
    String::from_utf8(script).map_err(|error| Problem::new(Code::CannotWrite, error.to_string()))
}

/// The manual page of the program, or of one of its commands.
pub(crate) fn man(args: &ManArgs) -> Result<String, Problem> {
    let mut root = Cli::command();
    root.build();
    let command = match &args.page {
        None => root,
        Some(page) => {
            let name = page.strip_prefix("loadcheck-").unwrap_or(page);
            let known: Vec<String> = root
                .get_subcommands()
                .map(|command| command.get_name().to_owned())
                .filter(|name| name != "help")
                .collect();
            root.find_subcommand(name)
                .filter(|_| known.iter().any(|known| known == name))
                .cloned()
                .ok_or_else(|| {
                    Problem::new(Code::Usage, format!("there is no command `{page}`"))
                        .help(format!("there are {}", known.join(", ")))
                })?
        }
    };
    let mut page = Vec::new();
    let rendered = clap_mangen::Man::new(command)
        .section("1")
        .source(concat!("loadcheck ", env!("CARGO_PKG_VERSION")))
        .manual("loadcheck manual")
        .render(&mut page);
    rendered.map_err(|error| Problem::new(Code::CannotWrite, error.to_string()))?;
    let page = String::from_utf8(page).map_err(|error| Problem::new(Code::CannotWrite, error.to_string()))?;
    Ok(with_examples(&page))
}

/// Indented lines stay lines: without `.nf` they would be filled like any text.
fn with_examples(page: &str) -> String {
    let (mut text, mut is_inside) = (String::with_capacity(page.len()), false);
    for line in page.lines() {
        if line.starts_with("  ") != is_inside {
            is_inside = !is_inside;
            text.push_str(if is_inside { ".nf\n" } else { ".fi\n" });
        }
        text.push_str(line);
        text.push('\n');
    }
    if is_inside { text + ".fi\n" } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn examples_stay_lines() {
        assert_eq!(with_examples("a\n  b c\n  d\ne\n"), "a\n.nf\n  b c\n  d\n.fi\ne\n");
        assert_eq!(with_examples("a\n  b\n"), "a\n.nf\n  b\n.fi\n");
    }
}
