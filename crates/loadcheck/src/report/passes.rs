//! A load that goes through its layers several times.

use onelayer::{Binding, PassReport, Waits};
use serde::{Deserialize, Serialize};

/// All passes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Passes {
    /// Requested passes.
    pub(crate) asked: u64,
    /// Device memory for layers that are loaded in every pass.
    pub(crate) window_bytes: u64,
    /// Device memory of layers that stay resident.
    pub(crate) kept_bytes: u64,
    /// Time for which each layer was held, to simulate an engine.
    pub(crate) engine_seconds: f64,
    /// The longest wait: `disk`, `fill`, `link` or `engine`; `null` if there was none.
    pub(crate) binds: Option<String>,
    /// Shares of the time that were spent waiting, 0 to 1.
    pub(crate) shares: Shares,
    /// Completed passes.
    pub(crate) each: Vec<Pass>,
}

/// One pass.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Pass {
    /// Time since the end of the previous pass.
    pub(crate) seconds: f64,
    /// Bytes that were read from files in this time.
    pub(crate) read_bytes: u64,
    /// Waits, as shares of `seconds`.
    pub(crate) shares: Shares,
}

/// Waits as shares of a time, 0 to 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(crate) struct Shares {
    /// The engine waited for the disk.
    pub(crate) disk: f64,
    /// The engine waited for casts and copies on the host.
    pub(crate) fill: f64,
    /// The engine waited for the link to the device.
    pub(crate) link: f64,
    /// The loader waited for the engine.
    pub(crate) engine: f64,
}

impl Shares {
    /// Waits divided by a time.
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

    /// With their names, in this order.
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
