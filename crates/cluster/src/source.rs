//! The other daemons as a [`Source`] of the store: asks them all, and reads from those that the store chooses.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvlane_fabric::{Engine, SendOptions};
use kvlane_store::{BlockRead, FindDone, Found, HolderId, Question, Source};
use parking_lot::{Condvar, Mutex};

use crate::borrowing::{Batch, Borrowing};
use crate::members::{Member, MemberNumber, Members};
use crate::messages::{BLOCKS_MAX, Blocks, Message};
use crate::questions::{Ended, Questions};

/// How long a question may be on its way. Longer than its own time, because giving a message up costs more than it does.
const SEND_PATIENCE: Duration = Duration::from_secs(1);
/// Parts of a question. The blocks beyond are not asked for.
const PARTS_MAX: usize = 32;

/// Asks the members.
pub(crate) struct Asker {
    pub(crate) engine: Arc<Engine>,
    pub(crate) members: Arc<Members>,
    pub(crate) borrowing: Arc<Borrowing>,
    /// [`ClusterOptions::answer_within`](crate::ClusterOptions::answer_within)
    patience: Duration,
    questions: Mutex<Questions>,
    /// Notified when a question is the first to be open, and at the end.
    opened: Condvar,
    stopped: Mutex<bool>,
}

impl Asker {
    pub(crate) fn new(
        engine: Arc<Engine>,
        members: Arc<Members>,
        borrowing: Arc<Borrowing>,
        patience: Duration,
    ) -> Self {
        let (questions, opened, stopped) = (Mutex::default(), Condvar::new(), Mutex::new(false));
        Self { engine, members, borrowing, patience, questions, opened, stopped }
    }

    /// A member has answered a part of a question.
    pub(crate) fn answered(
        &self,
        member: &Member,
        number: u64,
        first: u32,
        runs: Vec<std::ops::Range<u32>>,
        now: Instant,
    ) {
        let answer = self.questions.lock().answer(number, member.number, first, runs);
        // A late answer does not close the breaker. Otherwise each lookup would wait for such a member in vain.
        let Some((asked, ended)) = answer else { return };
        member.state.lock().breaker.answered(now.saturating_duration_since(asked));
        if let Some(ended) = ended {
            self.end(ended);
        }
    }

    /// Ends questions whose time is over, until [`stop`](Self::stop).
    pub(crate) fn watch_deadlines(&self) {
        let mut questions = self.questions.lock();
        loop {
            if *self.stopped.lock() {
                let ended = questions.end_all();
                drop(questions);
                return ended.into_iter().for_each(|ended| self.end(ended));
            }
            match questions.next_deadline() {
                None => self.opened.wait(&mut questions),
                Some(deadline) if Instant::now() < deadline => {
                    self.opened.wait_until(&mut questions, deadline);
                }
                Some(_) => {
                    let now = Instant::now();
                    let ended = questions.expire(now);
                    drop(questions);
                    for each in ended {
                        self.missed(&each, now);
                        self.end(each);
                    }
                    questions = self.questions.lock();
                }
            }
        }
    }

    pub(crate) fn stop(&self) {
        *self.stopped.lock() = true;
        let _questions = self.questions.lock();
        self.opened.notify_all();
    }

    fn missed(&self, ended: &Ended, now: Instant) {
        for member in ended.silent.iter().filter_map(|number| self.members.get(*number)) {
            if member.state.lock().breaker.missed(now) {
                // Log: a daemon of the cluster did not answer three questions within `--cluster-answer-ms`; it is asked
                // again after a pause. Do: look at its load, and at the network.
                tracing::info!(member = %member.address, "daemon does not answer in time: it is left out for a while");
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
        let asked: Vec<_> = asker
            .members
            .all()
            .into_iter()
            .filter_map(|member| Some((member.number, member.to_ask(now)?)))
            .collect();
        let parts: Vec<_> = question
            .hashes
            .chunks(BLOCKS_MAX)
            .zip((0..).step_by(BLOCKS_MAX))
            .take(PARTS_MAX)
            .map(|(part, first)| first..first + part.len() as u32)
            .collect();
        if asked.is_empty() || parts.is_empty() {
            return done.call(Vec::new());
        }
        let numbers: Vec<MemberNumber> = asked.iter().map(|(number, _)| *number).collect();
        let opened = {
            let mut questions = asker.questions.lock();
            if *asker.stopped.lock() {
                Err(done)
            } else {
                let is_first = questions.next_deadline().is_none();
                if is_first {
                    asker.opened.notify_one();
                }
                questions.open(&numbers, &parts, (now, now + asker.patience), done)
            }
        };
        let number = match opened {
            Ok(number) => number,
            Err(done) => return done.call(Vec::new()),
        };
        for part in parts {
            let message = Message::Question {
                number,
                first: part.start,
                blocks: Blocks {
                    space: question.space,
                    shard_bytes: question.shard_bytes.to_vec(),
                    hashes: question.hashes[part.start as usize..part.end as usize].to_vec(),
                },
                // With two members one may have what the other lacks.
                only_prefix: question.only_prefix && asked.len() == 1,
            };
            let bytes: Arc<[u8]> = message.encode().into();
            for (_, peer) in &asked {
                // A question that cannot be sent counts as missed at its deadline.
                let options = SendOptions { timeout: SEND_PATIENCE, ..SendOptions::default() };
                drop(asker.engine.send(*peer, Arc::clone(&bytes), options));
            }
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
