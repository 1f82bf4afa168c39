//! [`Learning`]: the extra interface of a policy that learns. It predicts how many hits a block will bring, and hands
//! what it knows of a block to a tier below as a [`Memo`].

use crate::memo::Memo;

/// A [`ReplacementPolicy`](crate::ReplacementPolicy) that learns when blocks are requested again.
pub trait Learning {
    /// Starts the policy's time at `references`, when it takes over from another policy. Called while it is empty.
    fn begin_at(&mut self, references: u64);

    /// The memo of a slot that is in the policy, or was its last victim. A tier below keeps it with its copy of the
    /// block.
    fn memo(&self, slot: u32) -> Option<Memo>;

    /// Restores what the policy knew of a slot, from the memo that a tier below kept. The slot is in the policy again.
    fn remember(&mut self, slot: u32, memo: Memo);

    /// The hit density of a block with this memo: expected hits for each reference that it is kept, in whichever tier.
    /// None before the policy has learnt any.
    fn density(&self, memo: Memo) -> Option<f32>;

    /// Sets the hit density of the blocks that a tier below gave up lately, 0 before it gave up any. The tier gets all
    /// blocks that are admitted here, so a block that is not worth its room here may be admitted for the tier. None
    /// means that there is no tier below, or that it stores nothing.
    fn set_below(&mut self, density: Option<f32>);

    /// Lists what the policy has learnt of each class of blocks, the most seen first. Empty before it has learnt any.
    fn learnt(&self) -> Vec<LearntClass>;
}

/// One class of blocks as a policy has learnt it, for `kvlane status` and metrics.
#[derive(Clone, Debug, PartialEq)]
pub struct LearntClass {
    /// Names the class: what was known of its blocks at their last request.
    pub blocks: String,
    /// Events counted of the class, decayed by age: blocks that were requested again, and blocks no longer tracked.
    pub seen: f64,
    /// Pairs of age and hit density. Age counts references since the last request. Hit density is the hits that a block
    /// brings for each reference that it is kept.
    pub densities: Vec<(u64, f64)>,
}

impl LearntClass {
    /// The hit density of a block of this age, in references.
    pub fn density(&self, age: u64) -> f64 {
        let next = self.densities.partition_point(|(first, _)| *first <= age);
        self.densities.get(next.saturating_sub(1)).map_or(0.0, |(_, density)| *density)
    }
}
