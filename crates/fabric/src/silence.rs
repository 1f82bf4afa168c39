//! How long a connection may say nothing. Whether its peer is there the kernel knows better: it closes the sockets of a process
//! that ends, acknowledges for one that gets no processor, and [`UNACKNOWLEDGED_MS`] ends a connection to a host that is gone.

use std::time::Duration;

/// Until a connection is there, and until whoever made it has proved something.
pub(crate) const CONNECTING: Duration = Duration::from_millis(1500);
/// The rest of a greeting: a peer on a busy host may get a processor rarely.
const GREETING: Duration = Duration::from_secs(5);
/// A peer whose kernel holds the connection: it gets no processor, or is stopped.
const SILENT: Duration = Duration::from_secs(10);
/// How long another host may acknowledge nothing of the messages that were sent to it. Its kernel does that, however busy the peer
/// is, since messages do not fill its buffers.
pub(crate) const UNACKNOWLEDGED_MS: u32 = 1500;
/// The same of bytes. A peer that gets no processor reads nothing: its buffers fill, and Linux counts that as unacknowledged, although
/// the other kernel answers.
pub(crate) const UNREAD_MS: u32 = 10_000;

/// How far a connection is.
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
    /// For how long nothing may come; before it is greeted, for how long it may be without that.
    pub(crate) fn patience(self) -> Duration {
        match self {
            Progress::Connecting => CONNECTING,
            Progress::Greeting => GREETING,
            Progress::Greeted => SILENT,
        }
    }
}
