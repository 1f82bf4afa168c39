//! Which path the bytes of a GPU take, and which transfers are refused.

use std::sync::Arc;
use std::time::Duration;

use kvlane_fabric::{
    Access, EngineOptions, FabricError, Failure, Op, Pieces, Route, Tls, Transfer, Transport,
};
use kvlane_gpu::{Gpu, code};

use crate::certificates::Authority;
use crate::side::{Bytes, On, Side, done, driver, pattern, small_parts};
use crate::support::{MIB, PATIENCE};

#[test]
fn the_hosts_memory_goes_by_cma_beside_a_gpus_that_cannot() {
    let driver = driver();
    let (here, there) = (Side::of(&driver, On::Gpu(0), MIB), Side::of(&driver, On::Host, MIB));
    let host = Bytes::new(&driver, On::Host, MIB);
    // SAFETY: the engine is closed below.
    let number = unsafe { host.register(&here.engine) };
    let peer = here.meet(&there);
    here.memory.put(0, &pattern(MIB, 1));
    done(&here.move_all(peer, Op::Write, there.region));
    assert!(there.memory.get(0, MIB) == pattern(MIB, 1));
    host.put(0, &pattern(MIB, 2));
    let mut run = here.run(there.region, 0, 0, MIB);
    run.local.region = number;
    done(&here.begin(peer, Op::Write, vec![run]));
    assert!(there.memory.get(0, MIB) == pattern(MIB, 2));
    let paths = here.engine.paths(peer);
    assert!(
        ["cma", "tcp-slots"]
            .iter()
            .all(|carrier| paths.iter().any(|path| path.carrier == *carrier && path.is_up))
    );
    assert_eq!(here.engine.staged().from_gpus, MIB as u64, "once, and the host's did not");
    here.engine.close();
}

#[test]
fn where_cma_is_required_a_gpus_memory_is_refused_with_a_reason() {
    let driver = driver();
    let options = EngineOptions { transport: Some(Transport::CMA), ..EngineOptions::default() };
    let here = Side::new(&driver, On::Host, MIB, options);
    let there = Side::of(&driver, On::Gpu(0), MIB);
    let pieces = Pieces::Contiguous(here.run(there.region, 0, 0, MIB));
    let begun = here.engine.begin(here.meet(&there), Transfer::write(pieces));
    assert!(matches!(begun, Err(FabricError::NoRoute(Route::HostToGpu))), "{begun:?}");
    let gpu = Gpu::open(driver, 0).unwrap();
    let memory = gpu.alloc(MIB as u64).unwrap();
    // SAFETY: it is not registered.
    let registered = unsafe { here.engine.register_gpu(&gpu, memory.address(), 1, Access::Read) };
    assert!(matches!(registered, Err(FabricError::NoWayToGpus)), "{registered:?}");
}

#[test]
fn where_cuda_is_required_the_hosts_memory_is_refused_with_a_reason() {
    let options = EngineOptions { transport: Some(Transport::CUDA), ..EngineOptions::default() };
    let (here, there) = (Side::new(&driver(), On::Host, MIB, options), Side::of(&driver(), On::Host, MIB));
    let pieces = Pieces::Contiguous(here.run(there.region, 0, 0, MIB));
    let begun = here.engine.begin(here.meet(&there), Transfer::write(pieces));
    assert!(matches!(begun, Err(FabricError::NoRoute(Route::HostToHost))), "{begun:?}");
}

#[test]
fn what_is_not_allocated_on_a_gpu_cannot_be_registered() {
    let driver = driver();
    let side = Side::of(&driver, On::Host, MIB);
    let gpu = Gpu::open(Arc::clone(&driver) as _, 0).unwrap();
    let memory = gpu.alloc(MIB as u64).unwrap();
    let register = |address, len| {
        // SAFETY: what is registered here lives until the engine is dropped.
        unsafe { side.engine.register_gpu(&gpu, address, len, Access::Read) }
    };
    assert!(register(memory.address() + 5, MIB as u64 - 5).is_ok());
    for (address, len) in [(4096, 1), (memory.address(), u64::MAX), (memory.address(), 1 << 40)] {
        let registered = register(address, len);
        assert!(
            matches!(registered, Err(FabricError::Gpu(_))),
            "{len} bytes at {address:#x}: {registered:?}"
        );
    }
    side.engine.close();
}

/// A transfer that needs pinned memory takes it. If the driver has none, that transfer fails, and the next one asks again.
#[test]
fn pinned_memory_is_taken_by_the_first_transfer_that_needs_it() {
    let driver = driver();
    let (here, there) = (Side::of(&driver, On::Gpu(0), MIB), Side::of(&driver, On::Host, MIB));
    driver.fail_call(0, Some("cuMemHostAlloc"), 1, code::OUT_OF_MEMORY);
    let peer = here.meet(&there);
    for op in [Op::Write, Op::Read] {
        let failed = here.move_all(peer, op, there.region).wait(Some(PATIENCE));
        assert_eq!(failed, Some(Err(Failure::Gpu)), "{op:?}");
        done(&here.move_all(peer, op, there.region));
        there.memory.put(0, &pattern(MIB, 4));
        driver.fail_call(0, Some("cuMemHostAlloc"), 1, code::OUT_OF_MEMORY);
    }
    assert!(here.memory.get(0, MIB) == pattern(MIB, 4));
}

#[test]
fn a_gpus_memory_that_may_only_be_read_is_not_written() {
    let driver = driver();
    let (here, there) = (Side::of(&driver, On::Gpu(0), MIB), Side::of(&driver, On::Host, MIB));
    let gpu = Gpu::open(Arc::clone(&driver) as _, 1).unwrap();
    let memory = gpu.alloc(MIB as u64).unwrap();
    // SAFETY: the engine is closed below.
    let number =
        unsafe { there.engine.register_gpu(&gpu, memory.address(), MIB as u64, Access::Read).unwrap() };
    let peer = here.meet(&there);
    let outcome = here.move_all(peer, Op::Write, number).wait(Some(PATIENCE));
    assert_eq!(outcome, Some(Err(Failure::Refused)));
    done(&here.move_all(peer, Op::Read, number));
    there.engine.unregister(number).unwrap();
    // The news of it may come first.
    let pieces = Pieces::Contiguous(here.run(number, 0, 0, MIB));
    match here.engine.begin(peer, Transfer { op: Op::Read, ..Transfer::write(pieces) }) {
        Ok(read) => assert_eq!(read.wait(Some(PATIENCE)), Some(Err(Failure::Refused))),
        Err(refused) => assert!(matches!(refused, FabricError::Shape(_)), "{refused}"),
    }
    there.engine.close();
}

/// Thirteen connections could have 52 slots in each direction, and there are 32.
#[test]
fn more_connections_than_slots_take_turns() {
    const PEERS: usize = 13;
    let driver = driver();
    let options = || small_parts(Some(Transport::TCP));
    let there = Side::new(&driver, On::Gpu(0), PEERS * MIB, options());
    let sides: Vec<Side> = (0..PEERS).map(|_| Side::new(&driver, On::Host, MIB, options())).collect();
    let peers: Vec<_> = sides.iter().map(|side| side.meet(&there)).collect();
    driver.slow_down(Duration::from_millis(20));
    for op in [Op::Write, Op::Read] {
        sides.iter().zip(1..).for_each(|(side, seed)| match op {
            Op::Write => side.memory.put(0, &pattern(MIB, seed)),
            Op::Read => side.memory.fill(0),
        });
        let begin = |(index, side): (usize, &Side)| {
            side.begin(peers[index], op, vec![side.run(there.region, 0, index * MIB, MIB)])
        };
        let handles: Vec<_> = sides.iter().enumerate().map(begin).collect();
        handles.iter().for_each(done);
        for (index, side) in sides.iter().enumerate() {
            let wanted = pattern(MIB, index as u64 + 1);
            assert!(
                there.memory.get(index * MIB, MIB) == wanted && side.memory.get(0, MIB) == wanted,
                "{op:?}"
            );
        }
    }
}

#[test]
fn a_gpus_memory_goes_encrypted_too() {
    let (authority, folder) = (Authority::new("ours"), tempfile::tempdir().unwrap());
    let driver = driver();
    let options = |name| {
        let (certificate, key, authority) = authority.files(folder.path(), name);
        EngineOptions { tls: Some(Tls { certificate, key, authority }), ..EngineOptions::default() }
    };
    let here = Side::new(&driver, On::Gpu(0), MIB, options("here"));
    let there = Side::new(&driver, On::Gpu(1), MIB, options("there"));
    let peer = here.meet(&there);
    here.memory.put(0, &pattern(MIB, 1));
    done(&here.move_all(peer, Op::Write, there.region));
    assert!(there.memory.get(0, MIB) == pattern(MIB, 1));
    there.memory.put(0, &pattern(MIB, 2));
    done(&here.move_all(peer, Op::Read, there.region));
    assert!(here.memory.get(0, MIB) == pattern(MIB, 2));
}
