//! The role of a second process: an engine with memory on a GPU of its own, driven by lines on its standard input.

use kvlane_fabric::{EngineOptions, Handle, Op, Transport};
use std::sync::Arc;
use std::time::Duration;

use kvlane_fake_gpu::FakeDriver;

use crate::side::{On, Side, done, driver, pattern};

/// What another process does, and what it answers.
pub(crate) struct Role {
    side: Side,
    driver: Arc<FakeDriver>,
    transfer: Option<Handle>,
}

impl Role {
    /// `setup`: "tcp" where nothing is to go by process_vm.
    pub(crate) fn new(bytes: usize, setup: &str) -> Role {
        let driver = driver();
        let transport = (setup == "tcp").then_some(Transport::TCP);
        let options = EngineOptions { transport, ..EngineOptions::default() };
        Role { side: Side::new(&driver, On::Gpu(0), bytes, options), driver, transfer: None }
    }

    pub(crate) fn obey(&mut self, what: &str, rest: &[&str]) -> String {
        let number = |index: usize| rest[index].parse::<usize>().unwrap();
        let Side { engine, memory, .. } = &self.side;
        match what {
            "describe" => return self.side.descriptor().to_text().unwrap(),
            "scribble" => memory.put(0, &pattern(memory.len(), number(0) as u64)),
            "check" => {
                let is_it = memory.get(0, memory.len()) == pattern(memory.len(), number(0) as u64);
                return if is_it { "done" } else { "other bytes" }.into();
            }
            "slow" => self.driver.slow_down(Duration::from_millis(number(0) as u64)),
            "move" => {
                let peer = engine.connect(&rest[1].parse().unwrap()).unwrap();
                let op = if rest[0] == "write" { Op::Write } else { Op::Read };
                self.transfer = Some(self.side.move_all(peer, op, number(2) as u32));
            }
            "await" => done(self.transfer.as_ref().unwrap()),
            _ => panic!("{what}?"),
        }
        "done".into()
    }
}
