//! The id of one run of the daemon.

/// 16 random bytes, which the daemon draws when it starts. Leases and pools belong to one run.
pub type BootId = [u8; 16];
