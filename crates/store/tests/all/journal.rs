//! The journal against a plain list: it has exactly the last entries, and a reader that misses one must start again.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use std::collections::VecDeque;

use kvlane_block::{BlockHash, CutDigest, Namespace};
use kvlane_memory::{ExtentAllocator, PAGE_BYTES};
use kvlane_store::{
    Caller, Chain, Change, ClaimOutcome, Index, Journal, JournalEntry, JournalRead, OwnerId, ShardNumber,
    SpaceId, StoreOptions, WriterId,
};
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Op {
    Note {
        space: usize,
        number: u8,
        change: bool,
    },
    Read {
        reader: usize,
        space: usize,
        most: usize,
    },
    /// With a cursor that is nobody's.
    ReadAt(u64),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (0usize..2, any::<u8>(), any::<bool>()).prop_map(|(space, number, change)| Op::Note { space, number, change }),
        2 => (0usize..3, 0usize..2, 1usize..6).prop_map(|(reader, space, most)| Op::Read { reader, space, most }),
        1 => any::<u64>().prop_map(Op::ReadAt),
    ]
}

fn spaces() -> [SpaceId; 2] {
    let mut index = index(8);
    [space(&mut index, 1), space(&mut index, 2)]
}

fn index(pages: u32) -> Index {
    let extents = ExtentAllocator::new(pages, std::slice::from_ref(&(0..pages)));
    Index::new(extents, u64::from(pages) * PAGE_BYTES, StoreOptions::default())
}

fn space(index: &mut Index, namespace: u8) -> SpaceId {
    index.space(Namespace([namespace; 16]), "model", CutDigest([9; 16]), &[PAGE_BYTES])
}

fn entry(space: SpaceId, number: u8, change: bool) -> JournalEntry {
    let change = if change { Change::Visible } else { Change::Gone };
    JournalEntry { change, space, hash: BlockHash([number; 16]) }
}

/// All of one space, as a reader wants it.
fn of(space: SpaceId) -> impl FnMut(&JournalEntry, &mut Vec<JournalEntry>) {
    move |entry, out| out.extend((entry.space == space).then_some(*entry))
}

proptest! {
    #[test]
    fn exactly_the_last_entries_are_read_in_their_order(
        capacity in 1usize..9, ops in prop::collection::vec(op(), 1..200),
    ) {
        let spaces = spaces();
        let mut journal = Journal::new(capacity);
        // Entries with their numbers, as many as are kept; and how many there were.
        let (mut list, mut written): (VecDeque<(u64, JournalEntry)>, u64) = (VecDeque::new(), 0);
        // Of each reader: its cursor, and the number of the last entry that it has seen. None before it has read.
        let mut readers: [(u64, Option<u64>); 3] = [(0, None); 3];
        let mut is_open = false;
        for op in ops {
            match op {
                Op::Note { space, number, change } => {
                    let entry = entry(spaces[space], number, change);
                    prop_assert_eq!(journal.note(entry), is_open);
                    if is_open {
                        written += 1;
                        list.push_back((written, entry));
                        if list.len() > capacity {
                            list.pop_front();
                        }
                    }
                }
                Op::Read { reader, space, most } => {
                    is_open = true;
                    let (cursor, seen) = readers[reader];
                    let mut out = Vec::new();
                    let read = journal.read(cursor, most, &mut out, of(spaces[space]));
                    let oldest = list.front().map_or(written + 1, |(number, _)| *number);
                    let Some(seen) = seen.filter(|seen| seen + 1 >= oldest) else {
                        prop_assert!(read.start_again && out.is_empty() && !read.has_more);
                        readers[reader] = (read.cursor, Some(written));
                        continue;
                    };
                    prop_assert!(!read.start_again);
                    let mut wanted = Vec::new();
                    let mut last = seen;
                    for (number, entry) in list.iter().filter(|(number, _)| *number > seen) {
                        if wanted.len() == most {
                            break;
                        }
                        last = *number;
                        wanted.extend((entry.space == spaces[space]).then_some(*entry));
                    }
                    prop_assert_eq!(out, wanted);
                    prop_assert_eq!(read.has_more, last < written);
                    prop_assert_eq!(read.cursor - cursor, last - seen);
                    readers[reader] = (read.cursor, Some(last));
                }
                Op::ReadAt(cursor) => {
                    is_open = true;
                    let mut out = Vec::new();
                    let read = journal.read(cursor, usize::MAX, &mut out, of(spaces[0]));
                    prop_assert!(read.start_again || out.len() <= list.len());
                }
            }
        }
    }
}

/// Who has not read keeps no memory, and is told to start again whatever the cursor.
#[test]
fn nothing_is_kept_before_somebody_reads() {
    let [space, _] = spaces();
    let mut journal = Journal::default();
    assert!(!journal.note(entry(space, 1, true)));
    let mut out = Vec::new();
    let read = journal.read(0, 10, &mut out, of(space));
    assert_eq!(read, JournalRead { cursor: read.cursor, start_again: true, has_more: false });
    assert!(journal.note(entry(space, 2, true)));
    journal.read(read.cursor, 10, &mut out, of(space));
    assert_eq!(out, [entry(space, 2, true)]);
}

/// A read is over in a bounded time, also where nothing of what it passes is wanted.
#[test]
fn a_read_among_entries_of_others_goes_on_where_it_ended() {
    let [mine, others] = spaces();
    let mut journal = Journal::default();
    let mut out = Vec::new();
    let mut read = journal.read(0, 10, &mut out, of(mine));
    (0..60_000).for_each(|_| assert!(journal.note(entry(others, 1, true))));
    journal.note(entry(mine, 7, false));
    let mut reads = 0;
    while out.is_empty() {
        read = journal.read(read.cursor, 10, &mut out, of(mine));
        reads += 1;
        assert!(!read.start_again);
    }
    assert_eq!(out, [entry(mine, 7, false)]);
    assert!(!read.has_more && (2..20).contains(&reads), "{reads} reads");
}

fn claim(index: &mut Index, space: SpaceId, chain: Chain, number: u8) -> ClaimOutcome {
    let mut outcomes = Vec::new();
    let now = std::time::Instant::now();
    index.claim(
        &Caller { owner: OwnerId(1), writer: WriterId(1), space, shard: ShardNumber(0), now },
        chain,
        &[BlockHash([number; 16])],
        &mut outcomes,
    );
    outcomes[0]
}

fn save(index: &mut Index, space: SpaceId, number: u8) {
    if let ClaimOutcome::Claimed(claimed) = claim(index, space, Chain::Start, number) {
        index.commit(&[claimed], std::time::Instant::now());
        for check in index.take_unsealed(u64::MAX, usize::MAX) {
            index.finish_seal(check, &[0]);
        }
    }
}

/// What vLLM's listeners need: eviction, and the end of what never became visible, are told, of the engine's own spaces only.
#[test]
fn evicted_dropped_and_aborted_blocks_are_gone() {
    let mut index = index(4);
    let (mine, others) = (space(&mut index, 1), space(&mut index, 2));
    let mut out = Vec::new();
    let start = index.read_journal(0, &[mine], 100, &mut out);
    assert!(start.start_again);
    (0..6).for_each(|number| save(&mut index, mine, number));
    save(&mut index, others, 77);
    let read = index.read_journal(start.cursor, &[mine], 100, &mut out);
    let told: Vec<(u8, Change)> = out.drain(..).map(|(_, entry)| (entry.hash.0[0], entry.change)).collect();
    use Change::{Gone, Visible};
    let wanted = [
        (0, Visible),
        (1, Visible),
        (2, Visible),
        (3, Visible),
        (0, Gone),
        (4, Visible),
        (1, Gone),
        (5, Visible),
        (2, Gone),
    ];
    assert_eq!(told, wanted);
    // Claimed and aborted: never visible. A namespace that is dropped.
    if let ClaimOutcome::Claimed(claimed) = claim(&mut index, mine, Chain::Start, 9) {
        index.abort(&[claimed], std::time::Instant::now());
    }
    let blocks = index.blocks_of(Namespace([1; 16]));
    index.drop_blocks(&blocks);
    index.read_journal(read.cursor, &[others, mine], 100, &mut out);
    let mut told: Vec<(usize, u8, Change)> =
        out.drain(..).map(|(place, entry)| (place, entry.hash.0[0], entry.change)).collect();
    told.sort_by_key(|(_, number, _)| *number);
    assert_eq!(told, [(1, 3, Gone), (1, 4, Gone), (1, 5, Gone), (1, 9, Gone)]);
    assert_eq!(index.stats().counters.journal_restarts, 0, "a new reader has missed nothing");
    index.read_journal(u64::MAX, &[mine], 1, &mut out);
    assert_eq!(index.stats().counters.journal_restarts, 1);
}
