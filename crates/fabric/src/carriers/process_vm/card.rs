//! What a process lets its neighbours read of itself: who it is, and which regions are registered.
//!
//! ```text
//!  0                16            24      64
//!  +----------------+-------------+-------+-------------------------------------------------------+
//!  | engine id      | boot nonce  | 0     | for each region number: generation + 1, or 0 if none  |
//!  +----------------+-------------+-------+-------------------------------------------------------+
//! ```
//! A neighbour reads the bytes of a region first and the card after them, so that bytes count only if the region was still
//! registered once they had been read.

use std::sync::atomic::{AtomicU32, Ordering, fence};

use crate::descriptor::REGIONS_MAX;
use crate::identity::Identity;

/// Words before those of the regions.
const HEAD_WORDS: usize = 16;
pub(crate) const IDENTITY_BYTES: usize = 24;

/// Of this process. It stays where it is until it is dropped, and says nothing true after that.
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

    /// Where neighbours find it.
    pub(crate) fn address(&self) -> u64 {
        self.0.as_ptr().expose_provenance() as u64
    }

    /// The region is registered from now on. Neighbours are told, if there is a place for it here.
    pub(crate) fn add(&self, region: u32, generation: u32) {
        if let (Some(word), Some(mark)) = (self.word(region), generation.checked_add(1)) {
            word.store(mark, Ordering::SeqCst);
        }
    }

    /// It is not any more. What was read of it and is checked after this counts as not read.
    pub(crate) fn remove(&self, region: u32) {
        if let Some(word) = self.word(region) {
            word.store(0, Ordering::SeqCst);
        }
        // Memory that is given back, and used otherwise, is so after this for everybody.
        fence(Ordering::SeqCst);
    }

    /// Nothing is registered any more, and nobody is here.
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
        // Its memory may be read for a while by those who knew it.
        self.clear();
    }
}

/// As they stand at the beginning of a card.
pub(crate) fn identity_bytes(identity: Identity) -> [u8; IDENTITY_BYTES] {
    let mut bytes = [0; IDENTITY_BYTES];
    bytes[..16].copy_from_slice(&identity.engine.to_le_bytes());
    bytes[16..].copy_from_slice(&identity.boot.to_le_bytes());
    bytes
}

/// Where a card says what of a region is registered, and what it says if it is this generation. None: it is not told.
pub(crate) fn mark_of(card: u64, region: u32, generation: u32) -> Option<(u64, u32)> {
    let mark = generation.checked_add(1).filter(|_| region < REGIONS_MAX)?;
    Some((card + 4 * (HEAD_WORDS as u64 + u64::from(region)), mark))
}
