//! How large launches are, and which blocks send. Pure.

use super::limits::THREADS;
use super::parameters::Parameters;
use crate::layout::Layout;
use crate::{RowLayout, SCALED, Shape};

/// Most tokens that each block of dispatch plans for itself.
const PLANNED_BY_EACH: usize = 128;
/// Most bytes of such a plan: two blocks of a multiprocessor share 227 KiB.
const PLAN_BYTES_MAX: usize = 80 << 10;
/// Most shared memory of a block on the smallest GPUs.
const BLOCK_BYTES_MAX: usize = 99 << 10;
/// Experts of a block of the plan's own launch.
const EXPERTS_OF_PLAN_BLOCK: usize = 8;
/// Pairs that it lists, after their number.
const LISTED: usize = 8192;
/// Above so many tokens a launch moves bytes for longer than it waits.
const FEW: usize = 512;
/// A launch of so many blocks moves bytes more slowly than a link.
const FEW_BLOCKS: u32 = 64;
/// Numbers that a group keeps of its row.
const NUMBERS_OF_GROUP: usize = 36;
const LEAST_GROUP: u32 = 128;
/// Most rows that a block moves through its memory at a time, and most bytes of them.
const BULK_ROWS_MAX: usize = 8;
const BULK_BYTES_MAX: usize = 64 << 10;

/// The size of a launch, and its roles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Schedule {
    pub(super) blocks: u32,
    /// The first blocks, which send while the others receive. 0: all do what the launch does.
    pub(super) senders: u32,
    /// Threads of a sender, and of a receiver, that share a row.
    pub(super) send_group: u32,
    pub(super) receive_group: u32,
    /// Whether words are written after all rows of a group.
    pub(super) is_late: bool,
    /// Rows that a block moves through its memory at a time; 0: by threads.
    pub(super) bulk_rows: u32,
}

impl Schedule {
    /// Tells a kernel, and returns the number of blocks.
    pub(super) fn apply(&self, parameters: &mut Parameters) -> u32 {
        parameters.senders = self.senders;
        parameters.send_group_bits = self.send_group.ilog2();
        parameters.receive_group_bits = self.receive_group.ilog2();
        parameters.is_late = u32::from(self.is_late);
        parameters.bulk_rows = self.bulk_rows;
        self.blocks
    }
}

/// Bytes of the plan that a block of dispatch makes for itself; 0: too many for that, so the plan has a launch of its own.
pub(super) fn plan_bytes(shape: &Shape, tokens: usize) -> u32 {
    if tokens > PLANNED_BY_EACH {
        return 0;
    }
    let words = tokens.div_ceil(32);
    let bits = 2 * (shape.experts + shape.ranks) * words;
    let rest = 2 * shape.ranks * tokens + 2 * tokens * shape.top_k + shape.ranks + shape.experts;
    let bytes = (4 * (bits + rest)).next_multiple_of(128);
    let all = bytes + arrival_bytes(shape) as usize;
    if bytes > PLAN_BYTES_MAX || all > BLOCK_BYTES_MAX { 0 } else { bytes as u32 }
}

/// Bytes with which a block of dispatch counts what arrives.
pub(super) fn arrival_bytes(shape: &Shape) -> u32 {
    let experts = shape.experts_a_rank();
    let groups = ((THREADS / LEAST_GROUP) as usize).max(BULK_ROWS_MAX);
    let bytes = 4 * (shape.ranks * (2 * experts + 2) + 1 + groups * NUMBERS_OF_GROUP);
    // Rows follow, aligned as bulk copies are fastest.
    bytes.next_multiple_of(128) as u32
}

/// Bytes of a row as it is sent.
fn row_stride(shape: &Shape) -> usize {
    Layout::of(shape).map_or(0, |layout| layout.row_stride)
}

/// Rows that a block of dispatch sends or receives through its own memory at a time, if there are many tokens: two blocks of a
/// multiprocessor have room for that.
fn bulk_rows(shape: &Shape) -> u32 {
    let rows = (BULK_BYTES_MAX / row_stride(shape).max(1)).min(BULK_ROWS_MAX);
    let is_whole = shape.scale_bytes.is_multiple_of(16);
    if shape.max_tokens > FEW && rows > 1 && is_whole { rows as u32 } else { 0 }
}

/// Bytes that these rows take, with two barriers for each.
pub(super) fn bulk_bytes(shape: &Shape) -> u32 {
    bulk_rows(shape) * (row_stride(shape) as u32 + 16)
}

/// Blocks of the plan's own launch, and bytes of each.
pub(super) fn plan_grid(shape: &Shape, tokens: usize) -> (u32, u32) {
    let blocks = shape.experts.div_ceil(EXPERTS_OF_PLAN_BLOCK) + shape.ranks;
    (blocks as u32, 4 * (2 * EXPERTS_OF_PLAN_BLOCK * tokens.div_ceil(32) + 1 + LISTED) as u32)
}

/// Blocks of a cast: half a warp makes a scale.
pub(super) fn cast(shape: &Shape, tokens: usize) -> u32 {
    (tokens * shape.row_bytes.div_ceil(SCALED)).div_ceil(THREADS as usize / 16) as u32
}

/// A dispatch of so many tokens at most, whatever this rank has: all ranks' blocks are busy alike. `resident` blocks run at a time;
/// with more, blocks would wait for others that have not begun.
///
/// Shares are those that were fastest on two H200s: for 4,096 tokens 95 of 264 blocks, and half of few blocks that place no rows;
/// for 128 tokens half. More ranks get more rows from each: for four of them the share is what a first kernel wanted.
pub(super) fn dispatch(shape: &Shape, resident: u32) -> Schedule {
    let places = shape.layout != RowLayout::Tokens;
    let share = match (shape.max_tokens > FEW, shape.ranks) {
        (false, _) => 0.5,
        (true, ..=2) if places || resident > FEW_BLOCKS => 0.36,
        (true, ..=2) => 0.5,
        (true, _) => 0.55,
    };
    Schedule {
        blocks: resident,
        senders: part(resident, share),
        send_group: LEAST_GROUP,
        receive_group: LEAST_GROUP,
        is_late: false,
        bulk_rows: bulk_rows(shape),
    }
}

/// A combine of so many tokens at most, exact or reduced. With few tokens a whole block sums one, and each block sends before it
/// sums: on two H200s 20 us for 128 tokens instead of 23.
pub(super) fn combine(shape: &Shape, is_exact: bool, resident: u32) -> Schedule {
    let is_small = shape.max_tokens <= FEW;
    Schedule {
        blocks: resident,
        senders: match (is_small, is_exact) {
            (true, _) => 0,
            (false, true) => part(resident, 0.5),
            (false, false) => part(resident, 0.45),
        },
        send_group: match (is_small, is_exact) {
            (true, true) => 2 * LEAST_GROUP,
            (false, false) => LEAST_GROUP,
            _ => THREADS,
        },
        receive_group: if is_small || is_exact { THREADS } else { LEAST_GROUP },
        is_late: is_small,
        bulk_rows: 0,
    }
}

/// A share of blocks, and at least one on each side. 0 if there is only one.
fn part(blocks: u32, share: f64) -> u32 {
    if blocks < 2 {
        return 0;
    }
    ((f64::from(blocks) * share) as u32).clamp(1, blocks - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Number;

    fn shape(ranks: usize, max_tokens: usize) -> Shape {
        Shape {
            ranks,
            experts: 256,
            top_k: 8,
            max_tokens,
            row_bytes: 7168,
            scale_bytes: 224,
            hidden: 7168,
            number: Number::Bf16,
            alignment: 128,
            layout: RowLayout::Experts,
        }
    }

    #[test]
    fn each_side_has_a_block_if_there_are_two() {
        for resident in 1..300 {
            for schedule in [dispatch(&shape(2, 4096), resident), combine(&shape(4, 4096), true, resident)] {
                assert_eq!(schedule.blocks, resident);
                assert_eq!(schedule.senders == 0, resident == 1);
                assert!(schedule.senders < resident.max(2));
            }
        }
        assert_eq!(dispatch(&shape(2, 4096), 264).senders, 95);
    }

    #[test]
    fn the_kernels_have_the_sizes_for_which_there_is_room() {
        let source = include_str!("../../kernels/parameters.cuh");
        for (name, size) in [("kListed", LISTED), ("kExpertsOfPlanBlock", EXPERTS_OF_PLAN_BLOCK)] {
            assert!(source.contains(&format!("{name} = {size};")), "{name}");
        }
    }

    #[test]
    fn few_tokens_are_planned_by_each_block_and_many_by_a_launch() {
        assert_eq!(plan_bytes(&shape(4, 4096), 129), 0);
        assert!((20_000..50_000).contains(&plan_bytes(&shape(4, 128), 128)));
        for experts in [2048, 2240, 3000, 4054, 4096] {
            let many = Shape { experts, top_k: 32, ..shape(1, 128) };
            let bytes = (1..=128).map(|tokens| plan_bytes(&many, tokens)).max().unwrap();
            assert!((bytes + arrival_bytes(&many)) as usize <= BLOCK_BYTES_MAX);
            assert!((bulk_bytes(&many) + arrival_bytes(&many)) as usize <= BLOCK_BYTES_MAX);
        }
        let many = Shape { experts: 4096, ..shape(16, 128) };
        assert_eq!(plan_bytes(&many, 128), 0, "too large for a block");
        assert_eq!(plan_grid(&shape(4, 4096), 4096), (36, 8192 + 4 + 32_768));
    }
}
