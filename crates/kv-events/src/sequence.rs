//! Finds lost messages of an engine by their sequence numbers.

/// The meaning of a number, given the one before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The expected number, or the first of all.
    InOrder,
    /// Messages `from..=to` are missing.
    Gap {
        /// The first missing one.
        from: u64,
        /// The last missing one.
        to: u64,
    },
    /// The number fell: the engine restarted, and its former messages no longer hold.
    Restarted,
    /// The number came a second time.
    Duplicate,
}

/// Tracks the last number of one engine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tracker {
    last: Option<u64>,
}

impl Tracker {
    /// Takes the number of the next message. It becomes the last one, whatever the step.
    pub fn take(&mut self, number: u64) -> Step {
        let Some(last) = self.last.replace(number) else { return Step::InOrder };
        match number.cmp(&last) {
            std::cmp::Ordering::Less => Step::Restarted,
            std::cmp::Ordering::Equal => Step::Duplicate,
            std::cmp::Ordering::Greater if number == last + 1 => Step::InOrder,
            std::cmp::Ordering::Greater => Step::Gap { from: last + 1, to: number - 1 },
        }
    }

    /// The last number that came.
    pub fn last(&self) -> Option<u64> {
        self.last
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn each_step_is_told() {
        let mut tracker = Tracker::default();
        let steps: Vec<Step> =
            [5, 6, 9, 9, 10, 0, 1].into_iter().map(|number| tracker.take(number)).collect();
        let gap = Step::Gap { from: 7, to: 8 };
        use Step::{Duplicate, InOrder, Restarted};
        assert_eq!(steps, [InOrder, InOrder, gap, Duplicate, InOrder, Restarted, InOrder]);
        assert_eq!(tracker.last(), Some(1));
    }

    proptest! {
        /// Messages of one run of an engine, some lost, some twice: what came and what the gaps name is all there was.
        #[test]
        fn gaps_name_exactly_what_did_not_come(first in 0u64..=u64::MAX - 200, lost in proptest::collection::vec(0u8..3, 1..200)) {
            let mut tracker = Tracker::default();
            let mut accounted = Vec::new();
            let mut came = Vec::new();
            for (number, copies) in (first..).zip(&lost) {
                for copy in 0..*copies {
                    match tracker.take(number) {
                        Step::Gap { from, to } => accounted.extend(from..=to),
                        Step::Duplicate => prop_assert_eq!(copy, 1),
                        step => prop_assert_eq!(step, Step::InOrder),
                    }
                    if copy == 0 {
                        accounted.push(number);
                        came.push(number);
                    }
                }
            }
            let expected: Vec<u64> = match (came.first(), came.last()) {
                (Some(&first), Some(&last)) => (first..=last).collect(),
                _ => Vec::new(),
            };
            prop_assert_eq!(accounted, expected);
        }
    }
}
