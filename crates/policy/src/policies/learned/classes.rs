//! [`Class`]: what was known of a block at its last request, as one of a hundred classes.

use crate::memo::Memo;

/// Steps of how many blocks of the prompt were known: 0, 1 to 3, 4 to 15, and so on by factors of four.
const KNOWN: usize = 6;
/// Steps of how many blocks of the prompt were new: 1 to 3, 4 to 15, and so on.
const LENGTHS: usize = 5;
const SHAPES: usize = KNOWN * LENGTHS;
/// Steps of how often a block was requested: twice, 3 times, 4, 5 to 8, 9 to 16, 17 to 32, more often.
const USES: usize = 7;
/// Steps of the references since the request before: below 64, below 256, and so on by factors of four.
const GAPS: usize = 10;

/// Number of classes.
pub(super) const CLASSES: usize = 1 + SHAPES + USES * GAPS;
/// Number of groups of similar classes.
pub(super) const GROUPS: usize = 3 + USES;
/// Use counts saturate here.
pub(super) const MAX_USES: u8 = 64;

/// The class of a block. For a block that was requested once it is the shape of that request: how many of the prompt's
/// blocks were known, and how many new. For others it is how often they were requested, and how long after the request
/// before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Class(u8);

impl Class {
    /// The class of all blocks before anything was learnt.
    pub(super) const UNKNOWN: Self = Self(0);

    /// Class of a block at its first request, as one of `new` blocks behind `known` ones.
    pub(super) fn of_new(known: usize, new: usize) -> Self {
        let known = power_of_four(known).min(KNOWN - 1);
        let length = power_of_four(new.max(1)).min(LENGTHS) - 1;
        Self((1 + known * LENGTHS + length) as u8)
    }

    /// Class of a block at its request number `uses`, the second or a later one, `gap` references after the one before.
    pub(super) fn of_used(uses: u8, gap: u32) -> Self {
        let uses = match uses {
            0..=4 => usize::from(uses.max(2)) - 2,
            5..=8 => 3,
            9..=16 => 4,
            17..=32 => 5,
            _ => 6,
        };
        let gap = power_of_four(gap as usize).clamp(3, GAPS + 2) - 3;
        Self((1 + SHAPES + uses * GAPS + gap) as u8)
    }

    /// Any known class, always the same for the same number.
    pub(super) fn random(number: u64) -> Self {
        Self((1 + number % (CLASSES as u64 - 1)) as u8)
    }

    pub(super) fn all() -> impl Iterator<Item = Self> {
        (0..CLASSES as u8).map(Self)
    }

    pub(super) fn from_index(index: usize) -> Self {
        debug_assert!(index < CLASSES);
        Self(index as u8)
    }

    pub(super) fn from_memo(memo: Memo) -> Self {
        if usize::from(memo.class()) < CLASSES { Self(memo.class()) } else { Self::UNKNOWN }
    }

    /// Describes the blocks of the class, for people. Metrics use it as a label, so it must not change.
    pub(super) fn name(self) -> String {
        let index = self.index();
        if index == 0 {
            return "all, before anything was learnt".to_owned();
        }
        if index <= SHAPES {
            let (known, new) = ((index - 1) / LENGTHS, (index - 1) % LENGTHS + 1);
            let new = powers(new, LENGTHS);
            return match known {
                0 => format!("asked for once, of a prompt of {new} new blocks"),
                _ => format!("asked for once, of {new} new blocks behind {} known", powers(known, KNOWN - 1)),
            };
        }
        let (uses, gap) = ((index - 1 - SHAPES) / GAPS, (index - 1 - SHAPES) % GAPS);
        let uses = ["2", "3", "4", "5 to 8", "9 to 16", "17 to 32", "33 or more"][uses];
        let gap = match gap {
            0 => "fewer than 64".to_owned(),
            _ => powers(gap + 3, GAPS + 2),
        };
        format!("asked for {uses} times, {gap} references apart")
    }

    /// The number of the class, below [`CLASSES`].
    pub(super) fn index(self) -> usize {
        usize::from(self.0)
    }

    /// The number of the class's group, below [`GROUPS`]. Groups are new blocks of new prompts, new blocks of known
    /// prompts, and one for each step of use counts.
    pub(super) fn group(self) -> usize {
        match self.index() {
            0 => 0,
            index if index <= LENGTHS => 1,
            index if index <= SHAPES => 2,
            index => 3 + (index - 1 - SHAPES) / GAPS,
        }
    }
}

/// The range of numbers of one step, as [`power_of_four`] counts steps; the last step has all numbers above.
fn powers(power: usize, last: usize) -> String {
    let (first, end) = (thousands(1 << (2 * (power - 1))), thousands((1 << (2 * power)) - 1));
    if power >= last { format!("{first} or more") } else { format!("{first} to {end}") }
}

/// Formats a number below a million with a comma.
fn thousands(number: u32) -> String {
    match number {
        0..1000 => number.to_string(),
        _ => format!("{},{:03}", number / 1000, number % 1000),
    }
}

/// The step of a number: 0 for 0, 1 from 1 on, 2 from 4 on, 3 from 16 on.
fn power_of_four(number: usize) -> usize {
    number.checked_ilog2().map_or(0, |log| log as usize / 2 + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_block_has_a_class_and_every_class_a_group() {
        let numbers = [0, 1, 3, 4, 15, 16, 63, 64, 255, 256, 1 << 20, usize::MAX];
        for known in numbers {
            for new in numbers {
                let class = Class::of_new(known, new);
                assert!(class.index() > 0 && class.group() == 1 + usize::from(known > 0), "{known} {new}");
            }
        }
        for uses in 0..=u8::MAX {
            for gap in [0, 1, 63, 64, 255, 256, 1 << 20, u32::MAX] {
                let class = Class::of_used(uses, gap);
                assert!(class.index() < CLASSES && (3..GROUPS).contains(&class.group()), "{uses} {gap}");
            }
        }
        assert_eq!(Class::of_used(64, u32::MAX).index(), CLASSES - 1);
        let names: std::collections::BTreeSet<String> = Class::all().map(Class::name).collect();
        assert_eq!(names.len(), CLASSES, "each has a name of its own");
        let name = Class::of_new(5, 20).name();
        assert_eq!(name, "asked for once, of 16 to 63 new blocks behind 4 to 15 known");
        assert_eq!(Class::of_new(0, 9000).name(), "asked for once, of a prompt of 256 or more new blocks");
        assert_eq!(
            Class::of_used(6, 5000).name(),
            "asked for 5 to 8 times, 4,096 to 16,383 references apart"
        );
        assert_eq!(Class::of_used(6, 300).name(), "asked for 5 to 8 times, 256 to 1,023 references apart");
        assert_eq!(Class::of_used(2, 9).name(), "asked for 2 times, fewer than 64 references apart");
        assert_ne!(Class::of_used(2, 63), Class::of_used(2, 64));
        assert_eq!(Class::of_used(3, 64), Class::of_used(3, 255));
    }
}
