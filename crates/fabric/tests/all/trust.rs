//! A stranger that connects to an engine, or listens in a peer's place, learns nothing.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use kvlane_fabric::{
    Access, Address, Descriptor, Engine, EngineOptions, Failure, Options, Pieces, Place, Run, Transfer,
};

const PATIENCE: Duration = Duration::from_secs(30);
const CHALLENGE_BYTES: usize = 24;
const PROOF_BYTES: usize = 56;
const VERDICT_BYTES: usize = 40;

fn address(descriptor: &Descriptor) -> SocketAddr {
    String::from_utf8(descriptor.addresses[0].bytes.clone()).unwrap().parse().unwrap()
}

/// Whether something of an engine's identity is in there.
fn tells_of(engine: &Engine, said: &[u8]) -> bool {
    let Descriptor { engine_id, boot_nonce, .. } = engine.describe().unwrap();
    let (id, nonce) = (engine_id.to_le_bytes(), boot_nonce.to_le_bytes());
    said.windows(16).any(|bytes| bytes == id) || said.windows(8).any(|bytes| bytes == nonce)
}

fn bounded(stream: TcpStream) -> TcpStream {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// All that comes until the other side ends it: a reset counts as an end.
fn rest(stream: &mut TcpStream) -> Vec<u8> {
    let mut said = Vec::new();
    let _ = stream.read_to_end(&mut said);
    said
}

/// Where 1,024 connections had proved nothing yet, the next one was refused, and a peer that knew the secret with it: a
/// stranger who opened others for those that timed out kept all peers away.
#[test]
fn where_too_many_have_proved_nothing_the_oldest_gives_way() {
    const MANY: usize = 1_024;
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let limit = rustix::process::Rlimit { current: limit.maximum, ..limit };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
    let engine = Engine::new(EngineOptions::default()).unwrap();
    let descriptor = engine.describe().unwrap();
    let mut challenge = [0; CHALLENGE_BYTES];
    let mut connect = || {
        let mut stream = bounded(TcpStream::connect(address(&descriptor)).unwrap());
        let accepted = stream.read_exact(&mut challenge).is_ok();
        accepted.then_some(stream)
    };
    let mut strangers: Vec<TcpStream> = (0..MANY).map(|_| connect().unwrap()).collect();
    assert!(connect().is_some(), "who knows the secret comes like this too");
    assert_eq!(rest(&mut strangers[0]), [], "the oldest is told nothing when it goes");
}

/// A refusal told the engine's id and its boot nonce, to everybody.
#[test]
fn who_connects_and_proves_nothing_is_told_nothing() {
    let engine = Engine::new(EngineOptions::default()).unwrap();
    let descriptor = engine.describe().unwrap();
    for says in [PROOF_BYTES, PROOF_BYTES - 1, 0] {
        let mut stranger = bounded(TcpStream::connect(address(&descriptor)).unwrap());
        let mut challenge = [0; CHALLENGE_BYTES];
        stranger.read_exact(&mut challenge).unwrap();
        let mut proof = vec![7; says];
        let len = says.min(8);
        proof[..len].copy_from_slice(&challenge[..len]);
        stranger.write_all(&proof).unwrap();
        // Who says too little is not waited for.
        let verdict = rest(&mut stranger);
        assert_eq!(verdict.len(), if says == PROOF_BYTES { VERDICT_BYTES } else { 0 });
        assert!(!tells_of(&engine, &challenge) && !tells_of(&engine, &verdict));
        assert!(verdict.iter().skip(8).all(|byte| *byte == 0), "no proof of its own: {verdict:?}");
    }
}

/// Whoever took the port of a peer that ended was told who connects, in which process of this host it is, and where its
/// memory may be read.
#[test]
fn who_listens_in_the_place_of_a_peer_is_told_nothing() {
    let there = Engine::new(EngineOptions::default()).unwrap();
    let (mut here, mut far) = (vec![1u8; 64], vec![0u8; 64]);
    let transfers = Options { peer_patience: Duration::from_millis(300), ..Options::default() };
    let engine = Engine::new(EngineOptions { transfers, ..EngineOptions::default() }).unwrap();
    // SAFETY: the memory outlives the engines, which are dropped below.
    let (local, remote) = unsafe {
        let local = engine.register(here.as_mut_ptr(), 64, Access::ReadWrite).unwrap();
        (local, there.register(far.as_mut_ptr(), 64, Access::ReadWrite).unwrap())
    };
    let stranger = TcpListener::bind("127.0.0.1:0").unwrap();
    let text = stranger.local_addr().unwrap().to_string().into_bytes();
    let mut descriptor = there.describe().unwrap();
    let kind = descriptor.addresses[0].kind;
    // Of a real engine, for what the stranger may hand on.
    let mut real = bounded(TcpStream::connect(address(&descriptor)).unwrap());
    let mut challenge = [0; CHALLENGE_BYTES];
    real.read_exact(&mut challenge).unwrap();
    descriptor.addresses = vec![Address { kind, bytes: text }];
    let peer = engine.connect(&descriptor).unwrap();
    let run = Run {
        local: Place { region: local, offset: 0 },
        remote: Place { region: remote, offset: 0 },
        len: 64,
    };
    let write = engine.begin(peer, Transfer::write(Pieces::Contiguous(run))).unwrap();

    let mut connection = bounded(stranger.accept().unwrap().0);
    connection.write_all(&challenge).unwrap();
    let mut proof = [0; PROOF_BYTES];
    connection.read_exact(&mut proof).unwrap();
    assert!(!tells_of(&engine, &proof));
    // What it said itself is no proof of somebody else.
    let mut verdict = challenge[..8].to_vec();
    verdict.extend(&proof[PROOF_BYTES - 32..]);
    connection.write_all(&verdict).unwrap();
    assert_eq!(rest(&mut connection), [], "and then nothing");
    drop(stranger);
    assert_eq!(write.wait(Some(PATIENCE)), Some(Err(Failure::PeerLost)));
    drop((engine, there));
    assert_eq!((here, far), (vec![1; 64], vec![0; 64]));
}
