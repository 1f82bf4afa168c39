//! A host's questions, as [`Asker`](crate::source::Asker) asks them, with its bookkeeping.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvlane_store::{FindDone, Found, HolderId, Question};
use parking_lot::Mutex;

use super::faults::Fault;
use super::net::{Address, Event, Net};
use crate::members::{MemberNumber, MemberState};
use crate::messages::{Blocks, Message};
use crate::questions::{Ended, Needs, Questions};

/// Blocks of one part of a question.
const PART: usize = 4;
pub(crate) const ANSWER_WITHIN: Duration = Duration::from_millis(30);

/// Answers of ended questions, by number.
type Given = Arc<Mutex<Vec<(u64, Vec<Found>)>>>;

pub(crate) struct Asking {
    me: Address,
    questions: Questions,
    given: Given,
    /// The newest question, and the parts that each member has still to answer. For [`Fault::AnswersInOrder`].
    newest: (u64, Vec<Vec<u32>>),
}

impl Asking {
    pub(crate) fn new(me: Address) -> Asking {
        Asking { me, questions: Questions::default(), given: Given::default(), newest: Default::default() }
    }

    pub(crate) fn find(
        &mut self,
        net: &mut Net,
        members: &mut [MemberState],
        question: &Question,
        done: FindDone,
    ) {
        let now = net.instant();
        let is_asked = |member: &usize| net.peer(self.me.host, *member).is_some();
        let others: Vec<usize> = (0..members.len()).filter(is_asked).collect();
        let asked: Vec<usize> = others.into_iter().filter(|member| members[*member].may_ask(now)).collect();
        let parts: Vec<Range<u32>> = question
            .hashes
            .chunks(PART)
            .zip((0..).step_by(PART))
            .map(|(part, first)| first..first + part.len() as u32)
            .collect();
        if asked.is_empty() {
            return done.call(Vec::new());
        }
        let of_question = Arc::new(AtomicU64::new(0));
        let (number_of, given) = (Arc::clone(&of_question), Arc::clone(&self.given));
        let done = FindDone::new(move |found: Vec<Found>| {
            given.lock().push((number_of.load(Ordering::Relaxed), found.clone()));
            done.call(found);
        });
        let numbers: Vec<MemberNumber> = asked.iter().map(|member| MemberNumber(*member as u32)).collect();
        let deadline = now + ANSWER_WITHIN;
        let Ok(number) = self.questions.open((&numbers, Needs::All), &parts, (now, deadline), done) else {
            return net.is_wrong("there are too many questions");
        };
        of_question.store(number, Ordering::Relaxed);
        self.newest = (number, vec![parts.iter().map(|part| part.start).collect(); members.len()]);
        net.at(net.now + ANSWER_WITHIN, Event::QuestionsDue(self.me));
        for part in parts {
            let hashes = question.hashes[part.start as usize..part.end as usize].to_vec();
            let shard_bytes = question.shard_bytes.to_vec();
            let blocks = Blocks { space: question.space, shard_bytes, hashes };
            let only_prefix = question.only_prefix && asked.len() == 1;
            let message = Message::Question { number, first: part.start, blocks, only_prefix };
            asked.iter().for_each(|member| net.send(self.me, *member, message.clone()));
        }
    }

    pub(crate) fn answered(
        &mut self,
        net: &mut Net,
        members: &mut [MemberState],
        member: usize,
        (mut number, mut first): (u64, u32),
        runs: Vec<Range<u32>>,
    ) {
        let now = net.instant();
        if net.fault == Fault::AnswersInOrder
            && let (newest, parts) = &mut self.newest
            && let Some(next) = parts.get_mut(member).filter(|parts| !parts.is_empty())
        {
            (number, first) = (*newest, next.remove(0));
        }
        let from = MemberNumber(member as u32);
        let Some((asked, ended)) = self.questions.answer(number, from, first, vec![(from, runs)]) else {
            return;
        };
        members[member].breaker.answered(now.saturating_duration_since(asked));
        ended.into_iter().for_each(|ended| self.end(net, members, ended));
    }

    pub(crate) fn due(&mut self, net: &mut Net, members: &mut [MemberState]) {
        if net.fault == Fault::QuestionsWithoutEnd {
            return;
        }
        let now = net.instant();
        for ended in self.questions.expire(now) {
            net.seen.expired_questions += 1;
            for member in &ended.silent {
                net.seen.left_out += u64::from(members[member.0 as usize].breaker.missed(now));
            }
            self.end(net, members, ended);
        }
    }

    fn end(&mut self, net: &mut Net, members: &[MemberState], ended: Ended) {
        let found: BTreeMap<_, _> = ended.found.into_iter().collect();
        let found = found.into_iter().filter(|(_, positions)| !positions.is_empty());
        let found = found.map(|(member, positions)| Found {
            holder: HolderId(member.0),
            positions,
            round_trip: members[member.0 as usize].breaker.round_trip(),
        });
        ended.done.call(found.collect());
        for (number, found) in std::mem::take(&mut *self.given.lock()) {
            for Found { holder, positions, .. } in found {
                let position = positions.into_iter().flatten().find(|position| {
                    let first = position / PART as u32 * PART as u32;
                    let said = net.said.get(&(self.me, number, holder.0 as usize, first));
                    let has_said =
                        |runs: &Vec<Range<u32>>| runs.iter().any(|run| run.contains(&(position - first)));
                    !said.is_some_and(|said| said.iter().any(has_said))
                });
                if let Some(position) = position {
                    net.is_wrong(format!("{holder:?} never said that it has block {position}"));
                }
            }
        }
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.questions.next_deadline().is_none()
    }
}
