//! Ranks in threads, beside loops that know nothing of slots, words or places.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

use half::bf16;
use kvlane_moe::{Handle, MoeError, Number, Phase, Rank, RowLayout, Shape, Sum, Terms, join};
use proptest::prelude::*;

const POISON: u8 = 0xa5;

/// The tokens of one rank.
#[derive(Debug, Clone)]
struct Input {
    rows: Vec<u8>,
    scales: Vec<u8>,
    ids: Vec<i64>,
    weights: Vec<f32>,
}

/// An all-gather among threads.
struct Board {
    told: Mutex<Vec<Vec<u8>>>,
    all: Barrier,
}

const EXACT: Terms = Terms { is_exact: true, cast: None };

fn joined(shape: Shape, timeout: Duration) -> Vec<Rank> {
    let board =
        Arc::new(Board { told: Mutex::new(vec![Vec::new(); shape.ranks]), all: Barrier::new(shape.ranks) });
    let threads: Vec<_> = (0..shape.ranks)
        .map(|rank| {
            let board = Arc::clone(&board);
            std::thread::spawn(move || {
                join(&shape, rank, EXACT, timeout, &mut |bytes: &[u8]| {
                    board.told.lock().unwrap()[rank] = bytes.to_vec();
                    board.all.wait();
                    let told = board.told.lock().unwrap().clone();
                    board.all.wait();
                    Ok(told)
                })
            })
        })
        .collect();
    threads.into_iter().map(|thread| thread.join().unwrap().unwrap()).collect()
}

fn held(shape: &Shape, rank: usize) -> std::ops::Range<usize> {
    let each = shape.experts.div_ceil(shape.ranks);
    (rank * each).min(shape.experts)..((rank + 1) * each).min(shape.experts)
}

/// Rows that each expert of a rank gets.
fn expected_counts(shape: &Shape, rank: usize, inputs: &[Input]) -> Vec<u32> {
    let ids = || inputs.iter().flat_map(|input| &input.ids);
    held(shape, rank).map(|expert| ids().filter(|id| **id == expert as i64).count() as u32).collect()
}

/// The error that a dispatch of a rank ends with, if one of its experts gets more rows than it has room for.
fn expected_error(shape: &Shape, rank: usize, inputs: &[Input]) -> Option<MoeError> {
    let RowLayout::Masked { capacity } = shape.layout else { return None };
    let needed = *expected_counts(shape, rank, inputs).iter().max()?;
    (needed as usize > capacity).then_some(MoeError::OverCapacity { rank, needed, capacity })
}

/// Each token that has an expert of a rank: source, token and its pairs there.
fn expected_tokens(shape: &Shape, rank: usize, inputs: &[Input]) -> Vec<(usize, usize, Vec<usize>)> {
    let mut found = Vec::new();
    for (source, input) in inputs.iter().enumerate() {
        for token in 0..input.ids.len() / shape.top_k {
            let here = |pair: &usize| held(shape, rank).any(|expert| expert as i64 == input.ids[*pair]);
            let pairs: Vec<_> = (token * shape.top_k..(token + 1) * shape.top_k).filter(here).collect();
            if !pairs.is_empty() {
                found.push((source, token, pairs));
            }
        }
    }
    found
}

/// The rows that a rank gets: for each expert that it holds those of all ranks, in the order of ranks, tokens and k; or each
/// token once.
fn expected_rows(shape: &Shape, rank: usize, inputs: &[Input]) -> (Vec<u8>, Vec<u8>, Vec<Vec<Vec<usize>>>) {
    let (mut rows, mut scales) = (Vec::new(), Vec::new());
    let mut places: Vec<_> = inputs.iter().map(|input| vec![vec![usize::MAX; 1]; input.ids.len()]).collect();
    if shape.layout == RowLayout::Tokens {
        for (position, (source, token, pairs)) in expected_tokens(shape, rank, inputs).into_iter().enumerate()
        {
            rows.extend(&inputs[source].rows[token * shape.row_bytes..][..shape.row_bytes]);
            scales.extend(&inputs[source].scales[token * shape.scale_bytes..][..shape.scale_bytes]);
            for pair in pairs {
                places[source][pair] = vec![position];
            }
        }
        return (rows, scales, places);
    }
    for (here, expert) in held(shape, rank).enumerate() {
        for (source, input) in inputs.iter().enumerate() {
            for (pair, id) in input.ids.iter().enumerate() {
                if *id == expert as i64 {
                    let token = pair / shape.top_k;
                    places[source][pair] = vec![rows.len() / shape.row_bytes];
                    rows.extend(&input.rows[token * shape.row_bytes..][..shape.row_bytes]);
                    scales.extend(&input.scales[token * shape.scale_bytes..][..shape.scale_bytes]);
                }
            }
        }
        let is_whole = |rows: usize| match shape.layout {
            RowLayout::Masked { capacity } => rows >= (here + 1) * capacity,
            _ => rows.is_multiple_of(shape.alignment),
        };
        while !is_whole(rows.len() / shape.row_bytes) {
            rows.extend(vec![POISON; shape.row_bytes]);
            scales.extend(vec![POISON; shape.scale_bytes]);
        }
    }
    (rows, scales, places)
}

/// An expert's output: numbers that depend on it and on the row.
fn expert_output(shape: &Shape, rank: usize, position: usize, rows: &[u8]) -> Vec<bf16> {
    let row = &rows[position * shape.row_bytes..][..shape.row_bytes];
    let sum: u32 = row.iter().map(|byte| u32::from(*byte)).sum();
    let element = |column: usize| (sum as f32 / 100.0 - 7.0) * (1.0 + 0.1 * (column + 3 * rank) as f32);
    (0..shape.hidden).map(|column| bf16::from_f32(element(column))).collect()
}

fn expected_sums(shape: &Shape, source: usize, inputs: &[Input], sum: Sum) -> Vec<u8> {
    let by_rank: Vec<_> = (0..shape.ranks).map(|rank| expected_rows(shape, rank, inputs)).collect();
    let input = &inputs[source];
    let each = shape.experts.div_ceil(shape.ranks);
    let mut bytes = Vec::new();
    for token in 0..input.ids.len() / shape.top_k {
        let mut total = vec![0f32; shape.hidden];
        let mut of_rank = vec![None; shape.ranks];
        for pair in token * shape.top_k..(token + 1) * shape.top_k {
            let Ok(expert) = usize::try_from(input.ids[pair]) else { continue };
            let rank = expert / each;
            let (rows, _, places) = &by_rank[rank];
            let output = expert_output(shape, rank, places[source][pair][0], rows);
            if shape.layout == RowLayout::Tokens {
                of_rank[rank] = Some(output.iter().map(|element| element.to_f32()).collect());
                continue;
            }
            let into = match sum {
                Sum::Exact => &mut total,
                Sum::Reduced => of_rank[rank].get_or_insert(vec![0f32; shape.hidden]),
            };
            for (into, element) in into.iter_mut().zip(output) {
                *into = input.weights[pair].mul_add(element.to_f32(), *into);
            }
        }
        for part in of_rank.into_iter().flatten() {
            for (into, element) in total.iter_mut().zip(part) {
                *into += bf16::from_f32(element).to_f32();
            }
        }
        bytes.extend(total.iter().flat_map(|element| bf16::from_f32(*element).to_le_bytes()));
    }
    bytes
}

fn bytes_of(numbers: &[bf16]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

fn received(rank: &mut Rank, sent: kvlane_moe::Sent) -> (Handle, Vec<u8>, Vec<u8>, Vec<u32>, Vec<u32>) {
    let (handle, rows, scales, counts, starts) = placed(rank, sent);
    (handle.unwrap(), rows, scales, counts, starts)
}

type Placed = (Result<Handle, MoeError>, Vec<u8>, Vec<u8>, Vec<u32>, Vec<u32>);

fn placed(rank: &mut Rank, sent: kvlane_moe::Sent) -> Placed {
    let arrived = rank.arrive(sent).unwrap();
    let shape = *rank.shape();
    let (counts, starts) = (arrived.arrivals.counts.clone(), arrived.arrivals.starts.clone());
    let room = arrived.arrivals.rows;
    let (mut rows, mut scales) =
        (vec![POISON; room * shape.row_bytes], vec![POISON; room * shape.scale_bytes]);
    let handle = rank.place(arrived, &mut rows, &mut scales);
    (handle, rows, scales, counts, starts)
}

/// One dispatch and combine of a rank, checked.
fn there_and_back(rank: &mut Rank, number: usize, inputs: &[Input], sum: Sum) {
    let shape = *rank.shape();
    let input = &inputs[number];
    let sent = rank.send(&input.rows, &input.scales, &input.ids, &input.weights).unwrap();
    let (handle, rows, scales, counts, starts) = placed(rank, sent);
    assert_eq!(counts, expected_counts(&shape, number, inputs), "counts of rank {number}");
    if let Some(error) = expected_error(&shape, number, inputs) {
        assert_eq!(handle.unwrap_err(), error);
        assert!(rows.iter().chain(&scales).all(|byte| *byte == POISON), "rows that have no room");
        return;
    }
    let mut handle = handle.unwrap();
    let (wanted, wanted_scales, _) = expected_rows(&shape, number, inputs);
    assert!(rows == wanted, "rows of rank {number}");
    assert!(scales == wanted_scales, "scales of rank {number}");
    match shape.layout {
        RowLayout::Experts => {
            assert!(starts.iter().all(|start| start.is_multiple_of(shape.alignment as u32)))
        }
        RowLayout::Masked { capacity } => {
            assert!(starts.iter().enumerate().all(|(here, start)| *start as usize == here * capacity));
        }
        RowLayout::Tokens => {
            let pairs = rows.len() / shape.row_bytes * shape.top_k;
            let (mut ids, mut weights) = (vec![7; pairs], vec![7.0; pairs]);
            rank.write_wanted(&handle, &mut ids, &mut weights).unwrap();
            let (mut wanted_ids, mut wanted_weights) = (vec![-1; pairs], vec![0.0; pairs]);
            let tokens = expected_tokens(&shape, number, inputs);
            for (position, (source, token, pairs)) in tokens.into_iter().enumerate() {
                for pair in pairs {
                    let at = position * shape.top_k + pair - token * shape.top_k;
                    wanted_ids[at] = inputs[source].ids[pair] - held(&shape, number).start as i64;
                    wanted_weights[at] = inputs[source].weights[pair];
                }
            }
            assert_eq!((ids, weights), (wanted_ids, wanted_weights));
            let exact = rank.send_back(
                &mut handle,
                &vec![0; pairs / shape.top_k * shape.sum_bytes()],
                Sum::Exact,
                None,
            );
            assert!(exact.unwrap_err().to_string().contains("combine is reduced"));
        }
    }
    let outputs: Vec<u8> = (0..rows.len() / shape.row_bytes)
        .flat_map(|position| bytes_of(&expert_output(&shape, number, position, &rows)))
        .collect();
    rank.send_back(&mut handle, &outputs, sum, None).unwrap();
    let mut tokens = vec![POISON; input.ids.len() / shape.top_k * shape.sum_bytes()];
    let gathered = rank.gather(handle, &mut tokens);
    // The ranks that have no room for one of this rank's tokens.
    let is_sent =
        |to: &usize| expected_tokens(&shape, *to, inputs).iter().any(|(source, ..)| *source == number);
    let refusing: Vec<_> =
        (0..shape.ranks).filter(is_sent).filter_map(|to| expected_error(&shape, to, inputs)).collect();
    if !refusing.is_empty() {
        assert!(refusing.contains(&gathered.unwrap_err()));
        return;
    }
    gathered.unwrap();
    assert!(tokens == expected_sums(&shape, number, inputs, sum), "sums of rank {number}");
}

prop_compose! {
    fn shapes()(
        ranks in 1usize..6, experts in 1usize..20, top_k in 1usize..5, row in 1usize..5, scale_bytes in 0usize..20,
        hidden in 1usize..4, alignment in prop::sample::select(vec![1usize, 4, 16]), layout in 0usize..4,
    ) -> Shape {
        let layout = match layout {
            0 => RowLayout::Experts,
            // Enough for all tokens to want one expert with each of their numbers.
            1 => RowLayout::Masked { capacity: ranks * 12 * top_k },
            2 => RowLayout::Masked { capacity: 9 },
            _ => RowLayout::Tokens,
        };
        Shape {
            ranks, experts, top_k, max_tokens: 12, row_bytes: 16 * row, scale_bytes, hidden: 8 * hidden,
            number: Number::Bf16, alignment, layout,
        }
    }
}

fn inputs(shape: Shape) -> impl Strategy<Value = Vec<Input>> {
    let one = (0..=shape.max_tokens).prop_flat_map(move |tokens| {
        let pairs = tokens * shape.top_k;
        (
            prop::collection::vec(any::<u8>(), tokens * shape.row_bytes),
            prop::collection::vec(any::<u8>(), tokens * shape.scale_bytes),
            prop::collection::vec(-1..shape.experts as i64, pairs),
            prop::collection::vec(-2.0f32..2.0, pairs),
        )
    });
    let one = one.prop_map(|(rows, scales, ids, weights)| Input { rows, scales, ids, weights });
    prop::collection::vec(one, shape.ranks)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]
    #[test]
    fn every_row_arrives_at_its_place_and_every_sum_is_right(
        (shape, rounds) in shapes().prop_flat_map(|shape| (Just(shape), prop::collection::vec(inputs(shape), 1..5)))
    ) {
        let rounds = Arc::new(rounds);
        let ranks = joined(shape, Duration::from_secs(20));
        let threads: Vec<_> = ranks.into_iter().enumerate().map(|(number, mut rank)| {
            let rounds = Arc::clone(&rounds);
            std::thread::spawn(move || {
                for (round, inputs) in rounds.iter().enumerate() {
                    let is_exact = round % 2 == 0 && shape.layout != RowLayout::Tokens;
                    let sum = if is_exact { Sum::Exact } else { Sum::Reduced };
                    there_and_back(&mut rank, number, inputs, sum);
                }
            })
        }).collect();
        for thread in threads {
            thread.join().unwrap();
        }
    }
}

fn small(ranks: usize) -> Shape {
    Shape {
        ranks,
        experts: 4,
        top_k: 2,
        max_tokens: 4,
        row_bytes: 16,
        scale_bytes: 0,
        hidden: 8,
        number: Number::Bf16,
        alignment: 1,
        layout: RowLayout::Experts,
    }
}

fn token(expert: i64) -> Input {
    Input { rows: vec![1; 16], scales: Vec::new(), ids: vec![expert, -1], weights: vec![0.5, 0.0] }
}

fn sent(rank: &mut Rank, input: &Input) -> kvlane_moe::Sent {
    rank.send(&input.rows, &input.scales, &input.ids, &input.weights).unwrap()
}

/// Debuggers and ranks on streams of one process need it.
#[test]
fn ranks_run_one_after_the_other_in_one_thread() {
    let mut ranks = joined(small(3), Duration::from_secs(20));
    for round in 0..20 {
        let dispatches: Vec<_> = ranks.iter_mut().map(|rank| sent(rank, &token(round % 4))).collect();
        let mut handles = Vec::new();
        for (rank, dispatch) in ranks.iter_mut().zip(dispatches) {
            let (mut handle, rows, ..) = received(rank, dispatch);
            let outputs = vec![0; rows.len()];
            rank.send_back(&mut handle, &outputs, Sum::Reduced, None).unwrap();
            handles.push(handle);
        }
        for (rank, handle) in ranks.iter_mut().zip(handles) {
            rank.gather(handle, &mut [0; 16]).unwrap();
        }
    }
}

#[test]
fn two_dispatches_are_combined_in_any_order_and_a_third_has_to_wait() {
    let mut ranks = joined(small(1), Duration::from_secs(20));
    let rank = &mut ranks[0];
    let first = sent(rank, &token(1));
    let early = rank.send(&[], &[], &[], &[]).unwrap_err();
    assert!(early.to_string().contains("not received yet"), "{early}");
    let (mut first, ..) = received(rank, first);
    let second = sent(rank, &token(2));
    let (mut second, ..) = received(rank, second);
    let third = rank.send(&[], &[], &[], &[]).unwrap_err();
    assert!(third.to_string().contains("neither combined nor given up"), "{third}");
    for handle in [&mut second, &mut first] {
        rank.send_back(handle, &bytes_of(&[bf16::from_f32(3.0); 8]), Sum::Exact, None).unwrap();
        // A second call changes nothing, also if it asks for another sum.
        let twice = rank.send_back(handle, &bytes_of(&[bf16::ZERO; 8]), Sum::Reduced, None).unwrap_err();
        assert!(twice.to_string().contains("combined before"), "{twice}");
    }
    for handle in [second, first] {
        let mut out = [0; 16];
        rank.gather(handle, &mut out).unwrap();
        assert_eq!(out, *bytes_of(&[bf16::from_f32(1.5); 8]));
    }
    let _ = sent(rank, &token(3));
    assert_eq!(rank.stats().dispatches, 3);
}

/// Rank 1 has no room for two tokens. Rank 2 has sent none there.
#[test]
fn a_rank_without_room_fails_the_sums_that_need_it_and_the_next_dispatch_works() {
    let shape = Shape { experts: 6, layout: RowLayout::Masked { capacity: 1 }, ..small(3) };
    let mut ranks = joined(shape, Duration::from_secs(20));
    let error = MoeError::OverCapacity { rank: 1, needed: 2, capacity: 1 };
    assert_eq!(
        error.to_string(),
        "an expert of rank 1 got 2 rows, and has room for 1: make the all-to-all with a capacity of at least 2"
    );
    for round in 0..12 {
        let sum = if round % 4 < 2 { Sum::Exact } else { Sum::Reduced };
        let too_many = round % 3 != 2;
        let experts = if too_many { [2, 2, 5] } else { [2, 3, 5] };
        let dispatches: Vec<_> =
            ranks.iter_mut().zip(experts).map(|(rank, expert)| sent(rank, &token(expert))).collect();
        let mut handles = Vec::new();
        for (number, (rank, dispatch)) in ranks.iter_mut().zip(dispatches).enumerate() {
            let (handle, rows, ..) = placed(rank, dispatch);
            if too_many && number == 1 {
                assert_eq!(handle.unwrap_err(), error);
                continue;
            }
            let mut handle = handle.unwrap();
            let outputs = bytes_of(&vec![bf16::from_f32(3.0); rows.len() / 16 * 8]);
            rank.send_back(&mut handle, &outputs, sum, None).unwrap();
            handles.push((number, handle));
        }
        for (number, handle) in handles {
            let mut out = [0; 16];
            let gathered = ranks[number].gather(handle, &mut out);
            if too_many && number == 0 {
                assert_eq!(gathered.unwrap_err(), error);
            } else {
                gathered.unwrap();
                assert_eq!(out, *bytes_of(&[bf16::from_f32(1.5); 8]));
            }
        }
        assert!(ranks.iter().all(|rank| rank.check().is_ok()));
    }
}

#[test]
fn an_exact_sum_takes_the_weights_that_combine_is_given() {
    let mut ranks = joined(small(1), Duration::from_secs(20));
    let rank = &mut ranks[0];
    let dispatch = sent(rank, &token(1));
    let (mut handle, ..) = received(rank, dispatch);
    let outputs = bytes_of(&[bf16::from_f32(3.0); 8]);
    let few = rank.send_back(&mut handle, &outputs, Sum::Exact, Some(&[1.0])).unwrap_err();
    assert!(few.to_string().contains("1 weights, and 2 were dispatched"));
    rank.send_back(&mut handle, &outputs, Sum::Exact, Some(&[2.0, 0.0])).unwrap();
    let mut out = [0; 16];
    rank.gather(handle, &mut out).unwrap();
    assert_eq!(out, *bytes_of(&[bf16::from_f32(6.0); 8]));
}

/// A combine that another all-to-all refused left its weights behind, and the next one summed with them.
#[test]
fn a_combine_that_is_refused_changes_no_weights() {
    let mut ranks = joined(small(1), Duration::from_secs(20));
    let mut others = joined(small(1), Duration::from_secs(20));
    let outputs = bytes_of(&[bf16::from_f32(3.0); 8]);
    let sums = |ranks: &mut [Rank], refuse: &mut dyn FnMut(&mut Rank, &mut Handle)| {
        let dispatch = sent(&mut ranks[0], &token(1));
        let (mut handle, ..) = received(&mut ranks[0], dispatch);
        refuse(&mut ranks[0], &mut handle);
        ranks[0].send_back(&mut handle, &outputs, Sum::Exact, None).unwrap();
        let mut out = [0; 16];
        ranks[0].gather(handle, &mut out).unwrap();
        out
    };
    let right = sums(&mut ranks, &mut |_, _| ());
    let weights = Some([100.0; 2].as_slice());
    let after_foreign = sums(&mut ranks, &mut |_, handle| {
        let foreign = others[0].send_back(handle, &outputs, Sum::Exact, weights).unwrap_err();
        assert!(foreign.to_string().contains("of another all-to-all"), "{foreign}");
    });
    let after_short = sums(&mut ranks, &mut |rank, handle| {
        let short = rank.send_back(handle, &[], Sum::Exact, weights).unwrap_err();
        assert!(short.to_string().contains("combine got 0 bytes"), "{short}");
    });
    assert_eq!((after_foreign, after_short), (right, right));
}

#[test]
fn wrong_input_sends_nothing() {
    let mut ranks = joined(small(2), Duration::from_secs(20));
    let cases = [
        (16, vec![4, -1], 2, "token 0 wants expert 4 as its number 0: experts are 0 to 3"),
        (16, vec![0, -2], 2, "wants expert -2 as its number 1"),
        (15, vec![0, 1], 2, "15 bytes of rows"),
        (16, vec![0, 1], 1, "2 ids and 1 weights"),
        (80, vec![0; 10], 10, "5 tokens, and room for 4"),
    ];
    for (bytes, ids, weights, why) in cases {
        let error = ranks[0].send(&vec![0; bytes], &[], &ids, &vec![0.0; weights]).unwrap_err();
        assert!(matches!(error, MoeError::BadInput(_)) && error.to_string().contains(why), "{error}");
    }
    // And the next one works.
    let dispatches: Vec<_> = ranks.iter_mut().map(|rank| sent(rank, &token(3))).collect();
    for (rank, dispatch) in ranks.iter_mut().zip(dispatches) {
        let _ = received(rank, dispatch);
    }
}

#[test]
fn a_dispatch_of_another_all_to_all_is_refused() {
    let (mut one, mut other) =
        (joined(small(1), Duration::from_secs(20)), joined(small(1), Duration::from_secs(20)));
    let dispatch = sent(&mut one[0], &token(0));
    assert!(other[0].arrive(dispatch).unwrap_err().to_string().contains("of another all-to-all"));
}

#[test]
fn a_rank_that_leaves_is_named_and_so_are_those_that_fail_because_of_it() {
    let mut ranks = joined(small(3), Duration::from_secs(20));
    drop(ranks.remove(1));
    let [zero, two] = &mut ranks[..] else { panic!("three ranks less one") };
    let lost = MoeError::PeerLeft { rank: 1, phase: Phase::Counts, because: None };
    let dispatch = sent(zero, &token(0));
    assert_eq!(zero.arrive(dispatch).unwrap_err(), lost);
    assert_eq!(zero.check().unwrap_err(), lost);
    assert_eq!(zero.send(&[], &[], &[], &[]).unwrap_err(), lost);
    let dispatch = sent(two, &token(0));
    // Rank 0 has sent its counts before it failed, so rank 2 meets rank 1 first.
    assert_eq!(two.arrive(dispatch).unwrap_err(), lost);
}

#[test]
fn a_rank_that_fails_because_of_another_names_it() {
    let mut ranks = joined(small(3), Duration::from_millis(200));
    let dispatch = sent(&mut ranks[0], &token(3));
    assert!(matches!(ranks[0].arrive(dispatch).unwrap_err(), MoeError::TimedOut { rank: 1, .. }));
    let _ = sent(&mut ranks[1], &token(0));
    let dispatch = sent(&mut ranks[2], &token(0));
    let (mut handle, ..) = received(&mut ranks[2], dispatch);
    ranks[2].send_back(&mut handle, &[], Sum::Exact, None).unwrap();
    let error = ranks[2].gather(handle, &mut [0; 16]).unwrap_err();
    assert_eq!(error, MoeError::PeerLeft { rank: 0, phase: Phase::Sums, because: Some(1) });
    assert!(
        error.to_string().contains("rank 0 takes no part any more: it failed because of rank 1"),
        "{error}"
    );
}

/// A rank that gave up a dispatch after it had sent it went on, one dispatch behind the others: they combined its tokens with
/// the experts of another layer, or overwrote rows that it was reading.
#[test]
fn a_dispatch_that_is_dropped_before_its_rows_are_placed_ends_it_for_all() {
    let mut ranks = joined(small(2), Duration::from_secs(20));
    drop(sent(&mut ranks[0], &token(3)));
    assert_eq!(ranks[0].send(&[], &[], &[], &[]).unwrap_err(), MoeError::GivenUp);
    assert_eq!(ranks[0].check().unwrap_err(), MoeError::GivenUp);
    // Its first dispatch reached the other rank whole, the second one never comes.
    let dispatch = sent(&mut ranks[1], &token(3));
    let _ = received(&mut ranks[1], dispatch);
    let dispatch = sent(&mut ranks[1], &token(3));
    assert!(matches!(ranks[1].arrive(dispatch).unwrap_err(), MoeError::PeerLeft { rank: 0, .. }));
}

/// With every way in which one rank can be ahead of another by what the calls allow.
#[test]
fn a_rank_that_runs_ahead_changes_nothing_for_a_slow_one() {
    let shape = Shape { max_tokens: 12, ..small(2) };
    let ranks = joined(shape, Duration::from_secs(20));
    let rounds: Arc<Vec<Vec<Input>>> = Arc::new(
        (0..24u8)
            .map(|round| {
                let input = |rank: u8| Input {
                    rows: (0..12 * 16).map(|byte| (byte as u8).wrapping_mul(round + 7 * rank + 1)).collect(),
                    scales: Vec::new(),
                    ids: (0..24).map(|pair| i64::from((pair as u8 + round + rank) % 4)).collect(),
                    weights: (0..24).map(|pair| pair as f32 - f32::from(round)).collect(),
                };
                vec![input(0), input(1)]
            })
            .collect(),
    );
    let threads: Vec<_> = ranks
        .into_iter()
        .enumerate()
        .map(|(number, mut rank)| {
            let rounds = Arc::clone(&rounds);
            std::thread::spawn(move || {
                let nap = |round: usize, step: usize| {
                    // Rank 0 is slow in some steps, rank 1 in others.
                    if (round + step) % 4 == 2 * number {
                        std::thread::sleep(Duration::from_millis(3));
                    }
                };
                let outputs_of = |rows: &[u8], shape: &Shape| -> Vec<u8> {
                    (0..rows.len() / shape.row_bytes)
                        .flat_map(|position| bytes_of(&expert_output(shape, number, position, rows)))
                        .collect()
                };
                for pair in (0..rounds.len()).step_by(2) {
                    let mut open = Vec::new();
                    for round in pair..pair + 2 {
                        nap(round, 0);
                        let dispatch = sent(&mut rank, &rounds[round][number]);
                        nap(round, 1);
                        let (handle, rows, ..) = received(&mut rank, dispatch);
                        assert!(
                            rows == expected_rows(&shape, number, &rounds[round]).0,
                            "rows of round {round}"
                        );
                        open.push((round, handle, rows));
                    }
                    if pair % 4 == 0 {
                        open.reverse();
                    }
                    for (round, mut handle, rows) in open {
                        let sum = if round % 3 == 0 { Sum::Reduced } else { Sum::Exact };
                        nap(round, 2);
                        rank.send_back(&mut handle, &outputs_of(&rows, &shape), sum, None).unwrap();
                        nap(round, 3);
                        let mut tokens = vec![0; 12 * shape.sum_bytes()];
                        rank.gather(handle, &mut tokens).unwrap();
                        assert!(
                            tokens == expected_sums(&shape, number, &rounds[round], sum),
                            "sums of round {round}"
                        );
                    }
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
}

#[test]
fn a_silent_rank_is_named_after_the_timeout() {
    let mut ranks = joined(small(2), Duration::from_millis(30));
    let dispatch = sent(&mut ranks[0], &token(3));
    let error = ranks[0].arrive(dispatch).unwrap_err();
    assert_eq!(
        error,
        MoeError::TimedOut { rank: 1, phase: Phase::Counts, waited: Duration::from_millis(30) }
    );
}

#[test]
fn a_token_without_experts_is_zeros_and_goes_nowhere() {
    let mut ranks = joined(small(1), Duration::from_secs(20));
    let rank = &mut ranks[0];
    let dispatch = rank.send(&[1; 16], &[], &[-1, -1], &[1.0, 1.0]).unwrap();
    let (mut handle, rows, ..) = received(rank, dispatch);
    assert!(rows.is_empty());
    rank.send_back(&mut handle, &[], Sum::Exact, None).unwrap();
    let mut out = [POISON; 16];
    rank.gather(handle, &mut out).unwrap();
    assert_eq!(out, [0; 16]);
}
