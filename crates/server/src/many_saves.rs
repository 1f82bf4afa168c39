//! A worker that asks for saves without end: apart from the code, since it takes a daemon, which has that code in it.

use std::{
    io::Read,
    os::unix::net::UnixStream,
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use kvlane_engine_memory::Pace;
use kvlane_proto::{
    FrameReader,
    v1::{self, reply::Body as Answer},
};

use crate::{
    calls::{
        save_thread::{SaveThread, WAITING_MAX},
        table::Call,
    },
    peer::Stream,
    replies::Replies,
    session_table,
};

/// The numbers of the next `count` answers.
fn answered(stream: &mut UnixStream, reader: &mut FrameReader, count: usize) -> Vec<u64> {
    let (mut numbers, mut scratch) = (Vec::new(), [0; 4096]);
    while numbers.len() < count {
        match reader.next_message::<v1::Reply>().unwrap() {
            Some(reply) => numbers.push(reply.id),
            None => {
                let taken = stream.read(&mut scratch).unwrap();
                assert_ne!(taken, 0, "the daemon hung up");
                reader.push(&scratch[..taken]);
            }
        }
    }
    numbers
}

#[test]
fn a_worker_that_never_stops_asking_hears_so_and_is_served_again_later() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = session_table::daemon(&folder);
    let shared = &daemon.shared;
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let replies =
        Replies::new(Stream::Unix(ours), [7; 16], Arc::clone(&shared.refusals), "the worker".into());
    let (go_on, may_go_on) = mpsc::channel::<()>();
    let (begun, begins) = mpsc::channel::<()>();
    let save = move |_: &v1::Save, _: &Pace<'_>| {
        begun.send(()).unwrap();
        // Until the other end is dropped.
        let _ = may_go_on.recv();
        Ok(Answer::Done(v1::Done {}))
    };
    let saves = SaveThread::start(Arc::clone(shared), Arc::new(replies), save).unwrap();
    let ask = |id| saves.push(shared, id, v1::Save::default(), Call::Save, Instant::now());
    ask(0).unwrap();
    begins.recv().unwrap();
    let waiting = 1..=WAITING_MAX as u64;
    waiting.clone().for_each(|id| ask(id).unwrap());
    let refusal = ask(0).unwrap_err();
    assert_eq!(refusal.sentence, "16384 saves of this worker wait already");
    drop(go_on);
    let reader = &mut FrameReader::default();
    let numbers = answered(&mut theirs, reader, WAITING_MAX + 1);
    assert!(numbers.into_iter().eq(0..=WAITING_MAX as u64), "all that were taken are answered, in order");
    ask(9).unwrap();
    assert_eq!(answered(&mut theirs, reader, 1), [9]);
    // The counts of its sessions are back at rest, or the daemon would wait for them.
    drop(saves);
    assert!(daemon.stop(Duration::from_secs(60)));
}
