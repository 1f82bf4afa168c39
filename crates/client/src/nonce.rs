//! Random names for processes.

use std::{fs::File, io::Read};

/// 16 bytes that no other process has.
pub(crate) fn random_nonce() -> [u8; 16] {
    let mut nonce = [0; 16];
    let drawn = File::open("/dev/urandom").and_then(|mut source| source.read_exact(&mut nonce));
    if drawn.is_err() {
        // No /dev in this container: a pid, a time and an address name the process well enough.
        let address = (&raw const nonce as usize) as u32;
        let nanos = std::time::UNIX_EPOCH.elapsed().map_or(0, |d| d.as_nanos() as u64);
        nonce[..8].copy_from_slice(&nanos.to_le_bytes());
        nonce[8..12].copy_from_slice(&std::process::id().to_le_bytes());
        nonce[12..].copy_from_slice(&address.to_le_bytes());
    }
    nonce
}
