//! [`UringQueue`]: the I/O interface on io_uring. Reads go directly into registered memory, and one system call submits
//! and reaps many operations.
//!
//! The kernel reads the file's descriptor and the iovecs, and writes the wake count, while operations are in flight. So
//! dropping the queue first wakes and reaps until none is.
#![expect(unsafe_code, reason = "io_uring takes addresses, and hands them to the kernel")]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use io_uring::types::{Fixed, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode, squeue};

use crate::io::{Completion, Io, Op, OpKind, Piece, Waker};

/// Limit of operations in flight; the read of the wake-up is not counted.
const ENTRIES: u32 = 256;
/// Limit of the kernel for one registered buffer, in bytes.
const REGISTERED_BYTES: usize = 1 << 30;
/// User data of the read that waits for the waker.
const WAKE: u64 = u64::MAX;

/// A submission and completion queue for one file.
pub(crate) struct UringQueue {
    ring: IoUring,
    file: File,
    /// Id of each operation in flight, and the iovecs that the kernel reads. The index is the operation's user data.
    slots: Vec<Option<(u64, Vec<libc::iovec>)>>,
    free: Vec<usize>,
    /// Start and end address of each registered buffer, ascending.
    registered: Vec<(usize, usize)>,
    wake_fd: Arc<OwnedFd>,
    /// Target of the read from `wake_fd`. Boxed, because the kernel writes it while that read is in flight.
    wake_count: Box<u64>,
    wake_posted: bool,
}

// SAFETY: the iovecs in `slots` are addresses for the kernel; this type never dereferences them.
unsafe impl Send for UringQueue {}

fn make_ring() -> io::Result<IoUring> {
    let new = || {
        let mut builder = IoUring::builder();
        builder.dontfork();
        builder
    };
    let ring = new()
        .setup_single_issuer()
        .setup_defer_taskrun()
        // With this flag, a call that does not wait sees completions too.
        .setup_taskrun_flag()
        .setup_submit_all()
        .build(ENTRIES)
        // Kernels before Linux 6.1 refuse these flags.
        .or_else(|_| new().build(ENTRIES))?;
    if !ring.params().is_feature_ext_arg() || !ring.params().is_feature_nodrop() {
        return Err(io::Error::new(io::ErrorKind::Unsupported, "io_uring is older than Linux 5.11"));
    }
    Ok(ring)
}

/// Tests whether a tier can use io_uring here: sets up a ring as a tier does, and tears it down again.
///
/// # Errors
/// The kernel's reason. A tier then does its I/O with a few threads.
pub fn try_io_uring() -> io::Result<()> {
    make_ring().map(drop)
}

impl UringQueue {
    /// Sets up a ring for the calling thread, and registers the pool and `small`. If the pool cannot be registered, the
    /// second value says why, and only `small`, or its first piece, is, if possible. The kernel pins the pages of each operation on memory that is
    /// not registered.
    pub(crate) fn new(file: File, pool: Piece, small: &[Piece]) -> io::Result<(UringQueue, Option<String>)> {
        let ring = make_ring()?;
        ring.submitter().register_files(&[file.as_raw_fd()])?;
        // SAFETY: a system call without addresses.
        let event = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
        if event < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just made and nobody else has it.
        let wake_fd = Arc::new(unsafe { OwnedFd::from_raw_fd(event) });
        let mut ring = UringQueue {
            ring,
            file,
            slots: (0..ENTRIES).map(|_| None).collect(),
            free: (0..ENTRIES as usize).rev().collect(),
            registered: Vec::new(),
            wake_fd,
            wake_count: Box::new(0),
            wake_posted: false,
        };
        let all: Vec<Piece> = small.iter().copied().chain([pool]).collect();
        let refused = ring.register(&all).err().map(|error| {
            let _ = ring.register(small).or_else(|_| ring.register(small.get(..1).unwrap_or_default()));
            format!("memory is not registered with io_uring: {error}; a higher limit of locked memory (ulimit -l) may help")
        });
        Ok((ring, refused))
    }

    fn register(&mut self, memory: &[Piece]) -> io::Result<()> {
        let mut pieces: Vec<(usize, usize)> = Vec::new();
        for piece in memory {
            let (start, end) = (piece.address as usize, piece.address as usize + piece.bytes);
            pieces.extend(
                (start..end).step_by(REGISTERED_BYTES).map(|from| (from, end.min(from + REGISTERED_BYTES))),
            );
        }
        pieces.sort_unstable();
        let vectors: Vec<libc::iovec> = pieces
            .iter()
            .map(|&(start, end)| libc::iovec { iov_base: start as *mut libc::c_void, iov_len: end - start })
            .collect();
        // SAFETY: registering pins pages and changes none. Operations that use them keep to the contract of `post`. The
        // pages stay pinned until the ring is gone, so the system cannot reuse them before.
        unsafe { self.ring.submitter().register_buffers(&vectors)? };
        self.registered = pieces;
        Ok(())
    }

    /// Index of the registered buffer that contains all of this piece.
    fn registered_in(&self, piece: &Piece) -> Option<u16> {
        let (start, end) = (piece.address as usize, piece.address as usize + piece.bytes);
        let index = self.registered.partition_point(|(from, _)| *from <= start).checked_sub(1)?;
        (end <= self.registered[index].1).then_some(index as u16)
    }

    fn entry(&mut self, op: Op) -> squeue::Entry {
        let slot = self.free.pop().unwrap_or_default();
        let file = Fixed(0);
        let mut vectors = Vec::new();
        let entry = match (op.kind, op.pieces.as_slice()) {
            (OpKind::Sync, _) => {
                opcode::Fsync::new(file).flags(io_uring::types::FsyncFlags::DATASYNC).build()
            }
            // Only for reads. Writes from registered huge pages reached 0.69 to 0.85 of the throughput of vectors, and
            // 0.93 from pages of 4 kB. Reads are as fast either way. (Blocks of 2 and 4 MiB, ext4 on virtio, Linux
            // 6.18, measured in turns.)
            (OpKind::Read, [piece]) if let Some(index) = self.registered_in(piece) => {
                opcode::ReadFixed::new(file, piece.address, piece.bytes as u32, index)
                    .offset(op.offset)
                    .build()
            }
            (kind, pieces) => {
                let vector =
                    |piece: &Piece| libc::iovec { iov_base: piece.address.cast(), iov_len: piece.bytes };
                vectors = pieces.iter().map(vector).collect();
                let (start, count) = (vectors.as_ptr(), vectors.len() as u32);
                match kind {
                    OpKind::Read => opcode::Readv::new(file, start, count).offset(op.offset).build(),
                    _ => opcode::Writev::new(file, start, count).offset(op.offset).build(),
                }
            }
        };
        self.slots[slot] = Some((op.id, vectors));
        entry.user_data(slot as u64)
    }

    fn push(&mut self, entry: &squeue::Entry) {
        loop {
            // SAFETY: everything that the entry points to stays valid until its completion. This value owns the file,
            // the vectors in `slots` and the boxed wake count; the contract of `post` covers the pieces.
            if unsafe { self.ring.submission().push(entry) }.is_ok() {
                return;
            }
            // Only this thread fills the queue, and submitting empties it; a refusal passes when something has ended.
            if self.ring.submit().is_err() {
                std::thread::yield_now();
            }
        }
    }

    fn arm_wake(&mut self) {
        if !self.wake_posted {
            let wake_count: *mut u64 = &mut *self.wake_count;
            let fd = io_uring::types::Fd(self.wake_fd.as_raw_fd());
            let entry = opcode::Read::new(fd, wake_count.cast(), 8).build().user_data(WAKE);
            self.push(&entry);
            self.wake_posted = true;
        }
    }

    fn reap(&mut self, ended: &mut Vec<Completion>) {
        let completions = self.ring.completion();
        for completion in completions {
            if completion.user_data() == WAKE {
                self.wake_posted = false;
                continue;
            }
            let slot = completion.user_data() as usize;
            let Some((id, _)) = self.slots.get_mut(slot).and_then(Option::take) else { continue };
            self.free.push(slot);
            let result = completion.result();
            let result =
                if result < 0 { Err(io::Error::from_raw_os_error(-result)) } else { Ok(result as usize) };
            ended.push(Completion { id, result });
        }
    }
}

impl Io for UringQueue {
    unsafe fn post(&mut self, op: Op) {
        assert!(!self.free.is_empty(), "more operations are posted than there is room for");
        let entry = self.entry(op);
        self.push(&entry);
    }

    fn room(&self) -> usize {
        self.free.len()
    }

    fn wait(&mut self, timeout: Duration, ended: &mut Vec<Completion>) -> io::Result<()> {
        self.arm_wake();
        let time = Timespec::from(timeout);
        let args = SubmitArgs::new().timespec(&time);
        let entered = if timeout.is_zero() {
            self.ring.submitter().submit_and_wait(0)
        } else {
            self.ring.submitter().submit_with_args(1, &args)
        };
        self.reap(ended);
        match entered {
            Ok(_) => Ok(()),
            // The timeout, a signal, or a full completion queue ended the wait.
            Err(error)
                if matches!(
                    error.raw_os_error(),
                    Some(libc::ETIME | libc::EINTR | libc::EBUSY | libc::EAGAIN)
                ) =>
            {
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    fn waker(&self) -> Waker {
        let fd = Arc::clone(&self.wake_fd);
        Arc::new(move || {
            // This fails only if the counter is full, after 2^64 wakes that were not read; then a wake is due anyway.
            let _ = rustix::io::write(fd.as_fd(), &1u64.to_ne_bytes());
        })
    }
}

impl Drop for UringQueue {
    fn drop(&mut self) {
        // Reap every operation, because the kernel uses its memory, and the wake-up's read writes into this value.
        (self.waker())();
        let mut ended = Vec::new();
        while self.free.len() < ENTRIES as usize || self.wake_posted {
            let _ = self.ring.submit_and_wait(1);
            self.reap(&mut ended);
        }
        tracing::trace!(file = self.file.as_raw_fd(), "ring drained");
    }
}
