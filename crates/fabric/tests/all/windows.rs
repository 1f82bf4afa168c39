//! Windows between engines of one process: one peer may read them, and no other.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::time::Duration;

use kvlane_fabric::{
    Access, Engine, EngineId, EngineOptions, FabricError, Failure, Handle, PeerId, Pieces, Place, Run,
    Transfer, Transport, WindowDescriptor, WindowRange,
};

use crate::support::{MIB, Memory, PATIENCE};

/// An engine, and memory that only windows show.
struct Side {
    engine: Engine,
    region: u32,
    memory: Memory,
}

impl Side {
    fn new(transport: Transport) -> Side {
        let options = EngineOptions { transport: Some(transport), ..EngineOptions::default() };
        let engine = Engine::new(options).unwrap();
        let memory = Memory::new(4 * MIB);
        // SAFETY: the engine is dropped before its memory, as the first field.
        let region = unsafe { engine.register(memory.base, memory.len as u64, Access::Windows).unwrap() };
        Side { engine, region, memory }
    }

    fn meet(&self, other: &Side) -> PeerId {
        self.engine.connect(&other.engine.describe().unwrap()).unwrap()
    }

    fn range(&self, offset: usize, len: usize) -> WindowRange {
        WindowRange { region: self.region, offset: offset as u64, len: len as u64 }
    }

    fn open(&self, to: EngineId, ranges: &[(usize, usize)]) -> WindowDescriptor {
        let ranges = ranges.iter().map(|(offset, len)| self.range(*offset, *len)).collect();
        self.engine.open_window(to, ranges).unwrap()
    }

    fn try_read(
        &self,
        peer: PeerId,
        window: WindowDescriptor,
        at: usize,
        len: usize,
    ) -> Result<Handle, FabricError> {
        let local = Place { region: self.region, offset: 0 };
        let remote = Place { region: window.number, offset: at as u64 };
        let pieces = Pieces::Contiguous(Run { local, remote, len: len as u64 });
        self.engine.begin(peer, Transfer::read_through(window, pieces))
    }

    fn read(&self, peer: PeerId, window: WindowDescriptor, at: usize, len: usize) -> Result<(), Failure> {
        self.try_read(peer, window, at, len).unwrap().wait(Some(PATIENCE)).unwrap()
    }
}

const BOTH: [Transport; 2] = [Transport::TCP, Transport::CMA];

#[test]
fn a_window_shows_its_ranges_one_after_the_other_to_its_peer_and_nobody_else() {
    for transport in BOTH {
        let [owner, reader, other] = [(); 3].map(|()| Side::new(transport));
        owner.memory.scribble(0, 4 * MIB, 7);
        let (peer, others) = (reader.meet(&owner), other.meet(&owner));
        // Neither in order, nor without overlap, and more than go into one frame.
        let mut ranges = vec![(3 * MIB, MIB), (100, 1), (0, 2 * MIB)];
        ranges.extend((0..5_000).map(|index| (index * 512, 256)));
        let window = owner.open(reader.engine.id(), &ranges);
        let all: Vec<u8> = ranges.iter().flat_map(|(at, len)| owner.memory.bytes(*at, *len)).collect();
        assert_eq!(window.len, all.len() as u64);
        for (at, len) in [(0, 1), (MIB - 1, 3), (0, 4 * MIB), (all.len() - MIB, MIB), (MIB + 77, 2 * MIB)] {
            assert_eq!(reader.read(peer, window, at, len), Ok(()), "{transport:?}: {len} from {at}");
            assert!(reader.memory.bytes(0, len) == all[at..at + len], "{transport:?}: {len} from {at}");
        }
        assert_eq!(
            other.read(others, window, 0, 1),
            Err(Failure::Refused),
            "{transport:?}: it is not its window"
        );
        // What it shows cannot be named without it, and its number is no region's.
        let place = |region| Place { region, offset: 0 };
        let plain = |region| {
            let run = Run { local: place(reader.region), remote: place(region), len: 1 };
            reader.engine.begin(peer, Transfer::read(Pieces::Contiguous(run)))
        };
        assert!(matches!(plain(window.number), Err(FabricError::Shape(_))), "{transport:?}");
        assert!(matches!(plain(owner.region), Err(FabricError::Shape(_))), "{transport:?}");
        assert!(owner.engine.describe().unwrap().regions.is_empty());
        assert!(matches!(reader.try_read(peer, window, all.len(), 1), Err(FabricError::Shape(_))));
        let write = Transfer {
            op: kvlane_fabric::Op::Write,
            ..Transfer::read_through(
                window,
                Pieces::Contiguous(Run { local: place(reader.region), remote: place(window.number), len: 1 }),
            )
        };
        assert!(matches!(reader.engine.begin(peer, write), Err(FabricError::WindowIsRead)));
    }
}

#[test]
fn what_is_read_through_a_closed_window_does_not_count_also_where_its_number_is_used_again() {
    for transport in BOTH {
        let [owner, reader] = [(); 2].map(|()| Side::new(transport));
        let peer = reader.meet(&owner);
        owner.memory.fill(0, MIB, 1);
        let first = owner.open(reader.engine.id(), &[(0, MIB)]);
        assert_eq!(reader.read(peer, first, 0, MIB), Ok(()));
        owner.engine.close_window(&first).unwrap();
        assert!(matches!(owner.engine.close_window(&first), Err(FabricError::NoSuchWindow(_))));
        owner.memory.fill(0, MIB, 2);
        let second = owner.open(reader.engine.id(), &[(0, MIB)]);
        assert_eq!((second.number, second.generation), (first.number, first.generation + 1));
        assert!(matches!(owner.engine.close_window(&first), Err(FabricError::NoSuchWindow(_))));
        // Whether the peer has heard of it or not.
        match reader.try_read(peer, first, 0, MIB) {
            Ok(handle) => {
                assert_eq!(handle.wait(Some(PATIENCE)), Some(Err(Failure::Refused)), "{transport:?}")
            }
            Err(FabricError::WindowClosed) => {}
            Err(other) => panic!("{other}"),
        }
        assert_eq!(reader.read(peer, second, 0, MIB), Ok(()));
        assert_eq!(reader.memory.other_than(0, MIB, 2), None);
        assert!(matches!(reader.try_read(peer, first, 0, MIB), Err(FabricError::WindowClosed)));
        // A region that is given back takes its windows along.
        owner.engine.unregister(owner.region).unwrap();
        assert_eq!(owner.engine.windows(), 0);
        match reader.try_read(peer, second, 0, MIB) {
            Ok(handle) => {
                assert_eq!(handle.wait(Some(PATIENCE)), Some(Err(Failure::Refused)), "{transport:?}")
            }
            Err(FabricError::WindowClosed | FabricError::Shape(_)) => {}
            Err(other) => panic!("{other}"),
        }
    }
}

#[test]
fn a_window_that_was_opened_before_its_peer_came_or_while_it_was_away_is_known() {
    for transport in BOTH {
        let [owner, reader] = [(); 2].map(|()| Side::new(transport));
        owner.memory.fill(0, MIB, 9);
        let before = owner.open(reader.engine.id(), &[(5, 100)]);
        let peer = reader.meet(&owner);
        assert_eq!(reader.read(peer, before, 0, 100), Ok(()), "{transport:?}");
        reader.engine.disconnect(peer);
        let meanwhile = owner.open(reader.engine.id(), &[(7, 200)]);
        let peer = reader.meet(&owner);
        assert_eq!(reader.read(peer, meanwhile, 0, 200), Ok(()), "{transport:?}");
        assert_eq!(reader.memory.other_than(0, 200, 9), None);
    }
}

#[test]
fn windows_of_memory_that_is_not_there_are_not_opened() {
    let [owner, reader] = [(); 2].map(|()| Side::new(Transport::TCP));
    let open = |ranges| owner.engine.open_window(reader.engine.id(), ranges).map(drop);
    let is_refused = |ranges| matches!(open(ranges), Err(FabricError::Window(_)));
    assert!(is_refused(Vec::new()));
    assert!(is_refused(vec![owner.range(0, 0)]));
    assert!(is_refused(vec![owner.range(4 * MIB - 1, 2)]));
    assert!(is_refused(vec![owner.range(usize::MAX, 1)]));
    assert!(is_refused(vec![WindowRange { region: 99, offset: 0, len: 1 }]));
    assert_eq!(owner.engine.windows(), 0);
    assert!(open(vec![owner.range(4 * MIB - 1, 1)]).is_ok());
    owner.engine.close();
    assert!(matches!(open(vec![owner.range(0, 1)]), Err(FabricError::Closed)));
}

/// Who opens and closes windows all the time uses neither more numbers nor more memory than are open at once.
#[test]
fn ten_thousand_windows_one_after_the_other_take_the_room_of_one() {
    let [owner, reader] = [(); 2].map(|()| Side::new(Transport::CMA));
    let peer = reader.meet(&owner);
    owner.memory.fill(0, MIB, 3);
    let mut last = None;
    for round in 0..10_000u32 {
        let window = owner.open(reader.engine.id(), &[(round as usize, 64)]);
        assert_eq!(window.generation, round);
        if round % 100 == 0 {
            assert_eq!(reader.read(peer, window, 0, 64), Ok(()), "round {round}");
        }
        owner.engine.close_window(&window).unwrap();
        last = Some(window);
    }
    let closed = reader.try_read(peer, last.unwrap(), 0, 64);
    let refused = |handle: Handle| handle.wait(Some(Duration::from_secs(5))) == Some(Err(Failure::Refused));
    assert!(closed.map_or_else(|error| matches!(error, FabricError::WindowClosed), refused));
}

/// A peer that was told of more ended the connection, and with it all transfers.
#[test]
fn windows_of_one_peer_have_a_million_ranges_and_room_again_when_some_are_closed() {
    let [owner, reader, other] = [(); 3].map(|()| Side::new(Transport::CMA));
    let peer = reader.meet(&owner);
    let most = kvlane_fabric::WINDOW_RANGES_MAX;
    let ranges: Vec<WindowRange> = (0..most).map(|index| owner.range(2 * index, 1)).collect();
    let open = |to: &Side| owner.engine.open_window(to.engine.id(), ranges.clone());
    // Each is read before the next is opened: sixteen at once are 25 MiB for a peer to take in, and a busy machine, where
    // nothing is optimised, needs longer for them than a connection may be silent.
    let open_and_read = || {
        let window = open(&reader).unwrap();
        assert_eq!(reader.read(peer, window, most - 1, 1), Ok(()));
        window
    };
    let windows: Vec<WindowDescriptor> = (0..16).map(|_| open_and_read()).collect();
    assert!(matches!(open(&reader), Err(FabricError::WindowsFull)));
    open(&other).expect("another peer has room of its own");
    assert_eq!(reader.read(peer, windows[15], 0, most), Ok(()));
    owner.engine.close_window(&windows[3]).unwrap();
    let last = open(&reader).unwrap();
    assert!(matches!(open(&reader), Err(FabricError::WindowsFull)));
    for window in [last, windows[0]] {
        assert_eq!(reader.read(peer, window, 0, most), Ok(()));
    }
}
