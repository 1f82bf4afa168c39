//! Resources that engines take of a process: descriptors, threads, mappings, CPU time.

use std::io::Read;
use std::net::TcpStream;
use std::time::Duration;

use crate::side::{Side, done};
use crate::support::{MIB, PATIENCE, Process};

#[test]
fn engines_that_come_and_go_leave_nothing_open() {
    let rounds = std::env::var("KVLANE_TEST_ROUNDS").map_or(200, |rounds| rounds.parse().unwrap());
    let mut process = Process::new(0);
    process.tell(&format!("cycle {rounds}"));
    let patience = PATIENCE + Duration::from_millis(100) * rounds;
    let answer = process.hear_within(patience);
    let counts: Vec<usize> = answer.split(' ').map(|count| count.parse().unwrap()).collect();
    let [descriptors, threads, mappings] = [0, 1, 2].map(|index| (counts[index], counts[index + 3]));
    assert!(descriptors.1 <= descriptors.0, "descriptors: {descriptors:?}");
    assert!(threads.1 <= threads.0, "threads: {threads:?}");
    // The allocator may have some more for itself, not one a round.
    assert!(mappings.1 <= mappings.0 + 16, "mappings: {mappings:?}");
}

#[test]
fn a_process_without_descriptors_for_more_connections_serves_those_it_has_and_does_not_spin() {
    let here = Side::of(MIB);
    let mut there = Process::new(MIB);
    let descriptor = there.descriptor();
    let known = here.meet(&descriptor);
    done(&here.post(known));
    there.order("exhaust");
    let address = String::from_utf8(descriptor.addresses[0].bytes.clone()).unwrap();
    let mut stranger = TcpStream::connect(&address).unwrap();
    let spent: u64 = there.ask("spend 1000").parse().unwrap();
    done(&here.post(known));
    there.order("release");
    let other = Side::of(MIB);
    done(&other.post(other.meet(&descriptor)));
    stranger.set_read_timeout(Some(PATIENCE)).unwrap();
    stranger.read_exact(&mut [0; 24]).expect("who waited is welcome too");
    assert!(spent < 200, "{spent} ms of a processor in a second");
}

#[test]
fn idle_engines_that_are_connected_take_no_processor() {
    let mut process = Process::new(0);
    let spent: u64 = process.ask("befriend 2000").parse().unwrap();
    assert!(spent < 50, "{spent} ms of a processor in two seconds");
}
