//! Makes the marks of a prompt's text, by which the router finds common prefixes without a tokenizer.
//!
//! Prompts with a common prefix have their first marks in common. Each mark hashes the bytes since the mark before it, seeded
//! with that mark's hash. Marks stand at the ends of messages, and every [`MARK_BYTES`] bytes in between. The bytes are those of
//! the body, with JSON's escapes, because a client writes the same text in the same way each time.

use std::ops::Range;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::scan::Scan;

/// Most bytes between two marks.
pub const MARK_BYTES: usize = 256;
/// Most marks of one prompt. They cover 4 MiB of text, about a million tokens, which is as much as the longest contexts hold. The
/// router ignores text beyond the last mark. Each choice looks up all marks under the scheduler's lock, so more marks would make
/// other requests wait.
pub const MARKS_MAX: usize = 16 << 10;

/// A position in a prompt, with a hash of all text before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mark {
    /// Hash of all text before the mark, and of the seed.
    pub hash: u64,
    /// Bytes of text before the mark.
    pub bytes: u32,
}

/// Members that an engine puts before the messages: `instructions` of /v1/responses, `system` of /v1/messages.
const BEFORE_THE_MESSAGES: [&str; 2] = ["instructions", "system"];

/// The marks of `messages`, `prompt` or `input`, whichever comes first in this order. `instructions` or `system` is the beginning
/// of the prompt. `seed` hashes the other inputs of the engine's blocks: model, adapter, salt, tools.
pub fn marks(scan: &Scan<'_>, seed: u64) -> Vec<Mark> {
    let mut marks = Marks { hash: seed, bytes: 0, marks: Vec::new() };
    for before in BEFORE_THE_MESSAGES.into_iter().filter_map(|name| scan.member(name)) {
        if matches!(scan.body()[before.value.start], b'"' | b'[') {
            marks.add(scan.body(), inside(scan.body(), &before.value));
        }
    }
    let text = || scan.member("prompt").or_else(|| scan.member("input"));
    if scan.messages_of_chat().is_empty() {
        text().into_iter().for_each(|member| marks.add(scan.body(), inside(scan.body(), &member.value)));
    } else {
        scan.messages_of_chat().iter().for_each(|message| marks.add(scan.body(), message.clone()));
    }
    marks.marks
}

struct Marks {
    hash: u64,
    bytes: u32,
    marks: Vec<Mark>,
}

impl Marks {
    fn add(&mut self, body: &[u8], range: Range<usize>) {
        let room = MARKS_MAX - self.marks.len();
        for piece in body[range].chunks(MARK_BYTES).take(room) {
            self.hash = xxh3_64_with_seed(piece, self.hash);
            self.bytes = self.bytes.saturating_add(piece.len() as u32);
            self.marks.push(Mark { hash: self.hash, bytes: self.bytes });
        }
    }
}

/// The range of a string without its quotes, or of an array without its last bracket. So a longer text, or array, has the same
/// first marks.
fn inside(body: &[u8], value: &Range<usize>) -> Range<usize> {
    match body[value.start] {
        b'"' => value.start + 1..value.end - 1,
        b'[' => value.start..value.end - 1,
        _ => value.clone(),
    }
}
