//! Properties of the two output streams: colour, width, progress.
//!
//! Colour is decided by `--color`, then `NO_COLOR`, `CLICOLOR_FORCE` and `TERM=dumb`; otherwise
//! terminals are coloured. Hints and progress go to stderr.

use std::io::IsTerminal as _;

use anstyle::{AnsiColor, Style};

use crate::args::{ColorArg, ProgressArg, TerminalArgs};

/// The meaning of a piece of text. Colour only adds emphasis: the words say the same.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Role {
    /// Something failed.
    Bad,
    /// A warning.
    Warning,
    /// Something passed.
    Good,
    /// The most important number.
    Strong,
    /// Headings, hints, asides.
    Dim,
}

/// Paints text, or leaves it as it is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Paint {
    colour: bool,
}

impl Paint {
    /// Leaves text as it is.
    pub(crate) const NONE: Self = Self { colour: false };

    /// `text` in the colours of `role`.
    pub(crate) fn paint(self, role: Role, text: &str) -> String {
        if !self.colour {
            return text.to_owned();
        }
        let style = match role {
            Role::Bad => Style::new().bold().fg_color(Some(AnsiColor::Red.into())),
            Role::Warning => Style::new().bold().fg_color(Some(AnsiColor::Yellow.into())),
            Role::Good => Style::new().bold().fg_color(Some(AnsiColor::Green.into())),
            Role::Strong => Style::new().bold(),
            Role::Dim => Style::new().dimmed(),
        };
        format!("{style}{text}{style:#}")
    }
}

/// How progress is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProgressMode {
    /// A bar.
    Bar,
    /// A line every 10 %, and at least every 10 s.
    Plain,
    /// One JSON object a line.
    Json,
    /// Nothing.
    Never,
}

/// The streams, inspected once at the start.
#[derive(Clone, Debug)]
pub(crate) struct Terminal {
    /// stdout is a terminal.
    pub(crate) stdout_is_terminal: bool,
    /// Paints what goes to stdout.
    pub(crate) stdout_paint: Paint,
    /// Paints what goes to stderr.
    pub(crate) stderr_paint: Paint,
    /// Columns of stdout, if it is a terminal.
    pub(crate) width: Option<u16>,
    /// How progress is shown.
    pub(crate) progress: ProgressMode,
    /// Neither progress nor hints.
    pub(crate) quiet: bool,
    /// More detail.
    pub(crate) verbose: bool,
    /// The locale is C or POSIX: only ASCII can be read.
    pub(crate) is_ascii: bool,
}

/// True if the locale of texts is stated and has no other characters than those of ASCII.
pub(crate) fn is_ascii_locale() -> bool {
    let mut names = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().filter_map(std::env::var_os);
    names.find(|name| !name.is_empty()).is_some_and(|name| name == "C" || name == "POSIX")
}

impl Terminal {
    /// Inspects the streams and the environment.
    pub(crate) fn detect(args: &TerminalArgs) -> Self {
        let (stdout_tty, stderr_tty) = (std::io::stdout().is_terminal(), std::io::stderr().is_terminal());
        let environment = Environment::read();
        let progress = match args.progress {
            _ if args.quiet => ProgressMode::Never,
            ProgressArg::Auto if stderr_tty && !environment.dumb => ProgressMode::Bar,
            ProgressArg::Auto | ProgressArg::Plain => ProgressMode::Plain,
            ProgressArg::Bar => ProgressMode::Bar,
            ProgressArg::Json => ProgressMode::Json,
            ProgressArg::Never => ProgressMode::Never,
        };
        let size = rustix::termios::tcgetwinsize(std::io::stdout()).ok();
        Self {
            stdout_is_terminal: stdout_tty,
            stdout_paint: Paint { colour: environment.colours(args.color, stdout_tty) },
            stderr_paint: Paint { colour: environment.colours(args.color, stderr_tty) },
            width: size.map(|size| size.ws_col).filter(|columns| stdout_tty && *columns > 0),
            progress,
            quiet: args.quiet,
            verbose: args.verbose,
            is_ascii: is_ascii_locale(),
        }
    }
}

/// The environment variables that affect colour.
#[derive(Clone, Copy, Debug, Default)]
struct Environment {
    no_color: bool,
    force: bool,
    dumb: bool,
}

impl Environment {
    fn read() -> Self {
        let set = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        Self {
            no_color: set("NO_COLOR").is_some(),
            force: set("CLICOLOR_FORCE").is_some_and(|value| value != "0"),
            dumb: set("TERM").is_some_and(|value| value == "dumb"),
        }
    }

    fn colours(self, choice: ColorArg, is_terminal: bool) -> bool {
        match choice {
            ColorArg::Always => true,
            ColorArg::Never => false,
            ColorArg::Auto => !self.no_color && (self.force || (is_terminal && !self.dumb)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_decides_about_colour() {
        let plain = Environment::default();
        assert!(plain.colours(ColorArg::Auto, true) && !plain.colours(ColorArg::Auto, false));
        assert!(plain.colours(ColorArg::Always, false) && !plain.colours(ColorArg::Never, true));
        let no_color = Environment { no_color: true, force: true, dumb: false };
        assert!(!no_color.colours(ColorArg::Auto, true) && no_color.colours(ColorArg::Always, false));
        assert!(Environment { force: true, dumb: true, ..plain }.colours(ColorArg::Auto, false));
        assert!(!Environment { dumb: true, ..plain }.colours(ColorArg::Auto, true));
    }
}
