//! The card: a table of an engine that peers on its host read. It says which engine this is and which regions and windows are
//! registered.
//!
//! ```text
//!  0                16            24      64
//!  +----------------+-------------+-------+-------------------------------------------------------+
//!  | engine id      | boot nonce  | 0     | for each region number: generation + 1, or 0 if none  |
//!  +----------------+-------------+-------+-------------------------------------------------------+
//! ```
//! A peer reads a region's bytes first and the card after them. Its bytes count only if the region was still registered once
//! they had been read.
//!
//! cma's card lies in the engine's own memory, and peers read it together with the bytes. cuda's card is a memfd, which peers
//! map read-only ([`SharedCard`]).

#![allow(unsafe_code, reason = "words of a mapping")]

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering, fence};

use kvlane_memory::Mapping;
use rustix::fs::{MemfdFlags, SealFlags};

use crate::descriptor::REGIONS_MAX;
use crate::identity::Identity;

/// Words (u32) before those of the regions.
const HEAD_WORDS: usize = 16;
const WORDS: usize = HEAD_WORDS + REGIONS_MAX as usize;
const CARD_BYTES: u64 = 4 * WORDS as u64;
pub(crate) const IDENTITY_BYTES: usize = 24;
/// The size of a shared card never changes, so reading it never faults. Only its maker, who mapped it before it was sealed,
/// writes it.
const SEALS: SealFlags =
    SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE).union(SealFlags::SEAL);

/// This engine's card. It stays at one address until it is dropped. Dropping it clears the identity, so late readers find no
/// match.
#[derive(Debug)]
pub(crate) struct Card(Words);

#[derive(Debug)]
enum Words {
    Own(Box<[AtomicU32]>),
    Shared { mapping: Mapping, memfd: OwnedFd },
}

impl Card {
    /// A card in this process's own memory.
    pub(crate) fn new(identity: Identity) -> Card {
        Card(Words::Own(std::iter::repeat_with(AtomicU32::default).take(WORDS).collect())).naming(identity)
    }

    /// A card that other processes can map ([`Card::shared`]).
    ///
    /// # Errors
    /// The kernel makes no memfd.
    pub(crate) fn in_memfd(identity: Identity) -> io::Result<Card> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memfd = rustix::fs::memfd_create("kvlane-card", flags)?;
        rustix::fs::ftruncate(&memfd, CARD_BYTES)?;
        let mapping = Mapping::new(memfd.as_fd(), CARD_BYTES, true)?;
        rustix::fs::fcntl_add_seals(&memfd, SEALS)?;
        Ok(Card(Words::Shared { mapping, memfd }).naming(identity))
    }

    fn naming(self, identity: Identity) -> Card {
        for (word, bytes) in self.words().iter().zip(identity_bytes(identity).as_chunks::<4>().0) {
            word.store(u32::from_le_bytes(*bytes), Ordering::Relaxed);
        }
        self
    }

    fn words(&self) -> &[AtomicU32] {
        match &self.0 {
            Words::Own(words) => words,
            // SAFETY: the mapping is writable, has these words and lives as long as the slice. Other processes only read it,
            // and all access here is atomic.
            Words::Shared { mapping, .. } => unsafe {
                std::slice::from_raw_parts(mapping.base().cast_const().cast(), WORDS)
            },
        }
    }

    /// The address at which cma's peers read the card.
    pub(crate) fn address(&self) -> u64 {
        self.words().as_ptr().expose_provenance() as u64
    }

    /// The descriptor by which other processes map the card. None for a card in this process's own memory.
    pub(crate) fn shared(&self) -> Option<BorrowedFd<'_>> {
        match &self.0 {
            Words::Own(_) => None,
            Words::Shared { memfd, .. } => Some(memfd.as_fd()),
        }
    }

    /// The region is registered from now on. A number or generation that does not fit the card stays unmarked: peers cannot
    /// read it.
    pub(crate) fn add(&self, region: u32, generation: u32) {
        if let (Some(word), Some(mark)) = (self.word(region), generation.checked_add(1)) {
            word.store(mark, Ordering::SeqCst);
        }
    }

    /// The region is not registered any more: a peer that checks the card after this refuses the bytes it has read.
    pub(crate) fn remove(&self, region: u32) {
        if let Some(word) = self.word(region) {
            word.store(0, Ordering::SeqCst);
        }
        // The memory is reused only after this fence, so no peer can see the mark together with reused bytes.
        fence(Ordering::SeqCst);
    }

    /// No region is registered any more, and the identity is gone: every later read is refused.
    pub(crate) fn clear(&self) {
        self.words().iter().for_each(|word| word.store(0, Ordering::SeqCst));
        fence(Ordering::SeqCst);
    }

    fn word(&self, region: u32) -> Option<&AtomicU32> {
        (region < REGIONS_MAX).then(|| &self.words()[HEAD_WORDS + region as usize])
    }
}

impl Drop for Card {
    fn drop(&mut self) {
        // Peers that know the address, or have mapped the card, may still read it for a while.
        self.clear();
    }
}

/// A peer's card, mapped read-only.
#[derive(Debug)]
pub(crate) struct SharedCard {
    mapping: Mapping,
    identity: Identity,
}

impl SharedCard {
    /// Maps the card of this engine.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] if the descriptor is no card, is not sealed, or is another engine's.
    pub(crate) fn open(memfd: BorrowedFd<'_>, identity: Identity) -> io::Result<SharedCard> {
        let refused =
            |why: &str| io::Error::new(io::ErrorKind::InvalidData, format!("the peer's card {why}"));
        let seals = rustix::fs::fcntl_get_seals(memfd).map_err(|_| refused("is no memfd"))?;
        // Sealed, so the size cannot change from here on.
        if !seals.contains(SEALS) || rustix::fs::fstat(memfd)?.st_size as u64 != CARD_BYTES {
            return Err(refused("is not sealed, or has another size"));
        }
        let card = SharedCard { mapping: Mapping::new(memfd, CARD_BYTES, false)?, identity };
        if card.marks(&[]) { Ok(card) } else { Err(refused("names another engine, or one that has closed")) }
    }

    /// Whether all of these regions, as (number, generation), are registered. Bytes that were read before the call count only
    /// if they are.
    pub(crate) fn marks(&self, regions: &[(u32, u32)]) -> bool {
        fence(Ordering::SeqCst);
        let word = |index: usize| self.words()[index].load(Ordering::SeqCst);
        let is_it = |(index, bytes): (usize, &[u8; 4])| word(index) == u32::from_le_bytes(*bytes);
        let is_marked = |(region, generation): &(u32, u32)| {
            let mark = generation.checked_add(1).filter(|_| *region < REGIONS_MAX);
            mark.is_some_and(|mark| word(HEAD_WORDS + *region as usize) == mark)
        };
        identity_bytes(self.identity).as_chunks::<4>().0.iter().enumerate().all(is_it)
            && regions.iter().all(is_marked)
    }

    fn words(&self) -> &[AtomicU32] {
        // SAFETY: the mapping has these words and lives as long as the slice. Its maker writes it atomically, and all access
        // here is an atomic load.
        unsafe { std::slice::from_raw_parts(self.mapping.base().cast_const().cast(), WORDS) }
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    const ME: Identity = Identity { engine: 7, boot: 9 };

    #[test]
    fn a_shared_card_marks_what_is_registered_until_its_engine_closes() {
        let card = Card::in_memfd(ME).unwrap();
        let seen = SharedCard::open(card.shared().unwrap(), ME).unwrap();
        assert!(seen.marks(&[]) && !seen.marks(&[(5, 0)]));
        card.add(5, 0);
        card.add(REGIONS_MAX - 1, 3);
        assert!(seen.marks(&[(5, 0), (REGIONS_MAX - 1, 3)]));
        assert!(!seen.marks(&[(5, 1)]) && !seen.marks(&[(5, u32::MAX)]) && !seen.marks(&[(REGIONS_MAX, 0)]));
        card.remove(5);
        assert!(!seen.marks(&[(5, 0)]) && seen.marks(&[]));
        drop(card);
        assert!(!seen.marks(&[]), "its engine is gone");
    }

    #[test]
    fn nobody_else_writes_a_shared_card_and_other_descriptors_are_refused() {
        let card = Card::in_memfd(ME).unwrap();
        let memfd = card.shared().unwrap();
        assert!(Mapping::new(memfd, CARD_BYTES, true).is_err());
        assert!(rustix::io::write(memfd, b"x").is_err() && rustix::fs::ftruncate(memfd, 0).is_err());
        let why = |memfd: BorrowedFd<'_>, whose| SharedCard::open(memfd, whose).unwrap_err().to_string();
        assert!(why(memfd, Identity { boot: 8, ..ME }).contains("names another engine"));
        let unsealed = rustix::fs::memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&unsealed, CARD_BYTES).unwrap();
        assert!(why(unsealed.as_fd(), ME).contains("is not sealed"));
        let file = tempfile::tempfile().unwrap();
        assert!(why(file.as_fd(), ME).contains("is no memfd"));
    }
}
