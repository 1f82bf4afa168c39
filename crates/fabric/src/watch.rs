//! [`Watch`]: the epoll set on which an engine's thread sleeps, shared by the control connections and all carriers.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};

/// The low bits of an event's data: the tag that the owner chose. The bits above are the owner.
const TAG_BITS: u32 = 56;

/// The conditions of a descriptor that the watch reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Interest {
    /// The descriptor can be read, or has ended.
    pub reads: bool,
    /// The descriptor can be written.
    pub writes: bool,
}

impl Interest {
    /// Reports only that a descriptor can be read, or has ended.
    pub const READS: Interest = Interest { reads: true, writes: false };

    fn flags(self) -> EventFlags {
        let reads = if self.reads { EventFlags::IN } else { EventFlags::empty() };
        let writes = if self.writes { EventFlags::OUT } else { EventFlags::empty() };
        reads | writes
    }
}

/// One owner's view of the engine's epoll set: its own descriptors, by tags that it chooses.
#[derive(Debug, Clone)]
pub struct Watch {
    epoll: Arc<OwnedFd>,
    owner: u8,
}

/// A descriptor that is ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Happened {
    pub(crate) owner: u8,
    pub(crate) tag: u64,
}

impl Watch {
    pub(crate) fn new() -> io::Result<Watch> {
        Ok(Watch { epoll: Arc::new(epoll::create(CreateFlags::CLOEXEC)?), owner: 0 })
    }

    /// The same set, for another owner.
    pub(crate) fn of(&self, owner: u8) -> Watch {
        Watch { epoll: Arc::clone(&self.epoll), owner }
    }

    /// Adds a descriptor. The engine passes `tag`, of at most 56 bits, to [`crate::Carrier::descriptor_ready`].
    ///
    /// # Errors
    /// Those of epoll_ctl(2).
    pub fn add(&self, descriptor: impl AsFd, tag: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, descriptor, self.data(tag), interest.flags())?)
    }

    /// Changes the tag or interest of a descriptor that was added. The kernel needs no more memory for it.
    ///
    /// # Errors
    /// Those of epoll_ctl(2).
    pub fn change(&self, descriptor: impl AsFd, tag: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::modify(&self.epoll, descriptor, self.data(tag), interest.flags())?)
    }

    /// Removes a descriptor. Call it before closing the descriptor: if a forked process has a copy, closing alone would leave it
    /// in the set for ever.
    pub fn remove(&self, descriptor: impl AsFd) {
        let _ = epoll::delete(&self.epoll, descriptor);
    }

    /// Waits until a descriptor is ready or `timeout` passes, and fills `events`, whose capacity bounds their number.
    pub(crate) fn wait(&self, events: &mut Vec<Event>, timeout: Duration) {
        if !timeout.is_zero() {
            crate::audit::takes_time("a wait for descriptors");
        }
        events.clear();
        let seconds = timeout.as_secs().min(60) as i64;
        let timeout = Timespec { tv_sec: seconds, tv_nsec: timeout.subsec_nanos().into() };
        // An interrupted call has no events.
        let _ = epoll::wait(&self.epoll, spare_capacity(events), Some(&timeout));
    }

    fn data(&self, tag: u64) -> EventData {
        debug_assert!(tag >> TAG_BITS == 0, "{tag:#x}");
        EventData::new_u64(u64::from(self.owner) << TAG_BITS | tag)
    }
}

impl Happened {
    pub(crate) fn of(event: &Event) -> Happened {
        let data = event.data.u64();
        Happened { owner: (data >> TAG_BITS) as u8, tag: data & ((1 << TAG_BITS) - 1) }
    }
}
