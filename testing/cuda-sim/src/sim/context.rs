//! Contexts, and the current context of each thread.

use super::{Class, Sim, to_u64};
use crate::code::{Answer, Code};
use crate::config::Lost;

#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) device: usize,
    pub(crate) is_primary: bool,
}

/// An entry of a thread's stack of contexts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    context: usize,
    /// Pushed by `cuCtxPushCurrent`, which needs a pop; `cuCtxSetCurrent` does not.
    is_pushed: bool,
}

impl Sim {
    pub(crate) fn new_context(&mut self, device: usize, is_primary: bool) -> Answer<usize> {
        self.take(device, self.config.context_bytes)?;
        let handle = self.new_handle("context");
        self.contexts.insert(handle, Context { device, is_primary });
        Ok(handle)
    }

    pub(crate) fn device_of(&self, context: usize) -> usize {
        self.contexts.get(&context).map_or(0, |context| context.device)
    }

    /// The context of this thread, if any.
    pub(crate) fn current_or_none(&self) -> Option<usize> {
        self.stacks.get(&self.thread())?.last().map(|entry| entry.context)
    }

    /// The context of this thread. Having none is a violation, unless contexts are lost, since then
    /// entering fails.
    pub(crate) fn current(&mut self) -> Answer<usize> {
        match self.current_or_none() {
            Some(context) if self.contexts.contains_key(&context) => Ok(context),
            Some(context) => {
                self.violation("destroyed_context", format!("context {context:#x} is current but destroyed"));
                Err(Code(709))
            }
            None => {
                if self.devices.iter().all(|device| device.lost.is_none()) {
                    self.violation("no_context", String::from("no context is current on this thread"));
                }
                Err(Code::INVALID_CONTEXT)
            }
        }
    }

    /// Like [`Self::current`] for freeing calls, which still work in a lost context.
    pub(crate) fn current_for_release(&mut self) -> Answer {
        if self.current_or_none().is_none() && self.devices.iter().any(|device| device.lost.is_some()) {
            return Ok(());
        }
        self.current().map(drop)
    }

    fn known_context(&mut self, context: usize) -> Answer {
        if self.contexts.contains_key(&context) {
            return Ok(());
        }
        self.unknown_handle("context", context);
        Err(Code::INVALID_CONTEXT)
    }

    pub(crate) fn push_context(&mut self, context: usize) -> Answer {
        self.known_context(context)?;
        let thread = self.thread();
        let stack = self.stacks.entry(thread).or_default();
        stack.push(Entry { context, is_pushed: true });
        self.ledger.contexts_pushed_most = self.ledger.contexts_pushed_most.max(stack.len());
        Ok(())
    }

    pub(crate) fn pop_context(&mut self) -> Answer<usize> {
        let thread = self.thread();
        let entry = self.stacks.get_mut(&thread).and_then(Vec::pop);
        match entry {
            Some(Entry { context, is_pushed: true }) => Ok(context),
            Some(Entry { context, is_pushed: false }) => {
                self.violation("unbalanced_pop", String::from("a context was popped that was not pushed"));
                Ok(context)
            }
            None => {
                if self.devices.iter().all(|device| device.lost.is_none()) {
                    self.violation("unbalanced_pop", String::from("a pop from an empty stack of contexts"));
                }
                Err(Code::INVALID_CONTEXT)
            }
        }
    }

    /// Replaces the top of the stack; zero empties it.
    pub(crate) fn set_context(&mut self, context: usize) -> Answer {
        if context != 0 {
            self.known_context(context)?;
        }
        let thread = self.thread();
        let stack = self.stacks.entry(thread).or_default();
        let top = stack.pop();
        if context != 0 {
            stack.push(Entry { context, is_pushed: top.is_some_and(|entry| entry.is_pushed) });
        }
        Ok(())
    }

    /// Called when a thread has ended.
    pub(crate) fn end_thread(&mut self, thread: u64) {
        let Some(stack) = self.stacks.remove(&thread) else { return };
        let left = stack.iter().filter(|entry| entry.is_pushed).count();
        if left > 0 {
            self.violation("unbalanced_push", format!("a thread ended with {left} contexts pushed"));
        }
    }

    pub(crate) fn retain_primary(&mut self, device: usize) -> Answer<usize> {
        let context = match self.devices[device].primary {
            Some(context) => context,
            None => {
                let context = self.new_context(device, true)?;
                self.devices[device].primary = Some(context);
                context
            }
        };
        self.devices[device].primary_references += 1;
        Ok(context)
    }

    pub(crate) fn release_primary(&mut self, device: usize) -> Answer {
        let (Some(context), references) =
            (self.devices[device].primary, self.devices[device].primary_references)
        else {
            self.violation("bad_release", format!("the primary context of device {device} is not retained"));
            return Err(Code::INVALID_CONTEXT);
        };
        self.devices[device].primary_references = references - 1;
        if references == 1 {
            self.devices[device].primary = None;
            self.end_context(context);
        }
        Ok(())
    }

    /// Destroys a context and its objects.
    pub(crate) fn end_context(&mut self, context: usize) {
        let lost = self.lost_of_context(context).is_some();
        let copies = self.pending_host_copies(context);
        if copies > 0 && !lost {
            let text = format!("{copies} copies that use host memory are still queued");
            self.violation("context_released_with_copies", text);
        }
        // Work on device memory alone runs to its end, as in a driver.
        let _ = self.synchronize_context(context);
        let device = self.device_of(context);
        let streams = self
            .streams
            .values()
            .filter(|stream| stream.context == context && !stream.is_default && !stream.is_destroyed);
        let mut left = vec![("streams", to_u64(streams.count()))];
        let events = self.events.values().filter(|event| event.context == context);
        left.push(("events", to_u64(events.count())));
        let pinned = self.pinned.values().filter(|pinned| pinned.context == context);
        left.push(("pinned_ranges", to_u64(pinned.count())));
        let allocations: Vec<u64> = self
            .allocations
            .iter()
            .filter(|(_, allocation)| allocation.context == context)
            .map(|(&address, _)| address)
            .collect();
        left.push(("allocations", to_u64(allocations.len())));
        let bytes = allocations.iter().map(|address| self.allocations[address].len_bytes).sum();
        left.push(("device_bytes", bytes));
        // A pool belongs to its device, not to a context, so it stays.
        left.retain(|&(_, count)| count > 0);
        if !left.is_empty() && !lost {
            let what: Vec<String> = left.iter().map(|(what, count)| format!("{count} {what}")).collect();
            self.violation("context_released_in_use", format!("a context ended with {}", what.join(", ")));
        }
        for (what, count) in left {
            *self.ledger.went_with_context.entry(what).or_default() += count;
        }
        for address in allocations {
            self.end_allocation(address);
        }
        self.streams.retain(|_, stream| stream.context != context);
        self.default_streams.retain(|(of, _), _| *of != context);
        self.events.retain(|_, event| event.context != context);
        let ranges: u64 = self
            .pinned
            .values()
            .filter(|pinned| pinned.context == context)
            .map(|pinned| to_u64(pinned.len_bytes))
            .sum();
        self.ledger.pinned.subtract(ranges);
        self.pinned.retain(|_, pinned| pinned.context != context);
        self.contexts.remove(&context);
        self.give(device, self.config.context_bytes);
    }

    /// The code that lost a context.
    pub(crate) fn lost_of_context(&self, context: usize) -> Option<Code> {
        let context = self.contexts.get(&context)?;
        self.devices[context.device].lost
    }

    /// Loses a context: its device returns this code from now on.
    pub(crate) fn lose_context(&mut self, context: usize, code: Code) {
        let device = self.device_of(context);
        self.devices[device].lost.get_or_insert(code);
        let contexts: Vec<usize> = self
            .contexts
            .iter()
            .filter(|(_, context)| context.device == device)
            .map(|(&handle, _)| handle)
            .collect();
        for context in contexts {
            self.drop_work(context);
        }
    }

    /// Loses the context of this thread, or all if it has none.
    pub(crate) fn lose_current(&mut self, code: Code) {
        let contexts: Vec<usize> = match self.current_or_none() {
            Some(context) => vec![context],
            None => self.contexts.keys().copied().collect(),
        };
        for context in contexts {
            self.lose_context(context, code);
        }
    }

    /// The code of a call in a lost context, if it fails.
    pub(crate) fn lost_answer(&self, class: Class) -> Option<Code> {
        let fails = match (self.config.lost, class) {
            (_, Class::Query) => false,
            (_, Class::Work) => true,
            (Lost::All, Class::Release | Class::Enter) | (Lost::Calls, Class::Enter) => true,
            (Lost::Calls, Class::Release) | (Lost::Work, Class::Release | Class::Enter) => false,
        };
        if !fails {
            return None;
        }
        match self.current_or_none() {
            Some(context) => self.lost_of_context(context),
            // The context of the call is unknown here, so it fails if all are lost.
            None => {
                let lost: Option<Vec<Code>> = self.devices.iter().map(|device| device.lost).collect();
                lost.and_then(|codes| codes.first().copied())
            }
        }
    }
}
