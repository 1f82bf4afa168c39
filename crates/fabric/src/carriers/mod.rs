//! This crate's carriers. Each folder holds one [`crate::Carrier`]; [`built_in`] lists them in the order in which an
//! engine opens them.

use std::fmt;
use std::io;
use std::sync::Arc;

use self::cuda::Cuda;
use self::process_vm::ProcessVm;
use self::slots::SlotPool;
use self::socket::{SocketCarrier, SocketOptions};
use crate::carrier::Carrier;
use crate::watch::Watch;

pub(crate) mod awaited;
mod card;
pub(crate) mod cuda;
pub(crate) mod process_vm;
pub(crate) mod slots;
pub(crate) mod socket;

pub(crate) const CUDA: &str = "cuda";
pub(crate) const CMA: &str = "cma";
pub(crate) const TCP: &str = "tcp";
pub(crate) const TCP_SLOTS: &str = "tcp-slots";

/// A carrier that an engine may open. Callers require it by its name, and [`crate::PathStatus`] shows that name.
pub struct NewCarrier<'a> {
    pub(crate) name: &'static str,
    pub(crate) open: Open<'a>,
}

/// The name under which it was offered, and the open carrier.
pub(crate) type Named = (&'static str, Box<dyn Carrier>);

type Open<'a> = Box<dyn FnOnce(Watch) -> io::Result<Box<dyn Carrier>> + 'a>;

impl<'a> NewCarrier<'a> {
    /// The engine calls `open` only if it is to have the carrier. The carrier may watch its descriptors with the [`Watch`].
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

/// Everything that [`built_in`] passes on to the carriers of this crate.
#[derive(Debug)]
pub(crate) struct Setup {
    pub(crate) sockets: SocketOptions,
    pub(crate) slots: Arc<SlotPool>,
    pub(crate) copy_threads: usize,
    pub(crate) chunk_bytes: u64,
}

/// All carriers of this crate, not opened yet.
pub(crate) fn built_in(setup: Setup) -> Vec<NewCarrier<'static>> {
    let Setup { sockets, slots, copy_threads, chunk_bytes } = setup;
    let (me, of_hosts) = (sockets.me, sockets.clone());
    vec![
        NewCarrier::new(CUDA, move |watch| Ok(Box::new(Cuda::open(me, watch)?))),
        NewCarrier::new(CMA, move |watch| {
            Ok(Box::new(ProcessVm::open(me, watch, copy_threads, chunk_bytes)?))
        }),
        NewCarrier::new(TCP, move |watch| Ok(Box::new(SocketCarrier::tcp(watch, of_hosts)))),
        NewCarrier::new(TCP_SLOTS, move |watch| {
            Ok(Box::new(SocketCarrier::tcp_slots(watch, sockets, slots)))
        }),
    ]
}
