//! The words by which a worker cancels copies that the daemon may still do.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use crate::gpu::WorkerGpu;

/// 24 bytes at a fixed address, which the daemon reads by process_vm before and after each batch:
///
/// ```text
/// +0   process nonce, 16 bytes
/// +16  epoch, little-endian u64
/// ```
#[repr(C)]
#[derive(Debug)]
struct Words {
    nonce: [u8; 16],
    epoch: AtomicU64,
}

/// Owns the fence's words; their address stays the same while it lives. With a GPU they stand in its memory too, for
/// the copies that it does.
#[derive(Debug)]
pub(crate) struct Fence {
    words: Box<Words>,
    gpu: Option<Arc<WorkerGpu>>,
}

impl Fence {
    pub(crate) fn new(nonce: [u8; 16], gpu: Option<Arc<WorkerGpu>>) -> Self {
        let fence = Self { words: Box::new(Words { nonce, epoch: AtomicU64::new(1) }), gpu };
        fence.write_to_gpu();
        fence
    }

    pub(crate) fn address(&self) -> u64 {
        &raw const *self.words as u64
    }

    pub(crate) fn nonce(&self) -> [u8; 16] {
        self.words.nonce
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.words.epoch.load(Ordering::SeqCst)
    }

    /// From here on no copy that was asked for under the former epoch can be committed.
    pub(crate) fn raise(&self) {
        self.words.epoch.fetch_add(1, Ordering::SeqCst);
        self.write_to_gpu();
    }

    fn write_to_gpu(&self) {
        if let Some(gpu) = &self.gpu {
            gpu.write_fence(&self.words.nonce, &self.words.epoch);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_lie_as_the_daemon_reads_them() {
        let fence = Fence::new(*b"0123456789abcdef", None);
        fence.raise();
        let words = &*fence.words;
        let base = &raw const *words as usize;
        assert_eq!(fence.address() as usize, base);
        assert_eq!(&raw const words.nonce as usize, base);
        assert_eq!(&raw const words.epoch as usize, base + 16);
        assert_eq!(fence.epoch(), 2);
        assert_eq!(fence.nonce(), *b"0123456789abcdef");
    }
}
