//! The role of a second process: an engine, driven by lines on its standard input.

use std::fs::File;
use std::time::Duration;

use kvlane_fabric::{EngineOptions, Handle};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::side::{Peer, Side, by_tcp, done};
use crate::support::{MIB, numbers, settled};

/// What another process does, and what it answers.
pub(crate) struct Role {
    side: Side,
    peer: Option<Peer>,
    transfer: Option<Handle>,
    /// Descriptors that nobody else can have.
    hoard: Vec<File>,
}

impl Role {
    /// `setup`: where it listens, if that matters.
    pub(crate) fn new(bytes: usize, setup: &str) -> Role {
        let options = by_tcp();
        let listen = match setup {
            "" => options.listen,
            address => vec![address.parse().unwrap()],
        };
        let side = Side::new(bytes, EngineOptions { listen, ..by_tcp() });
        Role { side, peer: None, transfer: None, hoard: Vec::new() }
    }

    pub(crate) fn obey(&mut self, what: &str, rest: &[&str]) -> String {
        let number = |index: usize| rest[index].parse::<usize>().unwrap();
        let Side { engine, region, memory } = &self.side;
        match what {
            "describe" => return self.side.descriptor().to_text().unwrap(),
            "where" => return memory.base.addr().to_string(),
            "fill" => memory.fill(number(0), number(1), number(2) as u8),
            "await" => memory.wait_for(number(0)),
            "check" => {
                if let Some(at) = memory.other_than(number(0), number(1), number(2) as u8) {
                    return format!("byte {at} is {}", memory.byte(at));
                }
            }
            "count" => {
                let is_other = |byte: &&u8| **byte != number(2) as u8;
                return memory.bytes(number(0), number(1)).iter().filter(is_other).count().to_string();
            }
            "unregister" => engine.unregister(*region).unwrap(),
            "write" => {
                let peer = self.side.meet(&rest[0].parse().unwrap());
                self.transfer = Some(self.side.write(peer, number(1), number(2)));
                self.peer = Some(peer);
            }
            "exhaust" => {
                let limit = getrlimit(Resource::Nofile);
                let current = Some(open_descriptors() as u64 + 16);
                setrlimit(Resource::Nofile, Rlimit { current, ..limit }).unwrap();
                while let Ok(file) = File::open("/dev/null") {
                    self.hoard.push(file);
                }
            }
            "release" => self.hoard.clear(),
            "spend" => {
                let before = cpu_time();
                std::thread::sleep(Duration::from_millis(number(0) as u64));
                return (cpu_time() - before).as_millis().to_string();
            }
            "befriend" => return befriend(number(0) as u64),
            "cycle" => return cycle(number(0)),
            _ => panic!("{what}?"),
        }
        "done".into()
    }
}

/// What this process has used of all processors.
fn cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: it is written only during the call.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) }, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn open_descriptors() -> usize {
    // One of them is of this look.
    std::fs::read_dir("/proc/self/fd").unwrap().count() - 1
}

/// Milliseconds of processors that two engines take which are connected both ways and do nothing for so long.
fn befriend(idle: u64) -> String {
    let (one, other) = (Side::of(MIB), Side::of(MIB));
    let (there, here) = (one.meet(&other.descriptor()), other.meet(&one.descriptor()));
    done(&one.write(there, 0, MIB));
    done(&other.write(here, 0, MIB));
    let before = cpu_time();
    std::thread::sleep(Duration::from_millis(idle));
    let spent = (cpu_time() - before).as_millis();
    done(&one.write(there, 0, MIB));
    spent.to_string()
}

/// Connects an engine to one that stays and back, moves something both ways and ends it, so many times.
/// Answers how many descriptors, threads and mappings there were soon after the beginning, and at the end.
fn cycle(rounds: usize) -> String {
    const WARM: usize = 10;
    let stays = Side::of(MIB);
    let mut before = [0; 3];
    for round in 0..WARM + rounds {
        if round == WARM {
            before = settled(None);
        }
        let goes = Side::of(MIB);
        done(&goes.write(goes.meet(&stays.descriptor()), 0, MIB));
        let peer = stays.meet(&goes.descriptor());
        done(&stays.write(peer, 0, MIB));
        drop(goes);
        stays.engine.disconnect(peer.id);
    }
    let after = settled(Some(before));
    format!("{} {}", numbers(before), numbers(after))
}
