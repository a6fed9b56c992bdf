//! Reads through a queue: the suite of all sources, and tests of queues alone.
#![allow(unsafe_code, reason = "a buffer that a queue may own")]

use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::source::{
    Fallback, IoWays, Queueable, Queueing, QueueingCell, ReadBuffer, ReadQueue, Sealed, SourceError,
};
use onelayer_testing::skipped;

/// A source whose reads each go through a queue, as a reader thread's do.
pub(super) struct Queued {
    inner: Arc<dyn Source>,
    /// True if buffers are registered.
    is_registered: bool,
}

impl Queued {
    pub(super) fn new(inner: Box<dyn Source>, is_registered: bool) -> Self {
        Self { inner: Arc::from(inner), is_registered }
    }
}

impl Sealed for Queued {}

impl Source for Queued {
    fn mode(&self) -> IoMode {
        self.inner.mode()
    }

    fn read(&self, request: &ReadRequest, buffer: &mut [u8]) -> Result<u64, SourceError> {
        /// Bytes behind the extent that are checked.
        const BEHIND: usize = 4096;
        let queueing = QueueingCell::default();
        let Some(mut queue) = ReadQueue::new(&self.inner, 1, 1, &queueing) else {
            assert!(!self.inner.fallbacks().is_empty(), "refused without need: {}", queueing.get());
            return self.inner.read(request, buffer);
        };
        let len = buffer.len().min(to_usize(request.extent.len_bytes()) + BEHIND);
        queue.submit(7, *request, Owned::new(to_u64(len), self.is_registered.then_some(0)));
        let mut finished = queue.next().unwrap().unwrap();
        assert_eq!((finished.tag, queue.len()), (7, 0));
        assert!(matches!(queueing.get(), Queueing::Queued | Queueing::Registered), "{}", queueing.get());
        let bytes = &finished.buffer.bytes_mut()[..len];
        let extent = to_usize(request.extent.len_bytes()).min(len);
        buffer[..extent].copy_from_slice(&bytes[..extent]);
        // Bytes written behind the extent must show in the caller's buffer.
        if bytes[extent..].iter().any(|byte| *byte != POISON) {
            buffer[extent..len].copy_from_slice(&bytes[extent..]);
        }
        finished.outcome
    }

    fn read_anywhere(
        &self,
        shard: ShardId,
        payload: ByteRange,
        target: &mut [u8],
    ) -> Result<Option<u64>, SourceError> {
        self.inner.read_anywhere(shard, payload, target)
    }

    fn fallbacks(&self) -> Vec<Fallback> {
        self.inner.fallbacks()
    }

    fn ways(&self) -> IoWays {
        self.inner.ways()
    }

    fn queueable(&self) -> Option<&dyn Queueable> {
        self.inner.queueable()
    }
}

/// A buffer that counts its drops.
struct Owned {
    buffer: Buffer,
    number: Option<u32>,
    gone: Arc<AtomicUsize>,
}

impl Owned {
    fn new(len_bytes: u64, number: Option<u32>) -> Self {
        Self { buffer: Buffer::new(len_bytes), number, gone: Arc::default() }
    }
}

// SAFETY: a separate mapping, whose address does not change when the value moves; each number is
// used by one buffer of a queue.
unsafe impl ReadBuffer for Owned {
    fn bytes_mut(&mut self) -> &mut [u8] {
        self.buffer.bytes()
    }

    fn number(&self) -> Option<u32> {
        self.number
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        self.gone.fetch_add(1, Ordering::SeqCst);
    }
}

/// Reports why this system has no queues.
pub(super) fn refusal() -> Option<String> {
    let folder = Folder::new();
    let source = Arc::from(open_with(Kernel, IoMode::Uring, &[folder.shard("a", 1)]).unwrap());
    let queueing = QueueingCell::default();
    let queue = ReadQueue::<Owned>::new(&source, 1, 1, &queueing);
    let reason = queue.is_none().then(|| queueing.get().to_string());
    reason.inspect(|reason| skipped(reason))
}

/// One thread would read them one after the other.
#[test]
fn there_is_no_queue_where_no_file_takes_direct_reads() {
    let folder = Folder::new();
    let shards = [folder.shard("a", 9000), folder.shard("b", 9000)];
    let system = Faulty { support: Some(DirectSupport::None), ..Faulty::default() };
    let source = Arc::from(open_with(system, IoMode::Uring, &shards).unwrap());
    let queueing = QueueingCell::default();
    assert!(ReadQueue::<Owned>::new(&source, 8, 8, &queueing).is_none());
    assert_eq!(queueing.get().reason(), Some("its file system has no direct i/o"));
}

#[test]
fn many_reads_in_flight_come_back_each_with_its_own_bytes() {
    if refusal().is_some() {
        return;
    }
    let folder = Folder::new();
    let shard = folder.shard("a.safetensors", 900_001);
    let source = Arc::from(open_with(Kernel, IoMode::Uring, &[shard]).unwrap());
    let queueing = QueueingCell::default();
    let mut queue = ReadQueue::new(&source, 8, 8, &queueing).unwrap();
    let places: Vec<ByteRange> = (0..80).map(|i| range(i * 11_000 + 1, i * 11_000 + 21_000)).collect();
    let mut idle: Vec<Owned> = (0..8).map(|number| Owned::new(256 << 10, Some(number))).collect();
    let (mut next, mut seen) = (0, [false; 80]);
    loop {
        while let Some(buffer) = idle.pop_if(|_| next < places.len()) {
            queue.submit(next, request(0, places[next]), buffer);
            next += 1;
        }
        let Some(mut finished) = queue.next().unwrap() else { break };
        let request = request(0, places[finished.tag]);
        assert!(finished.outcome.unwrap() >= request.payload.len_bytes());
        let start = to_usize(request.payload.start() - request.extent.start());
        let bytes = &finished.buffer.bytes_mut()[start..][..to_usize(request.payload.len_bytes())];
        assert!(bytes == expected_bytes(request.payload), "read {}", finished.tag);
        assert!(!std::mem::replace(&mut seen[finished.tag], true), "read {} came twice", finished.tag);
        finished.buffer.bytes_mut().fill(POISON);
        idle.push(finished.buffer);
    }
    assert_eq!((seen, idle.len()), ([true; 80], 8));
    assert_eq!(queueing.get(), Queueing::Registered);
}

/// Queues hold files while they have reads in flight, and together want more than there are
/// descriptors.
#[test]
fn queues_that_want_more_descriptors_than_there_are_come_through() {
    if refusal().is_some() {
        return;
    }
    let folder = Folder::new();
    let shards: Vec<Shard> = (0..40).map(|index| folder.shard(&format!("{index}"), 9000)).collect();
    come_through(Arc::from(open_with(Kernel, IoMode::Uring, &shards).unwrap()));
    // A source with two sets of descriptors that reads every other time at once, while it has reads
    // in flight.
    let odd_is_cold = |bytes: ByteRange| if bytes.end().is_multiple_of(2) { all_pages(bytes) } else { 0 };
    let auto = Variant {
        name: "auto, every other read direct".to_owned(),
        mode: IoMode::Auto,
        system: Faulty { resident: Some(odd_is_cold), ..on_disk() },
        falls_back_from_bytes: None,
        decided: Some((IoMode::Direct, IoReason::PartlyResident)),
    };
    let source: Arc<dyn Source> = Arc::from(auto.open(&shards));
    come_through(Arc::clone(&source));
    let ways = source.ways();
    assert!(ways.direct_bytes > 0 && ways.buffered_bytes > 0, "{ways:?}");
}

fn come_through(source: Arc<dyn Source>) {
    const QUEUES: u32 = 4;
    let (sender, receiver) = std::sync::mpsc::channel();
    for number in 0..QUEUES {
        let (source, sender) = (Arc::clone(&source), sender.clone());
        // A stuck queue must not keep the test from failing.
        std::thread::spawn(move || {
            let mut queue = ReadQueue::new(&source, 8, 8, &QueueingCell::default()).unwrap();
            for turn in 0..50_u32 {
                for tag in 0..8_u32 {
                    let shard = (number * 10 + turn * 7 + tag * 5) % 40;
                    let buffer = Owned::new(64 << 10, Some(tag));
                    let payload = range(3, 9000 - u64::from(tag % 2));
                    queue.submit(to_usize(u64::from(tag)), request(shard, payload), buffer);
                }
                // The numbers mean other memory in the next round, and nothing here reads it: other
                // tests compare bytes.
                while let Some(finished) = queue.next().unwrap() {
                    finished.outcome.unwrap();
                }
                queue = ReadQueue::new(&source, 8, 8, &QueueingCell::default()).unwrap();
            }
            sender.send(number).unwrap();
        });
    }
    for _ in 0..QUEUES {
        receiver.recv_timeout(std::time::Duration::from_secs(60)).expect("a queue is stuck");
    }
}

#[test]
fn dropping_a_queue_waits_for_its_reads_and_gives_the_buffers_up() {
    if refusal().is_some() {
        return;
    }
    let folder = Folder::new();
    let source = Arc::from(open_with(Kernel, IoMode::Uring, &[folder.shard("a", 4 << 20)]).unwrap());
    for finished in 0..3 {
        let gone = Arc::new(AtomicUsize::new(0));
        let mut queue = ReadQueue::new(&source, 4, 4, &QueueingCell::default()).unwrap();
        for number in 0..4_u32 {
            let mut buffer = Owned::new(2 << 20, Some(number));
            buffer.gone = Arc::clone(&gone);
            queue.submit(0, request(0, range(1, 1 << 20)), buffer);
        }
        for _ in 0..finished {
            queue.next().unwrap().unwrap();
        }
        assert_eq!(gone.load(Ordering::SeqCst), finished);
        drop(queue);
        assert_eq!(gone.load(Ordering::SeqCst), 4);
    }
}

/// A read that the kernel postpones or cancels is made without the queue.
#[test]
fn what_the_kernel_puts_off_is_read_without_the_queue() {
    if refusal().is_some() {
        return;
    }
    let folder = Folder::new();
    let shards = [folder.shard("a", 100_000)];
    for errno in [Errno::AGAIN, Errno::CANCELED] {
        let system = refusing(|call| call == Call::Answered, errno);
        let source = Queued::new(open_with(system, IoMode::Uring, &shards).unwrap(), true);
        let mut buffer = Buffer::new(256 << 10);
        read_and_compare(&source, &request(0, range(5, 99_999)), &mut buffer).unwrap();
        assert_eq!(source.fallbacks(), []);
    }
}

#[test]
fn an_error_names_file_and_offset() {
    if refusal().is_some() {
        return;
    }
    let folder = Folder::new();
    let shard = folder.shard("a", 100_000);
    let system = refusing(|call| call == Call::Answered, Errno::IO);
    let source = Queued::new(open_with(system, IoMode::Uring, std::slice::from_ref(&shard)).unwrap(), true);
    let payload = range(70_000, 80_000);
    match source.read(&request(0, payload), Buffer::new(256 << 10).bytes()) {
        Err(SourceError::Read { path, offset_bytes, source }) => {
            assert_eq!((path, offset_bytes), (shard.path, 65_536));
            assert_eq!(Errno::from_io_error(&source), Some(Errno::IO));
        }
        other => panic!("{other:?}"),
    }
}
