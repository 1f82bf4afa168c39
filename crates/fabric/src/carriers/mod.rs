//! What carries bytes between processes: each folder has one [`crate::Carrier`], and [`own`] lists them all.

use std::fmt;
use std::io;
use std::sync::Arc;

use self::process_vm::ProcessVm;
use self::slots::SlotPool;
use self::socket::{SocketCarrier, SocketOptions};
use crate::carrier::Carrier;
use crate::watch::Watch;

pub(crate) mod process_vm;
pub(crate) mod slots;
pub(crate) mod socket;

pub(crate) const CMA: &str = "cma";
pub(crate) const TCP: &str = "tcp";
pub(crate) const TCP_SLOTS: &str = "tcp-slots";

/// A carrier that an engine may open, with the name by which callers require it and by which [`crate::PathStatus`] shows it.
pub struct NewCarrier<'a> {
    pub(crate) name: &'static str,
    pub(crate) open: Open<'a>,
}

/// An open carrier and its name.
pub(crate) type Named = (&'static str, Box<dyn Carrier>);

type Open<'a> = Box<dyn FnOnce(Watch) -> io::Result<Box<dyn Carrier>> + 'a>;

impl<'a> NewCarrier<'a> {
    /// `open` is called if the engine is to have the carrier. The carrier may watch its descriptors with the [`Watch`].
    pub fn new(
        name: &'static str,
        open: impl FnOnce(Watch) -> io::Result<Box<dyn Carrier>> + 'a,
    ) -> NewCarrier<'a> {
        NewCarrier { name, open: Box::new(open) }
    }
}

impl fmt::Debug for NewCarrier<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("NewCarrier").field(&self.name).finish()
    }
}

/// What this crate's carriers are opened with.
#[derive(Debug)]
pub(crate) struct Setup {
    pub(crate) sockets: SocketOptions,
    pub(crate) slots: Arc<SlotPool>,
    pub(crate) copy_threads: usize,
    pub(crate) chunk_bytes: u64,
}

/// The carriers of this crate.
pub(crate) fn own(setup: Setup) -> Vec<NewCarrier<'static>> {
    let Setup { sockets, slots, copy_threads, chunk_bytes } = setup;
    let (me, of_hosts) = (sockets.me, sockets.clone());
    vec![
        NewCarrier::new(CMA, move |watch| {
            Ok(Box::new(ProcessVm::open(me, watch, copy_threads, chunk_bytes)?))
        }),
        NewCarrier::new(TCP, move |watch| Ok(Box::new(SocketCarrier::tcp(watch, of_hosts)))),
        NewCarrier::new(TCP_SLOTS, move |watch| {
            Ok(Box::new(SocketCarrier::tcp_slots(watch, sockets, slots)))
        }),
    ]
}
