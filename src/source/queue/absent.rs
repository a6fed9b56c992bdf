//! Replaces io_uring in a build without the feature `uring`: no queue can be made.

use std::convert::Infallible;
use std::io;
use std::marker::PhantomData;
use std::sync::Arc;

use super::super::extent::Piece;
use super::super::files::OpenFile;
use super::{Completion, ReadBuffer};

/// Never constructed.
pub(super) struct KernelRing<B, T> {
    never: Infallible,
    kinds: PhantomData<(B, T)>,
}

impl<B: ReadBuffer, T> KernelRing<B, T> {
    pub(super) fn new(_reads_most: u32, _buffer_count: Option<u32>) -> Result<Self, String> {
        Err("this build has no io_uring (feature `uring`)".to_owned())
    }

    pub(super) fn len(&self) -> usize {
        match self.never {}
    }

    pub(super) fn register(&mut self, _buffer: &mut B) -> Result<(), String> {
        match self.never {}
    }

    pub(super) fn push(&mut self, _buffer: B, _file: Arc<OpenFile>, _piece: Piece, _rest: T) {
        match self.never {}
    }

    pub(super) fn submit(&self) {
        match self.never {}
    }

    pub(super) fn wait(&mut self) -> io::Result<Option<Completion<B, T>>> {
        match self.never {}
    }
}
