//! Ranks that are gone, silent or wrong.

use std::time::{Duration, Instant};

use kvlane_moe::gpu::{Input, Output, Phases, join_on_gpu};
use kvlane_moe::{MoeError, Phase, RowLayout, Shape, join};

use crate::host::{Host, OnGpu, join_all, options, random_given, small};

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

#[test]
fn more_rows_than_there_is_room_for_are_told_with_their_number() {
    let host = Host::new(1);
    if !host.has_kernels() {
        return;
    }
    let capacity = 8;
    for (layout, needed) in
        [(RowLayout::Experts, 36), (RowLayout::Masked { capacity }, 20), (RowLayout::Tokens, 10)]
    {
        let alignment = if layout == RowLayout::Experts { 4 } else { 1 };
        let shape = Shape { alignment, layout, ..small(1) };
        let mut given = random_given(&shape, 1);
        // Of ten tokens 20 pairs want expert 0, 5 expert 3, and 5 expert 9.
        given[0].ids = (0..10).flat_map(|token| [0, 0, if token % 2 == 0 { 3 } else { 9 }]).collect();
        (given[0].rows, given[0].scales) = (vec![1; 10 * 64], vec![1; 10 * 8]);
        given[0].weights = vec![1.0; 30];
        let mut rank = host.join_with_capacity(&shape, capacity).remove(0);
        let sent = rank.send(&given[0], Phases::Both);
        let wanted = match layout {
            RowLayout::Masked { .. } => MoeError::OverCapacity { rank: 0, needed: 20, capacity },
            _ => MoeError::TooManyRows { needed, capacity },
        };
        assert_eq!(failure(&rank), wanted);
        drop(sent);
    }
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
        0 => join(&shape, 0, PATIENCE, all_gather).map(drop),
        _ => join_on_gpu(&shape, 1, &host.gpu(0), &options(&shape, true, PATIENCE), all_gather).map(drop),
    });
    assert!(why(0, mixed).contains("memory is the host's here and a GPU's at rank 1"));
    let exact = join_all(2, |rank, all_gather| {
        let mut options = options(&shape, true, PATIENCE);
        options.is_exact = rank == 0;
        join_on_gpu(&shape, rank, &host.gpu(0), &options, all_gather).map(drop)
    });
    assert!(why(1, exact).contains("for reduced sums alone here and a GPU's at rank 0"));
    let large = join_all(1, |rank, all_gather| {
        let shape = Shape { max_tokens: 1 << 15, ..small(1) };
        join_on_gpu(&shape, rank, &host.gpu(0), &options(&shape, true, PATIENCE), all_gather).map(drop)
    });
    assert_eq!(why(0, large), "max_tokens is 32768, and goes to 16384 on GPUs");
}
