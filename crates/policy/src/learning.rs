//! What a policy that learns can do beyond the others: it keeps what it knows of a block in a tier below, and says how many
//! hits a block will bring.

use crate::memo::Memo;

/// A [`ReplacementPolicy`](crate::ReplacementPolicy) that learns from what became of blocks.
pub trait Learning {
    /// So many references went by before this policy took over: its time goes on from there. Called while it is empty.
    fn begin_at(&mut self, references: u64);

    /// What it knows of a slot that is in, or was the last that it gave up, for a tier below that has the block too.
    fn memo(&self, slot: u32) -> Option<Memo>;

    /// A slot that is in came back from a tier below, which kept this of it.
    fn remember(&mut self, slot: u32, memo: Memo);

    /// The hits that a block of which this is known will bring for each reference that it is kept, in whichever tier. None before
    /// it has learnt any.
    fn density(&self, memo: Memo) -> Option<f32>;

    /// There is a tier below, which gets what comes in here and has given up blocks of this density lately; 0 before it had to
    /// give up any. What is not worth a place here may be worth one there. None: there is none, or it takes nothing.
    fn set_below(&mut self, density: Option<f32>);

    /// What it has learnt of each kind of blocks that it has seen, the most seen first; empty before it has learnt any.
    fn learnt(&self) -> Vec<LearntClass>;
}

/// What a policy has learnt of blocks that are alike, for people.
#[derive(Clone, Debug, PartialEq)]
pub struct LearntClass {
    /// Which blocks they are: what was known of them when they were asked for last.
    pub blocks: String,
    /// Events that were counted of them, older ones counting less: that they were asked for again, or followed no longer.
    pub seen: f64,
    /// By age, in references since they were asked for last: the hits that a block brings for each reference that it is kept.
    pub densities: Vec<(u64, f64)>,
}

impl LearntClass {
    /// The hit density of a block of this age.
    pub fn density(&self, age: u64) -> f64 {
        let next = self.densities.partition_point(|(first, _)| *first <= age);
        self.densities.get(next.saturating_sub(1)).map_or(0.0, |(_, density)| *density)
    }
}
