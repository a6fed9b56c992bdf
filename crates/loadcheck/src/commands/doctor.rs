//! `loadcheck doctor`: what can be measured and used here, and how to enable the rest.

use std::path::Path;

use crate::args::DoctorArgs;
use crate::doctor::{ask_driver, examine, gpu_of};
use crate::output::Output;
use crate::report::CommandName;
use crate::signals::Interrupts;

use super::{Outcome, new_report};

/// Looks at everything. What is missing is what was asked for: no failure.
pub(crate) fn run(args: &DoctorArgs, output: &Output) -> Outcome {
    let mut report = new_report(CommandName::Doctor);
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
        Err(signal) => return Outcome::interrupted(report, Vec::new(), signal),
    };
    report.host.get_or_insert_default().gpus = gpu_of(&driver).into_iter().collect();
    report.doctor = examine(args.path.as_deref().unwrap_or(Path::new(".")), &driver);
    Outcome::of(report)
}
