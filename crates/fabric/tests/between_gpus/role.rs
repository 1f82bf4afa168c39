//! The role of a second process: an engine with GPU memory, driven by lines on its standard input.

use std::collections::HashMap;
use std::time::Duration;

use kvlane_fabric::{
    Access, Descriptor, EngineId, EngineOptions, Handle, Op, PeerId, Pieces, Transfer, Transport,
    WindowDescriptor, WindowRange,
};
use kvlane_fake_gpu::FakeOptions;

use crate::lies::{lie, own_socket};
use crate::side::{Kind, Side, done, pattern};
use crate::support::{PATIENCE, numbers, settled};
use crate::windows::{text, window};

/// What another process does, and what it answers.
pub(crate) struct Role {
    side: Side,
    peer: Option<(PeerId, u32)>,
    transfer: Option<Handle>,
    window: Option<WindowDescriptor>,
    /// Where the parts of its memory begin that are regions of their own.
    parts: HashMap<u32, usize>,
    /// Open windows over several regions, and what they show.
    shown: Vec<(WindowDescriptor, Vec<WindowRange>)>,
}

impl Role {
    /// `setup`: the GPU's number, and "whole", "chunks" or "own-chunks". Then any of "slots" (it has no cuda), "late" (it registers
    /// its memory when it is told), "alone" (it sees no other GPU), "apart" (its GPUs do not reach each other), "token" (its
    /// engine's token is "between"), and "port=" with the port where it listens.
    pub(crate) fn new(bytes: usize, setup: &str) -> Role {
        let words: Vec<&str> = setup.split_whitespace().collect();
        let kind = match words[1] {
            "chunks" => Kind::Chunks,
            "own-chunks" => Kind::OwnChunks,
            _ => Kind::Whole,
        };
        let (number, has) = (words[0].parse().unwrap(), |word| words[2..].contains(&word));
        let transport = has("slots").then_some(Transport::TCP);
        let token = if has("token") { "between" } else { "" };
        let mut options = EngineOptions { transport, token: token.into(), ..EngineOptions::default() };
        if let Some(port) = words.iter().find_map(|word| word.strip_prefix("port=")) {
            options.listen[0].set_port(port.parse().unwrap());
        }
        let (visible, ordinal) = if has("alone") { (Some(vec![number]), 0) } else { (None, number) };
        let gpus = FakeOptions { visible, reachable: !has("apart"), ..FakeOptions::default() };
        let mut side = Side::on(gpus, ordinal, kind, bytes, options);
        if !has("late") {
            side.region = side.register(Access::ReadWrite);
        }
        Role { side, peer: None, transfer: None, window: None, parts: HashMap::new(), shown: Vec::new() }
    }

    pub(crate) fn obey(&mut self, what: &str, rest: &[&str]) -> String {
        let number = |index: usize| rest[index].parse::<u64>().unwrap();
        let Side { engine, memory, .. } = &self.side;
        match what {
            "describe" => return engine.describe().unwrap().to_text().unwrap(),
            "pattern" => memory.put(0, &pattern(memory.len, number(0))),
            "fill" => memory.fill(number(0) as u8),
            "is" => return (memory.all() == pattern(memory.len, number(0))).to_string(),
            "is-all" => return memory.is_all(number(0) as u8).to_string(),
            "unregister" => engine.unregister(self.side.region).unwrap(),
            "register" => self.side.region = self.side.register(Access::ReadWrite),
            "timed-unregister" => {
                let begun = std::time::Instant::now();
                engine.unregister(self.side.region).unwrap();
                return begun.elapsed().as_millis().to_string();
            }
            "open-window" => return self.open_window(rest),
            "close-window" => engine.close_window(&self.window.take().unwrap()).unwrap(),
            "slow" => self.side.driver.slow_down(Duration::from_micros(number(0))),
            "fail-work" => {
                let device = self.side.gpu.info().ordinal;
                self.side.driver.fail_work(device, number(0), number(1) as u32);
            }
            "lie" => lie(&self.side.gpu, rest[0]),
            "socket" => return own_socket().display().to_string(),
            "register-part" => {
                let region = self.side.register_part(number(0) as usize, number(1) as usize);
                self.parts.insert(region, number(0) as usize);
                return region.to_string();
            }
            "show" => return self.show(rest),
            "reuse" => self.reuse(number(0) as u8),
            "register-pages" => {
                for page in 0..number(0) as usize {
                    self.side.register_part(16 * page, 16);
                }
            }
            "meet" => {
                let descriptor: Descriptor = rest[0].parse().unwrap();
                self.peer = Some((self.side.meet(&descriptor), descriptor.regions[0].number));
            }
            "read" => done(&self.move_all(Op::Read)),
            "write" => done(&self.move_all(Op::Write)),
            "begin-read" => self.transfer = Some(self.move_all(Op::Read)),
            "begin-window" => self.transfer = Some(self.begin_through(window(rest[0]))),
            "begin-write" => self.transfer = Some(self.move_all(Op::Write)),
            "end" => return format!("{:?}", self.transfer.take().unwrap().wait(Some(PATIENCE))),
            "try-read" => return self.try_read(),
            "staged" => return self.side.staged().to_string(),
            "mapped" => return self.side.mapped().to_string(),
            "cycle" => self.cycle(&rest[0].parse().unwrap(), number(1)),
            "count" => return numbers(settled(None)),
            "recount" => return numbers(settled(Some([0, 1, 2].map(|index| number(index) as usize)))),
            "calls" => return self.side.driver.calls().to_string(),
            "receive" => drop(engine.receive(Some(PATIENCE)).unwrap()),
            "disconnect" => engine.disconnect(self.peer.take().unwrap().0),
            "close" => engine.close(),
            _ => panic!("{what}?"),
        }
        "done".into()
    }

    /// How a read of all of the peer's region ends, if it begins.
    fn try_read(&self) -> String {
        let (peer, region) = self.peer.unwrap();
        let pieces = Pieces::Runs(vec![self.side.run(region, 0, 0, self.side.memory.len)]);
        match self.side.engine.begin(peer, Transfer { op: Op::Read, ..Transfer::write(pieces) }) {
            Ok(handle) => format!("{:?}", handle.wait(Some(PATIENCE)).unwrap()),
            Err(error) => format!("not begun: {error}"),
        }
    }

    /// Begins a READ of all of a window of the peer.
    fn begin_through(&self, shown: WindowDescriptor) -> Handle {
        let all = self.side.run(shown.number, 0, 0, shown.len as usize);
        let (peer, _) = self.peer.unwrap();
        self.side.engine.begin(peer, Transfer::read_through(shown, Pieces::Runs(vec![all]))).unwrap()
    }

    fn move_all(&self, op: Op) -> Handle {
        let (peer, region) = self.peer.unwrap();
        self.side.move_all(peer, op, region)
    }

    /// Meets a peer, exchanges bytes and leaves it, again and again.
    fn cycle(&mut self, descriptor: &Descriptor, rounds: u64) {
        for round in 0..rounds {
            let peer = self.side.meet(descriptor);
            let region = descriptor.regions[0].number;
            done(&self.side.move_all(peer, Op::Read, region));
            done(&self.side.move_all(peer, Op::Write, region));
            if round % 2 == 0 {
                // The peer has mapped it for the WRITE.
                self.side.engine.unregister(self.side.region).unwrap();
                self.side.region = self.side.register(Access::ReadWrite);
            }
            self.side.engine.disconnect(peer);
        }
    }

    /// Shows these ranges (offset, len) of its region to an engine. Answers the window's descriptor.
    fn open_window(&mut self, rest: &[&str]) -> String {
        let (to, ranges) = rest.split_at(2);
        let peer = EngineId { engine_id: to[0].parse().unwrap(), boot_nonce: to[1].parse().unwrap() };
        let ranges = ranges.chunks(2).map(|range| WindowRange {
            region: self.side.region,
            offset: range[0].parse().unwrap(),
            len: range[1].parse().unwrap(),
        });
        let window = self.side.engine.open_window(peer, ranges.collect()).unwrap();
        self.window = Some(window);
        text(&window)
    }

    /// Fills parts of its memory with a byte and shows them to an engine by one window. `rest`: the engine, the byte, then each
    /// range's region, offset and bytes.
    fn show(&mut self, rest: &[&str]) -> String {
        let number = |word: &&str| word.parse::<u64>().unwrap();
        let peer = EngineId { engine_id: rest[0].parse().unwrap(), boot_nonce: rest[1].parse().unwrap() };
        let mut ranges = Vec::new();
        for range in rest[3..].chunks(3) {
            let [region, offset, len] = [0, 1, 2].map(|index| number(&range[index]));
            ranges.push(WindowRange { region: region as u32, offset, len });
        }
        self.fill_ranges(&ranges, number(&rest[2]) as u8);
        let window = self.side.engine.open_window(peer, ranges.clone()).unwrap();
        self.shown.push((window, ranges));
        text(&window)
    }

    /// Closes the windows one after the other, and uses what each showed again at once.
    fn reuse(&mut self, byte: u8) {
        for (window, ranges) in std::mem::take(&mut self.shown) {
            self.side.engine.close_window(&window).unwrap();
            self.fill_ranges(&ranges, byte);
        }
    }

    fn fill_ranges(&self, ranges: &[WindowRange], byte: u8) {
        for WindowRange { region, offset, len } in ranges {
            let at = self.parts[region] + *offset as usize;
            self.side.memory.put(at, &vec![byte; *len as usize]);
        }
    }
}
