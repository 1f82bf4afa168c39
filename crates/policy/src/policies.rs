//! The replacement policies, one a file.

mod arc;
mod lru;
mod s3fifo;
mod sieve;
mod tinylfu;
mod wtinylfu;

pub use arc::Arc;
pub use lru::Lru;
pub use s3fifo::S3Fifo;
pub use sieve::Sieve;
pub use tinylfu::TinyLfu;
pub use wtinylfu::WTinyLfu;

/// A byte or word for each slot, zero until it is set.
#[derive(Default)]
struct PerSlot<T>(Vec<T>);

impl<T: Copy + Default> PerSlot<T> {
    fn get(&self, slot: u32) -> T {
        self.0.get(slot as usize).copied().unwrap_or_default()
    }

    fn heap_bytes(&self) -> usize {
        self.0.capacity() * size_of::<T>()
    }

    fn set(&mut self, slot: u32, value: T) {
        if self.0.len() <= slot as usize {
            self.0.resize(slot as usize + 1, T::default());
        }
        self.0[slot as usize] = value;
    }
}
