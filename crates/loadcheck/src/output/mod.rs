//! From a report to bytes on a stream or in a file.
//!
//! ```text
//! Report ──┬── document ── text | markdown | github      for people
//!          ├── json | csv                                for programs
//!          └── picture                                   memory over time
//! ```
//!
//! stdout carries data only; messages, hints and progress go to stderr. If a reader closes the
//! pipe, the output ends, and that is no error.

use std::io::{self, BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};

use onelayer_probe::INTERVAL_DEFAULT;

use self::document::{Document, View};
use self::files::{refusal, to_file, to_job_summary};
use self::terminal::{Paint, Role, Terminal};
use crate::args::{ExportArgs, FormatArg, OutputArgs, PictureArgs};
use crate::problem::{Code, Problem};
use crate::report::{CommandName, Report};

mod changed;
mod compared;
mod converted;
mod csv;
mod described;
mod document;
pub(crate) mod escape;
mod examined;
mod facts;
mod files;
pub(crate) mod fitted;
mod github;
mod json;
mod leaked;
mod markdown;
mod measured;
mod picture;
mod placed;
pub(crate) mod terminal;
mod text;

/// Columns below which a terminal gets shorter notes.
const NARROW_COLUMNS: u16 = 100;
/// Size of one write.
const BLOCK_BYTES: usize = 64 << 10;

/// A format; `auto` is already resolved.
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

    /// Writes the report. Formats for programs are streamed, since they may be long.
    fn write(self, report: &Report, look: &Look, to: &mut dyn Write) -> io::Result<()> {
        let is_narrow = look.width.is_some_and(|width| width < NARROW_COLUMNS);
        let view = View { verbose: look.verbose, ..View::default() };
        let text = match self {
            Self::Json => return json::write(report, to),
            Self::Jsonl => return json::write_lines(report, to),
            Self::Csv => return csv::write(report, to),
            Self::Table => {
                look.plain(text::draw(&document(report, View { is_narrow, ..view }), look.paint, look.width))
            }
            Self::Plain => look.plain(text::draw(&document(report, view), Paint::NONE, None)),
            Self::Markdown => markdown::draw(&document(report, View::PAGE)),
            Self::Github => github::draw(report, &document(report, View::default())),
            Self::Html => picture::html(report),
            Self::Svg => picture::svg(report),
        };
        to.write_all(text.as_bytes())
    }
}

/// How text for people looks.
#[derive(Clone, Copy, Debug)]
struct Look {
    /// Colours.
    paint: Paint,
    /// Columns of the terminal, if it is one.
    width: Option<u16>,
    /// More detail.
    verbose: bool,
    /// No other characters than those of ASCII, as far as they are ours.
    is_ascii: bool,
}

impl Look {
    fn plain(&self, text: String) -> String {
        if self.is_ascii { text.replace('·', "-").replace('±', "+-").replace('…', "...") } else { text }
    }
}

/// The document that a command makes of its report, with notes and, on a page, limits and errors.
fn document(report: &Report, view: View) -> Document {
    let mut document = match report.command {
        CommandName::Run | CommandName::Exec => measured::document(report, view),
        CommandName::Compare => compared::document(report, view),
        CommandName::Plan => described::plan(report, view),
        CommandName::Fits => described::fits(report, view),
        CommandName::Inspect => described::inspect(report, view),
        CommandName::Synth => described::synth(report),
        CommandName::Convert => converted::convert(report, view),
        CommandName::Verify => converted::verify(report, view),
        CommandName::Fit => fitted::document(report, view),
        CommandName::Leak => leaked::document(report, view),
        CommandName::Doctor => examined::document(report, view),
        CommandName::Report => changed::document(report, view),
        CommandName::Unknown => Document::default(),
    };
    if document.is_empty() && view.is_page {
        document.extend(report.source.as_ref().map(|source| facts::source(source, view)));
    }
    let is_emitted = report.fit.as_ref().is_some_and(|fit| fit.emit.is_some());
    let is_shown = view.is_page || (!document.is_empty() && !is_emitted);
    document.begin(facts::answer(report).filter(|_| is_shown && (!view.is_page || !is_emitted)));
    if view.is_page {
        facts::add_page_end(report, &mut document);
    } else if is_shown {
        document.extend(facts::notes(report));
    }
    document
}

/// Prints the log of `fit` to stderr, since stdout has the lines of `--emit`.
pub(crate) fn print_fit_log(report: &Report, terminal: &Terminal) {
    let view = View { verbose: terminal.verbose, ..View::default() };
    let mut log = report.fit.as_ref().map(|fit| fitted::log(report, fit, view)).unwrap_or_default();
    if !log.is_empty() {
        log.extend(facts::notes(report));
        to_stderr(text::draw(&log, terminal.stderr_paint, None).trim_end());
    }
}

/// The options of a command about its output, beside `-o`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Further<'a> {
    /// Copies of its report.
    pub(crate) export: Option<&'a ExportArgs>,
    /// Pictures of it.
    pub(crate) picture: Option<&'a PictureArgs>,
    /// The endings `.html` and `.svg` of `-o` stand for a picture.
    pub(crate) has_picture: bool,
}

/// Where a report goes, and in which formats.
#[derive(Debug)]
pub(crate) struct Output {
    /// The format on stdout or in `target`.
    pub(crate) format: Format,
    target: Option<PathBuf>,
    exports: Vec<(Format, PathBuf)>,
    force: bool,
    /// The ending of `target` is to pick the format, and does not.
    is_unknown: bool,
}

impl Output {
    /// Resolves the options. The endings `.html` and `.svg` mean a picture only where the command
    /// has one.
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
        let format = Format::resolve(asked, target.as_deref(), further.has_picture, terminal);
        let ending = target.as_deref().and_then(Path::extension).and_then(|ending| ending.to_str());
        let is_text = ending.is_none_or(|ending| matches!(ending, "txt" | "text" | "log" | "out"));
        Self {
            is_unknown: asked == FormatArg::Auto && format == Format::Plain && !is_text,
            format,
            target,
            exports,
            force: args.force,
        }
    }

    /// The interval of the samples to keep, in milliseconds: `asked` for by `--timeline`, or else
    /// the default if a picture needs samples.
    pub(crate) fn timeline_ms(&self, asked: Option<u64>) -> Option<u64> {
        let draws = self.format.is_picture() || self.exports.iter().any(|(format, _)| format.is_picture());
        asked.or_else(|| draws.then(|| u64::try_from(INTERVAL_DEFAULT.as_millis()).unwrap_or(u64::MAX)))
    }

    /// True if the report goes to a file.
    pub(crate) fn is_file(&self) -> bool {
        self.target.is_some()
    }

    /// True if stdout is for a program, so that nothing else may be written to it.
    pub(crate) fn owns_stdout(&self) -> bool {
        self.target.is_none() && self.format.is_machine()
    }

    /// Checks every output file. Called before anything is measured.
    pub(crate) fn check(&self) -> Vec<Problem> {
        let ending = self.target.as_ref().filter(|_| self.is_unknown).map(|target| {
            let message = "the ending of the output file picks no format";
            Problem::new(Code::Usage, message)
                .at(target.display().to_string())
                .help("end it with .json, .jsonl, .md, .csv or .txt (.html, .svg for run, compare and exec), or add --format")
        });
        let paths = self.target.iter().chain(self.exports.iter().map(|(_, path)| path));
        ending.into_iter().chain(paths.filter_map(|path| refusal(path, self.force))).collect()
    }

    /// Checks a file that is not a report.
    pub(crate) fn check_beside(&self, path: &Path) -> Option<Problem> {
        refusal(path, self.force)
    }

    /// Writes a file that is not a report, with the same guarantees.
    pub(crate) fn write_beside(&self, path: &Path, text: &str) -> Result<(), Problem> {
        to_file(path, |to| to.write_all(text.as_bytes()), self.force)
    }

    /// Writes the report everywhere it should go.
    ///
    /// # Errors
    /// One problem for each file that could not be written.
    pub(crate) fn write(&self, report: &Report, terminal: &Terminal) -> Vec<Problem> {
        let look = Look {
            paint: terminal.stdout_paint,
            width: terminal.width,
            verbose: terminal.verbose,
            is_ascii: terminal.is_ascii,
        };
        let in_file = Look { paint: Paint::NONE, width: None, ..look };
        let mut problems = Vec::new();
        match &self.target {
            None => problems.extend(print(|to| self.format.write(report, &look, to)).err()),
            // It was refused.
            Some(_) if self.is_unknown => {}
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
            problems.extend(to_job_summary(&markdown::draw(&document(report, View::PAGE))).err());
        }
        problems
    }
}

/// The report as one JSON object.
pub(crate) fn json(report: &Report) -> String {
    json::text(report)
}

/// Writes data to stdout. A closed pipe is no error.
pub(crate) fn to_stdout(text: &str) -> Result<(), Problem> {
    print(|to| to.write_all(text.as_bytes()))
}

fn print(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<(), Problem> {
    // Stdout by itself writes line by line.
    let mut stdout = BufWriter::with_capacity(BLOCK_BYTES, io::stdout().lock());
    match write(&mut stdout).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Problem::new(Code::CannotWrite, format!("cannot write to stdout: {error}")))
        }
        _ => Ok(()),
    }
}

/// Writes a line to stderr. Failures are ignored.
pub(crate) fn to_stderr(line: &str) {
    let _ = writeln!(io::stderr().lock(), "{line}");
}

/// Prints problems to stderr: message, place, help.
pub(crate) fn print_problems(problems: &[Problem], paint: Paint) {
    for problem in problems {
        to_stderr(&problem_text(problem, paint));
    }
}

/// Characters of each part of a problem on stderr, at most. Reports have the whole text.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{Fit, Fitted, Limit};

    #[test]
    fn a_problem_is_a_block() {
        let mut problem =
            Problem::new(Code::SourceInvalid, "bad \u{1b}[2J name").at("a/b.safetensors").help("do it");
        problem.detail = Some("8 bytes".to_owned());
        let expected =
            "error[LC0302]: bad \\u{1b}[2J name\n  --> a/b.safetensors\n      8 bytes\n  help: do it";
        assert_eq!(problem_text(&problem, Paint::NONE), expected);
    }

    #[test]
    fn failures_become_annotations() {
        let mut report = Report::new(CommandName::Run);
        let limit = |passed| Limit {
            metric: "rss".to_owned(),
            limit_bytes: Some(1),
            actual_bytes: Some(2),
            limit_seconds: None,
            actual_seconds: None,
            passed,
            inside_spread: false,
            first_exceeded_at: None,
        };
        report.limits = vec![limit(true), limit(false)];
        let text = drawn(Format::Github, &report);
        assert!(text.starts_with("PASS  rss"), "{text}");
        assert!(text.contains("\n::error title=loadcheck: rss over its limit::FAIL  rss"), "{text}");
        assert!(drawn(Format::Markdown, &report).contains("| **FAIL** | rss | 2 B | 1 B |"));
        report.errors = vec![Problem::new(Code::SourceInvalid, "50 %\n::set-output name=x::y").at("f\u{1b}")];
        let text = drawn(Format::Github, &report);
        let line = "::error title=loadcheck LC0302::50 %25 ::set-output name=x::y (f\\u{1b})\n";
        assert!(text.ends_with(line), "{text}");
    }

    #[test]
    fn limits_and_the_lines_that_were_asked_for_are_on_the_page() {
        let mut report = Report::new(CommandName::Fit);
        let fitted = Fitted {
            strategy: "stream".to_owned(),
            smallest_bytes: Some(1377 << 20),
            tries: vec![crate::report::Try::default()],
            ..Fitted::default()
        };
        report.fit = Some(Fit { loaders: vec![fitted], ..Fit::default() });
        let text = drawn(Format::Github, &report);
        assert!(text.contains("smallest that works   1 377 MiB"), "{text}");
        report.fit.as_mut().unwrap().emit = Some("docker".to_owned());
        report.fit.as_mut().unwrap().emitted = vec!["--memory=1722m".to_owned()];
        let page = drawn(Format::Markdown, &report);
        assert!(page.contains("| `stream` | 1 377 MiB | - |"), "{page}");
        assert!(page.contains("\n```\n--memory=1722m\n```\n"), "{page}");
        assert_eq!(drawn(Format::Github, &report), "--memory=1722m\n");
    }

    fn drawn(format: Format, report: &Report) -> String {
        let mut bytes = Vec::new();
        format
            .write(
                report,
                &Look { paint: Paint::NONE, width: None, is_ascii: false, verbose: false },
                &mut bytes,
            )
            .unwrap();
        String::from_utf8(bytes).unwrap()
    }
}
