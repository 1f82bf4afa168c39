//! Packs and parses long lists that travel as bytes: page numbers, outcomes of a claim, and changes of the journal.
//!
//! ```text
//! pages     4 bytes each, a little-endian u32: the page's number, counted from the start of the pool in units of 4096 bytes
//! outcomes  1 byte each: an Outcome
//! changes   18 bytes each: a ChangeKind, the group, 16 bytes of the block's hash
//! ```
//! The pages of a hit are block-major: the page of block `b` for `rank` has index `b * ranks + rank`.

use bytes::Bytes;
use thiserror::Error;

/// Length of a page number in bytes.
pub const PAGE_NUMBER_BYTES: usize = 4;

/// Length of a change of the journal in bytes.
pub const CHANGE_BYTES: usize = 18;

/// Why bytes are no packed list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum PackedError {
    /// The bytes end within a page number; holds their length.
    #[error("{0} bytes are no list of page numbers, which have {PAGE_NUMBER_BYTES} bytes each")]
    Pages(usize),
    /// A code of an outcome that this version does not know.
    #[error("{0} is no outcome of a claim")]
    Outcome(u8),
    /// The bytes end within a change; holds their length.
    #[error("{0} bytes are no list of changes, which have {CHANGE_BYTES} bytes each")]
    Changes(usize),
}

/// Packs page numbers.
pub fn pack_pages(pages: impl IntoIterator<Item = u32>) -> Bytes {
    // Not through a `BytesMut`, which costs a function call per number: 4 us for a prompt of 10,000 tokens.
    pages.into_iter().map(u32::to_le_bytes).collect::<Vec<_>>().into_flattened().into()
}

/// A packed list of page numbers, without a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pages<'a>(&'a [[u8; PAGE_NUMBER_BYTES]]);

impl<'a> Pages<'a> {
    /// Wraps packed page numbers.
    ///
    /// # Errors
    /// [`PackedError::Pages`] if the bytes end within a number.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, PackedError> {
        match bytes.as_chunks() {
            (pages, []) => Ok(Self(pages)),
            _ => Err(PackedError::Pages(bytes.len())),
        }
    }

    /// Number of pages in the list.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the list has no page.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The page number at this index of the list.
    pub fn get(&self, index: usize) -> Option<u32> {
        self.0.get(index).copied().map(u32::from_le_bytes)
    }

    /// All page numbers, in order.
    pub fn iter(self) -> impl ExactSizeIterator<Item = u32> + 'a {
        self.0.iter().copied().map(u32::from_le_bytes)
    }

    /// The page numbers of one rank, one per block, of a list with `ranks` pages per block. Empty if there is no such rank. A
    /// last block with fewer pages is left out.
    pub fn column(self, rank: usize, ranks: usize) -> impl ExactSizeIterator<Item = u32> + 'a {
        let (rows, rank) = if rank < ranks { (self.0, rank) } else { (&[][..], 0) };
        rows.chunks_exact(ranks.max(1)).map(move |row| u32::from_le_bytes(row[rank]))
    }
}

/// The daemon's answer to one hash of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Outcome {
    /// The worker that claims writes the block to its page, and commits it.
    Claimed = 0,
    /// The block is stored already.
    Present = 1,
    /// Another engine is saving the block.
    InFlight = 2,
    /// The pool has no room for the block.
    NoRoom = 3,
}

impl TryFrom<u8> for Outcome {
    type Error = PackedError;

    fn try_from(code: u8) -> Result<Self, PackedError> {
        match code {
            0 => Ok(Self::Claimed),
            1 => Ok(Self::Present),
            2 => Ok(Self::InFlight),
            3 => Ok(Self::NoRoom),
            unknown => Err(PackedError::Outcome(unknown)),
        }
    }
}

/// Packs outcomes. A reader decodes each byte by [`Outcome::try_from`].
pub fn pack_outcomes(outcomes: impl IntoIterator<Item = Outcome>) -> Bytes {
    outcomes.into_iter().map(|outcome| outcome as u8).collect()
}

/// A change of a block's visibility.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum ChangeKind {
    /// Lookups find the block in RAM from now on.
    Visible = 0,
    /// The block is not in RAM any more.
    Gone = 1,
    /// The block is on the SSD from now on.
    VisibleOnSsd = 2,
    /// The block is not on the SSD any more.
    GoneFromSsd = 3,
}

/// One entry of the daemon's journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change {
    /// Whether the block became visible or went, and on which medium.
    pub kind: ChangeKind,
    /// Index of the group among the engine's.
    pub group: u8,
    /// The hash under which the block is stored: the first 16 bytes of the engine's.
    pub hash: [u8; 16],
}

/// Packs changes, in their order.
pub fn pack_changes(changes: impl IntoIterator<Item = Change>) -> Bytes {
    let packed = changes.into_iter().map(|Change { kind, group, hash }| {
        let mut bytes = [0; CHANGE_BYTES];
        (bytes[0], bytes[1]) = (kind as u8, group);
        bytes[2..].copy_from_slice(&hash);
        bytes
    });
    packed.collect::<Vec<_>>().into_flattened().into()
}

/// Parses packed changes, in order. Changes of a kind that only later versions know are left out.
///
/// # Errors
/// [`PackedError::Changes`] if the bytes end within a change.
pub fn parse_changes(bytes: &[u8]) -> Result<impl Iterator<Item = Change> + '_, PackedError> {
    let (changes, []) = bytes.as_chunks::<CHANGE_BYTES>() else {
        return Err(PackedError::Changes(bytes.len()));
    };
    Ok(changes.iter().filter_map(|[kind, group, hash @ ..]| {
        let kind = match kind {
            0 => ChangeKind::Visible,
            1 => ChangeKind::Gone,
            2 => ChangeKind::VisibleOnSsd,
            3 => ChangeKind::GoneFromSsd,
            _ => return None,
        };
        Some(Change { kind, group: *group, hash: *hash })
    }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const OUTCOMES: [Outcome; 4] = [Outcome::Claimed, Outcome::Present, Outcome::InFlight, Outcome::NoRoom];

    proptest! {
        #[test]
        fn pages_come_back_as_they_were_packed(pages: Vec<u32>, cut in 1..PAGE_NUMBER_BYTES) {
            let bytes = pack_pages(pages.iter().copied());
            let parsed = Pages::parse(&bytes).unwrap();
            prop_assert_eq!(parsed.iter().collect::<Vec<_>>(), pages.clone());
            prop_assert_eq!((parsed.len(), parsed.is_empty()), (pages.len(), pages.is_empty()));
            prop_assert_eq!(parsed.get(0), pages.first().copied());
            prop_assert_eq!(parsed.get(pages.len()), None);
            // Any other length is refused.
            let longer = [&bytes[..], &vec![0; cut]].concat();
            prop_assert_eq!(Pages::parse(&longer), Err(PackedError::Pages(longer.len())));
        }

        #[test]
        fn a_column_is_what_stands_in_the_rows_at_its_rank(rows in 0usize..9, ranks in 0usize..5, rest in 0usize..5) {
            let rest = if ranks == 0 { 0 } else { rest % ranks };
            let number = |row: usize, rank: usize| (row * 16 + rank) as u32;
            let mut pages: Vec<u32> =
                (0..rows).flat_map(|row| (0..ranks).map(move |rank| number(row, rank))).collect();
            pages.extend((0..rest).map(|rank| number(rows, rank)));
            let bytes = pack_pages(pages);
            let parsed = Pages::parse(&bytes).unwrap();
            for rank in 0..ranks {
                let expected: Vec<u32> = (0..rows).map(|row| number(row, rank)).collect();
                prop_assert_eq!(parsed.column(rank, ranks).collect::<Vec<_>>(), expected);
            }
            prop_assert_eq!(parsed.column(ranks, ranks).count(), 0);
        }

        #[test]
        fn outcomes_come_back_and_other_codes_are_refused(codes: Vec<u8>) {
            for &code in &codes {
                match Outcome::try_from(code) {
                    Ok(outcome) => prop_assert_eq!(outcome as u8, code),
                    Err(error) => {
                        prop_assert!(code >= OUTCOMES.len() as u8);
                        prop_assert_eq!(error, PackedError::Outcome(code));
                    }
                }
            }
            let outcomes: Vec<Outcome> = codes.iter().map(|code| OUTCOMES[usize::from(*code) % 4]).collect();
            let parsed: Result<Vec<Outcome>, _> =
                pack_outcomes(outcomes.iter().copied()).iter().map(|code| Outcome::try_from(*code)).collect();
            prop_assert_eq!(parsed, Ok(outcomes));
        }
    }

    proptest! {
        #[test]
        fn changes_come_back_but_for_kinds_that_nobody_knows(
            changes: Vec<(u8, u8, [u8; 16])>, cut in 1..CHANGE_BYTES,
        ) {
            let kinds = [ChangeKind::Visible, ChangeKind::Gone, ChangeKind::VisibleOnSsd, ChangeKind::GoneFromSsd];
            let change = |&(kind, group, hash): &(u8, u8, [u8; 16])| {
                Change { kind: kinds[usize::from(kind) % 4], group, hash }
            };
            let changes: Vec<Change> = changes.iter().map(change).collect();
            let packed = pack_changes(changes.iter().copied());
            prop_assert_eq!(packed.len(), changes.len() * CHANGE_BYTES);
            prop_assert_eq!(parse_changes(&packed).unwrap().collect::<Vec<_>>(), changes.clone());
            let unknown = [&packed[..], &[4; CHANGE_BYTES]].concat();
            prop_assert_eq!(parse_changes(&unknown).unwrap().collect::<Vec<_>>(), changes);
            let longer = [&packed[..], &vec![0; cut]].concat();
            prop_assert_eq!(parse_changes(&longer).err(), Some(PackedError::Changes(longer.len())));
        }
    }

    /// The order is the wire's: `kvlane.proto` names the codes.
    #[test]
    fn the_codes_are_those_of_the_wire() {
        assert_eq!(&pack_outcomes(OUTCOMES)[..], [0, 1, 2, 3]);
        assert_eq!(&pack_pages([1, 0x0403_0201])[..], [1, 0, 0, 0, 1, 2, 3, 4]);
        let gone = Change { kind: ChangeKind::Gone, group: 3, hash: [7; 16] };
        assert_eq!(&pack_changes([gone])[..], [&[1, 3][..], &[7; 16]].concat());
    }
}
