//! Control groups of one's own.

use onelayer_probe::{ChildGroup, ProbeError};

use onelayer_testing::skipped;

/// A group, or `None` where this user may not make one, said aloud. Any other refusal fails the
/// test.
pub(crate) fn group_or_skip(limit_bytes: Option<u64>) -> Option<ChildGroup> {
    match ChildGroup::create(limit_bytes) {
        Ok(group) => Some(group),
        Err(
            refusal @ (ProbeError::GroupNotHere { .. }
            | ProbeError::GroupNotPermitted { .. }
            | ProbeError::GroupNotDelegated { .. }
            | ProbeError::GroupHoldsProcesses { .. }),
        ) => {
            skipped(refusal);
            None
        }
        Err(error) => panic!("{error}"),
    }
}
