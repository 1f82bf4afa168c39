//! Sessions over tokio's TCP sockets.

mod connection;
mod dealer;
mod listener;
mod subscriber;

pub use connection::{ConnectionError, PeerOptions};
pub use dealer::Dealer;
pub use listener::{Counts, Listener, ListenerOptions, Received};
pub use subscriber::Subscriber;
