//! The fence: words in a worker's memory by which it voids copies that the daemon may still make.

use std::mem::offset_of;
use std::sync::atomic::AtomicU64;

/// Length of a fence in bytes.
pub const FENCE_BYTES: usize = 24;
/// Offset of the epoch in a fence.
pub(crate) const EPOCH_OFFSET: usize = 16;

/// The contents of a fence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FenceValue {
    /// Identifies the process and its role. A later process with the same pid has another nonce.
    pub nonce: [u8; 16],
    /// Grows each time that the worker gives copies up. A copy counts only if it was requested at this epoch and ended at it.
    pub epoch: u64,
}

impl FenceValue {
    /// The bytes in memory: the nonce, then the epoch, little-endian.
    pub fn to_bytes(self) -> [u8; FENCE_BYTES] {
        let mut bytes = [0; FENCE_BYTES];
        bytes[..EPOCH_OFFSET].copy_from_slice(&self.nonce);
        bytes[EPOCH_OFFSET..].copy_from_slice(&self.epoch.to_le_bytes());
        bytes
    }

    /// Decodes the bytes that were read from a worker's memory.
    pub fn from_bytes(bytes: [u8; FENCE_BYTES]) -> Self {
        let mut halves = ([0; 16], [0; 8]);
        halves.0.copy_from_slice(&bytes[..EPOCH_OFFSET]);
        halves.1.copy_from_slice(&bytes[EPOCH_OFFSET..]);
        Self { nonce: halves.0, epoch: u64::from_le_bytes(halves.1) }
    }
}

/// The fence in the worker's host memory. The hosts that we run on are little-endian.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Words {
    pub(crate) nonce: [u8; 16],
    pub(crate) epoch: AtomicU64,
}

const _: () = assert!(size_of::<Words>() == FENCE_BYTES && offset_of!(Words, epoch) == EPOCH_OFFSET);
const _: () = assert!(offset_of!(Words, nonce) == 0 && cfg!(target_endian = "little"));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let value = FenceValue { nonce: *b"0123456789abcdef", epoch: 0x0807_0605_0403_0201 };
        let bytes = value.to_bytes();
        assert_eq!(&bytes[..16], b"0123456789abcdef");
        assert_eq!(bytes[16..], [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(FenceValue::from_bytes(bytes), value);
    }
}
