//! Groups of peers: parts that arrive, fail or are never begun together, and processes that wait for each other.
//!
//! The process that is killed is this test binary, started again: see [`a_member_of_the_tests_below`].
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::io::{BufRead, BufReader, Read};
use std::pin::pin;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::Duration;

use kvlane_fabric::{
    Access, Descriptor, Engine, EngineOptions, FabricError, Failure, Group, GroupPart, Options, PeerId,
    Pieces, Place, Priority, Run, ShapeError, Transfer,
};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, set_parent_process_death_signal, waitpid};

#[path = "support/deadline.rs"]
mod deadline;

use crate::deadline::Deadline;

const PATIENCE: Duration = Duration::from_secs(30);
/// Until a peer that cannot be reached is lost.
const LOST: Duration = Duration::from_secs(1);
/// Until then and until its memory's lease is over, on an idle machine.
const DEAD: Duration = Duration::from_secs(6);
const COUNTER: u32 = 7;

/// An engine with one region and a counter.
struct Side {
    engine: Engine,
    region: u32,
    generation: u32,
    memory: Vec<u8>,
}

impl Side {
    fn new(bytes: usize, transfers: Options) -> Side {
        let engine = Engine::new(EngineOptions { transfers, ..EngineOptions::default() }).unwrap();
        let mut memory = vec![0u8; bytes];
        // SAFETY: the engine is dropped first, as the first field.
        let region =
            unsafe { engine.register(memory.as_mut_ptr(), bytes as u64, Access::ReadWrite).unwrap() };
        let generation = engine.open_counter(COUNTER);
        Side { engine, region, generation, memory }
    }

    fn of(bytes: usize) -> Side {
        Side::new(bytes, Options { peer_patience: LOST, ..Options::default() })
    }

    fn peer(&self, descriptor: &Descriptor) -> PeerId {
        self.engine.connect(descriptor).unwrap()
    }

    fn group(&self, others: &[Side]) -> Group {
        let peer = |side: &Side| self.peer(&side.engine.describe().unwrap());
        self.engine.group(&others.iter().map(peer).collect::<Vec<_>>()).unwrap()
    }

    fn run(&self, local: u64, region: u32, remote: u64, len: u64) -> Run {
        let local = Place { region: self.region, offset: local };
        Run { local, remote: Place { region, offset: remote }, len }
    }

    fn fill(&mut self) {
        self.memory.iter_mut().zip(0u32..).for_each(|(byte, at)| *byte = (at * 31 + at / 251) as u8);
    }

    fn count(&self) -> u64 {
        self.engine.count(COUNTER, self.generation)
    }
}

fn part(runs: Vec<Run>, side: &Side) -> GroupPart {
    GroupPart { pieces: Pieces::Runs(runs), immediate: Some((COUNTER, side.generation)) }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Unpark>) {
        self.0.unpark();
    }
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(found) => return found,
            Poll::Pending => std::thread::park_timeout(PATIENCE),
        }
    }
}

#[test]
fn each_member_gets_its_own_part_and_counts_once_after_it() {
    const BYTES: usize = 1 << 20;
    let mut here = Side::of(BYTES);
    here.fill();
    let others = [Side::of(BYTES), Side::of(BYTES), Side::of(BYTES)];
    let group = here.group(&others);
    // Where from, where to, how much.
    let lists: [&[(u64, u64, u64)]; 3] = [
        &[(0, 5, 8191), (9000, 20_000, 8193), (30_000, 50_000, 0), (40_000, 60_000, 16385)],
        &[],
        &[(700_000, 0, 300_000), (3, 400_000, 1)],
    ];
    for round in 1..=3 {
        let parts = lists.iter().zip(&others).map(|(list, side)| {
            let run = |(from, to, len): &(u64, u64, u64)| here.run(*from, side.region, *to, *len);
            part(list.iter().map(run).collect(), side)
        });
        let parts: Vec<GroupPart> = parts.collect();
        let handle = group.scatter(&parts, Some(PATIENCE), Priority::High).unwrap();
        // What waits, what is asked and what is a task hear the same.
        if round == 2 {
            assert_eq!(block_on(handle), [Ok(()); 3]);
        } else {
            assert_eq!(handle.wait(Some(PATIENCE)), Some(vec![Ok(()); 3]));
            assert_eq!(handle.outcomes(), [Some(Ok(())); 3]);
            assert!(handle.into_parts().iter().all(|part| part.outcome() == Some(Ok(()))));
        }
        for (list, side) in lists.iter().zip(&others) {
            assert!(side.engine.wait_count(COUNTER, side.generation, round, Some(PATIENCE)));
            assert_eq!(side.count(), round);
            let mut expected = vec![0u8; BYTES];
            for (from, to, len) in *list {
                let (from, to, len) = (*from as usize, *to as usize, *len as usize);
                expected[to..to + len].copy_from_slice(&here.memory[from..from + len]);
            }
            assert!(side.memory == expected, "round {round}");
        }
    }
}

#[test]
fn where_one_part_cannot_be_begun_none_is() {
    let transfers = Options { live_max: 4, ..Options::default() };
    let mut here = Side::new(100, transfers);
    here.fill();
    let others = [Side::of(100), Side::of(100), Side::of(50)];
    let group = here.group(&others);
    let begin = |lens: &[u64]| {
        let part = |(side, len): (&Side, &u64)| part(vec![here.run(0, side.region, 0, *len)], side);
        let parts: Vec<GroupPart> = others.iter().zip(lens).map(part).collect();
        group.scatter(&parts, None, Priority::Bulk)
    };
    match begin(&[100, 100, 51]) {
        Err(FabricError::Member { member: 2, why }) => {
            assert!(matches!(*why, FabricError::Shape(ShapeError::OutOfBounds { len: 51, .. })), "{why}");
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(begin(&[100, 100]), Err(FabricError::Parts { given: 2, members: 3 })));
    assert!(matches!(group.barrier(&[], None), Err(FabricError::Parts { given: 0, members: 3 })));
    // Two transfers to nobody leave room for two.
    let gone = Side::of(100).engine.describe().unwrap();
    let nobody = here.peer(&gone);
    let nothing = || Transfer::write(Pieces::Runs(Vec::new()));
    let begun: Vec<_> = (0..2)
        .map(|_| {
            let tell = Transfer { immediate: Some((COUNTER, 0)), ..nothing() };
            here.engine.begin(nobody, tell).unwrap()
        })
        .collect();
    assert!(matches!(begin(&[100, 100, 50]), Err(FabricError::NoRoomForAll { members: 3, room: 2 })));
    begun.iter().for_each(|handle| handle.cancel());
    // Nothing of that was begun: what comes next is the first thing that arrives.
    assert_eq!(begin(&[100, 0, 50]).unwrap().wait(Some(PATIENCE)), Some(vec![Ok(()); 3]));
    assert_eq!(others.each_ref().map(Side::count), [1; 3]);
    assert!(others[0].memory == here.memory && others[1].memory == [0; 100]);
    assert!(others[2].memory == here.memory[..50]);
    here.engine.disconnect(group.peers()[1]);
    match begin(&[100, 100, 50]) {
        Err(FabricError::Member { member: 1, why }) => assert!(matches!(*why, FabricError::NoSuchPeer)),
        other => panic!("{other:?}"),
    }
    assert_eq!(others.each_ref().map(Side::count), [1; 3]);
    here.engine.close();
    assert!(matches!(begin(&[1, 1, 1]), Err(FabricError::Closed)));
}

#[test]
fn a_group_has_distinct_peers_of_its_engine() {
    let (here, other) = (Side::of(100), Side::of(100));
    let first = here.peer(&other.engine.describe().unwrap());
    let second = here.peer(&other.engine.describe().unwrap());
    let third = here.peer(&other.engine.describe().unwrap());
    assert!(matches!(here.engine.group(&[first, second, first]), Err(FabricError::SameMember(0, 2))));
    here.engine.disconnect(third);
    assert!(matches!(here.engine.group(&[first, third]), Err(FabricError::NoSuchPeer)));
    assert_eq!(here.engine.group(&[second, first]).unwrap().peers(), [second, first]);
    // One that is alone waits for nobody.
    let alone = here.engine.group(&[]).unwrap();
    assert_eq!(alone.barrier(&[], None).unwrap().wait(None), Some(vec![]));
    assert_eq!(block_on(alone.barrier(&[], None).unwrap()), []);
    here.engine.close();
    assert!(matches!(here.engine.group(&[]), Err(FabricError::Closed)));
}

#[test]
fn nobody_passes_a_barrier_before_all_have_come() {
    const ROUNDS: u64 = 50;
    const MEMBERS: usize = 4;
    let sides: Vec<Side> = (0..MEMBERS).map(|_| Side::of(8 * MEMBERS)).collect();
    let known: Vec<_> =
        sides.iter().map(|s| (s.engine.describe().unwrap(), s.region, (COUNTER, s.generation))).collect();
    std::thread::scope(|scope| {
        let member = |(me, side): (usize, Side)| {
            let others: Vec<_> = known.iter().enumerate().filter(|(at, _)| *at != me).collect();
            scope.spawn(move || {
                let Side { engine, region, generation, memory } = &side;
                let peers = others.iter().map(|(_, (descriptor, ..))| engine.connect(descriptor).unwrap());
                let group = engine.group(&peers.collect::<Vec<_>>()).unwrap();
                let counters: Vec<_> = others.iter().map(|(_, (.., counter))| *counter).collect();
                let slot = |of: usize| memory.as_ptr().wrapping_add(8 * of).cast::<u64>();
                for round in 1..=ROUNDS {
                    // Each member's round, at its place in the memory of all others.
                    // SAFETY: it is inside the memory, which no transfer reads now.
                    unsafe { slot(me).cast_mut().write_volatile(round) };
                    let part = |(_, (_, remote, _)): &(usize, &(_, u32, _))| {
                        let place = |region| Place { region, offset: 8 * me as u64 };
                        let run = Run { local: place(*region), remote: place(*remote), len: 8 };
                        GroupPart { pieces: Pieces::Contiguous(run), ..GroupPart::default() }
                    };
                    let parts: Vec<GroupPart> = others.iter().map(part).collect();
                    let written = group.scatter(&parts, Some(PATIENCE), Priority::High).unwrap();
                    assert_eq!(written.wait(None), Some(vec![Ok(()); MEMBERS - 1]));
                    let told = group.barrier(&counters, Some(PATIENCE)).unwrap();
                    let target = (MEMBERS - 1) as u64 * round;
                    assert!(engine.wait_count(COUNTER, *generation, target, Some(PATIENCE)));
                    assert_eq!(told.wait(None), Some(vec![Ok(()); MEMBERS - 1]));
                    for of in 0..MEMBERS {
                        // SAFETY: as above; peers may write it, which is why it is read so.
                        let seen = unsafe { slot(of).read_volatile() };
                        assert!((round..=round + 1).contains(&seen), "{me} sees {seen} of {of} in {round}");
                    }
                }
                side
            })
        };
        let threads: Vec<_> = sides.into_iter().enumerate().map(member).collect();
        // None ends while others wait for its answers.
        let sides: Vec<Side> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert!(sides.iter().all(|side| side.count() == (MEMBERS - 1) as u64 * ROUNDS));
    });
}

#[test]
fn a_scatter_that_is_given_up_is_over_for_every_member() {
    let here = Side::new(100, Options { peer_patience: PATIENCE, ..Options::default() });
    let others = [Side::of(100), Side::of(100)];
    let descriptors = others.each_ref().map(|side| side.engine.describe().unwrap());
    drop(others);
    // Nobody is there yet, or any more.
    let group = here.engine.group(&descriptors.each_ref().map(|descriptor| here.peer(descriptor))).unwrap();
    let handle = group.barrier(&[(COUNTER, 0), (COUNTER, 0)], None).unwrap();
    assert_eq!(handle.wait(Some(Duration::ZERO)), None);
    handle.cancel();
    assert_eq!(handle.wait(Some(PATIENCE)), Some(vec![Err(Failure::Cancelled); 2]));
    let timeout = Duration::from_millis(50);
    let handle = group.barrier(&[(COUNTER, 0), (COUNTER, 0)], Some(timeout)).unwrap();
    handle.parts()[0].cancel();
    let outcomes = [Err(Failure::Cancelled), Err(Failure::DeadlineExceeded)];
    assert_eq!(block_on(handle), outcomes);
}

// ---- A member that is killed ----

/// In the environment of a process that is a member: the bytes of its region.
const BYTES: &str = "KVLANE_TEST_MEMBER_BYTES";
const SAYS: &str = "says: ";

/// This binary, started again as the owner of one engine; killed at the latest when this goes.
struct Member {
    child: Child,
    descriptor: Descriptor,
}

impl Member {
    fn new(bytes: usize) -> Member {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "a_member_of_the_tests_below", "--nocapture"])
            .env(BYTES, bytes.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let said = |line: String| Some(line.split_once(SAYS)?.1.to_owned());
        let text = lines.map_while(Result::ok).find_map(said).expect("the member says nothing");
        let byte = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
        let bytes: Vec<u8> = (0..text.len()).step_by(2).map(byte).collect();
        Member { child, descriptor: Descriptor::from_bytes(&bytes).unwrap() }
    }

    /// SIGSTOP; when this returns, no thread of the process runs any more.
    fn pause(&self) {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, Signal::STOP).unwrap();
        let (_, status) = waitpid(Some(pid), WaitOptions::UNTRACED).unwrap().unwrap();
        assert!(status.stopped(), "{status:?}");
    }

    /// SIGKILL, and waits for the end.
    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        // Over already, if the test killed it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// No test: started with its part in the environment, this owns an engine until its input ends.
#[test]
fn a_member_of_the_tests_below() {
    let Ok(bytes) = std::env::var(BYTES) else { return };
    set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
    let side = Side::of(bytes.parse().unwrap());
    let descriptor = side.engine.describe().unwrap().to_bytes().unwrap();
    println!("{SAYS}{}", descriptor.iter().map(|byte| format!("{byte:02x}")).collect::<String>());
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}

#[test]
fn a_member_that_is_killed_in_the_middle_fails_its_own_part_only() {
    const BYTES: usize = 32 << 20;
    let mut here = Side::of(BYTES);
    here.fill();
    let others = [Side::of(BYTES), Side::of(BYTES)];
    let mut dies = Member::new(BYTES);
    let [one, other] = others.each_ref().map(|side| here.peer(&side.engine.describe().unwrap()));
    let group = here.engine.group(&[one, here.peer(&dies.descriptor), other]).unwrap();
    let counters = [(COUNTER, others[0].generation), (COUNTER, 0), (COUNTER, others[1].generation)];
    let all = |len| {
        let regions = [others[0].region, dies.descriptor.regions[0].number, others[1].region];
        let part = |(region, counter): (u32, (u32, u32))| GroupPart {
            pieces: Pieces::Contiguous(here.run(0, region, 0, len)),
            immediate: Some(counter),
        };
        regions.into_iter().zip(counters).map(part).collect::<Vec<_>>()
    };
    let first = group.scatter(&all(1), None, Priority::High).unwrap();
    assert_eq!(first.wait(Some(PATIENCE)), Some(vec![Ok(()); 3]));
    // It takes what its sockets hold, and no more.
    dies.pause();
    let handle = group.scatter(&all(BYTES as u64), None, Priority::High).unwrap();
    for part in [0, 2] {
        assert_eq!(handle.parts()[part].wait(Some(PATIENCE)), Some(Ok(())));
    }
    assert_eq!(handle.outcomes(), [Some(Ok(())), None, Some(Ok(()))]);
    assert!(others.iter().all(|side| side.memory == here.memory && side.count() == 2));
    dies.kill();
    let deadline = Deadline::after(DEAD);
    let outcomes = [Ok(()), Err(Failure::PeerLost), Ok(())];
    assert_eq!(handle.wait(Some(PATIENCE)), Some(outcomes.to_vec()));
    deadline.assert_kept();
    assert_eq!(block_on(handle), outcomes, "it stays as it is");

    // Now that it is known to be gone, others do not wait for it at all.
    let deadline = Deadline::after(LOST);
    let told = group.barrier(&counters, None).unwrap();
    assert_eq!(told.wait(Some(PATIENCE)), Some(outcomes.to_vec()));
    deadline.assert_kept();
    assert!(others.iter().all(|side| side.count() == 3));
    // Who waits for the one that does not come gives up by its own time.
    let [waits, _] = &others;
    assert!(!waits.engine.wait_count(COUNTER, waits.generation, 4, Some(Duration::from_millis(50))));
}

#[test]
fn a_barrier_with_a_member_that_dies_meanwhile_ends_as_soon_as_it_is_lost() {
    let here = Side::of(100);
    let other = Side::of(100);
    let mut dies = Member::new(100);
    let peers = [here.peer(&other.engine.describe().unwrap()), here.peer(&dies.descriptor)];
    let group = here.engine.group(&peers).unwrap();
    let counters = [(COUNTER, other.generation), (COUNTER, 0)];
    let both = Some(vec![Ok(()); 2]);
    assert_eq!(group.barrier(&counters, None).unwrap().wait(Some(PATIENCE)), both);
    dies.pause();
    let told = group.barrier(&counters, None).unwrap();
    assert!(other.engine.wait_count(COUNTER, other.generation, 2, Some(PATIENCE)));
    assert_eq!(told.parts()[0].wait(Some(PATIENCE)), Some(Ok(())));
    assert_eq!(told.parts()[1].outcome(), None);
    dies.kill();
    let deadline = Deadline::after(DEAD);
    assert_eq!(told.wait(Some(PATIENCE)), Some(vec![Ok(()), Err(Failure::PeerLost)]));
    deadline.assert_kept();
    assert_eq!(other.count(), 2);
}
