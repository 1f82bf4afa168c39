//! A proxy before an engine: breaks its connections, stops them, or slows them down.

use std::collections::VecDeque;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use kvlane_fabric::{Address, Descriptor};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use crate::pair::{Pair, reset};
use crate::support::PATIENCE;

/// More bytes than all that is no transfer's.
const LONG: usize = 16 << 10;

/// Carries connections to an engine, and does to them what networks do. One thread, ended when this goes.
pub(crate) struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    /// Bytes went through, or connections are gone.
    changed: Condvar,
    /// The state is another one.
    wake: OwnedFd,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct State {
    new: New,
    /// Connections with a lower number move no bytes on; what has come from either side stays under way.
    held_below: usize,
    /// How often all connections are to be reset.
    cuts: usize,
    /// So many bytes go through in all, and then no more.
    pub(crate) limit: Option<u64>,
    /// Each portion takes so long, and has so many bytes at the most.
    pub(crate) delay: Duration,
    pub(crate) portion: Option<usize>,
    /// How many bits are to be changed, one each time that so many more bytes went through, and how many were.
    damages: usize,
    damage_every: u64,
    damaged: usize,
    /// Only of what the connecting sides send, and of nothing short.
    damages_bytes_only: bool,
    stop: bool,
    /// So many connections were accepted.
    accepted: usize,
    /// The numbers of those that are there.
    pub(crate) there: Vec<usize>,
    pub(crate) forwarded: u64,
    /// Of what the connecting sides sent, what they do not have to send again and nobody has got.
    kept: usize,
    cuts_made: usize,
}

/// What becomes of those who connect.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum New {
    #[default]
    Carried,
    /// Nobody listens any more, for ever.
    Refused,
    /// Somebody listens, and resets them at once.
    Reset,
}

impl Proxy {
    /// To the first address.
    pub(crate) fn to(descriptor: &Descriptor) -> Proxy {
        let target = String::from_utf8(descriptor.addresses[0].bytes.clone()).unwrap().parse().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let state = Mutex::new(State::default());
        let shared = Arc::new(Shared { state, changed: Condvar::new(), wake });
        let thread = std::thread::spawn({
            let shared = Arc::clone(&shared);
            move || shared.carry(listener, target)
        });
        Proxy { address, shared, thread: Some(thread) }
    }

    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let answer = change(&mut self.shared.state.lock().unwrap());
        rustix::io::write(&self.shared.wake, &1u64.to_ne_bytes()).unwrap();
        answer
    }

    pub(crate) fn wait(&self, what: &str, mut is_so: impl FnMut(&State) -> bool) {
        let state = self.shared.state.lock().unwrap();
        let waited = self.shared.changed.wait_timeout_while(state, PATIENCE, |state| !is_so(state)).unwrap();
        let (is_late, state) = (waited.1.timed_out(), waited.0.clone());
        drop(waited);
        assert!(!is_late, "{what}: {state:?}");
    }

    /// Resets all connections, once.
    pub(crate) fn cut(&self) {
        let cuts = self.change(|state| {
            state.cuts += 1;
            state.cuts
        });
        self.wait("connections are cut", |state| state.cuts_made >= cuts);
    }

    /// Changes so many bits, one each time that so many more bytes went through.
    pub(crate) fn damage(&self, count: usize, every: u64) {
        self.change(|state| (state.damages, state.damage_every) = (count, every));
    }

    /// Changes one bit among many bytes that a connecting side will send.
    pub(crate) fn damage_bytes(&self) {
        self.change(|state| (state.damages, state.damages_bytes_only) = (state.damages + 1, true));
    }

    pub(crate) fn wait_until_damaged(&self) {
        self.wait("bytes are changed", |state| state.damaged >= state.damages);
    }

    /// Connections from now on.
    pub(crate) fn take_new(&self, new: New) {
        self.change(|state| state.new = new);
    }

    /// The connections that are there stop; those to come do not.
    pub(crate) fn hold(&self) {
        self.change(|state| state.held_below = state.accepted);
    }

    /// All connections stop, those to come too.
    pub(crate) fn hold_all(&self) {
        self.change(|state| state.held_below = usize::MAX);
    }

    pub(crate) fn release(&self) {
        self.change(|state| state.held_below = 0);
    }

    /// Waits until the first connection for bytes is gone: its ends have taken all that was under way. The one before it is for
    /// what is said, and may stay.
    pub(crate) fn wait_until_the_first_for_bytes_is_gone(&self) {
        self.wait("the first connection for bytes goes", |state| !state.there.contains(&1));
    }

    /// Waits until so many bytes are under way.
    pub(crate) fn wait_until_it_keeps(&self, bytes: usize) {
        self.wait("bytes are under way", |state| state.kept >= bytes);
    }

    /// Waits until so many bytes went through in all.
    pub(crate) fn wait_for(&self, bytes: u64) {
        self.wait("bytes go through", |state| state.forwarded >= bytes);
    }

    /// Waits until so many more bytes went through.
    pub(crate) fn wait_for_more(&self, bytes: u64) {
        let before = self.change(|state| state.forwarded);
        self.wait_for(before + bytes);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.change(|state| state.stop = true);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn carry(&self, listener: TcpListener, target: SocketAddr) {
        let mut listener = Some(listener);
        let mut pairs: Vec<Pair> = Vec::new();
        let mut accepted = 0;
        let mut forwarded = 0;
        let mut damaged = 0;
        loop {
            let state = {
                let mut state = self.state.lock().unwrap();
                if state.cuts_made < state.cuts {
                    pairs.drain(..).for_each(Pair::reset);
                    state.cuts_made = state.cuts;
                }
                (state.accepted, state.forwarded, state.damaged) = (accepted, forwarded, damaged);
                state.kept = pairs.iter().map(|pair| pair.came[0].len()).sum();
                state.there = pairs.iter().map(|pair| pair.number).collect();
                self.changed.notify_all();
                state.clone()
            };
            if state.stop {
                return;
            }
            if state.new == New::Refused {
                listener = None;
            }
            let is_at_limit = state.limit.is_some_and(|limit| forwarded >= limit);
            let is_held = |pair: &Pair| is_at_limit || pair.number < state.held_below;
            self.wait_for_something(listener.as_ref(), &pairs, is_held);
            while let Some(Ok((socket, _))) = listener.as_ref().map(TcpListener::accept) {
                if state.new == New::Reset {
                    reset(socket);
                    continue;
                }
                // The engine is gone: so is the connection to it.
                if let Ok(other) = TcpStream::connect(target) {
                    pairs.push(Pair::new(accepted, [socket, other]));
                    accepted += 1;
                }
            }
            for pair in &mut pairs {
                let damage = |end: usize, came: &mut VecDeque<u8>| {
                    let only_long = state.damages_bytes_only;
                    let may_be = !only_long || end == 0 && came.len() > LONG;
                    let is_due = forwarded >= damaged as u64 * state.damage_every;
                    if damaged < state.damages && may_be && is_due {
                        let at = forwarded as usize % came.len();
                        came[at] ^= 1 << (forwarded % 8);
                        damaged += 1;
                    }
                };
                let left = state.limit.map_or(u64::MAX, |limit| limit.saturating_sub(forwarded));
                forwarded += pair.carry(is_held(pair), state.delay, state.portion, left, damage);
            }
            pairs.retain(|pair| !pair.is_over());
        }
    }

    fn wait_for_something(
        &self,
        listener: Option<&TcpListener>,
        pairs: &[Pair],
        is_held: impl Fn(&Pair) -> bool,
    ) {
        let mut events = vec![PollFd::new(&self.wake, PollFlags::IN)];
        events.extend(listener.map(|listener| PollFd::new(listener, PollFlags::IN)));
        for pair in pairs {
            for (end, wanted) in pair.ends.iter().zip(pair.wanted(is_held(pair))) {
                // Without a wish it would be told of an end that is known.
                if !wanted.is_empty() {
                    events.push(PollFd::new(end, wanted));
                }
            }
        }
        // An interrupted call brought nothing.
        let _ = poll(&mut events, None);
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.wake, &mut count);
    }
}

/// The same process, by other addresses.
pub(crate) fn through(descriptor: &Descriptor, proxies: &[&Proxy]) -> Descriptor {
    let address = |proxy: &&Proxy| Address { kind: 1, bytes: proxy.address.to_string().into_bytes() };
    Descriptor { addresses: proxies.iter().map(address).collect(), ..descriptor.clone() }
}

pub(crate) fn one(descriptor: &Descriptor) -> Vec<Proxy> {
    vec![Proxy::to(descriptor)]
}

pub(crate) fn two(descriptor: &Descriptor) -> Vec<Proxy> {
    vec![Proxy::to(descriptor), Proxy::to(descriptor)]
}
