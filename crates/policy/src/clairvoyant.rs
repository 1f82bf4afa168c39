//! [`clairvoyant`]: the upper bound of all policies, a cache that knows the future.

use std::collections::BinaryHeap;

use crate::trace::Trace;

/// Prefix hits of a trace in a cache of `capacity` blocks that evicts the block whose next request is the furthest
/// away, or never comes. It does not admit a block whose next request is further still (Belady, "A study of replacement
/// algorithms for a virtual-storage computer", IBM Systems Journal 1966). A block is never requested without those
/// before it, so the end of a prompt goes before its beginning here too.
pub fn clairvoyant(trace: &Trace, capacity: usize) -> usize {
    let (references, ends) = trace.numbered();
    let ends: Vec<(usize, usize)> = ends.collect();
    // For each block of a request, the index of the next time that the block is looked up. A save is no use of it.
    let mut next = vec![usize::MAX; references.len()];
    let mut last = vec![usize::MAX; trace.distinct()];
    let starts = std::iter::once(0).chain(ends.iter().map(|&(_, end)| end));
    for (start, &(looked_up_end, end)) in starts.zip(&ends).collect::<Vec<_>>().into_iter().rev() {
        for at in (start..end).rev() {
            let block = references[at] as usize;
            next[at] = last[block];
            if at < looked_up_end {
                last[block] = at;
            }
        }
    }
    // The next request of each block that is in. The heap also has entries that are stale by now.
    let mut wanted: Vec<Option<usize>> = vec![None; trace.distinct()];
    let mut heap: BinaryHeap<(usize, u32)> = BinaryHeap::new();
    let (mut hits, mut held, mut start) = (0, 0, 0);
    for (looked_up_end, end) in ends {
        let blocks = &references[start..end];
        hits += references[start..looked_up_end]
            .iter()
            .take_while(|&&block| wanted[block as usize].is_some())
            .count();
        for (at, &block) in (start..end).zip(blocks) {
            let will_be = (next[at] != usize::MAX).then_some(next[at]);
            let was = std::mem::replace(&mut wanted[block as usize], will_be);
            held = held + usize::from(will_be.is_some()) - usize::from(was.is_some());
            heap.extend(will_be.map(|at| (at, block)));
        }
        while held > capacity
            && let Some((at, block)) = heap.pop()
        {
            if wanted[block as usize] == Some(at) {
                wanted[block as usize] = None;
                held -= 1;
            }
        }
        start = end;
    }
    hits
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use super::*;
    use crate::kind::{Choice, PolicyKind};
    use crate::replay::{Setup, replay};
    use proptest::prelude::*;

    /// Paths in a tree of branching two, as numbers of blocks below 15.
    fn path((leaf, depth): (u8, u8)) -> Vec<u64> {
        (0..depth).map(|level| (1 << level) - 1 + u64::from(leaf & ((1 << level) - 1))).collect()
    }

    /// The most that can be hit, by trying everything: for each set of blocks that can be held, the most hits so far.
    fn best(requests: &[Vec<u64>], capacity: u32) -> usize {
        let mut reached = BTreeMap::from([(0u32, 0usize)]);
        for blocks in requests {
            let mut after: BTreeMap<u32, usize> = BTreeMap::new();
            for (held, hits) in reached {
                let hits = hits + blocks.iter().take_while(|&&block| held >> block & 1 == 1).count();
                let all = blocks.iter().fold(held, |all, block| all | 1 << block);
                // Every subset of it, the empty one last.
                let mut kept = all;
                loop {
                    if kept.count_ones() <= capacity {
                        let most = after.entry(kept).or_default();
                        *most = hits.max(*most);
                    }
                    if kept == 0 {
                        break;
                    }
                    kept = (kept - 1) & all;
                }
            }
            reached = after;
        }
        reached.into_values().max().unwrap_or(0)
    }

    fn trace(requests: &[Vec<u64>]) -> Trace {
        let mut trace = Trace::new();
        requests.iter().for_each(|blocks| trace.push(Duration::ZERO, blocks));
        trace
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(100))]
        #[test]
        fn nobody_hits_more_and_it_hits_that(
            requests in prop::collection::vec((0u8..8, 1u8..4), 1..9),
            capacity in 1u32..6,
        ) {
            let requests: Vec<Vec<u64>> = requests.into_iter().map(path).collect();
            prop_assert_eq!(clairvoyant(&trace(&requests), capacity as usize), best(&requests, capacity));
        }

        #[test]
        fn no_policy_hits_more(
            requests in prop::collection::vec((0u8..8, 1u8..5), 1..120),
            capacity in 1usize..12,
        ) {
            let trace = trace(&requests.into_iter().map(path).collect::<Vec<_>>());
            let most = clairvoyant(&trace, capacity);
            for kind in PolicyKind::ALL {
                let setup = Setup { policy: Choice::Fixed(kind), capacity, ssd_capacity: 0 };
                prop_assert!(replay(&trace, setup, |_| ()).prefix_hits <= most, "{}", kind);
            }
            let all = clairvoyant(&trace, trace.distinct());
            prop_assert_eq!(all as f64 / trace.references() as f64, trace.ceiling());
        }
    }
}
