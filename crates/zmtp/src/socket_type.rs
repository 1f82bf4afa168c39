//! [`SocketType`]: the types of sockets, and which of them talk to each other.

/// A socket's type, as READY names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SocketType {
    /// Talks to many peers, and addresses each by its identity.
    Router,
    /// Sends and receives in any order.
    Dealer,
    /// Sends a request, then waits for the reply.
    Req,
    /// Receives a request, then sends the reply.
    Rep,
    /// Publishes messages to subscribers.
    Pub,
    /// Publishes, and receives subscriptions as messages.
    XPub,
    /// Subscribes to topics of a publisher.
    Sub,
    /// Subscribes by sending messages.
    XSub,
}

impl SocketType {
    const ALL: [Self; 8] =
        [Self::Router, Self::Dealer, Self::Req, Self::Rep, Self::Pub, Self::XPub, Self::Sub, Self::XSub];

    /// The type's name on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Self::Router => "ROUTER",
            Self::Dealer => "DEALER",
            Self::Req => "REQ",
            Self::Rep => "REP",
            Self::Pub => "PUB",
            Self::XPub => "XPUB",
            Self::Sub => "SUB",
            Self::XSub => "XSUB",
        }
    }

    /// The type of a name on the wire. None for PUSH, PULL and PAIR too, because no peer of ours can have them.
    pub fn of_name(name: &[u8]) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name().as_bytes() == name)
    }

    /// Whether the RFC lets the two types talk. The relation is symmetric.
    pub fn talks_to(self, peer: Self) -> bool {
        use SocketType::{Dealer, Pub, Rep, Req, Router, Sub, XPub, XSub};
        match self {
            Router => matches!(peer, Router | Dealer | Req),
            Dealer => matches!(peer, Router | Dealer | Rep),
            Req => matches!(peer, Router | Rep),
            Rep => matches!(peer, Dealer | Req),
            Pub | XPub => matches!(peer, Sub | XSub),
            Sub | XSub => matches!(peer, Pub | XPub),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back_and_talking_is_mutual() {
        for one in SocketType::ALL {
            assert_eq!(SocketType::of_name(one.name().as_bytes()), Some(one));
            for other in SocketType::ALL {
                assert_eq!(one.talks_to(other), other.talks_to(one), "{one:?} {other:?}");
            }
        }
        assert_eq!(SocketType::of_name(b"router"), None);
        assert!(!SocketType::Router.talks_to(SocketType::Pub));
    }
}
