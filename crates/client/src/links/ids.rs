//! Numbers that tell things apart. All count from 1 and are not used again.

/// One connection. A link ignores the events of any other than its present one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(pub u64);

/// A daemon's process whose end the driver notices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProcessId(pub u64);

/// One copy that this process does by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CopyId(pub u64);

/// A job in this process; the caller's number may come again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobKey(pub u64);

/// Why there is no connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotConnected {
    /// Nobody answers; the sentence says what to do.
    Absent(String),
    /// A stranger listens, or the folder is a stranger's. Nothing was said to them.
    Refused(String),
}

/// What is known of the end of a daemon's process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Life {
    /// The driver tells when it ends.
    Watched(ProcessId),
    /// The kernel does not tell.
    Unknown,
    /// It has ended.
    Ended,
}

impl Life {
    /// Notes that a process has ended, if it is this one.
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
