//! How long a connection may be silent at each stage before this side ends it.
//!
//! The kernel knows better whether a peer is alive: it closes the sockets of a process that ends, and acknowledges bytes for a
//! process that gets no processor. So these limits are long, and [`UNACKNOWLEDGED_MS`] ends connections to hosts that are gone.

use std::time::Duration;

/// The time to connect; on the listening side, the time in which the peer has to prove the secret.
pub(crate) const CONNECTING: Duration = Duration::from_millis(1500);
/// The time for the rest of the greeting. It is longer, because a peer on a busy host rarely gets a processor.
const GREETING: Duration = Duration::from_secs(5);
/// The silence of a peer whose kernel still holds the connection: the process is stopped, or gets no processor.
const SILENT: Duration = Duration::from_secs(10);
/// Milliseconds in which another host has to acknowledge sent bytes (TCP_USER_TIMEOUT). Its kernel does so, however busy the
/// peer is.
pub(crate) const UNACKNOWLEDGED_MS: u32 = 1500;

/// The stage of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Progress {
    /// The kernels connect it.
    Connecting,
    /// Its greeting is under way.
    Greeting,
    /// It carries frames.
    Greeted,
}

impl Progress {
    /// The longest silence at this stage; before `Greeted`, the longest time that the stage may take.
    pub(crate) fn patience(self) -> Duration {
        match self {
            Progress::Connecting => CONNECTING,
            Progress::Greeting => GREETING,
            Progress::Greeted => SILENT,
        }
    }
}
