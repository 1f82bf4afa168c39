//! Tests of a worker's thread of saves: its bounded queue, and which saves are urgent. They need a running daemon, so they
//! stand apart from calls/save_thread.rs.

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
    awaited_saves::{AwaitedSaves, Signal},
    calls::{
        save_thread::{SaveThread, WAITING_MAX},
        table::Call,
    },
    daemon::Daemon,
    peer::Stream,
    replies::Replies,
    session_table,
};

/// Reads the request numbers of the next `count` answers.
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

/// A connection to a worker: the daemon's end and the worker's.
fn connection(daemon: &Daemon) -> (Arc<Replies>, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let refusals = Arc::clone(&daemon.shared.refusals);
    (Arc::new(Replies::new(Stream::Unix(ours), [7; 16], refusals, "the worker".into())), theirs)
}

#[test]
fn a_worker_that_never_stops_asking_hears_so_and_is_served_again_later() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = session_table::daemon(&folder);
    let shared = &daemon.shared;
    let (replies, mut theirs) = connection(&daemon);
    let (go_on, may_go_on) = mpsc::channel::<()>();
    let (begun, begins) = mpsc::channel::<()>();
    let save = move |_: &v1::Save, _: &Pace<'_>| {
        begun.send(()).unwrap();
        // Until the other end is dropped.
        let _ = may_go_on.recv();
        Ok(Answer::Done(v1::Done::default()))
    };
    let saves = SaveThread::start(Arc::clone(shared), replies, "p".into(), save).unwrap();
    let push = |id| saves.push(shared, id, v1::Save::default(), Call::Save, Instant::now());
    let ask = |id| saves.room().map(|()| push(id));
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
    // No call is left in progress, or the daemon would wait for it.
    drop(saves);
    assert!(daemon.stop(Duration::from_secs(60)));
}

#[test]
fn a_save_is_urgent_while_another_engine_waits_for_its_engine_and_while_another_save_is_behind_it() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = session_table::daemon(&folder);
    let shared = &daemon.shared;
    let (replies, _theirs) = connection(&daemon);
    let (look, looks) = mpsc::channel::<()>();
    let (seen, sees) = mpsc::channel::<bool>();
    let save = move |_: &v1::Save, pace: &Pace<'_>| {
        // Until the other end is dropped.
        while looks.recv().is_ok() {
            seen.send((pace.is_urgent)()).unwrap();
        }
        Ok(Answer::Done(v1::Done::default()))
    };
    let saves = SaveThread::start(Arc::clone(shared), replies, "p".into(), save).unwrap();
    let ask = |id| saves.push(shared, id, v1::Save::default(), Call::Save, Instant::now());
    let is_urgent = || {
        look.send(()).unwrap();
        sees.recv().unwrap()
    };
    ask(1);
    assert!(!is_urgent());
    let wait = |engine: &str| AwaitedSaves::enter(&shared.awaited_saves, engine, Signal::new(|| {}));
    let for_another = wait("q");
    assert!(!is_urgent());
    let listed = [wait("p"), wait("p")];
    assert!(is_urgent());
    drop(listed);
    assert!(!is_urgent());
    ask(2);
    assert!(is_urgent());
    drop((for_another, look));
    drop(saves);
    assert!(daemon.stop(Duration::from_secs(60)));
}
