//! Everything outside [`crate::transfers::Transfers`]: the control connections, the carriers, and this process's regions and
//! sessions.
//!
//! [`Outside`] is the [`Provider`] that posts to carriers and reports their events. Carriers cannot call it: they leave
//! letters, fences and events in an [`Outbox`], and [`Outside::settle`] works these off until nothing is left.

use std::net::SocketAddr;
use std::time::Duration;

use crate::carrier::{Carrier, CarrierPost, Context, NewFence, NewPath, Outbox, Owner, PostedRun};
use crate::carriers::Named;
use crate::clock::Clock;
use crate::control::{ChannelId, Control, ControlEvent};
use crate::fences::{Broken, Fences, Whom};
use crate::frames::Frame;
use crate::identity::Identity;
use crate::lease::Lease;
use crate::numbered::Numbered;
use crate::peers::{Peer, Peers};
use crate::process::{BothSides, Process};
use crate::provider::{Event, NotNow, Provider};
use crate::served::SessionsServed;
use crate::transfers::{Between, Completion, Op, PathId, PeerId, Post, Route, Ticket, Token, Work};

/// Reasons that the log names per peer. Each is logged once.
const REFUSALS_LOGGED_MAX: usize = 16;

#[derive(Debug)]
pub(crate) struct Outside<C> {
    pub(super) clock: Clock,
    pub(crate) process: Process,
    pub(crate) control: C,
    pub(super) carriers: Vec<Box<dyn Carrier>>,
    /// Names of the carriers, by index.
    names: Vec<&'static str>,
    pub(super) peers: Peers,
    /// Removed peers with posts in flight: their fences still have to be asked for.
    pub(super) leaving: Numbered<PeerId, Whom>,
    pub(super) sessions: SessionsServed,
    /// Control connections that this process made and that are up.
    pub(super) channels: Numbered<ChannelId, PeerId>,
    pub(super) channel_of: Numbered<PeerId, ChannelId>,
    pub(super) paths: Numbered<PathId, PathAt>,
    /// Removed paths that still have posts in flight.
    removed_paths: Vec<PathId>,
    /// Immediates and messages in flight, with the connection that each was sent over.
    pub(super) posted: Numbered<Token, ChannelId>,
    pub(super) fences: Fences,
    pub(super) outbox: Outbox,
}

#[derive(Debug)]
pub(super) struct PathAt {
    pub(super) peer: PeerId,
    /// Index of its carrier. None: the control path, which carries immediates and messages.
    pub(super) carrier: Option<u8>,
    /// The name under which the carrier connects it.
    name: u64,
    pub(super) address: Option<SocketAddr>,
    /// Why it is not up now, or was not the last time.
    pub(super) trouble: Option<String>,
}

impl<C: Control> Outside<C> {
    pub(crate) fn new(process: Process, control: C, named: Vec<Named>) -> Outside<C> {
        let (names, carriers) = named.into_iter().unzip();
        Outside {
            clock: Clock::begin(),
            process,
            control,
            carriers,
            names,
            peers: Peers::default(),
            leaving: Numbered::default(),
            sessions: SessionsServed::default(),
            channels: Numbered::default(),
            channel_of: Numbered::default(),
            paths: Numbered::default(),
            removed_paths: Vec::new(),
            posted: Numbered::default(),
            fences: Fences::default(),
            outbox: Outbox::default(),
        }
    }

    /// The time at which the lock was taken, or was read last since.
    pub(crate) fn now(&self) -> Duration {
        self.clock.now()
    }

    /// Calls a carrier with its context.
    pub(super) fn with<T>(
        &mut self,
        index: u8,
        call: impl FnOnce(&mut dyn Carrier, &mut Context<'_>) -> T,
    ) -> Option<T> {
        self.with_lease(index, None, call)
    }

    pub(super) fn with_lease<T>(
        &mut self,
        index: u8,
        lease: Option<Lease>,
        call: impl FnOnce(&mut dyn Carrier, &mut Context<'_>) -> T,
    ) -> Option<T> {
        let now = self.now();
        let carrier = self.carriers.get_mut(usize::from(index))?;
        let mut context = Context {
            now,
            place: index,
            code: carrier.code(),
            process: &mut self.process,
            peers: &self.peers,
            leaving: &self.leaving,
            sessions: &self.sessions,
            outbox: &mut self.outbox,
            lease,
        };
        Some(call(&mut **carrier, &mut context))
    }

    pub(super) fn each(&mut self, mut call: impl FnMut(&mut dyn Carrier, &mut Context<'_>)) {
        for index in 0..self.carriers.len() as u8 {
            self.with(index, |carrier, cx| call(carrier, cx));
        }
    }

    /// The index of the carrier with this code.
    pub(super) fn index_of(&self, code: u8) -> Option<u8> {
        (0..).zip(&self.carriers).find(|(_, carrier)| carrier.code() == code).map(|(index, _)| index)
    }

    /// The name of the carrier at this index.
    pub(crate) fn name_of(&self, index: u8) -> &'static str {
        self.names.get(usize::from(index)).copied().unwrap_or("?")
    }

    pub(super) fn add_peer(&mut self, peer: PeerId, known: Peer) {
        let at = PathAt { peer, carrier: None, name: 0, address: None, trouble: None };
        self.paths.insert(known.control, at);
        self.peers.insert(peer, known);
    }

    pub(crate) fn peers(&self) -> Vec<PeerId> {
        self.peers.keys().copied().collect()
    }

    pub(crate) fn peer(&self, peer: PeerId) -> Option<&Peer> {
        self.peers.get(&peer)
    }

    pub(crate) fn peer_mut(&mut self, peer: PeerId) -> Option<&mut Peer> {
        self.peers.get_mut(&peer)
    }

    pub(crate) fn both_sides(&self, peer: PeerId) -> Option<BothSides> {
        let theirs = self.peers.get(&peer)?.shapes();
        Some(BothSides { own: self.process.regions.shapes(), theirs })
    }

    /// Sends all connected peers a region that was registered or unregistered.
    pub(crate) fn announce_region(&mut self, number: u32) {
        let Some(news) = self.process.regions.news_of(number) else { return };
        for bytes in crate::tcp::encode_regions(&[news]) {
            for channel in self.sessions.keys() {
                self.control.send(*channel, Frame::Regions(bytes.clone()));
            }
        }
        self.peers().into_iter().for_each(|peer| self.notify_regions_changed(peer));
    }

    /// Sends a window that was opened or closed to its reader, if that is connected.
    pub(crate) fn announce_window(&mut self, number: u32, to: Identity) {
        let news = self.process.regions.news_of_window(number);
        for bytes in crate::tcp::encode_regions(&news) {
            for (channel, _) in self.sessions.iter().filter(|(_, served)| served.from == to) {
                self.control.send(*channel, Frame::Regions(bytes.clone()));
            }
        }
    }

    /// Tells the carriers that this process's or the peer's regions have changed.
    pub(crate) fn notify_regions_changed(&mut self, peer: PeerId) {
        self.each(|carrier, cx| carrier.regions_changed(cx, peer));
    }

    /// Takes the events of control connections, and works off the outbox. Whether there was anything.
    pub(super) fn settle(&mut self) -> bool {
        let mut any = false;
        loop {
            let mut more = false;
            while let Some(event) = self.control.next_event() {
                more = true;
                self.handle(event);
            }
            if more {
                self.each(|carrier, cx| carrier.answer(cx));
            }
            while let Some((to, frame)) = self.outbox.letters.pop_front() {
                more = true;
                self.deliver(to, frame);
            }
            for (path, why) in std::mem::take(&mut self.outbox.troubles) {
                if let Some(at) = self.paths.get_mut(&path) {
                    at.trouble = Some(why);
                }
            }
            for (peer, code, why) in std::mem::take(&mut self.outbox.refusals) {
                self.note_refusal(peer, code, why);
            }
            for fence in std::mem::take(&mut self.outbox.fences) {
                more = true;
                self.begin_fence(fence);
            }
            for broken in std::mem::take(&mut self.outbox.fenced) {
                more = true;
                self.fence_answered(broken, true);
            }
            more |= self.serve_fences();
            any |= more;
            if !more {
                return any;
            }
        }
    }

    fn note_refusal(&mut self, peer: PeerId, code: u8, why: String) {
        let name = self.index_of(code).map_or("?", |index| self.name_of(index));
        let Some(known) = self.peers.get_mut(&peer) else { return };
        known.refusals.retain(|(of, _)| *of != code);
        known.refusals.push((code, why.clone()));
        // A peer that reconnects refuses for the same reason each time.
        let is_logged = known.logged_refusals.iter().any(|said| *said == (code, why.clone()));
        if !is_logged && known.logged_refusals.len() < REFUSALS_LOGGED_MAX {
            // Log: this way to move bytes does not work with this peer; another way is used. Do: if the slower
            // way matters, mend what the field why names.
            tracing::info!(once = true, peer = known.name(), carrier = name, %why, "carrier cannot reach peer");
            known.logged_refusals.push((code, why));
        }
    }

    fn begin_fence(&mut self, fence: NewFence) {
        let NewFence { code, connection, peer, whom, tokens, lease } = fence;
        // Read after the connection was closed: until then its bytes went out, and this thread may have been stopped in
        // between.
        let now = self.clock.read();
        self.fences.add(now, (code, connection), peer, whom, tokens, lease);
    }

    /// Ends fences whose time is over, and asks for those that are due. Whether there was anything.
    fn serve_fences(&mut self) -> bool {
        let now = self.now();
        if self.fences.next_tick().is_none_or(|at| at > now) {
            return false;
        }
        for (broken, tokens) in self.fences.take_over(now) {
            self.end_fence(broken, tokens);
        }
        for question in self.fences.take_due(now) {
            let (code, connection) = question.broken;
            match (self.channel_of.get(&question.peer), self.fences.whom(question.broken)) {
                (Some(channel), _) if !question.is_insisted => {
                    self.control.send(*channel, Frame::Fence { code, connection })
                }
                (_, Some(whom)) => {
                    let whom = whom.clone();
                    self.control.ask_fence(now, question, &whom);
                }
                (_, None) => {}
            }
        }
        true
    }

    pub(super) fn end_fence(&mut self, broken: Broken, tokens: Vec<Token>) {
        let (code, connection) = broken;
        let index = self.index_of(code);
        index.map(|index| self.with(index, |carrier, cx| carrier.fence_over(cx, connection, tokens)));
    }

    /// A peer has confirmed that it places nothing more of a broken connection, or could not confirm it yet.
    pub(super) fn fence_answered(&mut self, broken: Broken, is_over: bool) {
        if is_over {
            let tokens = self.fences.confirmed(broken);
            return self.end_fence(broken, tokens);
        }
        let now = self.now();
        self.fences.failed(now, broken);
        let (code, connection) = broken;
        let index = self.index_of(code);
        index.map(|index| self.with(index, |carrier, cx| carrier.probe_gone(cx, connection)));
    }

    /// A peer asks that nothing more is placed of a broken connection. Whether that is so already.
    pub(super) fn fence(&mut self, from: Identity, (code, connection): Broken) -> bool {
        let Some(index) = self.index_of(code) else { return true };
        self.with(index, |carrier, cx| carrier.fence(cx, Owner(from), connection)).unwrap_or(true)
    }

    fn handle(&mut self, event: ControlEvent) {
        match event {
            ControlEvent::Up { path, number, channel, from } => {
                self.control_is_up(path, number, channel, from)
            }
            ControlEvent::Broke { path, number, channel } => self.control_broke(path, number, channel),
            ControlEvent::Session { channel, served } => {
                self.sessions.insert(channel, served);
                let mut frames = crate::tcp::encode_regions(&self.process.regions.news(served.from));
                // An empty frame marks the end of the list.
                frames.push(Vec::new());
                frames.into_iter().for_each(|bytes| self.control.send(channel, Frame::Regions(bytes)));
            }
            ControlEvent::SessionEnded { channel } => {
                self.sessions.remove(&channel);
                self.each(|carrier, cx| carrier.session_ended(cx, crate::carrier::SessionId(channel)));
            }
            ControlEvent::Heard { channel, frame, lease } => match self.channels.get(&channel).copied() {
                Some(peer) => self.receive_from_peer(channel, peer, frame),
                None => self.receive_from_session(channel, frame, lease),
            },
            ControlEvent::Greeted { code, greeted } => {
                let index = self.index_of(code);
                index.map(|index| self.with(index, |carrier, cx| carrier.greeted(cx, greeted)));
            }
            ControlEvent::FenceAsked { channel, from, broken } => {
                let (is_over, now) = (self.fence(from, broken), self.now());
                self.control.answer_fence(now, channel, is_over);
            }
            ControlEvent::FenceAnswered { broken, is_over } => self.fence_answered(broken, is_over),
        }
    }

    fn control_is_up(&mut self, path: PathId, number: u32, channel: ChannelId, from: Identity) {
        let Some(peer) = self.paths.get(&path).map(|at| at.peer) else { return };
        let Some(known) = self.peers.get_mut(&peer) else { return };
        known.whom.identity = Some(from);
        known.refusals.clear();
        self.channels.insert(channel, peer);
        self.channel_of.insert(peer, channel);
        self.outbox.events.push_back(Event::Up { path, connection: number });
        self.each(|carrier, cx| carrier.control_up(cx, peer));
    }

    fn control_broke(&mut self, path: PathId, number: u32, channel: Option<ChannelId>) {
        if let Some(channel) = channel
            && let Some(peer) = self.channels.remove(&channel)
        {
            self.channel_of.remove(&peer);
            let of_channel = self.posted.iter().filter(|(_, of)| **of == channel).map(|(token, _)| *token);
            let mut tokens: Vec<Token> = of_channel.collect();
            tokens.sort_unstable();
            for token in tokens {
                self.posted.remove(&token);
                self.outbox.events.push_back(Event::Completed(token, Completion::Unknown));
            }
            if let Some(known) = self.peers.get_mut(&peer) {
                known.forget_keys();
            }
            let now = self.now();
            self.fences.ask_again(now, peer);
            self.each(|carrier, cx| carrier.control_lost(cx, peer));
        }
        self.outbox.events.push_back(Event::Broke { path, connection: number });
    }

    /// Sends a carrier's letter.
    fn deliver(&mut self, to: crate::carrier::Party, frame: Frame<std::sync::Arc<[u8]>>) {
        let channel = match to {
            crate::carrier::Party::Peer(peer) => self.channel_of.get(&peer).copied(),
            crate::carrier::Party::Session(session) => Some(session.0),
        };
        // Lost if the other end is gone; the carrier hears of that end by itself.
        channel.into_iter().for_each(|channel| self.control.send(channel, frame.clone()));
    }

    fn post_to_carrier(
        &mut self,
        index: u8,
        post: &Post,
        (op, between): (Op, Between),
        runs: &[crate::runs::Run],
    ) -> Result<(), NotNow> {
        let Post { path, token, ticket, .. } = *post;
        let mut posted = Vec::with_capacity(runs.len());
        let mut peer = None;
        for run in runs {
            let local = self.process.regions.own(run.local.region, run.local.offset, run.len);
            let theirs = self.process.used_generation(ticket, run.remote.region);
            let (Some(local), Some((whose, generation))) = (local, theirs) else {
                self.outbox.events.push_back(Event::Completed(token, Completion::Refused));
                return Ok(());
            };
            peer = Some(whose);
            let (region, offset, len) = (run.remote.region, run.remote.offset, run.len);
            posted.push(PostedRun { local, region, generation, offset, len });
        }
        let Some(peer) = peer else { return Err(NotNow) };
        crate::audit::posts(posted.len());
        let post = CarrierPost { path, peer, token, ticket, op, between, runs: &posted };
        self.with(index, |carrier, cx| carrier.post(cx, &post)).unwrap_or(Err(NotNow))
    }

    /// Whether removed peers or paths wait to be forgotten.
    pub(super) fn has_removed(&self) -> bool {
        !self.leaving.is_empty() || !self.removed_paths.is_empty()
    }

    /// Forgets removed paths that `is_known` no longer knows.
    pub(super) fn forget_paths(&mut self, is_known: impl Fn(PathId) -> bool) {
        let paths = &mut self.paths;
        self.removed_paths.retain(|path| {
            let is_known = is_known(*path);
            if !is_known {
                paths.remove(path);
            }
            is_known
        });
    }

    fn new_path(&mut self, label: u64) -> Option<NewPath> {
        let index = self.outbox.new_paths.iter().position(|new| new.label == label)?;
        Some(self.outbox.new_paths.swap_remove(index))
    }
}

impl<C: Control> Provider for Outside<C> {
    fn path_added(&mut self, path: Option<PathId>, label: u64) {
        let (Some(NewPath { peer, place: index, name, address, .. }), Some(path)) =
            (self.new_path(label), path)
        else {
            return;
        };
        self.paths.insert(path, PathAt { peer, carrier: Some(index), name, address, trouble: None });
    }

    fn connect(&mut self, now: Duration, path: PathId, connection: u32) {
        let Some(PathAt { peer, carrier, name, .. }) = self.paths.get(&path) else { return };
        let (peer, carrier, name) = (*peer, *carrier, *name);
        match (carrier, self.peers.get(&peer)) {
            (Some(index), _) => {
                self.with(index, |carrier, cx| carrier.connect(cx, path, connection, peer, name));
            }
            (None, Some(known)) => {
                let whom = known.whom.clone();
                self.control.connect(now, path, connection, &whom);
            }
            (None, None) => {}
        }
    }

    fn close(&mut self, now: Duration, path: PathId, connection: u32) {
        match self.paths.get(&path).map(|at| at.carrier) {
            Some(Some(index)) => {
                self.with(index, |carrier, cx| carrier.close(cx, path, connection));
            }
            Some(None) => self.control.close(now, path, connection),
            None => {}
        }
    }

    fn post(&mut self, _: Duration, post: Post) -> Result<(), NotNow> {
        let at = self.paths.get(&post.path).ok_or(NotNow)?;
        let token = post.token;
        let frame = match (&post.work, at.carrier) {
            (Work::Move { op, between, runs }, Some(index)) => {
                return self.post_to_carrier(index, &post, (*op, *between), runs);
            }
            (Work::Immediate { number, counter, generation }, None) => {
                let (number, counter, generation) = (*number, *counter, *generation);
                Frame::Immediate { token: token.number(), number, counter, generation }
            }
            (Work::Message { number, bytes }, None) => {
                Frame::Message { token: token.number(), number: *number, bytes: bytes.clone() }
            }
            _ => return Err(NotNow),
        };
        let channel = *self.channel_of.get(&at.peer).ok_or(NotNow)?;
        self.posted.insert(token, channel);
        self.control.send(channel, frame);
        Ok(())
    }

    fn placed(&mut self, ticket: Ticket, path: PathId, bytes: u64) {
        if let Some(carrier) = self.paths.get(&path).and_then(|at| at.carrier) {
            self.process.note_carried(ticket, carrier, bytes);
        }
    }

    fn lost(&mut self, _: Duration, peer: PeerId, route: Route) {
        if route == Route::Words {
            let name = self.peers.get(&peer).map_or_else(String::new, Peer::name);
            // Log: no connection to this peer has worked for seconds; transfers with it fail until one does, and
            // decode engines compute. Do: look at its log and the network.
            tracing::warn!(peer = name, "peer lost: no path reaches it any more");
        }
    }

    fn next_event(&mut self) -> Option<Event> {
        let event = self.outbox.events.pop_front();
        if let Some(Event::PathRemoved(path)) = event {
            self.removed_paths.push(path);
        }
        event
    }
}
