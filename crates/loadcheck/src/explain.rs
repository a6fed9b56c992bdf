//! `loadcheck explain LC0205`: what a code means, and what to do about it. `docs/codes.md` has the
//! same as a table; a test compares the two.

use std::fmt::Write as _;

use crate::problem::{Code, Problem};

/// The text about one code, or the table of all.
///
/// # Errors
/// There is no such code.
pub(crate) fn explain(asked: Option<&str>) -> Result<String, Problem> {
    let Some(asked) = asked else { return Ok(table()) };
    let name = asked.trim().to_uppercase();
    let name = if name.starts_with("LC") { name } else { format!("LC{name}") };
    let Some(&code) = Code::ALL.iter().find(|code| code.as_str() == name) else {
        let problem = Problem::new(Code::Usage, format!("there is no code `{asked}`"));
        return Err(problem.help("`loadcheck explain` lists all codes"));
    };
    let mut text = format!("{}: {}\n", code.as_str(), code.meaning());
    let _ = writeln!(text, "\nWhat to do: {}", remedy(code));
    let _ = writeln!(text, "\nExit code {}: {}", code.exit().code(), code.exit().meaning());
    Ok(text)
}

/// Every code in a line.
fn table() -> String {
    Code::ALL.iter().map(|code| format!("{}  {}\n", code.as_str(), code.meaning())).collect()
}

/// The page of the manual.
#[cfg(test)]
fn page() -> String {
    let mut text = String::from(
        "# Error codes\n\nEach error has a code. `loadcheck explain LC0205` prints the same in a terminal. The hundreds\n\
         decide the exit code. If several things are wrong, the first error that is printed decides it.\n\n\
         | code | exit | meaning | what to do |\n|---|---:|---|---|\n",
    );
    for &code in Code::ALL {
        let (name, exit) = (code.as_str(), code.exit().code());
        let _ = writeln!(text, "| {name} | {exit} | {} | {} |", code.meaning(), remedy(code));
    }
    text
}

/// The next step.
fn remedy(code: Code) -> &'static str {
    match code {
        Code::BudgetTooSmall => {
            "Give the budget that the message names, or more. `loadcheck inspect` shows the smallest."
        }
        Code::Usage => "See `loadcheck COMMAND --help`.",
        Code::SizeUnresolved => "Write the size in bytes, such as 512MiB.",
        Code::BadPattern => "Correct the regular expression: brackets are escaped as `\\(`.",
        Code::OutputRefused => "Choose another file, or overwrite it with --force.",
        Code::LayerMap => "Correct the file; `loadcheck inspect --layers FILE` shows what it does.",
        Code::CannotBeMet => {
            "Ask for less: --window 1, --quantise int8, a smaller model. `loadcheck fits` says what would do."
        }
        Code::NothingSelected => "Choose another pattern; `loadcheck inspect -v` lists the names.",
        Code::CannotStart => "Check the name of the program, and that it can be executed.",
        Code::TargetRefused => "Choose another directory; --force replaces files of another conversion.",
        Code::NoSpace => "Make room, or choose another file system; the message says how much is needed.",
        Code::TargetLocked => "Wait for the other process; several share the work with --part.",
        Code::DtypeRules => "Correct the file: a TOML table [[rule]] with match and dtype for each rule.",
        Code::CannotCast => "Leave the tensor as it is: a rule with dtype = \"keep\".",
        Code::DeviceMap => "Correct the map; `loadcheck plan --export-device-map FILE` writes one.",
        Code::SourceMissing => {
            "Check the path. Names such as org/name are looked up in the local Hugging Face cache."
        }
        Code::SourceInvalid => "Download or copy the files again; `hf cache verify org/name` checks a cache.",
        Code::SourceUnreadable => "Check the permissions, and whether the disk is in order.",
        Code::NotInCache => "Download it with `hf download org/name`, or name a directory.",
        Code::BadManifest => "Convert again, or remove onelayer.manifest.json.",
        Code::CannotMeasure => {
            "`loadcheck doctor` says what can be measured here, and how to enable the rest."
        }
        Code::NoDevice => "Use --device host or none; `loadcheck doctor` says what is missing.",
        Code::LoadFailed => "The message has the cause; reading errors come from the disk or the network.",
        Code::WorkerKilled => {
            "Most often memory ran out: try --window 1, or a larger limit. `loadcheck fit` finds one."
        }
        Code::WorkerLost => "Try again with -v, and report it if it happens again.",
        Code::ChildFailed => {
            "Run the command by itself. If memory ran out, `loadcheck fit --cmd` finds a limit."
        }
        Code::CannotWrite => "Make room, or choose another place.",
        Code::SourceChanged => "Try again when nothing writes to the files.",
        Code::Interrupted => "Run the command again; a conversion goes on where it stopped.",
        Code::BytesDiffer => "Check disk and memory of the machine; report it if it happens again.",
        Code::WriteFailed => "Make room or mend the disk, then run the same command: finished files stay.",
        Code::VerifyFailed => "Convert or download it again.",
        Code::PartsMissing => "Run the missing parts, then --finish.",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_explained_however_they_are_written() {
        for asked in ["LC0205", "lc0205", "0205", " LC0205 "] {
            let text = explain(Some(asked)).unwrap();
            assert!(text.starts_with("LC0205: The output file exists"), "{text}");
            assert!(text.contains("--force") && text.contains("Exit code 2"), "{text}");
        }
        assert!(explain(Some("LC9999")).is_err() && explain(Some("")).is_err());
        assert_eq!(explain(None).unwrap().lines().count(), Code::ALL.len());
    }

    /// Run with `UPDATE_CODES=1` after a code was added.
    #[test]
    fn the_page_has_every_code() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/codes.md");
        if std::env::var_os("UPDATE_CODES").is_some() {
            std::fs::write(path, page()).unwrap();
        }
        let published = std::fs::read_to_string(path).unwrap();
        assert_eq!(published, page(), "run the test with UPDATE_CODES=1 and commit {path}");
    }
}
