//! What the log has said of whom: strangers who come again and again do not fill it.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

/// Addresses of which anything is said.
const MOST: usize = 256;

/// Whom the log has named, and why.
#[derive(Debug, Default)]
pub(crate) struct Told(BTreeSet<(IpAddr, &'static str)>);

impl Told {
    /// Whether this is to be logged: the first time of each address, whatever its port, and only of the first few addresses.
    pub(crate) fn is_news(&mut self, peer: Option<SocketAddr>, what: &'static str) -> bool {
        let Some(peer) = peer else { return false };
        self.0.len() < MOST && self.0.insert((peer.ip(), what))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each connection of a stranger was a line in the engine's log.
    #[test]
    fn an_address_is_named_once_and_not_too_many_are() {
        let mut told = Told::default();
        let peer = |host: [u8; 4], port: u16| Some(SocketAddr::from((host, port)));
        assert!(told.is_news(peer([10, 0, 0, 1], 1), "unproved"));
        assert!(!told.is_news(peer([10, 0, 0, 1], 2), "unproved"));
        assert!(told.is_news(peer([10, 0, 0, 1], 2), "too many"));
        assert!(!told.is_news(None, "unproved"));
        let news = (0..=u16::MAX).filter(|n| {
            let [high, low] = n.to_be_bytes();
            told.is_news(peer([11, 0, high, low], 1), "unproved")
        });
        assert_eq!(news.count(), MOST - 2);
    }
}
