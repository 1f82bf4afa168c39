//! A daemon in a process of its own, because a driver imports only memory that another process exported.

use std::{
    collections::BTreeMap,
    io::{Read, Write},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use kvlane_client::Tool;
use kvlane_gpu::RailOptions;
use kvlane_proto::Address;
use kvlane_server::ServeOptions;

use crate::{
    engine::{POOL_BYTES, driver},
    support::{PATIENCE, options},
};

/// Names the socket to the process that is to be a daemon.
const DAEMON: &str = "KVLANE_TEST_REPLICATED_DAEMON_AT";
/// How slow its GPUs are, in microseconds for each MiB.
const SLOW: &str = "KVLANE_TEST_REPLICATED_DAEMON_SLOW";
/// How long loads wait for each other, in milliseconds: then small loads share links too.
const MEET: &str = "KVLANE_TEST_REPLICATED_DAEMON_MEET";
/// The error in which its third wait of one GPU for another ends: so one in the middle of a shared load.
const FAIL: &str = "KVLANE_TEST_REPLICATED_DAEMON_FAIL";
/// Begins the line that it says at its end: bytes by link.
const LINKS: &str = "bytes by link:";

pub struct GpuDaemon(Child);

/// Not a test: the daemon's process, which the tests start from this very binary. It ends with its standard input.
#[test]
fn daemon_process() {
    let Some(socket) = std::env::var_os(DAEMON) else { return };
    let number = |name| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let driver = driver();
    driver.slow_down(Duration::from_micros(number(SLOW).unwrap()));
    if let Some(code) = number(FAIL) {
        driver.fail_call(1, Some("cuStreamWaitValue32"), 3, code as u32);
    }
    let rails = number(MEET).map_or_else(RailOptions::default, |meet| RailOptions {
        slot_bytes: 64 << 10,
        slots: 3,
        least_bytes: 0,
        meet_within: Duration::from_millis(meet),
        ..RailOptions::default()
    });
    let options = ServeOptions {
        gpu_driver: Some(driver),
        rails,
        ..options(&Address::Unix(socket.into()), POOL_BYTES)
    };
    let daemon = kvlane_server::Daemon::start(&options, &|_| {}).unwrap();
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
    let links: Vec<String> =
        daemon.bytes_by_link().iter().map(|(link, bytes)| format!("{link} {bytes}")).collect();
    writeln!(std::io::stdout(), "\n{LINKS}{}", links.join(",")).unwrap();
    assert!(daemon.stop(PATIENCE));
}

impl GpuDaemon {
    /// In which small loads share nothing.
    pub fn start(address: &Address, microseconds: u64) -> Self {
        Self::start_with(address, microseconds, &[])
    }

    /// In which loads of any size share the links of those that come within the time.
    pub fn start_sharing(address: &Address, microseconds: u64, within: Duration) -> Self {
        Self::start_with(address, microseconds, &[(MEET, within.as_millis() as u64)])
    }

    /// As the one before, with all the time for a meeting; its first shared load fails with this error.
    pub fn start_failing(address: &Address, code: u32) -> Self {
        Self::start_with(address, 0, &[(MEET, PATIENCE.as_millis() as u64), (FAIL, code.into())])
    }

    fn start_with(address: &Address, microseconds: u64, more: &[(&str, u64)]) -> Self {
        let Address::Unix(path) = address else { unreachable!() };
        let process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "daemon::daemon_process", "--nocapture"])
            .env(DAEMON, path)
            .env(SLOW, microseconds.to_string())
            .envs(more.iter().map(|(name, value)| (name, value.to_string())))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let deadline = Instant::now() + PATIENCE;
        while Tool::connect(address, PATIENCE).is_err() {
            assert!(Instant::now() < deadline, "the daemon does not start");
            std::thread::yield_now();
        }
        Self(process)
    }

    /// Ends it; the bytes that loads brought over each link.
    pub fn stop(mut self) -> BTreeMap<u32, u64> {
        drop(self.0.stdin.take());
        let mut said = String::new();
        self.0.stdout.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(self.0.wait().unwrap().success());
        let links = said.lines().find_map(|line| line.strip_prefix(LINKS)).unwrap();
        let link = |text: &str| {
            let (link, bytes) = text.split_once(' ').unwrap();
            (link.parse().unwrap(), bytes.parse().unwrap())
        };
        links.split(',').filter(|text| !text.is_empty()).map(link).collect()
    }

    pub fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}
