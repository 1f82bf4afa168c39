//! What a device's thread asks of the system, and the seam where tests put a failing layer.
#![expect(unsafe_code, reason = "operations carry addresses; who posts them answers for the memory")]

use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Contiguous memory of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Address; a multiple of 4096.
    pub address: *mut u8,
    /// Length in bytes; a multiple of 4096, above 0.
    pub bytes: usize,
}

// SAFETY: an address is a number; access to what it points to is the poster's contract in `Io::post`.
unsafe impl Send for Piece {}

/// Whether io_uring knows the memory of operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Registration {
    /// The kernel has its pages at hand.
    Registered,
    /// The kernel looks them up for each operation.
    Unregistered,
}

/// What an operation does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpKind {
    /// From the file to the memory.
    Read,
    /// From the memory to the file.
    Write,
    /// What was written reaches the media (fdatasync). Has no pieces.
    Sync,
}

/// One operation on the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Op {
    /// The poster's number for it, not in use by another one in flight.
    pub id: u64,
    /// Whether it reads, writes or flushes.
    pub kind: OpKind,
    /// Where in the file; a multiple of 4096.
    pub offset: u64,
    /// The memory, in the order of the file. At most [`Op::MAX_PIECES`].
    pub pieces: Vec<Piece>,
}

impl Op {
    /// Most pieces of one operation.
    pub const MAX_PIECES: usize = 256;

    /// Bytes to move.
    pub fn bytes(&self) -> usize {
        self.pieces.iter().map(|piece| piece.bytes).sum()
    }
}

/// An operation that is over: nobody touches its memory any more.
#[derive(Debug)]
pub struct Ended {
    /// The number that the operation was posted with.
    pub id: u64,
    /// Bytes moved from its start; fewer than asked for are possible, and 0 at the end of the file.
    pub result: io::Result<usize>,
}

/// Ends a [`Io::wait`] early, from any thread.
pub type Waker = Arc<dyn Fn() + Send + Sync>;

/// Operations on one file. Used by one thread.
pub trait Io: Send {
    /// Takes an operation; it starts with the next [`Io::wait`] at the latest.
    ///
    /// # Safety
    /// The memory of its pieces is valid, and nobody writes it (reads: nor reads it), until the operation is handed out
    /// by [`Io::wait`], or the `Io` is dropped.
    unsafe fn post(&mut self, op: Op);

    /// How many more operations may be posted now.
    fn room(&self) -> usize;

    /// Waits until an operation has ended, the waker was called, or the time is over; appends what has ended. Not at all
    /// if the time is zero.
    fn wait(&mut self, timeout: Duration, ended: &mut Vec<Ended>) -> io::Result<()>;

    /// Wakes whoever waits.
    fn waker(&self) -> Waker;
}

/// Puts a layer between the tier and its devices.
pub trait WrapIo: Send + Sync {
    /// Called once for each device, in its thread.
    fn wrap(&self, io: Box<dyn Io>) -> Box<dyn Io>;
}
