//! [`Io`]: the interface between a device's thread and the system. [`WrapIo`] lets tests put a failing layer between. A
//! ring of io_uring and a pool of threads implement the interface.
//!
//! The thread posts operations, then waits. `wait` hands out each operation once, when the kernel is done with its
//! memory. Until then nothing else may use that memory. Dropping an [`Io`] first ends everything that was posted.
#![expect(unsafe_code, reason = "operations carry addresses; their poster vouches for the memory")]

use std::io;
use std::sync::Arc;
use std::time::Duration;

/// A contiguous part of an operation's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// A multiple of 4096.
    pub address: *mut u8,
    /// Length in bytes; a multiple of 4096, above 0.
    pub bytes: usize,
}

// SAFETY: an address is a number. The contract of `Io::post` rules access to the memory behind it.
unsafe impl Send for Piece {}

/// Whether the pool and the header pages are registered with io_uring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Registration {
    /// The kernel has pinned the pages once.
    Registered,
    /// The kernel looks up and pins the pages of each operation.
    Unregistered,
}

/// Direction of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpKind {
    /// From the file to the memory.
    Read,
    /// From the memory to the file.
    Write,
    /// Flushes completed writes to the media (fdatasync). Has no pieces.
    Sync,
}

/// One operation on the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Op {
    /// Chosen by the poster; unique among the operations in flight.
    pub id: u64,
    /// Whether it reads, writes or flushes.
    pub kind: OpKind,
    /// Offset in the file in bytes; a multiple of 4096.
    pub offset: u64,
    /// The memory, in the order of the file. At most [`Op::MAX_PIECES`].
    pub pieces: Vec<Piece>,
}

impl Op {
    /// Limit of pieces in one operation.
    pub const MAX_PIECES: usize = 256;

    /// Bytes to move, over all pieces.
    pub fn bytes(&self) -> usize {
        self.pieces.iter().map(|piece| piece.bytes).sum()
    }
}

/// Outcome of an operation. The kernel does not touch the operation's memory any more.
#[derive(Debug)]
pub struct Completion {
    /// The [`Op::id`] of the operation.
    pub id: u64,
    /// Bytes moved from the operation's start. May be fewer than requested, and is 0 at the end of the file.
    pub result: io::Result<usize>,
}

/// Ends a [`Io::wait`] early, from any thread.
pub type Waker = Arc<dyn Fn() + Send + Sync>;

/// Operations on one file. Used by one thread.
pub trait Io: Send {
    /// Posts an operation, which starts with the next [`Io::wait`] at the latest. Needs [`Io::room`].
    ///
    /// # Safety
    /// The memory of its pieces is valid until [`Io::wait`] hands out the operation, or the `Io` is dropped. Until then
    /// nothing else writes that memory, and if the operation reads the file, nothing else reads it either.
    unsafe fn post(&mut self, op: Op);

    /// How many more operations may be posted now.
    fn room(&self) -> usize;

    /// Waits until an operation has ended, the waker was called, or the timeout is over. Appends every operation that has
    /// ended. With a timeout of zero it does not wait.
    fn wait(&mut self, timeout: Duration, ended: &mut Vec<Completion>) -> io::Result<()>;

    /// A waker that ends this interface's [`Io::wait`].
    fn waker(&self) -> Waker;
}

/// Puts a layer between the tier and its devices.
pub trait WrapIo: Send + Sync {
    /// Wraps the interface of one device. Called once for each device, on its thread.
    fn wrap(&self, io: Box<dyn Io>) -> Box<dyn Io>;
}
