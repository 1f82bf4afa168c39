//! The inbox: bounds and holds the messages that peers have sent, until this process receives them.
//!
//! ```text
//!             admit            deliver              take
//!  (its head) -----> (its bytes) -----> (it waits) -----> (Engine::receive)
//!       |                 | its connection broke: release
//!       '--> delivered before, or no room: its bytes are discarded
//! ```
//! If several peers are connected, each has an equal share of the room. A peer that holds nothing is admitted whenever there is
//! any room at all. So a peer that sends without end does not keep the others out.
//!
//! A message keeps its number when it is sent again over another connection, so that the inbox delivers it once, as immediates
//! count once. A message that finds no room leaves no trace, and its sender tries again.

use std::collections::{HashMap, VecDeque};

use crate::descriptor::Descriptor;
use crate::immediates::Immediates;

/// Most bytes of one message.
pub const MESSAGE_BYTES_MAX: usize = crate::tcp::MESSAGE_BYTES_MAX;

/// One start of one engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EngineId {
    /// As in the engine's descriptor.
    pub engine_id: u128,
    /// Drawn anew each time that an engine starts.
    pub boot_nonce: u64,
}

impl From<&Descriptor> for EngineId {
    fn from(descriptor: &Descriptor) -> EngineId {
        EngineId { engine_id: descriptor.engine_id, boot_nonce: descriptor.boot_nonce }
    }
}

/// A message that a peer has sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// The sender, as it named itself after it had proved the secret.
    pub from: EngineId,
    /// At most [`MESSAGE_BYTES_MAX`]; may be empty.
    pub bytes: Vec<u8>,
}

/// The limits of an inbox.
#[derive(Debug, Clone)]
pub struct InboxOptions {
    /// Most messages that wait, of all senders together. A sender that finds no room tries again.
    pub messages: usize,
    /// Most bytes of these messages together; at least [`MESSAGE_BYTES_MAX`].
    pub bytes: usize,
}

impl Default for InboxOptions {
    fn default() -> InboxOptions {
        InboxOptions { messages: 1024, bytes: 16 << 20 }
    }
}

/// The decision on a message whose head has arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// Room is reserved until the message is delivered or released.
    Admitted,
    /// It has been delivered before.
    Known,
    /// The sender has to send it again later.
    NoRoom,
    /// No honest peer sends this: too long, or the last of all numbers.
    Refused,
}

/// Messages that wait to be received, and the room reserved for those that are arriving.
#[derive(Debug, Default)]
pub struct Inbox {
    options: InboxOptions,
    /// Delivered messages, the oldest first, each with its sender.
    waiting: VecDeque<(u128, Message)>,
    /// By sender: admitted messages that have not been taken, and their bytes. No entry for a sender without any.
    of: HashMap<u128, (usize, usize)>,
    /// Peers that may send now. Each has an equal share of the room.
    senders: usize,
    /// Admitted messages that have not been taken.
    held: usize,
    /// Bytes of `held`.
    held_bytes: usize,
}

impl Inbox {
    /// An empty inbox with these limits.
    pub fn new(options: InboxOptions) -> Inbox {
        Inbox { options, ..Inbox::default() }
    }

    /// Sets the number of peers that share the room from now on.
    pub fn share_among(&mut self, senders: usize) {
        self.senders = senders;
    }

    /// Decides on a message whose head has arrived. It is the `number`-th message or immediate, from 0, of `sender`, a session
    /// of a peer.
    pub fn admit(&mut self, seen: &Immediates, sender: u128, number: u64, bytes: u64) -> Admission {
        if number == u64::MAX || bytes > MESSAGE_BYTES_MAX as u64 {
            return Admission::Refused;
        }
        if seen.has_seen(sender, number) {
            return Admission::Known;
        }
        let bytes = bytes as usize;
        if self.held >= self.options.messages || bytes > self.options.bytes.saturating_sub(self.held_bytes) {
            return Admission::NoRoom;
        }
        let senders = self.senders.max(1);
        let share = |all: usize| all / senders;
        if let Some((count, held)) = self.of.get(&sender)
            && (*count >= share(self.options.messages) || held + bytes > share(self.options.bytes))
        {
            return Admission::NoRoom;
        }
        let (count, held) = self.of.entry(sender).or_default();
        (*count, *held) = (*count + 1, *held + bytes);
        self.held += 1;
        self.held_bytes += bytes;
        Admission::Admitted
    }

    /// Delivers an admitted message, whose bytes are complete. False: it also came over another connection, and was delivered
    /// before.
    pub fn deliver(&mut self, seen: &mut Immediates, sender: u128, number: u64, message: Message) -> bool {
        let is_new = seen.note(sender, number);
        if is_new {
            self.waiting.push_back((sender, message));
        } else {
            self.release(sender, message.bytes.len());
        }
        is_new
    }

    /// Frees the room of an admitted message of this size, which does not arrive any more.
    pub fn release(&mut self, sender: u128, bytes: usize) {
        if let Some((count, held)) = self.of.get_mut(&sender) {
            (*count, *held) = (count.saturating_sub(1), held.saturating_sub(bytes));
            if *count == 0 {
                self.of.remove(&sender);
            }
        }
        self.held = self.held.saturating_sub(1);
        self.held_bytes = self.held_bytes.saturating_sub(bytes);
    }

    /// Takes the oldest message.
    pub fn take(&mut self) -> Option<Message> {
        let (sender, message) = self.waiting.pop_front()?;
        self.release(sender, message.bytes.len());
        Some(message)
    }

    /// Admitted messages that have not been taken.
    pub fn held(&self) -> usize {
        self.held
    }
}
