//! The role of a second process: an engine, driven by lines on its standard input.

use std::time::{Duration, Instant};

use kvlane_fabric::{
    Access, Descriptor, EngineOptions, FabricError, Failure, Handle, Op, Pieces, Transfer, Transport,
    WindowDescriptor,
};

use crate::handicaps::{end_first_thread, forbid, forbid_process_vm};
use crate::shapes::{image, scribbled};
use crate::side::{CANARY, COUNTER, Peer, Side, done, lost};
use crate::support::{MIB, Memory, PATIENCE, numbers, say, settled};

/// What another process does, and what it answers.
pub(crate) struct Role {
    side: Side,
    generation: u32,
    peer: Option<Peer>,
    transfer: Option<Handle>,
    /// Small ones beside the first.
    others: Memory,
}

impl Role {
    /// `setup`: "tcp" for nothing else, "forbidden" if it may read no memory of others, "no-memfd" if it cannot make rings,
    /// "no-getfd" if it cannot take those of others.
    pub(crate) fn new(bytes: usize, setup: &str) -> Role {
        match setup {
            "forbidden" => forbid_process_vm(),
            "no-memfd" => forbid(libc::SYS_memfd_create, libc::SYS_memfd_create),
            "no-getfd" => forbid(libc::SYS_pidfd_getfd, libc::SYS_pidfd_getfd),
            _ => {}
        }
        let transport = (setup == "tcp").then_some(Transport::TCP);
        let side = Side::new(bytes, EngineOptions { transport, ..EngineOptions::default() });
        let generation = side.engine.open_counter(COUNTER);
        Role { side, generation, peer: None, transfer: None, others: Memory::new(MIB) }
    }

    pub(crate) fn obey(&mut self, what: &str, rest: &[&str]) -> String {
        let number = |index: usize| rest[index].parse::<usize>().unwrap();
        let is_so = |is_so: bool, else_say: String| if is_so { "done".into() } else { else_say };
        let Side { engine, region, memory } = &self.side;
        match what {
            "describe" => return self.side.descriptor().to_text().unwrap(),
            "fill" => memory.fill(number(0), number(1), number(2) as u8),
            "scribble" => memory.put(&scribbled(number(0) as u64, memory.len)),
            "await" => memory.wait_for(number(0)),
            "check" => {
                let found = memory.other_than(number(0), number(1), number(2) as u8);
                return is_so(found.is_none(), format!("{found:?} is another byte"));
            }
            "absent" => {
                let found = memory.find(number(0) as u8);
                return is_so(found.is_none(), format!("{found:?} is that byte"));
            }
            "expect" => return self.expect(rest[0], number(1) as u64, number(2) as u64),
            "unregister" => engine.unregister(*region).unwrap(),
            "register" => self.side.register(),
            "revoke" => return self.revoke(Duration::from_micros(number(0) as u64)),
            "meet" => self.peer = Some(self.side.meet(&rest[0].parse().unwrap())),
            "write" => done(&self.side.write(self.peer.unwrap(), number(0), number(1))),
            "disconnect" => engine.disconnect(self.peer.unwrap().id),
            "read" => done(&self.side.read(self.peer.unwrap(), number(0), number(1))),
            "write-on" => {
                self.transfer = Some(self.side.long(self.peer.unwrap(), Op::Write));
            }
            "path" => {
                let peer = self.peer.unwrap();
                let way = if self.side.has_cma(peer) { "cma" } else { "tcp" };
                return format!("{way} {}", self.side.why_no_cma(peer).unwrap_or_default());
            }
            "no-rings" => {
                return format!("{:?}", self.side.path(self.peer.unwrap(), "control").unwrap().no_rings);
            }
            "without-rings" => return engine.connections_without_rings().to_string(),
            "outcome" => return format!("{:?}", self.transfer.as_ref().unwrap().outcome()),
            "know" => {
                let descriptor = rest[0].parse().unwrap();
                self.peer = Some(Peer { id: engine.connect(&descriptor).unwrap(), region: u32::MAX });
            }
            "read-through" => return self.read_through(&window(rest[0]), number(1) as u8),
            "read-through-long" => {
                let window = window(rest[0]);
                self.transfer = Some(self.begin_through(&window, 128).unwrap());
            }
            "end" => return format!("{:?}", self.transfer.as_ref().unwrap().wait(Some(PATIENCE))),
            "lost" => lost(self.transfer.as_ref().unwrap()),
            "forbid" => forbid_process_vm(),
            "end-first-thread" => end_first_thread(),
            "close" => engine.close(),
            "reopen" => self.side = Side::of(memory.len),
            "secret" => {
                self.others.fill(0, self.others.len, number(0) as u8);
                return self.others.base.addr().to_string();
            }
            "regions" => {
                // Each is a byte of the others.
                for at in 0..number(0) {
                    // SAFETY: the engine goes before the memory: it is a field before it.
                    unsafe { engine.register(self.others.at(at, 1), 1, Access::ReadWrite).unwrap() };
                }
            }
            "cycle" => return self.cycle(&rest[0].parse().unwrap(), number(1)),
            "count" => return numbers(settled(None)),
            "recount" => return numbers(settled(Some([number(0), number(1), number(2)]))),
            _ => panic!("{what}?"),
        }
        "done".into()
    }

    /// Says that it is ready; then, when so many transfers were counted, whether all bytes are there, and no others.
    fn expect(&self, shape: &str, seed: u64, count: u64) -> String {
        let Side { engine, memory, .. } = &self.side;
        memory.fill(0, memory.len, CANARY);
        let image = image(shape, seed, memory.len);
        say("ready");
        let is_counted = engine.wait_count(COUNTER, self.generation, count, Some(PATIENCE));
        let is_right = memory.bytes(0, memory.len) == image;
        match (is_counted, is_right, engine.count(COUNTER, self.generation)) {
            (true, true, counted) if counted == count => "done".into(),
            other => format!("counted, right, count: {other:?}"),
        }
    }

    fn begin_through(&self, window: &WindowDescriptor, times: usize) -> Result<Handle, FabricError> {
        let peer = Peer { region: window.number, ..self.peer.unwrap() };
        let all = self.side.run(peer, 0, 0, window.len as usize);
        self.side.engine.begin(peer.id, Transfer::read_through(*window, Pieces::Runs(vec![all; times])))
    }

    /// Reads all that a window shows again and again, until it is closed. Answers how many reads were done, how many refused,
    /// and how many of those that were done brought another byte.
    fn read_through(&self, window: &WindowDescriptor, byte: u8) -> String {
        let [mut done, mut strange] = [0; 2];
        loop {
            let outcome = match self.begin_through(window, 1) {
                // Several may be under way when it is closed.
                Ok(handle) => handle.wait(Some(PATIENCE)).unwrap(),
                Err(FabricError::WindowClosed | FabricError::Shape(_)) => Err(Failure::Refused),
                Err(other) => panic!("{other}"),
            };
            match outcome {
                Ok(()) => done += 1,
                Err(Failure::Refused) => return format!("{done} 1 {strange}"),
                Err(other) => panic!("{other}"),
            }
            if done == 1 {
                say("reading");
            }
            let found = self.side.memory.other_than(0, window.len as usize, byte);
            if found.is_some() {
                strange += 1;
                if strange == 1 {
                    say("strange");
                }
            }
        }
    }

    /// Gives the memory back after this time, and uses it otherwise at once. Whether it had it for itself then.
    fn revoke(&self, after: Duration) -> String {
        let Side { engine, region, memory } = &self.side;
        let begun = Instant::now();
        while begun.elapsed() < after {
            std::thread::yield_now();
        }
        engine.unregister(*region).unwrap();
        for _ in 0..5 {
            memory.fill(0, memory.len, CANARY);
            let begun = Instant::now();
            while begun.elapsed() < Duration::from_micros(300) {
                std::thread::yield_now();
            }
            if let Some(at) = memory.other_than(0, memory.len, CANARY) {
                return format!("byte {at} was written to {}", memory.byte(at));
            }
        }
        "done".into()
    }

    /// Connects an engine to one of another process, moves something both ways and ends it, so many times. Answers what
    /// is open soon after the beginning, and at the end.
    fn cycle(&self, descriptor: &Descriptor, rounds: usize) -> String {
        const WARM: usize = 10;
        let mut before = [0; 3];
        for round in 0..WARM + rounds {
            if round == WARM {
                before = settled(None);
            }
            let goes = Side::of(MIB);
            let peer = goes.meet(descriptor);
            goes.is_neighbour(peer);
            done(&goes.write(peer, 0, MIB));
            done(&goes.read(peer, 0, MIB));
            if round % 2 == 0 {
                goes.engine.disconnect(peer.id);
            }
        }
        format!("{} {}", numbers(before), numbers(settled(Some(before))))
    }
}

fn window(text: &str) -> WindowDescriptor {
    let byte = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
    let bytes: Vec<u8> = (0..text.len()).step_by(2).map(byte).collect();
    WindowDescriptor::from_bytes(&bytes).unwrap()
}
