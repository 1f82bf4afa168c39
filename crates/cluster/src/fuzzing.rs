//! Properties of the messages between daemons for bytes of any origin, for crates/fuzz-targets: each function panics if its
//! property does not hold.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a panic is what they are for")]

use std::ops::Range;
use std::time::Instant;

use kvlane_block::BlockHash;
use kvlane_store::FindDone;

use crate::fields::{BadMessage, VERSION};
use crate::index_messages::{FromReplica, KEYS_MAX, ToReplica};
use crate::members::MemberNumber;
use crate::messages::{BLOCKS_MAX, Blocks, Message};
use crate::questions::{FoundRuns, Needs, Questions};

/// Heap bytes of a decoded message for each byte of it: a run of two bytes becomes eight, in a vector that may be half empty.
const HEAP_FACTOR: usize = 16;
/// Parts of the question that an answer is for.
const PARTS: [Range<u32>; 2] = [0..1000, 1000..1003];

/// Decodes a message: it is refused with a sentence, or it is small, within the limits, and encodes to the same meaning. The
/// same bytes in a later version are refused.
pub fn message(bytes: &[u8]) {
    let message = match Message::decode(bytes) {
        Ok(message) => message,
        Err(why) => return assert!(!why.to_string().is_empty()),
    };
    // A field that comes twice counts as the second says.
    let later = Message::decode(&[bytes, &[8, VERSION as u8 + 1]].concat());
    assert_eq!(later, Err(BadMessage::Later(VERSION + 1)));
    let again = message.clone().encode();
    // An address may be written longer.
    assert!(again.len() <= 2 * bytes.len(), "it grew");
    assert_eq!(Message::decode(&again).as_ref(), Ok(&message));
    assert!(heap_bytes(&message) <= HEAP_FACTOR * bytes.len(), "{} bytes", heap_bytes(&message));
    match &message {
        Message::Question { blocks, .. } | Message::Borrow { blocks, .. } => {
            assert!(blocks.hashes.len() <= BLOCKS_MAX && !blocks.shard_bytes.contains(&0));
        }
        Message::Answer { first, runs, .. } => {
            answer(Needs::All, *first, vec![(MemberNumber(1), runs.clone())]);
        }
        Message::Lease { lease, .. } => {
            for (blocks, shards) in [(1, 1), (3, 2), (20, 2), (BLOCKS_MAX, 1)] {
                let Some(found) = lease.blocks(blocks, shards) else { continue };
                assert_eq!(found.len(), blocks);
                assert!(found.iter().flatten().all(|crcs| crcs.len() == shards));
            }
        }
        Message::ToReplica(ToReplica::Announce { delta, .. }) => {
            let lists = delta.changes.iter().flat_map(|changes| [&changes.announced, &changes.withdrawn]);
            assert!(lists.clone().all(|list| list.len() <= KEYS_MAX));
            assert_eq!(lists.map(Vec::len).sum::<usize>(), delta.keys());
        }
        Message::ToReplica(ToReplica::Part { part, .. }) => assert!(part.hashes.len() <= KEYS_MAX),
        Message::FromReplica(FromReplica::Located { first, owners, .. }) => {
            let owners = (1..).map(MemberNumber).zip(owners.iter().map(|(_, runs)| runs.clone()));
            answer(Needs::Any, *first, owners.collect());
        }
        Message::Beat { .. } | Message::Return { .. } | Message::ToReplica(_) | Message::FromReplica(_) => {}
    }
}

/// An answer to an open question counts for its part alone.
fn answer(needs: Needs, first: u32, found: FoundRuns) {
    for (_, runs) in &found {
        assert!(runs.iter().all(|run| run.start < run.end));
        assert!(runs.windows(2).all(|pair| pair[0].end <= pair[1].start));
    }
    let (now, member) = (Instant::now(), MemberNumber(1));
    let mut questions = Questions::default();
    let done = FindDone::new(|_| ());
    let number = questions.open((&[member], needs), &PARTS, (now, now), done).ok().expect("it is the first");
    let part = PARTS.into_iter().find(|part| part.start == first);
    assert_eq!(questions.answer(number, member, first, found).is_some(), part.is_some());
    let ended = questions.end_all().pop().expect("it is open");
    let mut found = ended.found.values().flatten();
    assert!(found.all(|run| {
        let part = part.as_ref().expect("it counts for a part");
        run.start < run.end && part.start <= run.start && run.end <= part.end
    }));
}

fn heap_bytes(message: &Message) -> usize {
    let of_hashes = |hashes: &Vec<BlockHash>| 16 * hashes.capacity();
    let of_blocks = |blocks: &Blocks| 8 * blocks.shard_bytes.capacity() + of_hashes(&blocks.hashes);
    match message {
        Message::Beat { name, software } => name.capacity() + software.capacity(),
        Message::Question { blocks, .. } | Message::Borrow { blocks, .. } => of_blocks(blocks),
        Message::Answer { runs, .. } => 8 * runs.capacity(),
        Message::Lease { lease, .. } => {
            lease.gone.capacity() + 4 * lease.crcs.capacity() + lease.refused.capacity()
        }
        Message::ToReplica(ToReplica::Announce { delta, .. }) => {
            let lists = delta.changes.iter().flat_map(|changes| [&changes.announced, &changes.withdrawn]);
            size_of_val(&*delta.changes) + lists.map(of_hashes).sum::<usize>()
        }
        Message::ToReplica(ToReplica::Part { part, .. }) => of_hashes(&part.hashes),
        Message::FromReplica(FromReplica::Owners { addresses, .. }) => size_of_val(&**addresses),
        Message::FromReplica(FromReplica::Unknown { why, .. }) => why.capacity(),
        Message::FromReplica(FromReplica::Located { owners, .. }) => {
            let runs = owners.iter().map(|(_, runs)| 8 * runs.capacity());
            size_of_val(&**owners) + runs.sum::<usize>()
        }
        Message::Return { .. } | Message::ToReplica(_) | Message::FromReplica(_) => 0,
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    proptest! {
        // The fuzzer looks deeper; this keeps its target in order.
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn what_the_fuzzer_checks_holds_for_some_bytes(bytes in vec(prop_oneof![0..8u8, any::<u8>()], 0..400)) {
            super::message(&bytes);
        }
    }
}
