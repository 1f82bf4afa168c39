//! The order of work by events and words, on the fake or on a real GPU.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use crate::support::{Gate, device_memory, gpus, pattern, read, stream};
use kvlane_gpu::{Copy, Event, EventScope, HostBuffer, StreamHandle};

const BYTES: usize = 8192;

#[test]
fn a_stream_that_waits_for_an_event_sees_what_was_copied_before_it() {
    let (gpu, peer) = gpus();
    let (first, second) = (stream(&gpu), stream(&peer));
    let content = pattern(1, BYTES);
    let from = device_memory(&first, &content);
    let between = device_memory(&first, &pattern(2, BYTES));
    let to = device_memory(&second, &pattern(3, BYTES));
    let event = Event::new(&gpu, EventScope::Process).unwrap();

    let gate = Gate::across(&first);
    let copy = |to: u64, from: u64| Copy { dst: to, src: from, len: BYTES as u64 };
    // SAFETY: the ranges are the test's own, and both streams are waited for.
    unsafe { first.copy(copy(between.address(), from.address())).unwrap() };
    event.record(&first).unwrap();
    second.wait(&event).unwrap();
    // SAFETY: as above.
    unsafe { second.copy(copy(to.address(), between.address())).unwrap() };
    assert!(!event.is_done().unwrap());
    assert!(!second.is_idle().unwrap());

    gate.open();
    event.synchronize().unwrap();
    assert!(event.is_done().unwrap());
    assert!(read(&second, to.address(), BYTES) == content);
}

#[test]
fn an_event_that_was_never_recorded_holds_nobody_up() {
    let (gpu, _) = gpus();
    let stream = stream(&gpu);
    for scope in [EventScope::Process, EventScope::Host] {
        let event = Event::new(&gpu, scope).unwrap();
        stream.wait(&event).unwrap();
        stream.synchronize().unwrap();
        event.synchronize().unwrap();
        assert!(event.is_done().unwrap());
    }
}

#[test]
fn a_wait_is_for_the_record_that_was_the_latest_then() {
    let (gpu, _) = gpus();
    let (recorded, waiting) = (stream(&gpu), stream(&gpu));
    let event = Event::new(&gpu, EventScope::Host).unwrap();
    event.record(&recorded).unwrap();
    waiting.wait(&event).unwrap();
    let gate = Gate::across(&recorded);
    event.record(&recorded).unwrap();
    // The second record is pending, but is not what this stream waits for.
    waiting.synchronize().unwrap();
    assert!(!event.is_done().unwrap());
    gate.open();
    event.synchronize().unwrap();
}

#[test]
fn a_stream_of_another_library_is_recorded_and_held_up_by_its_handle() {
    let (gpu, _) = gpus();
    let (ours, theirs) = (stream(&gpu), stream(&gpu));
    let event = Event::new(&gpu, EventScope::Process).unwrap();
    for raw in [theirs.raw(), StreamHandle(0)] {
        // SAFETY: the streams live.
        unsafe { event.record_raw(raw).unwrap() };
        event.synchronize().unwrap();
    }
    let gate = Gate::across(&ours);
    event.record(&ours).unwrap();
    // SAFETY: the stream lives.
    unsafe { event.hold_up_raw(theirs.raw()).unwrap() };
    assert!(!theirs.is_idle().unwrap());
    gate.open();
    theirs.synchronize().unwrap();
}

#[test]
fn words_are_written_and_waited_for_in_order() {
    let (gpu, peer) = gpus();
    let (writer, waiter) = (stream(&gpu), stream(&peer));
    let word = HostBuffer::new(&gpu, 4096).unwrap();
    // SAFETY: the word is in the buffer, and both streams are waited for.
    unsafe {
        word.as_ptr().cast::<u32>().write(0);
        waiter.wait_word(word.address(), 2).unwrap();
        writer.write_word(word.address(), 1).unwrap();
        writer.synchronize().unwrap();
        assert!(!waiter.is_idle().unwrap());
        // Later than what is waited for will do.
        writer.write_word(word.address(), 3).unwrap();
    }
    waiter.synchronize().unwrap();
    writer.synchronize().unwrap();
}
