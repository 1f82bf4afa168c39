//! The seam between what is decided and what carries it out: [`Transfers`] decides, a [`Provider`] has the connections.
//!
//! ```text
//!               Transfers  --- connect, close, post --->  Provider
//!               (no I/O)   <--- Event ------------------  (control connections and carriers; in tests a network)
//! ```

use std::time::Duration;

use crate::transfers::{
    Action, Completion, Failure, PathId, PathSpec, PeerId, Post, Route, Ticket, Token, Transfers,
};

/// Something that carries posts over connections. It decides nothing: which path, how much at once, what is tried again and
/// when something is given up is [`Transfers`]' business.
///
/// What the two have to agree on beyond the calls: which paths there are, and which memory the places of a
/// [`crate::Run`] name.
pub trait Provider {
    /// A path that [`Event::Comes`] has told of has this number. None: there is no such peer any more.
    fn came(&mut self, path: Option<PathId>, label: u64);

    /// Opens a path's connection of that number. [`Event::Up`] or [`Event::Broke`] follows.
    fn connect(&mut self, now: Duration, path: PathId, connection: u32);

    /// Ends this connection, if that has not happened yet. [`Event::Broke`] follows, and for everything posted on it
    /// [`Event::Completed`], as [`Completion::Unknown`] unless it is known better, once nothing touches its memory any more.
    fn close(&mut self, now: Duration, path: PathId, connection: u32);

    /// Takes a post; one [`Event::Completed`] follows, however it ends.
    ///
    /// # Errors
    /// The path takes nothing now. [`Event::Ready`], or the completion of another post on it, says when it does.
    fn post(&mut self, now: Duration, post: Post) -> Result<(), NotNow>;

    /// No path to a peer that serves the route has been up for [`crate::Options::peer_patience`]: transfers that need one are
    /// failed. Its paths are tried on.
    fn lost(&mut self, now: Duration, peer: PeerId, route: Route);

    /// What happened next, in the order in which it did; None if nothing has.
    fn next_event(&mut self) -> Option<Event>;
}

/// A path takes no post at the moment: its connection went, or its queue is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotNow;

/// What a [`Provider`] tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// A path's connection of that number is there.
    Up {
        /// Whose.
        path: PathId,
        /// Its number.
        connection: u32,
    },
    /// There is one more path to a peer. [`Provider::came`] tells by the label which it is, then it is connected.
    Comes {
        /// Whom it leads to.
        peer: PeerId,
        /// What it can.
        spec: PathSpec,
        /// What the provider knows it by until then.
        label: u64,
    },
    /// A path goes for good.
    Goes(PathId),
    /// It broke, or could not be made. What was posted on it is still to complete. Told again, or late, it is passed over.
    Broke {
        /// Whose.
        path: PathId,
        /// Its number.
        connection: u32,
    },
    /// A path that did not take a post takes one again.
    Ready(PathId),
    /// What became of a post. Told twice it counts once.
    Completed(Token, Completion),
}

/// Does what is due: tells `transfers` what happened, then what time it is, and lets the provider carry out what they ask
/// for, until there is nothing left, or so many runs are posted that a whole post more would be too much: then `runs` is 0.
/// `over` is told of each transfer that is over. Answers whether there was anything to do.
pub fn drive<P: Provider>(
    transfers: &mut Transfers,
    provider: &mut P,
    now: Duration,
    runs: &mut usize,
    mut over: impl FnMut(&mut P, Ticket, Result<(), Failure>),
) -> bool {
    let mut any = take_events(transfers, provider, now);
    // After the news: when the caller was late, nobody is given up whose answer lies there already.
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

/// Tells `transfers` all that happened; answers whether anything did.
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
        Event::Comes { peer, spec, label } => provider.came(transfers.add_path(now, peer, spec), label),
        Event::Goes(path) => transfers.remove_path(now, path),
        Event::Broke { path, connection } => transfers.path_broke(now, path, connection),
        Event::Ready(path) => transfers.path_ready(path),
        Event::Completed(token, completion) => transfers.complete(now, token, completion),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]
mod tests {
    use std::collections::VecDeque;

    use super::*;
    use crate::transfers::{Options, Reach};

    #[derive(Default)]
    struct Told {
        events: VecDeque<Event>,
        lost: Vec<Route>,
        connections: Vec<(PathId, u32)>,
    }

    impl Provider for Told {
        fn came(&mut self, _: Option<PathId>, _: u64) {}

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

    /// The engine's thread was not run for long: a peer's connection is there, the news of it lies unread, and its time is
    /// over. It counted as lost, since the time was looked at before the news.
    #[test]
    fn a_peer_whose_connection_is_there_is_not_lost_because_the_news_was_read_late() {
        let options = Options::default();
        let late = options.peer_patience * 2;
        for is_there in [true, false] {
            let (mut transfers, mut provider) = (Transfers::new(options.clone()), Told::default());
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
