//! [`crc32c`]: the checksum of blocks, of what is on SSDs, and of bytes that cross sockets, as in iSCSI (RFC 3720, B.4).

use crc_fast::{CrcAlgorithm, Digest};

/// The crc32c of these bytes.
pub fn crc32c(bytes: &[u8]) -> u32 {
    let mut sum = Crc32c::new();
    sum.update(bytes);
    sum.value()
}

/// A crc32c in the making. Bytes are added in their order, in parts of any length.
#[derive(Debug)]
pub struct Crc32c(Digest);

impl Crc32c {
    /// The sum before any byte was added.
    #[expect(clippy::new_without_default, reason = "a sum of nothing is no default of anything")]
    pub fn new() -> Crc32c {
        Crc32c(Digest::new(CrcAlgorithm::Crc32Iscsi))
    }

    /// Adds bytes behind those before.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The crc32c of all bytes so far.
    pub fn value(&self) -> u32 {
        // A crc32c has 32 bits.
        self.0.finalize() as u32
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
            assert_eq!(crc32c(&bytes), wanted);
            for cut in 0..=bytes.len() {
                let mut sum = Crc32c::new();
                sum.update(&bytes[..cut]);
                sum.update(&bytes[cut..]);
                assert_eq!(sum.value(), wanted);
            }
        }
    }
}
