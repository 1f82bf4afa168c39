//! How long the listening side of a connection may place bytes of its peer.
//!
//! ```text
//!  listening side                                   connecting side
//!   stamp = its clock  ---- Ack, Pong: stamp ---->   has the connection: notes the stamp
//!   places until       <--- Write, Ping: stamp ---   ...
//!   stamp + PLACES                                   ends the connection, then counts LEASE and uses the memory
//! ```
//! The connecting side cannot say back a stamp before it was made, and says nothing after it has ended the connection. So it
//! had the connection when the stamp was made, and its LEASE is over later than LEASE after the stamp: no byte is placed
//! then. What the bytes themselves waited for, in a socket or a network, does not matter; that bytes come at all says
//! nothing, since they may have been sent by somebody who ended the connection long ago.
//!
//! The two clocks do not have to agree, only to run at about the same rate. This one goes on while the host is suspended.
//! What is left over, LEASE less [`PLACES`], is for a thread that has looked at its clock and is stopped before the call that
//! places is over. User space cannot do both at once: stopped there for longer, a process that goes on makes this one call.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use crate::wire::BadFrame;

/// How old the latest stamp may be that the peer has said back. It comes behind all that is queued on the connection, in both
/// directions, and a connection on which that takes longer breaks; so it is longer than a busy machine needs to answer.
pub(crate) const PLACES: Duration = Duration::from_millis(2500);

/// Of a connection of a peer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lease {
    /// The peer had the connection when the clock said this.
    stamp: Duration,
}

impl Lease {
    /// Of a peer that is asked now for what only this connection can answer.
    pub(crate) fn begin() -> Lease {
        Lease { stamp: clock() }
    }

    /// The peer has said back a stamp, 0 if it knows none.
    pub(crate) fn renew(&mut self, stamp: u64) -> Result<(), BadFrame> {
        let stamp = Duration::from_nanos(stamp);
        if stamp > clock() {
            return Err(BadFrame("a stamp of the future"));
        }
        self.stamp = self.stamp.max(stamp);
        Ok(())
    }

    /// Whether its bytes may be placed now. To be asked right before.
    pub(crate) fn holds(&self) -> bool {
        self.holds_for(Duration::ZERO)
    }

    /// The same for what takes so long once it was begun.
    pub(crate) fn holds_for(&self, duration: Duration) -> bool {
        clock() + duration < self.stamp + PLACES
    }
}

/// To be sent to a peer that says it back.
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
