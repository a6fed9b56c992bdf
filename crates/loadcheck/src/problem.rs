//! What went wrong, in the shape that people and scripts get: a code, a sentence, a place, a
//! remedy.
//!
//! Problems are values: they are collected, sorted (most basic first) and printed in one go by
//! [`crate::output`]; nothing here prints. A worker process sends them to its parent as JSON.

use serde::{Deserialize, Serialize};

use crate::exit::Exit;

/// A stable code. Its hundreds digit decides the exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) enum Code {
    /// The budget is smaller than the smallest that works.
    #[serde(rename = "LC0201")]
    BudgetTooSmall,
    /// The command line is not understood.
    #[serde(rename = "LC0202")]
    Usage,
    /// A relative size (`80%`, `2x-layer`) has nothing to relate to.
    #[serde(rename = "LC0203")]
    SizeUnresolved,
    /// A regular expression does not compile.
    #[serde(rename = "LC0204")]
    BadPattern,
    /// The output file exists, or cannot be written.
    #[serde(rename = "LC0205")]
    OutputRefused,
    /// The file with layer rules is missing or wrong.
    #[serde(rename = "LC0206")]
    LayerMap,
    /// The request cannot be met for another reason.
    #[serde(rename = "LC0207")]
    CannotBeMet,
    /// `--select` leaves no tensor.
    #[serde(rename = "LC0208")]
    NothingSelected,
    /// The command of `exec` cannot be started.
    #[serde(rename = "LC0209")]
    CannotStart,
    /// The target of a conversion is in use for something else: a file in the way, another
    /// conversion, the source itself, or nothing can be written there.
    #[serde(rename = "LC0210")]
    TargetRefused,
    /// The target's file system has too little room. Nothing was written.
    #[serde(rename = "LC0211")]
    NoSpace,
    /// Another process converts into the target.
    #[serde(rename = "LC0212")]
    TargetLocked,
    /// The file of dtype rules is missing or wrong.
    #[serde(rename = "LC0213")]
    DtypeRules,
    /// A tensor cannot be cast to what was asked for.
    #[serde(rename = "LC0214")]
    CannotCast,
    /// A device map is wrong, or does not keep the limits.
    #[serde(rename = "LC0215")]
    DeviceMap,
    /// There is no such file, directory or repository.
    #[serde(rename = "LC0301")]
    SourceMissing,
    /// The checkpoint is incomplete or breaks the format.
    #[serde(rename = "LC0302")]
    SourceInvalid,
    /// The system refuses to open or read it.
    #[serde(rename = "LC0303")]
    SourceUnreadable,
    /// The repository is not in the local cache, and nothing is fetched.
    #[serde(rename = "LC0304")]
    NotInCache,
    /// A manifest cannot be understood.
    #[serde(rename = "LC0305")]
    BadManifest,
    /// A metric that a limit asks for cannot be measured here.
    #[serde(rename = "LC0401")]
    CannotMeasure,
    /// The device is not available.
    #[serde(rename = "LC0402")]
    NoDevice,
    /// Reading or delivering failed midway.
    #[serde(rename = "LC0501")]
    LoadFailed,
    /// The worker was killed by a signal.
    #[serde(rename = "LC0502")]
    WorkerKilled,
    /// The worker ended without a report.
    #[serde(rename = "LC0503")]
    WorkerLost,
    /// The measured command failed.
    #[serde(rename = "LC0504")]
    ChildFailed,
    /// A result could not be written.
    #[serde(rename = "LC0505")]
    CannotWrite,
    /// A file changed while it was being loaded.
    #[serde(rename = "LC0506")]
    SourceChanged,
    /// Ctrl-C or SIGTERM.
    #[serde(rename = "LC0507")]
    Interrupted,
    /// `--verify`: what was delivered is not what the file has.
    #[serde(rename = "LC0508")]
    BytesDiffer,
    /// A file of a conversion could not be written. Finished files stay, and the same command goes
    /// on behind them.
    #[serde(rename = "LC0509")]
    WriteFailed,
    /// `verify`, or `convert --verify`: a checkpoint is not what its manifest or its source says.
    #[serde(rename = "LC0510")]
    VerifyFailed,
    /// `convert --finish`: files of some parts are missing.
    #[serde(rename = "LC0511")]
    PartsMissing,
}

impl Code {
    /// The code as text.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::BudgetTooSmall => "LC0201",
            Self::Usage => "LC0202",
            Self::SizeUnresolved => "LC0203",
            Self::BadPattern => "LC0204",
            Self::OutputRefused => "LC0205",
            Self::LayerMap => "LC0206",
            Self::CannotBeMet => "LC0207",
            Self::NothingSelected => "LC0208",
            Self::CannotStart => "LC0209",
            Self::TargetRefused => "LC0210",
            Self::NoSpace => "LC0211",
            Self::TargetLocked => "LC0212",
            Self::DtypeRules => "LC0213",
            Self::CannotCast => "LC0214",
            Self::DeviceMap => "LC0215",
            Self::SourceMissing => "LC0301",
            Self::SourceInvalid => "LC0302",
            Self::SourceUnreadable => "LC0303",
            Self::NotInCache => "LC0304",
            Self::BadManifest => "LC0305",
            Self::CannotMeasure => "LC0401",
            Self::NoDevice => "LC0402",
            Self::LoadFailed => "LC0501",
            Self::WorkerKilled => "LC0502",
            Self::WorkerLost => "LC0503",
            Self::ChildFailed => "LC0504",
            Self::CannotWrite => "LC0505",
            Self::SourceChanged => "LC0506",
            Self::Interrupted => "LC0507",
            Self::BytesDiffer => "LC0508",
            Self::WriteFailed => "LC0509",
            Self::VerifyFailed => "LC0510",
            Self::PartsMissing => "LC0511",
        }
    }

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
    /// What was expected and what was found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) detail: Option<String>,
    /// What to do about it.
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
        for code in [
            Code::BudgetTooSmall,
            Code::TargetRefused,
            Code::NoSpace,
            Code::TargetLocked,
            Code::DtypeRules,
            Code::CannotCast,
            Code::DeviceMap,
            Code::SourceInvalid,
            Code::BadManifest,
            Code::NoDevice,
            Code::Interrupted,
            Code::BytesDiffer,
            Code::WriteFailed,
            Code::VerifyFailed,
            Code::PartsMissing,
        ] {
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
