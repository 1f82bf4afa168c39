//! Runs of block numbers. Blocks of one prompt get consecutive numbers when they first appear, so a prompt is a few runs.

/// Consecutive numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// The first number.
    pub first: u64,
    /// How many there are, at least 1.
    pub count: u64,
}

/// The runs that these numbers form, in order.
#[cfg(test)]
pub(crate) fn runs(ids: impl IntoIterator<Item = u64>) -> Vec<Run> {
    let mut runs = Vec::new();
    ids.into_iter().for_each(|id| push_run(&mut runs, Run { first: id, count: 1 }));
    runs
}

/// Appends a run, to the last one if it continues it.
pub(crate) fn push_run(runs: &mut Vec<Run>, run: Run) {
    match runs.last_mut() {
        Some(last) if last.first.checked_add(last.count) == Some(run.first) => last.count += run.count,
        _ => runs.push(run),
    }
}

/// The numbers of the runs, in order.
pub fn ids(runs: &[Run]) -> impl Iterator<Item = u64> {
    runs.iter().flat_map(|run| (0..run.count).map(|offset| run.first.wrapping_add(offset)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn neighbours_are_one_run() {
        let run = |first, count| Run { first, count };
        assert_eq!(runs([3, 4, 5, 9, 4]), [run(3, 3), run(9, 1), run(4, 1)]);
        assert_eq!(runs([u64::MAX, 0]), [run(u64::MAX, 1), run(0, 1)]);
    }

    proptest! {
        #[test]
        fn no_number_is_lost(numbers in prop::collection::vec(0..20_u64, 0..50)) {
            prop_assert_eq!(ids(&runs(numbers.iter().copied())).collect::<Vec<_>>(), numbers);
        }
    }
}
