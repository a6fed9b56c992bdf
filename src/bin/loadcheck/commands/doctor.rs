//! `loadcheck doctor`: what can be measured and used here, and how to enable the rest.

use std::path::Path;

use crate::args::DoctorArgs;
use crate::doctor::{ask_driver, examine, gpu_of};
use crate::machine;
use crate::output::Output;
use crate::problem::{Code, Problem};
use crate::report::{CommandName, Report};
use crate::signals::{Interrupts, exit_of, name_of};

use super::Outcome;

/// Looks at everything. What is missing is what was asked for: no failure.
pub(crate) fn run(args: &DoctorArgs, output: &Output) -> Outcome {
    let mut report = Report::new(CommandName::Doctor);
    report.host = Some(machine::host());
    let problems = output.check();
    if !problems.is_empty() {
        return Outcome::refused(report, problems);
    }
    let interrupts = match Interrupts::listen() {
        Ok(interrupts) => interrupts,
        Err(error) => {
            let problem = Problem::new(Code::LoadFailed, format!("cannot handle signals: {error}"));
            return Outcome::refused(report, vec![problem]);
        }
    };
    let driver = match ask_driver(&interrupts) {
        Ok(driver) => driver,
        Err(signal) => {
            let message = format!("interrupted by {}", name_of(signal));
            report.fail(vec![Problem::new(Code::Interrupted, message)]);
            return Outcome { interrupted: Some(exit_of(signal)), ..Outcome::of(report) };
        }
    };
    report.host.get_or_insert_default().gpus = gpu_of(&driver).into_iter().collect();
    report.doctor = examine(args.path.as_deref().unwrap_or(Path::new(".")), &driver);
    Outcome::of(report)
}
