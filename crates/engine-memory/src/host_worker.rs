//! A worker's fence in host memory.

use std::sync::atomic::Ordering;

use crate::fence::{FenceValue, Words};

/// Owns the fence's words, which the daemon reads by process_vm; their address stays the same while it lives.
#[derive(Debug)]
pub struct HostFence {
    words: Box<Words>,
}

impl HostFence {
    /// At epoch 1.
    pub fn new(nonce: [u8; 16]) -> Self {
        Self { words: Box::new(Words { nonce, epoch: 1.into() }) }
    }

    /// Where the daemon finds it in this process.
    pub fn address(&self) -> u64 {
        (&raw const *self.words).expose_provenance() as u64
    }

    /// The process's nonce.
    pub fn nonce(&self) -> [u8; 16] {
        self.words.nonce
    }

    /// What requests name now.
    pub fn epoch(&self) -> u64 {
        self.words.epoch.load(Ordering::SeqCst)
    }

    /// What the daemon reads.
    pub fn value(&self) -> FenceValue {
        FenceValue { nonce: self.nonce(), epoch: self.epoch() }
    }

    /// From here on no copy out that was asked for under a lower epoch can be committed.
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
