//! A device that fails on demand, as a layer between the tier and the real one.
#![allow(dead_code, reason = "each test binary uses a part")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "helpers of tests")]

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvlane_ssd::{Completion, Io, Op, OpKind, Waker, WrapIo};

/// Faults that a test switches on.
#[derive(Default)]
pub(crate) struct Faults {
    /// The number of writes that fail, and their error.
    pub(crate) failing_writes: (usize, i32),
    /// The number of reads that fail, and their error.
    pub(crate) failing_reads: (usize, i32),
    /// Limit of bytes that an operation moves.
    pub(crate) at_most: Option<usize>,
    /// Every other operation is interrupted once.
    pub(crate) interrupt: bool,
    /// Reads are kept back.
    pub(crate) hold_reads: bool,
    /// Each read takes so much longer.
    pub(crate) read_delay: Duration,
    /// Writes are kept back.
    pub(crate) hold_writes: bool,
    /// Writes of which this is true are kept back.
    pub(crate) holds_write: Option<fn(&Op) -> bool>,
    /// The number of held writes that may go.
    pub(crate) let_writes: usize,
    /// The next read is kept back, alone, while this is false again.
    pub(crate) hold_next_read: bool,
    /// The read that was kept back alone may go.
    pub(crate) release: bool,
    /// A byte flips in the memory of reads once the device is done: so far behind the first read's offset in the file.
    pub(crate) flip: Option<u64>,
    flip_from: Option<u64>,
    /// Offset and bytes of every operation that reached the device.
    pub(crate) seen: Vec<(OpKind, u64, usize)>,
    wakers: Vec<Waker>,
}

/// The test's hand on it.
#[derive(Clone, Default)]
pub(crate) struct Failing(Arc<Mutex<Faults>>);

impl Failing {
    /// Changes what goes wrong, and has the device look at it.
    pub(crate) fn set(&self, change: impl FnOnce(&mut Faults)) {
        let mut faults = self.0.lock().unwrap();
        change(&mut faults);
        let wakers = faults.wakers.clone();
        drop(faults);
        wakers.iter().for_each(|waker| waker());
    }

    pub(crate) fn holds_next_read(&self) -> bool {
        self.0.lock().unwrap().hold_next_read
    }

    pub(crate) fn has_flipped(&self) -> bool {
        self.0.lock().unwrap().flip.is_none()
    }

    pub(crate) fn seen(&self) -> Vec<(OpKind, u64, usize)> {
        self.0.lock().unwrap().seen.clone()
    }
}

impl WrapIo for Failing {
    fn wrap(&self, io: Box<dyn Io>) -> Box<dyn Io> {
        self.0.lock().unwrap().wakers.push(io.waker());
        Box::new(Layer {
            io,
            faults: self.clone(),
            ended: VecDeque::new(),
            held: Vec::new(),
            alone: None,
            posted: 0,
            to_flip: HashMap::new(),
        })
    }
}

struct Layer {
    // First, so that nothing is in flight when the rest goes.
    io: Box<dyn Io>,
    faults: Failing,
    ended: VecDeque<Completion>,
    held: Vec<Op>,
    alone: Option<Op>,
    posted: u64,
    /// The byte to flip when the operation of this id ends.
    to_flip: HashMap<u64, *mut u8>,
}

// SAFETY: the addresses are those of operations, which go to another thread as well.
#[allow(unsafe_code)]
unsafe impl Send for Layer {}

impl Io for Layer {
    unsafe fn post(&mut self, mut op: Op) {
        if op.kind == OpKind::Read {
            let delay = self.faults.0.lock().unwrap().read_delay;
            std::thread::sleep(delay);
        }
        let mut faults = self.faults.0.lock().unwrap();
        self.posted += 1;
        let failing = match op.kind {
            OpKind::Read => &mut faults.failing_reads,
            _ => &mut faults.failing_writes,
        };
        if failing.0 > 0 {
            failing.0 -= 1;
            let result = Err(io::Error::from_raw_os_error(failing.1));
            self.ended.push_back(Completion { id: op.id, result });
            return;
        }
        if faults.interrupt && self.posted.is_multiple_of(2) {
            let result = Err(io::Error::from_raw_os_error(libc_eintr()));
            self.ended.push_back(Completion { id: op.id, result });
            return;
        }
        if let Some(mut left) = faults.at_most {
            op.pieces.retain_mut(|piece| {
                piece.bytes = piece.bytes.min(left);
                left -= piece.bytes;
                piece.bytes > 0
            });
        }
        if let Some(behind) = faults.flip
            && op.kind == OpKind::Read
        {
            let flipped = *faults.flip_from.get_or_insert(op.offset) + behind;
            if (op.offset..op.offset + op.bytes() as u64).contains(&flipped) {
                let mut at = (flipped - op.offset) as usize;
                let piece = op.pieces.iter().find(|piece| match at < piece.bytes {
                    true => true,
                    false => {
                        at -= piece.bytes;
                        false
                    }
                });
                self.to_flip.extend(piece.map(|piece| (op.id, piece.address.wrapping_add(at))));
                (faults.flip, faults.flip_from) = (None, None);
            }
        }
        if faults.hold_next_read && op.kind == OpKind::Read {
            faults.hold_next_read = false;
            self.alone = Some(op);
            return;
        }
        let held = match op.kind {
            OpKind::Read => faults.hold_reads,
            _ => faults.hold_writes || faults.holds_write.is_some_and(|holds| holds(&op)),
        };
        if held {
            self.held.push(op);
            return;
        }
        faults.seen.push((op.kind, op.offset, op.bytes()));
        // SAFETY: the caller's promise is handed on.
        unsafe { self.io.post(op) };
    }

    fn room(&self) -> usize {
        self.io.room().saturating_sub(self.ended.len() + self.held.len() + 1)
    }

    fn wait(&mut self, timeout: Duration, ended: &mut Vec<Completion>) -> io::Result<()> {
        let mut faults = self.faults.0.lock().unwrap();
        let (reads, writes, release) = (faults.hold_reads, faults.hold_writes, faults.release);
        let holds_write = faults.holds_write;
        let (held, free): (Vec<Op>, Vec<Op>) = self.held.drain(..).partition(|op| match op.kind {
            OpKind::Read => reads,
            _ if holds_write.is_some_and(|holds| holds(op)) => true,
            _ if writes && faults.let_writes > 0 => {
                faults.let_writes -= 1;
                false
            }
            _ => writes,
        });
        drop(faults);
        self.held = held;
        let alone = if release { self.alone.take() } else { None };
        for op in free.into_iter().chain(alone) {
            // SAFETY: promised when it was posted; it has not ended since.
            unsafe { self.io.post(op) };
        }
        let timeout = if self.ended.is_empty() { timeout } else { Duration::ZERO };
        ended.extend(self.ended.drain(..));
        self.io.wait(timeout, ended)?;
        for end in ended.iter() {
            if let Some(byte) = self.to_flip.remove(&end.id) {
                // SAFETY: the byte is part of the operation's memory, which the kernel is done with and the tier has not looked
                // at yet.
                unsafe { *byte ^= 1 };
            }
        }
        Ok(())
    }

    fn waker(&self) -> Waker {
        self.io.waker()
    }
}

fn libc_eintr() -> i32 {
    rustix::io::Errno::INTR.raw_os_error()
}
