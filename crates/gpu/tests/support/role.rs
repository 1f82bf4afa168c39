//! This test binary, started again to be another process: its test `plays_the_role_it_was_started_for` does what is asked.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, ChildStdout, Command, Stdio};

use kvlane_gpu::DRIVER_VARIABLE;
use kvlane_memory::{recv_with_fds, send_with_fds};

const ROLE: &str = "KVLANE_TEST_ROLE";
/// Before what a role says, among what the test harness says.
const SAYS: &str = "role: ";

/// The other process, as the one that started it sees it.
pub(crate) struct Role {
    child: Child,
    /// Its standard input is a socket, which takes descriptors the other way.
    input: UnixStream,
    output: BufReader<ChildStdout>,
}

impl Role {
    pub(crate) fn start(role: &str, driver: &str) -> Role {
        let (input, theirs) = UnixStream::pair().unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "plays_the_role_it_was_started_for", "--nocapture"])
            .env(ROLE, role)
            .env(DRIVER_VARIABLE, driver)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Role { child, input, output }
    }

    pub(crate) fn tell(&mut self, words: &[String]) {
        writeln!(self.input, "{}", words.join(" ")).unwrap();
    }

    /// The next line of the role, in words.
    pub(crate) fn hear(&mut self) -> Vec<String> {
        let mut line = String::new();
        while self.output.read_line(&mut line).unwrap() > 0 {
            // The harness does not end its line before the role speaks.
            if let Some((_, said)) = line.split_once(SAYS) {
                return said.split_whitespace().map(str::to_owned).collect();
            }
            line.clear();
        }
        panic!("the other process ended: {:?}", self.child.wait());
    }

    /// So many descriptors that the role hands over.
    pub(crate) fn take_descriptors(&mut self, count: usize) -> Vec<OwnedFd> {
        let mut descriptors = Vec::new();
        while descriptors.len() < count {
            assert!(recv_with_fds(&self.input, &mut [0], &mut descriptors).unwrap() > 0);
        }
        descriptors
    }

    pub(crate) fn end(mut self) {
        drop(self.input);
        assert!(self.child.wait().unwrap().success());
    }

    /// SIGKILL, and waits for the end.
    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// The role that this process was started for, if it was.
pub(crate) fn asked_role() -> Option<String> {
    std::env::var(ROLE).ok()
}

pub(crate) fn say(words: &[String]) {
    println!("{SAYS}{}", words.join(" "));
}

/// A line of the process that started this one; no words at its end.
pub(crate) fn listen() -> Vec<String> {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    line.split_whitespace().map(str::to_owned).collect()
}

/// Hands descriptors over to the process that started this one.
pub(crate) fn hand_over(descriptors: &[OwnedFd]) {
    let borrowed: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
    assert_eq!(send_with_fds(std::io::stdin(), b"-", &borrowed).unwrap(), 1);
}
