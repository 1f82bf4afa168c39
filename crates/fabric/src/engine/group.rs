//! Peers that are written to, or told something, in one call.

use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::beginning::Checked;
use super::error::FabricError;
use super::handle::{Handle, Transfer};
use super::shared::Shared;
use crate::shape::Pieces;
use crate::transfers::{Failure, PeerId, Priority};

/// What is registered may change while a call is checked, so often.
const CHECKS_MAX: usize = 4;

/// A list of distinct peers of one engine, which does not change; made by [`crate::Engine::group`].
///
/// A call begins the parts of all members or, if any of them cannot be begun, of none. From then on each is a transfer of
/// its own: one that fails, or a member that is gone, holds up no other.
#[derive(Debug, Clone)]
pub struct Group {
    shared: Arc<Shared>,
    peers: Vec<PeerId>,
}

/// What one member of a group is written. The default is nothing.
#[derive(Debug, Clone)]
pub struct GroupPart {
    /// Bytes of this process, and where they go in the member's memory.
    pub pieces: Pieces,
    /// A counter at the member, and its generation there, that counts once all of its bytes are in place.
    pub immediate: Option<(u32, u32)>,
}

impl Default for GroupPart {
    fn default() -> GroupPart {
        GroupPart { pieces: Pieces::Runs(Vec::new()), immediate: None }
    }
}

impl Group {
    pub(crate) fn new(shared: Arc<Shared>, peers: &[PeerId]) -> Result<Group, FabricError> {
        let mut known = HashMap::with_capacity(peers.len());
        for (member, peer) in peers.iter().enumerate() {
            if let Some(before) = known.insert(peer, member) {
                return Err(FabricError::SameMember(before, member));
            }
        }
        let hub = shared.try_hub()?;
        if hub.hub.is_closed {
            return Err(FabricError::Closed);
        }
        if peers.iter().any(|peer| hub.hub.outside.peer(*peer).is_none()) {
            return Err(FabricError::NoSuchPeer);
        }
        drop(hub);
        Ok(Group { shared, peers: peers.to_vec() })
    }

    /// The members, in their order.
    pub fn peers(&self) -> &[PeerId] {
        &self.peers
    }

    /// Writes each member its own part, the n-th to the n-th member; each is given up after `timeout`.
    ///
    /// All parts are checked before any is begun: for their number ([`FabricError::Parts`]), whether each fits the memory
    /// of both sides ([`FabricError::Member`], with a [`FabricError::Shape`]; or [`FabricError::NoSuchPeer`], if it was
    /// disconnected), and whether as many transfers can begin ([`FabricError::NoRoomForAll`]).
    pub fn scatter(
        &self,
        parts: &[GroupPart],
        timeout: Option<Duration>,
        priority: Priority,
    ) -> Result<GroupHandle, FabricError> {
        self.check_len(parts.len())?;
        if self.shared.try_hub()?.hub.is_closed {
            return Err(FabricError::Closed);
        }
        for _ in 0..CHECKS_MAX {
            let checked = self.check(parts, timeout, priority)?;
            let mut hub = self.shared.try_hub()?;
            let (members, room) = (self.peers.len(), hub.hub.transfers.room());
            if members > room {
                return Err(FabricError::NoRoomForAll { members, room });
            }
            if !checked.iter().all(|checked| self.shared.is_current(&hub, checked)) {
                continue;
            }
            let mut handles = Vec::with_capacity(members);
            for checked in checked {
                handles.extend(self.shared.submit(&mut hub, checked)?);
            }
            self.shared.set_going(&mut hub);
            drop(hub);
            return Ok(GroupHandle { shared: Arc::clone(&self.shared), parts: handles, over: 0 });
        }
        Err(FabricError::Changing)
    }

    /// Checks all parts against what both sides have registered now, without the engine's lock.
    fn check(
        &self,
        parts: &[GroupPart],
        timeout: Option<Duration>,
        priority: Priority,
    ) -> Result<Vec<Checked>, FabricError> {
        let check = |(member, (peer, part)): (usize, (&PeerId, &GroupPart))| {
            let (immediate, pieces) = (part.immediate, part.pieces.clone());
            let transfer = Transfer { immediate, timeout, priority, ..Transfer::write(pieces) };
            let sides = self.shared.both_sides(*peer);
            sides.and_then(|sides| self.shared.check(&sides, *peer, &transfer)).map_err(|why| match why {
                FabricError::Forked(why) => FabricError::Forked(why),
                why => FabricError::Member { member, why: Box::new(why) },
            })
        };
        self.peers.iter().zip(parts).enumerate().map(check).collect()
    }

    /// Tells each member's counter, the n-th (number, generation) the n-th member's, without moving bytes. It is over when
    /// all are told, or known not to be. Errors as of [`Group::scatter`].
    ///
    /// Processes wait for each other like this (tests/groups.rs has it as a test). Each opens a counter, and tells its number and
    /// generation to all others, with its descriptor. Then each does this in round 1, 2, 3...:
    ///
    /// ```text
    /// told = others.barrier(their counters, patience)           `others`: the group of all other members
    /// engine.wait_count(own counter, members - 1 times round, patience)
    /// told.wait(None)                                           every outcome has to be Ok
    /// ```
    ///
    /// It has no order with transfers that were begun before: wait for those first. A member that is gone fails as
    /// [`Failure::PeerLost`], and the others' counters never reach their target: their wait ends by its timeout. After a
    /// failure members may have counted differently; go on with another generation ([`crate::Engine::retire_counter`]).
    pub fn barrier(
        &self,
        counters: &[(u32, u32)],
        timeout: Option<Duration>,
    ) -> Result<GroupHandle, FabricError> {
        let tell = |counter: &(u32, u32)| GroupPart { immediate: Some(*counter), ..GroupPart::default() };
        let parts: Vec<GroupPart> = counters.iter().map(tell).collect();
        self.scatter(&parts, timeout, Priority::High)
    }

    fn check_len(&self, given: usize) -> Result<(), FabricError> {
        let members = self.peers.len();
        (given == members).then_some(()).ok_or(FabricError::Parts { given, members })
    }
}

/// What was begun for a group: one transfer for each member. Dropping it changes nothing for them.
///
/// As a future it answers what [`GroupHandle::wait`] does.
#[derive(Debug)]
pub struct GroupHandle {
    shared: Arc<Shared>,
    parts: Vec<Handle>,
    /// So many of the first were over when the future was last asked.
    over: usize,
}

impl GroupHandle {
    /// The transfer of each member, in the group's order; each can be waited for, or cancelled, by itself.
    pub fn parts(&self) -> &[Handle] {
        &self.parts
    }

    /// As [`GroupHandle::parts`], to be kept.
    pub fn into_parts(self) -> Vec<Handle> {
        self.parts
    }

    /// The outcome of each member in the group's order, where it is over.
    pub fn outcomes(&self) -> Vec<Option<Result<(), Failure>>> {
        let hub = self.shared.hub();
        self.parts.iter().map(|part| hub.hub.outcomes.of(part.ticket)).collect()
    }

    /// Waits until all are over, and answers the outcome of each member in the group's order. None: not in this time.
    pub fn wait(&self, timeout: Option<Duration>) -> Option<Vec<Result<(), Failure>>> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut hub = self.shared.hub();
        let mut outcomes = Vec::with_capacity(self.parts.len());
        let all_over = self.shared.wait(&mut hub, deadline, |hub| {
            let left = &self.parts[outcomes.len()..];
            outcomes.extend(left.iter().map_while(|part| hub.hub.outcomes.of(part.ticket)));
            (outcomes.len() == self.parts.len()).then_some(())
        });
        all_over.map(|()| outcomes)
    }

    /// Gives all up that are not over. Each is over when it says so: its memory belongs to it until then.
    pub fn cancel(&self) {
        let mut hub = self.shared.hub();
        let now = hub.hub.now();
        self.parts.iter().for_each(|part| hub.hub.transfers.cancel(now, part.ticket));
        self.shared.set_going(&mut hub);
    }
}

impl Future for GroupHandle {
    type Output = Vec<Result<(), Failure>>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let GroupHandle { parts, over, .. } = &mut *self;
        // It is enough to be woken by the first that is not over: the next one is asked then.
        for part in &mut parts[*over..] {
            if Pin::new(part).poll(context).is_pending() {
                return Poll::Pending;
            }
            *over += 1;
        }
        Poll::Ready(self.outcomes().into_iter().flatten().collect())
    }
}
