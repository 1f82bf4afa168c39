//! Memory and events between real processes, and the driver that a process finds.
//!
//! This binary starts itself again to be the other process: see [`plays_the_role_it_was_started_for`].
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail like tests")]

mod support;

use std::sync::Arc;

use kvlane_fake_gpu::{FakeDriver, FakeOptions, driver_named};
use kvlane_gpu::{
    AddressMap, Copier, CopierOptions, Copy, DRIVER_VARIABLE, Direction, Event, EventScope, Export, Gpu,
    GpuError, HostBuffer, IpcHandle, MappedImport, NoDriver, detect,
};
use support::role::{Role, asked_role, listen, say};
use support::{Gate, device_memory, gpus, pattern, read, stream, tested_driver, write};

const BYTES: usize = 3 << 20;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len() / 2).map(|index| u8::from_str_radix(&text[2 * index..][..2], 16).unwrap()).collect()
}

fn handle(text: &str) -> IpcHandle {
    unhex(text).try_into().unwrap()
}

fn words(export: &Export) -> Vec<String> {
    let Export { handle, base, bytes, device_uuid } = export;
    vec![hex(handle), base.to_string(), bytes.to_string(), hex(device_uuid)]
}

fn export(words: &[String]) -> Export {
    Export {
        handle: handle(&words[0]),
        base: words[1].parse().unwrap(),
        bytes: words[2].parse().unwrap(),
        device_uuid: unhex(&words[3]).try_into().unwrap(),
    }
}

#[test]
fn plays_the_role_it_was_started_for() {
    match asked_role().as_deref() {
        Some("engine") => engine(),
        Some("exporter") => exporter(),
        Some("detector") => detector(),
        Some(other) => panic!("there is no role {other}"),
        None => {}
    }
}

/// Exports its memory and an event behind work that has not run; then checks what came back.
fn engine() {
    let gpu = Gpu::open(detect(driver_named).unwrap(), 0).unwrap();
    let stream = stream(&gpu);
    let memory = gpu.alloc(BYTES as u64).unwrap();
    let ready = Event::new(&gpu, EventScope::Host).unwrap();
    let gate = Gate::across(&stream);
    // Pinned: from other memory CUDA copies only while the caller waits.
    let content = HostBuffer::new(&gpu, BYTES as u64).unwrap();
    // SAFETY: the buffer is as long as the pattern; both ranges live until the stream is waited for.
    unsafe {
        content.as_ptr().copy_from_nonoverlapping(pattern(7, BYTES).as_ptr(), BYTES);
        stream.copy(Copy { dst: memory.address(), src: content.address(), len: BYTES as u64 }).unwrap();
    }
    ready.record(&stream).unwrap();
    // As an engine names one of several tensors in one allocation.
    let exported = gpu.export(memory.address() + 4096).unwrap();
    assert_eq!(exported.base, memory.address());
    assert!(gpu.import(&exported).is_err(), "a process cannot open its own export");
    say(&[words(&exported), vec![hex(&ready.export().unwrap())]].concat());

    assert_eq!(listen(), ["enqueued"]);
    gate.open();
    let said = listen();
    let done = Event::open(&gpu, &handle(&said[0])).unwrap();
    stream.wait(&done).unwrap();
    assert!(read(&stream, memory.address(), BYTES) == pattern(9, BYTES), "the load brought other bytes");
    say(&["loaded".into()]);
    assert_eq!(listen(), [""; 0]);
}

/// Exports memory and an event, and ends when its input does.
fn exporter() {
    let gpu = Gpu::open(detect(driver_named).unwrap(), 0).unwrap();
    let memory = gpu.alloc(BYTES as u64).unwrap();
    let event = Event::new(&gpu, EventScope::Host).unwrap();
    say(&[words(&gpu.export(memory.address()).unwrap()), vec![hex(&event.export().unwrap())]].concat());
    listen();
}

fn detector() {
    let said = match detect(driver_named) {
        Ok(driver) => format!("{} {}", driver.name(), driver.devices().unwrap().len()),
        Err(absent) => format!("none {absent}"),
    };
    say(&[said]);
}

// ---- tests ----

fn fake_gpu() -> Gpu {
    Gpu::open(driver_named(Some("fake")).unwrap(), 0).unwrap()
}

#[test]
fn a_daemon_saves_from_and_loads_into_an_engines_memory() {
    let mut engine = Role::start("engine", &tested_driver());
    let said = engine.hear();
    let exported = export(&said);
    let (gpu, _) = gpus();
    let stream = stream(&gpu);
    let imported = gpu.import(&exported).unwrap();
    let map = AddressMap::new([MappedImport::from(&imported)]).unwrap();
    let local = map.local(exported.base, BYTES as u64).unwrap();
    let ready = Event::open(&gpu, &handle(&said[4])).unwrap();

    // A save: the engine's blocks, 64 KiB each, into the pool in reverse order, after the engine's own work.
    let pool = HostBuffer::new(&gpu, BYTES as u64).unwrap();
    let block = 64 << 10;
    let blocks = BYTES as u64 / block;
    let pairs =
        (0..blocks).map(|index| (local + index * block, pool.address() + (blocks - 1 - index) * block));
    let mut copier = Copier::new(Arc::clone(&stream), CopierOptions::default()).unwrap();
    stream.wait(&ready).unwrap();
    let saves: Vec<_> = pairs.clone().map(|(src, dst)| Copy { dst, src, len: block }).collect();
    // SAFETY: import and pool live until the stream is waited for, and nobody else uses them meanwhile.
    unsafe { copier.enqueue(&saves, Direction::DeviceToHost).unwrap() };
    assert!(!stream.is_idle().unwrap());
    engine.tell(&["enqueued".into()]);
    stream.synchronize().unwrap();
    // SAFETY: the stream is idle.
    let saved = unsafe { std::slice::from_raw_parts(pool.as_ptr(), BYTES) };
    let in_order: Vec<u8> = saved.chunks(block as usize).rev().flatten().copied().collect();
    assert!(in_order == pattern(7, BYTES), "the save brought other bytes");

    // A load: other bytes, announced by an event of the daemon's.
    let content: Vec<u8> = pattern(9, BYTES).chunks(block as usize).rev().flatten().copied().collect();
    // SAFETY: the stream is idle, and the slice above is used no more.
    unsafe { pool.as_ptr().copy_from_nonoverlapping(content.as_ptr(), BYTES) };
    let loads: Vec<_> = pairs.map(|(dst, src)| Copy { dst, src, len: block }).collect();
    // SAFETY: as above.
    unsafe { copier.enqueue(&loads, Direction::HostToDevice).unwrap() };
    let done = Event::new(&gpu, EventScope::Host).unwrap();
    done.record(&stream).unwrap();
    engine.tell(&[hex(&done.export().unwrap())]);
    assert_eq!(engine.hear(), ["loaded"]);
    stream.synchronize().unwrap();
    drop(imported);
    engine.end();
}

#[test]
fn what_a_dead_process_exported_cannot_be_opened() {
    let mut exporter = Role::start("exporter", "fake");
    let said = exporter.hear();
    let gpu = fake_gpu();
    drop(gpu.import(&export(&said)).unwrap());
    drop(Event::open(&gpu, &handle(&said[4])).unwrap());
    exporter.end();
    assert_eq!(gpu.import(&export(&said)).unwrap_err().code(), Some(205));
    assert_eq!(Event::open(&gpu, &handle(&said[4])).unwrap_err().code(), Some(205));
    // The device goes on.
    assert!(gpu.alloc(1).is_ok());
}

/// A process sees only the second GPU, and the memory is on the first.
#[test]
fn memory_of_a_gpu_that_a_process_does_not_see_is_mapped_and_copied() {
    let mut exporter = Role::start("exporter", "fake");
    let exported = export(&exporter.hear());
    let visible = Some(vec![1]);
    let driver = Arc::new(FakeDriver::new(FakeOptions { visible, ..FakeOptions::default() }).unwrap());
    let gpu = Gpu::open(driver, 0).unwrap();
    assert_ne!(gpu.info().uuid, exported.device_uuid);
    assert!(matches!(gpu.import(&exported), Err(GpuError::WrongDevice { .. })));
    let imported = gpu.import_from_any(&exported).unwrap();
    let (stream, near) = (stream(&gpu), gpu.alloc(BYTES as u64).unwrap());
    write(&stream, imported.base(), &pattern(5, BYTES));
    let mut copier = Copier::new(Arc::clone(&stream), CopierOptions::default()).unwrap();
    let pieces = (0..BYTES as u64 / 4096).rev().map(|index| 4096 * index);
    let copies = pieces.map(|at| Copy { dst: near.address() + at, src: imported.base() + at, len: 4096 });
    let copies: Vec<Copy> = copies.collect();
    // SAFETY: both ranges live until the stream is waited for.
    let enqueued = unsafe { copier.enqueue(&copies, Direction::Peer).unwrap() };
    assert_eq!(enqueued.kernel.bytes, BYTES as u64);
    assert!(read(&stream, near.address(), BYTES) == pattern(5, BYTES));
    drop(imported);
    exporter.end();
}

#[test]
fn memory_that_a_gpu_does_not_reach_is_mapped_and_its_copies_fail() {
    let mut exporter = Role::start("exporter", "fake");
    let exported = export(&exporter.hear());
    let options = FakeOptions { reachable: false, ..FakeOptions::default() };
    let driver = Arc::new(FakeDriver::new(options).unwrap());
    let [same, other] = [0, 1].map(|ordinal| Gpu::open(Arc::clone(&driver) as _, ordinal).unwrap());
    assert!(matches!(other.enable_peer(&same), Err(GpuError::Unsupported { .. })));
    let imported = other.import_from_any(&exported).unwrap();
    let (slow, mut byte) = (stream(&other), [0u8]);
    let copy = Copy { dst: byte.as_mut_ptr().expose_provenance() as u64, src: imported.base(), len: 1 };
    // SAFETY: both ranges live until the stream is waited for.
    unsafe { slow.copy(copy).unwrap() };
    let error = slow.synchronize().unwrap_err();
    assert!(!error.is_sticky(), "{error}");
    // The process's own memory is copied by way of the host, and the GPU that holds the import reaches it.
    let (near, far) = (device_memory(&slow, &pattern(1, 64)), same.alloc(64).unwrap());
    // SAFETY: as above.
    unsafe { slow.copy(Copy { dst: far.address(), src: near.address(), len: 64 }).unwrap() };
    assert!(read(&slow, far.address(), 64) == pattern(1, 64));
    let imported = same.import_from_any(&exported).unwrap();
    assert_eq!(read(&stream(&same), imported.base(), 64), [0; 64]);
    exporter.end();
}

#[test]
fn what_is_no_export_is_refused() {
    let gpu = fake_gpu();
    let stream = stream(&gpu);
    let memory = device_memory(&stream, &pattern(1, 64));
    let sound = gpu.export(memory.address()).unwrap();
    let nonsense = Export { handle: [7; 64], ..sound };
    assert_eq!(gpu.import(&nonsense).unwrap_err().code(), Some(400));
    assert_eq!(Event::open(&gpu, &sound.handle).unwrap_err().code(), Some(400));
    assert!(gpu.export(0x1000).is_err());
    let mine = Event::new(&gpu, EventScope::Process).unwrap();
    assert_eq!(mine.export().unwrap_err().code(), Some(1));
}

#[test]
fn an_export_that_claims_more_than_there_is_is_refused() {
    let mut exporter = Role::start("exporter", "fake");
    let said = exporter.hear();
    let gpu = fake_gpu();
    let sound = export(&said);
    let boastful = Export { bytes: sound.bytes + 1, ..sound };
    assert!(matches!(gpu.import(&boastful), Err(GpuError::Invalid(_))));
    assert!(gpu.import(&sound).is_ok());
    exporter.end();
}

#[test]
fn a_process_finds_the_driver_that_it_is_told_to_use_or_none() {
    let found = |driver| {
        let mut detector = Role::start("detector", driver);
        let said = detector.hear().join(" ");
        detector.end();
        said
    };
    assert_eq!(found("fake"), "fake 2");
    assert_eq!(found("off"), format!("none {DRIVER_VARIABLE} is off"));
    assert!(found("rocm").starts_with("none"));
    // Without a GPU this says why, on a machine with one how many there are.
    for driver in ["cuda", ""] {
        let said = found(driver);
        assert!(said.starts_with("cuda ") || said.starts_with("none "), "{said}");
    }
}

#[test]
fn a_machine_without_libcuda_has_no_driver_and_that_is_a_value() {
    assert_eq!(driver_named(Some("off")).unwrap_err(), NoDriver::Off);
    let present = ["/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/nvidia/lib64"]
        .iter()
        .any(|folder| std::path::Path::new(folder).join("libcuda.so.1").exists());
    match driver_named(Some("cuda")) {
        Ok(driver) => assert!(!driver.devices().unwrap().is_empty()),
        Err(absent) if !present => assert_eq!(absent, NoDriver::NoLibrary),
        Err(_) => {}
    }
}
