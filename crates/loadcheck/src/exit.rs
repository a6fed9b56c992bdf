//! Exit codes: the one place that says what each means. `--help` lists this table, a test walks
//! through it.

use std::process::ExitCode;

/// How the program ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// Ran, and every limit was met. Also a reader that closed the pipe.
    Ok,
    /// Ran, and a limit or the promise was exceeded.
    LimitExceeded,
    /// Wrong usage, or a request that cannot be met.
    Usage,
    /// The source is missing, unreadable or corrupt.
    Source,
    /// What was asked for cannot be measured or used here.
    CannotMeasure,
    /// The load, the conversion, or the measured command, failed; or a comparison found a
    /// difference.
    LoadFailed,
    /// A limit lies inside the spread of the runs.
    Inconclusive,
    /// SIGINT.
    Interrupted,
    /// SIGTERM or SIGHUP.
    Terminated,
}

impl Exit {
    /// Every exit code and its meaning, in the order of the codes.
    pub(crate) const ALL: [(Self, u8, &'static str); 9] = [
        (Self::Ok, 0, "ran, all limits met; also when the reader of a pipe went away"),
        (Self::LimitExceeded, 1, "ran, a limit or the memory promise was exceeded"),
        (Self::Usage, 2, "wrong usage, or a request that cannot be met (LC02xx)"),
        (Self::Source, 3, "the source is missing, unreadable or corrupt (LC03xx)"),
        (Self::CannotMeasure, 4, "cannot measure or use what was asked for (LC04xx)"),
        (Self::LoadFailed, 5, "the load, conversion, comparison or measured command failed (LC05xx)"),
        (Self::Inconclusive, 6, "a limit lies inside the spread of the runs (--strict-noise)"),
        (Self::Interrupted, 130, "interrupted (Ctrl-C); the partial report is kept"),
        (Self::Terminated, 143, "terminated (SIGTERM); the partial report is kept"),
    ];

    /// The number the shell sees.
    pub(crate) fn code(self) -> u8 {
        Self::ALL.iter().find(|(exit, ..)| *exit == self).map_or(5, |(_, code, _)| *code)
    }

    /// What it means.
    pub(crate) fn meaning(self) -> &'static str {
        Self::ALL.iter().find(|(exit, ..)| *exit == self).map_or("", |(.., meaning)| meaning)
    }

    /// The table as `--help` prints it.
    pub(crate) fn table() -> String {
        use std::fmt::Write as _;
        let mut text = String::from("Exit codes:\n");
        for (_, code, meaning) in Self::ALL {
            let _ = writeln!(text, "  {code:>3}  {meaning}");
        }
        text.truncate(text.trim_end().len());
        text
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_distinct_and_listed() {
        let mut codes: Vec<u8> = Exit::ALL.iter().map(|(exit, ..)| exit.code()).collect();
        codes.dedup();
        assert_eq!(codes, [0, 1, 2, 3, 4, 5, 6, 130, 143]);
        for (_, _, meaning) in Exit::ALL {
            assert!(Exit::table().contains(meaning));
        }
    }
}
