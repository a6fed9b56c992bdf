//! What is reported of a load that went through its layers more than once.

use onelayer::{Binding, PassReport, Waits};
use serde::{Deserialize, Serialize};

/// Pass after pass.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Passes {
    /// Passes that were asked for.
    pub(crate) asked: u64,
    /// Device memory that the layers share which come and go.
    pub(crate) window_bytes: u64,
    /// Device memory of layers that stay.
    pub(crate) kept_bytes: u64,
    /// Time that each layer was held for in place of an engine.
    pub(crate) engine_seconds: f64,
    /// What was waited for longest: `disk`, `fill`, `link` or `engine`; `null` if nobody waited.
    pub(crate) binds: Option<String>,
    /// Share of the time in which the load waited for each of them, 0 to 1; in the rest nobody
    /// waited.
    pub(crate) shares: Shares,
    /// Those that came to their end.
    pub(crate) each: Vec<Pass>,
}

/// One pass.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Pass {
    /// From the end of the pass before it.
    pub(crate) seconds: f64,
    /// Bytes that were read from files meanwhile.
    pub(crate) read_bytes: u64,
    /// What was waited for, as shares of `seconds`.
    pub(crate) shares: Shares,
}

/// Shares of a time, 0 to 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Shares {
    /// The engine waited for the disk.
    pub(crate) disk: f64,
    /// The engine waited for casts and copies of the host.
    pub(crate) fill: f64,
    /// The engine waited for the link to the device.
    pub(crate) link: f64,
    /// The loader waited for the engine.
    pub(crate) engine: f64,
}

impl Shares {
    /// The shares that waits have of a time.
    pub(crate) fn of(waits: &Waits, seconds: f64) -> Self {
        let share = |binding| match waits.of(binding).as_secs_f64() {
            waited if seconds > 0.0 => (waited / seconds).min(1.0),
            _ => 0.0,
        };
        Self {
            disk: share(Binding::Disk),
            fill: share(Binding::Fill),
            link: share(Binding::Link),
            engine: share(Binding::Engine),
        }
    }

    /// With their names, in that order.
    pub(crate) fn named(&self) -> [(&'static str, f64); 4] {
        [("disk", self.disk), ("fill", self.fill), ("link", self.link), ("engine", self.engine)]
    }
}

impl From<&PassReport> for Pass {
    fn from(pass: &PassReport) -> Self {
        let seconds = pass.elapsed.as_secs_f64();
        Self { seconds, read_bytes: pass.read_bytes, shares: Shares::of(&pass.waits, seconds) }
    }
}
