//! The card: a table in this process's memory that neighbours read. It says who this process is and which regions are
//! registered.
//!
//! ```text
//!  0                16            24      64
//!  +----------------+-------------+-------+-------------------------------------------------------+
//!  | engine id      | boot nonce  | 0     | for each region number: generation + 1, or 0 if none  |
//!  +----------------+-------------+-------+-------------------------------------------------------+
//! ```
//! A neighbour reads a region's bytes first and the card after them. Its bytes count only if the region was still registered
//! once they had been read.

use std::sync::atomic::{AtomicU32, Ordering, fence};

use crate::descriptor::REGIONS_MAX;
use crate::identity::Identity;

/// Words (u32) before those of the regions.
const HEAD_WORDS: usize = 16;
pub(crate) const IDENTITY_BYTES: usize = 24;

/// This process's card. It stays at one address until it is dropped. Dropping it clears the identity, so late readers
/// find no match.
#[derive(Debug)]
pub(crate) struct Card(Box<[AtomicU32]>);

impl Card {
    pub(crate) fn new(identity: Identity) -> Card {
        let words = HEAD_WORDS + REGIONS_MAX as usize;
        let card: Box<[AtomicU32]> = std::iter::repeat_with(AtomicU32::default).take(words).collect();
        for (word, bytes) in card.iter().zip(identity_bytes(identity).as_chunks::<4>().0) {
            word.store(u32::from_le_bytes(*bytes), Ordering::Relaxed);
        }
        Card(card)
    }

    /// Sent to neighbours, which read the card there.
    pub(crate) fn address(&self) -> u64 {
        self.0.as_ptr().expose_provenance() as u64
    }

    /// The region is registered from now on. A number or generation that does not fit the card stays unmarked: neighbours
    /// cannot read it.
    pub(crate) fn add(&self, region: u32, generation: u32) {
        if let (Some(word), Some(mark)) = (self.word(region), generation.checked_add(1)) {
            word.store(mark, Ordering::SeqCst);
        }
    }

    /// The region is not registered any more: a neighbour that checks the card after this refuses the bytes it has read.
    pub(crate) fn remove(&self, region: u32) {
        if let Some(word) = self.word(region) {
            word.store(0, Ordering::SeqCst);
        }
        // The memory is reused only after this fence, so no neighbour can see the mark together with reused bytes.
        fence(Ordering::SeqCst);
    }

    /// No region is registered any more, and the identity is gone: every later read is refused.
    pub(crate) fn clear(&self) {
        self.0.iter().for_each(|word| word.store(0, Ordering::SeqCst));
        fence(Ordering::SeqCst);
    }

    fn word(&self, region: u32) -> Option<&AtomicU32> {
        (region < REGIONS_MAX).then(|| &self.0[HEAD_WORDS + region as usize])
    }
}

impl Drop for Card {
    fn drop(&mut self) {
        // Neighbours that know the address may still read this memory for a while.
        self.clear();
    }
}

/// The first [`IDENTITY_BYTES`] of a card.
pub(crate) fn identity_bytes(identity: Identity) -> [u8; IDENTITY_BYTES] {
    let mut bytes = [0; IDENTITY_BYTES];
    bytes[..16].copy_from_slice(&identity.engine.to_le_bytes());
    bytes[16..].copy_from_slice(&identity.boot.to_le_bytes());
    bytes
}

/// The address of a region's word on a card, and the value that it has while this generation is registered. None: the card
/// has no such word.
pub(crate) fn mark_of(card: u64, region: u32, generation: u32) -> Option<(u64, u32)> {
    let mark = generation.checked_add(1).filter(|_| region < REGIONS_MAX)?;
    Some((card + 4 * (HEAD_WORDS as u64 + u64::from(region)), mark))
}
