//! The other daemons as a [`Source`] of the store: asks who has a prompt's blocks, and reads from those that the store chooses.
//!
//! ```text
//!   peers:  a question to each member -------------------- all answers, or the deadline
//!   index:  a question to the nearest replica --half of the time--> to the next one, too: the first answer counts
//! ```

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvlane_fabric::{Engine, PeerId, SendOptions};
use kvlane_store::{BlockRead, FindDone, Found, HolderId, Question, Source};
use parking_lot::{Condvar, Mutex};

use crate::borrowing::{Batch, Borrowing};
use crate::members::{Member, MemberNumber, Members};
use crate::messages::{BLOCKS_MAX, Blocks, Message};
use crate::questions::{Ended, FoundRuns, Needs, QUESTIONS_MAX, Questions};

/// How long a question may be on its way. Longer than its own time, because giving a message up costs more than it does.
const SEND_PATIENCE: Duration = Duration::from_secs(1);
/// Parts of a question. The blocks beyond are not asked for.
const PARTS_MAX: usize = 32;

/// Asks the members, or the replicas of an index.
pub(crate) struct Asker {
    pub(crate) engine: Arc<Engine>,
    pub(crate) members: Arc<Members>,
    /// The index's replicas. If there are any, one of them is asked instead of all members.
    pub(crate) replicas: Option<Arc<Members>>,
    pub(crate) borrowing: Arc<Borrowing>,
    /// [`ClusterOptions::answer_within`](crate::ClusterOptions::answer_within)
    patience: Duration,
    state: Mutex<State>,
    /// Notified when something is due earlier than before, and at the end.
    sooner: Condvar,
}

#[derive(Default)]
struct State {
    questions: Questions,
    /// In the order of their times.
    second_tries: VecDeque<SecondTry>,
    is_stopped: bool,
}

/// A question that another replica is asked, too, if it is still open then.
struct SecondTry {
    at: Instant,
    number: u64,
    replica: (MemberNumber, PeerId),
    messages: Vec<Arc<[u8]>>,
}

impl State {
    fn next_due(&self) -> Option<Instant> {
        let second = self.second_tries.front().map(|second| second.at);
        self.questions.next_deadline().into_iter().chain(second).min()
    }
}

impl Asker {
    pub(crate) fn new(
        engine: Arc<Engine>,
        members: Arc<Members>,
        replicas: Option<Arc<Members>>,
        borrowing: Arc<Borrowing>,
        patience: Duration,
    ) -> Self {
        let (state, sooner) = (Mutex::default(), Condvar::new());
        Self { engine, members, replicas, borrowing, patience, state, sooner }
    }

    /// A member or replica has answered a part of a question.
    pub(crate) fn answered(&self, from: &Member, number: u64, first: u32, found: FoundRuns, now: Instant) {
        let answer = self.state.lock().questions.answer(number, from.number, first, found);
        // A late answer does not close the breaker. Otherwise each lookup would wait for such a member in vain.
        let Some((asked, ended)) = answer else { return };
        from.state.lock().breaker.answered(now.saturating_duration_since(asked));
        if let Some(ended) = ended {
            self.missed(&ended, now);
            self.end(ended);
        }
    }

    /// Ends questions whose time is over and tries others a second time, until [`stop`](Self::stop).
    pub(crate) fn watch_deadlines(&self) {
        let mut state = self.state.lock();
        loop {
            if state.is_stopped {
                let ended = state.questions.end_all();
                drop(state);
                return ended.into_iter().for_each(|ended| self.end(ended));
            }
            match state.next_due() {
                None => self.sooner.wait(&mut state),
                Some(due) if Instant::now() < due => drop(self.sooner.wait_until(&mut state, due)),
                Some(_) => {
                    let now = Instant::now();
                    let ended = state.questions.expire(now);
                    let mut again = Vec::new();
                    while state.second_tries.front().is_some_and(|second| second.at <= now)
                        && let Some(second) = state.second_tries.pop_front()
                    {
                        if state.questions.ask_also(second.number, second.replica.0, now) {
                            again.push(second);
                        }
                    }
                    drop(state);
                    for each in ended {
                        self.missed(&each, now);
                        self.end(each);
                    }
                    for SecondTry { replica: (_, peer), messages, .. } in again {
                        messages.into_iter().for_each(|message| self.send(peer, message));
                    }
                    state = self.state.lock();
                }
            }
        }
    }

    pub(crate) fn stop(&self) {
        self.state.lock().is_stopped = true;
        self.sooner.notify_all();
    }

    /// Whom the questions go to.
    fn asked(&self) -> &Arc<Members> {
        self.replicas.as_ref().unwrap_or(&self.members)
    }

    fn missed(&self, ended: &Ended, now: Instant) {
        for member in ended.silent.iter().filter_map(|number| self.asked().get(*number)) {
            if member.state.lock().breaker.missed(now) {
                // Log: a daemon, or a replica of the index, did not answer three questions within `--cluster-answer-ms`; it
                // is asked again after a pause. Do: look at its load, and at the network.
                tracing::info!(member = %member.address, "no answer in time: this member is left out for a while");
            }
        }
    }

    fn end(&self, ended: Ended) {
        let found = ended.found.into_iter().filter(|(_, positions)| !positions.is_empty());
        let found = found.map(|(member, positions)| Found {
            holder: HolderId(member.0),
            positions,
            round_trip: self
                .members
                .get(member)
                .map_or(self.patience, |member| member.state.lock().breaker.round_trip()),
        });
        ended.done.call(found.collect());
    }

    /// A message that cannot be sent counts as missed at its question's deadline.
    fn send(&self, peer: PeerId, message: Arc<[u8]>) {
        let options = SendOptions { timeout: SEND_PATIENCE, ..SendOptions::default() };
        drop(self.engine.send(peer, message, options));
    }

    /// The members that may be asked now: the nearest first, and last those that were reached only lately, the newest at the
    /// end. Or two replicas.
    fn to_ask(&self, now: Instant) -> Vec<(MemberNumber, PeerId)> {
        let mut all = self.asked().all();
        all.sort_by_cached_key(|member| {
            let state = member.state.lock();
            (state.new_since(now), state.breaker.round_trip(), member.number)
        });
        let is_index = self.replicas.is_some();
        let mut asked = Vec::new();
        for member in all {
            // The second replica may not be asked at all, which must not use up the one question after its pause.
            let peer =
                if is_index && !asked.is_empty() { member.to_ask_later(now) } else { member.to_ask(now) };
            asked.extend(peer.map(|peer| (member.number, peer)));
            if is_index && asked.len() == 2 {
                break;
            }
        }
        asked
    }

    /// Opens a question.
    fn open(
        &self,
        to_ask: &[(MemberNumber, PeerId)],
        parts: &[Range<u32>],
        now: Instant,
        done: FindDone,
    ) -> Result<u64, FindDone> {
        let mut state = self.state.lock();
        if state.is_stopped {
            return Err(done);
        }
        let due_before = state.next_due();
        let times = (now, now + self.patience);
        let members: Vec<MemberNumber> = to_ask.iter().map(|(number, _)| *number).collect();
        let asked =
            if self.replicas.is_some() { (&members[..1], Needs::Any) } else { (&*members, Needs::All) };
        let number = state.questions.open(asked, parts, times, done)?;
        self.wake_for_sooner(&state, due_before);
        Ok(number)
    }

    fn try_again_later(&self, second: SecondTry) {
        let mut state = self.state.lock();
        let due_before = state.next_due();
        // Most are over long before their second try. Then their messages need not be kept until its time.
        while let Some(first) = state.second_tries.front()
            && !state.questions.is_open(first.number)
        {
            state.second_tries.pop_front();
        }
        if state.second_tries.len() < QUESTIONS_MAX {
            state.second_tries.push_back(second);
        }
        self.wake_for_sooner(&state, due_before);
    }

    fn wake_for_sooner(&self, state: &State, due_before: Option<Instant>) {
        if due_before.is_none_or(|before| state.next_due() < Some(before)) {
            self.sooner.notify_one();
        }
    }
}

/// An [`Asker`] as a source of the store.
pub(crate) struct ClusterSource(pub(crate) Arc<Asker>);

impl Source for ClusterSource {
    fn brings_copies(&self) -> bool {
        true
    }

    fn find(&self, question: Question, done: FindDone) {
        let asker = &self.0;
        let now = Instant::now();
        let to_ask = asker.to_ask(now);
        let parts: Vec<_> = question
            .hashes
            .chunks(BLOCKS_MAX)
            .zip((0..).step_by(BLOCKS_MAX))
            .take(PARTS_MAX)
            .map(|(part, first)| first..first + part.len() as u32)
            .collect();
        if to_ask.is_empty() || parts.is_empty() {
            return done.call(Vec::new());
        }
        let number = match asker.open(&to_ask, &parts, now, done) {
            Ok(number) => number,
            Err(done) => return done.call(Vec::new()),
        };
        let is_index = asker.replicas.is_some();
        let message = |part: Range<u32>| -> Arc<[u8]> {
            let message = Message::Question {
                number,
                first: part.start,
                blocks: Blocks {
                    space: question.space,
                    shard_bytes: question.shard_bytes.to_vec(),
                    hashes: question.hashes[part.start as usize..part.end as usize].to_vec(),
                },
                // With two members one may have what the other lacks. A replica knows the blocks of all.
                only_prefix: question.only_prefix && (is_index || to_ask.len() == 1),
            };
            message.encode().into()
        };
        let messages: Vec<_> = parts.into_iter().map(message).collect();
        let asked_first = if is_index { &to_ask[..1] } else { &to_ask };
        for message in &messages {
            asked_first.iter().for_each(|(_, peer)| asker.send(*peer, Arc::clone(message)));
        }
        if is_index && let Some(replica) = to_ask.get(1) {
            let at = now + asker.patience / 2;
            asker.try_again_later(SecondTry { at, number, replica: *replica, messages });
        }
    }

    fn read(&self, holder: HolderId, blocks: Vec<BlockRead>, deadline: Instant) {
        // Dropped reads have failed.
        let Asker { members, borrowing, .. } = &*self.0;
        borrowing.keep_only(|number| members.get(number).is_some());
        if let Some(member) = members.get(MemberNumber(holder.0)) {
            borrowing.read(&member, Batch { blocks, deadline });
        }
    }
}
