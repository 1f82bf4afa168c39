//! A daemon in a process of its own.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use kvlane_client::Tool;
use kvlane_fake_gpu::{FakeDriver, FakeOptions};
use kvlane_gpu::{Driver, RailChoice, RailOptions};
use kvlane_proto::{Address, v1};
use kvlane_server::ServeOptions;

use crate::{
    driver::{BLOCKS, LAYERS, driver, is_real, piece},
    process::{Process, say, told},
    support::{PATIENCE, options, settle},
};

/// Names the socket to the process that is to be a daemon.
const SOCKET: &str = "KVLANE_TEST_DAEMON_AT";
/// How slow a fake GPU is, in microseconds for each MiB.
const SLOW: &str = "KVLANE_TEST_DAEMON_SLOW";
/// Bytes of memory of a fake GPU.
const MEMORY: &str = "KVLANE_TEST_DAEMON_MEMORY";
/// Set where loads are to come over the other GPU's link too.
const RAILS: &str = "KVLANE_TEST_DAEMON_RAILS";

/// Not a test: the daemon's process. It ends with its standard input, on which it is told of faults.
#[test]
fn plays_the_daemon() {
    let Some(socket) = std::env::var_os(SOCKET) else { return };
    let address = Address::Unix(socket.into());
    let fake = (!is_real()).then(|| {
        let mut options = FakeOptions::default();
        if let Ok(bytes) = std::env::var(MEMORY) {
            options.device_bytes = bytes.parse().unwrap();
        }
        let fake = Arc::new(FakeDriver::new(options).unwrap());
        fake.slow_down(Duration::from_micros(std::env::var(SLOW).unwrap().parse().unwrap()));
        fake
    });
    let driver = fake.as_ref().map_or_else(driver, |fake| Arc::clone(fake) as Arc<dyn Driver>);
    let rails = match std::env::var_os(RAILS) {
        // Of two layers of a block each: a load has more chunks than slots.
        Some(choice) => RailOptions {
            choice: choice.to_str().unwrap().parse().unwrap(),
            least_bytes: 0,
            slot_bytes: 2 * piece(),
            slots: 2,
            ..RailOptions::default()
        },
        None => RailOptions { choice: RailChoice::Off, ..RailOptions::default() },
    };
    let pool_bytes = u64::from(BLOCKS) * LAYERS * piece();
    let options = ServeOptions { gpu_driver: Some(driver), rails, ..options(&address, pool_bytes) };
    let daemon = kvlane_server::Daemon::start(&options, &|_| {}).unwrap();
    say("ready");
    for words in told() {
        match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
            ["relayed"] => say(&daemon.relayed_bytes().to_string()),
            ["staged"] => say(&daemon.staged_bytes().to_string()),
            ["fail", device, code] => {
                let fake = fake.as_ref().unwrap();
                fake.fail_work(device.parse().unwrap(), 1, code.parse().unwrap());
                say("waiting");
            }
            ["fail-to-pin", device, code] => {
                let (device, code) = (device.parse().unwrap(), code.parse().unwrap());
                fake.as_ref().unwrap().fail_call(device, Some("cuMemHostAlloc"), 1, code);
                say("waiting");
            }
            ref other => panic!("a daemon cannot {other:?}"),
        }
    }
    assert!(daemon.stop(PATIENCE));
}

pub struct Daemon {
    process: Process,
    address: Address,
}

impl Daemon {
    pub fn start(address: &Address) -> Self {
        Self::start_slow(address, 0)
    }

    /// With GPUs that take so many microseconds longer for each MiB, where that can be had.
    pub fn start_slow(address: &Address, microseconds: u64) -> Self {
        Self::start_with(address, [(SLOW, microseconds.to_string())])
    }

    /// The same, and loads come over the other GPU's link too.
    pub fn start_with_rails(address: &Address, microseconds: u64) -> Self {
        Self::start_with(address, [(SLOW, microseconds.to_string()), (RAILS, "auto".into())])
    }

    /// Loads of any size go through a ring on their GPU.
    pub fn start_staging(address: &Address) -> Self {
        Self::start_with(address, [(SLOW, "0".into()), (RAILS, "off".into())])
    }

    /// With rails that have no memory for what passes through them.
    pub fn start_with_rails_without_memory(address: &Address) -> Self {
        Self::start_with(
            address,
            [(SLOW, "0".into()), (RAILS, "auto".into()), (MEMORY, (1 << 16).to_string())],
        )
    }

    fn start_with(address: &Address, environment: impl IntoIterator<Item = (&'static str, String)>) -> Self {
        let Address::Unix(path) = address else { unreachable!() };
        let socket = (SOCKET, path.to_str().unwrap().to_owned());
        let environment = environment.into_iter().chain([socket]);
        let mut process = Process::start("daemon::plays_the_daemon", environment);
        assert_eq!(process.hear(), "ready");
        Self { process, address: address.clone() }
    }

    /// In order: all sessions closed, nothing left to do.
    pub fn stop(mut self) {
        self.process.end();
    }

    /// What it moved over the links of other GPUs.
    pub fn staged_bytes(&mut self) -> u64 {
        self.process.ask("staged").parse().unwrap()
    }

    pub fn relayed_bytes(&mut self) -> u64 {
        self.process.ask("relayed").parse().unwrap()
    }

    /// The next copy that a fake GPU runs fails.
    pub fn fail_next_copy(&mut self, device: u32, code: u32) {
        assert_eq!(self.process.ask(&format!("fail {device} {code}")), "waiting");
    }

    /// The next request for pinned memory fails.
    pub fn refuse_pinned_memory(&mut self, device: u32, code: u32) {
        assert_eq!(self.process.ask(&format!("fail-to-pin {device} {code}")), "waiting");
    }

    pub fn pause(&self) {
        self.process.pause();
    }

    pub fn resume(&self) {
        self.process.resume();
    }

    pub fn kill(mut self) {
        self.process.kill();
    }

    /// Looks until it says what is wanted.
    pub fn wait_until(&self, wanted: &str, holds: impl Fn(&v1::Status) -> bool) -> v1::Status {
        let mut tool = Tool::connect(&self.address, PATIENCE).unwrap();
        let deadline = Instant::now() + PATIENCE;
        loop {
            let status = tool.status().unwrap();
            if holds(&status) {
                return status;
            }
            assert!(Instant::now() < deadline, "not {wanted}: {status:?}");
            std::thread::yield_now();
        }
    }

    /// Engines are gone, and of what they held only blocks that were saved is left.
    pub fn wait_until_gone(&self, engines: &[&str]) {
        self.wait_until("without what the dead held", |status| {
            let is_there = |id: &&str| status.sessions.iter().any(|session| session.engine_id == **id);
            status.claimed_blocks == 0 && status.leased_blocks == 0 && !engines.iter().any(is_there)
        });
        settle(&self.address);
        self.wait_until("free of extents that belong to nobody", |status| {
            status.used_bytes == status.namespaces.iter().map(|space| space.bytes).sum::<u64>()
        });
    }
}
