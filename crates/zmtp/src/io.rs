//! Sessions over tokio's TCP sockets.

mod connection;
mod dealer;
mod listener;
mod peer_options;
mod subscriber;

pub use connection::ConnectionError;
pub use dealer::Dealer;
pub use listener::{Counts, Listener, ListenerOptions, Received};
pub use peer_options::PeerOptions;
pub use subscriber::Subscriber;
