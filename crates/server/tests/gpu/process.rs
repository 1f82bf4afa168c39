//! Starts this binary again as a daemon or an engine, because a driver imports only memory that another process exported, and
//! because only a process can be killed.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

/// Before what a process says, among what the test harness says.
const SAYS: &str = "says: ";

/// A process that was started; killed at the latest when this goes.
pub struct Process {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Process {
    /// Starts the "test" of that name, which plays the role.
    pub fn start<'a>(role: &str, environment: impl IntoIterator<Item = (&'a str, String)>) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", role, "--nocapture"])
            .envs(environment)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { input: child.stdin.take(), output, child }
    }

    pub fn tell(&mut self, words: &str) {
        writeln!(self.input.as_mut().unwrap(), "{words}").unwrap();
    }

    /// The next line that the process says.
    pub fn hear(&mut self) -> String {
        let mut line = String::new();
        while self.output.read_line(&mut line).unwrap() > 0 {
            // The harness does not end its line before the process speaks.
            if let Some((_, said)) = line.split_once(SAYS) {
                return said.trim().to_owned();
            }
            line.clear();
        }
        panic!("the process ended: {:?}", self.child.wait());
    }

    /// Tells something and hears the answer.
    pub fn ask(&mut self, words: &str) -> String {
        self.tell(words);
        self.hear()
    }

    /// SIGSTOP; when this returns, no thread of the process runs any more.
    pub fn pause(&self) {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, Signal::STOP).unwrap();
        let (_, status) = waitpid(Some(pid), WaitOptions::UNTRACED).unwrap().unwrap();
        assert!(status.stopped(), "{status:?}");
    }

    pub fn resume(&self) {
        kill_process(Pid::from_child(&self.child), Signal::CONT).unwrap();
    }

    /// SIGKILL, and waits for the end.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Ends its input, and waits for its end, which must be a good one.
    pub fn end(&mut self) {
        drop(self.input.take());
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Over already, unless a test failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Says something to who started this process.
pub fn say(words: &str) {
    println!("{SAYS}{words}");
}

/// What this process is told, line by line.
pub fn told() -> impl Iterator<Item = Vec<String>> {
    std::io::stdin().lines().map(|line| line.unwrap().split_whitespace().map(str::to_owned).collect())
}
