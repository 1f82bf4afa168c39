//! What a policy has learnt, for people.

/// Of blocks that are alike.
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
