//! Tests of the ring under loom, which tries all orders of two threads' steps, and all values that a load may return on
//! any processor. A test also fails if both sides touch a byte at once, or if a side sleeps for ever.

#![allow(unsafe_code, clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::sync::Arc;

use loom::sync::{Condvar, Mutex};
use loom::thread;

use crate::header::Header;
use crate::memory::Memory;
use crate::ring::{Reader, Writer};

fn ring(capacity: usize) -> (Writer, Reader) {
    let memory = Memory::new(Header::new(0), capacity);
    (Writer::new(memory.clone()), Reader::new(memory))
}

fn write(writer: &mut Writer, bytes: &[u8]) -> usize {
    let range = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    // SAFETY: the range is the slice.
    unsafe { writer.write(&[range]).unwrap() }
}

/// Reads at most `most` bytes, and appends them to `came`.
fn read(reader: &mut Reader, most: usize, came: &mut Vec<u8>) -> usize {
    let mut bytes = [0; 8];
    let range = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: most.min(8) };
    // SAFETY: the range is the array.
    let read = unsafe { reader.read(&[range]).unwrap() };
    came.extend(&bytes[..read]);
    read
}

/// Carries wakes like a socket: it loses none, not even one that is sent before the sleep.
#[derive(Debug, Default)]
struct Wakes {
    /// Wakes that were sent, and how many of them were taken.
    counts: Mutex<(usize, usize)>,
    sent: Condvar,
}

impl Wakes {
    fn send(&self) {
        self.counts.lock().unwrap().0 += 1;
        self.sent.notify_one();
    }

    fn sleep(&self) {
        let mut counts = self.counts.lock().unwrap();
        while counts.0 == counts.1 {
            counts = self.sent.wait(counts).unwrap();
        }
        counts.1 = counts.0;
    }

    fn ever_sent(&self) -> usize {
        self.counts.lock().unwrap().0
    }
}

/// Controls: loom finds bytes that both sides touch at once if `Relaxed` stands in place of `Release` in `write` or
/// `read`, or of `Acquire` in `room` or `available`.
#[test]
fn bytes_arrive_in_order_and_once() {
    loom::model(|| {
        let (mut writer, mut reader) = ring(4);
        let writing = thread::spawn(move || {
            let bytes = [1, 2, 3, 4, 5, 6];
            let mut sent = 0;
            while sent < bytes.len() {
                match write(&mut writer, &bytes[sent..(sent + 3).min(bytes.len())]) {
                    0 => thread::yield_now(),
                    more => sent += more,
                }
            }
        });
        let mut came = Vec::new();
        while came.len() < 6 {
            if read(&mut reader, 3, &mut came) == 0 {
                thread::yield_now();
            }
        }
        assert_eq!(came, [1, 2, 3, 4, 5, 6]);
        assert!(reader.is_empty());
        writing.join().unwrap();
    });
}

/// Reads `bytes` bytes, and sleeps while there are none. Returns how often it was about to sleep.
fn read_asleep(reader: &mut Reader, bytes: usize, wakes: &Wakes, after: impl Fn(&mut Reader)) -> usize {
    let mut came = Vec::new();
    let mut sleeps = 0;
    while came.len() < bytes {
        if read(reader, 8, &mut came) > 0 {
            after(reader);
            continue;
        }
        sleeps += 1;
        if reader.prepare_to_sleep() {
            wakes.sleep();
            reader.woken();
        }
    }
    let expected: Vec<u8> = (1..=bytes as u8).collect();
    assert_eq!(came, expected);
    sleeps
}

/// Writes `bytes` bytes, one by one, and sleeps while there is no room. Returns how often it was about to sleep.
fn write_asleep(writer: &mut Writer, bytes: usize, wakes: &Wakes, after: impl Fn(&mut Writer)) -> usize {
    let mut sleeps = 0;
    let mut next = 1;
    while next <= bytes {
        if write(writer, &[next as u8]) > 0 {
            next += 1;
            after(writer);
            continue;
        }
        sleeps += 1;
        if writer.prepare_to_wait_for_room() {
            wakes.sleep();
            writer.woken();
        }
    }
    sleeps
}

/// Controls: without the fence in `prepare_to_sleep`, or the one in `take`, or with `AcqRel` in both, the reader sleeps
/// for ever. Stores in place of the swaps in `set` look the same to loom, see there.
#[test]
fn a_reader_that_sleeps_is_woken() {
    loom::model(|| {
        let (mut writer, mut reader) = ring(4);
        let wakes = Arc::new(Wakes::default());
        let wakes_of_reader = Arc::clone(&wakes);
        let reading = thread::spawn(move || read_asleep(&mut reader, 2, &wakes_of_reader, |_| {}));
        write_asleep(&mut writer, 2, &Wakes::default(), |writer| {
            if writer.take_reader_sleeps() {
                wakes.send();
            }
        });
        assert!(wakes.ever_sent() <= reading.join().unwrap(), "one wake for each sleep");
    });
}

/// Controls: without the fence in `prepare_to_wait_for_room`, or the one in `take`, or with `AcqRel` in both, the
/// writer sleeps for ever. The reader then polls for its bytes until loom gives up ("maximum number of branches").
#[test]
fn a_writer_that_waits_for_room_is_woken() {
    loom::model(|| {
        let (mut writer, mut reader) = ring(1);
        let wakes = Arc::new(Wakes::default());
        let wakes_of_writer = Arc::clone(&wakes);
        let writing = thread::spawn(move || write_asleep(&mut writer, 2, &wakes_of_writer, |_| {}));
        let mut came = Vec::new();
        while came.len() < 2 {
            match read(&mut reader, 1, &mut came) {
                0 => thread::yield_now(),
                _ if reader.take_writer_waits() => wakes.send(),
                _ => {}
            }
        }
        assert_eq!(came, [1, 2]);
        assert!(wakes.ever_sent() <= writing.join().unwrap(), "one wake for each wait");
    });
}

/// Allows four switches between threads at points where neither has to wait, because trying all of them would take
/// hours.
#[test]
fn both_sides_sleep_and_all_bytes_arrive() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(4);
    model.check(|| {
        let (mut writer, mut reader) = ring(1);
        let [to_reader, to_writer] = [(); 2].map(|()| Arc::new(Wakes::default()));
        let (wake_reader, wake_writer) = (Arc::clone(&to_reader), Arc::clone(&to_writer));
        let writing = thread::spawn(move || {
            write_asleep(&mut writer, 3, &to_writer, |writer| {
                if writer.take_reader_sleeps() {
                    wake_reader.send();
                }
            });
        });
        read_asleep(&mut reader, 3, &to_reader, |reader| {
            if reader.take_writer_waits() {
                wake_writer.send();
            }
        });
        writing.join().unwrap();
    });
}
