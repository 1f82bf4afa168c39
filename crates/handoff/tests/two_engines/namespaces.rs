//! Two engines in network namespaces of their own, as on two hosts: all goes through a wire, encrypted, by TCP.
//!
//! The test is started again by itself inside a user namespace, where it is the engine that computes, and starts the one that
//! goes on: see [`the_engine_that_goes_on_in_the_test_below`]. Where the kernel does not let an ordinary process do that, or
//! `unshare` or `ip` is missing, it says so and passes.

use std::io::{self, BufRead, BufReader, Write};
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use kvlane_fabric::{Engine, EngineOptions, Tls, Transport};
use kvlane_handoff::{LandingOptions, LendingOptions, RankAddress, SchedulerAgent, SchedulerOptions};

use crate::certificates::Authority;
use crate::{BLOCKS, CONTENT, LAYERS, PIECE, SHAPE, Side, id, layers, rank_of, wanted};

const NAME: &str = "namespaces::ten_of_ten_prompts_land_between_two_network_namespaces_with_tls_and_a_token";
const OTHER: &str = "namespaces::the_engine_that_goes_on_in_the_test_below";
/// In the environment: this process is inside a namespace, as this side.
const INSIDE: &str = "KVLANE_TEST_INSIDE";
const SAYS: &str = "says: ";
const NEAR: &str = "10.78.0.1";
const FAR: &str = "10.78.0.2";
const PROMPTS: u8 = 10;
const PROMPT_BLOCKS: u32 = 6;

/// Listens at this address. Files of certificates are in the folder.
fn side(address: &str, folder: &Path, name: &str) -> Side {
    // As `Authority::files` names them.
    let file = |kind: &str| folder.join(format!("{name}.{kind}.pem"));
    let engine = || {
        let tls =
            Some(Tls { certificate: file("certificate"), key: file("key"), authority: file("authority") });
        let (listen, token) = (vec![format!("{address}:0").parse().unwrap()], "of this test".into());
        let transport = Some(Transport::TCP);
        Engine::new(EngineOptions { listen, token, tls, transport, ..EngineOptions::default() }).unwrap()
    };
    let rank = rank_of(0, engine(), BLOCKS * PIECE * LAYERS, layers);
    let scheduler = engine();
    let listens = scheduler.describe().unwrap().socket_addresses().next().unwrap();
    let network: IpAddr = "10.78.0.0".parse().unwrap();
    let options = SchedulerOptions {
        ranks: vec![RankAddress { endpoint: rank.agent.endpoint().clone(), key: rank.key }],
        shape: SHAPE,
        networks: vec![(network, 24)],
        lendings: LendingOptions::default(),
        landings: LandingOptions::default(),
    };
    let scheduler = SchedulerAgent::start(scheduler, options).unwrap();
    Side { scheduler, address: listens, ranks: vec![rank] }
}

/// `ip` with these arguments. Answers what it complains about.
fn ip(arguments: &str) -> Result<(), String> {
    let output = Command::new("ip").args(arguments.split(' ')).stdin(Stdio::null()).output();
    let output = output.map_err(|error| format!("ip cannot be run: {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    output.status.success().then_some(()).ok_or_else(|| format!("ip {arguments}: {}", said.trim()))
}

/// The engine that goes on, a process of its own network namespace; killed at the latest when this goes.
struct Far {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Far {
    fn start() -> Far {
        let mut command = Command::new("unshare");
        command.args(["--net", "--"]).arg(std::env::current_exe().unwrap());
        command.args(["--exact", OTHER, "--nocapture"]).env(INSIDE, "far");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Far { child, input, output }
    }

    fn ask(&mut self, words: &str) -> String {
        writeln!(self.input, "{words}").unwrap();
        loop {
            let mut line = String::new();
            assert_ne!(self.output.read_line(&mut line).unwrap(), 0, "{words}: the other side ended");
            if let Some((_, words)) = line.split_once(SAYS) {
                return words.trim_end().to_owned();
            }
        }
    }
}

impl Drop for Far {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// No test: started by the one below, this is an engine that obeys the lines that it is told.
#[test]
fn the_engine_that_goes_on_in_the_test_below() {
    if std::env::var(INSIDE).as_deref() != Ok("far") {
        return;
    }
    let mut d: Option<Side> = None;
    for line in io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        let said = match (words[0], &mut d) {
            ("pid", _) => std::process::id().to_string(),
            ("ip", _) => ip(&line[3..]).err().unwrap_or("done".into()),
            ("start", _) => {
                d = Some(side(FAR, Path::new(words[1]), "d"));
                "done".into()
            }
            ("land", Some(d)) => land(d, words[1].parse().unwrap(), words[2].parse().unwrap()),
            _ => unreachable!("{line}?"),
        };
        println!("{SAYS}{said}");
    }
}

/// Has a prompt land from that engine. Answers how it ended, whether the bytes are right, and by which way they came.
fn land(d: &mut Side, number: u8, from: SocketAddr) -> String {
    let id = id(number);
    assert!(d.scheduler.begin_landing(id, wanted(from, 0, PROMPT_BLOCKS)));
    let blocks: Vec<u32> = (0..PROMPT_BLOCKS).map(|block| block * 7 + 3).collect();
    d.scheduler.give_room(id, &blocks);
    let outcome = d.over(id).outcome;
    d.scheduler.forget_landing(id);
    let right = d.holds(0, &blocks);
    d.ranks[0].memory.fill(0);
    let counts = d.ranks[0].agent.take_counts();
    format!("{outcome:?}, right {right}, cma {}, tcp {}", counts.cma_bytes, counts.tcp_bytes)
}

#[test]
fn ten_of_ten_prompts_land_between_two_network_namespaces_with_tls_and_a_token() {
    if std::env::var_os(INSIDE).is_none() {
        let inside = Command::new("unshare")
            .args(["--user", "--map-root-user", "--net", "--"])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", NAME, "--nocapture"])
            .env(INSIDE, "near")
            .output();
        match inside {
            Ok(output) => {
                let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
                let is_refused = said.contains("unshare failed") || said.contains("uid_map");
                assert!(output.status.success() || is_refused, "{said}");
                said.lines().filter(|line| line.contains("not tested")).for_each(|line| println!("{line}"));
            }
            Err(error) => println!("not tested: {NAME}: unshare cannot be run: {error}"),
        }
        return;
    }
    let mut far = Far::start();
    let pid = far.ask("pid");
    if let Err(why) = ip(&format!("link add near0 type veth peer name far0 netns {pid}")) {
        println!("not tested: {NAME}: {why}");
        return;
    }
    for arguments in ["link set lo up", &format!("addr add {NEAR}/24 dev near0"), "link set near0 up"] {
        ip(arguments).unwrap();
    }
    for arguments in ["link set lo up", &format!("addr add {FAR}/24 dev far0"), "link set far0 up"] {
        assert_eq!(far.ask(&format!("ip {arguments}")), "done");
    }
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::new("ours");
    for name in ["p", "d"] {
        authority.files(folder.path(), name);
    }
    let mut p = side(NEAR, folder.path(), "p");
    assert_eq!(far.ask(&format!("start {}", folder.path().display())), "done");
    let bytes = u64::from(PROMPT_BLOCKS) * LAYERS * PIECE;
    for number in 0..PROMPTS {
        let id = id(100 + number);
        assert!(p.scheduler.begin_lending(id, CONTENT));
        let blocks: Vec<u32> = (0..PROMPT_BLOCKS).map(|block| block * 5 + u32::from(number)).collect();
        p.compute(id, 0, &blocks);
        let said = far.ask(&format!("land {} {}", 100 + number, p.address));
        assert_eq!(said, format!("Some(Landed), right true, cma 0, tcp {bytes}"), "prompt {number}");
        p.is_free(id);
    }
}
