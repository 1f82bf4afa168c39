//! Random numbers from the kernel: never the same twice, in all processes and hosts.

use std::io;

/// A random number of 64 bits.
///
/// # Errors
/// The kernel gives none.
pub(crate) fn random() -> io::Result<u64> {
    Ok(u64::from_le_bytes(kvlane_memory::random()?))
}

/// A random number of 128 bits.
///
/// # Errors
/// As [`random`].
pub(crate) fn long_random() -> io::Result<u128> {
    Ok(u128::from_le_bytes(kvlane_memory::random()?))
}
