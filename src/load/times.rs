//! What a stream waits for, and what each layer took: told to hooks of the caller's and summed for
//! the report.
//!
//! ```text
//! opened --(reading, filling)--> all bytes on their way --(link)--> ready --> handed out --(the engine)--> released
//! ```
//!
//! While the engine waits for its next layer, that waits for the disk, for filling (casts, and
//! copies of the host) or for the link; while it does not, it may be the loader that has nothing to
//! do until the engine asks or drops something. Where neither is so, nobody waits for anybody, and
//! nothing binds.

use std::fmt;
use std::ops::AddAssign;
use std::sync::Arc;
use std::time::Duration;

use crate::layers::LayerId;

/// What binds a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Binding {
    /// The engine waited while files were read.
    Disk,
    /// The engine waited while bytes were cast, gathered, or copied by the host.
    Fill,
    /// The engine waited while bytes were on their way to the device.
    Link,
    /// The loader waited: the engine held the window, or had not asked for more.
    Engine,
}

impl Binding {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Disk, Self::Fill, Self::Link, Self::Engine];
}

impl fmt::Display for Binding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Disk => "disk",
            Self::Fill => "fill",
            Self::Link => "link",
            Self::Engine => "engine",
        })
    }
}

/// How long somebody waited, by what for. Of the time that the engine waits while its layer is read
/// and filled, filling has the part that it has of the readers' work on that layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Waits {
    /// The engine, for the disk.
    pub disk: Duration,
    /// The engine, for casts and copies.
    pub fill: Duration,
    /// The engine, for the link to the device.
    pub link: Duration,
    /// The loader, for the engine.
    pub engine: Duration,
}

impl Waits {
    /// How long for one of them.
    #[must_use]
    pub fn of(&self, binding: Binding) -> Duration {
        match binding {
            Binding::Disk => self.disk,
            Binding::Fill => self.fill,
            Binding::Link => self.link,
            Binding::Engine => self.engine,
        }
    }

    /// What was waited for longest, if anybody waited at all.
    #[must_use]
    pub fn longest(&self) -> Option<Binding> {
        let longest = Binding::ALL.into_iter().max_by_key(|&binding| self.of(binding))?;
        (self.of(longest) > Duration::ZERO).then_some(longest)
    }

    /// How long the engine waited.
    #[must_use]
    pub fn of_engine(&self) -> Duration {
        self.disk.saturating_add(self.fill).saturating_add(self.link)
    }
}

impl AddAssign for Waits {
    fn add_assign(&mut self, other: Self) {
        self.disk = self.disk.saturating_add(other.disk);
        self.fill = self.fill.saturating_add(other.fill);
        self.link = self.link.saturating_add(other.link);
        self.engine = self.engine.saturating_add(other.engine);
    }
}

/// What one layer took in one pass. Moments are counted from the start of the load.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct LayerTimes<'a> {
    /// The layer.
    pub id: &'a LayerId,
    /// Its place in the order of the stream.
    pub index: usize,
    /// The pass, from 0.
    pub pass: u64,
    /// True if it stays from the first pass to the last. From the second on nothing of it is read.
    pub is_kept: bool,
    /// Time that readers spent reading it, all together.
    pub reading: Duration,
    /// Time that it was cast, gathered, or copied by the host, by all threads together.
    pub filling: Duration,
    /// From when all its bytes were on their way to the device until they were known to be there.
    /// Next to nothing on the host.
    pub linking: Duration,
    /// What was waited for from when the layer before it was handed out.
    pub waits: Waits,
    /// When it could be read.
    pub opened: Duration,
    /// When the engine could take it.
    pub handed_out: Duration,
    /// When its memory was free again: whoever had it or tensors of it has dropped them. `None` for
    /// a layer that is kept, and if the stream ended before.
    pub released: Option<Duration>,
}

/// What one pass took: from when the last layer of the pass before it was handed out, or from the
/// start, until its own was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PassReport {
    /// The pass, from 0.
    pub pass: u64,
    /// How long it took.
    pub elapsed: Duration,
    /// What was waited for.
    pub waits: Waits,
    /// Bytes that were read from files meanwhile: for layers of the next pass too, if they were
    /// read ahead.
    pub read_bytes: u64,
}

/// Is told what a layer took, once it was released.
type OnLayer = dyn Fn(&LayerTimes<'_>) + Send + Sync;
/// Is told what a pass took, once its last layer was handed out.
type OnPass = dyn Fn(&PassReport) + Send + Sync;

/// Whom the caller wants told.
#[derive(Clone, Default)]
pub(crate) struct Hooks {
    pub(super) on_layer: Option<Arc<OnLayer>>,
    pub(super) on_pass: Option<Arc<OnPass>>,
}

impl fmt::Debug for Hooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hooks")
            .field("on_layer", &self.on_layer.is_some())
            .field("on_pass", &self.on_pass.is_some())
            .finish()
    }
}
