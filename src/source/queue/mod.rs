//! Queues of reads with the kernel (io_uring): one thread has many reads in flight. A queue owns
//! their buffers meanwhile.
//!
//! ```text
//! submit(tag, request, buffer) --> waiting --> in flight --answer--> more of the extent, or checked --> next()
//!                                    |  no descriptor is free             ^
//!                                    +--> until nothing is in flight -----+
//! ```
//!
//! The queue makes the system calls; the source ([`Queueable`]) does the rest: it opens files,
//! interprets short answers, verifies files afterwards, and makes the reads that go through no
//! queue. Each reader thread makes its own queue.

use std::collections::VecDeque;
use std::fmt;
use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use crate::units::to_usize;

use super::extent::{ExtentRead, Next, Outcome};
use super::files::OpenFile;
use super::{ReadRequest, Source, SourceError};

pub(crate) use self::buffer::ReadBuffer;
use self::ring::KernelRing;

mod buffer;
#[cfg(not(feature = "uring"))]
#[path = "absent.rs"]
mod ring;
#[cfg(feature = "uring")]
mod ring;

/// How reads are queued. Part of the report.
///
/// Bytes from the page cache, by decision or because direct I/O was refused, go through no queue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Queueing {
    /// No queue was requested.
    #[default]
    NotAsked,
    /// Queued, into buffers that the kernel looks up for each read. Locks no memory. Used by
    /// [`IoMode::Auto`](super::IoMode::Auto).
    Queued,
    /// Queued, into registered buffers.
    Registered,
    /// Queued, into buffers whose registration was refused.
    Unregistered {
        /// The reason, with the system's error.
        reason: String,
    },
    /// Not queued: each reader makes one read at a time.
    Refused {
        /// The reason, with the system's error.
        reason: String,
    },
}

impl Queueing {
    /// Its name in reports.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::NotAsked => "not_asked",
            Self::Queued => "queued",
            Self::Registered => "registered",
            Self::Unregistered { .. } => "unregistered",
            Self::Refused { .. } => "refused",
        }
    }

    /// Why it is not as requested.
    #[must_use]
    pub fn reason(&self) -> Option<&str> {
        match self {
            Self::NotAsked | Self::Queued | Self::Registered => None,
            Self::Unregistered { reason } | Self::Refused { reason } => Some(reason),
        }
    }
}

impl fmt::Display for Queueing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotAsked => f.write_str("without a queue"),
            Self::Queued => f.write_str("queued"),
            Self::Registered => f.write_str("queued, in registered buffers"),
            Self::Unregistered { reason } => write!(f, "queued, buffers not registered ({reason})"),
            Self::Refused { reason } => write!(f, "no queue ({reason})"),
        }
    }
}

/// How the reads of one load are queued, as known so far.
#[derive(Clone, Debug, Default)]
pub(crate) struct QueueingCell(Arc<Mutex<Queueing>>);

impl QueueingCell {
    pub(crate) fn get(&self) -> Queueing {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Notes the outcome of one queue. The worst outcome stays, with its first reason.
    fn note(&self, queueing: Queueing) {
        let rank = |queueing: &Queueing| match queueing {
            Queueing::NotAsked => 0,
            Queueing::Queued | Queueing::Registered => 1,
            Queueing::Unregistered { .. } => 2,
            Queueing::Refused { .. } => 3,
        };
        let mut noted = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if rank(&queueing) > rank(&noted) {
            *noted = queueing;
        }
    }
}

/// The start of a read.
pub(super) enum Begun {
    /// To be read from this file.
    Read(Arc<OpenFile>, ExtentRead),
    /// Done: the file is read buffered.
    Done { moved_bytes: u64 },
    /// Not started: it would have to wait for a descriptor, and must not.
    Busy,
}

/// A source whose reads may go through a queue: everything of a direct read but the system calls.
pub(super) trait Queueable: Send + Sync {
    /// Why no read would go through a queue, if that is so.
    fn refusal(&self) -> Option<String>;

    /// True if buffers should be registered. Registration saves the kernel a lookup per read, and
    /// locks the buffers in memory.
    fn registers(&self) -> bool;

    /// Checks the request and opens its file. Reads a file at once that is not read direct.
    fn begin(&self, request: &ReadRequest, buffer: &mut [u8], may_wait: bool) -> Result<Begun, SourceError>;

    /// One `pread`, for a read that the queue refused.
    fn read_at(&self, file: &File, buffer: &mut [u8], offset_bytes: u64) -> io::Result<usize>;

    /// See [`System::answered`](super::system::System::answered).
    fn answered(&self, buffer: &mut [u8], answer: io::Result<usize>) -> io::Result<usize>;

    /// Verifies the file, and falls back to a buffered read where direct I/O failed.
    fn finish(
        &self,
        outcome: Outcome,
        file: &OpenFile,
        request: &ReadRequest,
        buffer: &mut [u8],
    ) -> Result<u64, SourceError>;
}

/// A read that has not begun.
struct Waiting<B> {
    tag: usize,
    request: ReadRequest,
    buffer: B,
}

/// The state of a read in flight.
struct InFlight {
    tag: usize,
    request: ReadRequest,
    extent: ExtentRead,
}

/// A finished read.
pub(crate) struct Finished<B> {
    /// The tag that was given to [`ReadQueue::submit`].
    pub(crate) tag: usize,
    pub(crate) buffer: B,
    /// Bytes moved from the file, as [`Source::read`] returns them.
    pub(crate) outcome: Result<u64, SourceError>,
}

/// The kernel's answer to one read, with its buffer and file.
struct Completion<B, T> {
    buffer: B,
    file: Arc<OpenFile>,
    rest: T,
    answer: io::Result<usize>,
}

/// A queue of reads. Dropping it waits for reads in flight.
pub(crate) struct ReadQueue<B: ReadBuffer> {
    source: Arc<dyn Source>,
    ring: KernelRing<B, InFlight>,
    waiting: VecDeque<Waiting<B>>,
    finished: VecDeque<Finished<B>>,
    reads_most: usize,
    queueing: QueueingCell,
}

impl<B: ReadBuffer> ReadQueue<B> {
    /// A queue for `reads_most` reads in flight, into buffers numbered below `buffer_count`. `None`
    /// if the source wants no queue or the kernel refuses; `queueing` then says why.
    pub(crate) fn new(
        source: &Arc<dyn Source>,
        reads_most: u32,
        buffer_count: u32,
        queueing: &QueueingCell,
    ) -> Option<Self> {
        let queueable = source.queueable()?;
        let (refusal, registers) = (queueable.refusal(), queueable.registers());
        let buffer_count = registers.then_some(buffer_count);
        // If nothing can be queued, many threads read faster than the one thread of a queue.
        let ring = match refusal.map_or_else(|| KernelRing::new(reads_most, buffer_count), Err) {
            Ok(ring) => ring,
            Err(reason) => {
                queueing.note(Queueing::Refused { reason });
                return None;
            }
        };
        queueing.note(if registers { Queueing::Registered } else { Queueing::Queued });
        let reads_most = to_usize(u64::from(reads_most.max(1)));
        Some(Self {
            source: Arc::clone(source),
            ring,
            // Full capacity: nothing is allocated later.
            waiting: VecDeque::with_capacity(reads_most),
            finished: VecDeque::with_capacity(reads_most),
            reads_most,
            queueing: queueing.clone(),
        })
    }

    /// Reads that were submitted and not returned yet.
    pub(crate) fn len(&self) -> usize {
        self.waiting.len() + self.ring.len() + self.finished.len()
    }

    /// Limit of [`Self::len`].
    pub(crate) fn reads_most(&self) -> usize {
        self.reads_most
    }

    /// True if another read may be submitted.
    pub(crate) fn has_room(&self) -> bool {
        self.len() < self.reads_most
    }

    /// Reads one request into `buffer`, which the queue owns until [`Self::next`] returns it with
    /// this tag.
    ///
    /// # Panics
    /// As [`Source::read`], and if there is no [room](Self::has_room). The buffer is then dropped,
    /// and not in flight.
    pub(crate) fn submit(&mut self, tag: usize, request: ReadRequest, buffer: B) {
        self.waiting.push_back(Waiting { tag, request, buffer });
        self.begin_waiting();
    }

    /// Waits for the next finished read, in any order. `None` if none is left.
    ///
    /// # Errors
    /// The system's error if waiting itself fails. Reads in flight never come back then.
    pub(crate) fn next(&mut self) -> io::Result<Option<Finished<B>>> {
        loop {
            self.begin_waiting();
            if let Some(finished) = self.finished.pop_front() {
                return Ok(Some(finished));
            }
            let Some(completion) = self.ring.wait()? else { return Ok(None) };
            let (mut buffer, file, mut read) = (completion.buffer, completion.file, completion.rest);
            let source = queueable(&*self.source);
            let Next::Read(piece) = read.extent.next() else { unreachable!("something was asked for") };
            let part = part_of(&mut buffer, &read.request, piece.position_bytes);
            let answer = match source.answered(part, completion.answer) {
                // The kernel refused to do it in a queue; nothing is wrong with the read itself.
                Err(error) if is_about_queue(&error) => source.read_at(&file, part, piece.offset_bytes),
                answer => answer,
            };
            match read.extent.on_answer(answer) {
                Next::Read(_) => self.go_on(buffer, file, read),
                Next::Over(outcome) => self.finish(buffer, &file, read, outcome),
            }
        }
    }

    /// Begins waiting reads while there are descriptors. May wait for a descriptor only if none of
    /// its reads is in flight.
    fn begin_waiting(&mut self) {
        while let Some(Waiting { tag, request, mut buffer }) = self.waiting.pop_front() {
            let may_wait = self.ring.len() == 0;
            match queueable(&*self.source).begin(&request, buffer.bytes_mut(), may_wait) {
                Ok(Begun::Read(file, extent)) => self.go_on(buffer, file, InFlight { tag, request, extent }),
                Ok(Begun::Done { moved_bytes }) => {
                    self.finished.push_back(Finished { tag, buffer, outcome: Ok(moved_bytes) });
                }
                Ok(Begun::Busy) => {
                    self.waiting.push_front(Waiting { tag, request, buffer });
                    return;
                }
                Err(error) => self.finished.push_back(Finished { tag, buffer, outcome: Err(error) }),
            }
        }
    }

    /// Queues the next piece of a read, or finishes the read.
    fn go_on(&mut self, mut buffer: B, file: Arc<OpenFile>, read: InFlight) {
        match read.extent.next() {
            Next::Read(piece) => {
                if let Err(reason) = self.ring.register(&mut buffer) {
                    self.queueing.note(Queueing::Unregistered { reason });
                }
                self.ring.push(buffer, file, piece, read);
                // At once: the next read may be a buffered one on this thread.
                self.ring.submit();
            }
            Next::Over(outcome) => self.finish(buffer, &file, read, outcome),
        }
    }

    fn finish(&mut self, mut buffer: B, file: &OpenFile, read: InFlight, outcome: Outcome) {
        let InFlight { tag, request, .. } = read;
        let outcome = queueable(&*self.source).finish(outcome, file, &request, buffer.bytes_mut());
        self.finished.push_back(Finished { tag, buffer, outcome });
    }
}

fn queueable(source: &dyn Source) -> &dyn Queueable {
    source.queueable().expect("a queue is only made for a source that has this")
}

/// The part of a buffer that the answer filled.
fn part_of<'a>(buffer: &'a mut impl ReadBuffer, request: &ReadRequest, position_bytes: u64) -> &'a mut [u8] {
    &mut buffer.bytes_mut()[to_usize(position_bytes)..to_usize(request.extent.len_bytes())]
}

/// True for errors of the queue and not of the read: out of requests for now, or cancelled.
fn is_about_queue(error: &io::Error) -> bool {
    use rustix::io::Errno;
    matches!(Errno::from_io_error(error), Some(Errno::AGAIN | Errno::CANCELED))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_that_was_met_is_reported_with_its_first_reason() {
        let cell = QueueingCell::default();
        assert_eq!((cell.get().name(), cell.get().reason()), ("not_asked", None));
        cell.note(Queueing::Registered);
        cell.note(Queueing::Unregistered { reason: "one".to_owned() });
        cell.note(Queueing::Registered);
        cell.note(Queueing::Unregistered { reason: "two".to_owned() });
        assert_eq!(cell.get(), Queueing::Unregistered { reason: "one".to_owned() });
        cell.note(Queueing::Refused { reason: "three".to_owned() });
        assert_eq!((cell.get().name(), cell.get().reason()), ("refused", Some("three")));
    }
}
