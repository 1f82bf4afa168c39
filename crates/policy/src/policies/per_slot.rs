//! [`PerSlot`]: a growing array by slot.

/// A small value for each slot; the default until it is set.
#[derive(Default)]
pub(super) struct PerSlot<T>(Vec<T>);

impl<T: Copy + Default> PerSlot<T> {
    pub(super) fn get(&self, slot: u32) -> T {
        self.0.get(slot as usize).copied().unwrap_or_default()
    }

    pub(super) fn heap_bytes(&self) -> usize {
        self.0.capacity() * size_of::<T>()
    }

    pub(super) fn set(&mut self, slot: u32, value: T) {
        if self.0.len() <= slot as usize {
            self.0.resize(slot as usize + 1, T::default());
        }
        self.0[slot as usize] = value;
    }
}
