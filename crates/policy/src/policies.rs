//! The replacement policies, one a file.

mod arc;
mod learned;
mod lru;
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

/// When blocks came, for policies that evict in about that order. A prompt may come by and by, each time with what continues
/// the part before; as long as that part came lately, they are to be evicted as if they had come together, the tail first.
#[derive(Default)]
struct Arrivals {
    came: PerSlot<u32>,
    blocks: u32,
}

impl Arrivals {
    /// One block in so many of a queue came lately.
    const LATELY: usize = 4;

    /// Notes that `run` comes into a queue of `len` blocks. `parent`, if it is in that queue, is the block that the run
    /// continues; it is answered if it came lately.
    fn add(&mut self, run: &[u32], parent: Option<u32>, len: usize) -> Option<u32> {
        let age = |parent: &u32| self.blocks.wrapping_sub(self.came.get(*parent)) as usize;
        let parent = parent.filter(|parent| age(parent) <= len / Self::LATELY);
        let came = parent.map_or(self.blocks, |parent| self.came.get(parent));
        run.iter().for_each(|&slot| self.came.set(slot, came));
        self.blocks = self.blocks.wrapping_add(run.len() as u32);
        parent
    }

    fn heap_bytes(&self) -> usize {
        self.came.heap_bytes()
    }
}

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
