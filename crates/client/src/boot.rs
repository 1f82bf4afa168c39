//! The id of one run of the daemon.

/// 16 random bytes that name one run of the daemon.
pub type BootId = [u8; 16];
