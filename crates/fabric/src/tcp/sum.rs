//! Checksums of bytes that cross sockets: crc32c, as in iSCSI (RFC 3720, B.4). TCP's own checksum has 16 bits, so it misses
//! one in many thousand of the errors that reach it.

use kvlane_block::Crc32c;

/// Bytes of a checksum, little-endian.
pub(crate) const SUM_BYTES: usize = 4;

/// A checksum in the making: bytes are added in their order.
pub(crate) struct Sum(Crc32c);

impl Sum {
    pub(crate) fn new() -> Sum {
        Sum(Crc32c::new())
    }

    pub(crate) fn add(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(crate) fn bytes(&self) -> [u8; SUM_BYTES] {
        self.0.value().to_le_bytes()
    }
}

impl std::fmt::Debug for Sum {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Sum({:02x?})", self.bytes())
    }
}
