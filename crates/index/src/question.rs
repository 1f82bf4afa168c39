//! Questions: which owners have which of a prompt's blocks.
//!
//! ```text
//!   position   0  1  2  3  4  5  6  7
//!   owner a    [--------)     [-----)      0..3, 5..7
//!   owner b       [--------------)         1..6
//! ```
//! A position names at most eight owners. An owner that has the position before keeps its run. The rest of the eight are
//! taken in turn from the other owners, from another one with each number that the reader passes.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use kvlane_block::{BlockHash, Space};

use crate::entries::BATCH;
use crate::index::Index;
use crate::refused::Refused;
use crate::slots::Slot;

/// Owners of one position in an answer.
pub const OWNERS_A_POSITION: usize = 8;

/// A question for the blocks of a prompt.
#[derive(Clone, Copy, Debug)]
pub struct Question<'a> {
    /// The space of all blocks.
    pub space: &'a Space,
    /// The blocks' hashes in the prompt's order.
    pub hashes: &'a [BlockHash],
    /// Stop at the first block that no visible owner has.
    pub only_prefix: bool,
    /// Leave out the owner of this name: the reader itself.
    pub except: Option<&'a str>,
    /// Pass another number with each question. It spreads readers over the owners of a block that has more than eight.
    pub turn: u32,
}

/// The blocks that one owner has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnerRuns {
    /// The owner's name.
    pub owner: Arc<str>,
    /// Its epoch. A lease in another epoch means that the answer is stale.
    pub epoch: u64,
    /// Where to ask it for a lease.
    pub address: Arc<str>,
    /// Time since its latest sign of life.
    pub age: Duration,
    /// Positions in the question, rising, neither empty nor adjacent.
    pub positions: Vec<Range<u32>>,
}

/// One owner while its runs grow.
struct Row {
    owner: u16,
    runs: Vec<Range<u32>>,
}

impl Row {
    /// Extends the latest run by this position. False if that run does not end here.
    fn extend(&mut self, position: u32) -> bool {
        match self.runs.last_mut() {
            Some(run) if run.end == position => {
                run.end += 1;
                true
            }
            _ => false,
        }
    }
}

/// A slot's row; or one of these.
const UNKNOWN: u16 = u16::MAX;
const HIDDEN: u16 = u16::MAX - 1;

impl Index {
    /// The visible owners of a prompt's blocks. An answer may be stale: the owner decides what it lends.
    ///
    /// # Errors
    /// The question has too many keys.
    pub fn find(&self, question: &Question<'_>, now: Duration) -> Result<Vec<OwnerRuns>, Refused> {
        let (keys, most) = (question.hashes.len(), self.limits.keys_a_question);
        if keys > most {
            return Err(Refused::TooManyKeys { keys, most });
        }
        let rows = self.rows(question, now);
        let answer = rows.into_iter().filter(|row| !row.runs.is_empty()).filter_map(|row| {
            let owner = self.owners.numbered(row.owner)?;
            Some(OwnerRuns {
                owner: owner.name.clone(),
                epoch: owner.epoch,
                address: owner.address.clone(),
                age: owner.age(now),
                positions: row.runs,
            })
        });
        Ok(answer.collect())
    }

    fn rows(&self, question: &Question<'_>, now: Duration) -> Vec<Row> {
        let of_space = self.entries.fingerprints.of_space(question.space);
        let mut rows: Vec<Row> = Vec::new();
        let mut row_of = vec![UNKNOWN; self.entries.slots.end()];
        let mut others: Vec<u16> = Vec::new();
        let mut fingerprints = [0; BATCH];
        let mut position = 0;
        for batch in question.hashes.chunks(BATCH) {
            let fingerprints = &mut fingerprints[..batch.len()];
            of_space.fill(batch, fingerprints);
            self.entries.tables.touch(fingerprints);
            for fingerprint in fingerprints {
                let mut found = 0;
                others.clear();
                for slot in self.entries.tables.slots(*fingerprint) {
                    if row_of[slot.index()] == UNKNOWN {
                        row_of[slot.index()] = self.row(slot, &mut rows, question.except, now);
                    }
                    let row = row_of[slot.index()];
                    if row == HIDDEN {
                        continue;
                    }
                    if rows[usize::from(row)].extend(position) {
                        found += 1;
                    } else {
                        others.push(row);
                    }
                }
                let first = question.turn as usize % others.len().max(1);
                for row in others[first..].iter().chain(&others[..first]) {
                    if found == OWNERS_A_POSITION {
                        break;
                    }
                    rows[usize::from(*row)].runs.push(position..position + 1);
                    found += 1;
                }
                if found == 0 && question.only_prefix {
                    return rows;
                }
                position += 1;
            }
        }
        rows
    }

    /// The row of a slot's owner, which is new if the slot is its first one here. `HIDDEN` if its keys do not count.
    fn row(&self, slot: Slot, rows: &mut Vec<Row>, except: Option<&str>, now: Duration) -> u16 {
        let Some(number) = self.entries.slots.owner(slot) else { return HIDDEN };
        let is_shown = self
            .owners
            .numbered(number)
            .is_some_and(|owner| owner.is_visible(now, &self.timing) && except != Some(&*owner.name));
        if !is_shown {
            return HIDDEN;
        }
        let known = rows.iter().position(|row| row.owner == number);
        let row = known.unwrap_or_else(|| {
            rows.push(Row { owner: number, runs: Vec::new() });
            rows.len() - 1
        });
        row as u16
    }
}
