//! The descriptors on which an engine's thread sleeps.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};

/// Bits of a tag that its owner chooses; those above say whose it is.
const TAG_BITS: u32 = 56;

/// What somebody wants to hear of a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Interest {
    /// That it can be read, or has ended.
    pub reads: bool,
    /// That it can be written.
    pub writes: bool,
}

impl Interest {
    /// That it can be read.
    pub const READS: Interest = Interest { reads: true, writes: false };

    fn flags(self) -> EventFlags {
        let reads = if self.reads { EventFlags::IN } else { EventFlags::empty() };
        let writes = if self.writes { EventFlags::OUT } else { EventFlags::empty() };
        reads | writes
    }
}

/// The set of all descriptors of an engine, as one of its parts sees it: that part's descriptors by tags of its own choice.
#[derive(Debug, Clone)]
pub struct Watch {
    epoll: Arc<OwnedFd>,
    owner: u8,
}

/// What has happened to a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Happened {
    pub(crate) owner: u8,
    pub(crate) tag: u64,
}

impl Watch {
    pub(crate) fn new() -> io::Result<Watch> {
        Ok(Watch { epoll: Arc::new(epoll::create(CreateFlags::CLOEXEC)?), owner: 0 })
    }

    /// The same set, for another part.
    pub(crate) fn of(&self, owner: u8) -> Watch {
        Watch { epoll: Arc::clone(&self.epoll), owner }
    }

    /// From now on the owner hears of this descriptor by the tag, of 56 bits at most.
    ///
    /// # Errors
    /// Of epoll_ctl.
    pub fn add(&self, descriptor: impl AsFd, tag: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, descriptor, self.data(tag), interest.flags())?)
    }

    /// As [`Watch::add`], of one that was added. It needs no more of the kernel's memory for this.
    ///
    /// # Errors
    /// Of epoll_ctl.
    pub fn change(&self, descriptor: impl AsFd, tag: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::modify(&self.epoll, descriptor, self.data(tag), interest.flags())?)
    }

    /// Nobody hears of it any more. To be called before it is closed: where a forked process has it too, closing it here would
    /// leave it in the set for ever.
    pub fn remove(&self, descriptor: impl AsFd) {
        let _ = epoll::delete(&self.epoll, descriptor);
    }

    /// What has happened by now, or until the time is over.
    pub(crate) fn wait(&self, events: &mut Vec<Event>, timeout: Duration) {
        if !timeout.is_zero() {
            crate::audit::takes_time("a wait for descriptors");
        }
        events.clear();
        let seconds = timeout.as_secs().min(60) as i64;
        let timeout = Timespec { tv_sec: seconds, tv_nsec: timeout.subsec_nanos().into() };
        // An interrupted call brought nothing.
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
