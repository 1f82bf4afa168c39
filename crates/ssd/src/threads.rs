//! [`Threads`]: the I/O interface where io_uring is refused. A few threads call preadv, pwritev and fdatasync.
#![expect(unsafe_code, reason = "operations carry addresses")]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};

use crate::io::{Completion, Io, Op, OpKind, Waker};

/// Enough to keep a device busy with transfers of about 100 KiB.
const THREADS: usize = 4;
/// Limit of operations that are posted and not completed.
const IN_FLIGHT: usize = 64;

enum Event {
    Completed(Completion),
    Woken,
}

/// A pool of threads for one file.
pub(crate) struct Threads {
    /// None once the pool is being dropped.
    work: Option<Sender<Op>>,
    events: Receiver<Event>,
    wake: Sender<Event>,
    threads: Vec<JoinHandle<()>>,
    in_flight: usize,
}

impl Threads {
    pub(crate) fn new(file: File) -> io::Result<Threads> {
        let (work, posted) = crossbeam_channel::unbounded::<Op>();
        let (wake, events) = crossbeam_channel::unbounded();
        let file = Arc::new(file);
        let start = |number| {
            let (posted, events, file) = (posted.clone(), wake.clone(), Arc::clone(&file));
            let work = move || {
                for op in &posted {
                    let result = carry_out(&file, &op);
                    if events.send(Event::Completed(Completion { id: op.id, result })).is_err() {
                        return;
                    }
                }
            };
            std::thread::Builder::new().name(format!("kvlane-ssd-io{number}")).spawn(work)
        };
        let threads = (0..THREADS).map(start).collect::<io::Result<Vec<_>>>()?;
        Ok(Threads { work: Some(work), events, wake, threads, in_flight: 0 })
    }

    fn take(&mut self, event: Event, ended: &mut Vec<Completion>) {
        if let Event::Completed(end) = event {
            self.in_flight -= 1;
            ended.push(end);
        }
    }
}

fn carry_out(file: &File, op: &Op) -> io::Result<usize> {
    let vectors: Vec<libc::iovec> = op
        .pieces
        .iter()
        .map(|piece| libc::iovec { iov_base: piece.address.cast(), iov_len: piece.bytes })
        .collect();
    let (fd, count, offset) = (file.as_raw_fd(), vectors.len() as libc::c_int, op.offset as libc::off_t);
    // SAFETY: the vectors live during the call. By the contract of `Io::post`, the memory that they name is valid until
    // the operation is handed out.
    let moved = unsafe {
        match op.kind {
            OpKind::Read => libc::preadv(fd, vectors.as_ptr(), count, offset),
            OpKind::Write => libc::pwritev(fd, vectors.as_ptr(), count, offset),
            OpKind::Sync => libc::fdatasync(fd) as isize,
        }
    };
    usize::try_from(moved).map_err(|_| io::Error::last_os_error())
}

impl Io for Threads {
    unsafe fn post(&mut self, op: Op) {
        self.in_flight += 1;
        let (id, work) = (op.id, self.work.as_ref());
        if work.is_none_or(|work| work.send(op).is_err()) {
            let gone = Err(io::Error::other("the threads of a device have ended"));
            // This cannot fail, because the receiver is a field of this value.
            let _ = self.wake.send(Event::Completed(Completion { id, result: gone }));
        }
    }

    fn room(&self) -> usize {
        IN_FLIGHT.saturating_sub(self.in_flight)
    }

    fn wait(&mut self, timeout: Duration, ended: &mut Vec<Completion>) -> io::Result<()> {
        match self.events.recv_timeout(timeout) {
            Ok(event) => self.take(event, ended),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return Ok(()),
        }
        while let Ok(event) = self.events.try_recv() {
            self.take(event, ended);
        }
        Ok(())
    }

    fn waker(&self) -> Waker {
        let wake = self.wake.clone();
        Arc::new(move || {
            // This fails once the device is closed, when no wait needs to end.
            let _ = wake.send(Event::Woken);
        })
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        // The threads finish the posted operations, whose memory they use, and end when the channel is closed.
        self.work = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
