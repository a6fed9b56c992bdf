//! Problems, as people and scripts get them: a code, a sentence, a place, a
//! remedy.
//!
//! Problems are values: they are collected, sorted (most basic first) and printed in one go by
//! [`crate::output`]; nothing here prints. A worker process sends them to its parent as JSON.

use serde::{Deserialize, Serialize};

use crate::exit::Exit;

/// Declares the codes, each with its text.
macro_rules! codes {
    ($($(#[doc = $doc:literal])* $name:ident = $text:literal,)*) => {
        /// A stable code. Its hundreds digit decides the exit code.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
        #[cfg_attr(test, derive(schemars::JsonSchema))]
        pub(crate) enum Code {
            $($(#[doc = $doc])* #[serde(rename = $text)] $name,)*
        }

        impl Code {
            /// Every code.
            pub(crate) const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// The meaning of the code, as its documentation has it.
            pub(crate) fn meaning(self) -> String {
                match self {
                    $(Self::$name => [$($doc,)*].map(str::trim).join(" "),)*
                }
            }

            /// The code as text.
            pub(crate) const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                }
            }
        }
    };
}

codes! {
    /// The budget is smaller than the smallest that works.
    BudgetTooSmall = "LC0201",
    /// The command line is not understood.
    Usage = "LC0202",
    /// A relative size (`80%`, `2x-layer`) has nothing to relate to.
    SizeUnresolved = "LC0203",
    /// A regular expression does not compile.
    BadPattern = "LC0204",
    /// The output file exists, or cannot be written.
    OutputRefused = "LC0205",
    /// The file with layer rules is missing or wrong.
    LayerMap = "LC0206",
    /// The request cannot be met for another reason.
    CannotBeMet = "LC0207",
    /// `--select` leaves no tensor.
    NothingSelected = "LC0208",
    /// The command of `exec` cannot be started.
    CannotStart = "LC0209",
    /// The target of a conversion is in use for something else: a file in the way, another
    /// conversion, the source itself, or nothing can be written there.
    TargetRefused = "LC0210",
    /// The target's file system has too little room. Nothing was written.
    NoSpace = "LC0211",
    /// Another process converts into the target.
    TargetLocked = "LC0212",
    /// The file of dtype rules is missing or wrong.
    DtypeRules = "LC0213",
    /// A tensor cannot be cast to what was asked for.
    CannotCast = "LC0214",
    /// A device map is wrong, or does not keep the limits.
    DeviceMap = "LC0215",
    /// There is no such file, directory or repository.
    SourceMissing = "LC0301",
    /// The checkpoint is incomplete or breaks the format.
    SourceInvalid = "LC0302",
    /// The system refuses to open or read it.
    SourceUnreadable = "LC0303",
    /// The repository is not in the local cache, and nothing is fetched.
    NotInCache = "LC0304",
    /// A manifest cannot be understood.
    BadManifest = "LC0305",
    /// A metric that a limit asks for cannot be measured here.
    CannotMeasure = "LC0401",
    /// The device is not available.
    NoDevice = "LC0402",
    /// Reading or delivering failed midway.
    LoadFailed = "LC0501",
    /// The worker was killed by a signal.
    WorkerKilled = "LC0502",
    /// The worker ended without a report.
    WorkerLost = "LC0503",
    /// The measured command failed.
    ChildFailed = "LC0504",
    /// A result could not be written.
    CannotWrite = "LC0505",
    /// A file changed while it was being loaded.
    SourceChanged = "LC0506",
    /// Ctrl-C or SIGTERM.
    Interrupted = "LC0507",
    /// `--verify`: what was delivered is not what the file has.
    BytesDiffer = "LC0508",
    /// A file of a conversion could not be written. Finished files stay, and the same command goes
    /// on behind them.
    WriteFailed = "LC0509",
    /// `verify`, or `convert --verify`: a checkpoint is not what its manifest or its source says.
    VerifyFailed = "LC0510",
    /// `convert --finish`: files of some parts are missing.
    PartsMissing = "LC0511",
}

impl Code {
    /// The exit code that it leads to.
    pub(crate) const fn exit(self) -> Exit {
        match self.as_str().as_bytes()[3] {
            b'2' => Exit::Usage,
            b'3' => Exit::Source,
            b'4' => Exit::CannotMeasure,
            _ => Exit::LoadFailed,
        }
    }

    /// Sort key: a missing source explains more than an unmeasurable metric, and that more than a
    /// flag.
    const fn rank(self) -> u8 {
        match self.exit() {
            Exit::Source => 0,
            Exit::CannotMeasure => 1,
            Exit::Usage => 2,
            _ => 3,
        }
    }
}

/// One problem.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Problem {
    /// Stable code.
    pub(crate) code: Code,
    /// One sentence, lower case, no full stop.
    pub(crate) message: String,
    /// A file, a tensor, a flag.
    pub(crate) place: Option<String>,
    /// Expected and found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) detail: Option<String>,
    /// The next step for the user.
    pub(crate) help: Option<String>,
}

impl Problem {
    /// A problem without place and help.
    pub(crate) fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), place: None, detail: None, help: None }
    }

    /// Adds where it is.
    pub(crate) fn at(mut self, place: impl Into<String>) -> Self {
        self.place = Some(place.into());
        self
    }

    /// Adds what to do.
    pub(crate) fn help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }
}

/// Sorts problems, most basic first (exit codes 3, 4, 2, then 5); the order within a class is kept.
pub(crate) fn most_basic_first(problems: &mut [Problem]) {
    problems.sort_by_key(|problem| problem.code.rank());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_and_text_agree_on_the_code() {
        for &code in Code::ALL {
            assert_eq!(serde_json::to_value(code).unwrap(), code.as_str());
        }
    }

    #[test]
    fn the_source_comes_first() {
        let mut problems: Vec<Problem> = [
            Code::WorkerLost,
            Code::BudgetTooSmall,
            Code::NoDevice,
            Code::SourceInvalid,
            Code::CannotMeasure,
        ]
        .map(|code| Problem::new(code, "x"))
        .into();
        most_basic_first(&mut problems);
        let codes: Vec<&str> = problems.iter().map(|problem| problem.code.as_str()).collect();
        assert_eq!(codes, ["LC0302", "LC0402", "LC0401", "LC0201", "LC0503"]);
    }
}
