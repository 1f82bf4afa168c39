//! What is to be written to a connection.

#![allow(unsafe_code, reason = "sums are made over registered memory")]

use std::collections::VecDeque;
use std::sync::Arc;

use super::sum::{SUM_BYTES, Sum};
use crate::ranges::{Piece, Spots};

/// Memory of no more bytes is copied before its sum is made: the owner of a flag or of a counter may change it at any time, and
/// what is sent then has to fit its sum all the same. Whoever changes longer memory while it is sent gets a connection that
/// breaks.
const COPIED_MAX: usize = 256;

/// One thing that is to be written.
#[derive(Debug)]
pub(crate) enum Out {
    /// Bytes of ours that have no sum behind them, and how many of them have been written.
    Bytes(Vec<u8>, usize),
    /// Bytes of a frame's body that others hold too; likewise.
    Shared(Arc<[u8]>, usize),
    /// Bytes of a frame's body in memory that others own, which is not touched any more once it has been written or the link
    /// is dropped.
    Memory(Piece),
    /// The same, copied.
    Copied(Box<[u8]>, usize),
    /// The sum of the body before it, once that is known; and how much of it has been written.
    Sum(Option<[u8; SUM_BYTES]>, usize),
}

impl Out {
    pub(crate) fn sum() -> Out {
        Out::Sum(None, 0)
    }

    /// Bytes that are not somebody else's memory.
    pub(crate) fn own_bytes(&self) -> usize {
        match self {
            Out::Bytes(bytes, _) => bytes.len(),
            Out::Shared(bytes, _) => bytes.len(),
            // As long as memory, which waited before them, is not counted either.
            Out::Memory(_) | Out::Copied(..) | Out::Sum(..) => 0,
        }
    }

    pub(crate) fn touches(&self, memory: Spots<'_>) -> bool {
        matches!(self, Out::Memory(piece) if memory.overlap_host(*piece))
    }

    /// What of it has not been written.
    fn rest(&self) -> libc::iovec {
        let rest =
            |rest: &[u8]| libc::iovec { iov_base: rest.as_ptr().cast_mut().cast(), iov_len: rest.len() };
        match self {
            Out::Bytes(bytes, done) => rest(&bytes[*done..]),
            Out::Shared(bytes, done) => rest(&bytes[*done..]),
            Out::Copied(bytes, done) => rest(&bytes[*done..]),
            Out::Memory(piece) => libc::iovec { iov_base: piece.pointer().cast(), iov_len: piece.len },
            Out::Sum(sum, done) => rest(&sum.as_ref().map_or(&[][..], |sum| &sum[..])[*done..]),
        }
    }

    fn has_sum(&self) -> bool {
        matches!(self, Out::Shared(..) | Out::Memory(_) | Out::Copied(..))
    }

    /// So many more of its bytes have been written, which are not all.
    fn wrote(&mut self, bytes: usize) {
        match self {
            Out::Bytes(_, done) | Out::Shared(_, done) | Out::Copied(_, done) | Out::Sum(_, done) => {
                *done += bytes;
            }
            Out::Memory(piece) => *piece = piece.after(bytes),
        }
    }
}

/// The queue of a connection.
#[derive(Debug, Default)]
pub(crate) struct Outgoing {
    queue: VecDeque<Out>,
    /// Entries that have been written.
    written: u64,
    /// Of what is queued, bytes that are not registered memory.
    own_bytes: usize,
    /// Where bodies have sums: of the body whose sum is not known yet.
    sum: Option<Sum>,
    /// Bytes of bodies at the front of the queue that are in a sum already.
    summed: usize,
}

impl Outgoing {
    /// From now on sums are made.
    pub(crate) fn begin_sums(&mut self) {
        self.sum = Some(Sum::new());
    }

    pub(crate) fn has_sums(&self) -> bool {
        self.sum.is_some()
    }

    pub(crate) fn push(&mut self, out: Out) {
        self.own_bytes += out.own_bytes();
        self.queue.push_back(out);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Bytes of ours, and entries, that wait to be written.
    pub(crate) fn backlog(&self) -> (usize, usize) {
        (self.own_bytes, self.queue.len())
    }

    /// How many entries of what was ever queued have been written.
    pub(crate) fn written(&self) -> u64 {
        self.written
    }

    pub(crate) fn touches(&self, memory: Spots<'_>) -> bool {
        self.queue.iter().any(|out| out.touches(memory))
    }

    /// The ranges that come next, so many bytes at the most: how many there are, and their bytes together. Sums of what is in
    /// them are made.
    ///
    /// # Safety
    /// Queued memory is valid for reads.
    pub(crate) unsafe fn next_ranges(&mut self, ranges: &mut [libc::iovec], most: usize) -> (usize, usize) {
        let Outgoing { queue, sum, summed, .. } = self;
        let (mut count, mut bytes) = (0, 0);
        // Of what is looked at, what is in a sum already.
        let mut known = *summed;
        for (range, out) in ranges.iter_mut().zip(queue) {
            if bytes >= most {
                break;
            }
            if let Some(sum) = sum {
                // SAFETY: the caller's promise.
                *summed += unsafe { add_to_sum(sum, out, &mut known, most - bytes) };
            }
            *range = out.rest();
            range.iov_len = range.iov_len.min(most - bytes);
            count += 1;
            bytes += range.iov_len;
        }
        (count, bytes)
    }

    /// So many bytes of the last ranges have been written.
    pub(crate) fn wrote(&mut self, mut bytes: usize) {
        while let Some(first) = self.queue.front_mut() {
            let len = first.rest().iov_len;
            if self.sum.is_some() && first.has_sum() {
                self.summed -= len.min(bytes);
            }
            if bytes < len {
                first.wrote(bytes);
                return;
            }
            bytes -= len;
            self.written += 1;
            self.own_bytes -= self.queue.pop_front().map_or(0, |out| out.own_bytes());
        }
    }
}

/// Adds the first `most` bytes of this, but those that are in it already, of which `known` are left. Answers how many were added.
///
/// # Safety
/// Memory is valid for reads.
unsafe fn add_to_sum(sum: &mut Sum, out: &mut Out, known: &mut usize, most: usize) -> usize {
    if let Out::Sum(done @ None, _) = out {
        *done = Some(std::mem::replace(sum, Sum::new()).bytes());
    }
    if !out.has_sum() {
        return 0;
    }
    if let Out::Memory(piece) = out
        && piece.len <= COPIED_MAX
        && *known == 0
    {
        let mut copy = vec![0; piece.len].into_boxed_slice();
        // SAFETY: the memory is valid by the caller's promise, and the copy is our own.
        unsafe { std::ptr::copy_nonoverlapping(piece.pointer().cast_const(), copy.as_mut_ptr(), piece.len) };
        *out = Out::Copied(copy, 0);
    }
    let rest = out.rest();
    let len = rest.iov_len.min(most);
    let skipped = len.min(*known);
    *known -= skipped;
    // SAFETY: owned bytes, or memory that is valid by the caller's promise. Its owner may change it meanwhile: then the sum is
    // of other bytes than those that are sent, and the peer does not take them.
    let new = unsafe { std::slice::from_raw_parts(rest.iov_base.cast::<u8>(), len) };
    sum.add(&new[skipped..]);
    len - skipped
}
