//! [`longest_hit`]: how many tokens of a prompt can be reused, if every KV cache group needs other blocks for a hit.
//!
//! A group of full attention needs every block of the prefix. A group of sliding-window attention needs only the window
//! before the prefix's end.

/// The needs of one KV cache group of the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixGroup {
    /// Tokens in a block; above 0.
    pub tokens_per_block: u32,
    /// With 0 a hit needs every block of the prefix; with n it needs the last n blocks before its end.
    pub window_blocks: u32,
    /// Number of the prompt's blocks that can be looked up.
    pub blocks: u64,
}

impl PrefixGroup {
    /// The first block that a hit of `tokens` needs: 0, or the start of the window.
    pub fn first_block(&self, tokens: u64) -> u64 {
        match self.window_blocks {
            0 => 0,
            window => (tokens / u64::from(self.tokens_per_block)).saturating_sub(u64::from(window)),
        }
    }
}

/// The longest prefix, in tokens, all of whose needed blocks are there by `visible(group, block)`. The prefix has at
/// most `max_tokens`, and a whole number of blocks in every group. 0 is a miss.
///
/// Looks up each block at most once. First come the whole-prefix groups, upwards from block 0 until one is missing,
/// then the windows, downwards from the end.
pub fn longest_hit(
    groups: &[PrefixGroup],
    max_tokens: u64,
    mut visible: impl FnMut(usize, u64) -> bool,
) -> u64 {
    assert!(groups.iter().all(|group| group.tokens_per_block > 0), "a block covers at least one token");
    let Some(step) = common_step(groups) else { return 0 };
    let whole_steps = |tokens: u64| tokens / step * step;

    let mut tokens = max_tokens;
    for group in groups {
        tokens = tokens.min(group.blocks.saturating_mul(u64::from(group.tokens_per_block)));
    }
    tokens = whole_steps(tokens);
    for (index, group) in groups.iter().enumerate().filter(|(_, group)| group.window_blocks == 0) {
        let needed = tokens / u64::from(group.tokens_per_block);
        let found = (0..needed).take_while(|&block| visible(index, block)).count() as u64;
        tokens = whole_steps(found * u64::from(group.tokens_per_block));
    }

    // From here on `tokens` only falls, so a window keeps what it has found. The blocks from `run_start` to the group's
    // end at its last check are there.
    let mut run_start = vec![u64::MAX; groups.len()];
    loop {
        let before = tokens;
        for (index, group) in groups.iter().enumerate().filter(|(_, group)| group.window_blocks > 0) {
            let tokens_per_block = u64::from(group.tokens_per_block);
            let start = &mut run_start[index];
            *start = (*start).min(tokens / tokens_per_block);
            while *start > group.first_block(tokens) {
                let block = *start - 1;
                if !visible(index, block) {
                    tokens = whole_steps(block * tokens_per_block);
                    break;
                }
                *start = block;
            }
        }
        if tokens == before {
            return tokens;
        }
    }
}

/// The least common multiple of the groups' block sizes, in tokens. None without groups, or if it overflows.
fn common_step(groups: &[PrefixGroup]) -> Option<u64> {
    let (first, rest) = groups.split_first()?;
    rest.iter().try_fold(u64::from(first.tokens_per_block), |step, group| {
        let size = u64::from(group.tokens_per_block);
        (step / greatest_common_divisor(step, size)).checked_mul(size)
    })
}

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}
