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
/// So many bytes at the end of a body go out together with its sum. What is before them is summed when it has been written: then
/// the processor's caches have it, and the peer reads it meanwhile. (Summed before, in parts of 256 KiB, a READ of 16 MiB had 0.53
/// of its rate without sums, on two cores.)
const END_BYTES: usize = 32 << 10;
/// Entries that are looked at for the end of a body.
const LOOKED_AT: usize = 256;

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

    /// Adds it to a sum, but what is in it already, of which `known` bytes are left. Answers how many were added.
    ///
    /// # Safety
    /// Memory is valid for reads.
    unsafe fn add_to(&mut self, sum: &mut Sum, known: &mut usize) -> usize {
        if let Out::Memory(piece) = self
            && piece.len <= COPIED_MAX
            && *known == 0
        {
            let mut copy = vec![0; piece.len].into_boxed_slice();
            // SAFETY: the memory is valid by the caller's promise, and the copy is our own.
            unsafe {
                std::ptr::copy_nonoverlapping(piece.pointer().cast_const(), copy.as_mut_ptr(), piece.len)
            };
            *self = Out::Copied(copy, 0);
        }
        let rest = self.rest();
        let skipped = rest.iov_len.min(*known);
        *known -= skipped;
        // SAFETY: owned bytes, or memory that is valid by the caller's promise. Its owner may change it meanwhile: then the sum
        // is of other bytes than those that are sent, and the peer does not take them.
        let all = unsafe { std::slice::from_raw_parts(rest.iov_base.cast::<u8>(), rest.iov_len) };
        sum.add(&all[skipped..]);
        rest.iov_len - skipped
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
    /// Bytes of bodies at the front of the queue that are in the sum already.
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

    /// The ranges that come next, so many bytes at the most: how many there are, and their bytes together. Sums are made of short
    /// bodies, and of the ends of long ones, so that they go out together; of the rest when it has been written.
    ///
    /// # Safety
    /// Queued memory is valid for reads.
    pub(crate) unsafe fn next_ranges(&mut self, ranges: &mut [libc::iovec], most: usize) -> (usize, usize) {
        let (mut count, mut bytes) = (0, 0);
        let mut walk = Walk { known: self.summed, body: Body::None };
        for index in 0..self.queue.len().min(ranges.len()) {
            if bytes >= most {
                break;
            }
            let mut room = most - bytes;
            if let Some(sum) = &mut self.sum {
                // SAFETY: the caller's promise.
                match unsafe { walk.look_at(&mut self.queue, index, sum, &mut self.summed) } {
                    Some(may_go) => room = room.min(may_go),
                    None => break,
                }
            }
            ranges[count] = self.queue[index].rest();
            ranges[count].iov_len = ranges[count].iov_len.min(room);
            bytes += ranges[count].iov_len;
            count += 1;
        }
        (count, bytes)
    }

    /// So many bytes of the last ranges have been written.
    ///
    /// # Safety
    /// Queued memory is valid for reads.
    pub(crate) unsafe fn wrote(&mut self, mut bytes: usize) {
        while let Some(first) = self.queue.front_mut() {
            if matches!(first, Out::Sum(None, _)) {
                // All of its body is written; it is made for the next ranges.
                return debug_assert_eq!(bytes, 0);
            }
            let rest = first.rest();
            let written = rest.iov_len.min(bytes);
            if let Some(sum) = self.sum.as_mut().filter(|_| first.has_sum()) {
                let known = written.min(self.summed);
                self.summed -= known;
                // SAFETY: the caller's promise, and as in `Out::add_to`.
                let new = unsafe { std::slice::from_raw_parts(rest.iov_base.cast::<u8>(), written) };
                sum.add(&new[known..]);
            }
            if bytes < rest.iov_len {
                first.wrote(bytes);
                return;
            }
            bytes -= rest.iov_len;
            self.written += 1;
            self.own_bytes -= self.queue.pop_front().map_or(0, |out| out.own_bytes());
        }
    }
}

/// Goes along a queue.
struct Walk {
    /// Of the bytes of bodies ahead, those that are in a sum already.
    known: usize,
    body: Body,
}

/// The body at which a walk is.
#[derive(Clone, Copy)]
enum Body {
    None,
    /// Its sum is made before it is written.
    Summed,
    /// Its sum is made as it is written. So many more bytes of it may be, and nothing behind them.
    Long(usize),
}

impl Walk {
    /// How many bytes of this entry may go out; None: none of this one, and of those behind it.
    ///
    /// # Safety
    /// Memory is valid for reads.
    unsafe fn look_at(
        &mut self,
        queue: &mut VecDeque<Out>,
        index: usize,
        sum: &mut Sum,
        summed: &mut usize,
    ) -> Option<usize> {
        let out = &mut queue[index];
        if let Out::Sum(done, _) = out {
            if done.is_none() && matches!(self.body, Body::Long(_)) {
                return None;
            }
            if done.is_none() {
                *done = Some(std::mem::replace(sum, Sum::new()).bytes());
            }
            self.body = Body::None;
            return Some(usize::MAX);
        }
        if !out.has_sum() {
            return Some(usize::MAX);
        }
        if matches!(self.body, Body::None) {
            self.body = Body::at(queue, index);
        }
        match &mut self.body {
            Body::Long(left) => {
                let may_go = (*left).min(queue[index].rest().iov_len);
                *left -= may_go;
                (may_go > 0).then_some(may_go)
            }
            _ => {
                // SAFETY: the caller's promise.
                *summed += unsafe { queue[index].add_to(sum, &mut self.known) };
                Some(usize::MAX)
            }
        }
    }
}

impl Body {
    /// The one that is at this place of a queue.
    fn at(queue: &VecDeque<Out>, index: usize) -> Body {
        let mut bytes: usize = 0;
        for out in queue.range(index..).take(LOOKED_AT) {
            if !out.has_sum() {
                return match bytes.checked_sub(END_BYTES) {
                    None | Some(0) => Body::Summed,
                    Some(before) => Body::Long(before),
                };
            }
            bytes += out.rest().iov_len;
        }
        Body::Long(usize::MAX)
    }
}
