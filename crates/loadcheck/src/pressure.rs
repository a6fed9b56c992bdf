//! What the whole machine suffered while something was measured: time lost to memory, pages read
//! again.
//!
//! Both counters are the machine's, not one process's: on a busy machine others are in them too.

use std::fs;

use crate::report::{Pressure, Report};

/// The counters at one moment.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counters {
    stalled_us: Option<u64>,
    refaults: Option<u64>,
}

impl Counters {
    /// Reads them.
    pub(crate) fn now() -> Self {
        Self {
            stalled_us: fs::read_to_string("/proc/pressure/memory").ok().and_then(|text| stalled_us(&text)),
            refaults: fs::read_to_string("/proc/vmstat").ok().and_then(|text| refaults(&text)),
        }
    }

    /// What has happened since.
    pub(crate) fn until_now(self) -> Pressure {
        let now = Self::now();
        let since = |now: Option<u64>, then: Option<u64>| Some(now?.saturating_sub(then?));
        Pressure {
            memory_some_us: since(now.stalled_us, self.stalled_us),
            refaults: since(now.refaults, self.refaults),
        }
    }
}

/// Puts reasons for what is missing into the report.
pub(crate) fn note_missing(pressure: &Pressure, report: &mut Report) {
    if pressure.memory_some_us.is_none() {
        report.missing(
            "pressure.memory_some_us",
            "/proc/pressure/memory cannot be read (kernel built without PSI?)",
        );
    }
    if pressure.refaults.is_none() {
        report.missing("pressure.refaults", "/proc/vmstat has no refault counters");
    }
}

/// `some avg10=0.00 avg60=0.00 avg300=0.00 total=1234`
fn stalled_us(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("some "))?;
    line.split(' ').find_map(|field| field.strip_prefix("total="))?.parse().ok()
}

/// Before kernel 5.9 there is one counter, since then one for file pages and one for anonymous
/// ones.
fn refaults(text: &str) -> Option<u64> {
    let values = text.lines().filter_map(|line| line.split_once(' ')).filter(|(name, _)| {
        matches!(*name, "workingset_refault" | "workingset_refault_anon" | "workingset_refault_file")
    });
    let values: Vec<u64> = values.filter_map(|(_, value)| value.parse().ok()).collect();
    (!values.is_empty()).then(|| values.iter().sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_found() {
        let text = "some avg10=0.00 avg60=0.00 avg300=0.00 total=42\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=7\n";
        assert_eq!(stalled_us(text), Some(42));
        assert_eq!(stalled_us(""), None);
        let text =
            "nr_free 1\nworkingset_refault_anon 2\nworkingset_refault_file 3\nworkingset_activate_file 4\n";
        assert_eq!(refaults(text), Some(5));
        assert_eq!(refaults("nr_free 1\n"), None);
    }
}
