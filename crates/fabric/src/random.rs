//! Numbers that nobody else draws.

use std::io;

/// Of 64 bits.
///
/// # Errors
/// If the kernel gives none.
pub(crate) fn random() -> io::Result<u64> {
    Ok(u64::from_le_bytes(kvlane_memory::random()?))
}

/// Of 128 bits.
///
/// # Errors
/// As of [`random`].
pub(crate) fn long_random() -> io::Result<u128> {
    Ok(u128::from_le_bytes(kvlane_memory::random()?))
}
