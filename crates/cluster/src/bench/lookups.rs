//! [`Lookups`]: asks as a daemon asks that has no blocks itself, and times the answers; between them pings to an [`Echo`].
//!
//! [`Echo`]: super::Echo

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvlane_fabric::{Engine, FabricError, PeerId, SendOptions, Transport};
use kvlane_index::bench::{hash, mixed};
use kvlane_memory::{Arena, ArenaError, ArenaOptions, HugePages, Numa, PAGE_BYTES};
use kvlane_store::{FindDone, Question, Source, Store, StoreOptions};
use parking_lot::Mutex;
use thiserror::Error;

use super::named_blocks::{SHARD_BYTES, SPACE};
use super::{echo, loopback};
use crate::cluster::{Cluster, ClusterError, ClusterOptions, Directory};
use crate::index_messages::FromReplica;
use crate::messages::{Blocks, Message};

/// Pages of the pool, which stays empty.
const POOL_PAGES: u64 = 256;
const REACHED_WITHIN: Duration = Duration::from_secs(10);
/// How long after the last question its answer may come. Only a bug takes longer than the daemon's patience and this.
const ENDED_WITHIN: Duration = Duration::from_secs(30);

/// Why lookups cannot be made.
#[derive(Debug, Error)]
pub enum LookupsError {
    /// The pool cannot be allocated.
    #[error(transparent)]
    Pool(#[from] ArenaError),
    /// The daemon cannot take part in the cluster.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// The echo is not reached.
    #[error(transparent)]
    Echo(#[from] FabricError),
    /// The system gives no thread.
    #[error("cannot start a thread: {0}")]
    Io(#[from] std::io::Error),
}

/// Which prompts are asked for, and when.
#[derive(Clone, Copy, Debug)]
pub struct Prompts {
    /// Owners whose numbers begin at 0. Each prompt is one owner's, in turn.
    pub owners: u64,
    /// An owner's blocks that never change. A prompt lies among them.
    pub kept: u64,
    /// Blocks of a prompt, at most `kept` and at most those of one message.
    pub blocks: u64,
    /// Lookups a second. With an echo, as many pings, in turns.
    pub a_second: f64,
    /// Time from the first lookup to the last.
    pub time: Duration,
}

/// The outcome of all lookups and pings of one call.
#[derive(Clone, Debug, Default)]
pub struct Asked {
    /// Lookups that were asked.
    pub lookups: u64,
    /// Microseconds of each lookup that found its whole prompt at its owner alone.
    pub right_us: Vec<f64>,
    /// Microseconds of each that ended with nothing.
    pub given_up_us: Vec<f64>,
    /// Lookups that found something else.
    pub wrong: u64,
    /// Microseconds of each ping.
    pub pings_us: Vec<f64>,
    /// Pings that were sent.
    pub pings: u64,
}

/// A daemon of a cluster that only asks.
pub struct Lookups {
    cluster: Arc<Cluster>,
    source: Arc<dyn Source>,
    store: Arc<Store>,
    pinger: Option<Pinger>,
}

struct Pinger {
    engine: Arc<Engine>,
    peer: PeerId,
    came: Mutex<Receiver<(u64, Instant)>>,
    thread: Option<JoinHandle<()>>,
}

impl Lookups {
    /// Joins these replicas, and gives lookups up after a while. All goes by TCP. With `echo` it reaches an echo there, which
    /// must answer [`Lookups::pings_from`].
    ///
    /// # Errors
    /// [`LookupsError`]
    pub fn open(
        replicas: Vec<String>,
        answer_within: Duration,
        echo: Option<SocketAddr>,
    ) -> Result<Self, LookupsError> {
        let options = ArenaOptions {
            bytes: POOL_PAGES * PAGE_BYTES,
            hugepages: HugePages::Off,
            numa: Numa::Off,
            threads: 1,
        };
        let arena = Arc::new(Arena::create(&options, &|_| {})?);
        let options = ClusterOptions {
            listen: vec![loopback::ANY],
            advertise: Vec::new(),
            token: String::new(),
            tls: None,
            transport: Some(Transport::TCP),
            socket_threads: 1,
            directory: Directory::Index(replicas),
            answer_within,
            name: "lookups".into(),
        };
        let cluster = Cluster::open(options, &arena)?;
        let source = cluster.source();
        let store = Store::with_tiers(arena, StoreOptions::default(), None, vec![cluster.source()]);
        cluster.start(&store)?;
        let pinger = echo.map(Pinger::open).transpose()?;
        Ok(Self { cluster, source, store, pinger })
    }

    /// Where the pings come from.
    pub fn pings_from(&self) -> Option<SocketAddr> {
        loopback::address(&self.pinger.as_ref()?.engine).ok()
    }

    /// How many owners and replicas are reached.
    pub fn reached(&self) -> (usize, usize) {
        let status = self.cluster.status();
        let count = |members: &[crate::MemberStatus]| members.iter().filter(|each| each.is_reached).count();
        (count(&status.members), count(&status.replicas))
    }

    /// Asks for prompts, and pings in turn, and waits until all lookups have ended.
    pub fn ask(&self, prompts: &Prompts) -> Asked {
        let mut asked = Asked::default();
        let (done, ended) = channel();
        let mut pings = HashMap::new();
        let (ping_len, answer_len) = message_lens(prompts.blocks as usize);
        let began = Instant::now();
        let step = Duration::from_secs_f64(1.0 / prompts.a_second);
        let mut due = Duration::ZERO;
        while due < prompts.time {
            sleep_until(began + due);
            self.look_up(prompts, asked.lookups, &done);
            asked.lookups += 1;
            if let Some(pinger) = &self.pinger {
                sleep_until(began + due + step / 2);
                pings.insert(asked.pings, Instant::now());
                pinger.ping(asked.pings, ping_len, answer_len);
                asked.pings += 1;
            }
            due += step;
        }
        // Dropped with the last lookup.
        drop(done);
        asked.note_lookups(&ended, prompts.blocks as u32);
        if let Some(pinger) = &self.pinger {
            asked.pings_us = pinger.times(&pings);
        }
        asked
    }

    fn look_up(&self, prompts: &Prompts, number: u64, done: &Sender<Ended>) {
        let owner = number % prompts.owners;
        let first = mixed(number) % (prompts.kept - prompts.blocks + 1);
        let question = Question {
            space: SPACE,
            shard_bytes: [SHARD_BYTES].into(),
            hashes: (first..first + prompts.blocks).map(|block| hash(owner, block)).collect(),
            only_prefix: true,
        };
        let done = done.clone();
        let began = Instant::now();
        let find_done = FindDone::new(move |found| {
            let runs = found.into_iter().flat_map(|found| found.positions).collect();
            // If nobody waits any more, the lookup has not ended in time.
            drop(done.send(Ended { took: began.elapsed(), runs }));
        });
        self.source.find(question, find_done);
    }
}

/// A lookup that is over, and what it has found.
struct Ended {
    took: Duration,
    runs: Vec<Range<u32>>,
}

impl Asked {
    fn note_lookups(&mut self, ended: &Receiver<Ended>, blocks: u32) {
        let deadline = Instant::now() + ENDED_WITHIN;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match ended.recv_timeout(left) {
                Ok(Ended { took, runs }) => {
                    let us = took.as_secs_f64() * 1e6;
                    match &runs[..] {
                        [run] if *run == (0..blocks) => self.right_us.push(us),
                        [] => self.given_up_us.push(us),
                        _ => self.wrong += 1,
                    }
                }
                Err(RecvTimeoutError::Disconnected | RecvTimeoutError::Timeout) => return,
            }
        }
    }
}

impl Drop for Lookups {
    fn drop(&mut self) {
        self.cluster.stop();
        self.store.wake_journal_readers();
    }
}

impl Pinger {
    fn open(echo: SocketAddr) -> Result<Self, LookupsError> {
        let engine = Arc::new(loopback::engine()?);
        let peer = engine.connect_to(echo, REACHED_WITHIN)?;
        let (arrived, came) = channel();
        let receiving = Arc::clone(&engine);
        let run = move || {
            while let Some(message) = receiving.receive(None) {
                let now = Instant::now();
                if let Some(number) = echo::number(&message.bytes) {
                    // If nobody waits any more, the ping counts as lost.
                    let _ = arrived.send((number, now));
                }
            }
        };
        let thread = std::thread::Builder::new().name("kvlane-pings".into()).spawn(run)?;
        Ok(Self { engine, peer, came: Mutex::new(came), thread: Some(thread) })
    }

    fn ping(&self, number: u64, len: usize, answer_len: usize) {
        // If it does not arrive, it counts as lost.
        drop(self.engine.send(self.peer, echo::ping(number, len, answer_len), SendOptions::default()));
    }

    /// Microseconds of each of these pings, by number and time.
    fn times(&self, sent: &HashMap<u64, Instant>) -> Vec<f64> {
        let (came, deadline) = (self.came.lock(), Instant::now() + ENDED_WITHIN);
        let mut times = Vec::with_capacity(sent.len());
        while times.len() < sent.len() {
            let left = deadline.saturating_duration_since(Instant::now());
            let Ok((number, at)) = came.recv_timeout(left) else { break };
            let took = sent.get(&number).map(|sent| at.saturating_duration_since(*sent));
            times.extend(took.map(|took| took.as_secs_f64() * 1e6));
        }
        times
    }
}

impl Drop for Pinger {
    fn drop(&mut self) {
        self.engine.close();
        if let Some(thread) = self.thread.take() {
            // If it panicked, its message is on stderr.
            drop(thread.join());
        }
    }
}

/// Bytes of a question for so many blocks, and of an answer that names one owner.
fn message_lens(blocks: usize) -> (usize, usize) {
    let hashes = (0..blocks as u64).map(|number| hash(0, number)).collect();
    let blocks_of = Blocks { space: SPACE, shard_bytes: vec![SHARD_BYTES], hashes };
    let question = Message::Question { number: 10_000, first: 0, blocks: blocks_of, only_prefix: true };
    let owner = SocketAddr::from((Ipv4Addr::LOCALHOST, 40_000));
    #[expect(clippy::single_range_in_vec_init, reason = "one run")]
    let owners = vec![(owner, vec![0..blocks as u32])];
    let answer = Message::FromReplica(FromReplica::Located { number: 10_000, first: 0, owners });
    (question.encode().len(), answer.encode().len())
}

fn sleep_until(at: Instant) {
    std::thread::sleep(at.saturating_duration_since(Instant::now()));
}
