//! Messages between engines: delivered once or failed, and never more than the receiver has room for.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::collections::HashMap;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use kvlane_fabric::{
    Admission, Engine, EngineId, EngineOptions, FabricError, Failure, Handle, Immediates, Inbox,
    InboxOptions, MESSAGE_BYTES_MAX, Message, Options, PeerId, Priority, SendOptions, Transport,
};

const PATIENCE: Duration = Duration::from_secs(30);
const SOON: Duration = Duration::from_millis(200);

fn engine() -> Engine {
    Engine::new(EngineOptions::default()).unwrap()
}

fn holding(messages: usize, bytes: usize) -> Engine {
    let inbox = InboxOptions { messages, bytes };
    Engine::new(EngineOptions { inbox, ..EngineOptions::default() }).unwrap()
}

fn peer(here: &Engine, there: &Engine) -> PeerId {
    here.connect(&there.describe().unwrap()).unwrap()
}

fn send(here: &Engine, peer: PeerId, bytes: &[u8], timeout: Duration) -> Handle {
    here.send(peer, bytes, SendOptions { timeout, ..SendOptions::default() }).unwrap()
}

fn done(handle: &Handle) {
    assert_eq!(handle.wait(Some(PATIENCE)), Some(Ok(())));
}

/// Bytes that tell how many they are, and of which message.
fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 31 + at / 251 + len + seed) as u8).collect()
}

/// Counts how often it was woken.
#[derive(Default)]
struct Woken {
    count: Mutex<usize>,
    changed: Condvar,
}

impl Wake for Woken {
    fn wake(self: Arc<Woken>) {
        *self.count.lock().unwrap() += 1;
        self.changed.notify_all();
    }
}

impl Woken {
    /// How often, once it was at all: a task is woken a moment after the sender hears that its message is delivered.
    fn wait(&self) -> usize {
        let count = self.count.lock().unwrap();
        *self.changed.wait_timeout_while(count, PATIENCE, |count| *count == 0).unwrap().0
    }
}

#[test]
fn messages_of_any_length_arrive_both_ways_and_say_whose_they_are() {
    let (here, there) = (engine(), engine());
    let (to, back) = (peer(&here, &there), peer(&there, &here));
    for len in [0, 1, 8191, 8193, 16385, MESSAGE_BYTES_MAX - 1, MESSAGE_BYTES_MAX] {
        done(&send(&here, to, &pattern(len, 0), PATIENCE));
        let message = there.receive(Some(PATIENCE)).unwrap();
        assert!(message.bytes == pattern(len, 0), "{len}");
        assert_eq!(message.from, here.id());
        assert_eq!(message.from, EngineId::from(&here.describe().unwrap()));
        done(&send(&there, back, &pattern(len, 1), PATIENCE));
        let answer = here.receive(Some(PATIENCE)).unwrap();
        assert!(answer.bytes == pattern(len, 1) && answer.from == there.id());
    }
    assert_eq!(there.receive(Some(Duration::ZERO)), None);
}

/// A scheduler of hand-offs only sends messages. It had a connection for bytes to each other engine.
#[test]
fn an_engine_without_a_carrier_has_messages_and_no_connections_for_bytes() {
    let alone = || EngineOptions { transport: Some(Transport::NONE), ..EngineOptions::default() };
    let (here, there) = (Engine::new(alone()).unwrap(), Engine::new(alone()).unwrap());
    let (to, back) = (peer(&here, &there), peer(&there, &here));
    done(&send(&here, to, b"to", PATIENCE));
    done(&send(&there, back, b"back", PATIENCE));
    assert_eq!(there.receive(Some(PATIENCE)).unwrap().bytes, b"to");
    assert_eq!(here.receive(Some(PATIENCE)).unwrap().bytes, b"back");
    let carriers =
        |engine: &Engine, peer| -> Vec<&str> { engine.paths(peer).iter().map(|path| path.carrier).collect() };
    assert_eq!((carriers(&here, to), carriers(&there, back)), (vec!["control"], vec!["control"]));
    // The control: another engine has some.
    let (one, other) = (engine(), engine());
    let usual = peer(&one, &other);
    done(&send(&one, usual, b"x", PATIENCE));
    assert!(carriers(&one, usual).contains(&"tcp"));
}

#[test]
fn what_cannot_be_sent_is_told_at_once() {
    let transfers = Options { message_bytes: 100_000, ..Options::default() };
    let here = Engine::new(EngineOptions { transfers, ..EngineOptions::default() }).unwrap();
    let there = engine();
    let gone = peer(&here, &there);
    drop(there);
    let options = SendOptions::default;
    let long = vec![0; MESSAGE_BYTES_MAX + 1];
    assert!(matches!(here.send(gone, long, options()), Err(FabricError::MessageTooLong(65_537))));
    let first = here.send(gone, vec![0; 60_000], options()).unwrap();
    assert!(matches!(here.send(gone, vec![0; 60_000], options()), Err(FabricError::MessagesFull(60_000))));
    first.cancel();
    assert_eq!(first.wait(Some(PATIENCE)), Some(Err(Failure::Cancelled)));
    let late = here.send(gone, vec![0; 60_000], SendOptions { timeout: SOON, ..options() }).unwrap();
    assert_eq!(late.wait(Some(PATIENCE)), Some(Err(Failure::DeadlineExceeded)));
    let lost = here.send(gone, vec![0; 60_000], options()).unwrap();
    assert_eq!(lost.wait(Some(PATIENCE)), Some(Err(Failure::PeerLost)));
    here.disconnect(gone);
    assert!(matches!(here.send(gone, vec![], options()), Err(FabricError::NoSuchPeer)));
    here.close();
    assert!(matches!(here.send(gone, vec![], options()), Err(FabricError::Closed)));
    for inbox in [InboxOptions { messages: 0, bytes: 1 << 20 }, InboxOptions { messages: 1, bytes: 65_535 }] {
        let wrong = Engine::new(EngineOptions { inbox, ..EngineOptions::default() });
        assert!(matches!(wrong, Err(FabricError::Limit(_))));
    }
}

#[test]
fn what_finds_no_room_waits_for_it_and_fails_if_none_comes() {
    for there in [holding(4, 1 << 20), holding(100, 2 * MESSAGE_BYTES_MAX)] {
        let here = engine();
        let to = peer(&here, &there);
        // Of the first engine the number of messages is what is short, of the second their bytes.
        let sent: Vec<Handle> =
            (0..10).map(|seed| send(&here, to, &pattern(MESSAGE_BYTES_MAX / 2, seed), PATIENCE)).collect();
        sent.iter().take(4).for_each(done);
        let begun = Instant::now();
        let fails = send(&here, to, &pattern(1, 0), SOON);
        assert_eq!(fails.wait(Some(PATIENCE)), Some(Err(Failure::NoRoom)));
        assert!(begun.elapsed() >= SOON);
        let cancelled = send(&here, to, &pattern(1, 0), PATIENCE);
        cancelled.cancel();
        assert_eq!(cancelled.wait(Some(PATIENCE)), Some(Err(Failure::Cancelled)));
        // What else goes to the peer is not held up.
        let generation = there.open_counter(1);
        let group = here.group(&[to]).unwrap();
        assert_eq!(group.barrier(&[(1, generation)], None).unwrap().wait(Some(PATIENCE)), Some(vec![Ok(())]));
        let mut came: Vec<Vec<u8>> = (0..10).map(|_| there.receive(Some(PATIENCE)).unwrap().bytes).collect();
        sent.iter().for_each(done);
        came.sort();
        let mut wanted: Vec<Vec<u8>> = (0..10).map(|seed| pattern(MESSAGE_BYTES_MAX / 2, seed)).collect();
        wanted.sort();
        assert!(came == wanted);
        assert_eq!(there.receive(Some(SOON)), None, "what failed is not delivered");
    }
}

#[test]
fn many_senders_and_receivers_share_a_small_inbox() {
    const SENDERS: usize = 3;
    const EACH: usize = 600;
    let there = holding(16, 256 << 10);
    let description = there.describe().unwrap();
    let left = AtomicUsize::new(SENDERS * EACH);
    let seen: HashMap<(EngineId, u64), u32> = std::thread::scope(|scope| {
        let senders: Vec<_> = (0..SENDERS)
            .map(|sender| {
                let description = &description;
                scope.spawn(move || {
                    let options = EngineOptions { connections: 3, ..EngineOptions::default() };
                    let here = Engine::new(options).unwrap();
                    let to = here.connect(description).unwrap();
                    let handles: Vec<Handle> = (0..EACH as u64)
                        .map(|index| {
                            let mut bytes = index.to_le_bytes().to_vec();
                            bytes.resize(8 + (index as usize * 37) % 9000, sender as u8);
                            let priority = if index % 3 == 0 { Priority::Bulk } else { Priority::High };
                            here.send(to, bytes, SendOptions { timeout: PATIENCE, priority }).unwrap()
                        })
                        .collect();
                    handles.iter().for_each(done);
                    here.id()
                })
            })
            .collect();
        let receive = || {
            let mut mine = Vec::new();
            while left.load(Ordering::Acquire) > 0 {
                if let Some(message) = there.receive(Some(Duration::from_millis(20))) {
                    left.fetch_sub(1, Ordering::AcqRel);
                    mine.push(message);
                }
            }
            mine
        };
        let receivers = [(); 2].map(|()| scope.spawn(receive));
        let mut seen = HashMap::new();
        for message in receivers.into_iter().flat_map(|receiver| receiver.join().unwrap()) {
            let index = u64::from_le_bytes(message.bytes[..8].try_into().unwrap());
            assert_eq!(message.bytes.len(), 8 + (index as usize * 37) % 9000);
            *seen.entry((message.from, index)).or_default() += 1;
        }
        let ids: Vec<EngineId> = senders.into_iter().map(|sender| sender.join().unwrap()).collect();
        assert!(seen.keys().all(|(from, _)| ids.contains(from)));
        seen
    });
    assert_eq!(seen.len(), SENDERS * EACH);
    assert!(seen.values().all(|count| *count == 1));
    assert_eq!(there.receive(Some(Duration::ZERO)), None);
}

#[test]
fn whoever_waits_hears_of_a_message_and_of_the_end() {
    let (here, there) = (engine(), engine());
    let to = peer(&here, &there);
    let woken = Arc::new(Woken::default());
    let waker = Waker::from(Arc::clone(&woken));
    let mut context = Context::from_waker(&waker);
    let mut receiving = pin!(there.receiving());
    assert_eq!(receiving.as_mut().poll(&mut context), Poll::Pending);
    {
        // One that is dropped takes nothing, and is not woken.
        let other = Arc::new(Woken::default());
        let dropped = Waker::from(Arc::clone(&other));
        assert_eq!(pin!(there.receiving()).poll(&mut Context::from_waker(&dropped)), Poll::Pending);
        drop(dropped);
        assert_eq!(Arc::strong_count(&other), 1);
    }
    done(&send(&here, to, b"one", PATIENCE));
    assert_eq!(woken.wait(), 1);
    match receiving.as_mut().poll(&mut context) {
        Poll::Ready(Some(message)) => assert_eq!(message.bytes, b"one"),
        other => panic!("{other:?}"),
    }
    assert_eq!(receiving.as_mut().poll(&mut context), Poll::Pending);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| there.receive(None));
        done(&send(&here, to, b"two", PATIENCE));
        // The thread or the task may be the one that gets it; what is left is for the other.
        let mut polled = receiving.as_mut().poll(&mut context);
        if polled.is_pending() {
            assert_eq!(waiting.join().unwrap().unwrap().bytes, b"two");
            there.close();
            polled = receiving.as_mut().poll(&mut context);
            assert_eq!(polled, Poll::Ready(None));
        } else {
            there.close();
            assert_eq!(waiting.join().unwrap(), None);
        }
    });
    assert_eq!(there.receive(None), None);
}

#[test]
fn what_arrived_before_the_end_can_still_be_taken() {
    let (here, there) = (engine(), engine());
    let to = peer(&here, &there);
    done(&send(&here, to, b"last", PATIENCE));
    there.close();
    assert_eq!(there.receive(None).unwrap().bytes, b"last");
    assert_eq!(there.receive(None), None);
}

#[test]
fn a_copy_is_known_also_where_there_is_no_room() {
    let (mut inbox, mut seen) = (Inbox::new(InboxOptions { messages: 2, bytes: 100 }), Immediates::default());
    let message = |byte| Message { from: EngineId { engine_id: 1, boot_nonce: 2 }, bytes: vec![byte; 40] };
    // The same message over two connections at once: one of them delivers it, the other one's room comes free.
    assert_eq!([(); 2].map(|()| inbox.admit(&seen, 7, 0, 40)), [Admission::Admitted; 2]);
    assert_eq!(inbox.admit(&seen, 7, 1, 0), Admission::NoRoom, "two are coming");
    assert!(inbox.deliver(&mut seen, 7, 0, message(1)));
    assert!(!inbox.deliver(&mut seen, 7, 0, message(1)));
    assert_eq!(inbox.admit(&seen, 7, 1, 61), Admission::NoRoom);
    assert_eq!(inbox.admit(&seen, 7, 1, 60), Admission::Admitted);
    assert_eq!(inbox.admit(&seen, 7, 0, 40), Admission::Known);
    // Another sender's number is another message; what did not come whole was never there.
    assert_eq!(inbox.admit(&seen, 8, 0, 40), Admission::NoRoom);
    inbox.release(7, 60);
    assert_eq!(inbox.admit(&seen, 8, 0, 40), Admission::Admitted);
    assert!(inbox.deliver(&mut seen, 8, 0, message(2)));
    assert_eq!(inbox.take(), Some(message(1)));
    assert_eq!((inbox.take(), inbox.take(), inbox.held()), (Some(message(2)), None, 0));
    assert_eq!(inbox.admit(&seen, 7, 0, 40), Admission::Known);
    assert_eq!(inbox.admit(&seen, 7, u64::MAX, 40), Admission::Refused);
    assert_eq!(inbox.admit(&seen, 7, 1, MESSAGE_BYTES_MAX as u64 + 1), Admission::Refused);
}

/// Two senders share an inbox of six messages. One of them sends without end, and each place that comes free would be taken by
/// it again before the other one, which waits between its attempts, finds it.
#[test]
fn who_sends_without_end_leaves_others_their_share_of_the_inbox() {
    let mut inbox = Inbox::new(InboxOptions { messages: 6, bytes: 600 });
    let mut seen = Immediates::default();
    let mut next = [0; 2];
    let mut send = |inbox: &mut Inbox, sender: usize, bytes: usize| {
        let admission = inbox.admit(&seen, sender as u128, next[sender], bytes as u64);
        if admission == Admission::Admitted {
            let from = EngineId { engine_id: sender as u128, boot_nonce: 0 };
            let message = Message { from, bytes: vec![0; bytes] };
            assert!(inbox.deliver(&mut seen, sender as u128, next[sender], message));
            next[sender] += 1;
        }
        admission
    };
    const GREEDY: usize = 0;
    const MODEST: usize = 1;
    inbox.share_among(1);
    let alone = [(); 7].map(|()| send(&mut inbox, GREEDY, 10));
    assert_eq!(alone[5..], [Admission::Admitted, Admission::NoRoom], "whoever is alone has all of it");
    inbox.share_among(2);
    for _ in 0..3 {
        inbox.take().unwrap();
        assert_eq!(send(&mut inbox, GREEDY, 10), Admission::NoRoom, "it has its share, and more");
    }
    assert_eq!(send(&mut inbox, MODEST, 400), Admission::Admitted, "one may have more bytes than a share");
    assert_eq!(send(&mut inbox, MODEST, 1), Admission::NoRoom);
    inbox.take().unwrap();
    assert_eq!(send(&mut inbox, GREEDY, 100), Admission::Admitted);
    let whose: Vec<u128> = std::iter::from_fn(|| inbox.take()).map(|taken| taken.from.engine_id).collect();
    assert_eq!((whose, inbox.held()), (vec![0, 0, 1, 0], 0));
    let shares = [(); 4].map(|()| send(&mut inbox, GREEDY, 1));
    assert_eq!(shares[2..], [Admission::Admitted, Admission::NoRoom], "three of six");
}
