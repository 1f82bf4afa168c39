//! Prometheus metrics. `table.rs` names them all, and the reference page is made from it.

pub(crate) mod page;
pub(crate) mod recorder;
mod scrape;
pub(crate) mod table;
