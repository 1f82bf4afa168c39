//! Messages of peers that nobody here has taken yet.
//!
//! ```text
//!             admit            deliver              take
//!  (its head) -----> (its bytes) -----> (it waits) -----> (whoever receives)
//!       |                 | its connection broke: release
//!       '--> known already, or no room: its bytes are passed over
//! ```
//! Where several peers are connected, each has its share of the room, and one that holds nothing always has a place there if
//! anybody has: one that sends without end leaves the others theirs.
//!
//! A message keeps its number when it is sent again, over whichever connection, and is told by it as immediates are. One
//! that finds no room is as if it had never come: its sender tries again.

use std::collections::{HashMap, VecDeque};

use crate::descriptor::Descriptor;
use crate::immediates::Immediates;

/// Most bytes of a message.
pub const MESSAGE_BYTES_MAX: usize = crate::tcp::MESSAGE_BYTES_MAX;

/// A process's engine, as it tells of itself in its descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EngineId {
    /// The engine's number in its descriptor.
    pub engine_id: u128,
    /// Another one each time that it starts.
    pub boot_nonce: u64,
}

impl From<&Descriptor> for EngineId {
    fn from(descriptor: &Descriptor) -> EngineId {
        EngineId { engine_id: descriptor.engine_id, boot_nonce: descriptor.boot_nonce }
    }
}

/// Bytes that a peer has sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// Who. Where there is a token, whoever has it proved that.
    pub from: EngineId,
    /// At most [`MESSAGE_BYTES_MAX`]; may be none.
    pub bytes: Vec<u8>,
}

/// How much waits for whoever receives messages.
#[derive(Debug, Clone)]
pub struct InboxOptions {
    /// Messages that wait at most, of all senders together; a sender of more tries again.
    pub messages: usize,
    /// Most bytes of them together; at least [`MESSAGE_BYTES_MAX`].
    pub bytes: usize,
}

impl Default for InboxOptions {
    fn default() -> InboxOptions {
        InboxOptions { messages: 1024, bytes: 16 << 20 }
    }
}

/// What is to become of a message whose bytes are still to come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// There is room for it, until it is delivered or released.
    Admitted,
    /// It has been delivered before.
    Known,
    /// It is to be sent again later.
    NoRoom,
    /// No honest peer sends this: too long, or a number beyond all others.
    Refused,
}

/// Messages that wait to be received, and room for those that are coming.
#[derive(Debug, Default)]
pub struct Inbox {
    options: InboxOptions,
    /// With whose each is.
    waiting: VecDeque<(u128, Message)>,
    /// Messages of each sender that wait or are coming, and their bytes; none without any.
    of: HashMap<u128, (usize, usize)>,
    /// Peers that may send at present: each has an equal part of what may wait.
    senders: usize,
    /// Messages that wait or are coming, and their bytes.
    held: usize,
    held_bytes: usize,
}

impl Inbox {
    /// Empty.
    pub fn new(options: InboxOptions) -> Inbox {
        Inbox { options, ..Inbox::default() }
    }

    /// So many senders share the room from now on.
    pub fn share_among(&mut self, senders: usize) {
        self.senders = senders;
    }

    /// The head of a message has come, the `number`-th (from 0, counted with the immediates) of `sender`, which is what a
    /// peer's process is to this one.
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

    /// All bytes of an admitted message are there. False: it came over another connection too, and was delivered already.
    pub fn deliver(&mut self, seen: &mut Immediates, sender: u128, number: u64, message: Message) -> bool {
        let is_new = seen.note(sender, number);
        if is_new {
            self.waiting.push_back((sender, message));
        } else {
            self.release(sender, message.bytes.len());
        }
        is_new
    }

    /// An admitted message of a sender, of so many bytes, does not come any more.
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

    /// A message that nobody has taken; the one that waits the longest.
    pub fn take(&mut self) -> Option<Message> {
        let (sender, message) = self.waiting.pop_front()?;
        self.release(sender, message.bytes.len());
        Some(message)
    }

    /// Messages that wait or are coming.
    pub fn held(&self) -> usize {
        self.held
    }
}
