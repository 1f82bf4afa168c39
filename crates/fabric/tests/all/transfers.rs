//! Cases that the simulation cannot produce, or only rarely: one test each.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail like tests")]

use std::sync::Arc;
use std::time::Duration;

use kvlane_fabric::{
    Action, Between, CannotSend, Completion, Failure, Memory, Op, Options, PathId, PathSpec, PeerId, Place,
    Post, Priority, Reach, Request, Route, Run, Stretch, Ticket, Transfers, Work,
};

fn at(micros: u64) -> Duration {
    Duration::from_micros(micros)
}

fn request(peer: PeerId, bytes: u64, priority: Priority) -> Request {
    let place = Place { region: 0, offset: 0 };
    let stretches = vec![Stretch::of_hosts(vec![Run { local: place, remote: place, len: bytes }])];
    Request { peer, op: Op::Write, stretches, immediate: None, deadline: None, priority }
}

fn actions(transfers: &mut Transfers) -> Vec<Action> {
    std::iter::from_fn(|| transfers.next_action()).collect()
}

/// A peer with paths that serve everything.
fn add_peer(transfers: &mut Transfers, paths: usize) -> (PeerId, Vec<PathId>) {
    let peer = transfers.add_peer(at(0));
    let path = |_| transfers.add_path(at(0), peer, PathSpec::new(Reach::ALL, 0)).unwrap();
    (peer, (0..paths).map(path).collect())
}

/// A peer whose paths are all up.
fn connected(options: Options, paths: usize) -> (Transfers, PeerId, Vec<PathId>) {
    let mut transfers = Transfers::new(options);
    let (peer, paths) = add_peer(&mut transfers, paths);
    let connects: Vec<Action> = paths.iter().map(|path| Action::Connect(*path, 0)).collect();
    assert_eq!(actions(&mut transfers), connects);
    assert!(paths.iter().all(|path| transfers.path_up(at(0), *path, 0)));
    (transfers, peer, paths)
}

/// Posts one chunk over each path, so that the rates of all are known.
fn warm_up(transfers: &mut Transfers, peer: PeerId, paths: usize) {
    let bytes = paths as u64 * Options::default().chunk_bytes;
    transfers.submit(at(1), request(peer, bytes, Priority::High)).unwrap();
    let posts: Vec<Post> = std::iter::from_fn(|| transfers.next_post(at(1))).collect();
    assert_eq!(posts.len(), paths);
    posts.iter().for_each(|post| transfers.complete(at(2), post.token, Completion::Placed));
    assert!(matches!(actions(transfers)[..], [Action::Over(_, Ok(()))]));
}

#[test]
fn a_post_handed_back_by_a_path_that_has_broken_does_not_keep_the_path_closing() {
    let (mut transfers, peer, paths) = connected(Options::default(), 1);
    transfers.submit(at(1), request(peer, 1, Priority::High)).unwrap();
    let post = transfers.next_post(at(1)).unwrap();
    transfers.path_broke(at(2), paths[0], 0);
    assert_eq!(transfers.next_post(at(2)), None);
    transfers.hand_back(at(3), post.token);
    let retry = transfers.next_tick().unwrap();
    transfers.tick(retry);
    assert_eq!(actions(&mut transfers), [Action::Connect(paths[0], 1)]);
    assert!(transfers.path_up(retry, paths[0], 1));
    assert!(transfers.next_post(retry).is_some());
}

#[test]
fn late_news_of_a_former_connection_are_told_apart() {
    let (mut transfers, _, paths) = connected(Options::default(), 1);
    transfers.path_broke(at(2), paths[0], 0);
    let retry = transfers.next_tick().unwrap();
    transfers.tick(retry);
    assert_eq!(actions(&mut transfers), [Action::Connect(paths[0], 1)]);
    transfers.path_broke(retry, paths[0], 0);
    assert!(!transfers.path_up(retry, paths[0], 0), "a connection that is not wanted any more");
    assert!(transfers.path_up(retry, paths[0], 1));
    transfers.path_broke(retry, paths[0], 0);
    assert_eq!(actions(&mut transfers), []);
}

#[test]
fn a_post_that_comes_back_ends_the_connection_for_the_others_too() {
    let (mut transfers, peer, paths) = connected(Options::default(), 1);
    warm_up(&mut transfers, peer, 1);
    let [first, second] =
        [(); 2].map(|()| transfers.submit(at(10), request(peer, 1, Priority::High)).unwrap());
    let posts = [(); 2].map(|()| transfers.next_post(at(10)).unwrap());
    assert_eq!(posts.each_ref().map(|post| post.ticket), [first, second]);
    transfers.complete(at(11), posts[0].token, Completion::Unknown);
    assert_eq!(actions(&mut transfers), [Action::Close(paths[0], 0)]);
    assert_eq!((transfers.next_post(at(11)), transfers.under_way(paths[0])), (None, 1));
    transfers.complete(at(12), posts[1].token, Completion::Placed);
    assert_eq!(actions(&mut transfers), [Action::Over(second, Ok(()))]);
}

#[test]
fn bulk_gets_its_share_although_every_other_post_is_handed_back() {
    let options = Options { chunk_bytes: 1, bulk_every: 4, ..Options::default() };
    let (mut transfers, peer, paths) = connected(options, 1);
    let high = transfers.submit(at(1), request(peer, 10_000, Priority::High)).unwrap();
    transfers.submit(at(1), request(peer, 10_000, Priority::Bulk)).unwrap();
    let mut taken = [0, 0];
    for turn in 0..2000 {
        transfers.path_ready(paths[0]);
        let post = transfers.next_post(at(turn)).unwrap();
        if turn % 2 == 1 {
            transfers.hand_back(at(turn), post.token);
            continue;
        }
        taken[usize::from(post.ticket != high)] += 1;
        transfers.complete(at(turn), post.token, Completion::Placed);
    }
    assert_eq!(taken, [750, 250]);
}

#[test]
fn what_a_path_keeps_for_too_long_goes_over_another() {
    let (mut transfers, peer, paths) = connected(Options::default(), 2);
    warm_up(&mut transfers, peer, 2);
    let ticket = transfers.submit(at(10), request(peer, 1, Priority::High)).unwrap();
    let stuck = transfers.next_post(at(10)).unwrap();
    let (closed, now) = loop {
        let now = transfers.next_tick().unwrap();
        assert!(now <= at(10) + Options::default().post_patience);
        transfers.tick(now);
        match &actions(&mut transfers)[..] {
            [] => {}
            [Action::Close(path, 0)] => break (*path, now),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!((closed, now), (stuck.path, at(10) + Options::default().post_patience));
    assert_eq!(transfers.next_post(now), None, "not before nothing touches the memory any more");
    transfers.complete(now, stuck.token, Completion::Unknown);
    let again = transfers.next_post(now).unwrap();
    assert!(again.path != stuck.path && again.work == stuck.work && paths.contains(&again.path));
    transfers.complete(now, again.token, Completion::Placed);
    assert_eq!(actions(&mut transfers), [Action::Over(ticket, Ok(()))]);
}

#[test]
fn a_removed_peer_is_forgotten_when_nothing_of_it_is_under_way() {
    let (mut transfers, peer, paths) = connected(Options::default(), 1);
    let posted = transfers.submit(at(1), request(peer, 1, Priority::High)).unwrap();
    let waiting = transfers.submit(at(1), request(peer, 1, Priority::High)).unwrap();
    let post = transfers.next_post(at(1)).unwrap();
    transfers.remove_peer(at(2), peer);
    let lost = Err(Failure::PeerLost);
    assert_eq!(actions(&mut transfers), [Action::Over(waiting, lost), Action::Close(paths[0], 0)]);
    assert_eq!(transfers.paths(peer), paths);
    transfers.complete(at(3), post.token, Completion::Unknown);
    assert_eq!(actions(&mut transfers), [Action::Over(posted, lost)]);
    assert_eq!((transfers.paths(peer), transfers.live()), (&[][..], 0));
    let late = transfers.submit(at(4), request(peer, 1, Priority::High)).unwrap();
    assert_eq!(actions(&mut transfers), [Action::Over(late, lost)]);
    assert!(!transfers.path_up(at(4), paths[0], 1));
    transfers.tick(at(100_000_000));
    assert_eq!((actions(&mut transfers), transfers.next_tick()), (vec![], None), "nothing is left of it");
}

#[test]
fn all_paths_of_a_removed_peer_are_closed_whether_they_were_up_or_on_their_way() {
    let (mut transfers, peer, mut paths) = connected(Options::default(), 2);
    paths.push(transfers.add_path(at(1), peer, PathSpec::new(Reach::ALL, 0)).unwrap());
    assert_eq!(actions(&mut transfers), [Action::Connect(paths[2], 0)]);
    let waiting = transfers.submit(at(1), request(peer, 1, Priority::High)).unwrap();
    transfers.remove_peer(at(2), peer);
    let mut wanted = vec![Action::Over(waiting, Err(Failure::PeerLost))];
    wanted.extend(paths.iter().map(|path| Action::Close(*path, 0)));
    assert_eq!(actions(&mut transfers), wanted);
    assert!(!transfers.has_peer(peer));
}

#[test]
fn no_immediate_runs_so_far_ahead_that_the_receiver_would_forget_the_oldest() {
    const MANY: u64 = 70_000;
    let options = Options { live_max: MANY as usize, ..Options::default() };
    let (mut transfers, peer, _) = connected(options, 2);
    warm_up(&mut transfers, peer, 2);
    for counter in 0..MANY as u32 {
        let empty = Request {
            stretches: Vec::new(),
            immediate: Some((counter, 0)),
            ..request(peer, 0, Priority::High)
        };
        transfers.submit(at(10), empty).unwrap();
    }
    let full = transfers.submit(at(10), request(peer, 1, Priority::High));
    assert_eq!(full.unwrap_err().0, MANY as usize);
    let oldest = transfers.next_post(at(10)).unwrap();
    let mut told = 0;
    let mut tell_all = |transfers: &mut Transfers| {
        while let Some(post) = transfers.next_post(at(11)) {
            let Work::Immediate { number, .. } = post.work else { panic!("{post:?}") };
            told = told.max(number);
            transfers.complete(at(11), post.token, Completion::Placed);
        }
        told
    };
    assert_eq!(tell_all(&mut transfers), 65_535);
    transfers.complete(at(12), oldest.token, Completion::Placed);
    assert_eq!(tell_all(&mut transfers), MANY - 1);
    assert_eq!(transfers.live(), 0);
}

#[test]
fn transfers_that_are_given_up_leave_nothing_in_the_queues() {
    let (mut transfers, peer, paths) = connected(Options::default(), 1);
    transfers.path_broke(at(1), paths[0], 0);
    let keep: Vec<Ticket> =
        (0..3).map(|_| transfers.submit(at(1), request(peer, 1, Priority::Bulk)).unwrap()).collect();
    for _ in 0..100_000 {
        let ticket = transfers.submit(at(1), request(peer, 1, Priority::Bulk)).unwrap();
        transfers.cancel(at(1), ticket);
    }
    assert_eq!(actions(&mut transfers).len(), 100_000);
    assert!(transfers.queued(peer) <= 2 * keep.len() + 2, "{}", transfers.queued(peer));
}

#[test]
fn peers_take_turns() {
    let options = Options { chunk_bytes: 1, ..Options::default() };
    let mut transfers = Transfers::new(options);
    let peers: Vec<PeerId> = (0..3)
        .map(|_| {
            let (peer, paths) = add_peer(&mut transfers, 1);
            transfers.path_up(at(0), paths[0], 0);
            transfers.submit(at(0), request(peer, 100, Priority::Bulk)).unwrap();
            peer
        })
        .collect();
    let mut order = Vec::new();
    for _ in 0..9 {
        let post = transfers.next_post(at(1)).unwrap();
        order.push(peers.iter().position(|peer| transfers.paths(*peer).contains(&post.path)).unwrap());
        transfers.complete(at(1), post.token, Completion::Placed);
    }
    for turn in order.chunks(3) {
        let mut turn = turn.to_vec();
        turn.sort_unstable();
        assert_eq!(turn, [0, 1, 2]);
    }
}

/// A thread that came late saw the pause end and the deadline pass at once, and said that nothing was known.
#[test]
fn a_message_whose_pause_and_deadline_pass_at_once_had_no_room() {
    for late in [1, 400_000] {
        let (mut transfers, peer, _) = connected(Options::default(), 1);
        let bytes: Arc<[u8]> = vec![7; 100].into();
        let ticket = transfers.send(at(0), peer, bytes, at(200_000), Priority::Bulk).unwrap();
        let post = transfers.next_post(at(0)).unwrap();
        transfers.complete(at(0), post.token, Completion::NoRoom);
        transfers.tick(at(200_000 + late));
        assert_eq!(actions(&mut transfers), [Action::Over(ticket, Err(Failure::NoRoom))]);
    }
}

#[test]
fn a_message_without_room_is_posted_again_after_longer_and_longer_pauses() {
    let (mut transfers, peer, _) = connected(Options::default(), 1);
    let bytes: Arc<[u8]> = vec![7; 100].into();
    let ticket = transfers.send(at(0), peer, Arc::clone(&bytes), at(400_000), Priority::High).unwrap();
    let mut pauses = Vec::new();
    let mut now = at(0);
    while let Some(post) = transfers.next_post(now) {
        assert_eq!(post.work, Work::Message { number: 0, bytes: Arc::clone(&bytes) });
        transfers.complete(now, post.token, Completion::NoRoom);
        // What else goes to the peer is posted meanwhile, also with a later number.
        let tell = Request { immediate: Some((1, 0)), ..request(peer, 0, Priority::High) };
        let tell = transfers.submit(now, tell).unwrap();
        let told = transfers.next_post(now).unwrap();
        assert_eq!((told.ticket, transfers.next_post(now)), (tell, None));
        transfers.complete(now, told.token, Completion::Placed);
        assert_eq!(actions(&mut transfers), [Action::Over(tell, Ok(()))]);
        let next = transfers.next_tick().unwrap();
        pauses.push((next - now).as_millis());
        now = next;
        transfers.tick(now);
    }
    assert_eq!(pauses[..8], [1, 2, 4, 8, 16, 32, 64, 100]);
    assert_eq!((now, pauses.iter().sum()), (at(400_000), 400));
    assert_eq!(actions(&mut transfers), [Action::Over(ticket, Err(Failure::NoRoom))]);
    assert_eq!(transfers.live(), 0);
}

#[test]
fn a_message_that_arrives_although_it_was_given_up_is_done() {
    for answer in [Completion::Placed, Completion::NoRoom, Completion::Unknown] {
        for deadline in [true, false] {
            let (mut transfers, peer, _) = connected(Options::default(), 1);
            let send = |transfers: &mut Transfers| {
                transfers.send(at(0), peer, vec![7; 100].into(), at(1000), Priority::High).unwrap()
            };
            let ticket = send(&mut transfers);
            let post = transfers.next_post(at(1)).unwrap();
            if deadline {
                transfers.tick(at(1000));
            } else {
                transfers.cancel(at(1000), ticket);
            }
            assert_eq!(actions(&mut transfers), []);
            transfers.complete(at(1001), post.token, answer);
            let outcome = match (answer, deadline) {
                (Completion::Placed, _) => Ok(()),
                (_, false) => Err(Failure::Cancelled),
                (Completion::NoRoom, _) => Err(Failure::NoRoom),
                _ => Err(Failure::DeadlineExceeded),
            };
            assert_eq!(actions(&mut transfers)[0], Action::Over(ticket, outcome));
        }
    }
}

#[test]
fn bytes_of_messages_have_a_limit_and_come_free() {
    let options = Options { message_bytes: 150, ..Options::default() };
    let (mut transfers, peer, _) = connected(options, 1);
    let send = |transfers: &mut Transfers, bytes: usize| {
        transfers.send(at(0), peer, vec![7; bytes].into(), at(1000), Priority::High)
    };
    let first = send(&mut transfers, 100).unwrap();
    assert_eq!(send(&mut transfers, 51), Err(CannotSend::Bytes(100)));
    let second = send(&mut transfers, 50).unwrap();
    transfers.cancel(at(1), first);
    assert_eq!(send(&mut transfers, 101), Err(CannotSend::Bytes(50)));
    transfers.remove_peer(at(2), peer);
    let lost = send(&mut transfers, 150).unwrap();
    let over = [(first, Failure::Cancelled), (second, Failure::PeerLost)];
    let over = over.map(|(ticket, failure)| Action::Over(ticket, Err(failure)));
    let all = actions(&mut transfers);
    assert!(over.iter().all(|over| all.contains(over)), "{all:?}");
    assert_eq!(all.last(), Some(&Action::Over(lost, Err(Failure::PeerLost))));
    assert_eq!(send(&mut transfers, 151), Err(CannotSend::Bytes(0)));
}

#[test]
fn a_path_may_be_read_over_in_larger_posts_than_it_is_written_over() {
    const MIB: u64 = 1 << 20;
    let options = Options { chunk_runs: 3, ..Options::default() };
    let mut transfers = Transfers::new(options);
    let peer = transfers.add_peer(at(0));
    let spec = PathSpec { read_bytes: Some(4 * MIB), ..PathSpec::new(Reach::ALL, 0) };
    let path = transfers.add_path(at(0), peer, spec).unwrap();
    assert_eq!(actions(&mut transfers), [Action::Connect(path, 0)]);
    assert!(transfers.path_up(at(0), path, 0));
    warm_up(&mut transfers, peer, 1);
    let mut posted = |op: Op, runs: &[u64]| {
        let whole = request(peer, 0, Priority::High);
        let place = Place { region: 0, offset: 0 };
        let runs = runs.iter().map(|len| Run { local: place, remote: place, len: *len }).collect();
        let stretches = vec![Stretch::of_hosts(runs)];
        transfers.submit(at(10), Request { op, stretches, ..whole }).unwrap();
        let posts: Vec<Post> = std::iter::from_fn(|| transfers.next_post(at(10))).collect();
        let bytes = |post: &Post| match &post.work {
            Work::Move { runs, .. } => runs.iter().map(|run| run.len).sum(),
            other => panic!("{other:?}"),
        };
        posts.iter().for_each(|post| transfers.complete(at(20), post.token, Completion::Placed));
        posts.iter().map(bytes).collect::<Vec<u64>>()
    };
    assert_eq!(posted(Op::Read, &[9 * MIB]), [4 * MIB, 4 * MIB, MIB]);
    assert_eq!(posted(Op::Read, &[MIB / 4; 5]), [3 * MIB / 4, 2 * MIB / 4], "as many runs as ever");
    assert_eq!(posted(Op::Write, &[MIB + 1]), [MIB, 1]);
}

/// Posts 64 KiB every 10 ms until `end`, of which a path takes as many microseconds as `micros` says. Answers how many each
/// path got.
fn light_load(
    transfers: &mut Transfers,
    (peer, paths): (PeerId, &[PathId]),
    (begin, end): (u64, u64),
    micros: impl Fn(usize) -> u64,
) -> Vec<usize> {
    let mut got = vec![0; paths.len()];
    for now in (begin..end).step_by(10_000) {
        transfers.tick(at(now));
        transfers.submit(at(now), request(peer, 64 << 10, Priority::High)).unwrap();
        let post = transfers.next_post(at(now)).unwrap();
        let path = paths.iter().position(|path| *path == post.path).unwrap();
        got[path] += 1;
        transfers.complete(at(now + micros(path)), post.token, Completion::Placed);
        assert_eq!(actions(transfers).len(), 1);
    }
    got
}

/// What made it slow may have been another transfer, or a neighbour on the network. Its rate is only learnt from what it
/// carries, which was nothing any more where one path was enough.
#[test]
fn a_path_that_was_slow_once_is_tried_again_also_under_a_light_load() {
    let second = 1_000_000;
    let (mut transfers, peer, paths) = connected(Options::default(), 2);
    warm_up(&mut transfers, peer, 2);
    // The first one takes 8 ms for what the second one does in 50 us.
    let slow = |path| if path == 0 { 8000 } else { 50 };
    light_load(&mut transfers, (peer, &paths), (10, 5 * second), slow);
    let got = light_load(&mut transfers, (peer, &paths), (5 * second, 20 * second), slow);
    assert!((1..=15).contains(&got[0]), "a second without it passes at least, and 10 at the most: {got:?}");
    // It is the faster one from now on.
    let faster = |path| if path == 0 { 20 } else { 50 };
    light_load(&mut transfers, (peer, &paths), (20 * second, 200 * second), faster);
    let got = light_load(&mut transfers, (peer, &paths), (200 * second, 210 * second), faster);
    assert!(got[0] > 900, "and gets most of it: {got:?}");
}

const GPU: Memory = Memory::Gpu(0);
const HOST: Memory = Memory::Host(0);

/// A peer with a path for words, one for the hosts' memory, and one of a lower class for all memory; none is up.
fn two_carriers(transfers: &mut Transfers) -> (PeerId, [PathId; 3]) {
    let peer = transfers.add_peer(at(0));
    let specs = [(Reach::WORDS, 0), (Reach::HOSTS, 0), (Reach::ALL_MEMORY, 1)];
    let paths =
        specs.map(|(reach, class)| transfers.add_path(at(0), peer, PathSpec::new(reach, class)).unwrap());
    (peer, paths)
}

/// Which paths the posts take that a transfer of so many chunks makes until it is over.
fn paths_taken(transfers: &mut Transfers, peer: PeerId, now: u64, chunks: u64) -> Vec<PathId> {
    let bytes = chunks * Options::default().chunk_bytes;
    transfers.submit(at(now), request(peer, bytes, Priority::High)).unwrap();
    let mut taken = Vec::new();
    while let Some(post) = transfers.next_post(at(now)) {
        taken.push(post.path);
        transfers.complete(at(now + 10), post.token, Completion::Placed);
    }
    assert!(matches!(actions(transfers)[..], [Action::Over(_, Ok(()))]), "{taken:?}");
    taken
}

#[test]
fn a_lower_class_carries_nothing_while_a_better_one_is_up() {
    let mut transfers = Transfers::new(Options::default());
    let (peer, [words, fast, slow]) = two_carriers(&mut transfers);
    actions(&mut transfers);
    [words, slow].into_iter().for_each(|path| assert!(transfers.path_up(at(0), path, 0)));
    assert_eq!(paths_taken(&mut transfers, peer, 10, 3), [slow; 3]);
    assert!(transfers.path_up(at(20), fast, 0));
    // Also not as a trial, for which it would be due after 10 s.
    for seconds in 1..30 {
        assert_eq!(paths_taken(&mut transfers, peer, seconds * 1_000_000, 2), [fast; 2]);
    }
    transfers.path_broke(at(30_000_000), fast, 0);
    assert_eq!(paths_taken(&mut transfers, peer, 30_000_000, 2), [slow; 2]);
}

#[test]
fn a_path_that_goes_for_good_is_forgotten_when_everything_posted_is_back() {
    let mut transfers = Transfers::new(Options::default());
    let (peer, [words, fast, slow]) = two_carriers(&mut transfers);
    actions(&mut transfers);
    [words, fast, slow].into_iter().for_each(|path| assert!(transfers.path_up(at(0), path, 0)));
    let ticket = transfers.submit(at(1), request(peer, 10, Priority::High)).unwrap();
    let post = transfers.next_post(at(1)).unwrap();
    assert_eq!(post.path, fast);
    transfers.remove_path(at(2), fast);
    assert_eq!(actions(&mut transfers), [Action::Close(fast, 0)]);
    assert_eq!(transfers.paths(peer), [words, fast, slow]);
    transfers.complete(at(3), post.token, Completion::Unknown);
    assert_eq!(transfers.paths(peer), [words, slow]);
    let again = transfers.next_post(at(3)).unwrap();
    assert_eq!((again.path, &again.work), (slow, &post.work));
    transfers.complete(at(4), again.token, Completion::Placed);
    assert_eq!(actions(&mut transfers), [Action::Over(ticket, Ok(()))]);
    // Another one comes, and one that is not up yet goes again.
    let spec = PathSpec::new(Reach::HOSTS, 0);
    let [stays, goes] = [(); 2].map(|()| transfers.add_path(at(5), peer, spec).unwrap());
    transfers.remove_path(at(6), goes);
    let connects = [Action::Connect(stays, 0), Action::Connect(goes, 0), Action::Close(goes, 0)];
    assert_eq!(actions(&mut transfers), connects);
    assert!(!transfers.path_up(at(7), goes, 0) && transfers.path_up(at(7), stays, 0));
    assert_eq!(paths_taken(&mut transfers, peer, 8, 1), [stays]);
    transfers.remove_peer(at(9), peer);
    assert_eq!(transfers.add_path(at(9), peer, spec), None);
}

#[test]
fn what_no_path_reaches_fails_and_what_other_paths_reach_goes_on() {
    let options = Options::default();
    let patience = options.peer_patience;
    let mut transfers = Transfers::new(options);
    let (peer, [words, fast, _]) = two_carriers(&mut transfers);
    actions(&mut transfers);
    [words, fast].into_iter().for_each(|path| assert!(transfers.path_up(at(0), path, 0)));
    let run = request(peer, 10, Priority::High).stretches.remove(0).runs.remove(0);
    let to_gpu = |immediate| {
        let between = Between { local: HOST, remote: GPU };
        let stretches = vec![Stretch { between, runs: vec![run] }, Stretch::of_hosts(vec![run])];
        Request { stretches, immediate, ..request(peer, 0, Priority::High) }
    };
    let stranded = transfers.submit(at(1), to_gpu(Some((7, 0)))).unwrap();
    let post = transfers.next_post(at(1)).unwrap();
    assert_eq!(post.path, fast, "its bytes for the host's memory do not wait for the others");
    transfers.complete(at(2), post.token, Completion::Placed);
    assert_eq!(paths_taken(&mut transfers, peer, 3, 2), [fast; 2]);
    transfers.tick(patience);
    let lost = Err(Failure::PeerLost);
    let over = actions(&mut transfers);
    assert!(over.contains(&Action::Lost(peer, Route::HostToGpu)), "{over:?}");
    assert!(over.contains(&Action::Over(stranded, lost)), "{over:?}");
    assert!(!over.contains(&Action::Lost(peer, Route::HostToHost)), "{over:?}");
    let late = transfers.submit(patience, to_gpu(None)).unwrap();
    assert_eq!(actions(&mut transfers), [Action::Over(late, lost)], "at once");
    assert_eq!(paths_taken(&mut transfers, peer, 3_000_000, 2), [fast; 2]);
    // A path that may reach it begins the time anew.
    let new = transfers.add_path(at(4_000_000), peer, PathSpec::new(Reach::ALL_MEMORY, 1)).unwrap();
    let waits = transfers.submit(at(4_000_000), to_gpu(None)).unwrap();
    assert!(transfers.path_up(at(4_000_001), new, 0));
    let posts: Vec<Post> = std::iter::from_fn(|| transfers.next_post(at(4_000_001))).collect();
    assert_eq!(posts.len(), 2);
    posts.iter().for_each(|post| transfers.complete(at(4_000_002), post.token, Completion::Placed));
    assert!(actions(&mut transfers).contains(&Action::Over(waits, Ok(()))));
}

/// One length fits into 32 bits, one is 0 there, and one is 1.
#[test]
fn runs_around_four_gibibytes_are_posted_to_their_last_byte_and_no_further() {
    const LIMIT: u64 = 1 << 32;
    for len in [LIMIT - 1, LIMIT, LIMIT + 1] {
        let (mut transfers, peer, _) = connected(Options::default(), 1);
        let ticket = transfers.submit(at(1), request(peer, len, Priority::High)).unwrap();
        let mut posted = 0;
        while let Some(post) = transfers.next_post(at(1)) {
            let Work::Move { runs, .. } = post.work else { panic!("{post:?}") };
            for run in runs {
                assert_eq!((run.local.offset, run.remote.offset), (posted, posted), "of {len} bytes");
                posted += run.len;
            }
            transfers.complete(at(2), post.token, Completion::Placed);
        }
        assert_eq!(posted, len);
        assert_eq!(actions(&mut transfers), [Action::Over(ticket, Ok(()))]);
    }
}

#[test]
fn a_chunk_stays_within_one_memory_of_either_side() {
    let (mut transfers, peer, _) = connected(Options::default(), 1);
    warm_up(&mut transfers, peer, 1);
    let memories = [Memory::Host(0), Memory::Host(1), Memory::Gpu(0), Memory::Gpu(1)];
    let run = request(peer, 100, Priority::High).stretches.remove(0).runs.remove(0);
    let stretches: Vec<Stretch> = memories
        .iter()
        .flat_map(|local| memories.iter().map(|remote| Between { local: *local, remote: *remote }))
        .map(|between| Stretch { between, runs: vec![run; 3] })
        .collect();
    let whole = request(peer, 0, Priority::High);
    transfers.submit(at(10), Request { stretches: stretches.clone(), ..whole }).unwrap();
    let mut posted = Vec::new();
    while let Some(post) = transfers.next_post(at(11)) {
        let Work::Move { between, runs, .. } = post.work else { panic!("{post:?}") };
        posted.push(Stretch { between, runs });
        transfers.complete(at(12), post.token, Completion::Placed);
    }
    posted.sort_by_key(|stretch| stretch.between);
    let mut wanted = stretches;
    wanted.sort_by_key(|stretch| stretch.between);
    assert_eq!(posted, wanted);
}

/// Found by the simulation of hubs: the control connection to a peer stayed, which nobody could use or close any more. What
/// was under way last was a message that waited for room: with it the peer was forgotten, and with the peer its paths.
#[test]
fn all_paths_of_a_removed_peer_are_closed_though_nothing_is_under_way() {
    let (mut transfers, peer, paths) = connected(Options::default(), 3);
    let connecting = transfers.add_path(at(0), peer, PathSpec::new(Reach::ALL, 0)).unwrap();
    assert_eq!(actions(&mut transfers), [Action::Connect(connecting, 0)]);
    let ticket = transfers.send(at(1), peer, vec![7].into(), at(1_000_000), Priority::High).unwrap();
    let post = transfers.next_post(at(1)).unwrap();
    transfers.complete(at(2), post.token, Completion::NoRoom);
    transfers.remove_peer(at(3), peer);
    let mut expected = vec![Action::Over(ticket, Err(Failure::PeerLost))];
    expected.extend(paths.into_iter().chain([connecting]).map(|path| Action::Close(path, 0)));
    assert_eq!(actions(&mut transfers), expected);
    assert!(!transfers.has_peer(peer));
}

#[test]
fn a_connection_to_a_removed_peer_that_comes_late_is_not_wanted() {
    let (mut transfers, peer, paths) = connected(Options::default(), 1);
    let connecting = transfers.add_path(at(0), peer, PathSpec::new(Reach::ALL, 1)).unwrap();
    let ticket = transfers.submit(at(1), request(peer, 1, Priority::High)).unwrap();
    let post = transfers.next_post(at(1)).unwrap();
    transfers.remove_peer(at(2), peer);
    assert!(transfers.has_peer(peer), "its last post is under way");
    assert!(!transfers.path_up(at(3), connecting, 0));
    transfers.path_broke(at(4), paths[0], 0);
    transfers.complete(at(5), post.token, Completion::Unknown);
    assert!(actions(&mut transfers).contains(&Action::Over(ticket, Err(Failure::PeerLost))));
    assert!(!transfers.has_peer(peer));
}

/// Found by the simulation of hubs: the connection stayed for ever, since whoever could close it had forgotten the peer.
#[test]
fn a_removed_peer_is_not_connected_again_while_something_of_it_is_under_way() {
    let (mut transfers, peer, paths) = connected(Options::default(), 2);
    let ticket = transfers.submit(at(1), request(peer, 1, Priority::High)).unwrap();
    let post = transfers.next_post(at(1)).unwrap();
    let idle = paths.into_iter().find(|path| *path != post.path).unwrap();
    transfers.path_broke(at(2), idle, 0);
    transfers.path_broke(at(2), post.path, 0);
    transfers.remove_peer(at(3), peer);
    assert_eq!(actions(&mut transfers), []);
    transfers.tick(at(1_000_000));
    assert_eq!(actions(&mut transfers), [], "the pause of the idle path is over");
    transfers.complete(at(1_000_001), post.token, Completion::Unknown);
    assert_eq!(actions(&mut transfers), [Action::Over(ticket, Err(Failure::PeerLost))]);
    assert!(!transfers.has_peer(peer));
}
