//! The interface between [`Transfers`], which decides, and a [`Provider`], which has the connections: [`drive`] runs the two
//! against each other.
//!
//! ```text
//!               Transfers  --- connect, close, post --->  Provider
//!               (no I/O)   <--- Event ------------------  (control connections and carriers; in tests a network)
//! ```
//! Each post and each connection ends with exactly one event that counts. Repeated and late events are ignored.

use std::time::Duration;

use crate::transfers::{
    Action, Completion, Failure, PathId, PathSpec, PeerId, Post, Route, Ticket, Token, Transfers,
};

/// Carries posts over connections. A provider decides nothing: [`Transfers`] chooses the path and the size of a post, what
/// is retried, and when to give up.
///
/// Beyond the calls, both agree on which paths there are, and on the memory that the positions of a [`crate::Run`] name.
pub trait Provider {
    /// Tells the id of a path that [`Event::PathAdded`] announced with this label. None: the peer has been removed.
    fn path_added(&mut self, path: Option<PathId>, label: u64);

    /// Opens connection number `connection` of a path. [`Event::Up`] or [`Event::Broke`] follows.
    fn connect(&mut self, now: Duration, path: PathId, connection: u32);

    /// Ends this connection, unless it has ended already. [`Event::Broke`] follows. For each of its posts
    /// [`Event::Completed`] follows once nothing touches its memory any more: as [`Completion::Unknown`], unless the provider
    /// knows the outcome.
    fn close(&mut self, now: Duration, path: PathId, connection: u32);

    /// Takes a post. Exactly one [`Event::Completed`] follows, however the post ends.
    ///
    /// # Errors
    /// The path takes nothing now. [`Transfers`] posts again after [`Event::Ready`] or the completion of another post on it.
    fn post(&mut self, now: Duration, post: Post) -> Result<(), NotNow>;

    /// A post of a transfer has moved these bytes over a path.
    fn placed(&mut self, ticket: Ticket, path: PathId, bytes: u64) {
        let _ = (ticket, path, bytes);
    }

    /// No path to a peer that serves the route has been up for [`crate::Options::peer_patience`]. [`Transfers`] fails the
    /// transfers that need one, and goes on to connect the peer's paths.
    fn lost(&mut self, now: Duration, peer: PeerId, route: Route);

    /// The next event, in the order in which they happened. None: there is none now.
    fn next_event(&mut self) -> Option<Event>;
}

/// A path takes no post at the moment, because its connection is gone or its queue is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotNow;

/// A report of a [`Provider`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// A path's connection is up.
    Up {
        /// The path that [`Provider::connect`] named.
        path: PathId,
        /// The number that [`Provider::connect`] gave it.
        connection: u32,
    },
    /// The provider has found one more path to a peer. [`Provider::path_added`] answers with its id, then
    /// [`Provider::connect`] follows.
    PathAdded {
        /// The peer that it leads to.
        peer: PeerId,
        /// The routes that it serves, its class and its limits.
        spec: PathSpec,
        /// Names the path in [`Provider::path_added`].
        label: u64,
    },
    /// A path is gone for good.
    PathRemoved(PathId),
    /// A connection broke, or could not be made. Its posts still complete. A repeated or late report is ignored.
    Broke {
        /// The path that [`Provider::connect`] named.
        path: PathId,
        /// The number that [`Provider::connect`] gave it.
        connection: u32,
    },
    /// A path that answered [`NotNow`] takes posts again.
    Ready(PathId),
    /// A post ended. A repeated report is ignored.
    Completed(Token, Completion),
}

/// Reports all events to `transfers`, then the time, and lets the provider carry out what they ask for, until there is nothing
/// to do. It stops early, and sets `runs` to 0, when one more post might exceed the budget of `runs`. Calls `over` for each
/// transfer that ends. True if there was anything to do.
pub fn drive<P: Provider>(
    transfers: &mut Transfers,
    provider: &mut P,
    now: Duration,
    runs: &mut usize,
    mut over: impl FnMut(&mut P, Ticket, Result<(), Failure>),
) -> bool {
    let mut any = take_events(transfers, provider, now);
    // After the events, so that a late caller does not time out a peer whose answer has arrived already.
    transfers.tick(now);
    loop {
        let mut more = take_events(transfers, provider, now);
        while let Some(action) = transfers.next_action() {
            more = true;
            match action {
                Action::Over(ticket, outcome) => over(provider, ticket, outcome),
                Action::Close(path, connection) => provider.close(now, path, connection),
                Action::Connect(path, connection) => provider.connect(now, path, connection),
                Action::Lost(peer, route) => provider.lost(now, peer, route),
            }
        }
        while *runs > 0
            && let Some(post) = transfers.next_post(now)
        {
            more = true;
            *runs = runs.saturating_sub(post.work.runs());
            if *runs < transfers.post_runs() {
                *runs = 0;
            }
            let token = post.token;
            if provider.post(now, post) == Err(NotNow) {
                transfers.hand_back(now, token);
            }
        }
        if !more || *runs == 0 {
            return any || more;
        }
        any = true;
    }
}

/// Reports all events to `transfers`. True if there were any.
fn take_events(transfers: &mut Transfers, provider: &mut impl Provider, now: Duration) -> bool {
    let mut any = false;
    while let Some(event) = provider.next_event() {
        any = true;
        take_event(transfers, provider, now, event);
    }
    any
}

fn take_event(transfers: &mut Transfers, provider: &mut impl Provider, now: Duration, event: Event) {
    match event {
        Event::Up { path, connection } => {
            if !transfers.path_up(now, path, connection) {
                provider.close(now, path, connection);
            }
        }
        Event::PathAdded { peer, spec, label } => {
            provider.path_added(transfers.add_path(now, peer, spec), label);
        }
        Event::PathRemoved(path) => transfers.remove_path(now, path),
        Event::Broke { path, connection } => transfers.path_broke(now, path, connection),
        Event::Ready(path) => transfers.path_ready(path),
        Event::Completed(token, completion) => {
            let moved = transfers.moves(token).filter(|_| completion == Completion::Placed);
            if let Some((ticket, path, bytes)) = moved {
                provider.placed(ticket, path, bytes);
            }
            transfers.complete(now, token, completion);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]
mod tests {
    use std::collections::VecDeque;

    use super::*;
    use crate::transfers::{Options, Reach};

    #[derive(Default)]
    struct FakeProvider {
        events: VecDeque<Event>,
        lost: Vec<Route>,
        connections: Vec<(PathId, u32)>,
    }

    impl Provider for FakeProvider {
        fn path_added(&mut self, _: Option<PathId>, _: u64) {}

        fn connect(&mut self, _: Duration, path: PathId, connection: u32) {
            self.connections.push((path, connection));
        }

        fn close(&mut self, _: Duration, _: PathId, _: u32) {}

        fn post(&mut self, _: Duration, _: Post) -> Result<(), NotNow> {
            Err(NotNow)
        }

        fn lost(&mut self, _: Duration, _: PeerId, route: Route) {
            self.lost.push(route);
        }

        fn next_event(&mut self) -> Option<Event> {
            self.events.pop_front()
        }
    }

    /// The engine's thread did not run for long: a peer's connection is up, the event is unread, and the peer's time has passed.
    /// The peer counted as lost, because the timers fired before the events were read.
    #[test]
    fn a_peer_whose_connection_is_there_is_not_lost_because_the_news_was_read_late() {
        let options = Options::default();
        let late = options.peer_patience * 2;
        for is_there in [true, false] {
            let (mut transfers, mut provider) = (Transfers::new(options.clone()), FakeProvider::default());
            let peer = transfers.add_peer(Duration::ZERO);
            transfers.add_path(Duration::ZERO, peer, PathSpec::new(Reach::ALL, 0)).unwrap();
            drive(&mut transfers, &mut provider, Duration::ZERO, &mut 100, |_, _, _| {});
            let (path, connection) = provider.connections[0];
            if is_there {
                provider.events.push_back(Event::Up { path, connection });
            }
            drive(&mut transfers, &mut provider, late, &mut 100, |_, _, _| {});
            assert_eq!(provider.lost.is_empty(), is_there, "{:?}", provider.lost);
        }
    }
}
