//! Longest silence of a connection. The kernel knows better whether a peer is alive: it closes the sockets of a process that
//! ends, and acknowledges for a process that gets no processor. [`UNACKNOWLEDGED_MS`] ends a connection to a host that is gone.

use std::time::Duration;

/// Time to connect, and for the connecting side to prove something.
pub(crate) const CONNECTING: Duration = Duration::from_millis(1500);
/// Time for the rest of the greeting. It is longer, because a peer on a busy host rarely gets a processor.
const GREETING: Duration = Duration::from_secs(5);
/// Silence of a peer whose kernel still holds the connection: the peer is stopped, or gets no processor.
const SILENT: Duration = Duration::from_secs(10);
/// Milliseconds in which another host has to acknowledge sent bytes. Its kernel does so, however busy the peer is.
pub(crate) const UNACKNOWLEDGED_MS: u32 = 1500;

/// Stages of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Progress {
    /// The kernels connect it.
    Connecting,
    /// Its greeting is under way.
    Greeting,
    /// Frames go over it.
    Greeted,
}

impl Progress {
    /// Longest silence at this stage; before `Greeted` the longest time in the stage.
    pub(crate) fn patience(self) -> Duration {
        match self {
            Progress::Connecting => CONNECTING,
            Progress::Greeting => GREETING,
            Progress::Greeted => SILENT,
        }
    }
}
