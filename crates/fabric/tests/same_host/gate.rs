//! A gate before an engine, which holds one of its connections.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex};

use kvlane_fabric::{Address, Descriptor};

use crate::support::PATIENCE;

/// Carries connections to an engine, and of the first, while it is held, nothing that the connecting side says, or nothing
/// that the engine answers.
#[derive(Default)]
pub(crate) struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Default)]
pub(crate) struct GateState {
    pub(crate) is_held: bool,
    pub(crate) holds_answers: bool,
    /// Bytes of the first connection.
    pub(crate) came: usize,
    pub(crate) is_first_over: bool,
}

impl Gate {
    /// Before the peer; and how it is reached through this.
    pub(crate) fn before(descriptor: &Descriptor) -> (Arc<Gate>, Descriptor) {
        let target = String::from_utf8(descriptor.addresses[0].bytes.clone()).unwrap();
        // Reached from another address, so that what is said goes through the socket.
        let listener = TcpListener::bind("127.0.0.2:0").unwrap();
        let bytes = listener.local_addr().unwrap().to_string().into_bytes();
        let gate = Arc::new(Gate::default());
        // These threads end with the connections, and the last with the tests.
        std::thread::spawn({
            let gate = Arc::clone(&gate);
            move || {
                for (number, socket) in listener.incoming().take(1_000).map_while(Result::ok).enumerate() {
                    let Ok(other) = TcpStream::connect(&target) else { return };
                    let (from, to) = (other.try_clone().unwrap(), socket.try_clone().unwrap());
                    std::thread::spawn({
                        let gate = Arc::clone(&gate);
                        move || gate.answer(number, from, to)
                    });
                    let (gate, (give, take)) = (Arc::clone(&gate), channel::<Vec<u8>>());
                    std::thread::spawn({
                        let gate = Arc::clone(&gate);
                        move || gate.take_in(number, socket, give)
                    });
                    std::thread::spawn(move || gate.carry_on(number, take, other));
                }
            }
        });
        (gate, Descriptor { addresses: vec![Address { kind: 1, bytes }], ..descriptor.clone() })
    }

    fn answer(&self, number: usize, mut from: TcpStream, mut to: TcpStream) {
        let mut bytes = vec![0; 64 << 10];
        while let Ok(len @ 1..) = from.read(&mut bytes) {
            if number == 0 {
                self.wait(|state| !state.holds_answers);
            }
            if to.write_all(&bytes[..len]).is_err() {
                return;
            }
        }
    }

    fn take_in(&self, number: usize, mut from: TcpStream, to: Sender<Vec<u8>>) {
        let mut bytes = vec![0; 64 << 10];
        while let Ok(len @ 1..) = from.read(&mut bytes) {
            self.change(|state| state.came += if number == 0 { len } else { 0 });
            // Its end is told by the other side.
            let _ = to.send(bytes[..len].to_vec());
        }
    }

    fn carry_on(&self, number: usize, from: Receiver<Vec<u8>>, mut to: TcpStream) {
        for bytes in from {
            if number == 0 {
                self.wait(|state| !state.is_held);
            }
            // It has ended if this fails.
            let _ = to.write_all(&bytes);
        }
        // The first is left for the engine to end: an end would make it forget what it has not done yet.
        if number > 0 {
            let _ = to.shutdown(Shutdown::Write);
        }
        // Until then nobody hears what it says.
        let _ = std::io::copy(&mut to, &mut std::io::sink());
        self.change(|state| state.is_first_over |= number == 0);
    }

    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut GateState) -> T) -> T {
        let answer = change(&mut self.state.lock().unwrap());
        self.changed.notify_all();
        answer
    }

    pub(crate) fn wait(&self, is_so: impl Fn(&GateState) -> bool) {
        let state = self.state.lock().unwrap();
        let waited = self.changed.wait_timeout_while(state, PATIENCE, |state| !is_so(state)).unwrap();
        assert!(!waited.1.timed_out());
    }
}
