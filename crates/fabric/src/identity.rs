//! Names of processes.

/// One engine of one process, from its start to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Identity {
    pub(crate) engine: u128,
    /// Drawn at each start.
    pub(crate) boot: u64,
}

impl Identity {
    /// Stands for whichever process listens at an address, until that process has named itself.
    pub(crate) const ANYBODY: Identity = Identity { engine: 0, boot: 0 };
}
