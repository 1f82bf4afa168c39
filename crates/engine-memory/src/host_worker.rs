//! A worker's fence in host memory.

use std::sync::atomic::Ordering;

use crate::fence::{FenceValue, Words};

/// Owns the fence's words, which the daemon reads by process_vm. Their address does not change.
#[derive(Debug)]
pub struct HostFence {
    words: Box<Words>,
}

impl HostFence {
    /// A fence at epoch 1.
    pub fn new(nonce: [u8; 16]) -> Self {
        Self { words: Box::new(Words { nonce, epoch: 1.into() }) }
    }

    /// Address in this process, for the daemon.
    pub fn address(&self) -> u64 {
        (&raw const *self.words).expose_provenance() as u64
    }

    /// The process's nonce.
    pub fn nonce(&self) -> [u8; 16] {
        self.words.nonce
    }

    /// The epoch that new requests name.
    pub fn epoch(&self) -> u64 {
        self.words.epoch.load(Ordering::SeqCst)
    }

    /// The fence as the daemon reads it.
    pub fn value(&self) -> FenceValue {
        FenceValue { nonce: self.nonce(), epoch: self.epoch() }
    }

    /// Voids all copies out that were requested at a lower epoch: from here on they cannot be committed.
    pub fn raise_to(&self, epoch: u64) {
        self.words.epoch.fetch_max(epoch, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_lie_as_the_daemon_reads_them() {
        let fence = HostFence::new(*b"0123456789abcdef");
        fence.raise_to(2);
        let words = &*fence.words;
        let base = &raw const *words as usize;
        assert_eq!(fence.address() as usize, base);
        assert_eq!(&raw const words.nonce as usize, base);
        assert_eq!(&raw const words.epoch as usize, base + 16);
        assert_eq!(fence.epoch(), 2);
        assert_eq!(fence.nonce(), *b"0123456789abcdef");
        assert_eq!(fence.value(), FenceValue { nonce: *b"0123456789abcdef", epoch: 2 });
    }
}
