//! Prometheus metrics. `table.rs` names them all, and the reference page is made from it.

pub(crate) mod events;
pub(crate) mod page;
mod scrape;
mod table;
