//! Reads that are queued with the kernel (io_uring): one thread has many in flight. A queue owns
//! the buffers meanwhile.
//!
//! ```text
//! submit(tag, request, buffer) --> waiting --> in flight --answer--> more of the extent, or checked --> next()
//!                                    |  no descriptor is free             ^
//!                                    +--> until nothing is in flight -----+
//! ```
//!
//! Everything but the system calls is the source's ([`Queueable`]): what a read begins with, what a
//! short answer means, the comparison afterwards, and the reads that go through no queue. Reader
//! threads of the loader make a queue each.

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

/// How reads are queued. A named mode of the report.
///
/// What comes out of the page cache, by decision or because direct reads of its file were refused,
/// goes through no queue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Queueing {
    /// Nobody wanted queues.
    #[default]
    NotAsked,
    /// In queues, into buffers that the kernel looks up for each read, as
    /// [`IoMode::Auto`](super::IoMode::Auto) has it: it locks no memory.
    Queued,
    /// In queues, into buffers that the kernel knows.
    Registered,
    /// In queues, into buffers that the kernel was to know and does not.
    Unregistered {
        /// Why, with the system's error.
        reason: String,
    },
    /// Not in queues: one after the other by each reader.
    Refused {
        /// Why, with the system's error.
        reason: String,
    },
}

impl Queueing {
    /// A word for reports.
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

    /// Why it is not as it was wanted.
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

/// How the reads of one load are queued, as far as its queues know by now.
#[derive(Clone, Debug, Default)]
pub(crate) struct QueueingCell(Arc<Mutex<Queueing>>);

impl QueueingCell {
    pub(crate) fn get(&self) -> Queueing {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Takes note of it. The worst that was met stays, with its first reason.
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

/// How a read begins.
pub(super) enum Begun {
    /// To be read from this file.
    Read(Arc<OpenFile>, ExtentRead),
    /// The payload is there: its file is read buffered.
    Done { moved_bytes: u64 },
    /// It would have to wait for a descriptor and must not.
    Busy,
}

/// A source whose reads may go through a queue: all of a direct read but the system calls that move
/// bytes.
pub(super) trait Queueable: Send + Sync {
    /// Why no read would go through a queue, if none would.
    fn refusal(&self) -> Option<String>;

    /// True if the kernel is to know the buffers: that saves it a look at each read, and locks them
    /// in memory.
    fn registers(&self) -> bool;

    /// Checks the request and opens its file; or reads it here and now, where it is not to be read
    /// direct.
    fn begin(&self, request: &ReadRequest, buffer: &mut [u8], may_wait: bool) -> Result<Begun, SourceError>;

    /// One `pread`, for what the queue would not do.
    fn read_at(&self, file: &File, buffer: &mut [u8], offset_bytes: u64) -> io::Result<usize>;

    /// See [`System::answered`](super::system::System::answered).
    fn answered(&self, buffer: &mut [u8], answer: io::Result<usize>) -> io::Result<usize>;

    /// Compares the file with the one that was checked, and falls back where direct reading came to
    /// nothing.
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

/// A read in flight, beside its buffer and its file.
struct InFlight {
    tag: usize,
    request: ReadRequest,
    extent: ExtentRead,
}

/// A read that is over.
pub(crate) struct Finished<B> {
    /// What [`ReadQueue::submit`] was given.
    pub(crate) tag: usize,
    pub(crate) buffer: B,
    /// Bytes that were moved from the file, as [`Source::read`] returns them.
    pub(crate) outcome: Result<u64, SourceError>,
}

/// What the kernel has read, with what was given to it.
struct Completion<B, T> {
    buffer: B,
    file: Arc<OpenFile>,
    rest: T,
    answer: io::Result<usize>,
}

/// A queue of reads with the kernel. Dropping it waits for what is in flight.
pub(crate) struct ReadQueue<B: ReadBuffer> {
    source: Arc<dyn Source>,
    ring: KernelRing<B, InFlight>,
    waiting: VecDeque<Waiting<B>>,
    finished: VecDeque<Finished<B>>,
    reads_most: usize,
    queueing: QueueingCell,
}

impl<B: ReadBuffer> ReadQueue<B> {
    /// A queue for so many reads in flight, into buffers that are numbered below `buffer_count`.
    /// `None` if the source asks for none, or if there is none to be had: `queueing` then says
    /// why.
    pub(crate) fn new(
        source: &Arc<dyn Source>,
        reads_most: u32,
        buffer_count: u32,
        queueing: &QueueingCell,
    ) -> Option<Self> {
        let queueable = source.queueable()?;
        let (refusal, registers) = (queueable.refusal(), queueable.registers());
        let buffer_count = registers.then_some(buffer_count);
        // A queue reads on one thread what cannot be queued: many do that sooner.
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
            // Room for all that can be in them: nothing is allocated later.
            waiting: VecDeque::with_capacity(reads_most),
            finished: VecDeque::with_capacity(reads_most),
            reads_most,
            queueing: queueing.clone(),
        })
    }

    /// Reads that have been submitted and not been returned.
    pub(crate) fn len(&self) -> usize {
        self.waiting.len() + self.ring.len() + self.finished.len()
    }

    /// Most reads that may be submitted and not returned.
    pub(crate) fn reads_most(&self) -> usize {
        self.reads_most
    }

    /// True if another read may be submitted.
    pub(crate) fn has_room(&self) -> bool {
        self.len() < self.reads_most
    }

    /// Reads one request into the buffer, which is this queue's until [`Self::next`] returns it
    /// under this tag.
    ///
    /// # Panics
    /// As [`Source::read`], and if there is no [room](Self::has_room); the buffer is dropped then,
    /// and not in flight.
    pub(crate) fn submit(&mut self, tag: usize, request: ReadRequest, buffer: B) {
        self.waiting.push_back(Waiting { tag, request, buffer });
        self.begin_waiting();
    }

    /// Waits for the next read that is over, in any order. `None` if there is none to wait for.
    ///
    /// # Errors
    /// The system's, if it would not even wait. What is in flight then comes back never.
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
                // The kernel would not do it in a queue, or not now: nothing is wrong with the read itself.
                Err(error) if is_about_queue(&error) => source.read_at(&file, part, piece.offset_bytes),
                answer => answer,
            };
            match read.extent.on_answer(answer) {
                Next::Read(_) => self.go_on(buffer, file, read),
                Next::Over(outcome) => self.finish(buffer, &file, read, outcome),
            }
        }
    }

    /// Begins the reads that wait, as far as descriptors are to be had. Whoever has none in flight
    /// may wait for one.
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

    /// Queues the next piece of a read, or finishes it where there is none.
    fn go_on(&mut self, mut buffer: B, file: Arc<OpenFile>, read: InFlight) {
        match read.extent.next() {
            Next::Read(piece) => {
                if let Err(reason) = self.ring.register(&mut buffer) {
                    self.queueing.note(Queueing::Unregistered { reason });
                }
                self.ring.push(buffer, file, piece, read);
                // At once: the next one may be read here and now, while this one is in flight.
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

/// The part of a buffer that an answer was for.
fn part_of<'a>(buffer: &'a mut impl ReadBuffer, request: &ReadRequest, position_bytes: u64) -> &'a mut [u8] {
    &mut buffer.bytes_mut()[to_usize(position_bytes)..to_usize(request.extent.len_bytes())]
}

/// True for answers that are about the queue and not about the read: out of requests for now, or
/// cancelled.
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
