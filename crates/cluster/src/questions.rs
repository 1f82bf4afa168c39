//! The open questions: who has still to answer which part, and until when. Pure.
//!
//! ```text
//!   open(asked, parts) --> answer, for each part by all that were asked, or by any --> all there: over
//!                              '-- the deadline passed --> over, with what is there; a later answer finds nothing
//! ```

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::ops::Range;
use std::time::Instant;

use kvlane_store::FindDone;

use crate::members::MemberNumber;

/// Open questions. A further one is answered with nothing at once.
pub(crate) const QUESTIONS_MAX: usize = 4096;

/// The blocks of each member: runs of positions, ascending.
pub(crate) type FoundRuns = Vec<(MemberNumber, Vec<Range<u32>>)>;

/// Whose answers a question needs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Needs {
    /// Each part has an answer of each that was asked: a daemon knows its own blocks only.
    All,
    /// Each part has one answer: a replica knows all blocks.
    Any,
}

/// A question that is over.
pub(crate) struct Ended {
    pub(crate) done: FindDone,
    /// By member, of positions in the whole question.
    pub(crate) found: HashMap<MemberNumber, Vec<Range<u32>>>,
    /// Members that were asked at the beginning and have not answered as much as was needed. Those that were asked later had
    /// less time.
    pub(crate) silent: BTreeSet<MemberNumber>,
}

struct Open {
    done: FindDone,
    needs: Needs,
    /// Since when each was asked.
    asked: BTreeMap<MemberNumber, Instant>,
    /// Members that have answered a part.
    heard: BTreeSet<MemberNumber>,
    /// Answers that have not come: of whom, if it matters, and the first position of each part.
    missing: BTreeSet<(Option<MemberNumber>, u32)>,
    /// The end of each part, by its first position.
    parts: HashMap<u32, u32>,
    found: HashMap<MemberNumber, Vec<Range<u32>>>,
}

/// All open questions. Each has the same time.
#[derive(Default)]
pub(crate) struct Questions {
    open: HashMap<u64, Open>,
    last: u64,
    /// In the order of their deadlines. May name questions that are over.
    due: VecDeque<(Instant, u64)>,
}

impl Questions {
    /// Opens a question of these parts to these members, of which there is at least one each. Returns its number.
    ///
    /// # Errors
    /// The callback: too many questions are open.
    pub(crate) fn open(
        &mut self,
        (members, needs): (&[MemberNumber], Needs),
        parts: &[Range<u32>],
        (now, deadline): (Instant, Instant),
        done: FindDone,
    ) -> Result<u64, FindDone> {
        if self.open.len() >= QUESTIONS_MAX {
            return Err(done);
        }
        self.last += 1;
        let of_whom: Vec<_> = match needs {
            Needs::All => members.iter().copied().map(Some).collect(),
            Needs::Any => vec![None],
        };
        let missing = of_whom.iter().flat_map(|whom| parts.iter().map(|part| (*whom, part.start)));
        let open = Open {
            done,
            needs,
            asked: members.iter().map(|member| (*member, now)).collect(),
            heard: BTreeSet::new(),
            missing: missing.collect(),
            parts: parts.iter().map(|part| (part.start, part.end)).collect(),
            found: HashMap::new(),
        };
        self.open.insert(self.last, open);
        self.due.push_back((deadline, self.last));
        Ok(self.last)
    }

    /// Whether it is not over.
    pub(crate) fn is_open(&self, number: u64) -> bool {
        self.open.contains_key(&number)
    }

    /// Another one is asked, too. False: the question is over.
    pub(crate) fn ask_also(&mut self, number: u64, member: MemberNumber, now: Instant) -> bool {
        let Some(open) = self.open.get_mut(&number) else { return false };
        open.asked.insert(member, now);
        true
    }

    /// An answer to the part that begins at `first`, with runs of positions in it. Returns when its sender was asked, if the
    /// question is open and this answer was missing; and the question, if this was the last answer.
    pub(crate) fn answer(
        &mut self,
        number: u64,
        from: MemberNumber,
        first: u32,
        found: FoundRuns,
    ) -> Option<(Instant, Option<Ended>)> {
        let open = self.open.get_mut(&number)?;
        let asked = *open.asked.get(&from)?;
        if !open.missing.remove(&((open.needs == Needs::All).then_some(from), first)) {
            return None;
        }
        open.heard.insert(from);
        let end = open.parts.get(&first).copied().unwrap_or(first);
        for (member, runs) in found {
            let found = open.found.entry(member).or_default();
            for run in runs {
                let run = first.saturating_add(run.start)..first.saturating_add(run.end).min(end);
                if !run.is_empty() {
                    found.push(run);
                }
            }
        }
        Some((asked, open.missing.is_empty().then(|| self.end(number)).flatten()))
    }

    /// Questions whose time is over.
    pub(crate) fn expire(&mut self, now: Instant) -> Vec<Ended> {
        let mut ended = Vec::new();
        while let Some(&(deadline, number)) = self.due.front()
            && (deadline <= now || !self.open.contains_key(&number))
        {
            self.due.pop_front();
            ended.extend(self.end(number));
        }
        ended
    }

    /// When the next question's time is over.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.due.front().map(|(deadline, _)| *deadline)
    }

    /// Ends all questions.
    pub(crate) fn end_all(&mut self) -> Vec<Ended> {
        self.due.clear();
        let numbers: Vec<u64> = self.open.keys().copied().collect();
        numbers.into_iter().filter_map(|number| self.end(number)).collect()
    }

    fn end(&mut self, number: u64) -> Option<Ended> {
        let Open { done, needs, asked, heard, missing, mut found, .. } = self.open.remove(&number)?;
        found.values_mut().for_each(|runs| runs.sort_unstable_by_key(|run| run.start));
        let silent = match needs {
            Needs::All => missing.into_iter().filter_map(|(member, _)| member).collect(),
            Needs::Any => {
                let first = asked.values().min().copied();
                let at_first = asked.into_iter().filter(|(_, at)| Some(*at) == first);
                at_first.map(|(member, _)| member).filter(|member| !heard.contains(member)).collect()
            }
        };
        Some(Ended { done, found, silent })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::single_range_in_vec_init, reason = "tests")]
    use std::time::Duration;

    use super::*;

    const A: MemberNumber = MemberNumber(1);
    const B: MemberNumber = MemberNumber(2);

    fn of(member: MemberNumber, runs: Vec<Range<u32>>) -> FoundRuns {
        vec![(member, runs)]
    }

    fn nothing() -> FindDone {
        FindDone::new(|_| ())
    }

    #[test]
    fn a_question_is_over_when_all_have_answered_all_parts() {
        let now = Instant::now();
        let times = (now, now + Duration::from_millis(1));
        let mut questions = Questions::default();
        let number = questions.open((&[A, B], Needs::All), &[0..10, 10..15], times, nothing()).ok().unwrap();
        assert!(questions.answer(number, A, 10, of(A, vec![0..9])).unwrap().1.is_none());
        assert!(questions.answer(number, A, 0, of(A, vec![1..3, 7..10])).unwrap().1.is_none());
        assert!(questions.answer(number, A, 0, of(A, vec![0..10])).is_none(), "answered before");
        assert!(questions.answer(number, B, 5, of(B, vec![0..10])).is_none(), "never asked");
        assert!(questions.answer(number + 1, B, 0, of(B, vec![0..10])).is_none(), "never asked");
        assert!(questions.answer(number, B, 0, of(B, vec![])).unwrap().1.is_none());
        let (asked, ended) = questions.answer(number, B, 10, of(B, vec![u32::MAX - 1..u32::MAX])).unwrap();
        let ended = ended.unwrap();
        assert_eq!(asked, now);
        assert_eq!(ended.found[&A], [1..3, 7..10, 10..15], "not beyond its part");
        assert!(ended.found[&B].is_empty() && ended.silent.is_empty());
        assert!(questions.answer(number, B, 10, of(B, vec![])).is_none());
        // Its deadline ends nothing more.
        assert!(questions.expire(times.1).is_empty());
        assert_eq!(questions.next_deadline(), None);
    }

    #[test]
    fn the_deadline_ends_a_question_with_what_is_there() {
        let now = Instant::now();
        let at = |ms| now + Duration::from_millis(ms);
        let mut questions = Questions::default();
        let first = questions.open((&[A, B], Needs::All), &[0..10], (now, at(1)), nothing()).ok().unwrap();
        let second = questions.open((&[B], Needs::All), &[0..4], (now, at(2)), nothing()).ok().unwrap();
        questions.answer(first, A, 0, of(A, vec![0..2])).unwrap();
        assert!(questions.expire(now).is_empty());
        assert_eq!(questions.next_deadline(), Some(at(1)));
        let ended = questions.expire(at(1));
        assert_eq!((ended.len(), &ended[0].found[&A]), (1, &vec![0..2]));
        assert_eq!(ended[0].silent, BTreeSet::from([B]));
        assert!(questions.answer(first, B, 0, of(B, vec![])).is_none(), "too late");
        assert!(questions.answer(second, B, 0, of(B, vec![])).unwrap().1.is_some());
        assert!(questions.expire(at(9)).is_empty());
    }

    /// A replica knows the blocks of all, so the first that answers a part is enough.
    #[test]
    fn any_answer_to_each_part_is_enough_if_the_question_needs_no_more() {
        let now = Instant::now();
        let later = now + Duration::from_millis(1);
        let mut questions = Questions::default();
        let mut open = || questions.open((&[A], Needs::Any), &[0..10, 10..15], (now, later), nothing());
        let (number, other) = (open().ok().unwrap(), open().ok().unwrap());
        assert!(questions.answer(number, B, 0, vec![]).is_none(), "not asked");
        assert!(questions.ask_also(number, B, later));
        let found = vec![(A, vec![0..2]), (B, vec![1..3])];
        assert_eq!(questions.answer(number, B, 0, found).unwrap().0, later);
        assert!(questions.answer(number, A, 0, of(A, vec![5..6])).is_none(), "answered by another");
        let (_, ended) = questions.answer(number, B, 10, of(A, vec![0..1])).unwrap();
        let ended = ended.unwrap();
        assert_eq!((&ended.found[&A], &ended.found[&B]), (&vec![0..2, 10..11], &vec![1..3]));
        assert_eq!(ended.silent, BTreeSet::from([A]));
        assert!(!questions.ask_also(number, B, later));
        let ended = questions.expire(later);
        assert_eq!((ended.len(), &ended[0].silent), (1, &BTreeSet::from([A])));
        assert!(questions.answer(other, A, 0, vec![]).is_none());
    }

    /// With half of the time a replica that is well missed three lookups, and was left out: then none was asked at all.
    #[test]
    fn a_member_that_was_asked_late_has_not_missed_a_question_that_ends_soon_after() {
        let (now, later) = (Instant::now(), Instant::now() + Duration::from_millis(1));
        let mut questions = Questions::default();
        let number = questions.open((&[A], Needs::Any), &[0..10], (now, later), nothing()).ok().unwrap();
        assert!(questions.ask_also(number, B, now + Duration::from_micros(500)));
        assert_eq!(questions.expire(later)[0].silent, BTreeSet::from([A]));
    }

    #[test]
    fn there_is_a_bound() {
        let now = Instant::now();
        let mut questions = Questions::default();
        let mut open = || questions.open((&[A], Needs::All), &[0..1], (now, now), nothing()).is_ok();
        assert!((0..QUESTIONS_MAX).all(|_| open()));
        assert!(!open());
        assert_eq!(questions.expire(now).len(), QUESTIONS_MAX);
        questions.open((&[A], Needs::All), &[0..1], (now, now), nothing()).ok().unwrap();
        assert_eq!(questions.end_all().len(), 1);
    }
}
