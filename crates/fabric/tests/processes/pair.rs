//! One connection that the proxy carries: its two ends, and the bytes that are held between them.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::net::sockopt::set_socket_linger;

use crate::support::MIB;

/// Bytes that a proxy keeps of one direction of a connection.
const KEEPS: usize = 256 << 10;

pub(crate) struct Pair {
    pub(crate) number: usize,
    pub(crate) ends: [TcpStream; 2],
    /// What came from each end.
    pub(crate) came: [VecDeque<u8>; 2],
    /// Nothing comes any more from this end.
    closed: [bool; 2],
    /// This end was told that nothing comes any more.
    told: [bool; 2],
}

impl Pair {
    pub(crate) fn new(number: usize, ends: [TcpStream; 2]) -> Pair {
        for end in &ends {
            end.set_nonblocking(true).unwrap();
            end.set_nodelay(true).unwrap();
        }
        Pair { number, ends, came: Default::default(), closed: [false; 2], told: [false; 2] }
    }

    pub(crate) fn wanted(&self, is_held: bool) -> [PollFlags; 2] {
        [0, 1].map(|end| {
            let takes = !self.closed[end] && self.came[end].len() < self.keeps(is_held);
            let gives = !is_held && !self.came[1 - end].is_empty();
            let mut wanted = PollFlags::empty();
            wanted.set(PollFlags::IN, takes);
            wanted.set(PollFlags::OUT, gives);
            wanted
        })
    }

    /// What is held is read on, so that an end that closes has nothing unsent.
    fn keeps(&self, is_held: bool) -> usize {
        if is_held { 64 * MIB } else { KEEPS }
    }

    /// Moves what can be moved now, once `change` has seen it, with the number of the end that it came from. Answers the bytes.
    pub(crate) fn carry(
        &mut self,
        is_held: bool,
        delay: Duration,
        most: Option<usize>,
        left: u64,
        mut change: impl FnMut(usize, &mut VecDeque<u8>),
    ) -> u64 {
        let mut portion = vec![0; KEEPS];
        let mut moved = 0;
        for end in [0, 1] {
            if !self.closed[end] && self.came[end].len() < self.keeps(is_held) {
                match (&self.ends[end]).read(&mut portion) {
                    Ok(0) => self.closed[end] = true,
                    Ok(len) => self.came[end].extend(&portion[..len]),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                    Err(_) => self.closed[end] = true,
                }
            }
            if is_held {
                continue;
            }
            let (to, came) = (1 - end, &mut self.came[end]);
            if !came.is_empty() {
                change(end, came);
                std::thread::sleep(delay);
                let next = came.as_slices().0;
                let may = most.map_or(left - moved, |most| (left - moved).min(most as u64));
                match (&self.ends[to]).write(&next[..(next.len() as u64).min(may) as usize]) {
                    Ok(len) => {
                        came.drain(..len);
                        moved += len as u64;
                    }
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                    Err(_) => {
                        came.clear();
                        self.closed = [true; 2];
                    }
                }
            }
            if self.closed[end] && came.is_empty() && !self.told[to] {
                self.told[to] = true;
                // It is gone already if this fails.
                let _ = self.ends[to].shutdown(Shutdown::Write);
            }
        }
        moved
    }

    /// Both ends have ended, and got what came before.
    pub(crate) fn is_over(&self) -> bool {
        self.told == [true; 2]
    }

    pub(crate) fn reset(self) {
        self.ends.into_iter().for_each(reset);
    }
}

pub(crate) fn reset(socket: TcpStream) {
    set_socket_linger(&socket, Some(Duration::ZERO)).unwrap();
}
