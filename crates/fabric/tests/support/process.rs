//! Other processes of a test: its binary, started again to play a role.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use kvlane_fabric::Descriptor;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, set_parent_process_death_signal, waitpid};

use super::PATIENCE;

/// In the environment of a process that plays a role: the bytes of its region, and how it is set up.
const BYTES: &str = "KVLANE_TEST_BYTES";
const SETUP: &str = "KVLANE_TEST_SETUP";
/// Before what a process says, among what the test harness says.
const SAYS: &str = "says: ";

/// This binary, started again as the owner of one engine; killed at the latest when this goes.
pub(crate) struct Process {
    child: Child,
    input: ChildStdin,
    said: Receiver<String>,
    reader: Option<JoinHandle<()>>,
}

impl Process {
    pub(crate) fn new(bytes: usize) -> Process {
        Process::with(bytes, "")
    }

    /// `setup`: what [`play`] hands to the role.
    pub(crate) fn with(bytes: usize, setup: &str) -> Process {
        Process::in_environment(bytes, setup, &[])
    }

    /// With these variables besides.
    pub(crate) fn in_environment(bytes: usize, setup: &str, variables: &[(&str, &Path)]) -> Process {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "a_process_of_the_tests_below", "--nocapture"])
            .env(BYTES, bytes.to_string())
            .env(SETUP, setup)
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (say, said) = channel();
        let reader = std::thread::spawn(move || {
            // The harness does not end its line before the process speaks.
            for line in output.lines().map_while(Result::ok) {
                if let Some((_, words)) = line.split_once(SAYS) {
                    // Nobody listens after a failure.
                    let _ = say.send(words.to_owned());
                }
            }
        });
        Process { input: child.stdin.take().unwrap(), child, said, reader: Some(reader) }
    }

    pub(crate) fn tell(&mut self, words: &str) {
        writeln!(self.input, "{words}").unwrap();
    }

    pub(crate) fn hear(&mut self) -> String {
        self.hear_within(PATIENCE * 2)
    }

    /// What it has said by now.
    pub(crate) fn has_said(&mut self) -> Option<String> {
        self.said.try_recv().ok()
    }

    pub(crate) fn hear_within(&mut self, patience: Duration) -> String {
        self.said.recv_timeout(patience).expect("the process says nothing")
    }

    /// Tells something and hears the answer.
    pub(crate) fn ask(&mut self, words: &str) -> String {
        self.tell(words);
        self.hear()
    }

    /// Tells something that is to be done.
    pub(crate) fn order(&mut self, words: &str) {
        assert_eq!(self.ask(words), "done", "{words}");
    }

    pub(crate) fn descriptor(&mut self) -> Descriptor {
        self.ask("describe").parse().unwrap()
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// SIGSTOP; when this returns, no thread of the process runs any more.
    pub(crate) fn pause(&self) {
        kill_process(self.pid(), Signal::STOP).unwrap();
        let (_, status) = waitpid(Some(self.pid()), WaitOptions::UNTRACED).unwrap().unwrap();
        assert!(status.stopped(), "{status:?}");
    }

    pub(crate) fn resume(&self) {
        kill_process(self.pid(), Signal::CONT).unwrap();
    }

    /// Its memory becomes this byte, without its doing.
    pub(crate) fn overwrite(&self, address: u64, len: usize, byte: u8) {
        let path = format!("/proc/{}/mem", self.pid().as_raw_nonzero());
        let memory = File::options().write(true).open(path).unwrap();
        memory.write_all_at(&vec![byte; len], address).unwrap();
    }

    /// SIGKILL, and waits for the end.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Over already, if the test killed it.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

/// What a role has to say beside its answers.
pub(crate) fn say(words: &str) {
    println!("{SAYS}{words}");
}

/// In such a process: makes a role of its bytes and its setup, which obeys the lines that it is told and answers each with
/// one. In others it returns at once.
pub(crate) fn play<R>(make: impl FnOnce(usize, &str) -> R, obey: impl Fn(&mut R, &str, &[&str]) -> String) {
    let Ok(bytes) = std::env::var(BYTES) else { return };
    set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
    let mut role = make(bytes.parse().unwrap(), &std::env::var(SETUP).unwrap());
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split_whitespace().collect();
        say(&obey(&mut role, words[0], &words[1..]));
    }
}
