//! Lookups that await the saves of another engine, over real sockets, and every way in which the wait ends.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may fail here")]

use std::{
    collections::BTreeMap,
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    os::unix::net::UnixStream,
    path::PathBuf,
    time::{Duration, Instant},
};

use crate::support::*;
use bytes::Bytes;
use kvlane_client::Tool;
use kvlane_proto::{
    FrameReader, encode_frame,
    v1::{
        self, hello::Role, refused::Reason, register_worker::Method, reply::Body as Answer,
        request::Body as Ask,
    },
};
use kvlane_server::{Daemon, ServeOptions};

/// Beyond any time that a test waits: what ends earlier has not ended by its time.
const NEVER: u32 = u32::MAX;
const RUN: [u8; 16] = [0x51; 16];

/// A connection that says what the test wants.
struct Wire {
    stream: UnixStream,
    reader: FrameReader,
    next_id: u64,
}

impl Wire {
    fn greet(place: &Place, role: Role, engine_id: &str, nonce: [u8; 16]) -> Self {
        let stream = UnixStream::connect(&place.path).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut wire = Self { stream, reader: FrameReader::default(), next_id: 0 };
        let hello = v1::Hello {
            wire_min: 1,
            wire_max: 1,
            role: role.into(),
            engine_id: engine_id.into(),
            process_nonce: nonce.to_vec().into(),
            ..Default::default()
        };
        assert!(matches!(wire.ask(Ask::Hello(hello)), Answer::Welcome(_)));
        wire
    }

    fn send(&mut self, body: Ask) -> u64 {
        self.next_id += 1;
        let request = v1::Request { id: self.next_id, body: Some(body) };
        self.stream.write_all(&encode_frame(&request)).unwrap();
        self.next_id
    }

    fn receive(&mut self) -> (u64, Answer) {
        loop {
            if let Some(reply) = self.reader.next_message::<v1::Reply>().unwrap() {
                return (reply.id, reply.body.unwrap());
            }
            let mut bytes = [0; 64 << 10];
            let count = self.stream.read(&mut bytes).unwrap();
            assert!(count > 0, "the daemon hung up");
            self.reader.push(&bytes[..count]);
        }
    }

    fn ask(&mut self, body: Ask) -> Answer {
        let id = self.send(body);
        let (of, answer) = self.receive();
        assert_eq!(of, id);
        answer
    }
}

/// A daemon with metrics, and where it is.
struct Place {
    folder: tempfile::TempDir,
    path: PathBuf,
    http: SocketAddr,
    daemon: Option<Daemon>,
}

impl Place {
    fn new(pool_bytes: u64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let http = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let address = address(&folder);
        let options = ServeOptions { http: Some(http), ..options(&address, pool_bytes) };
        let daemon = Some(Daemon::start(&options, &|_| {}).unwrap());
        Self { path: folder.path().join("kvlane.sock"), folder, http, daemon }
    }

    /// Metrics without their labels' names, those of 0 left out.
    fn metrics(&self) -> BTreeMap<String, f64> {
        let mut stream = TcpStream::connect(self.http).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
        let mut page = String::new();
        stream.read_to_string(&mut page).unwrap();
        let lines = page.lines().filter(|line| line.starts_with("kvlane_hand_off"));
        let values = lines.filter_map(|line| line.rsplit_once(' '));
        values.map(|(name, value)| (name.to_owned(), value.parse().unwrap())).collect()
    }

    fn outcomes(&self) -> BTreeMap<String, u64> {
        let of_outcome = |(name, value): (String, f64)| {
            let outcome = name.strip_prefix("kvlane_hand_offs_total{outcome=\"")?;
            Some((outcome.trim_end_matches("\"}").to_owned(), value as u64))
        };
        self.metrics().into_iter().filter_map(of_outcome).collect()
    }

    /// Nobody waits, nothing is watched, nothing is leased; and these were the outcomes.
    fn rests_after(&self, outcomes: &[(&str, u64)]) {
        let expected = outcomes.iter().map(|(outcome, count)| ((*outcome).to_owned(), *count)).collect();
        assert_eq!(self.outcomes(), expected);
        let metrics = self.metrics();
        assert_eq!((metrics["kvlane_hand_offs_waiting"], metrics["kvlane_hand_off_blocks"]), (0.0, 0.0));
        let status = Tool::connect(&address(&self.folder), PATIENCE).unwrap().status().unwrap();
        assert_eq!(status.leased_blocks, 0);
    }

    /// What cannot be heard of otherwise.
    fn until(&self, what: &str, is_so: impl Fn(&BTreeMap<String, f64>) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !is_so(&self.metrics()) {
            assert!(Instant::now() < deadline, "{what}: {:?}", self.metrics());
            std::thread::yield_now();
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(daemon) = self.daemon.take() {
            daemon.stop(PATIENCE);
        }
    }
}

/// An engine with one worker that writes by itself, so that claims and commits are the test's.
struct Saver {
    scheduler: Wire,
    worker: Wire,
}

impl Saver {
    fn start(place: &Place, engine_id: &str, run: [u8; 16], layout: u8) -> Self {
        let mut scheduler = Wire::greet(place, Role::Scheduler, engine_id, run);
        let group = v1::Group {
            namespace: vec![3; 16].into(),
            name: "g".into(),
            tokens_per_block: TOKENS,
            window_blocks: 0,
            crosses_hosts: false,
        };
        let open = v1::OpenEngine { groups: vec![group], workers: 1, cancelled_below: 0 };
        assert!(matches!(scheduler.ask(Ask::OpenEngine(open)), Answer::EngineOpened(_)));
        let mut nonce = run;
        nonce[0] ^= 0xff;
        let mut worker = Wire::greet(place, Role::Worker, engine_id, nonce);
        assert!(matches!(worker.ask(register(layout)), Answer::WorkerRegistered(_)));
        assert_eq!(worker.ask(Ask::PoolMapped(v1::PoolMapped {})), Answer::Done(v1::Done::default()));
        Self { scheduler, worker }
    }

    fn claim(&mut self, job: u64, first: u64, count: u64) -> v1::ClaimResult {
        match self.worker.ask(claim(job, first, count)) {
            Answer::ClaimResult(result) => result,
            other => panic!("{other:?}"),
        }
    }

    fn commit(&mut self, claim: u64, written: bool) {
        let answer = self.worker.ask(Ask::Commit(v1::Commit { claim, written }));
        assert_eq!(answer, Answer::Done(v1::Done::default()));
    }

    fn save(&mut self, job: u64, first: u64, count: u64) {
        let claimed = self.claim(job, first, count);
        self.commit(claimed.claim, true);
    }
}

fn register(layout: u8) -> Ask {
    let region = v1::Region {
        base: 4096,
        block_stride: 4096,
        blocks: 4096,
        piece_bytes: 4096,
        piece_offsets: vec![0],
    };
    let group = v1::WorkerGroup {
        namespace: vec![3; 16].into(),
        layout: vec![layout; 16].into(),
        regions: vec![region],
        ..Default::default()
    };
    let method = Method::Mapped.into();
    Ask::RegisterWorker(v1::RegisterWorker { workers: 1, groups: vec![group], method, ..Default::default() })
}

fn named(first: u64, count: u64) -> Bytes {
    hashes(first, count).iter().flat_map(|hash| hash.0).collect::<Vec<_>>().into()
}

fn claim(job: u64, first: u64, count: u64) -> Ask {
    let parent = if first.is_multiple_of(1000) { Bytes::new() } else { named(first - 1, 1) };
    let block_ids = (0..count as u32).collect();
    let group = v1::SaveGroup { group: 0, parent, hashes: named(first, count), block_ids };
    Ask::Claim(v1::Claim { groups: vec![group], job })
}

fn from_p(tokens: u64, wait_ms: u32) -> v1::HandOff {
    v1::HandOff { engine_id: "p".into(), run: RUN.to_vec().into(), tokens, wait_ms }
}

fn lookup(first: u64, count: u64, hand_off: v1::HandOff) -> Ask {
    let groups = vec![v1::LookupGroup { group: 0, hashes: named(first, count) }];
    Ask::Lookup(v1::Lookup {
        groups,
        max_tokens: u64::MAX,
        may_wait: true,
        hand_off: Some(hand_off),
        ..Default::default()
    })
}

/// The tokens of a lookup's answer, whose lease is given back.
fn tokens(wire: &mut Wire, answer: &Answer) -> u64 {
    let Answer::LookupResult(result) = answer else { panic!("{answer:?}") };
    if result.lease > 0 {
        let release = Ask::Release(v1::Release { leases: vec![result.lease] });
        assert_eq!(wire.ask(release), Answer::Done(v1::Done::default()));
    }
    result.tokens
}

/// Asks, and is told that the answer comes later.
fn begins_to_wait(wire: &mut Wire, ask: Ask) -> u64 {
    let id = wire.send(ask);
    match wire.receive() {
        (of, Answer::LookupPending(_)) if of == id => id,
        other => panic!("{other:?}"),
    }
}

/// The answer of a lookup, after any number of words that it takes longer.
fn ends(wire: &mut Wire, id: u64) -> u64 {
    loop {
        match wire.receive() {
            (of, Answer::LookupPending(_)) if of == id => {}
            (of, answer) => {
                assert_eq!(of, id);
                return tokens(wire, &answer);
            }
        }
    }
}

/// A daemon, P, and D which waits for four blocks of it for ever.
fn waiting() -> (Place, Saver, Saver, u64) {
    let place = Place::new(16 << 20);
    let p = Saver::start(&place, "p", RUN, 4);
    let mut d = Saver::start(&place, "d", [2; 16], 4);
    let id = begins_to_wait(&mut d.scheduler, lookup(0, 4, from_p(64, NEVER)));
    (place, p, d, id)
}

#[test]
fn two_lookups_that_come_before_the_claim_get_all_that_is_saved_after_it() {
    let place = Place::new(16 << 20);
    let mut p = Saver::start(&place, "p", RUN, 4);
    p.save(1, 0, 1);
    settle(&address(&place.folder));
    let mut d = Saver::start(&place, "d", [2; 16], 4);
    let mut other = Saver::start(&place, "e", [3; 16], 4);
    // Hits are whole blocks: 70 tokens are four of them.
    let id = begins_to_wait(&mut d.scheduler, lookup(0, 5, from_p(70, NEVER)));
    let of_other = begins_to_wait(&mut other.scheduler, lookup(0, 4, from_p(64, NEVER)));
    assert_eq!(place.metrics()["kvlane_hand_offs_waiting"], 2.0);
    assert_eq!(place.metrics()["kvlane_hand_off_blocks"], 6.0, "the first block is there");
    p.save(2, 1, 2);
    p.save(3, 3, 1);
    assert_eq!(ends(&mut d.scheduler, id), 64);
    assert_eq!(ends(&mut other.scheduler, of_other), 64);
    // And now it is there at once.
    let answer = d.scheduler.ask(lookup(0, 4, from_p(64, NEVER)));
    assert_eq!(tokens(&mut d.scheduler, &answer), 64);
    place.rests_after(&[("complete", 2), ("ready", 1)]);
    assert!(place.metrics()["kvlane_hand_off_wait_seconds_count{outcome=\"complete\"}"] == 2.0);
}

#[test]
fn a_wait_ends_with_the_saver() {
    type End = fn(Saver) -> Option<Wire>;
    let scheduler_goes: End = |p| Some(p.worker);
    let worker_goes: End = |p| Some(p.scheduler);
    let says_goodbye: End = |mut p| {
        p.scheduler.ask(Ask::Bye(v1::Bye {}));
        None
    };
    for goes in [scheduler_goes, worker_goes, says_goodbye] {
        let (place, mut p, mut d, id) = waiting();
        p.save(1, 0, 2);
        settle(&address(&place.folder));
        let _left = goes(p);
        assert_eq!(ends(&mut d.scheduler, id), 32, "what is there is answered");
        place.rests_after(&[("gone", 1)]);
    }
}

#[test]
fn a_wait_ends_with_a_save_that_fails() {
    type End = fn(&Place, &mut Saver);
    let aborts: End = |_, p| {
        let claimed = p.claim(1, 0, 4);
        p.commit(claimed.claim, false);
    };
    let has_no_room: End = |_, p| {
        // Its parent is nowhere.
        let result = p.claim(1, 2, 2);
        assert_eq!(result.outcome.as_ref(), [3, 3]);
    };
    let cancels: End = |_, p| {
        let cancel = Ask::CancelSaves(v1::CancelSaves { below_job: 2, timeout_ms: 1000 });
        assert_eq!(p.scheduler.ask(cancel), Answer::Done(v1::Done::default()));
    };
    let leaves_it_to_another_who_fails: End = |place, p| {
        let mut other = Saver::start(place, "x", [9; 16], 4);
        let claimed = other.claim(1, 0, 4);
        assert_eq!(p.claim(1, 0, 4).outcome.as_ref(), [2, 2, 2, 2]);
        other.commit(claimed.claim, false);
    };
    let loses_a_block_again: End = |place, p| {
        p.save(1, 0, 3);
        settle(&address(&place.folder));
        Tool::connect(&address(&place.folder), PATIENCE).unwrap().drop_namespaces(&[[3; 16]]).unwrap();
    };
    for fails in [aborts, has_no_room, cancels, leaves_it_to_another_who_fails, loses_a_block_again] {
        let (place, mut p, mut d, id) = waiting();
        fails(&place, &mut p);
        assert_eq!(ends(&mut d.scheduler, id), 0);
        place.rests_after(&[("failed", 1)]);
    }
}

/// It ends at once, not when `NEVER` has come.
#[test]
fn a_save_that_failed_before_the_lookup_is_not_waited_for() {
    type End = fn(&Place, &mut Saver);
    let aborts: End = |_, p| {
        let claimed = p.claim(2, 1, 3);
        p.commit(claimed.claim, false);
    };
    let has_no_room: End = |place, p| {
        // All of the pool but the first block is being saved.
        let mut other = Saver::start(place, "x", [9; 16], 4);
        let of_other = other.claim(1, 1000, 4095);
        assert_eq!(p.claim(2, 1, 3).outcome.as_ref(), [3; 3]);
        // What comes to the pool afterwards changes nothing: P does not ask again.
        other.commit(of_other.claim, false);
    };
    let cancels: End = |_, p| {
        let cancel = Ask::CancelSaves(v1::CancelSaves { below_job: 3, timeout_ms: 1000 });
        assert_eq!(p.scheduler.ask(cancel), Answer::Done(v1::Done::default()));
        let Answer::Refused(refused) = p.worker.ask(claim(2, 1, 3)) else { panic!("it was claimed") };
        assert_eq!(refused.reason(), Reason::Cancelled);
    };
    for fails in [aborts, has_no_room, cancels] {
        let place = Place::new(16 << 20);
        let mut p = Saver::start(&place, "p", RUN, 4);
        p.save(1, 0, 1);
        settle(&address(&place.folder));
        fails(&place, &mut p);
        let mut d = Saver::start(&place, "d", [2; 16], 4);
        let id = begins_to_wait(&mut d.scheduler, lookup(0, 4, from_p(64, NEVER)));
        assert_eq!(ends(&mut d.scheduler, id), 16, "what is there is answered");
        place.rests_after(&[("failed", 1)]);
        // P is asked for the prompt again, and this time it comes.
        let claimed = p.claim(5, 1, 3);
        let id = begins_to_wait(&mut d.scheduler, lookup(0, 4, from_p(64, NEVER)));
        p.commit(claimed.claim, true);
        assert_eq!(ends(&mut d.scheduler, id), 64);
        place.rests_after(&[("complete", 1), ("failed", 1)]);
    }
}

/// Its worker asks for the save after all, which is refused.
#[test]
fn a_save_that_was_cancelled_before_the_wait_ends_it_when_it_is_asked_for() {
    let place = Place::new(16 << 20);
    let mut p = Saver::start(&place, "p", RUN, 4);
    let cancel = Ask::CancelSaves(v1::CancelSaves { below_job: 5, timeout_ms: 1000 });
    assert_eq!(p.scheduler.ask(cancel), Answer::Done(v1::Done::default()));
    let mut d = Saver::start(&place, "d", [2; 16], 4);
    let id = begins_to_wait(&mut d.scheduler, lookup(0, 4, from_p(64, NEVER)));
    let Answer::Refused(refused) = p.worker.ask(claim(4, 0, 4)) else { panic!("it was claimed") };
    assert_eq!(refused.reason(), Reason::Cancelled);
    assert_eq!(ends(&mut d.scheduler, id), 0);
    place.rests_after(&[("failed", 1)]);
}

#[test]
fn another_saver_of_the_same_blocks_is_as_good() {
    let (place, mut p, mut d, id) = waiting();
    let mut other = Saver::start(&place, "x", [9; 16], 4);
    // One that gives up before P has asked changes nothing: P may still save them.
    let claimed = other.claim(1, 0, 4);
    other.commit(claimed.claim, false);
    let claimed = other.claim(2, 0, 4);
    assert_eq!(p.claim(1, 0, 4).outcome.as_ref(), [2, 2, 2, 2]);
    other.commit(claimed.claim, true);
    assert_eq!(ends(&mut d.scheduler, id), 64);
    place.rests_after(&[("complete", 1)]);
}

#[test]
fn nobody_waits_for_an_engine_that_saves_nothing_of_it() {
    let place = Place::new(16 << 20);
    let mut p = Saver::start(&place, "p", RUN, 4);
    p.save(1, 0, 2);
    settle(&address(&place.folder));
    let mut d = Saver::start(&place, "d", [2; 16], 4);
    let mut alone = Wire::greet(&place, Role::Scheduler, "alone", [7; 16]);
    let group = v1::Group {
        namespace: vec![3; 16].into(),
        name: "g".into(),
        tokens_per_block: TOKENS,
        window_blocks: 0,
        crosses_hosts: false,
    };
    let open = v1::OpenEngine { groups: vec![group], workers: 1, cancelled_below: 0 };
    assert!(matches!(alone.ask(Ask::OpenEngine(open)), Answer::EngineOpened(_)));
    let _other_cut = Saver::start(&place, "cut", [8; 16], 5);
    let named = |engine_id: &str, run: [u8; 16]| v1::HandOff {
        engine_id: engine_id.into(),
        run: run.to_vec().into(),
        tokens: 64,
        wait_ms: NEVER,
    };
    let restarted = named("p", [0x52; 16]);
    for hand_off in [named("nobody", RUN), restarted, named("alone", [7; 16]), named("cut", [8; 16])] {
        let answer = d.scheduler.ask(lookup(0, 4, hand_off));
        assert_eq!(tokens(&mut d.scheduler, &answer), 32);
    }
    place.rests_after(&[("gone", 3), ("other_blocks", 1)]);
}

/// Each word that it takes longer is answered by more progress: so the wait goes on beyond its first time, with few words.
#[test]
fn progress_moves_the_end_and_without_it_the_wait_stalls() {
    const WAIT: Duration = Duration::from_millis(200);
    const STEPS: u64 = 5;
    let place = Place::new(16 << 20);
    let mut p = Saver::start(&place, "p", RUN, 4);
    let mut d = Saver::start(&place, "d", [2; 16], 4);
    let begun = Instant::now();
    let id = d.scheduler.send(lookup(0, STEPS + 1, from_p(u64::MAX, WAIT.as_millis() as u32)));
    let mut words = 0;
    let found = loop {
        match d.scheduler.receive() {
            (of, Answer::LookupPending(pending)) => {
                assert!(of == id && pending.wait_ms <= WAIT.as_millis() as u32, "{pending:?}");
                if words < STEPS {
                    p.save(words + 1, words, 1);
                }
                words += 1;
            }
            (_, answer) => break tokens(&mut d.scheduler, &answer),
        }
    };
    // A save is three steps or more: claimed, committed, sealed.
    assert_eq!(found, STEPS * u64::from(TOKENS));
    assert!(begun.elapsed() >= WAIT / 2 * STEPS as u32 + WAIT / 2, "{:?}", begun.elapsed());
    assert!(words <= 2 * STEPS + 2, "{words} words");
    place.rests_after(&[("stalled", 1)]);
}

#[test]
fn a_daemon_that_stops_answers_who_waits() {
    let (mut place, mut p, mut d, id) = waiting();
    p.save(1, 0, 1);
    settle(&address(&place.folder));
    let daemon = place.daemon.take().unwrap();
    assert!(daemon.stop(PATIENCE), "it waits for those who wait");
    assert_eq!(ends_without_release(&mut d.scheduler, id), 16);
}

fn ends_without_release(wire: &mut Wire, id: u64) -> u64 {
    loop {
        match wire.receive() {
            (of, Answer::LookupResult(result)) if of == id => return result.tokens,
            (of, Answer::LookupPending(_)) => assert_eq!(of, id),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn who_waits_and_goes_leaves_nothing_behind() {
    let place = Place::new(16 << 20);
    let mut p = Saver::start(&place, "p", RUN, 4);
    p.save(1, 0, 2);
    settle(&address(&place.folder));
    let mut d = Saver::start(&place, "d", [2; 16], 4);
    begins_to_wait(&mut d.scheduler, lookup(0, 4, from_p(64, NEVER)));
    begins_to_wait(&mut d.scheduler, lookup(0, 4, from_p(64, NEVER)));
    let mut tool = Tool::connect(&address(&place.folder), PATIENCE).unwrap();
    assert_eq!(tool.status().unwrap().leased_blocks, 2, "what is there stays meanwhile");
    drop(d);
    place.until("they are gone", |metrics| metrics["kvlane_hand_offs_waiting"] == 0.0);
    place.rests_after(&[("abandoned", 2)]);
    p.save(2, 2, 2);
}

#[test]
fn what_a_hand_off_may_not_say_is_refused_and_numbers_of_any_size_are_taken() {
    let place = Place::new(16 << 20);
    let mut p = Saver::start(&place, "p", RUN, 4);
    let mut d = Saver::start(&place, "d", [2; 16], 4);
    let nameless = v1::HandOff { engine_id: String::new(), ..from_p(64, 1) };
    let long = v1::HandOff { engine_id: "p".repeat(513), ..from_p(64, 1) };
    let short_run = v1::HandOff { run: vec![1; 15].into(), ..from_p(64, 1) };
    for (bad, sentence) in [
        (nameless, "the engine id of a hand-off has 1 to 512 bytes, this one 0"),
        (long, "the engine id of a hand-off has 1 to 512 bytes, this one 513"),
        (short_run, "the run of a hand-off has 16 bytes, this one 15"),
    ] {
        let Answer::Refused(refused) = d.scheduler.ask(lookup(0, 4, bad)) else { panic!("it was taken") };
        assert_eq!((refused.reason(), refused.sentence.as_str()), (Reason::Invalid, sentence));
    }
    // Nothing to wait for, no time to wait, and who may not wait.
    for hand_off in [from_p(0, NEVER), from_p(15, NEVER), from_p(64, 0)] {
        let answer = d.scheduler.ask(lookup(0, 4, hand_off));
        assert_eq!(tokens(&mut d.scheduler, &answer), 0);
    }
    let Ask::Lookup(hasty) = lookup(0, 4, from_p(64, NEVER)) else { unreachable!() };
    let answer = d.scheduler.ask(Ask::Lookup(v1::Lookup { may_wait: false, ..hasty }));
    assert_eq!(tokens(&mut d.scheduler, &answer), 0);
    // More tokens than hashes: all that is named is waited for, 30 s at most.
    let id = d.scheduler.send(lookup(0, 4, from_p(u64::MAX, NEVER)));
    let (_, Answer::LookupPending(pending)) = d.scheduler.receive() else { panic!("nothing is waited for") };
    assert_eq!(pending.wait_ms, 30_000);
    p.save(1, 0, 4);
    assert_eq!(ends(&mut d.scheduler, id), 64);
    place.rests_after(&[("complete", 1), ("ready", 2), ("stalled", 1)]);
}

/// Beyond 4096 of one session they are answered at once.
#[test]
fn any_number_of_lookups_is_answered() {
    const LOOKUPS: u64 = 5000;
    const WAITING_MAX: u64 = 4096;
    let place = Place::new(16 << 20);
    let mut p = Saver::start(&place, "p", RUN, 4);
    let mut d = Saver::start(&place, "d", [2; 16], 4);
    let mut asking = d.scheduler.stream.try_clone().unwrap();
    let asker = std::thread::spawn(move || {
        for id in 100..100 + LOOKUPS {
            let body = Some(lookup(0, 4, from_p(64, NEVER)));
            asking.write_all(&encode_frame(&v1::Request { id, body })).unwrap();
        }
    });
    let (mut waiting, mut at_once) = (0, 0);
    while waiting < LOOKUPS || at_once < LOOKUPS - WAITING_MAX {
        match d.scheduler.receive().1 {
            Answer::LookupPending(_) => waiting += 1,
            Answer::LookupResult(result) if result.tokens == 0 => at_once += 1,
            other => panic!("{other:?}"),
        }
    }
    asker.join().unwrap();
    p.save(1, 0, 4);
    let mut leases = Vec::new();
    while leases.len() < WAITING_MAX as usize {
        match d.scheduler.receive().1 {
            Answer::LookupPending(_) => {}
            Answer::LookupResult(result) if result.tokens == 64 => leases.push(result.lease),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(d.scheduler.ask(Ask::Release(v1::Release { leases })), Answer::Done(v1::Done::default()));
    place.rests_after(&[("complete", WAITING_MAX), ("too_many", LOOKUPS - WAITING_MAX)]);
}
