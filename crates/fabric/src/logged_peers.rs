//! Limits log lines about strangers: each address is logged once for each reason. So a stranger that connects again and again
//! does not fill the log.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

/// Log lines about strangers in the life of an engine.
const LINES_MAX: usize = 256;

/// The addresses that the log has named, each with the reason.
#[derive(Debug, Default)]
pub(crate) struct LoggedPeers(BTreeSet<(IpAddr, &'static str)>);

impl LoggedPeers {
    /// Records that a peer is logged for a reason. False: the caller must not log it. The log has named this address for this
    /// reason, with whatever port, or has [`LINES_MAX`] such lines.
    pub(crate) fn insert(&mut self, peer: Option<SocketAddr>, reason: &'static str) -> bool {
        let Some(peer) = peer else { return false };
        self.0.len() < LINES_MAX && self.0.insert((peer.ip(), reason))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each connection of a stranger was a line in the engine's log.
    #[test]
    fn an_address_is_named_once_and_not_too_many_are() {
        let mut logged = LoggedPeers::default();
        let peer = |host: [u8; 4], port: u16| Some(SocketAddr::from((host, port)));
        assert!(logged.insert(peer([10, 0, 0, 1], 1), "unproved"));
        assert!(!logged.insert(peer([10, 0, 0, 1], 2), "unproved"));
        assert!(logged.insert(peer([10, 0, 0, 1], 2), "too many"));
        assert!(!logged.insert(None, "unproved"));
        let news = (0..=u16::MAX).filter(|n| {
            let [high, low] = n.to_be_bytes();
            logged.insert(peer([11, 0, high, low], 1), "unproved")
        });
        assert_eq!(news.count(), LINES_MAX - 2);
    }
}
