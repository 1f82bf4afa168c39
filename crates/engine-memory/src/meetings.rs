//! Joins the loads of ranks that hold the same blocks: the last rank to come carries out the load for all.
//!
//! ```text
//!  rank 0: wanted, its event has passed -> gathering -.               .--> judged by its own fence
//!  rank 1:                                   wait ----+-- all here -- +--> the same
//!  rank 2: the last to come ----------------> full ---'  one thread   '--> the same
//!                                              |
//!                          not all in time --> ended: each loads by itself
//! ```
//! A rank that waits here holds no lock. Its session does not resume before all writes to its memory have ended.
//!
//! Loads are the same if they bring the same bytes of the pool in the same parts; each rank has its own destinations. So nothing
//! on the wire names them, and a load may also join a sibling's later load of the same blocks. GPUs beyond those of the ranks
//! take no part.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use kvlane_block::{Rank, Run};
use parking_lot::{Condvar, Mutex};

use crate::flags::LoadPart;
use crate::gpu_daemon::{GpuCopyError, Member};

/// The outcome of a rank's load in a meeting; None if the rank has to load by itself.
pub type Answer = Option<Result<(), GpuCopyError>>;

/// A rank among those of its engine that hold the same blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seat {
    /// Only ranks of one engine meet.
    pub engine_id: String,
    /// The first of the ranks that hold the same blocks.
    pub first: Rank,
    /// Number of these ranks.
    pub ranks: u32,
    /// This rank: `first`, or one of the `ranks - 1` after it.
    pub rank: Rank,
}

/// The meetings that are not full yet.
#[derive(Debug, Default)]
pub struct Meetings {
    open: Mutex<Vec<Arc<Meeting>>>,
}

#[derive(Debug)]
struct Meeting {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    members: Vec<(Seat, Arc<Member>)>,
    phase: Phase,
    /// In the order of the members; empty if all load by themselves.
    answers: Vec<Answer>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Gathering,
    Full,
    Ended,
}

impl Meetings {
    /// Meets the same load of the other ranks, for which it waits at most `within`. The last rank to come carries out all loads
    /// by `conduct`, which answers for each of them or for none. The other ranks wait until it is over.
    pub fn meet(
        &self,
        seat: Seat,
        member: &Arc<Member>,
        within: Duration,
        conduct: impl FnOnce(&[Arc<Member>]) -> Option<Vec<Result<(), GpuCopyError>>>,
    ) -> Answer {
        let deadline = Instant::now() + within;
        let is_last = |index: usize| index + 1 == seat.ranks as usize;
        let (meeting, index) = self.join(&seat, member);
        if is_last(index) {
            // Ends the meeting when dropped, so that the others resume even if `conduct` panics.
            let mut end = End { meeting: &meeting, answers: Vec::new() };
            let members: Vec<_> =
                meeting.state.lock().members.iter().map(|(_, member)| Arc::clone(member)).collect();
            end.answers = conduct(&members).unwrap_or_default().into_iter().map(Some).collect();
        } else {
            self.wait(&meeting, deadline);
        }
        meeting.state.lock().answers.get_mut(index).and_then(Option::take)
    }

    /// Joins a meeting, and takes it off the list if it is full. Returns it, with the index of this member.
    fn join(&self, seat: &Seat, member: &Arc<Member>) -> (Arc<Meeting>, usize) {
        let mut open = self.open.lock();
        let found = open.iter().position(|meeting| meeting.state.lock().has_room_for(seat, member));
        let index = found.unwrap_or_else(|| {
            let state = State { members: Vec::new(), phase: Phase::Gathering, answers: Vec::new() };
            open.push(Arc::new(Meeting { state: Mutex::new(state), changed: Condvar::new() }));
            open.len() - 1
        });
        let meeting = Arc::clone(&open[index]);
        let mut state = meeting.state.lock();
        let ranks = seat.ranks as usize;
        state.members.push((seat.clone(), Arc::clone(member)));
        let member_index = state.members.len() - 1;
        if state.members.len() == ranks {
            state.phase = Phase::Full;
            open.swap_remove(index);
        }
        drop(state);
        (meeting, member_index)
    }

    /// Waits until the meeting has ended, because its load is over or because not all came in time.
    fn wait(&self, meeting: &Arc<Meeting>, deadline: Instant) {
        let mut state = meeting.state.lock();
        while state.phase == Phase::Gathering {
            if meeting.changed.wait_until(&mut state, deadline).timed_out() {
                break;
            }
        }
        drop(state);
        // Under the lock that joining takes, so that no rank joins a meeting that is given up.
        let mut open = self.open.lock();
        let mut state = meeting.state.lock();
        if state.phase == Phase::Gathering {
            open.retain(|other| !Arc::ptr_eq(other, meeting));
            state.end(Vec::new());
            meeting.changed.notify_all();
        }
        drop(open);
        while state.phase != Phase::Ended {
            meeting.changed.wait(&mut state);
        }
    }
}

impl State {
    /// Ends the meeting and drops its references to the members; each rank still holds its own.
    fn end(&mut self, answers: Vec<Answer>) {
        self.phase = Phase::Ended;
        self.answers = answers;
        self.members.clear();
    }

    fn has_room_for(&self, seat: &Seat, member: &Member) -> bool {
        let same_team = |(other, _): &(Seat, _)| {
            (&other.engine_id, other.first, other.ranks) == (&seat.engine_id, seat.first, seat.ranks)
                && other.rank != seat.rank
        };
        self.members.iter().all(same_team)
            && self.members.first().is_some_and(|(_, first)| copy_the_same(&first.parts, &member.parts))
    }
}

/// Whether two loads copy the same bytes of the pool in the same parts.
fn copy_the_same(one: &[LoadPart], other: &[LoadPart]) -> bool {
    let bytes = |run: &Run| (run.pool_offset, run.len);
    let the_same = |(one, other): (&LoadPart, &LoadPart)| {
        one.flag.is_some() == other.flag.is_some()
            && one.runs.as_slice().iter().map(bytes).eq(other.runs.as_slice().iter().map(bytes))
    };
    one.len() == other.len() && one.iter().zip(other).all(the_same)
}

/// Ends a meeting when it is dropped.
struct End<'a> {
    meeting: &'a Meeting,
    answers: Vec<Answer>,
}

impl Drop for End<'_> {
    fn drop(&mut self) {
        let mut state = self.meeting.state.lock();
        state.end(std::mem::take(&mut self.answers));
        self.meeting.changed.notify_all();
    }
}
