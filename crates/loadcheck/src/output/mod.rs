//! From a report to bytes on a stream or in a file.
//!
//! stdout carries data and nothing else; messages, hints and progress go to stderr. A reader that
//! closes the pipe ends the output, not the program's success. Files are written beside their
//! target and renamed, so a report is never half there, and nothing is overwritten without
//! `--force`.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};

use onelayer_probe::INTERVAL_DEFAULT;
use rustix::fs::{Access, CWD, RenameFlags, access};

use crate::args::{ExportArgs, FormatArg, OutputArgs, PictureArgs};
use crate::problem::{Code, Problem};
use crate::report::Report;
use onelayer_synth::belongs_to_checkpoint;

use self::terminal::{Paint, Role, Terminal};
use self::text::Look;

mod compared;
mod converted;
mod data;
mod described;
pub(crate) mod escape;
mod examined;
pub(crate) mod fitted;
mod grid;
mod leaked;
mod markup;
mod passes;
mod picture;
mod placed;
mod places;
mod quantised;
mod reading;
pub(crate) mod terminal;
mod text;

/// Bytes that are written at once.
const BLOCK_BYTES: usize = 64 << 10;

/// A format, after `auto` was decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// For people, coloured where allowed.
    Table,
    /// For people, never coloured, never wrapped.
    Plain,
    /// One JSON object.
    Json,
    /// One JSON object a row.
    Jsonl,
    /// Markdown.
    Markdown,
    /// Comma-separated values.
    Csv,
    /// Workflow commands.
    Github,
    /// Memory over time on a page.
    Html,
    /// The picture of that page alone.
    Svg,
}

impl Format {
    fn resolve(asked: FormatArg, target: Option<&Path>, has_picture: bool, terminal: &Terminal) -> Self {
        match asked {
            FormatArg::Table => Self::Table,
            FormatArg::Plain => Self::Plain,
            FormatArg::Json => Self::Json,
            FormatArg::Jsonl => Self::Jsonl,
            FormatArg::Md => Self::Markdown,
            FormatArg::Csv => Self::Csv,
            FormatArg::Github => Self::Github,
            FormatArg::Auto => match target.and_then(Path::extension).and_then(|ending| ending.to_str()) {
                Some("json") => Self::Json,
                Some("jsonl") => Self::Jsonl,
                Some("md") => Self::Markdown,
                Some("csv") => Self::Csv,
                Some("html") if has_picture => Self::Html,
                Some("svg") if has_picture => Self::Svg,
                _ if target.is_none() && terminal.stdout_is_terminal => Self::Table,
                _ => Self::Plain,
            },
        }
    }

    /// True if the format is for programs: then errors are reported in it too, and hints are off.
    pub(crate) fn is_machine(self) -> bool {
        matches!(self, Self::Json | Self::Jsonl | Self::Csv | Self::Markdown | Self::Html | Self::Svg)
    }

    /// True if it shows memory over time.
    pub(crate) fn is_picture(self) -> bool {
        matches!(self, Self::Html | Self::Svg)
    }

    /// Writes the report. What programs read may be long, and is never held as a whole.
    fn write(self, report: &Report, look: &Look, to: &mut dyn Write) -> io::Result<()> {
        let text = match self {
            Self::Json => return data::write_json(report, to),
            Self::Jsonl => return data::write_json_lines(report, to),
            Self::Csv => return data::write_csv(report, to),
            Self::Table => text::render(report, look),
            Self::Plain => text::render(report, &Look { paint: Paint::NONE, width: None, ..*look }),
            Self::Markdown => markup::markdown(report),
            Self::Github => markup::github(report),
            Self::Html => picture::html(report),
            Self::Svg => picture::svg(report),
        };
        to.write_all(text.as_bytes())
    }
}

/// What a command offers beside `-o`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Further<'a> {
    /// Copies of its report.
    pub(crate) export: Option<&'a ExportArgs>,
    /// Pictures of it.
    pub(crate) picture: Option<&'a PictureArgs>,
    /// The endings `.html` and `.svg` of `-o` stand for a picture.
    pub(crate) has_picture: bool,
}

/// Where a report goes, and in which form.
#[derive(Debug)]
pub(crate) struct Output {
    /// The form on stdout or in `target`.
    pub(crate) format: Format,
    target: Option<PathBuf>,
    exports: Vec<(Format, PathBuf)>,
    force: bool,
}

impl Output {
    /// Resolves the flags. Only a command with `pictures` has endings that stand for one.
    pub(crate) fn new(args: &OutputArgs, further: Further<'_>, terminal: &Terminal) -> Self {
        let target = args.output.clone().filter(|target| target.as_os_str() != "-");
        let asked = if args.json { FormatArg::Json } else { args.format };
        let reports = further
            .export
            .map(|export| [(Format::Json, &export.export_json), (Format::Markdown, &export.export_markdown)]);
        let pictures = further
            .picture
            .map(|picture| [(Format::Html, &picture.export_html), (Format::Svg, &picture.export_svg)]);
        let exports = reports.into_iter().chain(pictures).flatten();
        let exports = exports.filter_map(|(format, path)| Some((format, path.clone()?))).collect();
        Self {
            format: Format::resolve(asked, target.as_deref(), further.has_picture, terminal),
            target,
            exports,
            force: args.force,
        }
    }

    /// The distance of samples to keep, in milliseconds, where `asked` is what `--timeline` says: a
    /// picture needs some.
    pub(crate) fn timeline_ms(&self, asked: Option<u64>) -> Option<u64> {
        let draws = self.format.is_picture() || self.exports.iter().any(|(format, _)| format.is_picture());
        asked.or_else(|| draws.then(|| u64::try_from(INTERVAL_DEFAULT.as_millis()).unwrap_or(u64::MAX)))
    }

    /// True if stdout belongs to data for a program, so that nothing else may be written to it.
    pub(crate) fn owns_stdout(&self) -> bool {
        self.target.is_none() && self.format.is_machine()
    }

    /// Finds out before anything is measured whether a file would be refused afterwards.
    pub(crate) fn check(&self) -> Vec<Problem> {
        let paths = self.target.iter().chain(self.exports.iter().map(|(_, path)| path));
        paths.filter_map(|path| refusal(path, self.force)).collect()
    }

    /// The same for a file of another kind.
    pub(crate) fn check_beside(&self, path: &Path) -> Option<Problem> {
        refusal(path, self.force)
    }

    /// Writes a file that is no report, as reports are written: whole, and over none without
    /// `--force`.
    pub(crate) fn write_beside(&self, path: &Path, text: &str) -> Result<(), Problem> {
        to_file(path, |to| to.write_all(text.as_bytes()), self.force)
    }

    /// Writes the report everywhere it should go.
    ///
    /// # Errors
    /// One problem for each file that could not be written.
    pub(crate) fn write(&self, report: &Report, terminal: &Terminal) -> Vec<Problem> {
        let look = Look { paint: terminal.stdout_paint, width: terminal.width, verbose: terminal.verbose };
        let in_file = Look { paint: Paint::NONE, width: None, ..look };
        let mut problems = Vec::new();
        match &self.target {
            None => problems.extend(print(|to| self.format.write(report, &look, to)).err()),
            Some(path) => {
                let write = |to: &mut dyn Write| self.format.write(report, &in_file, to);
                problems.extend(to_file(path, write, self.force).err());
            }
        }
        for (format, path) in &self.exports {
            let write = |to: &mut dyn Write| format.write(report, &in_file, to);
            problems.extend(to_file(path, write, self.force).err());
        }
        if self.format == Format::Github {
            problems.extend(to_job_summary(&markup::markdown(report)).err());
        }
        problems
    }
}

/// The report as one JSON object.
pub(crate) fn json(report: &Report) -> String {
    data::json(report)
}

/// Writes data to stdout. A closed pipe is the reader's choice and no problem.
pub(crate) fn to_stdout(text: &str) -> Result<(), Problem> {
    print(|to| to.write_all(text.as_bytes()))
}

fn print(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<(), Problem> {
    // Stdout itself would be written to line by line.
    let mut stdout = BufWriter::with_capacity(BLOCK_BYTES, io::stdout().lock());
    match write(&mut stdout).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Problem::new(Code::CannotWrite, format!("cannot write to stdout: {error}")))
        }
        _ => Ok(()),
    }
}

/// Writes a line for people to stderr. Nothing can be done if that fails.
pub(crate) fn to_stderr(line: &str) {
    let _ = writeln!(io::stderr().lock(), "{line}");
}

/// Prints problems as blocks: what, where, what to do.
pub(crate) fn print_problems(problems: &[Problem], paint: Paint) {
    for problem in problems {
        to_stderr(&problem_text(problem, paint));
    }
}

/// Characters of one part of a problem on stderr, at most; a report has all of them.
const PART_CHARACTERS_MAX: usize = 1000;

fn problem_text(problem: &Problem, paint: Paint) -> String {
    let shown = |text| escape::escape_and_cut(text, PART_CHARACTERS_MAX);
    let title = paint.paint(Role::Bad, &format!("error[{}]", problem.code.as_str()));
    let mut text = format!("{title}: {}", shown(&problem.message));
    if let Some(place) = &problem.place {
        text.push_str(&format!("\n  {} {}", paint.paint(Role::Dim, "-->"), shown(place)));
    }
    if let Some(detail) = &problem.detail {
        text.push_str(&format!("\n      {}", shown(detail)));
    }
    if let Some(help) = &problem.help {
        text.push_str(&format!("\n  {} {}", paint.paint(Role::Strong, "help:"), shown(help)));
    }
    text
}

/// Why `path` may not be written, if so.
fn refusal(path: &Path, force: bool) -> Option<Problem> {
    let refused = |message: &str| Problem::new(Code::OutputRefused, message).at(path.display().to_string());
    let exists = || refused("the output file exists").help("--force overwrites it");
    if let Some(problem) = weights_refusal(path) {
        return Some(problem);
    }
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let checked = match fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => return Some(refused("the output is a directory")),
        Ok(metadata) if metadata.is_file() && !force => return Some(exists()),
        Ok(metadata) if metadata.is_file() => access(parent, Access::WRITE_OK | Access::EXEC_OK),
        // A pipe or a device.
        Ok(_) => access(path, Access::WRITE_OK),
        Err(_) if !parent.is_dir() => {
            return Some(refused("the directory of the output file does not exist"));
        }
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Some(refused(&format!("the output cannot be looked up: {error}")));
        }
        // A link that leads nowhere.
        Err(_) if path.is_symlink() && !force => return Some(exists()),
        Err(_) => access(parent, Access::WRITE_OK | Access::EXEC_OK),
    };
    let errno = checked.err()?;
    Some(refused(&format!("the output cannot be written: {}", io::Error::from(errno))))
}

/// No report goes over weights, not even by force.
fn weights_refusal(path: &Path) -> Option<Problem> {
    let name = path.file_name()?.to_string_lossy();
    let message = "files of weights have such names, and no output replaces one";
    belongs_to_checkpoint(&name)
        .then(|| Problem::new(Code::OutputRefused, message).at(path.display().to_string()))
        .map(|problem| problem.help("choose another name"))
}

/// Writes a file as a whole: beside its target first, then renamed. Pipes and devices are written
/// to directly.
fn to_file(
    path: &Path,
    write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    force: bool,
) -> Result<(), Problem> {
    let failed = |error: io::Error| {
        Problem::new(Code::CannotWrite, format!("cannot write the file: {error}"))
            .at(path.display().to_string())
    };
    if let Some(problem) = weights_refusal(path) {
        return Err(problem);
    }
    if fs::metadata(path).is_ok_and(|metadata| !metadata.is_file()) {
        let opened = OpenOptions::new().write(true).open(path);
        return opened.and_then(|file| fill(file, write)).map_err(failed);
    }
    // Not made from the target's name, which may be as long as names can be.
    let part = path.with_file_name(format!(".loadcheck-{}.part", std::process::id()));
    let written = File::create_new(&part)
        .and_then(|file| fill(file, write))
        .and_then(|()| move_over(&part, path, force));
    if written.is_err() {
        let _ = fs::remove_file(&part);
    }
    written.map_err(failed)
}

fn fill(file: File, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let mut file = BufWriter::with_capacity(BLOCK_BYTES, file);
    write(&mut file)?;
    file.flush()
}

fn move_over(part: &Path, path: &Path, force: bool) -> io::Result<()> {
    if force {
        return fs::rename(part, path);
    }
    match rustix::fs::renameat_with(CWD, part, CWD, path, RenameFlags::NOREPLACE) {
        // A file system that cannot refuse to replace can still refuse to link.
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => {
            fs::hard_link(part, path).and_then(|()| fs::remove_file(part))
        }
        other => other.map_err(io::Error::from),
    }
}

/// Adds to the job summary of GitHub Actions, where there is one.
fn to_job_summary(markdown: &str) -> Result<(), Problem> {
    let Some(path) = std::env::var_os("GITHUB_STEP_SUMMARY").filter(|path| !path.is_empty()) else {
        return Ok(());
    };
    let written = OpenOptions::new()
        .append(true)
        .create(true)
        .open(&path)
        .and_then(|mut file| file.write_all(markdown.as_bytes()));
    written.map_err(|error| {
        Problem::new(Code::CannotWrite, format!("cannot write the job summary: {error}"))
            .at(path.to_string_lossy().into_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_never_overwritten_by_accident() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("report.json");
        assert!(refusal(&path, false).is_none());
        to_file(&path, |to| to.write_all(b"one"), false).unwrap();
        assert!(refusal(&path, false).is_some() && refusal(&path, true).is_none());
        assert_eq!(to_file(&path, |to| to.write_all(b"two"), false).unwrap_err().code, Code::CannotWrite);
        assert_eq!(fs::read_to_string(&path).unwrap(), "one");
        to_file(&path, |to| to.write_all(b"three"), true).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "three");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1, "no partial file stays");
        assert!(refusal(directory.path(), true).is_some());
        assert!(refusal(&directory.path().join("no/such"), true).is_some());
        assert!(refusal(&directory.path().join("x".repeat(256)), true).is_some(), "no file system takes it");
        let longest = directory.path().join("x".repeat(255));
        assert!(refusal(&longest, false).is_none());
        to_file(&longest, |to| to.write_all(b"long"), false).unwrap();
        let link = directory.path().join("link");
        std::os::unix::fs::symlink("nowhere", &link).unwrap();
        assert!(refusal(&link, false).is_some() && refusal(&link, true).is_none());
        assert!(to_file(Path::new("/dev/null"), |to| to.write_all(b"text"), false).is_ok());
    }

    #[test]
    fn a_problem_is_a_block() {
        let mut problem =
            Problem::new(Code::SourceInvalid, "bad \u{1b}[2J name").at("a/b.safetensors").help("do it");
        problem.detail = Some("8 bytes".to_owned());
        let expected =
            "error[LC0302]: bad \\u{1b}[2J name\n  --> a/b.safetensors\n      8 bytes\n  help: do it";
        assert_eq!(problem_text(&problem, Paint::NONE), expected);
    }
}
