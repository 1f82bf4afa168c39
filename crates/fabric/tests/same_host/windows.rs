//! Windows that their owner closes at any moment of a READ, while the reader lives or is stopped.

use std::time::{Duration, Instant};

use kvlane_fabric::{Access, Engine, EngineId, EngineOptions, Transport, WindowDescriptor, WindowRange};

use crate::side::{CANARY, LARGE};
use crate::support::{Deadline, MIB, Memory, Process, Random};

/// What the memory holds while a window is open; the next owner's bytes are [`CANARY`].
const SHOWN: u8 = 0x11;
const BYTES: usize = 2 * MIB;

/// An engine here, whose memory another process reads.
struct Owner {
    engine: Engine,
    region: u32,
    memory: Memory,
    reader: EngineId,
}

impl Owner {
    fn new(there: &mut Process, setup: &str, bytes: usize) -> Owner {
        let transport = (setup == "tcp").then_some(Transport::TCP);
        let engine = Engine::new(EngineOptions { transport, ..EngineOptions::default() }).unwrap();
        let memory = Memory::new(bytes);
        // SAFETY: the engine is dropped before its memory, as the first field.
        let region = unsafe { engine.register(memory.base, bytes as u64, Access::Windows).unwrap() };
        // Something that the reader may name at once.
        let reader = EngineId::from(&there.descriptor());
        there.order(&format!("know {}", engine.describe().unwrap().to_text().unwrap()));
        Owner { engine, region, memory, reader }
    }

    fn open(&self) -> WindowDescriptor {
        // In parts that are not in order.
        let half = self.memory.len as u64 / 2;
        let range = |offset| WindowRange { region: self.region, offset, len: half };
        self.engine.open_window(self.reader, vec![range(half), range(0)]).unwrap()
    }
}

fn text(window: &WindowDescriptor) -> String {
    window.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Rounds of a reader that reads all the time, while the owner closes the window and uses the memory otherwise. Answers how
/// many reads were done, how many refused, and how many were done with bytes of the next owner.
fn closed_at_any_moment(setup: &str, rounds: usize, closes_first: bool) -> [usize; 3] {
    let mut random = Random(0x1357_2468_0bad_cafe);
    let mut there = Process::with(BYTES, setup);
    let owner = Owner::new(&mut there, setup, BYTES);
    let mut counts = [0; 3];
    for _ in 0..rounds {
        owner.memory.fill(0, BYTES, SHOWN);
        let window = owner.open();
        there.tell(&format!("read-through {} {SHOWN}", text(&window)));
        assert_eq!(there.hear(), "reading");
        let (begun, after) = (Instant::now(), Duration::from_micros(random.below(3_000) as u64));
        while begun.elapsed() < after {
            std::thread::yield_now();
        }
        if closes_first {
            owner.engine.close_window(&window).unwrap();
        }
        owner.memory.fill(0, BYTES, CANARY);
        if !closes_first {
            assert_eq!(there.hear(), "strange", "{setup}: no read brings the next owner's bytes");
            owner.engine.close_window(&window).unwrap();
        }
        let said = there.hear();
        assert_ne!(said, "strange", "{setup}: a read was done with bytes of the next owner");
        let numbers: Vec<usize> = said.split(' ').map(|number| number.parse().unwrap()).collect();
        counts.iter_mut().zip(numbers).for_each(|(count, number)| *count += number);
    }
    counts
}

#[test]
fn no_byte_of_the_next_owner_is_ever_accepted() {
    for setup in ["", "tcp"] {
        let [done, refused, strange] = closed_at_any_moment(setup, 60, true);
        assert_eq!(strange, 0, "{setup}: of {done} reads that were done");
        assert!(done > 60 && refused == 60, "{setup}: {done} done, {refused} refused");
    }
}

/// The control: whoever uses the memory before the window is closed is read.
#[test]
fn a_window_that_is_closed_too_late_shows_bytes_of_the_next_owner() {
    for setup in ["", "tcp"] {
        let [done, _, strange] = closed_at_any_moment(setup, 10, false);
        assert!(strange > 0, "{setup}: none of {done} reads had them, so that the test above proves nothing");
    }
}

#[test]
fn a_reader_that_is_stopped_amid_a_read_is_refused_when_it_goes_on() {
    for setup in ["", "tcp"] {
        for round in 0..3 {
            let mut there = Process::with(LARGE, setup);
            let owner = Owner::new(&mut there, setup, LARGE);
            owner.memory.fill(0, LARGE, SHOWN);
            let window = owner.open();
            there.order(&format!("read-through-long {}", text(&window)));
            there.order(&format!("await {}", MIB + 12_345 + round * 3 * MIB));
            there.pause();
            let deadline = Deadline::after(Duration::from_secs(3));
            owner.engine.close_window(&window).unwrap();
            deadline.assert_kept();
            owner.memory.fill(0, LARGE, CANARY);
            there.resume();
            assert_eq!(there.ask("end"), "Some(Err(Refused))", "{setup}");
            // And it goes on to read what it is shown.
            owner.memory.fill(0, LARGE, SHOWN);
            let next = owner.open();
            there.tell(&format!("read-through {} {SHOWN}", text(&next)));
            assert_eq!(there.hear(), "reading");
            owner.engine.close_window(&next).unwrap();
            assert!(there.hear().ends_with(" 1 0"), "{setup}");
        }
    }
}
