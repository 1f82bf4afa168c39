//! The fake's events: two counters, in memory that processes can share.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use kvlane_gpu::{IpcHandle, code};
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};

use super::handle::{EVENT, Handle};

const PAGE_BYTES: u64 = 4096;

/// The number of records of the event, and the latest record that is done.
#[repr(C)]
#[derive(Debug, Default)]
pub(super) struct Counters {
    recorded: AtomicU64,
    done: AtomicU64,
}

#[derive(Debug)]
pub(super) enum Event {
    Own(Box<Counters>),
    Shared(Page),
}

impl Event {
    pub(super) fn new() -> Event {
        Event::Own(Box::default())
    }

    pub(super) fn shared() -> io::Result<Event> {
        let file = File::from(rustix::fs::memfd_create("kvlane-fake-event", MemfdFlags::CLOEXEC)?);
        file.set_len(PAGE_BYTES)?;
        Ok(Event::Shared(Page::map(file)?))
    }

    pub(super) fn open(handle: &IpcHandle) -> Result<Event, u32> {
        let handle = Handle::decode(handle, EVENT)?;
        if handle.bytes != PAGE_BYTES {
            return Err(code::INVALID_HANDLE);
        }
        Ok(Event::Shared(Page::map(handle.open()?).map_err(|_| code::MAP_FAILED)?))
    }

    pub(super) fn export(&self) -> Result<IpcHandle, u32> {
        match self {
            Event::Own(_) => Err(code::INVALID_VALUE),
            Event::Shared(page) => Ok(Handle::new(&page.file, PAGE_BYTES)?.encode(EVENT)),
        }
    }

    /// Begins a record and returns its number.
    pub(super) fn record(&self) -> u64 {
        self.counters().recorded.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// Marks a record and all before it as done.
    pub(super) fn finish(&self, record: u64) {
        self.counters().done.fetch_max(record, Ordering::AcqRel);
    }

    /// The latest record; 0 if there is none.
    pub(super) fn latest(&self) -> u64 {
        self.counters().recorded.load(Ordering::Acquire)
    }

    pub(super) fn is_done(&self, record: u64) -> bool {
        self.counters().done.load(Ordering::Acquire) >= record
    }

    fn counters(&self) -> &Counters {
        match self {
            Event::Own(counters) => counters,
            Event::Shared(page) => page.counters(),
        }
    }
}

/// A mapped page of counters.
#[derive(Debug)]
pub(super) struct Page {
    base: *mut Counters,
    file: File,
}

// SAFETY: the page belongs to the process, not to a thread, and only its atomic counters are accessed.
unsafe impl Send for Page {}
// SAFETY: as above.
unsafe impl Sync for Page {}

impl Page {
    fn map(file: File) -> io::Result<Page> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let bytes = PAGE_BYTES as usize;
        // SAFETY: the kernel picks an unused range, so no memory of this process is replaced.
        let base =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, prot, MapFlags::SHARED, &file, 0)? };
        Ok(Page { base: base.cast(), file })
    }

    fn counters(&self) -> &Counters {
        // SAFETY: the page is mapped while this lives, aligned, and larger than the counters, which are atomics for
        // which every bit pattern is valid.
        unsafe { &*self.base }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: base and length are those of the mapping, and references to the counters do not outlive this.
        let unmapped = unsafe { rustix::mm::munmap(self.base.cast(), PAGE_BYTES as usize) };
        if let Err(error) = unmapped {
            // Log: a simulated GPU kept memory of its process.
            tracing::error!(%error, "cannot unmap an event of a fake device");
        }
    }
}
