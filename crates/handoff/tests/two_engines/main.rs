//! A prompt's blocks go from one engine to another: both sides with their agents, over the real fabric, in one process.
#![allow(
    clippy::unwrap_used,
    unsafe_code,
    reason = "helpers of tests fail like tests; tests register their own memory"
)]

#[path = "../../../fabric/tests/certificates/mod.rs"]
mod certificates;
mod few_blocks;
mod gpus;
mod namespaces;
mod tls;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use kvlane_block::Region;
use kvlane_fabric::{Access, Address, Descriptor, Engine, EngineOptions, Transport, Trust};
use kvlane_gpu::EngineStream;
use kvlane_handoff::{
    AgentError, Area, Filled, HandoffId, LandingOptions, LandingStatus, LendingOptions, Outcome, RANKS_MAX,
    RankAddress, RankAgent, RankOptions, ReadCounts, Reason, SchedulerAgent, SchedulerOptions, Wanted,
};

const BLOCKS: u64 = 64;
const PIECE: u64 = 32 << 10;
const LAYERS: u64 = 4;
const SOON: Duration = Duration::from_secs(20);
const SHAPE: [u8; 16] = [7; 16];
const CONTENT: [u8; 16] = [9; 16];

/// An engine's rank with its memory: layers apart.
struct Rank {
    agent: RankAgent,
    memory: &'static mut [u8],
    key: [u8; 16],
}

struct Side {
    scheduler: SchedulerAgent,
    address: SocketAddr,
    ranks: Vec<Rank>,
}

fn engine(token: &str) -> Engine {
    engine_by(token, None)
}

fn engine_by(token: &str, transport: Option<Transport>) -> Engine {
    let listen = vec!["127.0.0.1:0".parse().unwrap()];
    Engine::new(EngineOptions { listen, token: token.into(), transport, ..EngineOptions::default() }).unwrap()
}

fn rank(number: u8, token: &str) -> Rank {
    rank_by(number, token, None)
}

fn rank_by(number: u8, token: &str, transport: Option<Transport>) -> Rank {
    rank_of(number, engine_by(token, transport), BLOCKS * PIECE * LAYERS, layers)
}

/// Of memory that begins there.
fn layers(base: u64) -> Vec<Region> {
    let layer = |layer| Region {
        base: base + layer * BLOCKS * PIECE,
        block_stride: PIECE,
        blocks: BLOCKS,
        piece_bytes: PIECE,
        piece_offsets: vec![0],
    };
    (0..LAYERS).map(layer).collect()
}

/// `regions`: of memory that begins there and has so many bytes.
fn rank_of(number: u8, engine: Engine, bytes: u64, regions: impl Fn(u64) -> Vec<Region>) -> Rank {
    let bytes = bytes as usize;
    let memory: &'static mut [u8] = Box::leak(vec![0u8; bytes].into_boxed_slice());
    let base = memory.as_mut_ptr();
    // SAFETY: it is leaked, and read and written only where no hand-off has it.
    let region = unsafe { engine.register(base, bytes as u64, Access::Windows) }.unwrap();
    let base = base.expose_provenance() as u64;
    let areas = vec![Area { region, base, bytes: bytes as u64 }];
    let key = [number; 16];
    let agent =
        RankAgent::start(engine, RankOptions { regions: regions(base), areas, gpu: None, key }).unwrap();
    Rank { agent, memory, key }
}

fn side(ranks: u8, shape: [u8; 16], token: &str) -> Side {
    side_of((0..ranks).map(|number| rank(number, token)).collect(), shape, token)
}

fn side_of(ranks: Vec<Rank>, shape: [u8; 16], token: &str) -> Side {
    side_by(engine(token), ranks, shape)
}

/// `engine`: the scheduler's.
fn side_by(engine: Engine, ranks: Vec<Rank>, shape: [u8; 16]) -> Side {
    let address = engine.describe().unwrap().socket_addresses().next().unwrap();
    let of_rank = |rank: &Rank| RankAddress { endpoint: rank.agent.endpoint().clone(), key: rank.key };
    let options = SchedulerOptions {
        ranks: ranks.iter().map(of_rank).collect(),
        shape,
        networks: Vec::new(),
        lendings: LendingOptions { lease: Duration::from_secs(3), ..LendingOptions::default() },
        landings: LandingOptions::default(),
    };
    Side { scheduler: SchedulerAgent::start(engine, options).unwrap(), address, ranks }
}

impl Rank {
    fn block(&mut self, layer: u64, block: u32) -> &mut [u8] {
        let at = (layer * BLOCKS * PIECE + u64::from(block) * PIECE) as usize;
        &mut self.memory[at..at + PIECE as usize]
    }

    /// Each byte says where it is of: the block of the prompt, the layer and the rank.
    fn compute(&mut self, rank: u8, of_prompt: u32, block: u32) {
        (0..LAYERS).for_each(|layer| self.block(layer, block).fill(value(rank, layer, of_prompt)));
    }

    fn holds(&mut self, rank: u8, of_prompt: u32, block: u32) -> bool {
        (0..LAYERS).all(|layer| {
            let value = value(rank, layer, of_prompt);
            self.block(layer, block).iter().all(|byte| *byte == value)
        })
    }
}

fn value(rank: u8, layer: u64, of_prompt: u32) -> u8 {
    1 + rank * 101 + layer as u8 * 37 + of_prompt as u8 * 3
}

fn wanted(address: SocketAddr, first_block: u32, end_block: u32) -> Wanted {
    Wanted { address, content: CONTENT, first_block, end_block, patience: SOON, budget: SOON }
}

fn id(number: u8) -> HandoffId {
    HandoffId([number; 16])
}

fn until(what: &str, done: impl Fn() -> bool) {
    let end = Instant::now() + SOON;
    while !done() {
        assert!(Instant::now() < end, "{what} does not happen");
        std::thread::yield_now();
    }
}

impl Side {
    fn over(&self, id: HandoffId) -> LandingStatus {
        assert!(
            self.scheduler.wait_over(id, SOON),
            "{id:?} is not over: {:?}",
            self.scheduler.landing_status(id)
        );
        self.scheduler.landing_status(id).unwrap()
    }

    /// Blocks of the prompt, in these blocks of the engine.
    fn compute(&mut self, id: HandoffId, first_block: u32, blocks: &[u32]) {
        for (number, rank) in (0..).zip(&mut self.ranks) {
            for (of_prompt, block) in (first_block..).zip(blocks) {
                rank.compute(number, of_prompt, *block);
            }
            let hash = Some([first_block as u8 + blocks.len() as u8; 16]);
            rank.agent.step_begins(vec![Filled { id, first_block, blocks: blocks.to_vec(), hash }]);
            rank.agent.step_ends(&EngineStream::DEFAULT).unwrap();
        }
    }

    fn holds(&mut self, first_block: u32, blocks: &[u32]) -> bool {
        (0..).zip(&mut self.ranks).all(|(number, rank)| {
            (first_block..).zip(blocks).all(|(of_prompt, block)| rank.holds(number, of_prompt, *block))
        })
    }

    fn is_free(&self, id: HandoffId) {
        let free = std::cell::RefCell::new(Vec::new());
        until("the end of the hand-off at P", || {
            free.borrow_mut().extend(self.scheduler.take_free_lendings());
            free.borrow().contains(&id)
        });
    }
}

#[test]
fn a_prompt_lands_in_parts_in_every_rank_and_both_sides_let_go() {
    let (mut p, mut d) = (side(2, SHAPE, "a"), side(2, SHAPE, "a"));
    let id = id(1);
    assert!(p.scheduler.begin_lending(id, CONTENT));
    p.compute(id, 0, &[5, 6, 7]);
    assert!(d.scheduler.begin_landing(id, wanted(p.address, 2, 8)));
    d.scheduler.give_room(id, &[11, 30, 31]);
    until("the first block", || d.scheduler.landing_status(id).unwrap().end_block == 3);
    p.compute(id, 3, &[20, 9]);
    until("the next two", || d.scheduler.landing_status(id).unwrap().end_block == 5);
    // No room yet: what is offered waits.
    p.compute(id, 5, &[40, 41, 42]);
    assert_eq!(d.scheduler.landing_status(id).unwrap().end_block, 5);
    d.scheduler.give_room(id, &[1, 2, 3]);
    let standing = d.over(id);
    assert_eq!((standing.outcome, standing.end_block), (Some(Outcome::Landed), 8));
    assert_eq!(standing.hashes, [(2, [3; 16]), (4, [5; 16]), (7, [8; 16])]);
    assert!(d.holds(2, &[11, 30, 31, 1, 2, 3]));
    assert!(!d.holds(2, &[11, 30, 31, 1, 3, 2]), "the control");
    p.is_free(id);
    d.scheduler.forget_landing(id);
    assert!(!p.scheduler.begin_lending(id, CONTENT), "an id is used once");
}

#[test]
fn how_blocks_come_can_be_demanded_and_is_counted() {
    for transport in [Transport::TCP, Transport::CMA] {
        let mut p = side(1, SHAPE, "j");
        let mut d = side_of(vec![rank_by(0, "j", Some(transport))], SHAPE, "j");
        let id = id(14);
        p.scheduler.begin_lending(id, CONTENT);
        d.scheduler.begin_landing(id, wanted(p.address, 0, 3));
        d.scheduler.give_room(id, &[7, 9, 8]);
        p.compute(id, 0, &[1, 2, 40]);
        assert_eq!(d.over(id).outcome, Some(Outcome::Landed));
        assert!(d.holds(0, &[7, 9, 8]));
        let counts = d.ranks[0].agent.take_counts();
        let by = if transport == Transport::CMA { counts.cma_bytes } else { counts.tcp_bytes };
        assert_eq!((by, counts.cma_bytes + counts.tcp_bytes), (3 * LAYERS * PIECE, 3 * LAYERS * PIECE));
        // In each layer neither the one side's blocks nor the other's lie in order.
        assert_eq!((counts.reads, counts.failed, counts.runs), (1, 0, 3 * LAYERS));
        assert_eq!(d.ranks[0].agent.take_counts(), ReadCounts::default());
    }
}

/// Bytes of a memory that another thread writes.
fn look(memory: &[u8], at: u64) -> u8 {
    // SAFETY: it is inside the slice.
    unsafe { std::ptr::read_volatile(&raw const memory[at as usize]) }
}

#[test]
fn layers_are_read_while_their_step_computes_the_next_ones() {
    let (mut p, mut d) = (side(1, SHAPE, "g"), side(1, SHAPE, "g"));
    let id = id(13);
    // A layer of so many blocks is a MiB.
    let blocks: Vec<u32> = (0..32).collect();
    p.scheduler.begin_lending(id, CONTENT);
    d.scheduler.begin_landing(id, wanted(p.address, 0, 32));
    d.scheduler.give_room(id, &blocks);
    let filled = Filled { id, first_block: 0, blocks: blocks.clone(), hash: Some([1; 16]) };
    p.ranks[0].agent.step_begins(vec![filled]);
    for layer in 0..LAYERS {
        for block in &blocks {
            p.ranks[0].block(layer, *block).fill(value(0, layer, *block));
        }
        p.ranks[0].agent.layers_computed(layer as u32 + 1, &EngineStream::DEFAULT).unwrap();
        if layer + 1 < LAYERS {
            let last = layer * BLOCKS * PIECE + 31 * PIECE + PIECE - 1;
            until("the layer", || look(d.ranks[0].memory, last) == value(0, layer, 31));
            assert_eq!(
                d.scheduler.landing_status(id).unwrap().end_block,
                0,
                "a block has all layers or none"
            );
        }
    }
    p.ranks[0].agent.step_ends(&EngineStream::DEFAULT).unwrap();
    let standing = d.over(id);
    assert_eq!((standing.outcome, standing.hashes), (Some(Outcome::Landed), vec![(31, [1; 16])]));
    assert!(d.holds(0, &blocks));
}

#[test]
fn a_step_of_which_nobody_says_the_end_does_not_count_for_the_next_one() {
    let (mut p, mut d) = (side(1, SHAPE, "m"), side(1, SHAPE, "m"));
    let id = id(15);
    p.scheduler.begin_lending(id, CONTENT);
    d.scheduler.begin_landing(id, wanted(p.address, 0, 3));
    d.scheduler.give_room(id, &[3, 4, 5]);
    let regions = LAYERS as u32;
    for (of_prompt, block) in [(0, 7), (1, 8)] {
        let agent = &p.ranks[0].agent;
        agent.step_begins(vec![Filled { id, first_block: of_prompt, blocks: vec![block], hash: None }]);
        // Long enough that what is offered too early would land: the block of the step before it does.
        until("the block before", || d.scheduler.landing_status(id).unwrap().end_block == of_prompt);
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(d.scheduler.landing_status(id).unwrap().end_block, of_prompt);
        p.ranks[0].compute(0, of_prompt, block);
        p.ranks[0].agent.layers_computed(regions, &EngineStream::DEFAULT).unwrap();
    }
    p.compute(id, 2, &[9]);
    assert_eq!(d.over(id).outcome, Some(Outcome::Landed));
    assert!(d.holds(0, &[3, 4, 5]));
}

#[test]
fn the_want_may_come_before_the_request() {
    let (mut p, mut d) = (side(1, SHAPE, "b"), side(1, SHAPE, "b"));
    let id = id(2);
    assert!(d.scheduler.begin_landing(id, wanted(p.address, 0, 2)));
    d.scheduler.give_room(id, &[3, 4]);
    // It is there: another one that nobody computes is refused, after it has waited.
    let other = self::id(3);
    assert!(d.scheduler.begin_landing(other, wanted(p.address, 0, 2)));
    assert!(p.scheduler.begin_lending(id, CONTENT));
    p.compute(id, 0, &[0, 1]);
    assert_eq!(d.over(id).outcome, Some(Outcome::Landed));
    assert!(d.holds(0, &[3, 4]));
    let standing = d.over(other);
    assert!(matches!(standing.outcome, Some(Outcome::Refused(Reason::Unknown) | Outcome::Unheard)));
}

#[test]
fn other_content_another_shape_and_nobody_are_told_apart() {
    let (p, d, other) = (side(1, SHAPE, "c"), side(1, SHAPE, "c"), side(1, [8; 16], "c"));
    let (wrong_content, wrong_shape, nobody) = (id(4), id(5), id(6));
    p.scheduler.begin_lending(wrong_content, [1; 16]);
    p.scheduler.begin_lending(wrong_shape, CONTENT);
    d.scheduler.begin_landing(wrong_content, wanted(p.address, 0, 1));
    other.scheduler.begin_landing(wrong_shape, wanted(p.address, 0, 1));
    d.scheduler.begin_landing(nobody, wanted("127.0.0.1:1".parse().unwrap(), 0, 1));
    assert_eq!(d.over(wrong_content).outcome, Some(Outcome::Refused(Reason::OtherContent)));
    assert_eq!(other.over(wrong_shape).outcome, Some(Outcome::Refused(Reason::OtherShape)));
    assert!(matches!(d.over(nobody).outcome, Some(Outcome::Unreachable(_))));
    let elsewhere = id(7);
    d.scheduler.begin_landing(elsewhere, wanted("192.0.2.1:80".parse().unwrap(), 0, 1));
    let Some(Outcome::Unreachable(why)) = d.over(elsewhere).outcome else { unreachable!() };
    assert!(why.contains("kvlane.direct.peers"), "{why}");
}

#[test]
fn what_had_landed_is_kept_when_the_other_engine_gives_up_or_goes() {
    for goes in [false, true] {
        let (mut p, mut d) = (side(2, SHAPE, "d"), side(2, SHAPE, "d"));
        let id = id(8);
        p.scheduler.begin_lending(id, CONTENT);
        d.scheduler.begin_landing(id, wanted(p.address, 0, 10));
        d.scheduler.give_room(id, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
        p.compute(id, 0, &[9, 8, 7, 6, 5, 4, 3, 2]);
        until("four fifths", || d.scheduler.landing_status(id).unwrap().end_block == 8);
        if goes {
            drop(p);
        } else {
            p.scheduler.give_up_lending(id);
            p.is_free(id);
        }
        let standing = d.over(id);
        assert_eq!(standing.end_block, 8);
        assert!(matches!(standing.outcome, Some(Outcome::Refused(Reason::Ended) | Outcome::PeerLost)));
        assert!(d.holds(0, &[1, 2, 3, 4, 5, 6, 7, 8]));
        d.scheduler.forget_landing(id);
    }
}

#[test]
fn a_reset_of_either_side_ends_everything_before_it_returns() {
    let (mut p, d) = (side(2, SHAPE, "e"), side(2, SHAPE, "e"));
    let (first, second) = (id(9), id(10));
    for id in [first, second] {
        p.scheduler.begin_lending(id, CONTENT);
        d.scheduler.begin_landing(id, wanted(p.address, 0, 4));
        d.scheduler.give_room(id, if id == first { &[1, 2, 3, 4] } else { &[5, 6, 7, 8] });
    }
    p.compute(first, 0, &[1, 2]);
    p.compute(second, 0, &[3, 4]);
    until("both begin", || {
        [first, second].iter().all(|id| d.scheduler.landing_status(*id).unwrap().end_block == 2)
    });
    assert!(d.scheduler.end_all(SOON));
    assert_eq!(d.over(first).outcome, Some(Outcome::GivenUp));
    assert!(p.scheduler.end_all(SOON));
    let mut free = p.scheduler.take_free_lendings();
    free.sort();
    assert_eq!(free, [first, second]);
}

/// Each dialled by itself: the second connection that came about replaced the first one, and what had been said over that was lost.
#[test]
fn hand_offs_that_begin_at_once_share_one_connection_and_all_land() {
    let (mut p, d) = (side(1, SHAPE, "h"), side(1, SHAPE, "h"));
    let ids: Vec<HandoffId> = (20..28).map(id).collect();
    for id in &ids {
        assert!(p.scheduler.begin_lending(*id, CONTENT));
    }
    for (number, id) in (0..).zip(&ids) {
        assert!(d.scheduler.begin_landing(*id, wanted(p.address, 0, 1)));
        d.scheduler.give_room(*id, &[number]);
        p.compute(*id, 0, &[number]);
    }
    for id in ids {
        assert_eq!(d.over(id).outcome, Some(Outcome::Landed));
    }
}

#[test]
fn whoever_is_not_wanted_any_more_is_let_go_after_its_lease() {
    let (mut p, d) = (side(1, SHAPE, "f"), side(1, SHAPE, "f"));
    let (unwanted, left) = (id(11), id(12));
    p.scheduler.begin_lending(unwanted, CONTENT);
    p.scheduler.begin_lending(left, CONTENT);
    p.compute(left, 0, &[1]);
    d.scheduler.begin_landing(left, wanted(p.address, 0, 2));
    d.scheduler.give_room(left, &[1, 2]);
    until("one block", || d.scheduler.landing_status(left).unwrap().end_block == 1);
    // It does not say goodbye.
    drop(d);
    let free = std::cell::RefCell::new(Vec::new());
    until("both leases' ends", || {
        free.borrow_mut().extend(p.scheduler.take_free_lendings());
        free.borrow().len() == 2
    });
}

/// A peer keeps a million ranges of windows: one that came beyond them ended the connection, and all hand-offs with it.
#[test]
fn more_pieces_than_windows_may_show_at_once_wait_until_another_hand_off_is_over() {
    const PIECES: u64 = 8192;
    // Two hand-offs of so many blocks have a million pieces but for 16,384; eight of them make a window.
    const EACH: u32 = 63;
    const LAST: u32 = 3;
    let blocks = u64::from(2 * EACH + LAST + 1);
    let scattered = |base| {
        let piece_offsets = (0..PIECES).map(|piece| piece * 16).collect();
        vec![Region { base, block_stride: PIECES * 16, blocks, piece_bytes: 8, piece_offsets }]
    };
    let make = || side_of(vec![rank_of(0, engine("i"), blocks * PIECES * 16, scattered)], SHAPE, "i");
    let (mut p, d) = (make(), make());
    (0..).zip(p.ranks[0].memory.iter_mut()).for_each(|(at, byte): (usize, _)| *byte = (at / 8 % 251) as u8);
    let begin = |id: HandoffId, first: u32, count: u32| {
        assert!(p.scheduler.begin_lending(id, CONTENT));
        assert!(d.scheduler.begin_landing(id, wanted(p.address, 0, count)));
        let blocks: Vec<u32> = (first..first + count).collect();
        let filled = Filled { id, first_block: 0, blocks: blocks.clone(), hash: Some([1; 16]) };
        p.ranks[0].agent.step_begins(vec![filled]);
        p.ranks[0].agent.step_ends(&EngineStream::DEFAULT).unwrap();
        d.scheduler.give_room(id, &blocks[..count.min(8) as usize]);
    };
    let (first, second, last, small) = (id(30), id(31), id(32), id(33));
    for (number, id) in (0..).zip([first, second]) {
        begin(id, number * EACH, EACH);
        until("its first window", || d.scheduler.landing_status(id).unwrap().end_block == 8);
    }
    begin(last, 2 * EACH, LAST);
    assert!(!d.scheduler.wait_over(last, Duration::from_millis(500)), "there is no room for its windows");
    begin(small, 2 * EACH + LAST, 1);
    assert_eq!(d.over(small).outcome, Some(Outcome::Landed), "what has room goes on");
    assert_eq!(d.scheduler.landing_status(last).unwrap().outcome, None);
    d.scheduler.give_up_landing(first);
    assert_eq!(d.over(last).outcome, Some(Outcome::Landed));
    assert_eq!(d.scheduler.landing_status(second).unwrap().outcome, None, "the others go on");
    let (p, d) = (&p.ranks[0].memory, &d.ranks[0].memory);
    let from = (u64::from(2 * EACH) * PIECES * 16) as usize;
    assert!((from..d.len()).all(|at| d[at] == if at % 16 < 8 { p[at] } else { 0 }));
}

/// It would never be heard: the fabric refuses a message that names them all, and whoever it is for counts as lost.
#[test]
fn more_ranks_than_a_message_can_name_are_refused_at_the_start() {
    let start = |count| {
        let addresses = vec![Address { kind: 1, bytes: vec![b'1'; 250] }];
        let (boot_nonce, engine_id, trust, regions) = (1, 1, Trust::Token, Vec::new());
        let rank = Descriptor { boot_nonce, engine_id, trust, addresses, regions }.to_bytes().unwrap();
        let options = SchedulerOptions {
            ranks: vec![RankAddress { endpoint: rank, key: [0; 16] }; count],
            shape: SHAPE,
            networks: Vec::new(),
            lendings: LendingOptions::default(),
            landings: LandingOptions::default(),
        };
        SchedulerAgent::start(engine("g"), options).map(drop)
    };
    assert!(start(100).is_ok());
    // Within the bound of ranks.
    assert!(matches!(start(RANKS_MAX), Err(AgentError::TooMany(RANKS_MAX))));
    assert!(matches!(start(RANKS_MAX + 1), Err(AgentError::TooMany(_))));
}
