//! Processes that see only their own GPU, and GPUs that do not reach each other.

use std::time::Duration;

use kvlane_fabric::{Access, EngineOptions, Failure, Op, Transport};
use kvlane_fake_gpu::FakeOptions;

use crate::side::{Kind, Side, done, pattern};
use crate::support::{Deadline, MIB, PATIENCE, Process};

const LEN: usize = 4 * MIB;
/// A transfer without a path fails after 2.5 s.
const IN_TIME: Duration = Duration::from_secs(5);

fn registered(gpus: FakeOptions, ordinal: u32, options: EngineOptions) -> Side {
    let mut side = Side::on(gpus, ordinal, Kind::Whole, LEN, options);
    side.region = side.register(Access::ReadWrite);
    side
}

/// A process that sees GPU 0 alone.
fn alone() -> Side {
    registered(FakeOptions { visible: Some(vec![0]), ..FakeOptions::default() }, 0, EngineOptions::default())
}

/// A process whose GPUs do not reach each other.
fn apart(options: EngineOptions) -> Side {
    registered(FakeOptions { reachable: false, ..FakeOptions::default() }, 0, options)
}

#[test]
fn processes_that_see_only_their_own_gpu_exchange_bytes() {
    for kind in ["whole", "chunks"] {
        let (here, mut there) = (alone(), Process::with(LEN, &format!("1 {kind} alone")));
        there.order("pattern 7");
        let descriptor = there.descriptor();
        let (peer, region) = (here.meet(&descriptor), descriptor.regions[0].number);
        done(&here.move_all(peer, Op::Read, region));
        assert!(here.memory.all() == pattern(LEN, 7));
        here.memory.put(0, &pattern(LEN, 8));
        done(&here.move_all(peer, Op::Write, region));
        assert_eq!(there.ask("is 8"), "true");
        assert_eq!((here.staged(), there.ask("staged")), (0, "0".into()));
    }
}

#[test]
fn bytes_of_a_gpu_that_is_not_reached_go_through_slots() {
    for kind in ["whole", "chunks"] {
        let (here, mut there) = (apart(EngineOptions::default()), Process::with(LEN, &format!("1 {kind}")));
        there.order("pattern 7");
        let descriptor = there.descriptor();
        let (peer, region) = (here.connect(&descriptor), descriptor.regions[0].number);
        done(&here.move_all(peer, Op::Read, region));
        assert!(here.memory.all() == pattern(LEN, 7));
        let why = here.trouble(peer);
        assert!(why.starts_with("this process's GPU cannot read the peer's GPU memory: "), "{why}");
        assert_eq!(here.staged(), LEN as u64);
        // A GPU reaches itself.
        let mut same = Process::with(LEN, &format!("0 {kind} apart"));
        same.order("pattern 9");
        let descriptor = same.descriptor();
        let peer = here.meet(&descriptor);
        done(&here.move_all(peer, Op::Read, descriptor.regions[0].number));
        assert!(here.memory.all() == pattern(LEN, 9));
        assert_eq!(here.staged(), LEN as u64);
    }
}

/// The target of a WRITE copies, so its GPU has to reach the writer's.
#[test]
fn a_write_to_a_gpu_that_does_not_reach_this_one_goes_through_slots() {
    let (here, mut there) = (Side::of(0, LEN), Process::with(LEN, "1 whole apart"));
    here.memory.put(0, &pattern(LEN, 8));
    let descriptor = there.descriptor();
    let (peer, region) = (here.meet(&descriptor), descriptor.regions[0].number);
    done(&here.move_all(peer, Op::Write, region));
    assert_eq!(there.ask("is 8"), "true");
    let why = here.trouble(peer);
    assert!(why.starts_with("the peer reports: this process's GPU cannot read the peer's"), "{why}");
    assert_eq!(here.staged(), LEN as u64);
}

#[test]
fn a_transfer_that_may_go_by_cuda_only_fails_where_a_gpu_is_not_reached() {
    let here = apart(EngineOptions { transport: Some(Transport::CUDA), ..EngineOptions::default() });
    let mut there = Process::with(LEN, "1 whole");
    let descriptor = there.descriptor();
    let (peer, region) = (here.connect(&descriptor), descriptor.regions[0].number);
    let deadline = Deadline::after(IN_TIME);
    let outcome = here.move_all(peer, Op::Read, region).wait(Some(PATIENCE));
    assert_eq!(outcome, Some(Err(Failure::PeerLost)));
    deadline.assert_kept();
    let why = here.trouble(peer);
    assert!(why.starts_with("cuda is required, but this process's GPU cannot read the peer's"), "{why}");
    here.engine.close();
}
