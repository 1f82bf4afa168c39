//! The replacement policies, one in each file.

mod arc;
mod arrivals;
mod learned;
mod lru;
mod per_slot;
mod s3fifo;
mod sieve;
mod tinylfu;
mod wtinylfu;

pub use arc::Arc;
pub use learned::Learned;
pub use lru::Lru;
pub use s3fifo::S3Fifo;
pub use sieve::Sieve;
pub use tinylfu::TinyLfu;
pub use wtinylfu::WTinyLfu;
