//! [`Identity`]: names one engine of one process, from its start to its end.

/// Both numbers are random, so a restarted engine has another identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Identity {
    pub(crate) engine: u128,
    /// The boot nonce of the engine's descriptor.
    pub(crate) boot: u64,
}

impl Identity {
    /// Stands for the process that listens at an address, until that process has named itself.
    pub(crate) const ANYBODY: Identity = Identity { engine: 0, boot: 0 };
}
