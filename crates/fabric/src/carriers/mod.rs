//! What carries bytes between processes: each folder has one [`crate::Carrier`].

pub(crate) mod process_vm;
pub(crate) mod slots;
pub(crate) mod socket;
