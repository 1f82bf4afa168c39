//! The link's transitions, one a test: what a stage does with an event.

use bytes::Bytes;
use kvlane_proto::{
    Address, WIRE_OF_JOURNAL,
    packed::{self, ChangeKind, pack_changes},
    v1::reply::Body as Answer,
};

use super::{up::PENDING_LOOKUPS_MAX, *};
use crate::{
    group_spec::GroupSpec,
    links::{
        connection::GOODBYE,
        ids::{Life, NotConnected},
    },
};

const RUN: BootId = [7; 16];
const OTHER_RUN: BootId = [8; 16];
const TIMEOUT: Duration = Duration::from_millis(250);
const PROCESS: ProcessId = ProcessId(1);

/// A link, its clock, and what it wanted done since the last look.
struct Play {
    link: SchedulerLink,
    now: Instant,
    actions: VecDeque<SchedulerAction>,
}

impl Play {
    fn new() -> Self {
        Self::with(false)
    }

    fn with(follows_journal: bool) -> Self {
        let now = Instant::now();
        let options = SchedulerLinkOptions {
            address: Address::Unix("/run/k.sock".into()),
            engine_id: "engine".into(),
            client: "test".into(),
            nonce: [1; 16],
            groups: vec![GroupSpec {
                namespace: [3; 16],
                name: "group".into(),
                tokens_per_block: 16,
                window_blocks: 0,
                crosses_hosts: false,
            }],
            workers: 1,
            lookup_timeout: TIMEOUT,
            follows_journal,
        };
        Self { link: SchedulerLink::new(options, now), now, actions: VecDeque::new() }
    }

    /// Connected as far as Hello.
    fn greeting() -> Self {
        let mut play = Self::new();
        play.connect(Life::Watched(PROCESS));
        play
    }

    /// As far as OpenEngine.
    fn opening() -> Self {
        let mut play = Self::greeting();
        play.answer(play.last_request(), RUN, welcome());
        play
    }

    /// As far as it goes, with all workers there.
    fn open() -> Self {
        let mut play = Self::opening();
        play.answer(play.last_request(), RUN, opened(true));
        play.actions.clear();
        play
    }

    fn feed(&mut self, event: SchedulerEvent) {
        self.link.handle(event, self.now, &mut self.actions);
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        self.feed(SchedulerEvent::Tick);
    }

    fn connection(&self) -> ConnectionId {
        ConnectionId(self.link.last_connection)
    }

    fn last_request(&self) -> u64 {
        self.link.last_request
    }

    fn connect(&mut self, life: Life) {
        self.feed(SchedulerEvent::Tick);
        let connection = self.connection();
        assert_eq!(self.actions.pop_back(), Some(SchedulerAction::Connect(connection)));
        self.feed(SchedulerEvent::Connected { connection, life });
    }

    fn answer(&mut self, id: u64, boot: BootId, body: Answer) {
        let reply = v1::Reply { id, boot_id: Bytes::copy_from_slice(&boot), body: Some(body) };
        self.feed(SchedulerEvent::Reply { connection: self.connection(), reply });
    }

    fn lose(&mut self) {
        self.feed(SchedulerEvent::Lost { connection: self.connection(), why: "it hung up".into() });
    }

    /// Answers the id that the lookup has if it is sent.
    fn look_up(&mut self, request: &str) -> u64 {
        let groups = vec![v1::LookupGroup { group: 0, hashes: Bytes::from_static(&[5; 64]) }];
        let event = SchedulerEvent::LookUp {
            request: request.into(),
            number: 3,
            again: false,
            traceparent: String::new(),
            groups,
            max_tokens: 64,
            awaited_save: None,
            tokens_per_s: 7000,
            timeout: TIMEOUT,
        };
        self.feed(event);
        self.last_request()
    }

    fn poll(&mut self, request: &str) -> Option<Hit> {
        match self.link.poll_lookup(request, self.now) {
            LookupState::Pending { until } => {
                assert!(until > self.now, "it is pending for ever");
                None
            }
            LookupState::Over(hit) => Some(hit),
        }
    }

    /// It is over, with nothing.
    fn misses(&mut self, request: &str) -> bool {
        self.poll(request).is_some_and(|hit| hit.tokens == 0)
    }

    /// Requests sent since the last look.
    fn sent(&mut self) -> Vec<Ask> {
        let sent = self.actions.drain(..).filter_map(|action| match action {
            SchedulerAction::Send { request, .. } => request.body,
            _ => None,
        });
        sent.collect()
    }

    /// Sentences told since the last look.
    fn told(&mut self) -> String {
        let told = self.actions.drain(..).filter_map(|action| match action {
            SchedulerAction::Log(notice) => Some(notice.sentence),
            _ => None,
        });
        told.collect()
    }

    fn stats(&mut self) -> SchedulerStats {
        self.link.take_stats()
    }
}

fn welcome() -> Answer {
    let version = "1".into();
    Answer::Welcome(v1::Welcome { wire: 1, version, session_id: 1, pool_bytes: 4_000_000_000 })
}

fn opened(ready: bool) -> Answer {
    Answer::EngineOpened(v1::EngineOpened { ready })
}

fn refusal(sentence: &str) -> Answer {
    Answer::Refused(v1::Refused { reason: 0, sentence: sentence.into() })
}

fn done() -> Answer {
    Answer::Done(v1::Done::default())
}

fn pending(wait_ms: u32) -> Answer {
    Answer::LookupPending(v1::LookupPending { wait_ms })
}

fn miss() -> Answer {
    Answer::LookupResult(v1::LookupResult {
        tokens: 0,
        lease: 0,
        groups: Vec::new(),
        ready: true,
        is_recorded: false,
    })
}

/// Three blocks of the four that `look_up` asks for.
fn hit(lease: u64) -> Answer {
    let pages = [10u32, 11, 12].iter().flat_map(|page| page.to_le_bytes()).collect::<Vec<_>>().into();
    let group = v1::HitGroup { group: 0, first_block: 0, pages, workers: 1, stored_blocks: 3 };
    Answer::LookupResult(v1::LookupResult {
        tokens: 48,
        lease,
        groups: vec![group],
        ready: true,
        is_recorded: false,
    })
}

#[test]
fn down_it_connects_when_due_and_greets_with_its_leases() {
    let mut play = Play::open();
    let id = play.look_up("a");
    play.answer(id, RUN, hit(5));
    play.poll("a");
    play.lose();
    play.actions.clear();
    play.feed(SchedulerEvent::Tick);
    assert!(play.actions.is_empty(), "not before its pause is over");
    assert_eq!(play.link.wake_at(), Some(play.now + Duration::from_millis(50)));
    play.now += Duration::from_millis(50);
    play.connect(Life::Unknown);
    let [Ask::Hello(hello)] = &play.sent()[..] else { panic!("no Hello") };
    assert_eq!((hello.engine_id.as_str(), &hello.live_leases[..]), ("engine", &[5][..]));
    assert!(play.link.is_opening() && !play.link.is_connected());
    assert_eq!(play.link.boot(), None, "who answers is not known yet");
}

#[test]
fn an_attempt_that_fails_is_told_once_and_made_again_after_a_pause() {
    let mut play = Play::new();
    for (turn, pause) in [50, 100, 200].into_iter().enumerate() {
        play.feed(SchedulerEvent::Tick);
        let connection = play.connection();
        assert_eq!(play.actions.pop_back(), Some(SchedulerAction::Connect(connection)));
        let why = NotConnected::Absent("no daemon".into());
        play.feed(SchedulerEvent::NotConnected { connection, why });
        assert_eq!(play.told().contains("no daemon"), turn == 0);
        assert!(!play.link.is_opening());
        play.pass(Duration::from_millis(pause - 1));
        assert!(play.actions.is_empty());
        play.now += Duration::from_millis(1);
    }
    assert_eq!(play.link.refusal(), None);
}

#[test]
fn a_stranger_is_named_as_the_refusal() {
    let mut play = Play::new();
    play.feed(SchedulerEvent::Tick);
    let why = NotConnected::Refused("a stranger listens".into());
    play.feed(SchedulerEvent::NotConnected { connection: play.connection(), why });
    assert_eq!(play.link.refusal(), Some("a stranger listens"));
    assert!(play.told().contains("a stranger listens"));
}

#[test]
fn a_connection_that_nobody_wants_any_more_is_closed() {
    let mut play = Play::new();
    play.feed(SchedulerEvent::Tick);
    let connection = play.connection();
    play.feed(SchedulerEvent::Close);
    assert!(play.link.is_over());
    play.actions.clear();
    play.feed(SchedulerEvent::Connected { connection, life: Life::Unknown });
    assert_eq!(play.actions, [SchedulerAction::Close(connection)]);
}

#[test]
fn a_welcome_opens_the_engine_and_ends_leases_of_other_runs() {
    let mut play = Play::open();
    let id = play.look_up("a");
    play.answer(id, RUN, hit(5));
    play.poll("a");
    play.feed(SchedulerEvent::CancelSaves { below: 9, until: play.now });
    assert_eq!(play.link.cancelled(play.now), Some(false));
    play.lose();
    assert_eq!(play.link.gone().collect::<Vec<_>>(), [RUN]);
    play.now += Duration::from_secs(1);
    play.connect(Life::Unknown);
    play.sent();
    play.answer(play.last_request(), OTHER_RUN, welcome());
    let [Ask::OpenEngine(open)] = &play.sent()[..] else { panic!("no OpenEngine") };
    assert_eq!((open.workers, open.groups.len(), open.cancelled_below), (1, 1, 9));
    assert_eq!(play.link.boot(), Some(OTHER_RUN));
    assert!(play.link.leases.is_empty(), "they died with that daemon");
    assert!(!play.link.is_connected());
}

#[test]
fn a_run_that_greets_again_is_not_gone() {
    let mut play = Play::open();
    play.lose();
    play.now += Duration::from_secs(1);
    play.connect(Life::Watched(ProcessId(2)));
    assert_eq!(play.link.gone().collect::<Vec<_>>(), [RUN]);
    assert!(play.link.needs(PROCESS));
    play.answer(play.last_request(), RUN, welcome());
    assert_eq!(play.link.gone().count(), 0);
    assert!(!play.link.needs(PROCESS), "its saves are asked of the new connection");
}

/// Workers used to let a pool go whose daemon the scheduler had left for a moment: it came back, promised a hit of it, and the
/// daemon died before the load reached the workers.
#[test]
fn a_run_that_was_left_is_over_when_its_process_has_ended() {
    let mut play = Play::open();
    play.lose();
    assert_eq!((play.link.gone().count(), play.link.over().count()), (1, 0));
    assert!(play.link.awaits_an_end());
    play.feed(SchedulerEvent::ProcessEnded(PROCESS));
    assert_eq!(play.link.over().collect::<Vec<_>>(), [RUN]);
    assert!(!play.link.awaits_an_end());
}

#[test]
fn an_open_engine_is_told_counted_and_asked_what_waited() {
    let mut play = Play::greeting();
    play.look_up("a");
    play.feed(SchedulerEvent::CancelSaves { below: 3, until: play.now + TIMEOUT });
    assert!(matches!(play.sent()[..], [Ask::Hello(_)]), "nothing else before it is open");
    play.answer(play.last_request(), RUN, welcome());
    assert!(matches!(play.sent()[..], [Ask::OpenEngine(_)]));
    play.answer(play.last_request(), RUN, opened(false));
    assert!(play.actions.iter().any(
        |action| matches!(action, SchedulerAction::Log(told) if told.sentence.contains("is connected"))
    ));
    assert!(matches!(play.sent()[..], [Ask::Lookup(_), Ask::CancelSaves(_)]));
    assert!(play.link.is_connected() && !play.link.is_ready());
    assert_eq!(play.stats().connects, 1);
}

#[test]
fn a_refusal_before_the_engine_is_open_ends_the_connection_and_keeps_the_lookups() {
    for mut play in [Play::greeting(), Play::opening()] {
        let was_welcome = play.link.boot().is_some();
        play.look_up("a");
        play.answer(play.last_request(), RUN, refusal("too many sessions"));
        assert!(play.actions.contains(&SchedulerAction::Close(play.connection())));
        assert!(play.told().contains("too many sessions"));
        assert_eq!(play.link.refusal(), Some("too many sessions"));
        assert_eq!(play.link.gone().count(), usize::from(was_welcome));
        assert!(play.misses("a"), "down it is a miss");
        assert_eq!(play.stats(), SchedulerStats { lookups: 1, unavailable: 1, ..Default::default() });
    }
}

#[test]
fn a_hit_is_answered_once_with_its_lease() {
    let mut play = Play::open();
    let id = play.look_up("a");
    assert!(
        matches!(&play.sent()[..], [Ask::Lookup(ask)] if ask.may_wait && (ask.max_tokens, ask.tokens_per_s) == (64, 7000))
    );
    assert_eq!(play.poll("a"), None);
    play.now += Duration::from_millis(100);
    play.answer(id, RUN, hit(5));
    let found = play.poll("a").unwrap();
    assert_eq!((found.tokens, found.lease, found.boot), (48, 5, RUN));
    assert!(play.misses("a"), "it is taken");
    let stats = play.stats();
    assert_eq!((stats.lookups, stats.hits), (1, 1));
    assert!((stats.lookup_seconds - 0.1).abs() < 1e-9);
    play.feed(SchedulerEvent::Release { boot: OTHER_RUN, lease: 5 });
    assert!(play.sent().is_empty(), "that run is gone");
    assert!(!play.link.at_rest());
    play.feed(SchedulerEvent::Release { boot: RUN, lease: 5 });
    assert!(matches!(&play.sent()[..], [Ask::Release(release)] if release.leases == [5]));
    assert!(play.link.at_rest());
}

#[test]
fn a_hand_off_is_sent_and_its_wait_is_prolonged_as_often_as_the_daemon_says_but_not_for_ever() {
    let mut play = Play::open();
    let hand_off = AwaitedSave { engine_id: "p".into(), run: [9; 16], tokens: 40, wait_ms: 2000 };
    let groups = vec![v1::LookupGroup { group: 0, hashes: Bytes::from_static(&[5; 64]) }];
    let (request, hand_off) = (String::from("a"), Some(hand_off));
    play.feed(SchedulerEvent::LookUp {
        request,
        number: 0,
        again: false,
        traceparent: String::new(),
        groups,
        max_tokens: 64,
        awaited_save: hand_off,
        tokens_per_s: 0,
        timeout: TIMEOUT,
    });
    let id = play.last_request();
    let expected =
        v1::HandOff { engine_id: "p".into(), run: Bytes::from_static(&[9; 16]), tokens: 40, wait_ms: 2000 };
    assert!(matches!(&play.sent()[..], [Ask::Lookup(ask)] if ask.may_wait && ask.hand_off == Some(expected)));
    let pending = || Answer::LookupPending(v1::LookupPending { wait_ms: 2000 });
    // The daemon caps a wait at 30 s; whatever it says, here it is over after 60 s and the timeout.
    for _ in 0..40 {
        play.answer(id, RUN, pending());
        play.pass(Duration::from_millis(1500));
        assert_eq!(play.poll("a"), None);
    }
    play.answer(id, RUN, pending());
    play.pass(TIMEOUT - Duration::from_millis(1));
    assert_eq!(play.poll("a"), None);
    play.pass(Duration::from_millis(1));
    assert!(play.misses("a"));
    assert_eq!(play.stats().timeouts, 1);
    // Its answer comes after all, and its lease is given back.
    play.answer(id, RUN, hit(5));
    assert!(matches!(&play.sent()[..], [.., Ask::Release(release)] if release.leases == [5]));
}

#[test]
fn a_second_answer_changes_nothing() {
    let mut play = Play::open();
    let id = play.look_up("a");
    play.answer(id, RUN, miss());
    play.answer(id, RUN, hit(5));
    assert!(play.misses("a"));
    assert!(play.link.at_rest());
}

#[test]
fn an_answer_that_nobody_waits_for_is_given_back() {
    let mut play = Play::open();
    let id = play.look_up("late");
    play.now += TIMEOUT;
    assert!(play.misses("late"));
    assert_eq!(play.stats().timeouts, 1);
    play.sent();
    play.answer(id, RUN, hit(5));
    assert!(matches!(&play.sent()[..], [Ask::Release(release)] if release.leases == [5]));
    let forgotten = play.look_up("a");
    play.feed(SchedulerEvent::Forget { request: "a".into() });
    play.sent();
    play.answer(forgotten, RUN, hit(6));
    assert!(matches!(&play.sent()[..], [Ask::Release(release)] if release.leases == [6]));
    let answered = play.look_up("b");
    play.answer(answered, RUN, hit(7));
    play.sent();
    play.feed(SchedulerEvent::Forget { request: "b".into() });
    assert!(matches!(&play.sent()[..], [Ask::Release(release)] if release.leases == [7]));
    assert!(play.link.at_rest());
}

#[test]
fn a_daemon_that_needs_longer_gets_the_time_that_it_names_and_the_timeout() {
    let mut play = Play::open();
    let id = play.look_up("a");
    play.answer(id, RUN, pending(1000));
    play.now += TIMEOUT + Duration::from_millis(999);
    assert_eq!(play.poll("a"), None);
    play.now += Duration::from_millis(1);
    assert!(play.misses("a"));
    let id = play.look_up("b");
    assert!(play.misses("b"), "the daemon is silent");
    play.answer(id, RUN, miss());
    let id = play.look_up("b");
    play.answer(id, RUN, pending(u32::MAX));
    play.now += Duration::from_secs(60) + TIMEOUT;
    assert!(play.misses("b"), "but no more than a minute");
}

/// A daemon that asked for more time again and again held a request for ever.
#[test]
fn a_daemon_that_asks_for_more_time_again_and_again_gets_a_minute() {
    let mut play = Play::open();
    let id = play.look_up("a");
    let end = play.now + Duration::from_secs(60) + TIMEOUT;
    while play.now + Duration::from_secs(7) < end {
        play.answer(id, RUN, pending(8000));
        play.now += Duration::from_secs(7);
        assert_eq!(play.poll("a"), None);
    }
    play.answer(id, RUN, pending(8000));
    play.now = end;
    assert!(play.misses("a"));
    play.look_up("b");
    assert!(play.misses("b"), "it counts as silent from then on");
}

#[test]
fn a_refused_lookup_is_a_miss_and_a_sentence_is_told_once() {
    let mut play = Play::open();
    for turn in 0..2 {
        let id = play.look_up("a");
        play.answer(id, RUN, refusal("group 0 is not open"));
        assert_eq!(play.told().contains("group 0 is not open"), turn == 0);
        assert!(play.misses("a"));
    }
    assert_eq!(play.stats().misses, 2);
    assert!(play.link.is_connected());
    play.answer(0, RUN, refusal("a frame is too long"));
    assert!(play.told().contains("a frame is too long"), "the daemon closes after it");
}

#[test]
fn a_loss_ends_lookups_asked_and_answered_and_is_told_and_counted() {
    let mut play = Play::open();
    play.look_up("asked");
    let id = play.look_up("answered");
    play.answer(id, RUN, hit(5));
    play.actions.clear();
    play.lose();
    assert!(play.told().contains("lost the daemon"));
    assert!(play.misses("asked"));
    assert!(play.misses("answered"), "its run is over: it must not be promised");
    let stats = play.stats();
    assert_eq!((stats.losses, stats.hits), (1, 1));
    assert_eq!(play.link.gone().collect::<Vec<_>>(), [RUN]);
    assert!(play.link.needs(PROCESS));
    play.feed(SchedulerEvent::ProcessEnded(PROCESS));
    assert!(!play.link.needs(PROCESS));
}

/// A hit was answered and its connection broke before the engine took it. The daemon was the same afterwards, and was told
/// for ever that the lease was in use: its blocks could not make room for others any more.
#[test]
fn the_lease_of_a_hit_that_nobody_took_is_not_held_over_a_loss() {
    let mut play = Play::open();
    for (request, lease) in [("taken", 11), ("untaken", 12)] {
        let id = play.look_up(request);
        play.answer(id, RUN, hit(lease));
    }
    assert!(play.poll("taken").is_some_and(|hit| hit.lease == 11));
    play.lose();
    play.actions.clear();
    play.pass(Duration::from_secs(2));
    let connection = play.connection();
    play.feed(SchedulerEvent::Connected { connection, life: Life::Watched(PROCESS) });
    let sent = play.sent();
    assert!(matches!(&sent[..], [Ask::Hello(hello)] if hello.live_leases == [11]), "{sent:?}");
}

#[test]
fn a_connection_that_breaks_off_while_greeting_leaves_no_run() {
    let mut play = Play::greeting();
    play.actions.clear();
    play.lose();
    assert!(play.told().contains("handshake"));
    assert_eq!((play.link.gone().count(), play.stats().losses), (0, 1));
    assert!(!play.link.needs(PROCESS));
}

#[test]
fn what_is_told_of_a_former_connection_is_ignored() {
    let mut play = Play::open();
    let former = play.connection();
    play.lose();
    play.now += Duration::from_secs(1);
    play.connect(Life::Unknown);
    play.actions.clear();
    play.feed(SchedulerEvent::Lost { connection: former, why: "again".into() });
    let reply = v1::Reply { id: play.last_request(), boot_id: Bytes::new(), body: Some(welcome()) };
    play.feed(SchedulerEvent::Reply { connection: former, reply });
    assert!(play.actions.is_empty() && play.link.is_opening());
}

#[test]
fn heartbeats_name_the_leases_every_ten_seconds() {
    let mut play = Play::open();
    let id = play.look_up("a");
    play.answer(id, RUN, hit(5));
    play.sent();
    assert!(play.link.wake_at().unwrap() <= play.now + HEARTBEAT);
    play.pass(HEARTBEAT - Duration::from_millis(1));
    assert!(play.sent().is_empty());
    for _ in 0..2 {
        play.pass(HEARTBEAT);
        assert!(matches!(&play.sent()[..], [Ask::Heartbeat(beat)] if beat.live_leases == [5]));
    }
}

#[test]
fn ends_of_requests_are_reported_while_the_daemon_says_that_it_is_recorded() {
    let mut play = Play::open();
    let ended =
        |request| SchedulerEvent::RequestsEnded(vec![v1::EndedRequest { request, ..Default::default() }]);
    let recorded = |is_recorded| Answer::Done(v1::Done { is_recorded });
    play.feed(ended(1));
    assert!(play.sent().is_empty() && !play.link.is_recorded());
    // The answer to a heartbeat says so, and one to a release says nothing of it.
    play.pass(HEARTBEAT);
    play.answer(play.last_request(), RUN, recorded(Some(true)));
    play.answer(play.last_request(), RUN, recorded(None));
    play.sent();
    play.feed(ended(2));
    let sent = play.sent();
    assert!(matches!(&sent[..], [Ask::RequestsEnded(ended)] if ended.requests[0].request == 2), "{sent:?}");
    // So does the answer to a lookup.
    let id = play.look_up("a");
    assert!(matches!(&play.sent()[..], [Ask::Lookup(lookup)] if lookup.request == 3));
    play.answer(id, RUN, miss());
    play.feed(ended(3));
    assert!(play.sent().is_empty());
    let id = play.look_up("b");
    play.answer(
        id,
        RUN,
        Answer::LookupResult(v1::LookupResult { is_recorded: true, ready: true, ..Default::default() }),
    );
    assert!(play.link.is_recorded());
    // Another daemon has to say it again.
    play.lose();
    assert!(!play.link.is_recorded());
}

#[test]
fn the_daemon_is_asked_until_the_workers_are_ready() {
    let mut play = Play::opening();
    play.answer(play.last_request(), RUN, opened(false));
    play.sent();
    play.pass(Duration::ZERO);
    assert!(matches!(&play.sent()[..], [Ask::Lookup(probe)] if probe.max_tokens == 0 && !probe.may_wait));
    play.pass(READY_PROBE);
    assert!(play.sent().is_empty(), "its answer is still to come");
    let not_ready = v1::LookupResult { ready: false, ..Default::default() };
    play.answer(play.last_request(), RUN, Answer::LookupResult(not_ready));
    play.pass(READY_PROBE);
    assert_eq!(play.sent().len(), 1);
    play.answer(play.last_request(), RUN, miss());
    assert!(play.link.is_ready());
    play.pass(READY_PROBE);
    assert!(play.sent().is_empty());
    assert_eq!(play.stats().misses, 0, "nobody asked");
}

#[test]
fn a_lookup_without_a_connection_is_a_miss_at_once() {
    let mut play = Play::new();
    play.look_up("a");
    assert!(play.misses("a"));
    assert_eq!(play.stats(), SchedulerStats { lookups: 1, unavailable: 1, ..Default::default() });
}

#[test]
fn a_silent_daemon_is_asked_no_more_until_it_speaks() {
    let mut play = Play::open();
    let id = play.look_up("a");
    play.now += TIMEOUT;
    assert!(play.misses("a"));
    play.sent();
    play.look_up("b");
    assert!(play.sent().is_empty());
    assert!(play.misses("b"));
    assert_eq!((play.stats().unavailable, play.link.is_connected()), (1, true));
    play.answer(id, RUN, miss());
    play.look_up("b");
    assert_eq!(play.poll("b"), None);
}

/// The daemon never answered one lookup, and all others after it: they were misses until the connection ended.
#[test]
fn a_lookup_that_is_never_answered_is_no_silence_once_the_daemon_has_spoken() {
    let mut play = Play::open();
    play.look_up("lost");
    let id = play.look_up("later");
    play.answer(id, RUN, miss());
    play.now += TIMEOUT;
    assert!(play.misses("lost"));
    let id = play.look_up("b");
    assert_eq!(play.poll("b"), None, "it has answered what was asked later");
    play.now += TIMEOUT;
    assert!(play.misses("b"));
    play.look_up("c");
    assert!(play.misses("c"), "since then it is silent");
    play.answer(id, RUN, miss());
    play.look_up("c");
    assert_eq!(play.poll("c"), None);
}

/// Without an answer to come nothing was asked any more, so that none could come: up to ten seconds of misses, to the next
/// heartbeat.
#[test]
fn a_daemon_that_seems_silent_is_asked_for_a_sign_of_life_once() {
    let mut play = Play::open();
    play.look_up("lost");
    play.now += TIMEOUT;
    assert!(play.misses("lost"));
    play.sent();
    for turn in 0..3 {
        play.pass(Duration::from_millis(10));
        assert_eq!(play.sent().len(), usize::from(turn == 0), "a heartbeat, once");
        play.look_up("b");
        assert!(play.misses("b"), "it may be silent");
    }
    play.answer(play.last_request(), RUN, done());
    play.look_up("b");
    assert_eq!(play.poll("b"), None, "it has answered");
    play.now += TIMEOUT;
    assert!(play.misses("b"));
    play.sent();
    play.pass(Duration::ZERO);
    assert!(matches!(&play.sent()[..], [Ask::Heartbeat(_)]), "again");
}

/// A daemon that asks for more time speaks, and owes that answer still: if nothing else comes it is silent.
#[test]
fn a_daemon_that_asked_for_time_and_fell_silent_costs_one_wait() {
    let mut play = Play::open();
    let waiting = play.look_up("waits");
    play.answer(waiting, RUN, pending(1000));
    play.now += Duration::from_secs(1) + TIMEOUT;
    assert!(play.misses("waits"));
    play.look_up("b");
    assert!(play.misses("b"), "nothing was heard since it asked for time");
}

/// A daemon that loses answers and goes on speaking owes more and more of them.
#[test]
fn answers_that_never_come_are_remembered_within_a_bound() {
    let mut play = Play::open();
    let first = play.look_up("lost");
    for _ in 0..PENDING_LOOKUPS_MAX + 9 {
        play.look_up("lost");
        play.actions.clear();
    }
    let ConnectionState::Up(up) = &play.link.connection else { panic!("it is open") };
    assert_eq!(up.pending.len(), PENDING_LOOKUPS_MAX);
    assert!(!up.pending.contains_key(&first), "the oldest one is forgotten");
    play.answer(play.last_request(), RUN, hit(5));
    assert!(play.poll("lost").is_some_and(|hit| hit.lease == 5), "but none that is waited for");
}

/// A lost answer was waited for, so that no other question about the workers was asked.
#[test]
fn the_daemon_is_asked_whether_the_workers_are_ready_after_a_lost_answer() {
    let mut play = Play::opening();
    play.answer(play.last_request(), RUN, opened(false));
    play.look_up("lost");
    let id = play.look_up("answered");
    let not_ready = v1::LookupResult { ready: false, ..Default::default() };
    play.answer(id, RUN, Answer::LookupResult(not_ready));
    play.sent();
    play.pass(READY_PROBE);
    assert!(matches!(&play.sent()[..], [Ask::Lookup(probe)] if probe.max_tokens == 0));
    play.pass(READY_PROBE);
    assert!(play.sent().is_empty(), "its answer is still to come");
}

/// A daemon that restarts listens before it has filled its pool: every request of a running engine waited its whole timeout
/// until the daemon served.
#[test]
fn while_a_daemon_listens_and_says_nothing_one_lookup_waits_for_it() {
    for mut play in [Play::greeting(), Play::opening()] {
        let request = play.last_request();
        play.look_up("a");
        assert_eq!(play.poll("a"), None);
        play.now += TIMEOUT;
        assert!(play.misses("a"));
        for _ in 0..3 {
            play.look_up("b");
            assert!(play.misses("b"), "it is known to be silent");
        }
        let stats = SchedulerStats { lookups: 4, timeouts: 1, unavailable: 3, ..Default::default() };
        assert_eq!(play.stats(), stats);
        let answer = if play.link.boot().is_some() { opened(true) } else { welcome() };
        play.answer(request, RUN, answer);
        play.look_up("b");
        assert_eq!(play.poll("b"), None, "it has spoken");
    }
}

/// An answer that did not fit its question was promised to the engine: the load failed, and vLLM ended the request.
#[test]
fn a_hit_that_does_not_fit_its_question_is_a_lost_connection() {
    let fits = hit(5);
    let with = |change: fn(&mut v1::LookupResult)| {
        let Answer::LookupResult(mut result) = hit(5) else { panic!("no hit") };
        change(&mut result);
        Answer::LookupResult(result)
    };
    let misfits = [
        with(|hit| hit.tokens = 80),
        with(|hit| hit.tokens = 47),
        with(|hit| hit.tokens = 0),
        with(|hit| hit.groups.clear()),
        with(|hit| hit.groups[0].group = 1),
        with(|hit| hit.groups.push(hit.groups[0].clone())),
        with(|hit| hit.groups[0].workers = 3),
        with(|hit| hit.groups[0].first_block = 1),
        with(|hit| hit.groups[0].stored_blocks = 2),
        with(|hit| hit.groups[0].pages = Bytes::from_static(&[0; 11])),
        with(|hit| hit.groups[0].pages = Bytes::from_static(&[0; 16])),
    ];
    let answers = misfits.into_iter().map(|answer| (RUN, answer)).chain([(OTHER_RUN, fits)]);
    for (boot, answer) in answers {
        let mut play = Play::open();
        let id = play.look_up("a");
        play.answer(id, boot, answer.clone());
        assert!(play.actions.contains(&SchedulerAction::Close(play.connection())), "{answer:?}");
        assert!(play.told().contains("lost the daemon"));
        assert!(play.misses("a"), "{answer:?}");
        assert_eq!((play.stats().losses, play.link.is_connected()), (1, false));
    }
    // A daemon may name fewer blocks than the tokens that are asked for allow, but none beyond the hashes.
    let mut play = Play::open();
    let groups = vec![v1::LookupGroup { group: 0, hashes: Bytes::from_static(&[5; 32]) }];
    let event = SchedulerEvent::LookUp {
        request: "a".into(),
        number: 0,
        again: false,
        traceparent: String::new(),
        groups,
        max_tokens: u64::MAX,
        awaited_save: None,
        tokens_per_s: 0,
        timeout: TIMEOUT,
    };
    play.feed(event);
    play.answer(play.last_request(), RUN, hit(5));
    assert!(!play.link.is_connected(), "three blocks for two hashes");
}

/// An engine was opened by whatever said so, also before the daemon had greeted, and a second greeting closed it again.
#[test]
fn an_answer_moves_a_stage_on_only_if_it_is_the_stages() {
    let mut greeting = Play::greeting();
    let hello = greeting.last_request();
    greeting.answer(hello, RUN, opened(true));
    assert!(!greeting.link.is_connected() && !greeting.link.is_opening(), "that was no greeting");

    let mut greeting = Play::greeting();
    let reply = v1::Reply { id: hello, boot_id: Bytes::from_static(b"short"), body: Some(welcome()) };
    greeting.feed(SchedulerEvent::Reply { connection: greeting.connection(), reply });
    assert!(!greeting.link.is_opening(), "a run has a name of 16 bytes");

    let mut opening = Play::opening();
    let open = opening.last_request();
    opening.answer(hello, RUN, welcome());
    opening.answer(99, RUN, opened(true));
    assert!(opening.link.is_opening(), "nobody asked for these");
    opening.answer(open, OTHER_RUN, opened(true));
    assert!(!opening.link.is_opening() && !opening.link.is_connected(), "another run has not greeted");

    let mut play = Play::open();
    play.answer(hello, RUN, welcome());
    play.answer(open, RUN, opened(false));
    assert!(play.link.is_connected() && play.link.is_ready() && play.actions.is_empty());
    let id = play.look_up("a");
    play.answer(id, RUN, done());
    assert!(!play.link.is_connected(), "that is no answer to a lookup");

    let mut play = Play::open();
    play.feed(SchedulerEvent::CancelSaves { below: 3, until: play.now + TIMEOUT });
    play.answer(play.last_request(), RUN, miss());
    assert!(!play.link.is_connected(), "nor this one to a CancelSaves");
}

#[test]
fn lookups_that_wait_are_bounded() {
    let mut play = Play::open();
    for n in 0..4096 {
        play.look_up(&n.to_string());
    }
    assert_eq!(play.stats().unavailable, 0);
    play.look_up("one more");
    assert_eq!(play.stats().unavailable, 1);
    assert!(play.misses("one more"));
}

#[test]
fn asking_again_forgets_the_first_question() {
    let mut play = Play::open();
    let first = play.look_up("a");
    let second = play.look_up("a");
    play.sent();
    play.answer(first, RUN, hit(5));
    assert!(matches!(&play.sent()[..], [Ask::Release(_)]));
    assert_eq!(play.poll("a"), None);
    play.answer(second, RUN, hit(6));
    assert_eq!(play.poll("a").unwrap().lease, 6);
}

#[test]
fn saves_are_cancelled_when_the_daemon_says_so() {
    for (answer, expected) in [(done(), true), (refusal("saves were still being copied"), false)] {
        let mut play = Play::open();
        play.feed(SchedulerEvent::CancelSaves { below: 3, until: play.now + TIMEOUT });
        assert!(
            matches!(&play.sent()[..], [Ask::CancelSaves(ask)] if (ask.below_job, ask.timeout_ms) == (3, 250))
        );
        assert_eq!(play.link.cancelled(play.now), None);
        play.answer(play.last_request() - 1, RUN, answer.clone());
        assert_eq!(play.link.cancelled(play.now), None, "that is the answer to something else");
        play.answer(play.last_request(), RUN, answer);
        assert_eq!(play.link.cancelled(play.now), Some(expected));
    }
}

#[test]
fn saves_that_nobody_answers_for_are_not_cancelled() {
    let mut play = Play::open();
    play.feed(SchedulerEvent::CancelSaves { below: 3, until: play.now + TIMEOUT });
    assert_eq!(play.link.wake_at(), Some(play.now + TIMEOUT));
    assert_eq!(play.link.cancelled(play.now + TIMEOUT), Some(false));
    play.answer(play.last_request(), RUN, done());
    assert_eq!(play.link.cancelled(play.now), None, "it was told");
}

#[test]
fn without_a_connection_saves_are_cancelled_when_all_former_daemons_have_ended() {
    let mut play = Play::open();
    play.feed(SchedulerEvent::CancelSaves { below: 3, until: play.now + TIMEOUT });
    play.answer(play.last_request(), RUN, done());
    play.lose();
    assert_eq!(play.link.cancelled(play.now), None, "it may still read them");
    play.feed(SchedulerEvent::ProcessEnded(PROCESS));
    assert_eq!(play.link.cancelled(play.now), Some(true), "the dead read nothing");
}

#[test]
fn cancelling_is_asked_again_of_a_daemon_that_is_there_again() {
    let mut play = Play::open();
    play.feed(SchedulerEvent::CancelSaves { below: 3, until: play.now + Duration::from_secs(9) });
    play.sent();
    play.lose();
    play.now += Duration::from_secs(1);
    play.connect(Life::Watched(PROCESS));
    play.answer(play.last_request(), RUN, welcome());
    assert!(matches!(&play.sent()[..], [Ask::Hello(_), Ask::OpenEngine(open)] if open.cancelled_below == 3));
    play.answer(play.last_request(), RUN, opened(true));
    assert!(matches!(&play.sent()[..], [Ask::CancelSaves(ask)] if ask.timeout_ms == 8000));
    play.answer(play.last_request(), RUN, done());
    assert_eq!(play.link.cancelled(play.now), Some(true));
}

#[test]
fn a_former_daemon_of_which_the_kernel_tells_nothing_is_over_after_a_minute() {
    let mut play = Play::greeting();
    play.lose();
    play.now += Duration::from_secs(1);
    play.connect(Life::Unknown);
    play.answer(play.last_request(), RUN, welcome());
    play.lose();
    play.feed(SchedulerEvent::CancelSaves { below: 3, until: play.now + Duration::from_secs(99) });
    assert_eq!(play.link.cancelled(play.now + Duration::from_secs(59)), None);
    assert_eq!(play.link.cancelled(play.now + Duration::from_secs(60)), Some(true));
}

#[test]
fn closing_says_goodbye_and_is_over_with_its_answer_its_time_or_the_connection() {
    let mut play = Play::open();
    let lookup = play.look_up("a");
    play.sent();
    play.feed(SchedulerEvent::Close);
    assert!(matches!(play.sent()[..], [Ask::Bye(_)]));
    assert!(!play.link.is_over());
    play.answer(lookup, RUN, hit(5));
    assert!(!play.link.is_over());
    play.answer(play.last_request(), RUN, done());
    assert_eq!(play.actions, [SchedulerAction::Close(play.connection())]);
    assert!(play.link.is_over() && play.link.at_rest());
    play.pass(Duration::from_secs(99));
    assert_eq!(play.actions.len(), 1, "it does not connect again");
    assert_eq!(play.link.wake_at(), None);

    let mut play = Play::greeting();
    play.feed(SchedulerEvent::Close);
    assert_eq!(play.link.wake_at(), Some(play.now + GOODBYE));
    play.pass(GOODBYE);
    assert!(play.link.is_over() && play.actions.contains(&SchedulerAction::Close(play.connection())));

    let mut play = Play::open();
    play.feed(SchedulerEvent::Close);
    play.lose();
    assert!(play.link.is_over());
    assert_eq!(play.stats().losses, 0);
}

/// A closed link's answer is never taken, so its deadline stayed in the past, and a driver that sleeps until then spun.
#[test]
fn a_closed_link_does_not_wake_for_saves_that_were_to_be_cancelled() {
    let mut play = Play::open();
    play.feed(SchedulerEvent::CancelSaves { below: 3, until: play.now + TIMEOUT });
    play.feed(SchedulerEvent::Close);
    play.pass(Duration::from_secs(5));
    assert_eq!(play.link.wake_at(), None);
}

// ------------------------------------------------------------------------------------------------------------ the journal

fn welcome_of(wire: u32) -> Answer {
    Answer::Welcome(v1::Welcome { wire, version: "1".into(), session_id: 1, pool_bytes: 4_000_000_000 })
}

fn told(cursor: u64, start_again: bool, changes: &[(ChangeKind, u8)]) -> Answer {
    let change = |&(kind, hash): &(ChangeKind, u8)| packed::Change { kind, group: 0, hash: [hash; 16] };
    let entries = pack_changes(changes.iter().map(change));
    Answer::JournalEntries(v1::JournalEntries { cursor, start_again, has_more: false, entries })
}

impl Play {
    /// Follows the journal of a daemon that is open.
    fn following() -> Self {
        let mut play = Self::with(true);
        play.connect(Life::Watched(PROCESS));
        play.answer(play.last_request(), RUN, welcome_of(WIRE_OF_JOURNAL));
        play.answer(play.last_request(), RUN, opened(true));
        play
    }

    /// The cursors that the daemon was asked for since the last look.
    fn cursors(&mut self) -> Vec<u64> {
        let cursor = |ask| match ask {
            Ask::ReadJournal(read) => Some(read.cursor),
            _ => None,
        };
        self.sent().into_iter().filter_map(cursor).collect()
    }

    /// Hash and whether it came, of what the engine hears.
    fn heard(&mut self) -> (bool, Vec<(u8, bool)>) {
        let BlockChanges { start_again, changes } = self.link.take_changes();
        (start_again, changes.iter().map(|change| (change.hash[0], change.is_visible)).collect())
    }
}

#[test]
fn the_journal_is_read_from_the_opening_on_every_100_ms_one_question_at_a_time() {
    let mut play = Play::following();
    assert_eq!(play.cursors(), [0]);
    play.pass(Duration::from_secs(1));
    assert_eq!(play.cursors(), [], "the first is not answered");
    play.answer(play.last_request(), RUN, told(7, true, &[]));
    play.pass(Duration::from_secs(1));
    assert_eq!(play.cursors(), [], "the engine has not heard of it");
    assert_eq!(play.heard(), (true, vec![]));
    play.pass(Duration::ZERO);
    assert_eq!(play.cursors(), [7]);
    let changes = [(ChangeKind::Visible, 1), (ChangeKind::GoneFromSsd, 2), (ChangeKind::Gone, 3)];
    play.answer(play.last_request(), RUN, told(10, false, &changes));
    assert_eq!(play.heard(), (false, vec![(1, true), (3, false)]));
    assert_eq!(play.heard(), (false, vec![]));
    play.pass(journal::INTERVAL - Duration::from_millis(1));
    assert_eq!(play.cursors(), []);
    assert_eq!(play.link.wake_at(), Some(play.now + Duration::from_millis(1)));
    play.pass(Duration::from_millis(1));
    assert_eq!(play.cursors(), [10]);
}

#[test]
fn what_there_is_already_is_asked_for_at_once() {
    let mut play = Play::following();
    let Answer::JournalEntries(more) = told(9, false, &[(ChangeKind::Gone, 1)]) else { panic!("other") };
    play.cursors();
    play.answer(
        play.last_request(),
        RUN,
        Answer::JournalEntries(v1::JournalEntries { has_more: true, ..more }),
    );
    play.heard();
    play.pass(Duration::ZERO);
    assert_eq!(play.cursors(), [9]);
}

#[test]
fn over_a_new_connection_to_the_same_run_it_goes_on_and_of_another_run_it_begins() {
    for (run, cursor) in [(RUN, 5), (OTHER_RUN, 0)] {
        let mut play = Play::following();
        play.answer(play.last_request(), RUN, told(5, false, &[(ChangeKind::Gone, 1)]));
        play.lose();
        play.now += Duration::from_secs(1);
        play.connect(Life::Unknown);
        play.answer(play.last_request(), run, welcome_of(WIRE_OF_JOURNAL));
        // Changes of a former run are not reported for the new one.
        let heard = play.heard().1;
        assert_eq!(heard.len(), usize::from(run == RUN));
        play.cursors();
        play.answer(play.last_request(), run, opened(true));
        assert_eq!(play.cursors(), [cursor]);
    }
}

#[test]
fn a_daemon_of_before_the_journal_is_not_asked_and_that_is_told_once() {
    let mut play = Play::with(true);
    for turn in 0..2 {
        play.now += Duration::from_secs(1);
        play.connect(Life::Unknown);
        play.actions.clear();
        play.answer(play.last_request(), RUN, welcome_of(WIRE_OF_JOURNAL - 1));
        let said = play.told();
        assert_eq!(said.contains("does not tell which blocks it evicts"), turn == 0, "{said}");
        play.answer(play.last_request(), RUN, opened(true));
        play.pass(Duration::from_secs(1));
        assert_eq!(play.cursors(), []);
        play.lose();
    }
    // The link does not read the journal for an engine that does not want changes.
    let mut play = Play::open();
    play.pass(Duration::from_secs(1));
    assert_eq!(play.cursors(), []);
}

#[test]
fn a_refused_question_is_asked_again_a_second_later() {
    let mut play = Play::following();
    play.cursors();
    play.answer(play.last_request(), RUN, refusal("not now"));
    play.pass(Duration::from_millis(999));
    assert_eq!(play.cursors(), []);
    play.pass(Duration::from_millis(1));
    assert_eq!(play.cursors(), [0]);
}

#[test]
fn an_answer_of_the_journal_that_does_not_fit_is_a_lost_connection() {
    let of_group = |group| {
        let change = packed::Change { kind: ChangeKind::Gone, group, hash: [1; 16] };
        v1::JournalEntries { cursor: 3, entries: pack_changes([change]), ..Default::default() }
    };
    let cut_off = Bytes::from_static(&[0; 17]);
    let many = vec![(ChangeKind::Gone, 1); 5000];
    let misfits = [
        told(0, true, &[]),
        told(3, true, &[(ChangeKind::Gone, 1)]),
        told(3, false, &many),
        Answer::JournalEntries(of_group(1)),
        Answer::JournalEntries(v1::JournalEntries { entries: cut_off, ..of_group(0) }),
        done(),
    ];
    for misfit in misfits {
        let mut play = Play::following();
        play.answer(play.last_request(), RUN, misfit.clone());
        assert!(!play.link.is_connected(), "{misfit:?}");
        assert_eq!(play.heard(), (false, vec![]));
    }
}
