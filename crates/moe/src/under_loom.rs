//! Tests of the protocol under loom, which tries orders of two ranks' steps, and all values that a load may return on any
//! processor. The code is that of [`Rank`]. Its memory is a model's. A wait looks at the peer each time, as a model has no clock.
//! A test also fails if a rank reads bytes that the other one may be writing, or waits for ever.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use loom::thread;

use crate::heap::Heap;
use crate::layout::{Layout, STATE};
use crate::memory::{Defects, Memory};
use crate::rank::Sent;
use crate::{Handle, MoeError, Number, Rank, RowLayout, Shape, Sum};

/// Two ranks with a token and an expert each.
const SHAPE: Shape = Shape {
    ranks: 2,
    experts: 2,
    top_k: 1,
    max_tokens: 1,
    row_bytes: 16,
    scale_bytes: 0,
    hidden: 8,
    number: Number::Bf16,
    alignment: 1,
    layout: RowLayout::Experts,
};

/// Offsets of the words and rows in a memory that belong to dispatches of one parity.
struct Offsets {
    counts: Vec<usize>,
    row_words: Vec<usize>,
    rows: Vec<usize>,
    /// Combine writes these: one of each rank, and one of the token's pair.
    sum_words: Vec<usize>,
    sums: Vec<usize>,
}

impl Offsets {
    fn of(layout: &Layout, number: u64) -> Offsets {
        let counts = [0, 1].map(|source| [0, 1].map(|expert| layout.count(number, source, expert)));
        let (row_words, rows) = [0, 1].map(|source| layout.row(number, source, 0)).into_iter().unzip();
        let sums = [0, 1].map(|rank| layout.sum(number, rank, 0));
        let (sum_words, sums) = sums.into_iter().chain([layout.pair_row(number, 0, 0)]).unzip();
        Offsets { counts: counts.concat(), row_words, rows, sum_words, sums }
    }
}

/// The defects of both ranks' memories.
type Plant = fn(&Layout) -> Defects;

fn sound(_: &Layout) -> Defects {
    Defects::default()
}

fn ranks(shape: Shape, plant: Plant) -> [Rank; 2] {
    let layout = Layout::of(&shape).unwrap();
    let memories = [(); 2].map(|()| {
        let mut words = vec![STATE];
        let mut rows = Vec::new();
        for number in [0, 1] {
            let at = Offsets::of(&layout, number);
            words.extend([at.counts, at.row_words, at.sum_words].concat());
            // Behind a row stands what goes with it.
            rows.extend(at.rows.into_iter().map(|row| (row, 32)));
            rows.extend(at.sums.into_iter().map(|row| (row, 16)));
        }
        Memory::new(words, rows, plant(&layout))
    });
    [0, 1].map(|rank| {
        let heap = |rank: usize| Heap::from(memories[rank].clone());
        let mut peers = vec![None, None];
        peers[1 - rank] = Some((heap(1 - rank), own_process()));
        Rank::new(shape, rank, layout, heap(rank), peers, Duration::MAX)
    })
}

/// Both ranks of a model are of this process, which lives.
fn own_process() -> OwnedFd {
    static PROCESS: OnceLock<OwnedFd> = OnceLock::new();
    let open = || {
        let flags = rustix::process::PidfdFlags::empty();
        rustix::process::pidfd_open(rustix::process::getpid(), flags).unwrap()
    };
    PROCESS.get_or_init(open).try_clone().unwrap()
}

/// Both ranks do this. Allows so many switches between them at points where neither has to wait, because trying all of them
/// would take hours.
fn check(switches: usize, shape: Shape, plant: Plant, work: impl Fn(Rank) + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(switches);
    let work = Arc::new(work);
    model.check(move || {
        let [first, second] = ranks(shape, plant);
        let of_second = Arc::clone(&work);
        let other = thread::spawn(move || of_second(second));
        work(first);
        other.join().unwrap();
    });
}

/// The byte of which a rank's token consists in a dispatch.
fn token(rank: usize, number: u64) -> u8 {
    (number as u8) << 4 | rank as u8
}

/// Sends this rank's token to the other one's expert.
fn send(rank: &mut Rank, number: u64) -> Sent {
    let other = 1 - rank.rank as i64;
    rank.send(&[token(rank.rank, number); 16], &[], &[other], &[1.0]).unwrap()
}

fn receive(rank: &mut Rank, sent: Sent) -> Result<(Handle, Vec<u8>), MoeError> {
    let arrived = rank.arrive(sent)?;
    let mut rows = vec![0; arrived.arrivals.rows * 16];
    Ok((rank.place(arrived, &mut rows, &mut [])?, rows))
}

/// Exchanges tokens.
fn dispatch(rank: &mut Rank, number: u64) -> Handle {
    let sent = send(rank, number);
    let (handle, rows) = receive(rank, sent).unwrap();
    assert_eq!(rows, [token(1 - rank.rank, number); 16]);
    handle
}

/// An expert adds this to each byte.
const EXPERT: u8 = 0x40;

fn send_back(rank: &mut Rank, handle: &mut Handle, number: u64, sum: Sum) {
    let made = token(1 - rank.rank, number) + EXPERT;
    rank.send_back(handle, &[made; 16], sum, None).unwrap();
}

fn gather(rank: &mut Rank, handle: Handle, number: u64) {
    let mut sums = [0; 16];
    rank.gather(handle, &mut sums).unwrap();
    assert_eq!(sums, [token(rank.rank, number) + EXPERT; 16]);
}

fn combine(rank: &mut Rank, mut handle: Handle, number: u64, sum: Sum) {
    send_back(rank, &mut handle, number, sum);
    gather(rank, handle, number);
}

/// Three dispatches, each combined before the next one.
fn one_after_the_other(mut rank: Rank) {
    for number in 1..=3 {
        let handle = dispatch(&mut rank, number);
        combine(&mut rank, handle, number, Sum::Exact);
    }
}

#[test]
fn tokens_and_sums_arrive() {
    check(2, SHAPE, sound, one_after_the_other);
}

/// One dispatch, with more switches.
fn once(mut rank: Rank) {
    let handle = dispatch(&mut rank, 1);
    combine(&mut rank, handle, 1, Sum::Reduced);
}

#[test]
fn a_token_and_its_sum_arrive() {
    check(4, SHAPE, sound, once);
}

/// The second dispatch is without tokens, and none is combined. So counts alone say that the first one's rows are read.
fn with_a_quiet_dispatch(mut rank: Rank) {
    dispatch(&mut rank, 1);
    let sent = rank.send(&[], &[], &[], &[]).unwrap();
    let (_, rows) = receive(&mut rank, sent).unwrap();
    assert!(rows.is_empty());
    dispatch(&mut rank, 3);
}

#[test]
fn a_dispatch_without_tokens_keeps_ranks_in_step() {
    check(3, SHAPE, sound, with_a_quiet_dispatch);
}

/// Combines the second dispatch first, and gathers it after the third was sent back. Combine has the dispatch's number, or one
/// that counts combines: a defect.
fn two_open(mut rank: Rank, has_own_count: bool) {
    let mut first = dispatch(&mut rank, 1);
    let mut second = dispatch(&mut rank, 2);
    if has_own_count {
        (second.dispatch.number, first.dispatch.number) = (1, 2);
    }
    send_back(&mut rank, &mut second, 2, Sum::Exact);
    send_back(&mut rank, &mut first, 1, Sum::Exact);
    gather(&mut rank, first, 1);
    let mut third = dispatch(&mut rank, 3);
    send_back(&mut rank, &mut third, 3, Sum::Exact);
    gather(&mut rank, second, 2);
    gather(&mut rank, third, 3);
}

#[test]
fn two_dispatches_are_combined_in_any_order() {
    check(2, SHAPE, sound, |rank| two_open(rank, false));
}

/// Both ranks send their first token to expert 0, which has room for one row. The third dispatch has the refusal's words.
fn refused(mut rank: Rank) {
    let sent = rank.send(&[token(rank.rank, 1); 16], &[], &[0], &[1.0]).unwrap();
    let over = MoeError::OverCapacity { rank: 0, needed: 2, capacity: 1 };
    let received = receive(&mut rank, sent);
    if rank.rank == 0 {
        assert_eq!(received.unwrap_err(), over);
    } else {
        let (mut handle, _) = received.unwrap();
        rank.send_back(&mut handle, &[0; 16], Sum::Exact, None).unwrap();
        assert_eq!(rank.gather(handle, &mut [0; 16]).unwrap_err(), over);
    }
    dispatch(&mut rank, 2);
    let handle = dispatch(&mut rank, 3);
    combine(&mut rank, handle, 3, Sum::Exact);
}

#[test]
fn ranks_are_in_step_after_a_refusal() {
    check(2, Shape { layout: RowLayout::Masked { capacity: 1 }, ..SHAPE }, sound, refused);
}

// Controls: with each of these defects a model fails.

#[test]
#[should_panic(expected = "Causality violation")]
fn a_row_whose_word_is_stored_relaxed_is_found() {
    let plant = |layout: &Layout| Defects {
        stored_relaxed: Offsets::of(layout, 1).row_words.into_iter().collect(),
        ..Defects::default()
    };
    check(2, SHAPE, plant, one_after_the_other);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_row_whose_word_is_loaded_relaxed_is_found() {
    let plant = |layout: &Layout| Defects {
        loaded_relaxed: Offsets::of(layout, 1).row_words.into_iter().collect(),
        ..Defects::default()
    };
    check(2, SHAPE, plant, one_after_the_other);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_sum_whose_word_is_stored_relaxed_is_found() {
    let plant = |layout: &Layout| Defects {
        stored_relaxed: Offsets::of(layout, 1).sum_words.into_iter().collect(),
        ..Defects::default()
    };
    check(2, SHAPE, plant, one_after_the_other);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn counts_that_are_stored_relaxed_are_found() {
    let plant = |layout: &Layout| Defects {
        stored_relaxed: Offsets::of(layout, 2).counts.into_iter().collect(),
        ..Defects::default()
    };
    check(2, SHAPE, plant, with_a_quiet_dispatch);
}

#[test]
#[should_panic(expected = "PeerLeft")]
fn a_rank_that_leaves_with_a_relaxed_store_is_found() {
    let plant = |_: &Layout| Defects { stored_relaxed: [STATE].into(), ..Defects::default() };
    check(2, SHAPE, plant, once);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_receiver_that_does_not_wait_is_found() {
    let plant = |layout: &Layout| Defects {
        not_awaited: Offsets::of(layout, 1).row_words.into_iter().map(|word| (word, 1)).collect(),
        ..Defects::default()
    };
    check(2, SHAPE, plant, once);
}

/// Odd dispatches use the memory of even ones, that of rows and sums too.
fn one_parity(layout: &Layout) -> Defects {
    let [even, odd] = [0, 1].map(|number| {
        let Offsets { counts, row_words, rows, sum_words, sums } = Offsets::of(layout, number);
        let rests = rows.iter().map(|row| row + layout.rest_at).collect();
        [counts, row_words, rows, rests, sum_words, sums].concat()
    });
    Defects { instead: odd.into_iter().zip(even).collect(), ..Defects::default() }
}

/// Without the sums of the first dispatch, which would tell a rank that the other one has its rows.
fn not_combined(mut rank: Rank) {
    dispatch(&mut rank, 1);
    dispatch(&mut rank, 2);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn one_parity_is_found() {
    check(2, SHAPE, one_parity, not_combined);
}

/// The fast rank sends back the third dispatch, its third combine, where the slow one still reads the first combine.
#[test]
#[should_panic(expected = "Causality violation")]
fn combine_that_has_a_count_of_its_own_is_found() {
    check(2, SHAPE, sound, |rank| two_open(rank, true));
}
