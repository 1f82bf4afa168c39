//! Gathers a body that arrives in pieces into one.
//!
//! A long body has a mapping of its own, which goes back to the kernel with it. An allocator would keep much of that memory, and
//! would copy a body that grows.

use std::io;

use bytes::{Bytes, BytesMut};
use kvlane_memory::PrivateMemory;

/// Bodies up to this size use the allocator's memory.
const LONG_BYTES: usize = 64 << 10;

/// The bytes of a body that have arrived.
#[derive(Debug)]
pub(super) struct Gathered {
    /// Length that the client announced, else the longest allowed one.
    bytes_max: usize,
    memory: Memory,
}

#[derive(Debug)]
enum Memory {
    /// The first piece, not copied.
    First(Bytes),
    Short(BytesMut),
    Long {
        memory: PrivateMemory,
        filled: usize,
    },
}

impl Gathered {
    /// `announced` is the client's Content-Length. A piece beyond that, or beyond `most`, is an error.
    pub(super) fn new(announced: Option<usize>, most: usize) -> Self {
        Self {
            bytes_max: announced.map_or(most, |announced| announced.min(most)),
            memory: Memory::First(Bytes::new()),
        }
    }

    pub(super) fn len(&self) -> usize {
        match &self.memory {
            Memory::First(first) => first.len(),
            Memory::Short(short) => short.len(),
            Memory::Long { filled, .. } => *filled,
        }
    }

    /// Appends a piece. A body in one piece is not copied.
    ///
    /// # Errors
    /// The kernel gives no memory, or the body is longer than allowed.
    pub(super) fn add(&mut self, piece: Bytes) -> io::Result<()> {
        let (before, all) = (self.len(), self.len() + piece.len());
        if all > self.bytes_max {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        if before == 0 {
            self.memory = Memory::First(piece);
            return Ok(());
        }
        if all > LONG_BYTES && !matches!(self.memory, Memory::Long { .. }) {
            // Maps room for all of it at once, because untouched pages cost nothing.
            let mut memory = PrivateMemory::new(self.bytes_max)?;
            memory.bytes_mut()[..before].copy_from_slice(self.bytes());
            self.memory = Memory::Long { memory, filled: before };
        }
        match &mut self.memory {
            Memory::First(first) => {
                let mut short = BytesMut::with_capacity(self.bytes_max.min(LONG_BYTES).min(2 * all));
                short.extend_from_slice(first);
                short.extend_from_slice(&piece);
                self.memory = Memory::Short(short);
            }
            Memory::Short(short) => short.extend_from_slice(&piece),
            Memory::Long { memory, filled } => {
                memory.bytes_mut()[before..all].copy_from_slice(&piece);
                *filled = all;
            }
        }
        Ok(())
    }

    fn bytes(&self) -> &[u8] {
        match &self.memory {
            Memory::First(first) => first,
            Memory::Short(short) => short,
            Memory::Long { memory, filled } => &memory.as_ref()[..*filled],
        }
    }

    /// Returns all bytes that have arrived.
    pub(super) fn whole(self) -> Bytes {
        match self.memory {
            Memory::First(first) => first,
            Memory::Short(short) => short.freeze(),
            Memory::Long { memory, filled } => Bytes::from_owner(memory).slice(..filled),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_pieces_come_out_in_their_order_however_long_they_are() {
        for (size, count) in [(1, 1), (7, 3), (1000, 200), (60_000, 20), (300_000, 3)] {
            for announced in [None, Some(size * count)] {
                let mut gathered = Gathered::new(announced, 2_000_000);
                let pieces: Vec<Vec<u8>> = (0..count).map(|number| vec![number as u8; size]).collect();
                for piece in &pieces {
                    assert!(gathered.add(piece.clone().into()).is_ok());
                }
                assert_eq!(gathered.len(), size * count);
                assert_eq!(gathered.whole(), pieces.concat());
            }
        }
    }

    #[test]
    fn more_than_was_announced_or_may_be_is_an_error() {
        for (announced, most) in [(Some(10), 100), (None, 10)] {
            let mut gathered = Gathered::new(announced, most);
            assert!(gathered.add(vec![1; 6].into()).is_ok());
            assert!(gathered.add(vec![2; 5].into()).is_err());
        }
    }
}
