//! A test that walks every call in every kind of session, over both transports, of a daemon that serves and of one that is
//! stopping. The expected answers are written out here a second time, apart from the code that decides them.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    os::unix::net::UnixStream,
    sync::{LazyLock, atomic::Ordering},
    time::Duration,
};

use bytes::Bytes;
use kvlane_memory::{ArenaOptions, HugePages, Numa};
use kvlane_proto::{
    Address, FrameReader, WIRE_MAX, encode_frame,
    v1::{self, hello::Role, register_worker::Method, reply::Body as Answer, request::Body as Ask},
};

use crate::{Daemon, ServeOptions, calls::table::CALLS, peer::Stream, session, shared::Phase};

const PATIENCE: Duration = Duration::from_secs(60);

/// The state of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Connected, but without a Hello.
    NoHello,
    Tool,
    /// A scheduler that has not opened its engine.
    Scheduler,
    Opened,
    /// A worker that has not registered its memory.
    Worker,
    Mapped,
    ProcessVm,
}

use Kind::{Mapped, NoHello, Opened, ProcessVm, Scheduler, Tool, Worker};

const KINDS: [Kind; 7] = [NoHello, Tool, Scheduler, Opened, Worker, Mapped, ProcessVm];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Transport {
    Unix,
    Tcp,
}

/// Expected answers of a call.
#[derive(Debug, Clone)]
struct Expected {
    call: &'static str,
    /// The sessions that may use it.
    kinds: &'static [Kind],
    /// The sentence that all other sessions get.
    sentence: &'static str,
    transports: &'static [Transport],
    phases: &'static [Phase],
}

const fn expected(
    call: &'static str,
    (kinds, sentence): (&'static [Kind], &'static str),
    transports: &'static [Transport],
    phases: &'static [Phase],
) -> Expected {
    Expected { call, kinds, sentence, transports, phases }
}

const ANY: (&[Kind], &str) = (&[Tool, Scheduler, Opened, Worker, Mapped, ProcessVm], "");
const GREETING: (&[Kind], &str) = (&[NoHello], "this connection has said Hello already");
const TOOLS: (&[Kind], &str) = (&[Tool], "engines drop nothing that others may share: use a tool");
const RECORDERS: (&[Kind], &str) = (&[Tool], "engines read nothing of others' requests: use a tool");
const SCHEDULERS: (&[Kind], &str) = (&[Scheduler, Opened], "only the scheduler opens an engine");
const OPENED: (&[Kind], &str) = (&[Opened], "open the engine's groups first");
const SHARING: (&[Kind], &str) = (&[Worker, Mapped, ProcessVm], "only workers share memory");
const REGISTERING: (&[Kind], &str) = (&[Worker, Mapped, ProcessVm], "only workers register memory");
const REGISTERED: (&[Kind], &str) = (&[Mapped, ProcessVm], "register the worker's memory first");

const UNIX: &[Transport] = &[Transport::Unix];
const BOTH: &[Transport] = &[Transport::Unix, Transport::Tcp];
const SERVING: &[Phase] = &[Phase::Serving];
const ALWAYS: &[Phase] = &[Phase::Serving, Phase::Stopping];

/// Call, sessions, transports, phases. In the order of the .proto file.
const EXPECTED: [Expected; 21] = [
    expected("Hello", GREETING, BOTH, SERVING),
    expected("OpenEngine", SCHEDULERS, UNIX, SERVING),
    expected("RegisterWorker", REGISTERING, UNIX, SERVING),
    expected("MapPool", ANY, UNIX, ALWAYS),
    expected("PoolMapped", ANY, UNIX, SERVING),
    expected("Lookup", OPENED, UNIX, SERVING),
    expected("Release", OPENED, UNIX, ALWAYS),
    expected("Save", REGISTERED, UNIX, SERVING),
    expected("Claim", REGISTERED, UNIX, SERVING),
    expected("Commit", REGISTERED, UNIX, ALWAYS),
    expected("Heartbeat", OPENED, UNIX, ALWAYS),
    expected("Settle", ANY, UNIX, ALWAYS),
    expected("DropNamespaces", TOOLS, UNIX, ALWAYS),
    expected("GetStatus", ANY, BOTH, ALWAYS),
    expected("Bye", ANY, BOTH, ALWAYS),
    expected("Load", REGISTERED, UNIX, ALWAYS),
    expected("ShareChunks", SHARING, UNIX, SERVING),
    expected("CancelSaves", OPENED, UNIX, ALWAYS),
    expected("ReadJournal", OPENED, UNIX, ALWAYS),
    expected("RequestsEnded", OPENED, UNIX, ALWAYS),
    expected("ReadRecording", RECORDERS, UNIX, ALWAYS),
];

/// A request of this call that can be carried out, or is refused only because of what the session holds.
fn ask(call: &str, at: &Case) -> Ask {
    match call {
        "Hello" => hello(Role::Tool, at),
        "OpenEngine" => open_engine(),
        "RegisterWorker" => register(Method::Mapped, at),
        "MapPool" => Ask::MapPool(v1::MapPool { writable: false }),
        "PoolMapped" => Ask::PoolMapped(v1::PoolMapped {}),
        "Lookup" => {
            let groups = vec![v1::LookupGroup { group: 0, hashes: vec![5; 32].into() }];
            Ask::Lookup(v1::Lookup { groups, max_tokens: 32, may_wait: true, ..Default::default() })
        }
        "Release" => Ask::Release(v1::Release { leases: vec![7] }),
        "Save" => Ask::Save(v1::Save { groups: Vec::new(), epoch: 1, event: None, job: 1 }),
        "Claim" => Ask::Claim(v1::Claim { groups: Vec::new(), job: 1 }),
        "Commit" => Ask::Commit(v1::Commit { claim: 7, written: true }),
        "Heartbeat" => Ask::Heartbeat(v1::Heartbeat { live_leases: Vec::new() }),
        "Settle" => Ask::Settle(v1::Settle { timeout_ms: 60_000 }),
        "DropNamespaces" => Ask::DropNamespaces(v1::DropNamespaces { namespaces: Vec::new() }),
        "GetStatus" => Ask::GetStatus(v1::GetStatus {}),
        "Bye" => Ask::Bye(v1::Bye {}),
        "Load" => Ask::Load(v1::Load::default()),
        "ShareChunks" => Ask::ShareChunks(v1::ShareChunks::default()),
        "ReadJournal" => Ask::ReadJournal(v1::ReadJournal { cursor: 0, max: 1 }),
        "RequestsEnded" => Ask::RequestsEnded(v1::RequestsEnded::default()),
        "ReadRecording" => Ask::ReadRecording(v1::ReadRecording::default()),
        "CancelSaves" => Ask::CancelSaves(v1::CancelSaves { below_job: 1, timeout_ms: 0 }),
        other => panic!("{other} is no call"),
    }
}

/// The answer to a call that the table admits: its name, or a refusal of the call's own.
fn served(call: &str, kind: Kind, transport: Transport) -> &'static str {
    match (call, kind) {
        ("Hello", _) => "Welcome",
        ("OpenEngine", _) => "EngineOpened",
        ("RegisterWorker", _) => "WorkerRegistered",
        ("MapPool", _) => "PoolDescriptor",
        ("Lookup", _) => "LookupResult",
        ("ReadJournal", _) => "JournalEntries",
        ("ReadRecording", _) => "RecordedRequests",
        ("Save", Mapped) => "NOT_ALLOWED: this worker saves by mapping: ask for claims",
        ("Save" | "Claim", _) => {
            "UNKNOWN: engine 'the engine' is not ready: its scheduler or other workers are missing"
        }
        ("Commit", _) => "UNKNOWN: claim 7 is not open",
        ("GetStatus", _) if transport == Transport::Tcp => "a part of Status",
        ("GetStatus", _) => "Status",
        ("Load", _) => "NOT_ALLOWED: this worker loads by itself, from its mapping of the pool",
        ("ShareChunks", _) => "NOT_ALLOWED: the worker's blocks lie on a GPU, and this daemon has none",
        _ => "Done",
    }
}

/// The answer that a row expects, by its columns in the order in which a session checks them.
fn verdict(row: &Expected, at: &Case) -> String {
    let is_greeting = row.call == "Hello";
    if is_greeting && at.kind != NoHello {
        return format!("INVALID: {}", row.sentence);
    }
    if !is_greeting && at.kind == NoHello {
        return "INVALID: the first message of a connection must be Hello".into();
    }
    if !row.transports.contains(&at.transport) {
        return "NOT_ALLOWED: over TCP only status is served: use the Unix socket".into();
    }
    if !row.phases.contains(&at.phase) {
        let what = if is_greeting { "sessions" } else { "work" };
        return format!("STOPPING: the daemon is stopping and takes no new {what}");
    }
    if !row.kinds.contains(&at.kind) {
        return format!("NOT_ALLOWED: {}", row.sentence);
    }
    served(row.call, at.kind, at.transport).into()
}

/// A daemon's answer to one call in one case.
#[derive(Debug)]
struct Cell {
    call: &'static str,
    case: Case,
    answered: String,
    /// Whether the daemon closed the connection after the answer.
    is_closed: bool,
}

/// A session, its transport, and the phase of the daemon.
#[derive(Debug)]
struct Case {
    kind: Kind,
    transport: Transport,
    phase: Phase,
    /// Unique; names the engine and the process.
    number: u32,
    /// A worker's fence: its nonce and epoch 1.
    fence: Box<[u8; 24]>,
}

impl Case {
    fn new(kind: Kind, transport: Transport, phase: Phase, number: u32) -> Self {
        let mut fence = Box::new([0; 24]);
        fence[..4].copy_from_slice(&number.to_le_bytes());
        fence[16] = 1;
        Self { kind, transport, phase, number, fence }
    }

    fn engine_id(&self) -> String {
        format!("engine {}", self.number)
    }
}

fn hello(role: Role, at: &Case) -> Ask {
    let engine_id = if role == Role::Tool { String::new() } else { at.engine_id() };
    Ask::Hello(v1::Hello {
        wire_min: WIRE_MAX,
        wire_max: WIRE_MAX,
        client: "walk".into(),
        role: role.into(),
        engine_id,
        process_nonce: Bytes::copy_from_slice(&at.fence[..16]),
        live_leases: Vec::new(),
    })
}

fn open_engine() -> Ask {
    let group = v1::Group {
        namespace: vec![3; 16].into(),
        name: "walk".into(),
        tokens_per_block: 16,
        window_blocks: 0,
        crosses_hosts: false,
    };
    Ask::OpenEngine(v1::OpenEngine { groups: vec![group], workers: 1, cancelled_below: 0 })
}

fn register(method: Method, at: &Case) -> Ask {
    let region =
        v1::Region { base: 4096, block_stride: 4096, blocks: 4, piece_bytes: 4096, piece_offsets: vec![0] };
    let group = v1::WorkerGroup {
        namespace: vec![3; 16].into(),
        layout: vec![4; 16].into(),
        regions: vec![region],
        ..Default::default()
    };
    Ask::RegisterWorker(v1::RegisterWorker {
        rank: 0,
        workers: 1,
        groups: vec![group],
        fence_address: &raw const *at.fence as u64,
        method: method.into(),
        gpu: None,
    })
}

/// The peer's end of a connection.
struct Connection {
    stream: Stream,
    reader: FrameReader,
}

impl Connection {
    fn open(daemon: &Daemon, at: &Case) -> Self {
        let (ours, theirs) = match at.transport {
            Transport::Tcp => {
                // The threads of ended connections give their slots back in a moment.
                while daemon.shared.tcp_slots.take().is_none() {
                    std::thread::yield_now();
                }
                let listener = TcpListener::bind("127.0.0.1:0").unwrap();
                let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
                (Stream::Tcp(ours), Stream::Tcp(listener.accept().unwrap().0))
            }
            Transport::Unix => {
                let (ours, theirs) = UnixStream::pair().unwrap();
                (Stream::Unix(ours), Stream::Unix(theirs))
            }
        };
        ours.set_timeouts(Some(PATIENCE), PATIENCE).unwrap();
        session::start(theirs, std::sync::Arc::clone(&daemon.shared));
        let mut connection = Self { stream: ours, reader: FrameReader::default() };
        let made = |answer: Option<Answer>, wanted: &str| assert_eq!(name(&answer.unwrap()), wanted);
        match at.kind {
            NoHello => {}
            Tool => made(connection.ask(hello(Role::Tool, at)), "Welcome"),
            Scheduler | Opened => made(connection.ask(hello(Role::Scheduler, at)), "Welcome"),
            Worker | Mapped | ProcessVm => made(connection.ask(hello(Role::Worker, at)), "Welcome"),
        }
        match at.kind {
            Opened => made(connection.ask(open_engine()), "EngineOpened"),
            Mapped => made(connection.ask(register(Method::Mapped, at)), "WorkerRegistered"),
            ProcessVm => made(connection.ask(register(Method::ProcessVm, at)), "WorkerRegistered"),
            _ => {}
        }
        connection
    }

    /// None where the connection was closed instead.
    fn ask(&mut self, body: Ask) -> Option<Answer> {
        let request = encode_frame(&v1::Request { id: 1, body: Some(body) });
        let sent = match &mut self.stream {
            Stream::Unix(stream) => stream.write_all(&request),
            Stream::Tcp(stream) => stream.write_all(&request),
        };
        sent.ok()?;
        let mut scratch = [0; 4096];
        loop {
            if let Some(reply) = self.reader.next_message::<v1::Reply>().unwrap() {
                return reply.body;
            }
            let received = match &mut self.stream {
                Stream::Unix(stream) => stream.read(&mut scratch),
                Stream::Tcp(stream) => stream.read(&mut scratch),
            };
            match received {
                Ok(0) => return None,
                Ok(count) => self.reader.push(&scratch[..count]),
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return None,
                Err(error) => panic!("the daemon neither answers nor closes: {error}"),
            }
        }
    }
}

/// An answer in a few words: its name, or why it is a refusal.
fn name(answer: &Answer) -> String {
    match answer {
        Answer::Refused(refused) => format!("{}: {}", refused.reason().as_str_name(), refused.sentence),
        Answer::Welcome(_) => "Welcome".into(),
        Answer::EngineOpened(_) => "EngineOpened".into(),
        Answer::WorkerRegistered(_) => "WorkerRegistered".into(),
        Answer::PoolDescriptor(_) => "PoolDescriptor".into(),
        Answer::Done(_) => "Done".into(),
        Answer::LookupResult(_) => "LookupResult".into(),
        Answer::SaveResult(_) => "SaveResult".into(),
        Answer::ClaimResult(_) => "ClaimResult".into(),
        Answer::Status(status) if status.is_partial => "a part of Status".into(),
        Answer::Status(_) => "Status".into(),
        Answer::LoadResult(_) => "LoadResult".into(),
        Answer::LookupPending(_) => "LookupPending".into(),
        Answer::JournalEntries(_) => "JournalEntries".into(),
        Answer::RecordedRequests(_) => "RecordedRequests".into(),
    }
}

/// A daemon without sessions, for tests of this crate.
pub(crate) fn daemon(folder: &tempfile::TempDir) -> Daemon {
    let options = ServeOptions {
        arena: ArenaOptions { bytes: 1 << 20, hugepages: HugePages::Off, numa: Numa::Off, threads: 1 },
        listen: vec![Address::Unix(folder.path().join("kvlane.sock"))],
        http: None,
        http_hosts: Vec::new(),
        seal_threads: 1,
        scrub_bytes_per_s: 0,
        lease_ttl: Duration::from_secs(60),
        policy: kvlane_policy::Choice::default(),
        otlp: None,
        sessions_max: 64,
        hit_windows: kvlane_policy::Window::DEFAULT.into(),
        gpu_driver: None,
        rails: kvlane_gpu::RailOptions::default(),
        save_link_share: 0.5,
        ssd: None,
        cluster: None,
        fetch_wait: Duration::from_secs(1),
        copies_share: 0.25,
        calibrate: false,
    };
    Daemon::start(&options, &|_| {}).unwrap()
}

/// The answers of a daemon to every call in every case. The walk is made once for all tests.
static WALKED: LazyLock<Vec<Cell>> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    let daemon = daemon(&folder);
    let mut cells = Vec::new();
    // Engines do not connect over TCP.
    for (transport, kinds) in [(Transport::Unix, &KINDS[..]), (Transport::Tcp, &KINDS[..2])] {
        for (kind, phase) in kinds.iter().flat_map(|kind| [(*kind, Phase::Serving), (*kind, Phase::Stopping)])
        {
            for row in &EXPECTED {
                let case = Case::new(kind, transport, phase, cells.len() as u32 + 1);
                cells.push(step(&daemon, row.call, case));
            }
        }
    }
    assert!(daemon.stop(PATIENCE), "nothing is left under way");
    cells
});

fn set_phase(daemon: &Daemon, phase: Phase) {
    daemon.shared.stopping.store(phase == Phase::Stopping, Ordering::Release);
}

fn step(daemon: &Daemon, call: &'static str, case: Case) -> Cell {
    let mut connection = Connection::open(daemon, &case);
    set_phase(daemon, case.phase);
    let answered = name(&connection.ask(ask(call, &case)).expect("every call is answered"));
    let answered = answered.replace(&case.engine_id(), "the engine");
    // A session that is still connected gets an answer, also without a Hello. After a Bye it holds nothing.
    let is_closed = connection.ask(Ask::Bye(v1::Bye {})).is_none();
    set_phase(daemon, Phase::Serving);
    Cell { call, case, answered, is_closed }
}

/// The cells that the rows do not expect.
fn differences(rows: &[Expected], cells: &[Cell]) -> Vec<String> {
    let differs = |cell: &&Cell| {
        let row = rows.iter().find(|row| row.call == cell.call);
        row.is_none_or(|row| verdict(row, &cell.case) != cell.answered)
    };
    let text = |cell: &Cell| format!("{cell:?}");
    cells.iter().filter(differs).map(text).collect()
}

#[test]
fn every_call_is_answered_as_its_row_says() {
    assert_eq!(
        EXPECTED.map(|row| row.call),
        CALLS.map(|row| row.name),
        "each call is expected to do something"
    );
    assert_eq!(WALKED.len(), CALLS.len() * 2 * (KINDS.len() + 2));
    assert_eq!(differences(&EXPECTED, &WALKED), [""; 0]);
}

/// A refused Hello and a Bye, also one before any Hello, end the connection, and nothing else does.
#[test]
fn only_a_refused_hello_and_a_bye_close_the_connection() {
    for cell in WALKED.iter() {
        let was_refused = cell.call == "Hello" && cell.answered != "Welcome";
        assert_eq!(cell.is_closed, cell.call == "Bye" || was_refused, "{cell:?}");
    }
}

/// The control of the walk: one word changed in any row of the table is found, and at that call.
#[test]
fn a_row_that_is_wrong_is_found() {
    for at in 0..EXPECTED.len() {
        let call = EXPECTED[at].call;
        let mut changed: Vec<Vec<Expected>> = Vec::new();
        let mut with = |change: &dyn Fn(&mut Expected)| {
            let mut rows = EXPECTED.to_vec();
            change(&mut rows[at]);
            changed.push(rows);
        };
        with(&|row| row.phases = if row.phases.contains(&Phase::Stopping) { SERVING } else { ALWAYS });
        with(&|row| row.transports = if row.transports.contains(&Transport::Tcp) { UNIX } else { BOTH });
        if call != "Hello" {
            // Each kind of session once: taken from those that may use the call, or added to them.
            for kind in &KINDS[1..] {
                with(&|row| {
                    let mut kinds = row.kinds.to_vec();
                    match kinds.iter().position(|other| other == kind) {
                        Some(position) => drop(kinds.remove(position)),
                        None => kinds.push(*kind),
                    }
                    row.kinds = kinds.leak();
                });
            }
        }
        for rows in changed {
            let found = differences(&rows, &WALKED);
            let named = format!("call: \"{call}\"");
            assert!(!found.is_empty() && found.iter().all(|cell| cell.contains(&named)), "{call}: {found:?}");
        }
    }
}

/// Over TCP only tools are greeted. The daemon refuses the others with that reason even while it is stopping.
#[test]
fn only_tools_are_greeted_over_tcp() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = daemon(&folder);
    for (phase, role) in ALWAYS.iter().flat_map(|phase| [(*phase, Role::Scheduler), (*phase, Role::Worker)]) {
        let case = Case::new(NoHello, Transport::Tcp, phase, 1);
        let mut connection = Connection::open(&daemon, &case);
        set_phase(&daemon, phase);
        let answered = name(&connection.ask(hello(role, &case)).unwrap());
        assert_eq!(
            answered,
            "NOT_ALLOWED: engines connect over the Unix socket: TCP carries neither the pool nor credentials"
        );
        set_phase(&daemon, Phase::Serving);
    }
    assert!(daemon.stop(PATIENCE));
}

/// Only sessions that write the pool get it writable: tools, and workers that save by mapping.
#[test]
fn the_pool_is_writable_for_who_writes_it() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = daemon(&folder);
    for (number, kind) in (1..).zip(&KINDS[1..]) {
        let case = Case::new(*kind, Transport::Unix, Phase::Serving, number);
        let mut connection = Connection::open(&daemon, &case);
        let answered = name(&connection.ask(Ask::MapPool(v1::MapPool { writable: true })).unwrap());
        let wanted = match kind {
            Tool | Mapped => "PoolDescriptor",
            _ => "NOT_ALLOWED: only workers that save by mapping may write the pool",
        };
        assert_eq!(answered, wanted, "{kind:?}");
    }
    assert!(daemon.stop(PATIENCE));
}
