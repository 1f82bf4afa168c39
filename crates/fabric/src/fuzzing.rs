//! Properties of the crate's parsers for bytes of any origin, for crates/fuzz-targets: each function panics if its property
//! does not hold.

#![allow(unsafe_code, reason = "a link receives into memory here")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a panic is what they are for")]

use std::io::Write;
use std::net::{Shutdown, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use crate::descriptor::Descriptor;
use crate::inbox::MESSAGE_BYTES_MAX;
use crate::ranges::Piece;
use crate::tcp::{
    BYTES_MAX, ENTRIES_MAX, Ended, HEAD_BYTES, HELLO_BYTES, Head, Hello, Link, Nonces, PROOF_MESSAGE_BYTES,
    Received, Stream, Sum, VERDICT_BYTES, Verdict, WELCOME_BYTES, WORDS_BYTES_MAX, Welcome, decode_challenge,
    decode_regions, encode_challenge, encode_refusal, encode_regions,
};
use crate::trust::Key;
use crate::wire::{Outcome, RUN_BYTES, WireRun, WordsKind};

/// Decodes a frame's head and what follows it: decoded values are within the limits, and encode to the same bytes.
pub fn frame(bytes: &[u8]) {
    let mut head = [0; HEAD_BYTES];
    let entries = bytes.split_at_checked(HEAD_BYTES).map_or(bytes, |(first, rest)| {
        head.copy_from_slice(first);
        rest
    });
    if let Ok(read) = Head::decode(&head) {
        assert_eq!(Head::decode(&read.encode()), Ok(read));
        match read {
            Head::Write { runs: count, bytes, .. } | Head::Read { runs: count, bytes, .. } => {
                assert!((1..=ENTRIES_MAX).contains(&count) && (1..=BYTES_MAX).contains(&bytes));
                if let Some(entries) = entries.get(..read.entry_bytes()) {
                    runs(entries, bytes, Some(count));
                }
            }
            Head::Message { bytes, .. } => assert!(bytes <= MESSAGE_BYTES_MAX as u64),
            Head::Words { bytes, .. } | Head::Regions { bytes } => assert!(bytes <= WORDS_BYTES_MAX as u64),
            _ => {}
        }
    }
    // Entries are decoded also if the head is no valid one.
    runs(entries, entries.first().map_or(0, |first| u64::from(*first)), None);
    let (short, sum) = of_short_runs(entries, RUN_BYTES);
    runs(&short, sum, None);
    let outcomes: Vec<Outcome> = Outcome::decode_all(entries).collect();
    let mut written = Vec::new();
    outcomes.iter().for_each(|outcome| outcome.encode(&mut written));
    assert_eq!(Outcome::decode_all(&written).collect::<Vec<_>>(), outcomes);
}

fn runs(entries: &[u8], bytes: u64, count: Option<usize>) {
    let Ok(runs) = WireRun::decode_all(entries, bytes) else { return };
    assert_eq!(write(&runs, bytes, count), entries[..runs.len() * RUN_BYTES]);
}

/// Encodes runs, and checks their number and the sum of their bytes.
fn write(runs: &[WireRun], bytes: u64, count: Option<usize>) -> Vec<u8> {
    assert!(count.is_none_or(|count| runs.len() == count));
    assert!(runs.iter().all(|run| run.len > 0));
    // In u128 the sum cannot overflow.
    assert_eq!(runs.iter().map(|run| u128::from(run.len)).sum::<u128>(), u128::from(bytes));
    let mut written = Vec::new();
    runs.iter().for_each(|run| run.encode(&mut written));
    written
}

/// The same entries with runs of less than 256 bytes, and the sum of these bytes. Random lengths hardly ever have the right sum.
fn of_short_runs(entries: &[u8], each: usize) -> (Vec<u8>, u64) {
    let mut entries = entries.to_vec();
    let mut sum = 0;
    for run in entries.chunks_exact_mut(each) {
        run[17..24].fill(0);
        sum += u64::from(run[16]);
    }
    (entries, sum)
}

/// Receives a stream of frames and noise that is cut anywhere: the link returns exactly the stream's frames and bodies, and
/// writes no byte elsewhere. `tape` generates the stream, and `cuts` sets how many bytes arrive at a time.
pub fn link(cuts: &[u8], tape: &[u8]) {
    let first = cuts.first().copied().unwrap_or(0);
    let (greets, has_sums) = (first % 2 == 1, first % 4 >= 2);
    let stream = play(tape, has_sums);
    let (mut wanted, end) = parse(&stream, greets, has_sums);
    wanted.reverse();
    let (mut feeder, socket) = UnixStream::pair().unwrap();
    // A link needs nothing that only TCP sockets have.
    let socket = TcpStream::from(OwnedFd::from(socket));
    let mut link = Link::new(Stream::new(socket, None, true).unwrap()).unwrap();
    if has_sums {
        link.begin_sums();
    }
    let mut receiver = Receiver { greets, body: None };
    let mut rest = stream.as_slice();
    // After so many cuts the rest arrives in large parts, because a long stream byte by byte takes seconds.
    let mut cuts = cuts.iter().cycle().take(CUTS);
    while !rest.is_empty() {
        // Mostly a few bytes, sometimes up to 55,832.
        let cut = match cuts.next() {
            Some(cut @ 0..200) => usize::from(*cut) + 1,
            Some(cut) => (usize::from(*cut) - 199) * 997,
            None => usize::MAX,
        };
        // At most as much as the socket's buffer takes, because nothing reads during the write.
        let (first, behind) = rest.split_at(cut.min(rest.len()).min(CUT_MAX));
        feeder.write_all(first).unwrap();
        rest = behind;
        while let Some(came) = receiver.next(&mut link) {
            match came {
                Ok(event) => assert_eq!(Some(event), wanted.pop()),
                Err(ended) => {
                    // The link may not have read the whole stream, but it has returned all valid frames.
                    assert_eq!((wanted.len(), is_bad(&ended)), (0, true), "{ended}");
                    assert_eq!(end, End::Bad);
                    return;
                }
            }
        }
    }
    // Closing would not end the stream: a process that another test starts has a copy of the descriptor for a moment.
    feeder.shutdown(Shutdown::Write).unwrap();
    loop {
        match receiver.next(&mut link) {
            Some(Ok(event)) => assert_eq!(Some(event), wanted.pop()),
            Some(Err(ended)) => {
                assert_eq!((wanted.len(), is_bad(&ended)), (0, end == End::Bad), "{ended}");
                return;
            }
            None => panic!("a socket that has ended has nothing more"),
        }
    }
}

/// How a stream ends.
#[derive(Debug, PartialEq, Eq)]
enum End {
    /// The bytes end, perhaps in the middle of a frame.
    Closed,
    /// The next bytes are no valid frame.
    Bad,
}

#[derive(Debug, PartialEq, Eq)]
enum LinkEvent {
    Greeting(Vec<u8>),
    Frame(Head, Vec<u8>),
    /// The body of the frame before. Empty if the body is discarded.
    Body(Vec<u8>),
}

fn is_bad(ended: &Ended) -> bool {
    assert!(!matches!(ended, Ended::Io(_) | Ended::Late), "{ended}");
    matches!(ended, Ended::Bad(_) | Ended::WantsTls | Ended::Damaged)
}

/// Types of TLS records (RFC 8446, 5.1).
const TLS_RECORDS: std::ops::RangeInclusive<u8> = 20..=23;
/// Cuts of one stream before the rest arrives in large parts.
const CUTS: usize = 300;
/// Most bytes that arrive at a time.
const CUT_MAX: usize = 64 << 10;
/// Longer bodies are discarded, because one head may announce 64 MiB, which would need as much memory.
const PLACED_MAX: u64 = 128 << 10;

fn is_placed(token: u64, bytes: u64) -> bool {
    !token.is_multiple_of(4) && bytes <= PLACED_MAX
}

fn body_bytes(head: Head) -> Option<(u64, u64)> {
    match head {
        Head::Write { token, bytes, .. }
        | Head::Data { token, bytes }
        | Head::Message { token, bytes, .. } => Some((token, bytes)),
        // Token 1: these bodies are never discarded.
        Head::Words { bytes, .. } | Head::Regions { bytes } => Some((1, bytes)),
        _ => None,
    }
}

/// The events of a whole stream, by a parser that is simpler than the link's.
fn parse(mut stream: &[u8], greets: bool, has_sums: bool) -> (Vec<LinkEvent>, End) {
    let mut events = Vec::new();
    let end = |events, bad| (events, if bad { End::Bad } else { End::Closed });
    if greets {
        // The first byte tells a peer that speaks TLS.
        if stream.first().is_some_and(|first| TLS_RECORDS.contains(first)) {
            return end(events, true);
        }
        let Some((greeting, rest)) = stream.split_at_checked(HELLO_BYTES) else { return end(events, false) };
        events.push(LinkEvent::Greeting(greeting.to_vec()));
        stream = rest;
    }
    loop {
        let Some((head_bytes, rest)) = stream.split_first_chunk::<HEAD_BYTES>() else {
            return end(events, false);
        };
        let Ok(head) = Head::decode(head_bytes) else { return end(events, true) };
        let Some((entries, rest)) = rest.split_at_checked(head.entry_bytes()) else {
            return end(events, false);
        };
        let (before, sum, behind) = (&head_bytes[..4], &head_bytes[4..8], &head_bytes[8..]);
        if sum != sum_of(&[before, &[0; 4], behind, entries].concat()) {
            return end(events, true);
        }
        events.push(LinkEvent::Frame(head, entries.to_vec()));
        stream = rest;
        if let Some((token, bytes)) = body_bytes(head) {
            let Some((body, mut rest)) = stream.split_at_checked(bytes as usize) else {
                return end(events, false);
            };
            if has_sums && bytes > 0 {
                let Some((sum, behind)) = rest.split_first_chunk() else { return end(events, false) };
                if *sum != sum_of(body) {
                    return end(events, true);
                }
                rest = behind;
            }
            events.push(LinkEvent::Body(if is_placed(token, bytes) { body.to_vec() } else { Vec::new() }));
            stream = rest;
        }
    }
}

/// Receives everything from a link, and keeps the memory that the link writes.
struct Receiver {
    greets: bool,
    body: Option<Placed>,
}

/// Memory in pieces. A [`GUARD`] byte follows each, which the link must not write.
struct Placed {
    memory: Vec<u8>,
    lens: Vec<usize>,
}

const GUARD: u8 = 0xA5;

impl Receiver {
    /// The next event. None: nothing more has arrived.
    fn next(&mut self, link: &mut Link) -> Option<Result<LinkEvent, Ended>> {
        if self.greets {
            let greeting = link.greeting(HELLO_BYTES).transpose()?;
            self.greets = false;
            return Some(greeting.map(LinkEvent::Greeting));
        }
        // SAFETY: `body` keeps the expected memory until the next frame, or until the link is gone.
        match unsafe { link.receive(None) } {
            Ok(Received::Frame(head, entries)) => {
                if let Some((token, bytes)) = body_bytes(head) {
                    self.expect(link, token, bytes);
                }
                Some(Ok(LinkEvent::Frame(head, entries)))
            }
            Ok(Received::Body) => {
                Some(Ok(LinkEvent::Body(self.body.take().map_or(Vec::new(), Placed::gather))))
            }
            Ok(Received::Nothing) => None,
            Err(ended) => Some(Err(ended)),
        }
    }

    fn expect(&mut self, link: &mut Link, token: u64, bytes: u64) {
        if !is_placed(token, bytes) {
            link.expect(Vec::new(), bytes);
            return;
        }
        // The token sets the length of the pieces. Short ones are more than one call takes. No frame has more than ENTRIES_MAX.
        let most = 1 + (token >> 8) as usize % 5_000;
        let mut left = bytes as usize;
        let mut lens = Vec::new();
        while left > 0 {
            let is_last = lens.len() + 1 == ENTRIES_MAX;
            let len = if is_last { left } else { left.min(1 + (lens.len() * 7 + most / 2) % most) };
            lens.push(len);
            left -= len;
        }
        let mut placed = Placed { memory: vec![GUARD; bytes as usize + lens.len()], lens };
        let base = placed.memory.as_mut_ptr().expose_provenance();
        let mut at = 0;
        let piece = |len: &usize| {
            let piece = Piece { address: base + at, len: *len };
            at += len + 1;
            piece
        };
        link.expect(placed.lens.iter().map(piece).collect(), 0);
        self.body = Some(placed);
    }
}

impl Placed {
    fn gather(self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut rest = self.memory.as_slice();
        for len in self.lens {
            let (piece, behind) = rest.split_at(len);
            bytes.extend(piece);
            assert_eq!(behind[0], GUARD, "a byte behind a piece");
            rest = &behind[1..];
        }
        bytes
    }
}

/// Generates a stream of frames, most of them valid, and noise. Noise alone would hardly ever be a valid frame.
fn play(tape: &[u8], has_sums: bool) -> Vec<u8> {
    let mut tape = tape.iter().copied();
    let mut stream = Vec::new();
    while let (Some(kind), true) = (tape.next(), stream.len() < 256 << 10) {
        let mut number = || u64::from(tape.next().unwrap_or(1)) << 8 | u64::from(tape.next().unwrap_or(0));
        let (token, bytes) = (number(), 1 + number());
        let count = 1 + (token as usize * 31 + 1) % ENTRIES_MAX;
        let (head, bytes) = match kind % 16 {
            0 | 1 => (Head::Write { token, runs: count, bytes, stamp: 5 }, bytes as usize),
            2 | 3 => (Head::Data { token, bytes }, bytes as usize),
            4 => (Head::Read { token, runs: count, bytes }, 0),
            5 => (Head::Immediate { token, number: bytes, counter: 1, generation: 2 }, 0),
            6 => (Head::Ack { outcomes: count, stamp: 6 }, 0),
            7 => (Head::Ping { stamp: token }, 0),
            // The head announces a longer body than follows.
            8 => (Head::Data { token, bytes: bytes << 10 }, 0),
            9 => (Head::Words { code: 7, kind: WordsKind::Offer, bytes: bytes - 1 }, bytes as usize - 1),
            12 => (Head::Regions { bytes }, bytes as usize),
            13 => (Head::Fence { connection: token, code: 3 }, 0),
            14 => (Head::Fenced { connection: token, code: 3, is_over: bytes % 2 == 1 }, 0),
            10 => (Head::NoRoom { token }, 0),
            11 => (Head::Message { token, number: 9, bytes: bytes - 1 }, bytes as usize - 1),
            _ => {
                stream.extend(tape.by_ref().take(token as usize % 100));
                continue;
            }
        };
        let random = |index: usize| (index.wrapping_mul(0x9e37_79b9).wrapping_add(token as usize) >> 7) as u8;
        let mut random: Vec<u8> = (0..head.entry_bytes() + bytes).map(random).collect();
        let body = random.split_off(head.entry_bytes());
        stream.extend(head.frame(&random));
        stream.extend(&body);
        if has_sums && !body.is_empty() {
            stream.extend(sum_of(&body));
        }
        // Changes one bit of some frame on the way.
        if kind >= 240 {
            let at = token as usize % stream.len();
            stream[at] ^= 1;
        }
    }
    stream
}

fn sum_of(body: &[u8]) -> [u8; 4] {
    let mut sum = Sum::new();
    sum.add(body);
    sum.bytes()
}

/// Decodes the messages of a greeting: no message forged without the secret is accepted, and decoded values encode to the same
/// bytes.
pub fn greeting(bytes: &[u8]) {
    let (key, other) = (Key::new(b"secret"), Key::new(b"other"));
    let nonces = Nonces { listening: [3; 16], connecting: [4; 16] };
    let (session, later) = (key.session(&nonces), key.session(&Nonces { connecting: [5; 16], ..nonces }));
    let mut padded = [0; HELLO_BYTES];
    let len = bytes.len().min(HELLO_BYTES);
    padded[..len].copy_from_slice(&bytes[..len]);
    for begins_right in [false, true] {
        if begins_right {
            padded[..5].copy_from_slice(&encode_challenge(&nonces.listening)[..5]);
        }
        if let Ok(nonce) = decode_challenge(&padded[..24]) {
            assert_eq!(decode_challenge(&encode_challenge(&nonce)), Ok(nonce));
        }
        let proof: &[u8; PROOF_MESSAGE_BYTES] = padded.first_chunk().unwrap();
        assert!(!matches!(key.decode_proof(proof, &nonces.listening), Ok(Some(_))), "a forged proof");
        let verdict: &[u8; VERDICT_BYTES] = padded.first_chunk().unwrap();
        assert_ne!(key.decode_verdict(verdict, &nonces), Ok(Verdict::Proved), "a forged verdict");
        assert!(Hello::decode(&padded, &session).is_err(), "a forged hello");
        let welcome: &[u8; WELCOME_BYTES] = padded.first_chunk().unwrap();
        assert!(Welcome::decode(welcome, &session).is_err(), "a forged welcome");

        // A peer that knows the secret may send anything.
        if let Ok(hello) = Hello::decode(&session.sign(padded), &session) {
            let again: [u8; HELLO_BYTES] = hello.encode(&session).try_into().unwrap();
            assert_eq!(Hello::decode(&again, &session), Ok(hello));
            assert!(Hello::decode(&again, &later).is_err());
        }
        if let Ok(welcome) = Welcome::decode(&session.sign(*welcome), &session) {
            let again: [u8; WELCOME_BYTES] = welcome.encode(&session).try_into().unwrap();
            assert_eq!(Welcome::decode(&again, &session), Ok(welcome));
            assert!(Welcome::decode(&again, &later).is_err());
        }
    }
    // Proofs and verdicts with arbitrary nonces.
    let chosen = Nonces { connecting: *padded.last_chunk().unwrap(), ..nonces };
    let proof: [u8; PROOF_MESSAGE_BYTES] = key.encode_proof(&chosen).try_into().unwrap();
    assert_eq!(key.decode_proof(&proof, &chosen.listening), Ok(Some(chosen)));
    assert_eq!(other.decode_proof(&proof, &chosen.listening), Ok(None));
    let verdict: [u8; VERDICT_BYTES] = key.encode_verdict(&chosen).try_into().unwrap();
    assert_eq!(key.decode_verdict(&verdict, &chosen), Ok(Verdict::Proved));
    assert_eq!(other.decode_verdict(&verdict, &chosen), Ok(Verdict::Unproved));
    let refusal: [u8; VERDICT_BYTES] = encode_refusal().try_into().unwrap();
    assert_eq!(key.decode_verdict(&refusal, &chosen), Ok(Verdict::Refused));
}

/// Decodes announcements of regions, the words of cma and cuda, and the handles of cuda: decoded values encode to the same bytes.
pub fn words(bytes: &[u8]) {
    if let Ok(news) = decode_regions(bytes) {
        assert_eq!(decode_regions(&encode_regions(&news).concat()), Ok(news));
    }
    crate::carriers::process_vm::check_words(bytes);
    crate::carriers::cuda::check_words(bytes);
    crate::carriers::cuda::check_handles(bytes);
}

/// Decodes a descriptor: a decoded one can be encoded, and decodes to the same again.
pub fn descriptor(bytes: &[u8]) {
    let mut right = b"KVFD\x03".to_vec();
    right.extend(bytes.get(5..).unwrap_or_default());
    for bytes in [bytes, &right] {
        let Ok(descriptor) = Descriptor::from_bytes(bytes) else { continue };
        let written = descriptor.to_bytes().expect("what was read fits");
        // The reader leaves out regions of unknown kinds, so the encoding may be shorter.
        assert!(written.len() <= bytes.len());
        assert_eq!(Descriptor::from_bytes(&written).as_ref(), Ok(&descriptor));
        for region in &descriptor.regions {
            assert_eq!(descriptor.region(region.number).map(|found| found.number), Some(region.number));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    proptest! {
        // The fuzzer goes deeper; this keeps its targets working.
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn what_the_fuzzer_checks_holds_for_some_bytes(
            bytes in vec(prop_oneof![0..8u8, any::<u8>()], 0..400), cuts in vec(any::<u8>(), 0..20),
        ) {
            super::frame(&bytes);
            super::greeting(&bytes);
            super::descriptor(&bytes);
            super::link(&cuts, &bytes);
            super::words(&bytes);
        }
    }
}
