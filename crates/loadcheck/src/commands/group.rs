//! The control group that a run gets for itself.

use onelayer_probe::ChildGroup;

use crate::report::Report;
use crate::signals::Interrupts;

/// A control group for one run, where there can be one: its peak is the run's alone. Where there
/// can be none, `report` says why.
pub(super) fn own_group(interrupts: &Interrupts, report: &mut Report) -> Option<ChildGroup> {
    match ChildGroup::create(None) {
        Ok(group) => {
            interrupts.remember_leftover(group.directory());
            Some(group)
        }
        Err(error) => {
            report.missing("peak.cgroup_bytes", &error.to_string());
            None
        }
    }
}
