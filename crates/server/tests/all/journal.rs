//! The journal over the wire, compared with the blocks that lookups find.

#![allow(clippy::unwrap_used, reason = "a test may fail here")]

use std::{collections::BTreeSet, time::Instant};

use crate::support::*;
use kvlane_client::{BlockChanges, SaveMethod, Tool};

/// What follows the changes, as vLLM's listeners do.
#[derive(Default)]
struct Listener {
    known: BTreeSet<[u8; 16]>,
    gone: u64,
    started_again: u64,
    /// Hears of what comes only.
    deaf: BTreeSet<[u8; 16]>,
}

impl Listener {
    /// From here on the engine hears of what comes.
    fn begin(engine: &mut Engine) -> Self {
        let mut listener = Self::default();
        engine.wait_connected();
        listener.wait_for_start(engine);
        listener
    }

    /// Until it is told to start again.
    fn wait_for_start(&mut self, engine: &mut Engine) {
        let (before, deadline) = (self.started_again, Instant::now() + PATIENCE);
        while self.started_again == before {
            assert!(Instant::now() < deadline, "it is not told to start again");
            self.hear(engine);
            std::thread::yield_now();
        }
    }

    /// Hears all there is: until what was saved last, which is new, was heard of.
    fn follow(&mut self, engine: &mut Engine, last: [u8; 16]) {
        let deadline = Instant::now() + PATIENCE;
        while !self.known.contains(&last) {
            assert!(Instant::now() < deadline, "the last block is not heard of");
            self.hear(engine);
            std::thread::yield_now();
        }
    }

    fn hear(&mut self, engine: &mut Engine) {
        engine.scheduler.tick();
        let BlockChanges { start_again, changes } = engine.scheduler.take_changes();
        if start_again {
            self.started_again += 1;
            self.known.clear();
        }
        for change in changes {
            assert_eq!(change.group, 0);
            if change.is_visible {
                self.known.insert(change.hash);
                self.deaf.insert(change.hash);
            } else {
                self.known.remove(&change.hash);
                self.gone += 1;
            }
        }
    }
}

fn hash(block: u64) -> [u8; 16] {
    hashes(block, 1)[0].0
}

/// The blocks of one prompt that a lookup finds.
fn found(engine: &mut Engine, prompt: u64, blocks: u64) -> BTreeSet<[u8; 16]> {
    let hit = engine.look_up(prompt * 1000, blocks);
    engine.scheduler.release(hit.boot, hit.lease);
    (0..hit.tokens / u64::from(TOKENS)).map(|block| hash(prompt * 1000 + block)).collect()
}

/// A pool of 16 MiB has room for 1,024 blocks of 16 KiB, or a few less: 40 prompts of 64 do not fit.
#[test]
fn what_is_heard_of_is_what_lookups_find_whoever_saved_it() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let _daemon = start(&address);
    let mut engine = Engine::start(&address, "a", SaveMethod::Auto);
    let mut listener = Listener::begin(&mut engine);
    let mut other = Engine::start(&address, "b", SaveMethod::Auto);
    other.wait_connected();
    let prompts = 40;
    for prompt in 0..prompts {
        let saver = if prompt % 3 == 0 { &mut other } else { &mut engine };
        let saved = saver.save(prompt * 1000, 0..64);
        assert!(saved.ok && saved.blocks == 64, "{saved:?}");
        if prompt % 5 == 2 {
            settle(&address);
            listener.follow(&mut engine, hash(prompt * 1000 + 63));
        }
    }
    settle(&address);
    engine.save(77_000, 0..1);
    listener.follow(&mut engine, hash(77_000));
    let mut all = found(&mut engine, 77, 1);
    for prompt in 0..prompts {
        all.extend(found(&mut engine, prompt, 64));
    }
    assert_eq!(listener.known, all);
    assert!(listener.gone > 500 && listener.started_again == 1, "{} gone", listener.gone);
    assert!(listener.deaf != all, "who does not hear of what goes would know as much");

    // Everything of the namespace is dropped.
    Tool::connect(&address, PATIENCE).unwrap().drop_namespaces(&[[3; 16]]).unwrap();
    engine.save(78_000, 0..1);
    listener.follow(&mut engine, hash(78_000));
    assert_eq!(listener.known, BTreeSet::from([hash(78_000)]));
}

/// Another engine's blocks, of another model, are not this one's business. An engine that is away too long is told so.
#[test]
fn who_is_behind_more_than_is_kept_starts_again() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let _daemon = start(&address);
    let mut engine = Engine::start(&address, "a", SaveMethod::Auto);
    let mut listener = Listener::begin(&mut engine);
    engine.save(0, 0..8);
    listener.follow(&mut engine, hash(7));
    // 38,400 blocks, most of which come and go: more than 65,536 entries that nobody reads.
    let mut other = Engine::start(&address, "b", SaveMethod::Auto);
    other.wait_connected();
    for round in 0..600 {
        other.save(100_000 + round * 1000, 0..64);
    }
    settle(&address);
    listener.wait_for_start(&mut engine);
    assert!(listener.known.is_empty(), "all that is known of is forgotten");
    engine.save(9_000, 0..1);
    listener.follow(&mut engine, hash(9_000));
    assert_eq!(listener.known, BTreeSet::from([hash(9_000)]), "and it goes on from there");
}

/// A daemon that starts anew has none of the former one's blocks.
#[test]
fn another_run_of_the_daemon_starts_again() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let daemon = start(&address);
    let mut engine = Engine::start(&address, "a", SaveMethod::Auto);
    let mut listener = Listener::begin(&mut engine);
    engine.save(0, 0..8);
    listener.follow(&mut engine, hash(7));
    assert!(daemon.stop(PATIENCE));
    let _daemon = start(&address);
    listener.wait_for_start(&mut engine);
    assert!(listener.known.is_empty());
    engine.wait_connected();
    engine.save(1000, 0..2);
    listener.follow(&mut engine, hash(1001));
    assert_eq!(listener.known, BTreeSet::from([hash(1000), hash(1001)]));
}
