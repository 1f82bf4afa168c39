//! A member that a test plays, message by message.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;

use kvlane_fabric::{Engine, EngineOptions, PeerId, SendOptions};
use kvlane_proto::Message;
use kvlane_proto::cluster::{Answer, Envelope, Question, envelope::Body};

use crate::host::{Host, PATIENCE, TOKEN};

pub(crate) struct Played {
    pub(crate) address: SocketAddr,
    engine: Arc<Engine>,
    peer: Option<PeerId>,
    thread: Option<JoinHandle<()>>,
}

impl Played {
    pub(crate) fn new() -> Played {
        let listen = vec!["127.0.0.1:0".parse().unwrap()];
        let options = EngineOptions { listen, token: TOKEN.into(), ..EngineOptions::default() };
        let engine = Arc::new(Engine::new(options).unwrap());
        let address = engine.describe().unwrap().socket_addresses().next().unwrap();
        Played { address, engine, peer: None, thread: None }
    }

    /// Becomes a member for a host that dials it. It answers as `play` does, which also says what else it hears.
    pub(crate) fn join<Heard: Send + 'static>(
        &mut self,
        host: &Host,
        mut play: impl FnMut(Body) -> (Vec<Body>, Option<Heard>) + Send + 'static,
    ) -> Receiver<Heard> {
        let peer = self.engine.connect_to(host.address, PATIENCE).unwrap();
        self.peer = Some(peer);
        let (engine, (heard, hears)) = (Arc::clone(&self.engine), channel());
        let run = move || {
            while let Some(message) = engine.receive(None) {
                let body = Envelope::decode(&message.bytes[..]).unwrap().body.unwrap();
                let (answers, more) = play(body);
                answers.into_iter().for_each(|answer| send(&engine, peer, answer));
                // The test may have heard enough.
                more.into_iter().for_each(|more| drop(heard.send(more)));
            }
        };
        self.thread = Some(std::thread::spawn(run));
        host.wait(|status| {
            status.members.iter().any(|member| member.address == self.address && member.is_reached)
        });
        hears
    }

    pub(crate) fn say(&self, body: Body) {
        send(&self.engine, self.peer.unwrap(), body);
    }
}

impl Drop for Played {
    fn drop(&mut self) {
        self.engine.close();
        self.thread.take().into_iter().for_each(|thread| thread.join().unwrap());
    }
}

fn send(engine: &Engine, peer: PeerId, body: Body) {
    let bytes = Envelope { version: 1, body: Some(body) }.encode_to_vec();
    // Fails once the host has gone.
    drop(engine.send(peer, bytes, SendOptions::default()));
}

/// Says that it has each block that is asked for.
pub(crate) fn has_all(question: Question) -> Vec<Body> {
    let Question { number, first, blocks, .. } = question;
    let runs = vec![0, blocks.unwrap().hashes.len() as u32 / 16];
    vec![Body::Answer(Answer { number, first, runs })]
}
