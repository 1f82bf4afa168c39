//! Leases: for how long the listening side of a connection may place bytes that the connecting side has sent.
//!
//! ```text
//!  listening side                                   connecting side
//!   stamp = its clock  ---- Ack, Pong: stamp ---->   has the connection: notes the stamp
//!   places until       <--- Write, Ping: stamp ---   ...
//!   stamp + PLACES                                   ends the connection, then counts LEASE and uses the memory
//! ```
//! Why no byte is placed after the connecting side's LEASE ([`crate::fences::LEASE`]) is over:
//! 1. The connecting side echoes a stamp only after it was made, and echoes nothing after it has closed the connection. So it
//!    still had the connection when the stamp was made.
//! 2. It starts to count LEASE after that. So its LEASE ends later than LEASE after the stamp, and the listening side stops
//!    placing at stamp + [`PLACES`], which is earlier.
//!
//! How long the bytes waited in a socket or a network does not matter. The arrival of bytes proves nothing, because the sender
//! may have closed the connection long ago.
//!
//! The two clocks need not agree, but must run at about the same rate. The listening side's runs on while the host is
//! suspended. The difference of LEASE and [`PLACES`] is for a thread that has read its clock and is stopped before the call that
//! places bytes ends. User space cannot check and place in one step: a thread stopped there for longer makes this one call late.
//! Such a call writes at most 4 MiB. The clock also stands still while a hypervisor stops the virtual machine and hides that.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use crate::wire::BadFrame;

/// The greatest age of the latest stamp that the peer has echoed. A stamp travels behind all that is queued on the connection,
/// in both directions. A connection where that takes longer breaks, so this is longer than a busy machine needs to answer.
pub(crate) const PLACES: Duration = Duration::from_millis(2500);

/// The lease of one connection that a peer made.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lease {
    /// The latest time on this side's clock at which the peer is known to have had the connection.
    stamp: Duration,
}

impl Lease {
    /// Starts a lease together with a challenge: the peer's answer, which only this connection can carry, proves that it had the
    /// connection now or later.
    pub(crate) fn begin() -> Lease {
        Lease { stamp: clock() }
    }

    /// Renews the lease with a stamp that the peer has echoed, 0 if it has got none. An older stamp changes nothing.
    ///
    /// # Errors
    /// The stamp is later than this side's clock.
    pub(crate) fn renew(&mut self, stamp: u64) -> Result<(), BadFrame> {
        let stamp = Duration::from_nanos(stamp);
        if stamp > clock() {
            return Err(BadFrame("a stamp of the future"));
        }
        self.stamp = self.stamp.max(stamp);
        Ok(())
    }

    /// Whether the peer's bytes may be placed now. Ask right before the call that places them.
    pub(crate) fn holds(&self) -> bool {
        self.holds_for(Duration::ZERO)
    }

    /// Whether a call that places bytes for this long may begin now.
    pub(crate) fn holds_for(&self, duration: Duration) -> bool {
        clock() + duration < self.stamp + PLACES
    }
}

/// A stamp of now, to be sent to a peer, which echoes it.
pub(crate) fn stamp() -> u64 {
    clock().as_nanos() as u64
}

fn clock() -> Duration {
    let time = clock_gettime(ClockId::Boottime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    #[test]
    fn a_lease_is_as_young_as_the_latest_stamp_that_came_back() {
        let mut lease = Lease { stamp: clock().saturating_sub(PLACES) };
        assert!(!lease.holds());
        let earlier = stamp();
        lease.renew(0).unwrap();
        assert!(!lease.holds(), "a peer that knows no stamp");
        let later = stamp();
        lease.renew(later).unwrap();
        lease.renew(earlier).unwrap();
        assert_eq!(lease.stamp, Duration::from_nanos(later), "a frame that waited says an earlier one");
        assert!(lease.holds() && lease.holds_for(PLACES / 2));
        assert!(!lease.holds_for(PLACES), "not to the end of what is begun then");
        assert!(lease.renew(later + 1_000_000_000_000).is_err(), "nobody gives more time than there was");
    }
}
