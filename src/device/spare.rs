//! Host memory of dropped layers that is kept for the next load.
//!
//! ```text
//! load A --> layers --dropped--> idle memory --> layers of load B     no page is touched for the first time
//! ```

use std::sync::Arc;

use super::idle::IdleArenas;
use crate::staging::memory::AnonymousMemory;

/// Host memory of dropped layers, kept for the next load. Cheap to clone; clones are the same
/// memory, and the last one frees it.
///
/// The first touch of fresh memory takes seconds for each GiB where the host of a virtual machine
/// has taken it back. A program that loads one model after another can keep the memory instead.
/// Receipts count it as [reused](crate::Receipt::recycled_bytes).
///
/// # Example
/// ```
/// use onelayer::{Checkpoint, Loader, Part, SpareMemory, Target};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/checkpoints/llama");
/// let (spare, checkpoint) = (SpareMemory::new(1 << 30), Checkpoint::open(path)?);
/// let loader = Loader::builder(Target::Host).spare_memory(&spare).build()?;
/// loader.load(&checkpoint)?.unload(Part::All)?;
/// assert!(spare.idle_bytes() > 0);
/// let model = loader.load(&checkpoint)?; // in the same memory
/// assert_eq!(spare.idle_bytes(), 0);
/// # drop(model);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct SpareMemory {
    pool: Arc<IdleArenas<AnonymousMemory>>,
}

impl SpareMemory {
    /// Keeps memory as long as it and the layers in use are no more than `bytes_max` together.
    #[must_use]
    pub fn new(bytes_max: u64) -> Self {
        Self { pool: Arc::new(IdleArenas::shared(bytes_max)) }
    }

    /// Bytes that no layer uses.
    #[must_use]
    pub fn idle_bytes(&self) -> u64 {
        self.pool.idle_bytes()
    }

    /// Returns the idle memory to the system. What is dropped later is kept again.
    pub fn free(&self) {
        self.pool.free();
    }

    pub(super) fn pool(&self) -> Arc<IdleArenas<AnonymousMemory>> {
        Arc::clone(&self.pool)
    }
}
