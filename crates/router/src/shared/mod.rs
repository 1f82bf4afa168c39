//! What the threads of the router share: the nodes and their scheduler, counters, settings and permits.
//!
//! - [`Shared`]: all of it, behind one lock that threads hold for microseconds.
//! - [`ProxySettings`]: limits and deadlines.
//! - [`Keys`]: the keys that clients show.

mod keys;
mod outlined;
mod places;
mod settings;
mod state;
mod stopping;

pub(crate) use self::outlined::OutlineError;
pub use self::{keys::Keys, settings::ProxySettings, state::Shared};
