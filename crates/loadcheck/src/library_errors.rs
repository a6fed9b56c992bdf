//! The library's errors, in the shape that people and scripts get. The one place that maps them to
//! codes.

use onelayer::DeviceError;
use onelayer::checkpoint::CheckpointError;
use onelayer::layers::LayersError;
use onelayer::load::LoadError;
use onelayer::plan::PlanError;
use onelayer::source::SourceError;

use crate::kinds;
use crate::problem::{Code, Problem};

/// A library's message often begins with the file: that part becomes the problem's place.
fn split_place(message: &str, path: Option<&std::path::Path>) -> (String, Option<String>) {
    let Some(path) = path.map(|path| path.display().to_string()) else { return (message.to_owned(), None) };
    let rest = message.strip_prefix(&path).and_then(|rest| rest.strip_prefix(": ")).unwrap_or(message);
    (rest.to_owned(), Some(path))
}

/// A problem at the file that its message begins with.
pub(crate) fn placed(code: Code, message: &str, path: Option<&std::path::Path>) -> Problem {
    let (message, place) = split_place(message, path);
    Problem { place, ..Problem::new(code, message) }
}

/// Everything that is wrong with a checkpoint.
pub(crate) fn checkpoint(error: &CheckpointError) -> Vec<Problem> {
    error.problems().iter().map(one_of_checkpoint).collect()
}

fn one_of_checkpoint(error: &CheckpointError) -> Problem {
    let code = match error {
        CheckpointError::NotCached { .. } => Code::NotInCache,
        CheckpointError::MissingShards { .. } | CheckpointError::DanglingLink { .. } => Code::SourceInvalid,
        CheckpointError::FileChanged { .. } => Code::SourceChanged,
        _ if error.is_missing() => Code::SourceMissing,
        _ if error.is_invalid() => Code::SourceInvalid,
        _ => Code::SourceUnreadable,
    };
    // The path is what stands before the first `: ` of every message that has one.
    let message = error.to_string();
    let problem = placed(code, &message, error.path());
    let problem = match help_of(error) {
        Some(help) => problem.help(help),
        None => problem,
    };
    // The beginning of a file of another kind is an absurd length.
    let is_unknown = matches!(
        error,
        CheckpointError::HeaderExceedsFile { .. }
            | CheckpointError::OverLimit { .. }
            | CheckpointError::Syntax { .. }
            | CheckpointError::UnknownFormat { .. }
    );
    match (error, error.path()) {
        (CheckpointError::MissingShards { .. } | CheckpointError::DanglingLink { .. }, Some(path)) => {
            kinds::explain_missing(problem, path)
        }
        (CheckpointError::NoWeights { .. }, Some(path)) => kinds::explain_folder(problem, path),
        (_, Some(path)) if error.is_invalid() => kinds::explain_file(problem, path, is_unknown),
        _ => problem,
    }
}

fn help_of(error: &CheckpointError) -> Option<&'static str> {
    use CheckpointError as E;
    match error {
        E::Truncated { .. }
        | E::HeaderExceedsFile { .. }
        | E::DanglingLink { .. }
        | E::MissingShards { .. } => {
            Some("the download or copy stopped early: run `hf cache verify org/name`, or copy the file again")
        }
        E::UnknownDType { .. } => Some("--opaque-dtypes lets it pass as bytes"),
        E::NoWeights { .. } => Some("name a file of weights, its directory or its index"),
        E::NotCached { .. } => Some("loadcheck fetches nothing: `hf download` it first, or name a directory"),
        E::FileChanged { .. } => Some("try again when nothing writes to it"),
        _ => None,
    }
}

/// A grouping that fails: the override file is at fault, the rule itself takes any names.
pub(crate) fn layers(error: &LayersError, map: Option<&std::path::Path>) -> Problem {
    placed(Code::LayerMap, &error.to_string(), map)
}

/// An error that ended a load, or kept it from starting.
pub(crate) fn load(error: &LoadError, map: Option<&std::path::Path>) -> Problem {
    match error {
        LoadError::Plan(error) => plan(error),
        LoadError::Layers(error) => layers(error, map),
        LoadError::Source(error) => source(error),
        LoadError::Device(error) if error.is_unavailable() => Problem::new(Code::NoDevice, error.to_string()),
        // Refused before anything was loaded; memory that runs out midway is a load that failed.
        LoadError::Device(error @ DeviceError::OutOfDeviceMemory { .. }) => out_of_memory(error),
        LoadError::NotFound { kind: "layer", name, .. } => {
            Problem::new(Code::CannotBeMet, format!("the checkpoint has no layer named `{name}`"))
                .at("--keep")
                .help("`loadcheck inspect` lists the layers")
        }
        LoadError::Budget(error) => Problem::new(Code::CannotBeMet, error.to_string()),
        other => Problem::new(Code::LoadFailed, chain(other)),
    }
}

/// An error that kept a load from being planned.
pub(crate) fn plan(error: &PlanError) -> Problem {
    match error {
        PlanError::BudgetTooSmall { budget_bytes, smallest_bytes, detail } => {
            let human = onelayer::units::HumanBytes;
            Problem::new(
                Code::BudgetTooSmall,
                format!(
                    "budget {} is below the floor of {} ({detail})",
                    human(*budget_bytes),
                    human(*smallest_bytes)
                ),
            )
            .help(format!("--budget {}MiB or more", smallest_bytes.div_ceil(1 << 20)))
        }
        PlanError::NothingSelected { .. } => Problem::new(Code::NothingSelected, error.to_string())
            .at("--select")
            .help("`loadcheck inspect` lists the names"),
        PlanError::DeviceBudgetTooSmall { needed_bytes, .. } => {
            let enough = needed_bytes.div_ceil(1 << 20);
            Problem::new(Code::CannotBeMet, error.to_string())
                .at("--device-budget")
                .help(format!("--device-budget {enough}MiB or more, or a smaller --window"))
        }
        PlanError::WindowTooSmall { .. } => Problem::new(Code::CannotBeMet, error.to_string()).at("--window"),
        other => Problem::new(Code::CannotBeMet, other.to_string()),
    }
}

fn source(error: &SourceError) -> Problem {
    let (path, code, help) = match error {
        SourceError::FileChanged { path, .. } | SourceError::EndOfFile { path, .. } => {
            (Some(path), Code::SourceChanged, Some("load again when nothing writes to it"))
        }
        SourceError::Open { path, .. }
        | SourceError::NotRegular { path, .. }
        | SourceError::Status { path, .. }
        | SourceError::Read { path, .. } => (Some(path), Code::LoadFailed, None),
        _ => (None, Code::LoadFailed, None),
    };
    let problem = placed(code, &chain(error), path.map(std::path::PathBuf::as_path));
    match help {
        Some(help) => problem.help(help),
        None => problem,
    }
}

/// An error with its causes: `reading at byte 8 failed: Input/output error`.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        cause = error.source();
    }
    text
}

/// A request that the device is too small for.
pub(crate) fn out_of_memory(error: &DeviceError) -> Problem {
    let problem = Problem::new(Code::CannotBeMet, error.to_string());
    match error {
        // Less to stay free is advice only where it would do.
        DeviceError::OutOfDeviceMemory { needed_bytes, free_bytes, reserve_bytes }
            if needed_bytes <= free_bytes =>
        {
            let most = free_bytes.saturating_sub(*needed_bytes) >> 20;
            problem
                .help(format!("--window 1 keeps one layer at a time; --device-reserve {most}MiB leaves room"))
        }
        _ => problem.help("--window 1 keeps one layer at a time, --device none keeps nothing"),
    }
}
