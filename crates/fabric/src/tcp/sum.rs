//! Checksums of bytes that cross sockets: crc32c, as in iSCSI (RFC 3720, B.4). TCP's own checksum has 16 bits, so it misses
//! one in many thousand of the errors that reach it.

use crc_fast::{CrcAlgorithm, Digest};

/// Bytes of a checksum, little-endian.
pub(crate) const SUM_BYTES: usize = 4;

/// A checksum in the making: bytes are added in their order.
pub(crate) struct Sum(Digest);

impl Sum {
    pub(crate) fn new() -> Sum {
        Sum(Digest::new(CrcAlgorithm::Crc32Iscsi))
    }

    pub(crate) fn add(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(crate) fn bytes(&self) -> [u8; SUM_BYTES] {
        // A crc32c has 32 bits.
        (self.0.finalize() as u32).to_le_bytes()
    }
}

impl std::fmt::Debug for Sum {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Sum({:02x?})", self.bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The values that RFC 3720 gives.
    #[test]
    fn it_is_crc32c_in_any_parts() {
        let ascending: Vec<u8> = (0..32).collect();
        for (bytes, wanted) in
            [(vec![0; 32], 0x8a91_36aa_u32), (vec![0xff; 32], 0x62a8_ab43), (ascending, 0x46dd_794e)]
        {
            for cut in 0..=bytes.len() {
                let mut sum = Sum::new();
                sum.add(&bytes[..cut]);
                sum.add(&bytes[cut..]);
                assert_eq!(u32::from_le_bytes(sum.bytes()), wanted);
            }
        }
    }
}
