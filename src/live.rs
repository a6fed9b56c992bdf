//! The list of allocations: every mapping and every piece of device memory that this library has in
//! this process.
//!
//! An entry is made with its memory and dropped with it, so the list is complete. The use of the
//! memory is recorded as it changes:
//!
//! ```text
//! scratch --> ring
//!         --> filling --> layer --> (idle -->) gone
//!         --> parked --> gone
//!         --> window (layers come and go) --> gone
//! ```
//!
//! Each entry is for an allocation, not for a tensor. It takes a lock when it is made, changed and
//! dropped. The list has no memory of callers and no small heap blocks: names, plans, channels.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::checkpoint::DType;
use crate::layers::LayerId;

/// A kind of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum MemoryKind {
    /// Host memory.
    Host,
    /// Memory of the CUDA device of this number.
    Cuda(u32),
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.pad("host"),
            Self::Cuda(ordinal) => f.pad(&format!("cuda:{ordinal}")),
        }
    }
}

/// The use of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum MemoryUse {
    /// The ring of a running load.
    Ring,
    /// Bytes on their way, apart from the ring.
    Scratch,
    /// The arena of a layer that is being filled, or that was not handed out yet.
    Filling,
    /// The arena of a resident layer.
    Layer,
    /// The memory that layers of a stream of several passes share.
    Window,
    /// A layer that is parked in host memory.
    Parked,
    /// An arena that is free for the next layer of its stream.
    Idle,
}

impl fmt::Display for MemoryUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ring => "ring",
            Self::Scratch => "scratch",
            Self::Filling => "filling",
            Self::Layer => "layer",
            Self::Window => "window",
            Self::Parked => "parked",
            Self::Idle => "idle",
        })
    }
}

/// One allocation.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Allocation {
    /// A number that is unique in the process.
    pub number: u64,
    /// The kind of memory.
    pub memory: MemoryKind,
    /// Its use.
    pub used_for: MemoryUse,
    /// Its size. On the host, pages that were never touched take no memory yet.
    pub bytes: u64,
    /// Its age when the list was made.
    pub age: Duration,
    /// The layer in it, if there is one. In a window, the last layer that was placed.
    pub layer: Option<LayerId>,
    /// The tensors in it, in file order, if it is a resident layer. In a window, those of all
    /// layers in it.
    pub tensors: Vec<LiveTensor>,
}

/// A tensor of a resident layer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LiveTensor {
    /// Its full name.
    pub name: String,
    /// Type of its elements, as delivered.
    pub dtype: DType,
    /// Elements per dimension, outermost first.
    pub shape: Box<[u64]>,
    /// Bytes of its elements.
    pub bytes: u64,
    /// The number of [`LoadedTensor`](crate::LoadedTensor)s of it. Each keeps the layer.
    pub owners: usize,
}

/// The allocations at one moment.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    allocations: Vec<Allocation>,
}

/// Tensors of the same shape and type in the same kind of memory.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Group {
    /// The kind of memory.
    pub memory: MemoryKind,
    /// Type of their elements.
    pub dtype: DType,
    /// Elements per dimension.
    pub shape: Box<[u64]>,
    /// The number of tensors.
    pub count: usize,
    /// Bytes of all of them.
    pub bytes: u64,
}

/// The changes from one snapshot to another.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Difference {
    /// Allocations that are new.
    pub new: Vec<Allocation>,
    /// Allocations that are gone.
    pub gone: Vec<Allocation>,
}

/// All current allocations.
///
/// # Example
/// ```
/// use onelayer::{Checkpoint, Loader, Target, live};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/checkpoints/llama");
/// let mark = live::snapshot();
/// let model = Loader::builder(Target::Host).build()?.load(&Checkpoint::open(path)?)?;
/// for group in live::snapshot().groups() {
///     println!("{} x {} {:?} on {}: {} bytes", group.count, group.dtype, group.shape, group.memory, group.bytes);
/// }
/// drop(model);
/// assert!(live::snapshot().since(&mark).new.is_empty());
/// # Ok(())
/// # }
/// ```
#[must_use]
pub fn snapshot() -> Snapshot {
    snapshot_of(|_| true)
}

/// The allocations of these numbers.
pub(crate) fn snapshot_of(is_wanted: impl Fn(u64) -> bool) -> Snapshot {
    let now = Instant::now();
    // Not under the lock: listing the tensors of a layer may drop its last owner, which frees it.
    let records: Vec<(u64, Record)> = {
        let registry = registry();
        registry
            .records
            .iter()
            .filter(|(number, _)| is_wanted(**number))
            .map(|(&n, record)| (n, record.clone()))
            .collect()
    };
    let allocations = records.into_iter().map(|(number, record)| record.allocation(number, now)).collect();
    Snapshot { allocations }
}

impl Snapshot {
    /// The allocations, oldest first.
    #[must_use]
    pub fn allocations(&self) -> &[Allocation] {
        &self.allocations
    }

    /// Bytes in one kind of memory.
    #[must_use]
    pub fn bytes(&self, memory: MemoryKind) -> u64 {
        self.allocations.iter().filter(|one| one.memory == memory).map(|one| one.bytes).sum()
    }

    /// The tensors of resident layers in groups, largest first.
    #[must_use]
    pub fn groups(&self) -> Vec<Group> {
        let mut groups = BTreeMap::<(MemoryKind, DType, &[u64]), (usize, u64)>::new();
        for allocation in &self.allocations {
            for tensor in &allocation.tensors {
                let group = groups.entry((allocation.memory, tensor.dtype, &tensor.shape)).or_default();
                *group = (group.0 + 1, group.1 + tensor.bytes);
            }
        }
        let group = |((memory, dtype, shape), (count, bytes)): ((_, _, &[u64]), _)| Group {
            memory,
            dtype,
            shape: shape.into(),
            count,
            bytes,
        };
        let mut groups: Vec<Group> = groups.into_iter().map(group).collect();
        groups.sort_by_key(|group| std::cmp::Reverse(group.bytes));
        groups
    }

    /// The changes since an earlier snapshot.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Difference {
        let not_in = |other: &Self| {
            let known: HashSet<u64> = other.allocations.iter().map(|one| one.number).collect();
            move |one: &&Allocation| !known.contains(&one.number)
        };
        Difference {
            new: self.allocations.iter().filter(not_in(earlier)).cloned().collect(),
            gone: earlier.allocations.iter().filter(not_in(self)).cloned().collect(),
        }
    }
}

/// Lists the tensors in the arena of a layer.
pub(crate) trait Describe: Send + Sync {
    /// Its tensors, in file order.
    fn tensors(&self) -> Vec<LiveTensor>;
}

/// The entry of one allocation. Dropping it removes it from the list. The memory owns it.
#[derive(Debug)]
pub(crate) struct Entry {
    number: u64,
}

#[derive(Clone)]
struct Record {
    memory: MemoryKind,
    used_for: MemoryUse,
    bytes: u64,
    since: Instant,
    layer: Option<LayerId>,
    /// The layer in the allocation, or all layers in a window.
    contents: Vec<Weak<dyn Describe>>,
}

impl Entry {
    /// The entry of a new allocation.
    pub(crate) fn new(memory: MemoryKind, used_for: MemoryUse, bytes: u64) -> Self {
        let record =
            Record { memory, used_for, bytes, since: Instant::now(), layer: None, contents: Vec::new() };
        let mut registry = registry();
        let number = registry.last_number + 1;
        registry.last_number = number;
        registry.records.insert(number, record);
        Self { number }
    }

    /// Its number.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Records a new use, and forgets the layers.
    pub(crate) fn note(&self, used_for: MemoryUse, layer: Option<&LayerId>) {
        self.change(|record| {
            (record.used_for, record.layer) = (used_for, layer.cloned());
            record.contents.clear();
        });
    }

    /// Records a resident layer in an arena, or one more in a window.
    pub(crate) fn note_layer(&self, layer: &LayerId, contents: Weak<dyn Describe>) {
        self.change(|record| {
            match record.used_for {
                MemoryUse::Window => record.contents.retain(|one| one.strong_count() > 0),
                _ => {
                    record.used_for = MemoryUse::Layer;
                    record.contents.clear();
                }
            }
            record.layer = Some(layer.clone());
            record.contents.push(contents);
        });
    }

    /// Forgets a layer, so that it is not asked for its tensors any more.
    pub(crate) fn forget_layer<D: Describe>(&self, contents: &Arc<D>) {
        let is_it = |one: &Weak<dyn Describe>| std::ptr::addr_eq(one.as_ptr(), Arc::as_ptr(contents));
        self.change(|record| record.contents.retain(|one| !is_it(one)));
    }

    fn change(&self, change: impl FnOnce(&mut Record)) {
        registry().records.get_mut(&self.number).map(change);
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        registry().records.remove(&self.number);
    }
}

impl Record {
    fn allocation(self, number: u64, now: Instant) -> Allocation {
        let contents = self.contents.iter().filter_map(Weak::upgrade);
        Allocation {
            number,
            memory: self.memory,
            used_for: self.used_for,
            bytes: self.bytes,
            age: now.saturating_duration_since(self.since),
            layer: self.layer,
            tensors: contents.flat_map(|contents| contents.tensors()).collect(),
        }
    }
}

#[derive(Default)]
struct Registry {
    last_number: u64,
    records: BTreeMap<u64, Record>,
}

static REGISTRY: Mutex<Registry> = Mutex::new(Registry { last_number: 0, records: BTreeMap::new() });

fn registry() -> MutexGuard<'static, Registry> {
    // Every change is complete or not made at all, so poisoning is ignored.
    REGISTRY.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct One;

    impl Describe for One {
        fn tensors(&self) -> Vec<LiveTensor> {
            let tensor = |name: &str, shape: &[u64]| LiveTensor {
                name: name.to_owned(),
                dtype: DType::Bf16,
                shape: shape.into(),
                bytes: 2 * shape.iter().product::<u64>(),
                owners: 0,
            };
            vec![tensor("a", &[2, 3]), tensor("b", &[4]), tensor("c", &[2, 3])]
        }
    }

    /// Other tests of this process allocate too: only entries of this one are looked at.
    fn snapshot_here(entries: &[&Entry]) -> Snapshot {
        snapshot_of(|number| entries.iter().any(|entry| entry.number() == number))
    }

    #[test]
    fn an_entry_is_listed_as_what_it_is_for_until_it_is_dropped() {
        let entry = Entry::new(MemoryKind::Cuda(1), MemoryUse::Filling, 100);
        let contents: Arc<dyn Describe> = Arc::new(One);
        let id = LayerId::new("model.layers.0");
        entry.note_layer(&id, Arc::downgrade(&contents));
        let before = snapshot_here(&[&entry]);
        let [one] = before.allocations() else { panic!("one entry") };
        assert_eq!((one.memory, one.used_for, one.bytes), (MemoryKind::Cuda(1), MemoryUse::Layer, 100));
        assert_eq!((one.layer.as_ref(), one.tensors.len()), (Some(&id), 3));
        assert_eq!((before.bytes(MemoryKind::Cuda(1)), before.bytes(MemoryKind::Host)), (100, 0));
        let groups: Vec<_> = before.groups().into_iter().map(|group| (group.count, group.bytes)).collect();
        assert_eq!(groups, [(2, 24), (1, 8)]);

        drop(contents);
        assert!(snapshot_here(&[&entry]).allocations()[0].tensors.is_empty(), "nobody is there to ask");
        entry.note(MemoryUse::Idle, None);
        assert!(snapshot_here(&[&entry]).allocations()[0].layer.is_none());
        let other = Entry::new(MemoryKind::Host, MemoryUse::Ring, 7);
        let number = entry.number();
        drop(entry);
        let difference = snapshot_here(&[&other]).since(&before);
        let numbers = |list: &[Allocation]| list.iter().map(|one| one.number).collect::<Vec<_>>();
        assert_eq!(
            (numbers(&difference.new), numbers(&difference.gone)),
            (vec![other.number()], vec![number])
        );
        assert!(!snapshot().allocations().iter().any(|one| one.number == number));
    }
}
