//! Random names.

use std::{fs::File, io, io::Read};

/// 16 bytes from the kernel.
pub(crate) fn bytes16() -> io::Result<[u8; 16]> {
    let mut bytes = [0; 16];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}
