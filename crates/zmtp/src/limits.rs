//! [`Limits`]: bounds on the frames, messages and commands of a peer.

/// Limits that a session enforces on its peer. The defaults fit small control messages; readers of large ones raise
/// them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Limit of bytes in one frame of a message.
    pub frame_bytes: usize,
    /// Limit of bytes in all frames of one message together.
    pub message_bytes: usize,
    /// Limit of frames in one message.
    pub message_frames: usize,
    /// Limit of bytes in one command, its name included: READY with its metadata, SUBSCRIBE with its topic.
    pub command_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { frame_bytes: 64 << 10, message_bytes: 64 << 10, message_frames: 8, command_bytes: 1 << 10 }
    }
}

impl Limits {
    /// Upper bound of the peer's bytes that a session holds: one unfinished message, and a command between its frames.
    pub fn most_buffered(&self) -> usize {
        self.message_bytes.saturating_add(self.command_bytes)
    }
}
