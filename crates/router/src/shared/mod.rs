//! State that the router's threads share: the nodes and their scheduler, counters, settings and permits.
//!
//! - [`Shared`]: all of it; nodes and scheduler are behind one lock that threads hold for microseconds.
//! - [`ProxySettings`]: limits and deadlines.
//! - [`Keys`]: the keys that clients show.

mod body_scanner;
mod connection_slots;
mod keys;
mod settings;
mod state;
mod stopping;

pub(crate) use self::body_scanner::OutlineError;
pub use self::{keys::Keys, settings::ProxySettings, state::Shared};
