//! The daemon's Prometheus metrics. `table.rs` lists all of them, and the reference page is generated from it.

pub(crate) mod events;
pub(crate) mod page;
pub(crate) mod scrape;
mod table;
