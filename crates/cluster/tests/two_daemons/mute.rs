//! A member that says that it has each block, and answers no request to borrow one.

use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;

use kvlane_fabric::{Engine, EngineOptions, SendOptions};
use kvlane_proto::Message;
use kvlane_proto::cluster::{Answer, Envelope, Question, envelope::Body};

use crate::host::{PATIENCE, TOKEN};

pub(crate) struct Mute {
    pub(crate) address: SocketAddr,
    engine: Arc<Engine>,
    thread: Option<JoinHandle<()>>,
}

impl Mute {
    pub(crate) fn new() -> Mute {
        let listen = vec!["127.0.0.1:0".parse().unwrap()];
        let options = EngineOptions { listen, token: TOKEN.into(), ..EngineOptions::default() };
        let engine = Arc::new(Engine::new(options).unwrap());
        let address = engine.describe().unwrap().socket_addresses().next().unwrap();
        Mute { address, engine, thread: None }
    }

    /// Answers the questions of the daemon there.
    pub(crate) fn answer(&mut self, daemon: SocketAddr) {
        let engine = Arc::clone(&self.engine);
        let peer = engine.connect_to(daemon, PATIENCE).unwrap();
        let answer = move || {
            while let Some(message) = engine.receive(None) {
                let asked = Envelope::decode(&message.bytes[..]).unwrap();
                if let Some(Body::Question(Question { number, first, blocks, .. })) = asked.body {
                    let runs = vec![0, blocks.unwrap().hashes.len() as u32 / 16];
                    let answer = Body::Answer(Answer { number, first, runs });
                    let bytes = Envelope { version: asked.version, body: Some(answer) }.encode_to_vec();
                    drop(engine.send(peer, bytes, SendOptions::default()));
                }
            }
        };
        self.thread = Some(std::thread::spawn(answer));
    }
}

impl Drop for Mute {
    fn drop(&mut self) {
        self.engine.close();
        self.thread.take().into_iter().for_each(|thread| thread.join().unwrap());
    }
}
