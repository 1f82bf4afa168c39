//! Rounds of loads and saves while the daemon is stopped and killed at random. Once a load has ended, its blocks are not
//! written any more. Once a save has ended, later writes to its blocks are never loaded as the saved bytes.

use std::{
    thread::sleep,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use kvlane_client::{Hit, Promises, Release};
use kvlane_proto::Address;

use crate::{
    daemon::Daemon,
    driver::{BLOCKS, SMALL_PIECE, driver, engines_gpu},
    engine::{GpuEngine, POISON},
    support::{PATIENCE, TOKENS, address, hashes, settle},
};

/// How many rounds.
const ROUNDS: &str = "KVLANE_TEST_ROUNDS";
/// What happens follows from it; another one each time.
const SEED: &str = "KVLANE_TEST_SEED";
const ROUNDS_OF_EACH_TEST_RUN: u32 = 40;

/// Blocks of a prompt.
const PROMPT: u32 = 4;
/// Prompts, each with blocks of the engine that hold it all the time.
const PROMPTS: u32 = 3;
/// Further groups of as many blocks, that prompts are loaded into.
const TARGETS: std::ops::Range<u32> = PROMPTS..BLOCKS / PROMPT;
/// Canaries are seeds from here on.
const FIRST_CANARY: u8 = 64;

/// What happens to the daemon while loads are under way.
#[derive(Debug, Clone, Copy)]
enum Fate {
    None,
    Stopped,
    /// Until the engine has carried out its loads itself.
    StoppedForLong,
    Killed,
    StoppedAndKilled,
}

/// Seeds of what the blocks of a group hold.
type Seeds = [u8; PROMPT as usize];

/// A save that ends so late may still be carried out, and then must not count.
const SAVE_TIMEOUT: Duration = Duration::from_millis(30);

struct Rounds {
    address: Address,
    daemon: Option<Daemon>,
    engine: GpuEngine,
    seed: u64,
    dice: u64,
    number: u32,
    /// What each target holds.
    targets: Vec<Seeds>,
    /// What was saved in the rounds before, or given up: names of prompts, and what the blocks held.
    saved: Vec<(u64, Seeds)>,
    tally: Tally,
}

#[derive(Debug, Default)]
struct Tally {
    loads: u32,
    /// Loads of what the rounds saved.
    loads_of_saves: u32,
    saves: u32,
    saves_given_up: u32,
}

impl Tally {
    fn is_enough(&self, rounds: u32) -> bool {
        let rare = [self.loads_of_saves, self.saves, self.saves_given_up];
        self.loads > rounds && rare.iter().all(|count| *count > rounds / 20)
    }
}

/// A load to ask for, and then under way.
struct Load {
    target: usize,
    seeds: Seeds,
    hit: Hit,
    job: u64,
}

impl Rounds {
    fn new(address: &Address, seed: u64) -> Self {
        let daemon = Daemon::start(address);
        let gpu = engines_gpu(&driver());
        let mut engine = GpuEngine::on(&gpu, address, "engine", SMALL_PIECE, SAVE_TIMEOUT).unwrap();
        for prompt in 0..PROMPTS {
            write(&mut engine, prompt, home_seeds(prompt));
        }
        Self {
            address: address.clone(),
            daemon: Some(daemon),
            engine,
            seed,
            dice: seed.wrapping_mul(2) + 1,
            number: 0,
            targets: vec![[POISON; PROMPT as usize]; TARGETS.len()],
            saved: Vec::new(),
            tally: Tally::default(),
        }
    }

    fn below(&mut self, most: u32) -> u32 {
        // xorshift64
        self.dice ^= self.dice << 13;
        self.dice ^= self.dice >> 7;
        self.dice ^= self.dice << 17;
        (self.dice >> 33) as u32 % most
    }

    /// What is varied is the moment.
    fn dawdle(&mut self) {
        let micros = self.below(3000);
        sleep(Duration::from_micros(micros.into()));
    }

    fn daemon(&self) -> &Daemon {
        self.daemon.as_ref().unwrap()
    }

    fn restart(&mut self) {
        if let Some(daemon) = self.daemon.take() {
            daemon.kill();
        }
        // Slow ones are met in the middle, fast ones at the edges.
        let slow = [0, 500, 5000][self.below(3) as usize];
        self.daemon = Some(Daemon::start_slow(&self.address, slow));
    }

    fn play(&mut self) {
        // The costly ones every so often.
        let fate = match self.number % 20 {
            3 | 12 => Fate::StoppedForLong,
            9 => Fate::Killed,
            15 => Fate::StoppedAndKilled,
            _ if self.below(2) == 0 => Fate::Stopped,
            _ => Fate::None,
        };
        let mut loads = self.promised_loads();
        let release = [Release::AtEnd, Release::WhenNear, Release::AtOnce][self.below(3) as usize];
        // Steps as long as some of the loads: those are released at once, others before their end.
        (0..3).for_each(|_| self.engine.worker.step_begins(true, Promises::default()));
        self.dawdle();
        self.engine.worker.step_begins(true, Promises::default());
        // Stopped or killed already when they are asked for, or in the middle.
        let before = self.below(3) == 0;
        if before {
            self.strike(fate);
        }
        // A target that nothing is loaded into may be saved. Giving that up keeps the daemon from loads too, so not always.
        let targets = if self.below(2) == 0 { 0..TARGETS.len() } else { 0..0 };
        let free = targets.into_iter().find(|target| loads.iter().all(|load| load.target != *target));
        let save = free.map(|target| {
            let name = 1000 * u64::from(self.number + 1);
            (target, name, self.engine.start_save(name, blocks_of(TARGETS.start + target as u32)))
        });
        for load in &mut loads {
            let blocks = blocks_of(TARGETS.start + load.target as u32);
            blocks.clone().for_each(|block| self.engine.compute(block, POISON));
            load.job = self.engine.start_load(&load.hit, blocks, release);
        }
        if !before {
            self.dawdle();
            self.strike(fate);
        }
        self.dawdle();
        if matches!(fate, Fate::StoppedForLong) {
            loads.iter().for_each(|load| self.engine.wait_usable(load.job));
            // Then those that the daemon cannot come to have been carried out.
            self.engine.wait_for_loads(None);
            self.engine.synchronize();
        }
        // What was saved, or given up, is overwritten while the daemon may still be reading it.
        if let Some((target, name, job)) = save {
            let saved = self.engine.end(job);
            self.tally.saves += u32::from(saved.ok);
            self.tally.saves_given_up += u32::from(!saved.ok);
            self.saved.push((name, self.targets[target]));
            self.write_canary(target);
        }
        // So are the blocks of loads that have ended, while a stopped daemon may still have to come to them.
        let (ended, open): (Vec<_>, Vec<_>) =
            loads.into_iter().partition(|load| self.engine.has_ended(load.job));
        let how = format!("{fate:?}, before: {before}, {release:?}");
        ended.into_iter().for_each(|load| self.finish(load, &how));
        self.mend(fate);
        open.into_iter().for_each(|load| self.finish(load, &how));
        self.look();
    }

    /// Waits for a load's end, and uses its blocks for something else.
    fn finish(&mut self, load: Load, how: &str) {
        let ended = self.engine.end(load.job);
        assert!(ended.ok, "{how}: {ended:?}");
        self.tally.loads += 1;
        for (seed, block) in load.seeds.into_iter().zip(blocks_of(TARGETS.start + load.target as u32)) {
            assert!(self.engine.holds(block, seed), "{how}: block {block} was loaded with other bytes");
        }
        self.write_canary(load.target);
        self.engine.scheduler.release(load.hit.boot, load.hit.lease);
    }

    /// The engine uses the blocks of a target for something else.
    fn write_canary(&mut self, target: usize) {
        self.targets[target] = [FIRST_CANARY + self.below(128) as u8; PROMPT as usize];
        write(&mut self.engine, TARGETS.start + target as u32, self.targets[target]);
    }

    /// Loads that the daemon promises, into some of the targets.
    fn promised_loads(&mut self) -> Vec<Load> {
        let mut loads = Vec::new();
        for target in 0..TARGETS.len() {
            if self.below(2) == 0 {
                continue;
            }
            // What is visible of the saves must be right, all else is a miss.
            let of_a_save = (self.below(2) == 0).then(|| self.saved.pop()).flatten();
            let found = of_a_save.and_then(|(name, seeds)| {
                let hit = self.look_up(name)?;
                self.tally.loads_of_saves += 1;
                Some((hit, seeds))
            });
            let (hit, seeds) = found.unwrap_or_else(|| {
                let prompt = self.below(PROMPTS);
                (self.promised(prompt), home_seeds(prompt))
            });
            loads.push(Load { target, seeds, hit, job: 0 });
        }
        loads
    }

    /// A prompt, if it is there as a whole.
    fn look_up(&mut self, name: u64) -> Option<Hit> {
        let hit = self.engine.scheduler.lookup(&[hashes(name, PROMPT.into())], u64::MAX, PATIENCE);
        if hit.tokens == u64::from(PROMPT * TOKENS) {
            return Some(hit);
        }
        if hit.tokens > 0 {
            self.engine.scheduler.release(hit.boot, hit.lease);
        }
        None
    }

    /// A prompt that the engine holds, saved again if need be.
    fn promised(&mut self, prompt: u32) -> Hit {
        let name = u64::from(100 * prompt);
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(hit) = self.look_up(name) {
                return hit;
            }
            // A daemon that was stopped is asked for nothing before it has said something.
            let saved = self.engine.save(name, blocks_of(prompt));
            assert!(saved.ok || Instant::now() < deadline, "{saved:?}");
            settle(&self.address);
        }
    }

    fn strike(&mut self, fate: Fate) {
        match fate {
            Fate::None => {}
            Fate::Stopped | Fate::StoppedForLong | Fate::StoppedAndKilled => self.daemon().pause(),
            Fate::Killed => self.restart(),
        }
    }

    fn mend(&mut self, fate: Fate) {
        match fate {
            Fate::None => {}
            Fate::Stopped | Fate::StoppedForLong => self.daemon().resume(),
            Fate::Killed => self.engine.wait_connected(),
            Fate::StoppedAndKilled => {
                self.restart();
                self.engine.wait_connected();
            }
        }
    }

    /// Every block holds what the engine wrote into it last.
    fn look(&mut self) {
        let homes = (0..PROMPTS).map(|prompt| (prompt, home_seeds(prompt)));
        let targets = TARGETS.zip(self.targets.clone());
        for (group, seeds) in homes.chain(targets) {
            for (seed, block) in seeds.into_iter().zip(blocks_of(group)) {
                assert!(self.engine.holds(block, seed), "block {block} changed after its load had ended");
            }
        }
    }
}

impl Drop for Rounds {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("that was round {} of seed {}", self.number, self.seed);
        }
    }
}

fn home_seeds(prompt: u32) -> Seeds {
    std::array::from_fn(|index| 1 + (prompt * PROMPT) as u8 + index as u8)
}

fn write(engine: &mut GpuEngine, group: u32, seeds: Seeds) {
    seeds.into_iter().zip(blocks_of(group)).for_each(|(seed, block)| engine.compute(block, seed));
    engine.synchronize();
}

fn blocks_of(group: u32) -> std::ops::Range<u32> {
    group * PROMPT..(group + 1) * PROMPT
}

#[test]
fn once_a_load_has_ended_nobody_writes_its_blocks() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let rounds = std::env::var(ROUNDS).map_or(ROUNDS_OF_EACH_TEST_RUN, |rounds| rounds.parse().unwrap());
    let seed = std::env::var(SEED).map_or_else(
        |_| SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros() as u64,
        |seed| seed.parse().unwrap(),
    );
    println!("{rounds} rounds of {SEED}={seed}");
    let mut game = Rounds::new(&address, seed);
    // All of it has to have happened often enough; dice may want more rounds for that.
    while game.number < rounds || (!game.tally.is_enough(rounds) && game.number < 5 * rounds) {
        game.play();
        game.number += 1;
    }
    println!("{:?}", game.tally);
    assert!(game.tally.is_enough(rounds), "{:?}", game.tally);
    let daemon = game.daemon.take().unwrap();
    drop(game);
    daemon.wait_until_gone(&["engine"]);
    daemon.stop();
}

/// The control: who uses blocks when their load is released, and not when it has ended, meets the daemon's writes.
#[test]
fn before_a_load_has_ended_its_blocks_may_be_written_late() {
    let folder = tempfile::tempdir().unwrap();
    let address = address(&folder);
    let daemon = Daemon::start(&address);
    let mut engine = GpuEngine::new(&address, "engine", &driver());
    engine.compute_and_save(&address, 0, 0..PROMPT, 1);
    let hit = engine.look_up(0, PROMPT);
    daemon.pause();
    let job = engine.start_load(&hit, 16..16 + PROMPT, Release::AtOnce);
    assert!(engine.released(job).ok);
    engine.wait_for_loads(None);
    (16..16 + PROMPT).for_each(|block| engine.compute(block, FIRST_CANARY));
    assert!(engine.holds(16, FIRST_CANARY) && !engine.has_ended(job));
    daemon.resume();
    assert!(engine.end(job).ok);
    engine.assert_holds(16..16 + PROMPT, 1);
    drop(engine);
    daemon.stop();
}
