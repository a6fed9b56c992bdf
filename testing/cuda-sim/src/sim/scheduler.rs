//! Streams and events: queued work, and when it runs.
//!
//! A stream runs its work in order. A wait blocks it until a point in another stream. Work runs
//!
//! - `lazy`: when something waits for it; the needed streams run in random order, others do not
//!   run;
//! - `thread`: at random moments on a thread, or when something waits for it;
//! - `eager`: at once, unless blocked by a wait.

use std::collections::{BTreeMap, VecDeque};

use super::copy::Copy;
use super::{Sim, to_u64};
use crate::clock::{Clock, Point};
use crate::code::{Answer, Code};
use crate::config::Mode;

/// How often `cuEventQuery` and `cuStreamQuery` return "not ready" in lazy mode before the work
/// runs.
const QUERIES_MAX: u32 = 8;

/// A piece of work.
#[derive(Debug)]
pub(crate) enum Kind {
    /// No work: a point to wait for.
    Mark,
    /// Blocks the stream until that point is done.
    Wait(Point),
    /// Frees a pool allocation.
    Free { address: u64 },
    /// Copies or fills bytes.
    Copy(Box<Copy>),
}

#[derive(Debug)]
struct Work {
    sequence: u64,
    kind: Kind,
}

#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) context: usize,
    /// Synchronises with the legacy default stream.
    pub(crate) is_blocking: bool,
    /// A default stream of the context, which is never destroyed.
    pub(crate) is_default: bool,
    /// Destroyed by the program; its work still runs.
    pub(crate) is_destroyed: bool,
    pub(crate) priority: i32,
    queue: VecDeque<Work>,
    queued: u64,
    done: u64,
    clock: Clock,
    queries: u32,
}

#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) context: usize,
    pub(crate) has_timing: bool,
    /// The point of its last record, with the clock there.
    last: Option<(Point, Clock)>,
    queries: u32,
}

impl Sim {
    pub(crate) fn new_stream(&mut self, context: usize, is_blocking: bool, is_default: bool) -> usize {
        let handle = self.new_handle("stream");
        let stream = Stream {
            context,
            is_blocking,
            is_default,
            is_destroyed: false,
            priority: 0,
            queue: VecDeque::new(),
            queued: 0,
            done: 0,
            clock: Clock::default(),
            queries: 0,
        };
        self.streams.insert(handle, stream);
        handle
    }

    /// The stream of a handle: 0 and 1 are the legacy default stream, 2 is the per-thread one.
    pub(crate) fn stream(&mut self, handle: usize) -> Answer<usize> {
        if handle <= 2 {
            let context = self.current()?;
            let thread = if handle == 2 { self.thread() } else { 0 };
            if let Some(&stream) = self.default_streams.get(&(context, thread)) {
                return Ok(stream);
            }
            let stream = self.new_stream(context, true, true);
            self.default_streams.insert((context, thread), stream);
            return Ok(stream);
        }
        match self.streams.get(&handle) {
            Some(stream) if !stream.is_destroyed && !stream.is_default => Ok(handle),
            _ => {
                self.unknown_handle("stream", handle);
                Err(Code::INVALID_HANDLE)
            }
        }
    }

    /// The stream for new work, which must belong to the current context.
    pub(crate) fn usable_stream(&mut self, handle: usize) -> Answer<usize> {
        let stream = self.stream(handle)?;
        let context = self.streams[&stream].context;
        if self.lost_of_context(context).is_none() && self.current()? != context {
            self.violation("wrong_context", format!("stream {handle:#x} is of another context"));
            return Err(Code::INVALID_HANDLE);
        }
        self.order_with_legacy(stream)?;
        let host = self.host.clone();
        if let Some(stream) = self.streams.get_mut(&stream) {
            stream.clock.merge(&host);
        }
        Ok(stream)
    }

    /// The legacy default stream and all blocking streams of its context wait for each other.
    fn order_with_legacy(&mut self, stream: usize) -> Answer {
        let Stream { context, is_blocking, .. } = self.streams[&stream];
        let legacy = self.default_streams.get(&(context, 0)).copied();
        if !is_blocking || legacy.is_none() {
            return Ok(());
        }
        let is_legacy = legacy == Some(stream);
        let others: Vec<(Point, Clock)> = self
            .streams
            .iter()
            .filter(|&(&other, state)| {
                other != stream
                    && state.context == context
                    && state.is_blocking
                    && (is_legacy || legacy == Some(other))
                    && state.done < state.queued
            })
            .map(|(&other, state)| (Point { stream: other, sequence: state.queued }, state.clock.clone()))
            .collect();
        for (point, clock) in others {
            self.wait_in_stream(stream, point, &clock)?;
        }
        Ok(())
    }

    /// The clock before the next work in a stream.
    pub(crate) fn clock_of(&self, stream: usize) -> Clock {
        let mut clock = self.host.clone();
        if let Some(stream) = self.streams.get(&stream) {
            clock.merge(&stream.clock);
        }
        clock
    }

    /// The point of the next work in a stream.
    pub(crate) fn next_point(&self, stream: usize) -> Point {
        Point { stream, sequence: self.streams.get(&stream).map_or(0, |stream| stream.queued) + 1 }
    }

    pub(crate) fn enqueue(&mut self, handle: usize, kind: Kind) -> Answer<Point> {
        let point = self.next_point(handle);
        let host = self.host.clone();
        let stream = self.streams.get_mut(&handle).ok_or(Code::INVALID_HANDLE)?;
        stream.queued = point.sequence;
        stream.clock.merge(&host);
        stream.clock.raise(point);
        stream.queue.push_back(Work { sequence: point.sequence, kind });
        if self.config.mode == Mode::Eager {
            // The next waiting call returns an error of the work, as on a device.
            let _ = self.run_to(vec![point]);
        }
        Ok(point)
    }

    fn wait_in_stream(&mut self, stream: usize, point: Point, clock: &Clock) -> Answer {
        if let Some(state) = self.streams.get_mut(&stream) {
            state.clock.merge(clock);
        }
        self.enqueue(stream, Kind::Wait(point)).map(drop)
    }

    pub(crate) fn is_over(&self, point: Point) -> bool {
        self.streams.get(&point.stream).is_none_or(|stream| stream.done >= point.sequence)
    }

    /// A point as text.
    pub(crate) fn place(&self, point: Point) -> String {
        format!("work {} of stream {:#x}", point.sequence, point.stream)
    }

    /// Runs only the work needed to complete all these points.
    pub(crate) fn run_to(&mut self, mut targets: Vec<Point>) -> Answer {
        loop {
            targets.retain(|&target| !self.is_over(target));
            if targets.is_empty() {
                return Ok(());
            }
            let start = self.random.below(targets.len());
            // One of them can always continue: waits refer to earlier calls, so they form no cycle.
            let mut has_run = false;
            for turn in 0..targets.len() {
                let target = targets[(start + turn) % targets.len()];
                match self.step(target.stream) {
                    Step::Ran => {
                        has_run = true;
                        break;
                    }
                    Step::Needs(point) if targets.iter().any(|other| other.stream == point.stream) => {
                        let known = targets.iter_mut().find(|other| other.stream == point.stream);
                        if let Some(known) = known {
                            known.sequence = known.sequence.max(point.sequence);
                        }
                    }
                    Step::Needs(point) => {
                        targets.push(point);
                        has_run = true;
                        break;
                    }
                    Step::Failed(code) => return Err(code),
                    Step::Idle => return Err(Code::ILLEGAL_ADDRESS),
                }
            }
            assert!(has_run, "streams wait for each other in a circle");
        }
    }

    /// Runs the next work of a stream, if possible.
    fn step(&mut self, handle: usize) -> Step {
        let Some(stream) = self.streams.get_mut(&handle) else { return Step::Idle };
        match stream.queue.front() {
            None => return Step::Idle,
            Some(Work { kind: Kind::Wait(point), .. }) => {
                let point = *point;
                if !self.is_over(point) {
                    return Step::Needs(point);
                }
            }
            Some(_) => {}
        }
        let Some(stream) = self.streams.get_mut(&handle) else { return Step::Idle };
        let context = stream.context;
        let Some(work) = stream.queue.pop_front() else { return Step::Idle };
        let answer = match work.kind {
            Kind::Mark | Kind::Wait(_) => Ok(()),
            Kind::Free { address } => {
                self.end_allocation(address);
                Ok(())
            }
            Kind::Copy(copy) => self.execute(*copy),
        };
        if let Some(stream) = self.streams.get_mut(&handle) {
            stream.done = work.sequence;
            if stream.is_destroyed && stream.queue.is_empty() {
                self.streams.remove(&handle);
            }
        }
        match answer {
            Ok(()) => Step::Ran,
            Err(code) => {
                self.lose_context(context, code);
                Step::Failed(code)
            }
        }
    }

    /// Runs one work item of a random stream; false if there is none.
    pub(crate) fn run_some(&mut self) -> bool {
        let busy: Vec<usize> = self
            .streams
            .iter()
            .filter(|(_, stream)| match stream.queue.front() {
                None => false,
                Some(Work { kind: Kind::Wait(point), .. }) => self.is_over(*point),
                Some(_) => true,
            })
            .map(|(&handle, _)| handle)
            .collect();
        if busy.is_empty() {
            return false;
        }
        let chosen = busy[self.random.below(busy.len())];
        self.step(chosen);
        true
    }

    /// Drops all work of a lost context. Frees are still done, since nothing uses the memory.
    pub(crate) fn drop_work(&mut self, context: usize) {
        let handles: Vec<usize> = self
            .streams
            .iter()
            .filter(|(_, stream)| stream.context == context)
            .map(|(&handle, _)| handle)
            .collect();
        for handle in handles {
            let Some(stream) = self.streams.get_mut(&handle) else { continue };
            let queue = std::mem::take(&mut stream.queue);
            stream.done = stream.queued;
            if stream.is_destroyed {
                self.streams.remove(&handle);
            }
            for work in queue {
                match work.kind {
                    Kind::Free { address } => self.end_allocation(address),
                    Kind::Copy(copy) => {
                        self.ledger.work_dropped += 1;
                        self.ledger.copy_over(copy.direction(), copy.len_bytes(), false);
                    }
                    Kind::Mark | Kind::Wait(_) => {}
                }
            }
        }
    }

    /// Queued work in the streams selected by `counts`: copies, then frees.
    pub(crate) fn pending(&self, counts: impl Fn(&Stream) -> bool) -> (u64, u64) {
        let mut pending = (0, 0);
        for stream in self.streams.values().filter(|stream| counts(stream)) {
            for work in &stream.queue {
                match work.kind {
                    Kind::Copy(_) => pending.0 += 1,
                    Kind::Free { .. } => pending.1 += 1,
                    Kind::Mark | Kind::Wait(_) => {}
                }
            }
        }
        pending
    }

    /// Number of queued copies of a context that use host memory.
    pub(crate) fn pending_host_copies(&self, context: usize) -> usize {
        let uses_host = |work: &&Work| matches!(&work.kind, Kind::Copy(copy) if copy.uses_host());
        let of_context = self.streams.values().filter(|stream| stream.context == context);
        of_context.map(|stream| stream.queue.iter().filter(uses_host).count()).sum()
    }

    /// The host waits for a stream.
    pub(crate) fn synchronize_stream(&mut self, handle: usize) -> Answer {
        let stream = self.stream(handle)?;
        self.order_with_legacy(stream)?;
        let state = &self.streams[&stream];
        let (point, clock) = (Point { stream, sequence: state.queued }, state.clock.clone());
        self.run_to(vec![point])?;
        self.host_knows(&clock);
        Ok(())
    }

    /// The host waits for a whole context.
    pub(crate) fn synchronize_context(&mut self, context: usize) -> Answer {
        let mut clock = Clock::default();
        let mut points = Vec::new();
        for (&handle, stream) in self.streams.iter().filter(|(_, stream)| stream.context == context) {
            points.push(Point { stream: handle, sequence: stream.queued });
            clock.merge(&stream.clock);
        }
        self.run_to(points)?;
        self.host_knows(&clock);
        Ok(())
    }

    /// Records that the host knows this work to be done.
    fn host_knows(&mut self, clock: &Clock) {
        self.host.merge(clock);
        self.settle_pools();
    }

    /// True if enough queries returned "not ready".
    fn is_asked_enough(&mut self, queries: u32) -> bool {
        self.config.mode != Mode::Lazy || queries >= QUERIES_MAX || self.random.once_in(4)
    }

    pub(crate) fn query_stream(&mut self, handle: usize) -> Answer {
        let handle = self.stream(handle)?;
        let stream = self.streams.get_mut(&handle).ok_or(Code::INVALID_HANDLE)?;
        let (point, clock) = (Point { stream: handle, sequence: stream.queued }, stream.clock.clone());
        stream.queries += 1;
        let queries = stream.queries;
        self.answer_query(point, &clock, queries)?;
        if let Some(stream) = self.streams.get_mut(&handle) {
            stream.queries = 0;
        }
        Ok(())
    }

    fn answer_query(&mut self, point: Point, clock: &Clock, queries: u32) -> Answer {
        if !self.is_over(point) {
            if self.config.mode == Mode::Thread || !self.is_asked_enough(queries) {
                return Err(Code::NOT_READY);
            }
            self.run_to(vec![point])?;
        }
        self.host_knows(clock);
        Ok(())
    }

    pub(crate) fn destroy_stream(&mut self, handle: usize) -> Answer {
        if handle <= 2 {
            return Err(Code::INVALID_HANDLE);
        }
        let handle = self.stream(handle)?;
        let stream = self.streams.get_mut(&handle).ok_or(Code::INVALID_HANDLE)?;
        stream.is_destroyed = true;
        if stream.queue.is_empty() {
            self.streams.remove(&handle);
        }
        Ok(())
    }

    pub(crate) fn new_event(&mut self, context: usize, has_timing: bool) -> usize {
        let handle = self.new_handle("event");
        self.events.insert(handle, Event { context, has_timing, last: None, queries: 0 });
        handle
    }

    pub(crate) fn event(&mut self, handle: usize) -> Answer<&mut Event> {
        if !self.events.contains_key(&handle) {
            self.unknown_handle("event", handle);
        }
        self.events.get_mut(&handle).ok_or(Code::INVALID_HANDLE)
    }

    pub(crate) fn record_event(&mut self, event: usize, stream: usize) -> Answer {
        let event_context = self.event(event)?.context;
        let stream = self.stream(stream)?;
        if self.streams[&stream].context != event_context {
            self.violation("wrong_context", format!("event {event:#x} and its stream are of two contexts"));
            return Err(Code::INVALID_HANDLE);
        }
        self.order_with_legacy(stream)?;
        let point = self.enqueue(stream, Kind::Mark)?;
        let clock = self.clock_of(stream);
        let event = self.event(event)?;
        event.last = Some((point, clock));
        event.queries = 0;
        Ok(())
    }

    /// Makes a stream wait for the current record of an event; later records do not matter.
    pub(crate) fn let_stream_wait(&mut self, stream: usize, event: usize) -> Answer {
        let stream = self.stream(stream)?;
        let Some((point, clock)) = self.event(event)?.last.clone() else { return Ok(()) };
        self.wait_in_stream(stream, point, &clock)
    }

    pub(crate) fn synchronize_event(&mut self, event: usize) -> Answer {
        let Some((point, clock)) = self.event(event)?.last.clone() else { return Ok(()) };
        self.run_to(vec![point])?;
        self.host_knows(&clock);
        Ok(())
    }

    pub(crate) fn query_event(&mut self, handle: usize) -> Answer {
        let event = self.event(handle)?;
        event.queries += 1;
        let queries = event.queries;
        let Some((point, clock)) = event.last.clone() else { return Ok(()) };
        self.answer_query(point, &clock, queries)
    }

    /// Milliseconds between two events: the number of work items between them.
    pub(crate) fn elapsed(&mut self, start: usize, end: usize) -> Answer<f32> {
        let mut points = Vec::new();
        for handle in [start, end] {
            let event = self.event(handle)?;
            if !event.has_timing {
                return Err(Code::INVALID_HANDLE);
            }
            points.push(event.last.as_ref().ok_or(Code::INVALID_HANDLE)?.0);
        }
        if points.iter().any(|&point| !self.is_over(point)) {
            return Err(Code::NOT_READY);
        }
        let steps = points[1].sequence.saturating_sub(points[0].sequence);
        Ok(f32::from(u16::try_from(steps).unwrap_or(u16::MAX)) / 1000.0)
    }

    /// Number of streams that the program created and has not destroyed.
    pub(crate) fn live_streams(&self) -> u64 {
        to_u64(self.streams.values().filter(|stream| !stream.is_default && !stream.is_destroyed).count())
    }
}

/// The result of one step.
enum Step {
    Ran,
    Needs(Point),
    Failed(Code),
    /// The stream has no work.
    Idle,
}

/// Default streams: the legacy one of the context under thread 0, and one per thread.
pub(crate) type DefaultStreams = BTreeMap<(usize, u64), usize>;
