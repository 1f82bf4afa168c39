//! The send queue of a connection: owned bytes and registered memory in order, with a checksum behind each body.
//!
//! A body up to [`END_BYTES`] is summed before it is written. A longer one is summed as it is written, except for its last
//! [`END_BYTES`], which go out together with the checksum.

#![allow(unsafe_code, reason = "sums are made over registered memory")]

use std::collections::VecDeque;
use std::sync::Arc;

use super::sum::{SUM_BYTES, Sum};
use crate::ranges::{Piece, Spots};

/// Memory up to this size is copied before it is summed, because the owner of a flag or counter may change it at any time.
/// The copy matches its checksum. If longer memory changes while it is sent, the peer ends the connection.
const COPIED_MAX: usize = 256;
/// The last bytes of a body, which go out together with its checksum. The bytes before them are summed once they are written:
/// they are in the caches then, and the peer reads them meanwhile. (Summed before, in parts of 256 KiB, a READ of 16 MiB had
/// 0.53 of its rate without checksums, on two cores.)
const END_BYTES: usize = 32 << 10;
/// Entries searched for the end of a body.
const END_SEARCH_MAX: usize = 256;

/// One entry of the queue.
#[derive(Debug)]
pub(crate) enum Out {
    /// Owned bytes outside any body, and how many of them have been written.
    Bytes(Vec<u8>, usize),
    /// Bytes of a body that others hold too, and how many of them have been written.
    Shared(Arc<[u8]>, usize),
    /// Bytes of a body in memory that others own. The link does not touch it once it has been written, or once the
    /// link is dropped.
    Memory(Piece),
    /// A copy of such memory, and how much of it has been written.
    Copied(Box<[u8]>, usize),
    /// The checksum of the body before it, once known, and how much of it has been written.
    Sum(Option<[u8; SUM_BYTES]>, usize),
}

impl Out {
    pub(crate) fn sum() -> Out {
        Out::Sum(None, 0)
    }

    /// Bytes that count for the backlog: those that the queue itself holds.
    pub(crate) fn own_bytes(&self) -> usize {
        match self {
            Out::Bytes(bytes, _) => bytes.len(),
            Out::Shared(bytes, _) => bytes.len(),
            // A `Copied` replaces a `Memory`, which was not counted when it was queued.
            Out::Memory(_) | Out::Copied(..) | Out::Sum(..) => 0,
        }
    }

    pub(crate) fn touches(&self, memory: Spots<'_>) -> bool {
        matches!(self, Out::Memory(piece) if memory.overlap_host(*piece))
    }

    /// The bytes that have not been written.
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

    /// Adds the entry's bytes to a checksum, except the first `known`, which are in it already. Copies short memory first.
    /// Returns how many bytes were added.
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
        // SAFETY: owned bytes, or memory that is valid by the caller's promise. If its owner changes it meanwhile, the
        // checksum does not match the bytes sent, and the peer refuses them.
        let all = unsafe { std::slice::from_raw_parts(rest.iov_base.cast::<u8>(), rest.iov_len) };
        sum.add(&all[skipped..]);
        rest.iov_len - skipped
    }

    fn has_sum(&self) -> bool {
        matches!(self, Out::Shared(..) | Out::Memory(_) | Out::Copied(..))
    }

    /// Notes that `bytes` more bytes were written, but not all.
    fn wrote(&mut self, bytes: usize) {
        match self {
            Out::Bytes(_, done) | Out::Shared(_, done) | Out::Copied(_, done) | Out::Sum(_, done) => {
                *done += bytes;
            }
            Out::Memory(piece) => *piece = piece.after(bytes),
        }
    }
}

/// Entries in the order in which they are written.
#[derive(Debug, Default)]
pub(crate) struct SendQueue {
    queue: VecDeque<Out>,
    /// Entries that have been written, of all ever queued.
    written: u64,
    /// Bytes of the queue that are not registered memory.
    own_bytes: usize,
    /// With checksums: that of the body which is being written.
    sum: Option<Sum>,
    /// Bytes of bodies at the front of the queue that are in a checksum already.
    summed: usize,
}

impl SendQueue {
    /// From the next entry on, bodies have checksums.
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

    /// Owned bytes, and entries, that wait to be written.
    pub(crate) fn backlog(&self) -> (usize, usize) {
        (self.own_bytes, self.queue.len())
    }

    /// Entries that have been written, of all ever queued.
    pub(crate) fn written(&self) -> u64 {
        self.written
    }

    pub(crate) fn touches(&self, memory: Spots<'_>) -> bool {
        self.queue.iter().any(|out| out.touches(memory))
    }

    /// Fills `ranges` with what comes next, at most `most` bytes. Returns how many ranges, and their bytes. Short bodies
    /// and the ends of long ones are summed here, so they go out with their checksum. The rest of a long body is summed
    /// once written.
    ///
    /// # Safety
    /// Queued memory is valid for reads.
    pub(crate) unsafe fn next_ranges(&mut self, ranges: &mut [libc::iovec], most: usize) -> (usize, usize) {
        let (mut count, mut bytes) = (0, 0);
        let mut walk = Walk { known: self.summed, body: BodyMode::None };
        for index in 0..self.queue.len().min(ranges.len()) {
            if bytes >= most {
                break;
            }
            let mut room = most - bytes;
            if let Some(sum) = &mut self.sum {
                // SAFETY: the caller's promise.
                match unsafe { walk.admit(&mut self.queue, index, sum, &mut self.summed) } {
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

    /// Notes that the first `bytes` bytes of the last ranges were written.
    ///
    /// # Safety
    /// Queued memory is valid for reads.
    pub(crate) unsafe fn wrote(&mut self, mut bytes: usize) {
        while let Some(first) = self.queue.front_mut() {
            if matches!(first, Out::Sum(None, _)) {
                // Its body is written completely. `next_ranges` makes the checksum.
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

/// Walks along the queue and decides how much of each entry may go out.
struct Walk {
    /// Bytes of the bodies ahead that are in a checksum already.
    known: usize,
    body: BodyMode,
}

/// The body that the walk is in.
#[derive(Clone, Copy)]
enum BodyMode {
    None,
    /// Summed before it is written.
    Summed,
    /// Summed as it is written. The number is how many of its bytes may go out now, with nothing behind them.
    Long(usize),
}

impl Walk {
    /// How many bytes of this entry may go out. None: neither this entry nor any behind it.
    ///
    /// # Safety
    /// Memory is valid for reads.
    unsafe fn admit(
        &mut self,
        queue: &mut VecDeque<Out>,
        index: usize,
        sum: &mut Sum,
        summed: &mut usize,
    ) -> Option<usize> {
        let out = &mut queue[index];
        if let Out::Sum(done, _) = out {
            if done.is_none() && matches!(self.body, BodyMode::Long(_)) {
                return None;
            }
            if done.is_none() {
                *done = Some(std::mem::replace(sum, Sum::new()).bytes());
            }
            self.body = BodyMode::None;
            return Some(usize::MAX);
        }
        if !out.has_sum() {
            return Some(usize::MAX);
        }
        if matches!(self.body, BodyMode::None) {
            self.body = BodyMode::at(queue, index);
        }
        match &mut self.body {
            BodyMode::Long(left) => {
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

impl BodyMode {
    /// The body that begins or goes on at this index of the queue.
    fn at(queue: &VecDeque<Out>, index: usize) -> BodyMode {
        let mut bytes: usize = 0;
        for out in queue.range(index..).take(END_SEARCH_MAX) {
            if !out.has_sum() {
                return match bytes.checked_sub(END_BYTES) {
                    None | Some(0) => BodyMode::Summed,
                    Some(before) => BodyMode::Long(before),
                };
            }
            bytes += out.rest().iov_len;
        }
        BodyMode::Long(usize::MAX)
    }
}
