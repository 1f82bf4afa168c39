//! Where a rank keeps its dispatches on the GPU: plan and receipt of each until it is combined.

use super::parameters::Scratch;
use crate::Shape;

/// Sections begin at multiples of it.
const ALIGNMENT: u64 = 128;

/// The sections of a dispatch from an address on, and where they end.
pub(super) fn sections(shape: &Shape, base: u64) -> (Scratch, u64) {
    let Shape { ranks, experts, top_k, max_tokens: tokens, .. } = *shape;
    let mut end = base;
    let mut section = |items: usize, bytes: u64| {
        let at = end;
        end = (end + items as u64 * bytes).next_multiple_of(ALIGNMENT);
        at
    };
    let scratch = Scratch {
        number: section(1, 8),
        list: section(ranks * tokens, 4),
        slot: section(tokens * ranks, 4),
        place: section(tokens * top_k, 4),
        sent: section(ranks, 4),
        expert_counts: section(experts, 4),
        expert: section(tokens * top_k, 4),
        own_weights: section(tokens * top_k, 4),
        positions: section(ranks * tokens * top_k, 4),
        weights_received: section(ranks * tokens * top_k, 4),
        tokens_received: section(ranks * tokens, 4),
        received: section(ranks, 4),
    };
    (scratch, end)
}
