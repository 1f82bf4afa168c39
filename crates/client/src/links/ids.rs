//! Ids of connections, processes, copies and jobs within this process. Each kind counts from 1; no id is used again.

/// One connection. A link ignores the events of any but its present one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(pub u64);

/// A daemon's process that the driver watches for its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProcessId(pub u64);

/// One copy that this process makes itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CopyId(pub u64);

/// A job. Unlike [`Job::number`](crate::Job::number), which the caller may repeat, it is unique in this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobKey(pub u64);

/// Why there is no connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotConnected {
    /// No daemon answers; the sentence says what to do.
    Absent(String),
    /// Another user listens, or owns the folder. Not a byte was sent to them.
    Refused(String),
}

/// Whether a daemon's process lives, as far as the kernel reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Life {
    /// The driver reports its end.
    Watched(ProcessId),
    /// There is no pidfd for it, so its end stays unknown.
    Unknown,
    /// The process has ended.
    Ended,
}

impl Life {
    /// Records the end of a process, if it is this one.
    pub fn ended(&mut self, process: ProcessId) {
        if *self == Self::Watched(process) {
            *self = Self::Ended;
        }
    }

    /// Whether this waits for the end of that process.
    pub fn needs(self, process: ProcessId) -> bool {
        self == Self::Watched(process)
    }
}
