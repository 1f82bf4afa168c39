//! How much one peer may send at once.

/// What a session accepts from its peer. The defaults fit small control messages; a reader of large ones raises them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of one frame of a message.
    pub frame_bytes: usize,
    /// Bytes of all frames of one message together.
    pub message_bytes: usize,
    /// Frames of one message.
    pub message_frames: usize,
    /// Bytes of one command, its name included: READY with its metadata, SUBSCRIBE with its topic.
    pub command_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { frame_bytes: 64 << 10, message_bytes: 64 << 10, message_frames: 8, command_bytes: 1 << 10 }
    }
}

impl Limits {
    /// The most bytes of its peer that a session ever holds: one unfinished message, and a command amid it.
    pub fn most_buffered(&self) -> usize {
        self.message_bytes.saturating_add(self.command_bytes)
    }
}
