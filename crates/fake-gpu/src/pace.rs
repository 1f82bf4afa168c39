//! The rates of the fake's links. Copies over one link share its rate, whichever streams they are in.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// How fast copies are at most, in bytes a second. Each direction of a link has its own rate.
#[derive(Debug, Clone, Copy)]
pub struct Rates {
    /// Within one GPU.
    pub own: u64,
    /// From one GPU to another.
    pub link: u64,
    /// Between a GPU and the host.
    pub pcie: u64,
}

/// The GPUs that hold the source and the destination, by the host's numbers. None: the host's memory.
pub(super) type Link = (Option<u32>, Option<u32>);

/// The time at which each link of this process is free again.
#[derive(Debug)]
pub(super) struct Pace {
    rates: Option<Rates>,
    free_at: Mutex<HashMap<Link, Instant>>,
}

impl Pace {
    pub(super) fn new(rates: Option<Rates>) -> Pace {
        Pace { rates, free_at: Mutex::default() }
    }

    /// Reserves a link for some bytes, behind those of copies that came before. Returns when they are over. None: at once.
    pub(super) fn reserve(&self, link: Link, bytes: u64) -> Option<Instant> {
        let Rates { own, link: other, pcie } = self.rates?;
        let rate = match link {
            (None, None) => return None,
            (from, to) if from == to => own,
            (Some(_), Some(_)) => other,
            _ => pcie,
        };
        let (now, time) = (Instant::now(), Duration::from_secs_f64(bytes as f64 / rate as f64));
        let mut free_at = self.free_at.lock();
        let end = free_at.get(&link).copied().unwrap_or(now).max(now) + time;
        free_at.insert(link, end);
        Some(end)
    }
}
