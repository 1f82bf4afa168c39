//! The last rank of an engine in a process of its own, which can be killed.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, Command, Stdio},
};

use kvlane_client::Hit;
use kvlane_proto::Address;

use crate::engine::{Engine, Place, RANKS, Rank, driver};

/// Names the socket to the process that is to be a rank.
const RANK: &str = "KVLANE_TEST_REPLICATED_RANK_AT";
const SAVED: &str = "the rank has saved";

pub struct RankProcess {
    process: Child,
    orders: ChildStdin,
    says: BufReader<std::process::ChildStdout>,
}

/// Not a test: the rank's process. Its orders come line by line: `save`, or `load`, the boot id and the pages.
#[test]
fn rank_process() {
    let Some(socket) = std::env::var_os(RANK) else { return };
    let (address, driver) = (Address::Unix(socket.into()), driver());
    let mut rank = Rank::new(&address, "engine", Place::Gpus(&driver), RANKS - 1, RANKS, RANKS);
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["save"] => {
                rank.save(1, 0..2);
                assert!(rank.finished().ok);
                writeln!(std::io::stdout(), "\n{SAVED}").unwrap();
            }
            ["load", boot, ref pages @ ..] => {
                let boot = u128::from_str_radix(boot, 16).unwrap().to_be_bytes();
                let pages = pages.iter().map(|page| page.parse().unwrap()).collect();
                rank.load(2, boot, 6..8, pages, false);
            }
            _ => unreachable!("{line}"),
        }
    }
}

impl RankProcess {
    pub fn start(address: &Address) -> Self {
        let Address::Unix(path) = address else { unreachable!() };
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "rank_process::rank_process", "--nocapture"])
            .env(RANK, path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let orders = process.stdin.take().unwrap();
        let says = BufReader::new(process.stdout.take().unwrap());
        Self { process, orders, says }
    }

    /// Saves its part of two blocks.
    pub fn save(&mut self) {
        writeln!(self.orders, "save").unwrap();
        assert!((&mut self.says).lines().any(|line| line.unwrap() == SAVED), "it ended");
    }

    /// Asks for the load that the others are asked for.
    pub fn load(&mut self, engine: &Engine, hit: &Hit) {
        let pages: Vec<String> = engine.pages(hit, RANKS - 1).iter().map(|page| page.to_string()).collect();
        writeln!(self.orders, "load {:032x} {}", u128::from_be_bytes(hit.boot), pages.join(" ")).unwrap();
    }

    pub fn kill(mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}
