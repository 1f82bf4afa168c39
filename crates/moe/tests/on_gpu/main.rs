//! Ranks on fake GPUs, which run the kernels' own source on CPUs, beside ranks that work in memory of the host: other code, in
//! another language.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod failures;
mod host;

use std::time::Duration;

use kvlane_moe::gpu::Phases;
use kvlane_moe::{Number, RowLayout, Scales, Shape, Sum, cast_to_fp8};
use proptest::prelude::*;

use crate::host::{Given, Host, expected, random_given};

const PATIENCE: Duration = Duration::from_secs(60);

prop_compose! {
    fn shapes()(
        ranks in 1usize..6, experts in 1usize..20, top_k in prop::sample::select(vec![1usize, 2, 3, 8, 22]), row in 1usize..6,
        scale_bytes in prop::sample::select(vec![0usize, 1, 4, 16, 19, 32]), units in 1usize..6,
        number in prop::sample::select(vec![Number::Bf16, Number::F16, Number::F32]),
        max_tokens in prop::sample::select(vec![1usize, 12, 70, 300]), alignment in prop::sample::select(vec![1usize, 4, 16]),
        layout in 0usize..3,
    ) -> Shape {
        let hidden = units * 16 / number.bytes();
        // All pairs might want one expert, so a masked layout has room for them all, for each expert.
        let max_tokens = if layout == 1 { max_tokens.min(12) } else { max_tokens };
        let layout = [
            RowLayout::Experts, RowLayout::Masked { capacity: ranks * max_tokens * top_k }, RowLayout::Tokens,
        ][layout];
        let alignment = if layout == RowLayout::Experts { alignment } else { 1 };
        Shape { ranks, experts, top_k, max_tokens, row_bytes: 16 * row, scale_bytes, hidden, number, alignment, layout }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    /// All sizes, with tokens that want no expert, or one twice; parts in one launch, or one after the other.
    #[test]
    fn gpus_place_and_sum_as_the_host_does(shape in shapes(), seed: u64, by: [bool; 3], kinds: [bool; 3]) {
        let [is_split, is_wide, is_by_column] = by;
        let host = Host::new(2);
        if !host.has_kernels() {
            return Ok(());
        }
        let ranks = host.join(&shape, is_wide, PATIENCE);
        let rounds: Vec<(Sum, Vec<Given>)> = (0u64..)
            .zip(kinds)
            .map(|(round, is_exact)| {
                let is_exact = is_exact && shape.layout != RowLayout::Tokens;
                let sum = if is_exact { Sum::Exact } else { Sum::Reduced };
                (sum, random_given(&shape, seed.wrapping_add(round)))
            })
            .collect();
        let wanted = expected(&shape, &rounds);
        std::thread::scope(|scope| {
            let threads: Vec<_> = ranks
                .into_iter()
                .map(|mut rank| {
                    rank.is_by_column = is_by_column && shape.scale_bytes > 0 && shape.scale_bytes.is_multiple_of(4);
                    let rounds = &rounds;
                    scope.spawn(move || {
                        let number = rank.number;
                        let run = |(sum, given): &(Sum, Vec<Given>)| rank.there_and_back(&given[number], *sum, is_split);
                        rounds.iter().map(run).collect::<Vec<_>>()
                    })
                })
                .collect();
            for (number, thread) in threads.into_iter().enumerate() {
                for (round, (got, wanted)) in thread.join().unwrap().iter().zip(&wanted[number]).enumerate() {
                    assert!(got == wanted, "rank {number}, round {round}");
                }
            }
        });
    }
}

/// A send waits for nobody, so all ranks can run one after the other in one thread: in a debugger, and under a sanitizer.
#[test]
fn ranks_run_one_after_the_other_in_one_thread() {
    let host = Host::new(1);
    if !host.has_kernels() {
        return;
    }
    let shape = host::small(4);
    let mut ranks = host.join(&shape, true, PATIENCE);
    let given = random_given(&shape, 7);
    let wanted = expected(&shape, &[(Sum::Reduced, given.clone())]);
    let mut sent: Vec<_> =
        ranks.iter_mut().map(|rank| rank.send(&given[rank.number], Phases::Send)).collect();
    let received: Vec<_> = ranks.iter_mut().zip(&mut sent).map(|(rank, sent)| rank.receive(sent)).collect();
    for ((rank, sent), rows) in ranks.iter_mut().zip(&mut sent).zip(&received) {
        rank.send_back(sent, rows, Sum::Reduced, Phases::Send);
    }
    for ((rank, mut sent), rows) in ranks.iter_mut().zip(sent).zip(received) {
        let tokens = rank.send_back(&mut sent, &rows, Sum::Reduced, Phases::Receive);
        assert!(rows.with(tokens) == wanted[rank.number][0], "rank {}", rank.number);
    }
}

/// Two dispatches wait to be combined, and are in either order. A third is refused.
#[test]
fn two_dispatches_are_open_at_a_time_and_are_combined_in_any_order() {
    let host = Host::new(2);
    if !host.has_kernels() {
        return;
    }
    let shape = host::small(3);
    let rounds: Vec<_> = (0..6).map(|seed| (Sum::Exact, random_given(&shape, seed))).collect();
    let wanted = expected(&shape, &rounds);
    std::thread::scope(|scope| {
        for mut rank in host.join(&shape, true, PATIENCE) {
            let (rounds, wanted) = (&rounds, &wanted);
            scope.spawn(move || {
                for (pair, is_turned) in [(0, false), (2, true), (4, true)] {
                    let mut open: Vec<_> = (pair..pair + 2)
                        .map(|round| {
                            let mut sent = rank.send(&rounds[round].1[rank.number], Phases::Send);
                            let rows = rank.receive(&mut sent);
                            (round, sent, rows)
                        })
                        .collect();
                    let refused = rank.try_send(&rounds[0].1[rank.number], Phases::Send).err().unwrap();
                    assert!(refused.to_string().contains("neither combined nor given up"), "{refused}");
                    if is_turned {
                        open.reverse();
                    }
                    for (nth, (round, mut sent, rows)) in open.into_iter().enumerate() {
                        let tokens = rank.send_back(&mut sent, &rows, Sum::Exact, Phases::Both);
                        assert!(rows.with(tokens) == wanted[rank.number][round], "round {round}");
                        drop(sent);
                        if is_turned && nth == 0 {
                            // The words of the next one are those of the dispatch that is still open.
                            assert!(rank.try_send(&rounds[0].1[rank.number], Phases::Send).is_err());
                        }
                    }
                }
            });
        }
    });
}

#[test]
fn a_cast_gives_the_bytes_of_the_host_also_for_what_is_no_number() {
    let host = Host::new(1);
    if !host.has_kernels() {
        return;
    }
    let shape = Shape { row_bytes: 384, scale_bytes: 12, max_tokens: 700, ..host::small(1) };
    for is_wide in [false, true] {
        let rank = host.join(&shape, is_wide, PATIENCE).pop().unwrap();
        for (tokens, seed) in [(0, 1), (1, 2), (37, 3), (600, 4)] {
            // All exponents, and what is infinite or no number among them. Every second row has few.
            let mut rows: Vec<u8> =
                random_given(&Shape { row_bytes: 2 * tokens.max(8) * 384, ..host::small(40) }, seed)
                    .into_iter()
                    .find(|given| !given.rows.is_empty())
                    .unwrap()
                    .rows;
            rows.truncate(2 * tokens * 384);
            for (index, row) in rows.chunks_mut(768).enumerate() {
                for high in row.iter_mut().skip(1).step_by(2).filter(|_| index % 2 == 1) {
                    *high = (0x38 + *high % 16) | *high & 0x80;
                }
            }
            for kind in [Scales::Float, Scales::PowerOfTwo, Scales::Exponent] {
                let (mut to, mut scales) = (vec![0; tokens * 384], vec![0; tokens * 3 * kind.bytes()]);
                cast_to_fp8(&rows, kind, &mut to, &mut scales).unwrap();
                let got = rank.cast(&rows, kind);
                assert!(got.0 == to, "{kind:?}, {tokens} rows");
                // The sign and the payload of what is no number may differ.
                let numbers = |bytes: &[u8]| -> Vec<Option<u32>> {
                    let floats = bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
                    floats.map(|float| (!float.is_nan()).then_some(float.to_bits())).collect()
                };
                match kind {
                    Scales::Exponent => assert_eq!(got.1, scales),
                    _ => assert_eq!(numbers(&got.1), numbers(&scales)),
                }
            }
        }
    }
}

#[test]
fn counts_are_those_of_the_host() {
    let host = Host::new(2);
    if !host.has_kernels() {
        return;
    }
    let shape = host::small(3);
    let rounds = [(Sum::Exact, random_given(&shape, 1)), (Sum::Reduced, random_given(&shape, 2))];
    let wanted = host::expected_stats(&shape, &rounds);
    let ranks = host.join(&shape, true, PATIENCE);
    std::thread::scope(|scope| {
        for mut rank in ranks {
            let (rounds, wanted) = (&rounds, &wanted);
            scope.spawn(move || {
                for (sum, given) in rounds {
                    rank.there_and_back(&given[rank.number], *sum, false);
                }
                assert_eq!(rank.stats(), wanted[rank.number]);
            });
        }
    });
}
