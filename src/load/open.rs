//! A layer on its way: what it has and what it waits for.

use std::sync::Arc;

use super::hash::TensorHash;
use super::meter::Course;
use super::window::Permit;
use crate::device::Backend;
use crate::staging::{Filled, Slot};

/// A filled slot that waits for the arena of its layer.
pub(super) struct Parked {
    pub(super) turn: usize,
    pub(super) read: u32,
    pub(super) slot: Slot<Filled>,
}

/// A layer on its way.
pub(super) struct OpenLayer<B: Backend> {
    /// `None` for a layer that is kept.
    pub(super) permit: Option<Permit>,
    pub(super) arena: Option<Arc<B::Arena>>,
    /// Reads whose copies have not been queued.
    pub(super) reads_left: u32,
    /// Complete with the last read, if the load hashes.
    pub(super) hashes: Vec<TensorHash>,
    /// True once its arena was asked for.
    pub(super) is_placed: bool,
    pub(super) is_sealed: bool,
    /// True if it is there from an earlier pass: it needs nothing.
    pub(super) is_there: bool,
    pub(super) course: Course,
}

impl<B: Backend> OpenLayer<B> {
    /// A layer that may be read from now on.
    pub(super) fn new(course: Course, reads: u32, is_there: bool) -> Self {
        Self {
            permit: None,
            arena: None,
            reads_left: if is_there { 0 } else { reads },
            hashes: Vec::new(),
            is_placed: false,
            is_sealed: false,
            is_there,
            course,
        }
    }

    /// True if its arena was asked for and is not there.
    pub(super) fn awaits_arena(&self) -> bool {
        self.is_placed && self.arena.is_none() && !self.is_sealed
    }

    /// True if all its copies are queued.
    pub(super) fn is_whole(&self) -> bool {
        self.is_there || self.reads_left == 0 && self.arena.is_some()
    }
}
