//! Sends a live daemon requests that parse and make no sense: it answers or closes the connection, and goes on serving.

#![allow(clippy::unwrap_used, reason = "a test may fail here")]

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    time::Duration,
};

use crate::support::*;
use bytes::Bytes;
use kvlane_client::{SaveMethod, Tool};
use kvlane_proto::{Address, FrameReader, Message, encode_frame, v1, v1::request::Body as Ask};
use proptest::{prelude::*, sample::select};

/// Few values, so that requests meet what other requests made.
fn engine_id() -> impl Strategy<Value = String> {
    select(vec!["", "x", "y", "good"]).prop_map(str::to_owned)
}

fn name() -> impl Strategy<Value = Bytes> {
    prop_oneof![
        6 => select(vec![[1u8; 16], [3; 16], [7; 16]]).prop_map(|name| Bytes::copy_from_slice(&name)),
        1 => proptest::collection::vec(any::<u8>(), 0..40).prop_map(Bytes::from),
    ]
}

fn hash_list() -> impl Strategy<Value = Bytes> {
    prop_oneof![
        6 => (0u64..8, 0u64..24).prop_map(|(first, count)| {
            hashes(first, count).iter().flat_map(|hash| hash.0).collect::<Vec<_>>().into()
        }),
        1 => proptest::collection::vec(any::<u8>(), 0..100).prop_map(Bytes::from),
    ]
}

fn number() -> impl Strategy<Value = u64> {
    prop_oneof![8 => 0u64..5, 1 => Just(u64::MAX), 1 => any::<u64>()]
}

fn small() -> impl Strategy<Value = u32> {
    prop_oneof![12 => 0u32..4, 1 => Just(u32::MAX), 1 => any::<u32>()]
}

fn hello() -> impl Strategy<Value = Ask> {
    let wire = prop_oneof![9 => Just((1, 1)), 1 => (any::<u32>(), any::<u32>())];
    (wire, -1i32..4, engine_id(), name(), proptest::collection::vec(number(), 0..4)).prop_map(
        |((wire_min, wire_max), role, engine_id, process_nonce, live_leases)| {
            let client = "nonsense".into();
            Ask::Hello(v1::Hello { wire_min, wire_max, client, role, engine_id, process_nonce, live_leases })
        },
    )
}

/// Short waits: the daemon answers in the order of what it waits for.
fn hand_off() -> impl Strategy<Value = v1::HandOff> {
    (engine_id(), name(), number(), 0u32..50).prop_map(|(engine_id, run, tokens, wait_ms)| v1::HandOff {
        engine_id,
        run,
        tokens,
        wait_ms,
    })
}

fn open_engine() -> impl Strategy<Value = Ask> {
    let group = (name(), small(), small()).prop_map(|(namespace, tokens_per_block, window_blocks)| {
        v1::Group { namespace, name: "n".into(), tokens_per_block, window_blocks, crosses_hosts: true }
    });
    (proptest::collection::vec(group, 0..4), small(), number()).prop_map(
        |(groups, workers, cancelled_below)| {
            Ask::OpenEngine(v1::OpenEngine { groups, workers, cancelled_below })
        },
    )
}

fn region() -> impl Strategy<Value = v1::Region> {
    // The good ones point to memory that is not there: copying from it must fail and not be believed.
    let good = (1u64..64, 1u64..20_000).prop_map(|(blocks, piece_bytes)| v1::Region {
        base: 4096,
        block_stride: piece_bytes,
        blocks,
        piece_bytes,
        piece_offsets: vec![0],
    });
    let any_offsets = proptest::collection::vec(number(), 0..4);
    let wild = (any::<u64>(), number(), number(), number(), any_offsets).prop_map(
        |(base, block_stride, blocks, piece_bytes, piece_offsets)| v1::Region {
            base,
            block_stride,
            blocks,
            piece_bytes,
            piece_offsets,
        },
    );
    prop_oneof![4 => good, 1 => wild]
}

/// A layout: none, one of a layer that mostly is of the region's size, or any bytes.
fn described() -> impl Strategy<Value = Bytes> {
    let told = (any::<u8>(), 0u32..3, prop_oneof![2 => Just(4096), 1 => any::<u32>()]).prop_map(
        |(name, index, size)| {
            let layer = v1::LayerLayout {
                name: format!("l.{}", name % 4),
                dtype: "torch.uint8".into(),
                element_bytes: 1,
                dimensions: vec![v1::Dimension { size, ..Default::default() }],
                ..Default::default()
            };
            let layers = vec![layer];
            let layout =
                v1::ShardLayout { index, holders: 1, tensor_parallel: 2, pipeline_parallel: 1, layers };
            layout.encode_to_vec().into()
        },
    );
    let wild = proptest::collection::vec(any::<u8>(), 0..40).prop_map(Bytes::from);
    prop_oneof![3 => Just(Bytes::new()), 2 => told, 1 => wild]
}

fn register_worker() -> impl Strategy<Value = Ask> {
    let group = (name(), name(), described(), proptest::collection::vec(region(), 0..3)).prop_flat_map(
        |(namespace, layout, described, regions)| {
            let slices = proptest::collection::vec(region(), 0..2).prop_map(|regions| v1::Slice { regions });
            // Often its own regions for a slice, as it should be.
            let own = v1::Slice { regions: regions.clone() };
            let slices = proptest::collection::vec(prop_oneof![2 => Just(own), 1 => slices], 0..3);
            slices.prop_map(move |slices| v1::WorkerGroup {
                namespace: namespace.clone(),
                layout: layout.clone(),
                regions: regions.clone(),
                slices,
                described: described.clone(),
            })
        },
    );
    let gpu = proptest::option::weighted(0.3, worker_gpu());
    (small(), small(), proptest::collection::vec(group, 0..4), any::<u64>(), -1i32..5, gpu).prop_map(
        |(rank, workers, groups, fence_address, method, gpu)| {
            Ask::RegisterWorker(v1::RegisterWorker { rank, workers, groups, fence_address, method, gpu })
        },
    )
}

fn worker_gpu() -> impl Strategy<Value = v1::WorkerGpu> {
    let handle = || prop_oneof![1 => proptest::collection::vec(any::<u8>(), 64), 1 => proptest::collection::vec(any::<u8>(), 0..70)];
    let allocation = || {
        (number(), number(), handle()).prop_map(|(base, bytes, handle)| v1::GpuAllocation {
            base,
            bytes,
            handle: handle.into(),
        })
    };
    let allocations = proptest::collection::vec(allocation(), 0..3);
    let events = proptest::collection::vec(handle().prop_map(Bytes::from), 0..3);
    (name(), allocations, proptest::option::of(allocation()), events).prop_map(
        |(device_uuid, allocations, fence, events)| v1::WorkerGpu { device_uuid, allocations, fence, events },
    )
}

fn load() -> impl Strategy<Value = Ask> {
    let numbers = || proptest::collection::vec(any::<u32>(), 0..4);
    let group = (small(), numbers(), numbers()).prop_map(|(group, block_ids, pages)| v1::LoadGroup {
        group,
        block_ids,
        pages,
    });
    let flags = (number(), small(), numbers()).prop_map(|(address, value, region_ends)| v1::LoadFlags {
        address,
        value,
        region_ends,
    });
    let (event, flags) = (proptest::option::of(small()), proptest::option::of(flags));
    let groups = proptest::collection::vec(group, 0..3);
    (groups, number(), event, flags, any::<bool>()).prop_map(
        |(groups, epoch, event, flags, beside_compute)| {
            Ask::Load(v1::Load { groups, epoch, event, flags, beside_compute })
        },
    )
}

fn save_groups() -> impl Strategy<Value = Vec<v1::SaveGroup>> {
    let parent = prop_oneof![2 => Just(Bytes::new()), 1 => name()];
    let ids = prop_oneof![4 => (0u32..24).prop_map(|n| (0..n).collect()), 1 => proptest::collection::vec(any::<u32>(), 0..9)];
    let group =
        (small(), parent, hash_list(), ids, any::<bool>()).prop_map(|(group, parent, hashes, ids, fit)| {
            let block_ids: Vec<u32> = if fit { (0..hashes.len() as u32 / 16).collect() } else { ids };
            v1::SaveGroup { group, parent, hashes, block_ids }
        });
    proptest::collection::vec(group, 0..3)
}

fn body() -> impl Strategy<Value = Option<Ask>> {
    let lookup_group = (small(), hash_list()).prop_map(|(group, hashes)| v1::LookupGroup { group, hashes });
    let lookup_groups = proptest::collection::vec(lookup_group, 0..4);
    prop_oneof![
        1 => Just(None),
        2 => hello().prop_map(Some),
        3 => open_engine().prop_map(Some),
        3 => register_worker().prop_map(Some),
        1 => any::<bool>().prop_map(|writable| Some(Ask::MapPool(v1::MapPool { writable }))),
        2 => Just(Some(Ask::PoolMapped(v1::PoolMapped {}))),
        3 => (lookup_groups, number(), proptest::option::of(hand_off())).prop_map(|(groups, max_tokens, hand_off)| {
            let (may_wait, tokens_per_s) = (max_tokens % 2 == 0, (max_tokens % 7) as u32);
            let (request, again) = (max_tokens % 5, max_tokens % 3 == 0);
            Some(Ask::Lookup(v1::Lookup { groups, max_tokens, may_wait, hand_off, tokens_per_s, request, again, traceparent: String::new() }))
        }),
        1 => proptest::collection::vec(number(), 0..4).prop_map(|leases| Some(Ask::Release(v1::Release { leases }))),
        3 => (save_groups(), number(), proptest::option::of(small()), number())
            .prop_map(|(groups, epoch, event, job)| Some(Ask::Save(v1::Save { groups, epoch, event, job }))),
        1 => (number(), 0u32..3)
            .prop_map(|(below_job, timeout_ms)| Some(Ask::CancelSaves(v1::CancelSaves { below_job, timeout_ms }))),
        1 => load().prop_map(Some),
        3 => (save_groups(), number()).prop_map(|(groups, job)| Some(Ask::Claim(v1::Claim { groups, job }))),
        2 => (number(), any::<bool>()).prop_map(|(claim, written)| Some(Ask::Commit(v1::Commit { claim, written }))),
        1 => proptest::collection::vec(number(), 0..4).prop_map(|live_leases| Some(Ask::Heartbeat(v1::Heartbeat { live_leases }))),
        1 => (0u32..3).prop_map(|timeout_ms| Some(Ask::Settle(v1::Settle { timeout_ms }))),
        // Another namespace than the well-behaved engine's: dropping that one is allowed.
        1 => Just(Some(Ask::DropNamespaces(v1::DropNamespaces { namespaces: vec![Bytes::from_static(&[7; 16])] }))),
        1 => Just(Some(Ask::GetStatus(v1::GetStatus {}))),
        1 => Just(Some(Ask::Bye(v1::Bye {}))),
    ]
}

/// Mostly a sensible beginning, so that what follows gets past it.
fn conversation() -> impl Strategy<Value = Vec<Option<Ask>>> {
    (proptest::option::weighted(0.9, hello()), proptest::collection::vec(body(), 0..12))
        .prop_map(|(greeting, rest)| greeting.map(Some).into_iter().chain(rest).collect())
}

/// Says all requests and reads what comes until each has its answer, or the daemon hung up.
fn talk(stream: &mut UnixStream, asks: &[Option<Ask>]) -> usize {
    let mut reader = FrameReader::default();
    let mut answers = 0;
    for (id, body) in asks.iter().enumerate() {
        let request = v1::Request { id: id as u64, body: body.clone() };
        if stream.write_all(&encode_frame(&request)).is_err() {
            return answers;
        }
        loop {
            if let Some(reply) = reader.next_message::<v1::Reply>().unwrap() {
                assert_eq!(reply.id, id as u64);
                assert!(reply.body.is_some() && reply.boot_id.len() == 16);
                answers += 1;
                break;
            }
            let mut bytes = [0; 4096];
            match stream.read(&mut bytes) {
                Ok(0) => return answers,
                Ok(count) => reader.push(&bytes[..count]),
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return answers,
                Err(error) => assert_eq!(error.to_string(), "", "no answer to {body:?}"),
            }
        }
    }
    answers
}

#[test]
fn nonsense_is_answered_and_harms_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let Address::Unix(path) = &address else { unreachable!() };
    let daemon = start(&address);
    let mut good = Engine::start(&address, "good", SaveMethod::Auto);
    assert_eq!(good.save(1000, 0..8).blocks, 8);
    settle(&address);
    let wanted: Vec<Vec<u8>> = (0..8).map(|id| good.block(id)).collect();
    let mut answered = 0;
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: 300,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let speakers = proptest::collection::vec(conversation(), 1..4);
    let counted = std::cell::Cell::new(0);
    let outcome = runner.run(&speakers, |conversations| {
        // Connected at the same time, so that they meet each other's sessions.
        let mut streams: Vec<UnixStream> =
            conversations.iter().map(|_| UnixStream::connect(path).unwrap()).collect();
        for (stream, asks) in streams.iter_mut().zip(&conversations) {
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            counted.set(counted.get() + talk(stream, asks));
        }
        Ok(())
    });
    assert!(outcome.is_ok(), "{outcome:?}");
    answered += counted.get();
    assert!(answered > 300, "only {answered} answers: the requests do not get past the greeting");
    // The well-behaved engine never noticed.
    let hit = good.look_up(1000, 8);
    assert_eq!(hit.tokens, 8 * u64::from(TOKENS));
    assert!(good.load(&hit, 40..48).ok);
    for (id, bytes) in wanted.iter().enumerate() {
        assert!(good.block(40 + id) == *bytes, "block {id} came back changed");
    }
    good.scheduler.release(hit.boot, hit.lease);
    assert_eq!(good.save(2000, 0..4).blocks, 4);
    let mut tool = Tool::connect(&address, Duration::from_secs(5)).unwrap();
    assert!(tool.status().unwrap().sessions.iter().any(|session| session.engine_id == "good"));
    drop(good);
    assert!(daemon.stop(PATIENCE), "nothing was left under way");
}
