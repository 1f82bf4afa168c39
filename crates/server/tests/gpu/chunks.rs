//! Engines whose GPU memory consists of chunks, as torch's expandable segments do: the daemon maps them as one range.

use std::{
    fs::File,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
};

use bytes::Bytes;
use kvlane_client::{Release, WorkerGpu};
use kvlane_gpu::{Chunks, DeviceMemory, Event, EventScope, Gpu, GpuError, Priority, Stream};
use kvlane_memory::send_with_fds;
use kvlane_proto::{
    Address, FrameReader, encode_frame, v1, v1::reply::Body as Answer, v1::request::Body as Ask,
};

use crate::{
    daemon::Daemon,
    driver::{SMALL_PIECE, driver, engines_gpu},
    engine::{CHUNK, GpuEngine, Memory, regions, start_process_in_chunks},
    faults::{NONCE, engine_with_blocks, goes_on, hello, receive, registration, send},
    support::{PATIENCE, address},
};

// ---- engines ----

#[test]
fn blocks_that_cross_chunks_are_saved_and_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let daemon = Daemon::start(&address);
    let mut engine = GpuEngine::with_chunks(&address, "engine", &driver());
    engine.compute_and_save(&address, 0, 0..8, 1);
    let loaded = engine.load(0, 16..24);
    assert!(loaded.ok && loaded.bytes == 8 * engine.block_bytes(), "{loaded:?}");
    engine.assert_holds(16..24, 1);
    // Early, with flags.
    let hit = engine.look_up(0, 8);
    let job = engine.start_load(&hit, 8..16, Release::AtOnce);
    assert!(engine.released(job).ok);
    engine.wait_for_loads(None);
    engine.assert_holds(8..16, 1);
    assert!(engine.end(job).ok);
    engine.scheduler.release(hit.boot, hit.lease);
    // What is in one allocation elsewhere is the same to the pool.
    drop(engine);
    let gpu = engines_gpu(&driver());
    let mut other = GpuEngine::on(&gpu, &address, "other", SMALL_PIECE, PATIENCE).unwrap();
    assert!(other.load(0, 0..8).ok);
    other.assert_holds(0..8, 1);
    drop(other);
    daemon.stop();
}

#[test]
fn chunks_are_shared_again_with_a_restarted_daemon() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let daemon = Daemon::start(&address);
    let mut engine = GpuEngine::with_chunks(&address, "engine", &driver());
    engine.compute_and_save(&address, 0, 0..4, 1);
    daemon.kill();
    let daemon = Daemon::start(&address);
    engine.wait_connected();
    engine.compute_and_save(&address, 100, 4..8, 20);
    assert!(engine.load(100, 16..20).ok);
    engine.assert_holds(16..20, 20);
    drop(engine);
    daemon.stop();
}

#[test]
fn an_engine_with_chunks_that_is_killed_leaves_its_blocks_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let daemon = Daemon::start(&address);
    let mut killed = start_process_in_chunks(&address, "killed");
    assert_eq!(killed.ask("save 0 4 1"), "saved");
    killed.kill();
    daemon.wait_until_gone(&["killed"]);
    let mut engine = GpuEngine::with_chunks(&address, "engine", &driver());
    assert!(engine.load(0, 8..12).ok);
    engine.assert_holds(8..12, 1);
    drop(engine);
    daemon.stop();
}

#[test]
fn an_engine_whose_memory_was_not_made_for_sharing_hears_what_to_do() {
    let gpu = engines_gpu(&driver());
    let memory = Memory::in_chunks(&gpu, false).unwrap();
    let error =
        WorkerGpu::with_driver(gpu.driver(), gpu.info().uuid, &regions(&memory, SMALL_PIECE)).unwrap_err();
    assert!(matches!(error, GpuError::NotShareable { .. }), "{error}");
}

// ---- what a peer may say ----

/// A worker that speaks for itself.
struct Peer {
    stream: UnixStream,
    reader: FrameReader,
    gpu: Gpu,
    memory: Memory,
    fence: DeviceMemory,
    event: Event,
}

impl Peer {
    fn connect(address: &Address) -> Self {
        let mut peer = Self::without_hello(address);
        peer.greet();
        peer
    }

    fn greet(&mut self) {
        send(&mut self.stream, 0, hello("peer"));
        assert!(matches!(receive(&mut self.stream, &mut self.reader), Answer::Welcome(_)));
    }

    fn without_hello(address: &Address) -> Self {
        let Address::Unix(path) = address else { unreachable!() };
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let reader = FrameReader::default();
        let gpu = engines_gpu(&driver());
        let memory = Memory::in_chunks(&gpu, true).unwrap();
        let fence = gpu.alloc(CHUNK).unwrap();
        let words = Stream::new(&gpu, Priority::Normal).unwrap();
        let nonce = kvlane_gpu::Copy {
            dst: fence.address(),
            src: NONCE.as_ptr().expose_provenance() as u64,
            len: NONCE.len() as u64,
        };
        // SAFETY: both sides live until the stream is synchronized.
        unsafe { words.copy(nonce) }.unwrap();
        words.synchronize().unwrap();
        let event = Event::new(&gpu, EventScope::Host).unwrap();
        Self { stream, reader, gpu, memory, fence, event }
    }

    fn chunks(&self) -> &Chunks {
        match &self.memory {
            Memory::Chunks(chunks) => chunks,
            Memory::Whole(_) => unreachable!(),
        }
    }

    /// What shares some chunks as they are.
    fn message(&self, chunks: usize) -> v1::ShareChunks {
        v1::ShareChunks {
            device_uuid: Bytes::copy_from_slice(&self.gpu.info().uuid),
            base: self.chunks().base(),
            bytes: self.chunks().bytes(),
            chunk_bytes: vec![CHUNK; chunks],
        }
    }

    fn descriptors(&self, first: usize, count: usize) -> Vec<OwnedFd> {
        let address = |index: usize| self.chunks().base() + index as u64 * CHUNK;
        (first..first + count).map(|index| self.gpu.export_chunk(address(index)).unwrap()).collect()
    }

    fn ask(&mut self, ask: Ask, descriptors: &[OwnedFd]) -> Answer {
        let frame = encode_frame(&v1::Request { id: 1, body: Some(ask) });
        let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        assert_eq!(send_with_fds(&self.stream, &frame, &borrowed).unwrap(), frame.len());
        receive(&mut self.stream, &mut self.reader)
    }

    fn share(&mut self, message: v1::ShareChunks, descriptors: &[OwnedFd]) -> Answer {
        self.ask(Ask::ShareChunks(message), descriptors)
    }

    /// Shares all chunks from this one on.
    fn share_from(&mut self, first: usize) {
        let total = (self.chunks().bytes() / CHUNK) as usize;
        for start in (first..total).step_by(100) {
            let count = 100.min(total - start);
            let descriptors = self.descriptors(start, count);
            assert!(matches!(self.share(self.message(count), &descriptors), Answer::Done(_)));
        }
    }

    fn register(&mut self) -> Answer {
        let register = registration(&self.gpu, &self.memory, &self.fence, &self.event);
        self.ask(Ask::RegisterWorker(register), &[])
    }
}

/// The peer's session is over; its process, this one, is not.
fn wait_until_lost(daemon: &Daemon) {
    daemon.wait_until("without the peer's session", |status| {
        status.sessions.iter().any(|session| session.engine_id == "peer" && session.role.contains("lost"))
    });
}

fn refusal(answer: Answer) -> String {
    match answer {
        Answer::Refused(refused) => refused.sentence,
        other => panic!("not refused: {other:?}"),
    }
}

#[test]
fn a_range_counts_when_all_its_chunks_came() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let daemon = Daemon::start(&address);
    let engine = engine_with_blocks(&address);
    let mut peer = Peer::connect(&address);
    // None at all.
    let refused = refusal(peer.register());
    assert!(refused.contains("neither a handle nor chunks"), "{refused}");
    // One is missing.
    let descriptors = peer.descriptors(0, 100);
    assert!(matches!(peer.share(peer.message(100), &descriptors), Answer::Done(_)));
    let refused = refusal(peer.register());
    assert!(refused.contains("a chunk is missing"), "{refused}");
    // What came before does not count any more.
    peer.share_from(0);
    let registered = peer.register();
    assert!(matches!(registered, Answer::WorkerRegistered(_)), "{registered:?}");
    drop(peer);
    wait_until_lost(&daemon);
    goes_on(engine);
    daemon.stop();
}

#[test]
fn chunks_that_are_not_what_is_said_are_refused_with_a_sentence() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let daemon = Daemon::start(&address);
    let engine = engine_with_blocks(&address);
    let mut peer = Peer::connect(&address);
    let message = peer.message(1);
    let chunk = peer.descriptors(0, 1);
    let null = vec![OwnedFd::from(File::open("/dev/null").unwrap())];
    let total = peer.gpu.info().total_bytes;
    let wrong = [
        v1::ShareChunks { chunk_bytes: vec![2 * CHUNK], ..message.clone() },
        v1::ShareChunks { chunk_bytes: vec![CHUNK - 1], ..message.clone() },
        v1::ShareChunks { chunk_bytes: vec![0], ..message.clone() },
        v1::ShareChunks { chunk_bytes: vec![u64::MAX], ..message.clone() },
        v1::ShareChunks { chunk_bytes: vec![CHUNK, CHUNK], ..message.clone() },
        v1::ShareChunks { bytes: 0, ..message.clone() },
        v1::ShareChunks { bytes: total + CHUNK, ..message.clone() },
        v1::ShareChunks { bytes: u64::MAX, ..message.clone() },
        v1::ShareChunks { base: u64::MAX - 1, ..message.clone() },
        v1::ShareChunks { device_uuid: Bytes::from_static(&[7; 16]), ..message.clone() },
        v1::ShareChunks { device_uuid: Bytes::from_static(b"GPU-0"), ..message.clone() },
    ];
    for message in wrong {
        let refused = refusal(peer.share(message.clone(), &chunk));
        assert!(refused.starts_with("the worker's GPU memory cannot be used: "), "{refused}: {message:?}");
    }
    refusal(peer.share(message.clone(), &null));
    refusal(peer.share(message.clone(), &[]));
    refusal(peer.share(v1::ShareChunks { chunk_bytes: Vec::new(), ..message.clone() }, &[]));
    // More than the range has room for.
    let one = v1::ShareChunks { bytes: CHUNK, ..message };
    assert!(matches!(peer.share(one.clone(), &chunk), Answer::Done(_)));
    let refused = refusal(peer.share(one, &chunk));
    assert!(refused.contains("does not fit"), "{refused}");
    drop(peer);
    wait_until_lost(&daemon);
    goes_on(engine);
    daemon.stop();
}

/// The descriptors of a ShareChunks that was refused stayed behind, and the next one on the connection took them for its
/// own chunks: the daemon mapped other memory than the worker had meant.
#[test]
fn descriptors_of_a_refused_call_are_not_taken_for_those_of_the_next() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let daemon = Daemon::start(&address);
    let engine = engine_with_blocks(&address);
    let mut peer = Peer::without_hello(&address);
    let others = [OwnedFd::from(File::open("/dev/null").unwrap())];
    let refused = refusal(peer.share(peer.message(1), &others));
    assert!(refused.contains("must be Hello"), "{refused}");
    peer.greet();
    peer.share_from(0);
    let registered = peer.register();
    assert!(matches!(registered, Answer::WorkerRegistered(_)), "{registered:?}");
    drop(peer);
    wait_until_lost(&daemon);
    goes_on(engine);
    daemon.stop();
}

#[test]
fn a_peer_that_sends_descriptors_that_nobody_asked_for_is_cut_off() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let daemon = Daemon::start(&address);
    let engine = engine_with_blocks(&address);
    let peer = Peer::connect(&address);
    let file = File::open("/dev/null").unwrap();
    let borrowed = vec![file.as_fd(); 100];
    // A frame that never ends, and descriptors with each of its bytes.
    let mut sent = send_with_fds(&peer.stream, &[0, 0, 1, 0], &[]);
    for _ in 0..3 {
        sent = sent.and_then(|_| send_with_fds(&peer.stream, &[0], &borrowed));
    }
    wait_until_lost(&daemon);
    drop(sent);
    goes_on(engine);
    daemon.stop();
}

#[test]
fn a_worker_that_goes_while_it_shares_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let daemon = Daemon::start(&address);
    let engine = engine_with_blocks(&address);
    let mut peer = Peer::connect(&address);
    let descriptors = peer.descriptors(0, 100);
    assert!(matches!(peer.share(peer.message(100), &descriptors), Answer::Done(_)));
    drop(peer);
    wait_until_lost(&daemon);
    goes_on(engine);
    daemon.stop();
}
