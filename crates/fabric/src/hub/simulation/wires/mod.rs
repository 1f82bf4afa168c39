//! Simulated control connections: frames arrive late but in order, until a connection is cut at any of them.

pub(super) mod wire;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use self::wire::{CONNECTING, FenceAsked, LISTENING, Wire};
use super::faults::Fault;
use super::network::{Network, Next, SharedNetwork};
use crate::control::{ChannelId, Control, ControlEvent};
use crate::fences::{Question, Whom};
use crate::frames::Frame;
use crate::served::Served;
use crate::transfers::PathId;

/// The control connections of one process.
#[derive(Debug)]
pub(super) struct SimulatedControl {
    pub(super) process: usize,
    pub(super) network: SharedNetwork,
}

/// A channel is even at the connecting end and odd at the listening end. Channels of fences count down from the maximum.
fn channel(wire: u64, end: usize) -> ChannelId {
    wire * 2 + end as u64
}

impl Control for SimulatedControl {
    fn connect(&mut self, _: Duration, path: PathId, number: u32, whom: &Whom) {
        let network = &mut *self.network.lock();
        let from = self.process;
        let address = whom.addresses[number as usize % whom.addresses.len()];
        let to = network.listener_at(address).filter(|_| !network.goes_wrong(6));
        let Some(to) = to else {
            let event = ControlEvent::Broke { path, number, channel: None };
            return network.soon(from, Next::Control(event));
        };
        network.wires.made += 1;
        let id = network.wires.made;
        let mut session = whom.session;
        if network.fault == Fault::ForgetsSessions {
            session += u128::from(id) << 64;
        }
        let served = Served { from: network.hosts[from].identity, session };
        let (frames, ends) = ([VecDeque::new(), VecDeque::new()], [from, to]);
        let (has, is_up, is_cut, last, to_whom) = ([true, false], false, false, [0, 0], whom.identity);
        let wire = Wire { ends, path, number, to: to_whom, served, has, is_up, is_cut, frames, last };
        network.wires.all.insert(id, wire);
        network.soon(to, Next::Dialled(id));
    }

    fn close(&mut self, _: Duration, path: PathId, number: u32) {
        let network = &mut *self.network.lock();
        let is_it = |wire: &Wire| {
            (wire.ends[CONNECTING], wire.path, wire.number) == (self.process, path, number)
                && wire.has[CONNECTING]
        };
        let found = network.wires.all.iter().find(|(_, wire)| is_it(wire)).map(|(id, _)| *id);
        found.into_iter().for_each(|id| network.close_end(id, CONNECTING));
    }

    fn send(&mut self, channel: ChannelId, frame: Frame<Arc<[u8]>>) {
        let network = &mut *self.network.lock();
        let (id, end) = (channel / 2, channel as usize % 2);
        // A connection may be cut at any frame.
        if network.goes_wrong(150) {
            network.cut(id);
        }
        if network.fault == Fault::LosesNews && matches!(frame, Frame::Regions(_)) && network.dice.one_in(5) {
            return;
        }
        let delay = network.delay();
        let now = network.now;
        let Some(wire) = network.wires.all.get_mut(&id) else { return };
        if wire.is_cut || !wire.has[end] {
            return;
        }
        let to = 1 - end;
        wire.frames[to].push_back(owned(frame));
        wire.last[to] = wire.last[to].max(now + delay);
        let (at, process) = (wire.last[to], wire.ends[to]);
        network.at(at, process, Next::Frame(id, to));
    }

    fn end(&mut self, _: Duration, channel: ChannelId, why: &'static str) {
        let network = &mut *self.network.lock();
        // A side that confirmed a fence has forgotten that session, although its requests may still arrive.
        if why != super::fast::NO_NEIGHBOUR {
            network.report_wrong(format!("process {} ends a connection: {why}", self.process));
        }
        network.close_end(channel / 2, channel as usize % 2);
    }

    fn ask_fence(&mut self, _: Duration, question: Question, whom: &Whom) {
        let network = &mut *self.network.lock();
        let broken = question.broken;
        network.seen.insisted += u64::from(question.is_insisted);
        let to = network.listener_at(question.address).filter(|_| !network.goes_wrong(4));
        let is_it = |to: &usize| whom.identity.is_none_or(|known| known == network.hosts[*to].identity);
        match to.filter(is_it) {
            Some(to) => {
                let asked = FenceAsked { from: self.process, to, broken };
                network.wires.fences.push(asked);
                let index = network.wires.fences.len() - 1;
                network.soon(to, Next::FenceAsked(index));
            }
            None => {
                let event = ControlEvent::FenceAnswered { broken, is_over: false };
                network.soon(self.process, Next::Control(event));
            }
        }
    }

    fn answer_fence(&mut self, _: Duration, channel: ChannelId, is_over: bool) {
        let network = &mut *self.network.lock();
        let FenceAsked { from, broken, .. } = network.wires.fences[(u64::MAX - channel) as usize];
        let is_lost = network.goes_wrong(6) || network.is_parted(from, self.process);
        let is_over = is_over && !is_lost;
        network.soon(from, Next::Control(ControlEvent::FenceAnswered { broken, is_over }));
    }

    fn forget(&mut self, _: PathId) {}

    fn next_event(&mut self) -> Option<ControlEvent> {
        self.network.lock().control_events[self.process].pop_front()
    }
}

impl Network {
    /// A control connection arrives at the listening process. None: it is refused.
    pub(super) fn dialled(&mut self, id: u64) -> Option<Served> {
        let is_refused = self.goes_wrong(8);
        let wire = self.wires.all.get(&id)?;
        let [from, to] = wire.ends;
        let host = &self.hosts[to];
        let is_it = wire.to.is_none_or(|identity| identity == host.identity);
        let is_over = !wire.has[CONNECTING] || wire.is_cut;
        if is_over || is_refused || !host.listens || !is_it || self.is_parted(from, to) {
            self.wires.all.get_mut(&id)?.is_cut = true;
            self.soon(from, Next::Ended(id, CONNECTING));
            return None;
        }
        let wire = self.wires.all.get_mut(&id)?;
        wire.has[LISTENING] = true;
        let served = wire.served;
        self.control_events[to].push_back(ControlEvent::Session { channel: channel(id, LISTENING), served });
        let delay = self.delay();
        let at = self.now + delay;
        // Frames to the connecting end arrive after its welcome.
        if let Some(wire) = self.wires.all.get_mut(&id) {
            wire.last[CONNECTING] = at;
        }
        self.at(at, from, Next::Welcomed(id));
        Some(served)
    }

    /// The connecting process learns that its control connection is up.
    pub(super) fn welcomed(&mut self, id: u64) {
        let Some(wire) = self.wires.all.get_mut(&id) else { return };
        if !wire.has[CONNECTING] || wire.is_cut {
            return;
        }
        wire.is_up = true;
        let ([from, to], path, number) = (wire.ends, wire.path, wire.number);
        let identity = self.hosts[to].identity;
        let channel = channel(id, CONNECTING);
        self.control_events[from].push_back(ControlEvent::Up { path, number, channel, from: identity });
    }

    /// A frame arrives, unless the connection was cut before it.
    pub(super) fn frame(&mut self, id: u64, end: usize) {
        let Some(wire) = self.wires.all.get_mut(&id) else { return };
        let Some(frame) = wire.frames[end].pop_front() else { return };
        if !wire.has[end] || (end == CONNECTING && !wire.is_up) {
            return;
        }
        let event = ControlEvent::Heard { channel: channel(id, end), frame, lease: None };
        let process = wire.ends[end];
        // The fault confirms every fence at once.
        if self.fault == Fault::FenceNotKept
            && let ControlEvent::Heard { frame: Frame::Fence { code, connection }, .. } = &event
        {
            let (broken, from) = ((*code, *connection), self.wires.all[&id].ends[CONNECTING]);
            return self.soon(from, Next::Control(ControlEvent::FenceAnswered { broken, is_over: true }));
        }
        self.control_events[process].push_back(event);
    }

    /// An end notices that its connection is over. Returns the session that this ends, at the listening end.
    pub(super) fn ended(&mut self, id: u64, end: usize) -> Option<Served> {
        let wire = self.wires.all.get_mut(&id)?;
        if !std::mem::replace(&mut wire.has[end], false) {
            return None;
        }
        let (process, path, number) = (wire.ends[end], wire.path, wire.number);
        let (served, is_up, of_end) = (wire.served, wire.is_up, channel(id, end));
        if wire.has == [false, false] {
            self.wires.all.remove(&id);
        }
        if end == LISTENING {
            self.control_events[process].push_back(ControlEvent::SessionEnded { channel: of_end });
            return Some(served);
        }
        let channel = is_up.then_some(of_end);
        self.control_events[process].push_back(ControlEvent::Broke { path, number, channel });
        None
    }

    pub(super) fn fence_asked(&mut self, index: usize) {
        let FenceAsked { from, to, broken } = self.wires.fences[index];
        if !self.hosts[to].listens || self.is_parted(from, to) {
            let event = ControlEvent::FenceAnswered { broken, is_over: false };
            return self.soon(from, Next::Control(event));
        }
        if self.fault == Fault::FenceNotKept {
            let event = ControlEvent::FenceAnswered { broken, is_over: true };
            return self.soon(from, Next::Control(event));
        }
        let (channel, from) = (u64::MAX - index as u64, self.hosts[from].identity);
        self.control_events[to].push_back(ControlEvent::FenceAsked { channel, from, broken });
    }

    /// Breaks a connection between its ends. A random number of the frames in flight still arrives.
    pub(super) fn cut(&mut self, id: u64) {
        let Some(wire) = self.wires.all.get_mut(&id).filter(|wire| !wire.is_cut) else { return };
        self.seen.cuts += 1;
        wire.is_cut = true;
        let ends = wire.ends;
        for end in [CONNECTING, LISTENING] {
            let keeps = self.dice.below(wire.frames[end].len() as u64 + 1) as usize;
            wire.frames[end].truncate(keeps);
        }
        for (end, process) in ends.into_iter().enumerate() {
            let notice = self.notice();
            self.after(notice, process, Next::Ended(id, end));
        }
    }

    /// One end closes a connection.
    fn close_end(&mut self, id: u64, end: usize) {
        self.cut(id);
        let Some(process) = self.wires.all.get(&id).map(|wire| wire.ends[end]) else { return };
        let shortly = self.dice.below(100);
        self.after(shortly, process, Next::Ended(id, end));
    }

    /// A process ends all its connections at once. Returns its ends.
    pub(super) fn cut_all(&mut self, process: usize) -> Vec<(u64, usize)> {
        let of_process = |(_, wire): &(&u64, &Wire)| wire.ends.contains(&process);
        let wires: Vec<u64> = self.wires.all.iter().filter(of_process).map(|(id, _)| *id).collect();
        wires.iter().for_each(|id| self.cut(*id));
        let ends = wires.into_iter().map(|id| (id, usize::from(self.wires.all[&id].ends[1] == process)));
        ends.filter(|(id, end)| self.wires.all[id].has[*end]).collect()
    }

    /// Cuts all connections between two processes.
    pub(super) fn part_wires(&mut self, one: usize, other: usize) {
        let is_between = |wire: &Wire| wire.ends == [one, other] || wire.ends == [other, one];
        let wires: Vec<u64> =
            self.wires.all.iter().filter(|(_, wire)| is_between(wire)).map(|(id, _)| *id).collect();
        wires.into_iter().for_each(|id| self.cut(id));
    }

    /// Cuts a random connection.
    pub(super) fn cut_any(&mut self) {
        let up: Vec<u64> = self.wires.all.iter().filter(|(_, wire)| wire.is_up).map(|(id, _)| *id).collect();
        if !up.is_empty() {
            let id = up[self.dice.below(up.len() as u64) as usize];
            self.cut(id);
        }
    }
}

fn owned(frame: Frame<Arc<[u8]>>) -> Frame<Vec<u8>> {
    match frame {
        Frame::Immediate { token, number, counter, generation } => {
            Frame::Immediate { token, number, counter, generation }
        }
        Frame::Message { token, number, bytes } => Frame::Message { token, number, bytes: bytes.to_vec() },
        Frame::Outcomes(outcomes) => Frame::Outcomes(outcomes),
        Frame::NoRoom { token } => Frame::NoRoom { token },
        Frame::Words { code, kind, bytes } => Frame::Words { code, kind, bytes },
        Frame::Fence { code, connection } => Frame::Fence { code, connection },
        Frame::Fenced { code, connection, is_over } => Frame::Fenced { code, connection, is_over },
        Frame::Regions(bytes) => Frame::Regions(bytes),
    }
}
