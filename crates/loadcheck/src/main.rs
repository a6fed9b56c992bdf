//! `loadcheck`: measures what loading a model checkpoint costs.
//!
//! ```text
//! words -> args -> config -> library call (in a worker process) -> report -> output
//! ```
//!
//! A file imports only files of its own folder and of what stands before it in this order:
//!
//! ```text
//! exit, problem, numbers, sizes                       values
//! args, words                                         the command line
//! listing, report, explain                            what is told, as JSON has it
//! config, limits, kinds, library_errors, machine, inputs,    from the command line to the library's calls
//!   planned, source
//! descendants, signals, exec, attached, heap, measuring, room        processes, and the memory of this one
//! strategies, leak, worker                            loads, measured in a process of their own
//! output, progress, shell, entries                    from a report to people and programs
//! compare, doctor, convert, fit                       the parts of single commands
//! commands                                            one file a command
//! ```
//!
//! Only `args` and `words` know clap, only `output` and `progress` the terminal. Reports, problems
//! and exit codes are values.

mod answers;
mod args;
mod attached;
mod commands;
mod compare;
mod config;
mod convert;
mod descendants;
mod doctor;
mod entries;
mod exec;
mod exit;
mod explain;
mod fit;
mod heap;
mod inputs;
mod kinds;
mod leak;
mod library_errors;
mod limits;
mod listing;
mod machine;
#[cfg(test)]
mod manual;
mod measuring;
mod numbers;
mod output;
mod planned;
mod problem;
mod progress;
mod report;
mod room;
mod shell;
mod signals;
mod sizes;
mod source;
mod strategies;
mod words;
mod worker;

use std::ffi::OsString;
use std::io::ErrorKind;
use std::process::ExitCode;

use clap::{CommandFactory as _, FromArgMatches as _};

use args::{Cli, Command, Given, OutputArgs};
use commands::Outcome;
use exit::Exit;
use output::terminal::{Paint, Terminal};
use output::{Further, Output};
use problem::{Code, Problem};
use report::{CommandName, Report};

fn main() -> ExitCode {
    signals::outlive_file_size_limit();
    let given: Vec<OsString> = std::env::args_os().collect();
    if given.get(1).is_some_and(|word| word == worker::ARGUMENT) {
        return match worker::main() {
            Ok(exit) => exit.into(),
            Err(message) => {
                output::to_stderr(message);
                Exit::Usage.into()
            }
        };
    }
    let words = words::with_command(given.clone());
    let matches = Cli::command().color(words::help_colour(&words)).try_get_matches_from(&words);
    let parsed = matches.and_then(|mut matches| {
        let given = Given::of(&matches);
        Ok((Cli::from_arg_matches_mut(&mut matches)?, given))
    });
    match parsed {
        Ok((cli, given)) => carry_out(&cli, &given).into(),
        Err(error) => {
            let ran_by_default = words.len() > given.len();
            answer(&words::advise(error, &words, ran_by_default), &words).into()
        }
    }
}

/// Does what was asked for.
fn carry_out(cli: &Cli, given: &Given) -> Exit {
    let terminal = &Terminal::detect(&cli.terminal);
    let conclude = |args: &OutputArgs, further, command: &dyn Fn(&Output) -> Outcome| {
        let output = Output::new(args, further, terminal);
        commands::conclude(command(&output), &output, terminal, given)
    };
    let plain = Further::default();
    let copied = |export| Further { export: Some(export), ..plain };
    let drawn = |export, picture| Further { picture: Some(picture), has_picture: true, ..copied(export) };
    match &cli.command {
        Command::Run(args) => conclude(&args.output, drawn(&args.export, &args.picture), &|to| {
            commands::run::run(args, to, terminal)
        }),
        Command::Compare(args) => conclude(&args.output, drawn(&args.export, &args.picture), &|to| {
            commands::compare::run(args, to, terminal)
        }),
        Command::Exec(args) => {
            conclude(&args.output, drawn(&args.export, &args.picture), &|to| commands::exec::run(args, to))
        }
        Command::Fit(args) => {
            conclude(&args.output, copied(&args.export), &|to| commands::fit::run(args, to, terminal))
        }
        Command::Leak(args) => {
            conclude(&args.output, copied(&args.export), &|to| commands::leak::run(args, to, terminal))
        }
        Command::Plan(args) => conclude(&args.output, plain, &|to| commands::describe::plan(args, to)),
        Command::Fits(args) => conclude(&args.output, plain, &|to| commands::describe::fits(args, to)),
        Command::Inspect(args) => conclude(&args.output, plain, &|to| commands::describe::inspect(args, to)),
        Command::Doctor(args) => conclude(&args.output, plain, &|to| commands::doctor::run(args, to)),
        Command::Synth(args) => conclude(&args.output, plain, &|to| commands::synth::run(args, to, terminal)),
        Command::Convert(args) => {
            conclude(&args.output, plain, &|to| commands::convert::run(args, to, terminal))
        }
        Command::Verify(args) => {
            conclude(&args.output, plain, &|to| commands::verify::run(args, to, terminal))
        }
        Command::Report(args) => {
            let output = Output::new(&args.output, Further { has_picture: true, ..plain }, terminal);
            commands::report::run(args, &output, terminal)
        }
        Command::Explain(args) => print(explain::explain(args.code.as_deref()), terminal.stderr_paint),
        Command::Completions(args) => print(commands::shell::completions(args), terminal.stderr_paint),
        Command::Man(args) => print(commands::shell::man(args), terminal.stderr_paint),
    }
}

/// Prints text that is no report.
fn print(text: Result<String, Problem>, paint: Paint) -> Exit {
    match text.and_then(|text| output::to_stdout(&text)) {
        Ok(()) => Exit::Ok,
        Err(problem) => {
            output::print_problems(std::slice::from_ref(&problem), paint);
            problem.code.exit()
        }
    }
}

/// Help, version, or a command line that is not understood.
fn answer(error: &clap::Error, words: &[OsString]) -> Exit {
    if !error.use_stderr() {
        return match error.print() {
            // A closed pipe is the reader's choice.
            Err(fault) if fault.kind() != ErrorKind::BrokenPipe => {
                let text = format!("error[{}]: cannot write to stdout: {fault}", Code::CannotWrite.as_str());
                output::to_stderr(&text);
                Code::CannotWrite.exit()
            }
            _ => Exit::Ok,
        };
    }
    // clap's message begins with `error: `; ours carry their code.
    let plain = error.render().to_string();
    let text = plain.strip_prefix("error: ").unwrap_or(&plain).trim_end();
    if words::wants_json(words) {
        let (message, help) = text.split_once("\n\n").unwrap_or((text, ""));
        let in_a_line = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        let mut problem = Problem::new(Code::Usage, in_a_line(message));
        let tip = help.split("\n\n").find_map(|part| part.trim_start().strip_prefix("tip:"));
        problem.help = tip.map(in_a_line);
        let mut report = Report::new(CommandName::Unknown);
        report.fail(vec![problem]);
        let _ = output::to_stdout(&output::json(&report));
    }
    if plain.starts_with("error: ") {
        output::to_stderr(&format!("error[{}]: {text}", Code::Usage.as_str()));
    } else {
        output::to_stderr(text);
    }
    Exit::Usage
}
