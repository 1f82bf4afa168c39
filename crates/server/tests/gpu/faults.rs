//! Refusals of a GPU and its driver: the engine concerned gets a sentence or goes on without, and the others are not affected.

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
};

use bytes::Bytes;
use kvlane_client::Release;
use kvlane_gpu::{DeviceMemory, Event, EventScope, Gpu};
use kvlane_proto::{
    Address, FrameReader, Message, WIRE_MAX, WIRE_MIN, encode_frame, v1, v1::reply::Body as Answer,
    v1::request::Body as Ask,
};

use crate::{
    daemon::Daemon,
    driver::{SMALL_PIECE, driver, engines_gpu, is_real, many, piece, skip},
    engine::{GpuEngine, Memory, regions},
    process::{Process, say, told},
    support::{PATIENCE, address},
};

const INVALID_VALUE: u32 = 1;
const OUT_OF_MEMORY: u32 = 2;
const ILLEGAL_ADDRESS: u32 = 700;

// ---- handles ----

/// Names the socket to the process that registers, and goes.
const SOCKET: &str = "KVLANE_TEST_EXPORTER_AT";
/// A worker's nonce.
pub const NONCE: [u8; 16] = [9; 16];

/// Not a test: a process that exports memory as a worker does. Told so, it asks the daemon to register it without waiting
/// for an answer, or frees what it exported.
#[test]
fn plays_the_exporter() {
    let Some(socket) = std::env::var_os(SOCKET) else { return };
    let gpu = engines_gpu(&driver());
    let tensors = Memory::whole(&gpu, SMALL_PIECE).unwrap();
    let fence = gpu.alloc(2 << 20).unwrap();
    let event = Event::new(&gpu, EventScope::Host).unwrap();
    let register = registration(&gpu, &tensors, &fence, &event);
    let mut exported = Some((tensors, fence, event));
    let hex: String = register.encode_to_vec().iter().map(|byte| format!("{byte:02x}")).collect();
    say(&hex);
    let mut stream = None;
    for words in told() {
        match words[0].as_str() {
            "register" => {
                let mut connected = UnixStream::connect(&socket).unwrap();
                for (id, body) in
                    [hello("exporter"), Ask::RegisterWorker(register.clone())].into_iter().enumerate()
                {
                    send(&mut connected, id as u64, body);
                }
                stream = Some(connected);
            }
            "free" => drop(exported.take()),
            other => panic!("an exporter cannot {other}"),
        }
        say("done");
    }
    drop(stream);
}

pub fn registration(gpu: &Gpu, tensors: &Memory, fence: &DeviceMemory, event: &Event) -> v1::RegisterWorker {
    let allocation = |memory: &DeviceMemory| {
        let export = gpu.export(memory.address()).unwrap();
        let handle = Bytes::copy_from_slice(&export.handle);
        v1::GpuAllocation { base: export.base, bytes: export.bytes, handle }
    };
    let regions = regions(tensors, SMALL_PIECE).into_iter().map(|region| v1::Region {
        base: region.base,
        block_stride: region.block_stride,
        blocks: region.blocks,
        piece_bytes: region.piece_bytes,
        piece_offsets: region.piece_offsets,
    });
    v1::RegisterWorker {
        rank: 0,
        workers: 1,
        groups: vec![v1::WorkerGroup {
            namespace: Bytes::copy_from_slice(&[3; 16]),
            layout: Bytes::copy_from_slice(&[4; 16]),
            regions: regions.collect(),
            ..Default::default()
        }],
        fence_address: 0,
        method: v1::register_worker::Method::Gpu.into(),
        gpu: Some(v1::WorkerGpu {
            device_uuid: Bytes::copy_from_slice(&gpu.info().uuid),
            allocations: match tensors {
                Memory::Whole(memory) => vec![allocation(memory)],
                Memory::Chunks(chunks) => {
                    vec![v1::GpuAllocation {
                        base: chunks.base(),
                        bytes: chunks.bytes(),
                        handle: Bytes::new(),
                    }]
                }
            },
            fence: Some(allocation(fence)),
            events: vec![Bytes::copy_from_slice(&event.export().unwrap())],
        }),
    }
}

pub fn hello(engine_id: &str) -> Ask {
    Ask::Hello(v1::Hello {
        wire_min: WIRE_MIN,
        wire_max: WIRE_MAX,
        client: "test".into(),
        role: v1::hello::Role::Worker.into(),
        engine_id: engine_id.into(),
        process_nonce: Bytes::copy_from_slice(&NONCE),
        live_leases: Vec::new(),
    })
}

pub fn send(stream: &mut UnixStream, id: u64, body: Ask) {
    stream.write_all(&encode_frame(&v1::Request { id, body: Some(body) })).unwrap();
}

pub fn receive(stream: &mut UnixStream, reader: &mut FrameReader) -> Answer {
    let mut bytes = vec![0; 64 << 10];
    loop {
        if let Some(reply) = reader.next_message::<v1::Reply>().unwrap() {
            return reply.body.unwrap();
        }
        let count = stream.read(&mut bytes).unwrap();
        assert!(count > 0, "the daemon closed the connection");
        reader.push(&bytes[..count]);
    }
}

struct Exporter {
    process: Process,
    register: v1::RegisterWorker,
}

impl Exporter {
    fn start(address: &Address) -> Self {
        let Address::Unix(path) = address else { unreachable!() };
        let environment = [(SOCKET, path.to_str().unwrap().to_owned())];
        let mut process = Process::start("faults::plays_the_exporter", environment);
        let hex = process.hear();
        let bytes: Vec<u8> =
            (0..hex.len() / 2).map(|at| u8::from_str_radix(&hex[2 * at..][..2], 16).unwrap()).collect();
        let register = v1::RegisterWorker::decode(bytes.as_slice()).unwrap();
        Self { process, register }
    }

    /// Registers what the process exported; the refusal.
    fn refusal(&self, address: &Address) -> String {
        let Address::Unix(path) = address else { unreachable!() };
        let mut stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut reader = FrameReader::default();
        send(&mut stream, 0, hello("in its place"));
        assert!(matches!(receive(&mut stream, &mut reader), Answer::Welcome(_)));
        send(&mut stream, 1, Ask::RegisterWorker(self.register.clone()));
        match receive(&mut stream, &mut reader) {
            Answer::Refused(refused) => refused.sentence,
            other => panic!("{other:?}"),
        }
    }
}

/// An engine that saved blocks 0 to 3, of seeds 1 to 4.
pub fn engine_with_blocks(address: &Address) -> GpuEngine {
    let mut engine = GpuEngine::new(address, "other", &driver());
    engine.compute_and_save(address, 0, 0..4, 1);
    engine
}

pub fn goes_on(mut engine: GpuEngine) {
    assert!(engine.load(0, 16..20).ok);
    engine.assert_holds(16..20, 1);
}

#[test]
fn handles_of_a_dead_process_are_refused_with_a_sentence() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let daemon = Daemon::start(&address);
    let engine = engine_with_blocks(&address);
    let mut exporter = Exporter::start(&address);
    exporter.process.kill();
    let refusal = exporter.refusal(&address);
    assert!(refusal.starts_with("the worker's GPU memory cannot be used: "), "{refusal}");
    goes_on(engine);
    daemon.stop();
}

#[test]
fn handles_of_memory_that_was_freed_are_refused_with_a_sentence() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let daemon = Daemon::start(&address);
    let engine = engine_with_blocks(&address);
    let mut exporter = Exporter::start(&address);
    assert_eq!(exporter.process.ask("free"), "done");
    let refusal = exporter.refusal(&address);
    assert!(refusal.starts_with("the worker's GPU memory cannot be used: "), "{refusal}");
    exporter.process.end();
    goes_on(engine);
    daemon.stop();
}

#[test]
fn a_worker_that_dies_while_it_registers_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let daemon = Daemon::start(&address);
    let engine = engine_with_blocks(&address);
    let mut exporter = Exporter::start(&address);
    // The daemon meets greeting and registration of a process that is no more.
    daemon.pause();
    assert_eq!(exporter.process.ask("register"), "done");
    exporter.process.kill();
    daemon.resume();
    daemon.wait_until_gone(&["exporter"]);
    goes_on(engine);
    daemon.stop();
}

// ---- errors ----

#[test]
fn a_copy_that_fails_costs_its_save_or_a_detour_of_its_load() {
    if is_real() {
        return skip("a failing copy", "a healthy GPU lets none fail");
    }
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let mut daemon = Daemon::start(&address);
    let mut engine = engine_with_blocks(&address);
    let gpu = engine.stream.gpu().info().ordinal;
    daemon.fail_next_copy(gpu, INVALID_VALUE);
    let saved = engine.save(200, 8..12);
    assert!(!saved.ok, "{saved:?}");
    assert_eq!(engine.visible(200, 4), 0);
    assert_eq!(engine.save(200, 8..12).blocks, 4);
    for release in [Release::AtEnd, Release::AtOnce] {
        daemon.fail_next_copy(gpu, INVALID_VALUE);
        let hit = engine.look_up(0, 4);
        let job = engine.start_load(&hit, 20..24, release);
        let loaded = engine.end(job);
        assert!(loaded.ok, "{loaded:?}");
        engine.assert_holds(20..24, 1);
        engine.scheduler.release(hit.boot, hit.lease);
    }
    daemon.wait_until_gone(&[]);
    goes_on(engine);
    daemon.stop();
}

/// The daemon's context on one GPU is lost. It cannot copy for engines there any more; all others notice nothing.
#[test]
fn a_gpu_that_is_lost_costs_its_engines_their_saves_and_no_others() {
    if is_real() {
        return skip("a lost context", "it would take the GPU from other processes too");
    }
    let folder = tempfile::tempdir().unwrap();
    let (address, driver) = (address(&folder), driver());
    let mut daemon = Daemon::start(&address);
    let gpu = |ordinal| Gpu::open(std::sync::Arc::clone(&driver), ordinal).unwrap();
    let mut sound = GpuEngine::on(&gpu(0), &address, "sound", piece(), PATIENCE).unwrap();
    let mut lost = GpuEngine::on(&gpu(1), &address, "lost", piece(), PATIENCE).unwrap();
    lost.compute_and_save(&address, 0, 0..4, 1);
    daemon.fail_next_copy(1, ILLEGAL_ADDRESS);
    for release in [Release::AtOnce, Release::AtEnd] {
        let hit = lost.look_up(0, 4);
        let job = lost.start_load(&hit, 16..20, release);
        let loaded = lost.end(job);
        assert!(loaded.ok, "a load that was promised arrives: {loaded:?}");
        lost.assert_holds(16..20, 1);
        lost.scheduler.release(hit.boot, hit.lease);
    }
    assert!(!lost.save(200, 0..4).ok);
    let another = GpuEngine::on(&gpu(1), &address, "another", piece(), PATIENCE).unwrap();
    let refusal = another.worker.refusal();
    assert!(refusal.starts_with("the worker's GPU memory cannot be used: "), "{refusal}");

    assert!(sound.load(0, 8..12).ok);
    sound.assert_holds(8..12, 1);
    sound.compute_and_save(&address, 300, 0..4, 90);
    assert!(sound.load(300, 20..24).ok);
    sound.assert_holds(20..24, 90);
    drop((lost, another));
    daemon.wait_until_gone(&["lost"]);
    drop(sound);
    daemon.stop();
}

// ---- memory ----

/// All memory of a GPU that is left.
fn rest_of(gpu: &Gpu) -> Vec<DeviceMemory> {
    let mut taken = Vec::new();
    let mut bytes = gpu.info().total_bytes;
    while bytes >= 1 << 20 {
        match gpu.alloc(bytes) {
            Ok(memory) => taken.push(memory),
            Err(error) => {
                assert_eq!(error.code(), Some(OUT_OF_MEMORY), "{error}");
                bytes /= 2;
            }
        }
    }
    taken
}

#[test]
fn a_worker_for_whose_fence_no_memory_is_left_hears_so() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let daemon = Daemon::start(&address);
    let mut engine = engine_with_blocks(&address);
    let gpu = engines_gpu(&driver());
    let tensors = Memory::whole(&gpu, SMALL_PIECE).unwrap();
    let rest = rest_of(&gpu);
    let regions = regions(&tensors, SMALL_PIECE);
    let error = kvlane_client::WorkerGpu::with_driver(gpu.driver(), gpu.info().uuid, &regions).unwrap_err();
    assert_eq!(error.code(), Some(OUT_OF_MEMORY), "{error}");
    // Who has been served all along needs no more.
    assert!(engine.load(0, 8..12).ok);
    engine.assert_holds(8..12, 1);
    drop(rest);
    assert!(kvlane_client::WorkerGpu::with_driver(gpu.driver(), gpu.info().uuid, &regions).is_ok());
    goes_on(engine);
    daemon.stop();
}

#[test]
fn rails_without_memory_are_not_used_and_the_load_arrives() {
    if is_real() {
        return skip(
            "rails without memory",
            "the daemon is another process, whose memory a test cannot take",
        );
    }
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let mut daemon = Daemon::start_with_rails_without_memory(&address);
    let mut engine = GpuEngine::new(&address, "engine", &driver());
    engine.compute_and_save(&address, 0, 0..many(), 1);
    for _ in 0..2 {
        let loaded = engine.load(0, 16..16 + many());
        assert!(loaded.ok, "{loaded:?}");
        engine.assert_holds(16..16 + many(), 1);
    }
    assert_eq!(daemon.relayed_bytes(), 0);
    drop(engine);
    daemon.stop();
}

#[test]
fn a_worker_for_whom_the_daemon_has_no_pinned_memory_is_refused_and_comes_back() {
    if is_real() {
        return skip("no pinned memory", "the daemon is another process, whose memory a test cannot take");
    }
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let mut daemon = Daemon::start(&address);
    daemon.refuse_pinned_memory(1, OUT_OF_MEMORY);
    let mut engine = GpuEngine::new(&address, "engine", &driver());
    engine.wait_connected();
    assert_eq!(engine.worker.take_stats().connects, 1);
    engine.compute_and_save(&address, 0, 0..4, 1);
    goes_on(engine);
    daemon.stop();
}
