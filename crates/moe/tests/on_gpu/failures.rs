//! Ranks that are gone, silent or wrong.

use std::time::{Duration, Instant};

use kvlane_moe::gpu::{Input, Output, Phases, join_on_gpu};
use kvlane_moe::{MoeError, Phase, RowLayout, Shape, Sum, join};

use crate::host::{EXACT, Given, Got, Host, OnGpu, POISON, expected, join_all, options, random_given, small};

const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until the rank's kernels have ended, and returns why it failed.
fn failure(rank: &OnGpu) -> MoeError {
    rank.stream.synchronize().unwrap();
    rank.rank.check().unwrap_err()
}

/// Its kernels end, and it names the rank and the part that did not come.
#[test]
fn a_rank_that_leaves_is_named_by_those_that_wait_for_it() {
    let host = Host::new(2);
    if !host.has_kernels() {
        return;
    }
    let shape = small(3);
    let mut ranks = host.join(&shape, true, PATIENCE);
    let given = random_given(&shape, 3);
    drop(ranks.remove(1));
    let sent: Vec<_> = ranks.iter_mut().map(|rank| rank.send(&given[rank.number], Phases::Both)).collect();
    for rank in &ranks {
        let found = failure(rank);
        let MoeError::PeerLeft { rank: 1, phase: Phase::Counts, because: None } = found else {
            panic!("{found:?}")
        };
    }
    drop(sent);
    // For good.
    let again = ranks[0].try_send(&given[0], Phases::Both).err().unwrap();
    assert!(matches!(again, MoeError::PeerLeft { rank: 1, .. }), "{again:?}");
}

#[test]
fn a_rank_that_is_silent_is_named_after_the_timeout() {
    let host = Host::new(1);
    if !host.has_kernels() {
        return;
    }
    let shape = small(2);
    let mut ranks = host.join(&shape, true, Duration::from_millis(300));
    let given = random_given(&shape, 3);
    let begun = Instant::now();
    let _sent = ranks[0].send(&given[0], Phases::Both);
    let found = failure(&ranks[0]);
    assert!(matches!(found, MoeError::TimedOut { rank: 1, phase: Phase::Counts, .. }), "{found:?}");
    assert!(begun.elapsed() >= Duration::from_millis(300));
    // The other one learns because of whom.
    let _sent = ranks[1].send(&given[1], Phases::Both);
    ranks[1].stream.synchronize().unwrap();
    // Its rows had all come.
    assert!(ranks[1].rank.check().is_ok());
    let more = ranks[1].try_send(&given[1], Phases::Both).unwrap();
    let found = failure(&ranks[1]);
    assert!(matches!(found, MoeError::PeerLeft { rank: 0, because: Some(1), .. }), "{found:?}");
    drop(more);
}

#[test]
fn an_expert_that_does_not_exist_is_told_and_nothing_is_sent() {
    let host = Host::new(1);
    if !host.has_kernels() {
        return;
    }
    for max_tokens in [20, 300] {
        let shape = Shape { max_tokens, ..small(2) };
        for wrong in [10, -2, i64::MAX] {
            let mut ranks = host.join(&shape, true, PATIENCE);
            let mut given = random_given(&shape, 1);
            given[0].ids = vec![3; 9];
            given[0].ids[7] = wrong;
            (given[0].rows, given[0].scales, given[0].weights) =
                (vec![1; 3 * 64], vec![1; 3 * 8], vec![1.0; 9]);
            let _sent = ranks[0].send(&given[0], Phases::Both);
            let found = failure(&ranks[0]);
            assert!(
                matches!(found, MoeError::BadExpert { token: 2, k: 1, expert, experts: 10 } if expert == wrong),
                "{found:?}"
            );
            let _sent = ranks[1].send(&given[1], Phases::Both);
            let found = failure(&ranks[1]);
            assert!(matches!(found, MoeError::PeerLeft { rank: 0, phase: Phase::Counts, .. }), "{found:?}");
        }
    }
}

/// Rows for which each rank would have to have room.
fn needed(shape: &Shape, given: &[Given]) -> Vec<usize> {
    let tokens = || given.iter().flat_map(|given| given.ids.chunks(shape.top_k));
    let of_expert = |expert: usize| tokens().flatten().filter(|id| **id == expert as i64).count();
    let of_rank = |rank| {
        let experts = shape.experts_of(rank);
        match shape.layout {
            RowLayout::Experts => {
                experts.map(|expert| of_expert(expert).next_multiple_of(shape.alignment)).sum()
            }
            RowLayout::Masked { .. } => experts.map(of_expert).max().unwrap_or(0),
            RowLayout::Tokens => tokens()
                .filter(|ids| ids.iter().any(|id| *id >= 0 && experts.contains(&(*id as usize))))
                .count(),
        }
    };
    (0..shape.ranks).map(of_rank).collect()
}

/// A rank without room gets no rows, the sums of tokens that wanted its experts are NaN, and all others are right. Each rank that
/// is touched says so once. It works again in the next dispatch that fits.
#[test]
fn a_dispatch_without_room_fails_where_it_is_wanted_and_later_ones_work() {
    let host = Host::new(2);
    if !host.has_kernels() {
        return;
    }
    let large = RowLayout::Masked { capacity: 180 };
    for (layout, room, capacity, is_split) in [
        (RowLayout::Experts, RowLayout::Experts, 44, false),
        (RowLayout::Masked { capacity: 10 }, large, 10, true),
        (RowLayout::Masked { capacity: 10 }, large, 10, false),
        (RowLayout::Tokens, RowLayout::Tokens, 24, true),
    ] {
        let alignment = if layout == RowLayout::Experts { 4 } else { 1 };
        let shape = Shape { alignment, layout, ..small(3) };
        let rounds: Vec<(Sum, Vec<Given>)> = (0..24)
            .map(|round| {
                let sum =
                    if round % 2 == 0 && layout != RowLayout::Tokens { Sum::Exact } else { Sum::Reduced };
                (sum, random_given(&shape, round))
            })
            .collect();
        let right = expected(&Shape { layout: room, ..shape }, &rounds);
        let ranks = match layout {
            RowLayout::Masked { .. } => host.join(&shape, true, PATIENCE),
            _ => host.join_with_capacity(&shape, capacity),
        };
        let touched: Vec<[usize; 3]> = std::thread::scope(|scope| {
            let threads: Vec<_> = ranks
                .into_iter()
                .map(|mut rank| {
                    let (rounds, right) = (&rounds, &right);
                    scope.spawn(move || one_without_room(&mut rank, capacity, rounds, right, is_split))
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let sums = [0, 1, 2].map(|index| touched.iter().map(|counts| counts[index]).sum::<usize>());
        assert!(sums.iter().all(|count| *count > 5), "{layout:?}: {sums:?}");
    }
}

/// How often this rank had no room, had but not for all of its tokens, and was not touched.
fn one_without_room(
    rank: &mut OnGpu,
    capacity: usize,
    rounds: &[(Sum, Vec<Given>)],
    right: &[Vec<Got>],
    is_split: bool,
) -> [usize; 3] {
    let shape = *rank.rank.shape();
    let mut touched = [0; 3];
    for (round, (sum, given)) in rounds.iter().enumerate() {
        let needed = needed(&shape, given);
        let lacks = |of: usize| needed[of] > capacity;
        let mut sent = rank.send(&given[rank.number], if is_split { Phases::Send } else { Phases::Both });
        if is_split {
            rank.try_receive(&mut sent).unwrap();
        }
        let rows = rank.rows_unchecked(&sent);
        if lacks(rank.number) {
            assert!(rows.counts.iter().all(|count| *count == 0), "{:?}", rows.counts);
            assert!(rows.rows.iter().all(|byte| *byte == POISON), "a row was written");
        }
        let tokens = if is_split {
            rank.send_back_unchecked(&mut sent, &rows, *sum, Phases::Send);
            rank.send_back_unchecked(&mut sent, &rows, *sum, Phases::Receive)
        } else {
            rank.send_back_unchecked(&mut sent, &rows, *sum, Phases::Both)
        };
        let mut lost = 0;
        let wanted = &right[rank.number][round].tokens;
        let bytes = shape.sum_bytes();
        for (token, ids) in given[rank.number].ids.chunks(shape.top_k).enumerate() {
            let got = &tokens[token * bytes..][..bytes];
            if ids.iter().any(|id| *id >= 0 && lacks(shape.rank_of(*id as usize))) {
                lost += 1;
                assert!(got.chunks(2).all(|element| element == [0xff, 0x7f]), "round {round}, token {token}");
            } else {
                assert_eq!(got, &wanted[token * bytes..][..bytes], "round {round}, token {token}");
            }
        }
        let said = rank.rank.check();
        if lacks(rank.number) || lost > 0 {
            let (of, told) = match said.unwrap_err() {
                MoeError::OverCapacity { rank, needed, .. } => (rank, needed as usize),
                MoeError::TooManyRows { rank, needed, .. } => (rank, needed),
                other => panic!("{other:?}"),
            };
            assert!(lacks(of) && told == needed[of], "{told} at {of}, and {needed:?} are needed");
        } else {
            said.unwrap();
        }
        rank.rank.check().unwrap();
        touched[if lacks(rank.number) { 0 } else { usize::from(lost == 0) + 1 }] += 1;
    }
    touched
}

#[test]
fn without_room_for_their_number_no_tokens_are_dispatched() {
    let host = Host::new(1);
    if !host.has_kernels() {
        return;
    }
    let mut one = host.join(&Shape { layout: RowLayout::Tokens, ..small(1) }, false, PATIENCE).remove(0);
    let input = Input { tokens: 0, rows: 16, scales: 16, ids: 16, id_bytes: 8, weights: None };
    let output =
        Output { rows: 16, scales: 16, counts: 16, starts: 0, ids: 16, weights: 16, scales_by_column: false };
    // SAFETY: it is refused before anything is launched.
    let refused = unsafe { one.rank.dispatch(one.stream.raw(), &input, Some(&output), Phases::Both) };
    assert!(matches!(refused.unwrap_err(), MoeError::BadInput(_)));
    one.rank.check().unwrap();
}

#[test]
fn ranks_that_differ_are_told_in_what() {
    let host = Host::new(1);
    if !host.has_kernels() {
        return;
    }
    let shape = small(2);
    let why = |rank: usize, joined: Vec<Result<(), MoeError>>| joined[rank].clone().unwrap_err().to_string();
    let mixed = join_all(2, |rank, all_gather| match rank {
        0 => join(&shape, 0, EXACT, PATIENCE, all_gather).map(drop),
        _ => join_on_gpu(&shape, 1, &host.gpu(0), &options(&shape, true, PATIENCE), all_gather).map(drop),
    });
    assert!(why(0, mixed).contains("device is cpu here and cuda at rank 1"));
    let exact = join_all(2, |rank, all_gather| {
        let mut options = options(&shape, true, PATIENCE);
        options.terms.is_exact = rank == 0;
        join_on_gpu(&shape, rank, &host.gpu(0), &options, all_gather).map(drop)
    });
    assert!(why(1, exact).contains("exact is False here and True at rank 0"));
    // One rank fails once all have met.
    let none = join_all(2, |rank, all_gather| {
        let mut options = options(&shape, true, PATIENCE);
        options.multiprocessors = (rank == 1).then_some(0);
        join_on_gpu(&shape, rank, &host.gpu(0), &options, all_gather).map(drop)
    });
    assert!(why(0, none.clone()).contains("rank 1: kvlane_moe_dispatch gets no multiprocessor"));
    assert!(why(1, none).contains("kvlane_moe_dispatch gets no multiprocessor"));
    let large = join_all(1, |rank, all_gather| {
        let shape = Shape { max_tokens: 1 << 15, ..small(1) };
        join_on_gpu(&shape, rank, &host.gpu(0), &options(&shape, true, PATIENCE), all_gather).map(drop)
    });
    assert_eq!(why(0, large), "max_tokens is 32768, and goes to 16384 on GPUs");
}
