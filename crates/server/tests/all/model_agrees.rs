//! The simulation of the client's links has a model of the daemon. Here the model and a daemon get the same requests, and must
//! give the same kinds of answers with the same numbers. Else the simulation would test the links against a daemon that does
//! not exist.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail like tests")]

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
};

use crate::model::{Run, Said};
use crate::support::*;
use kvlane_proto::{
    FrameReader, WIRE_MAX, encode_frame,
    packed::CHANGE_BYTES,
    v1::{self, hello::Role, register_worker::Method, reply::Body as Answer, request::Body as Ask},
};

/// One connection to the real daemon.
struct Line {
    stream: UnixStream,
    reader: FrameReader,
    id: u64,
}

impl Line {
    fn new(path: &std::path::Path) -> Self {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Self { stream, reader: FrameReader::default(), id: 0 }
    }

    fn ask(&mut self, ask: &Ask) -> Answer {
        self.id += 1;
        let request = v1::Request { id: self.id, body: Some(ask.clone()) };
        self.stream.write_all(&encode_frame(&request)).unwrap();
        self.hear()
    }

    fn hear(&mut self) -> Answer {
        loop {
            if let Some(v1::Reply { body: Some(answer), .. }) = self.reader.next_message().unwrap() {
                return answer;
            }
            let mut received = [0; 4096];
            let count = self.stream.read(&mut received).unwrap();
            assert!(count > 0, "the daemon hung up");
            self.reader.push(&received[..count]);
        }
    }
}

/// What both have to agree on: kinds and numbers, but for names, and for where blocks lie.
fn kind(answer: &Answer) -> String {
    match answer {
        Answer::Refused(refused) => format!("Refused {:?}", refused.reason()),
        Answer::Welcome(welcome) => format!("Welcome {} {}", welcome.wire, welcome.pool_bytes),
        Answer::WorkerRegistered(registered) => format!("WorkerRegistered {:?}", registered.method()),
        Answer::PoolDescriptor(described) => format!("PoolDescriptor {}", described.bytes),
        Answer::LookupResult(result) => {
            let group =
                |of: &v1::HitGroup| (of.group, of.first_block, of.pages.len(), of.workers, of.stored_blocks);
            let groups: Vec<_> = result.groups.iter().map(group).collect();
            format!("LookupResult {} {} {} {groups:?}", result.tokens, result.lease > 0, result.ready)
        }
        Answer::ClaimResult(result) => {
            format!("ClaimResult {:?} {} {}", result.outcome, result.pages.len(), result.claim)
        }
        Answer::JournalEntries(told) => {
            // Several threads seal.
            let mut entries: Vec<&[u8]> = told.entries.chunks(CHANGE_BYTES).collect();
            entries.sort_unstable();
            format!("JournalEntries {} {} {entries:?}", told.start_again, told.has_more)
        }
        other => format!("{other:?}"),
    }
}

/// The question for what came after the last answer.
fn going_on(ask: &Ask, cursor: u64) -> Ask {
    match ask {
        Ask::ReadJournal(read) => Ask::ReadJournal(v1::ReadJournal { cursor, ..*read }),
        other => other.clone(),
    }
}

fn note_cursor(answer: &Answer, cursor: &mut u64) {
    if let Answer::JournalEntries(told) = answer {
        *cursor = told.cursor;
    }
}

fn hello(role: Role, nonce: u8) -> Ask {
    Ask::Hello(v1::Hello {
        wire_min: 1,
        wire_max: WIRE_MAX,
        client: "model".into(),
        role: role.into(),
        engine_id: "e".into(),
        process_nonce: vec![nonce; 16].into(),
        live_leases: Vec::new(),
    })
}

fn named(first: u64, count: u64) -> bytes::Bytes {
    hashes(first, count).iter().flat_map(|hash| hash.0).collect::<Vec<_>>().into()
}

fn groups(first: u64, count: u64) -> Vec<v1::SaveGroup> {
    let group = |group| v1::SaveGroup {
        group,
        parent: bytes::Bytes::new(),
        hashes: named(first, count),
        block_ids: (0..count as u32).collect(),
    };
    vec![group(0), group(1)]
}

fn lookup(first: u64, count: u64, max_tokens: u64) -> Ask {
    let group = |group| v1::LookupGroup { group, hashes: named(first, count) };
    Ask::Lookup(v1::Lookup { groups: vec![group(0), group(1)], max_tokens, ..Default::default() })
}

fn register() -> Ask {
    let region =
        v1::Region { base: 4096, block_stride: 4096, blocks: 64, piece_bytes: 4096, piece_offsets: vec![0] };
    let group = |namespace: u8| v1::WorkerGroup {
        namespace: vec![namespace; 16].into(),
        layout: vec![9; 16].into(),
        regions: vec![region.clone()],
        ..Default::default()
    };
    Ask::RegisterWorker(v1::RegisterWorker {
        rank: 0,
        workers: 1,
        groups: vec![group(3), group(4)],
        fence_address: 4096,
        method: Method::Mapped.into(),
        gpu: None,
    })
}

fn open(cancelled_below: u64) -> Ask {
    let group = |namespace: u8, window_blocks| v1::Group {
        namespace: vec![namespace; 16].into(),
        name: "g".into(),
        tokens_per_block: 16,
        window_blocks,
        crosses_hosts: false,
    };
    let groups = vec![group(3, 0), group(4, 1)];
    Ask::OpenEngine(v1::OpenEngine { groups, workers: 1, cancelled_below })
}

fn claim(job: u64, first: u64, count: u64) -> Ask {
    Ask::Claim(v1::Claim { groups: groups(first, count), job })
}

fn commit(claim: u64, written: bool) -> Ask {
    Ask::Commit(v1::Commit { claim, written })
}

#[test]
fn the_model_of_the_daemon_answers_as_the_daemon() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let _daemon = start(&address);
    let path = folder.path().join("kvlane.sock");
    let mut lines = [Line::new(&path), Line::new(&path)];
    let mut model = Run::new([1; 16], 16 << 20);
    let settle = Ask::Settle(v1::Settle { timeout_ms: 20_000 });
    let journal = |max| Ask::ReadJournal(v1::ReadJournal { cursor: 0, max });
    let mut differ = Vec::new();
    let (scheduler, worker) = (0, 1);
    let talk = [
        (scheduler, hello(Role::Scheduler, 1)),
        (scheduler, Ask::Release(v1::Release { leases: vec![1] })),
        (scheduler, journal(100)),
        (scheduler, open(0)),
        (scheduler, journal(100)),
        (scheduler, journal(100)),
        (scheduler, lookup(0, 2, 32)),
        (worker, hello(Role::Worker, 2)),
        (worker, open(0)),
        (worker, claim(1, 0, 2)),
        (worker, register()),
        (worker, Ask::MapPool(v1::MapPool { writable: true })),
        (worker, Ask::PoolMapped(v1::PoolMapped {})),
        (scheduler, lookup(0, 2, 32)),
        (scheduler, register()),
        (scheduler, Ask::MapPool(v1::MapPool { writable: true })),
        (worker, claim(1, 0, 3)),
        (worker, claim(2, 0, 4)),
        (worker, commit(1, true)),
        (worker, commit(1, true)),
        (worker, commit(2, false)),
        (worker, settle.clone()),
        (worker, journal(100)),
        (scheduler, journal(100)),
        (scheduler, journal(100)),
        (scheduler, lookup(0, 3, 48)),
        (scheduler, lookup(0, 3, 47)),
        (scheduler, lookup(0, 4, 1000)),
        (scheduler, lookup(1, 2, 32)),
        (scheduler, lookup(0, 3, 0)),
        (worker, claim(3, 0, 4)),
        (scheduler, Ask::CancelSaves(v1::CancelSaves { below_job: 4, timeout_ms: 1000 })),
        (worker, commit(3, true)),
        (worker, claim(3, 8, 1)),
        (worker, claim(4, 8, 1)),
        (worker, commit(4, true)),
        (worker, Ask::Load(v1::Load::default())),
        (worker, lookup(0, 1, 16)),
        (worker, settle),
        (scheduler, journal(3)),
        (scheduler, journal(100)),
        (scheduler, lookup(8, 1, 16)),
        (scheduler, Ask::Release(v1::Release { leases: vec![1, 2] })),
        (scheduler, Ask::Heartbeat(v1::Heartbeat { live_leases: vec![3] })),
        (scheduler, open(9)),
        (worker, claim(8, 9, 1)),
        (worker, claim(9, 9, 1)),
        (worker, Ask::Bye(v1::Bye {})),
        (scheduler, Ask::Bye(v1::Bye {})),
    ];
    let (mut real_cursor, mut modelled_cursor) = (0, 0);
    for (number, (line, ask)) in talk.into_iter().enumerate() {
        let answer = lines[line].ask(&going_on(&ask, real_cursor));
        note_cursor(&answer, &mut real_cursor);
        let real = kind(&answer);
        // The model seals at once.
        if matches!(ask, Ask::Settle(_)) {
            continue;
        }
        let modelled = match model.ask(line as u64 + 1, &going_on(&ask, modelled_cursor), 0) {
            Said::Answer(answer) => {
                note_cursor(&answer, &mut modelled_cursor);
                kind(&answer)
            }
            Said::Gate { below, .. } => kind(&Run::gate_answer(model.is_gate_closed(line as u64 + 1, below))),
            said => panic!("nobody copies or waits here: {said:?}"),
        };
        if real != modelled {
            differ.push(format!("request {number}, {ask:?}: the daemon says {real}, its model {modelled}"));
        }
    }
    assert!(differ.is_empty(), "{}", differ.join("\n"));
}

/// Both make the same lookups wait for what the engine saves itself, and end the waits with the same requests.
#[test]
fn the_model_of_the_daemon_waits_as_the_daemon() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let _daemon = start(&address);
    let path = folder.path().join("kvlane.sock");
    let mut lines = [Line::new(&path), Line::new(&path)];
    let mut model = Run::new([1; 16], 16 << 20);
    let (scheduler, worker) = (0, 1);
    let waits = |first, count, tokens, run: u8, wait_ms| {
        let Ask::Lookup(lookup) = lookup(first, count, tokens) else { unreachable!() };
        let run = vec![run; 16].into();
        let hand_off = Some(v1::HandOff { engine_id: "e".into(), run, tokens: u64::MAX, wait_ms });
        Ask::Lookup(v1::Lookup { may_wait: true, hand_off, ..lookup })
    };
    let cancel = |below_job| Ask::CancelSaves(v1::CancelSaves { below_job, timeout_ms: 1000 });
    let talk = [
        (scheduler, hello(Role::Scheduler, 1)),
        (scheduler, open(0)),
        (scheduler, waits(0, 2, 32, 1, 10_000)),
        (worker, hello(Role::Worker, 2)),
        (worker, register()),
        (worker, Ask::PoolMapped(v1::PoolMapped {})),
        // Another life of the engine, no time, nothing to wait for.
        (scheduler, waits(0, 2, 32, 9, 10_000)),
        (scheduler, waits(0, 2, 32, 1, 0)),
        (scheduler, waits(0, 2, 15, 1, 10_000)),
        // Saved, given back, cancelled, too late, and dropped with its worker.
        (scheduler, waits(0, 2, 32, 1, 10_000)),
        (worker, claim(1, 0, 2)),
        (worker, commit(1, true)),
        (scheduler, waits(0, 2, 32, 1, 10_000)),
        (scheduler, waits(0, 4, 64, 1, 60_000)),
        (worker, claim(2, 0, 4)),
        (worker, commit(2, false)),
        (scheduler, waits(0, 4, 64, 1, 10_000)),
        (scheduler, cancel(5)),
        (scheduler, waits(0, 4, 64, 1, 10_000)),
        (worker, claim(4, 0, 4)),
        (scheduler, waits(0, 4, 64, 1, 10_000)),
        (worker, Ask::Bye(v1::Bye {})),
        (scheduler, waits(0, 4, 64, 1, 10_000)),
        (scheduler, Ask::Bye(v1::Bye {})),
    ];
    let (mut differ, mut waiting) = (Vec::new(), 0);
    for (number, (line, ask)) in talk.into_iter().enumerate() {
        let mut real = vec![kind(&lines[line].ask(&ask))];
        let mut modelled = vec![match model.ask(line as u64 + 1, &ask, 0) {
            Said::Answer(answer) => kind(&answer),
            Said::Gate { below, .. } => kind(&Run::gate_answer(model.is_gate_closed(line as u64 + 1, below))),
            Said::Waits { pending, .. } => {
                waiting += 1;
                kind(&pending)
            }
            Said::Copy(copy) => panic!("nobody copies here: {copy:?}"),
        }];
        for (_, answer) in model.turn_waits(0) {
            modelled.push(kind(&answer));
            real.push(kind(&lines[scheduler].hear()));
        }
        // Who cancels while it waits hears of both, in either order.
        real.sort();
        modelled.sort();
        if real != modelled {
            differ
                .push(format!("request {number}, {ask:?}: the daemon says {real:?}, its model {modelled:?}"));
        }
    }
    assert!(differ.is_empty(), "{}", differ.join("\n"));
    assert_eq!((waiting, model.waits()), (5, 0));
}
