//! [`Group`]: writes to several peers, or counts at their counters, in one call.

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

/// Checks of one call before it fails as [`FabricError::Changing`]: the regions it uses may change between check and
/// submission.
const CHECKS_MAX: usize = 4;

/// A fixed list of distinct peers of one engine, made by [`crate::Engine::group`].
///
/// A call begins the parts of all members or, if any of them cannot begin, of none. From then on each part is a transfer of
/// its own. A part that fails, or a member that is gone, does not delay the others.
#[derive(Debug, Clone)]
pub struct Group {
    shared: Arc<Shared>,
    peers: Vec<PeerId>,
}

/// The part of one member of a group. The default writes nothing and counts nothing.
#[derive(Debug, Clone)]
pub struct GroupPart {
    /// Bytes of this process, and where they go in the member's memory.
    pub pieces: Pieces,
    /// A counter at the member and its generation there, which counts once all bytes of the part are in place.
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

    /// The members, in the order given to [`crate::Engine::group`].
    pub fn peers(&self) -> &[PeerId] {
        &self.peers
    }

    /// Writes the n-th part to the n-th member. Each part is given up after `timeout`.
    ///
    /// # Errors
    /// All parts are checked before any begins. [`FabricError::Parts`]: there is not one for each member.
    /// [`FabricError::Member`]: a part does not fit the memory of both sides ([`FabricError::Shape`]), or its member was
    /// disconnected ([`FabricError::NoSuchPeer`]). [`FabricError::NoRoomForAll`]: not as many transfers can begin.
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
            self.shared.run_pending(&mut hub);
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

    /// Counts once at a counter of each member, without moving bytes: the n-th (number, generation) is the n-th member's. The
    /// handle is over when each member has counted or its part has failed.
    ///
    /// Processes wait for each other like this (tests/groups.rs has it as a test). Each opens a counter, and sends its number and
    /// generation to all others, with its descriptor. Then each does this in round 1, 2, 3...:
    ///
    /// ```text
    /// sent = others.barrier(their counters, patience)           `others`: the group of all other members
    /// engine.wait_count(own counter, members - 1 times round, patience)
    /// sent.wait(None)                                           every outcome has to be Ok
    /// ```
    ///
    /// A barrier has no order with transfers that began before: wait for those first. A member that is gone fails as
    /// [`Failure::PeerLost`]. The others' counters then never reach their target, and their waits end by their timeouts. After a
    /// failure members may have counted differently: continue with another generation ([`crate::Engine::retire_counter`]).
    ///
    /// # Errors
    /// As [`Group::scatter`].
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

/// The transfers that a call of a group began, one for each member. Dropping the handle does not cancel them.
///
/// As a future it resolves to the outcomes, as [`GroupHandle::wait`].
#[derive(Debug)]
pub struct GroupHandle {
    shared: Arc<Shared>,
    parts: Vec<Handle>,
    /// The first so many parts were over when the future was last polled.
    over: usize,
}

impl GroupHandle {
    /// The transfer of each member, in the group's order. Each can be waited for or cancelled by itself.
    pub fn parts(&self) -> &[Handle] {
        &self.parts
    }

    /// As [`GroupHandle::parts`], by value.
    pub fn into_parts(self) -> Vec<Handle> {
        self.parts
    }

    /// The outcome of each member, in the group's order. None: its part is not over.
    pub fn outcomes(&self) -> Vec<Option<Result<(), Failure>>> {
        let hub = self.shared.hub();
        self.parts.iter().map(|part| hub.hub.outcomes.of(part.ticket)).collect()
    }

    /// Waits until all parts are over, and returns their outcomes in the group's order. None: `timeout` passed first.
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

    /// Gives up all parts that are not over. The memory of each belongs to it until [`Handle::wait`] says that it is over.
    pub fn cancel(&self) {
        let mut hub = self.shared.hub();
        let now = hub.hub.now();
        self.parts.iter().for_each(|part| hub.hub.transfers.cancel(now, part.ticket));
        self.shared.run_pending(&mut hub);
    }
}

impl Future for GroupHandle {
    type Output = Vec<Result<(), Failure>>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let GroupHandle { parts, over, .. } = &mut *self;
        // Only the first part that is not over needs a waker: when it wakes the task, the next one is polled.
        for part in &mut parts[*over..] {
            if Pin::new(part).poll(context).is_pending() {
                return Poll::Pending;
            }
            *over += 1;
        }
        Poll::Ready(self.outcomes().into_iter().flatten().collect())
    }
}
