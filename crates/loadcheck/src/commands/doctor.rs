//! `loadcheck doctor`: what can be measured and used here, and how to enable the rest.

use std::path::Path;

use crate::args::DoctorArgs;
use crate::doctor::{ask_driver, examine, gpu_of};
use crate::machine;
use crate::output::Output;
use crate::report::{CommandName, Report};
use crate::signals::{Interrupts, exit_of, interrupted};

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
        Err(problem) => return Outcome::refused(report, vec![problem]),
    };
    let driver = match ask_driver(&interrupts) {
        Ok(driver) => driver,
        Err(signal) => {
            report.fail(vec![interrupted(signal)]);
            return Outcome { interrupted: Some(exit_of(signal)), ..Outcome::of(report) };
        }
    };
    report.host.get_or_insert_default().gpus = gpu_of(&driver).into_iter().collect();
    report.doctor = examine(args.path.as_deref().unwrap_or(Path::new(".")), &driver);
    Outcome::of(report)
}
