//! The pool's memory as seen by the holders of its descriptors.
#![allow(clippy::unwrap_used)]

use std::os::fd::AsFd;
use std::sync::Mutex;

use kvlane_block::PoolOffset;
use kvlane_memory::{
    Arena, ArenaError, ArenaOptions, HugePages, Numa, OutsidePool, PoolView, available_memory,
};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;

const MIB: u64 = 1 << 20;

/// Ordinary pages: reserved ones are few, and tests that run at once would take them from each other.
fn options(bytes: u64) -> ArenaOptions {
    ArenaOptions { bytes, hugepages: HugePages::Off, numa: Numa::Auto, threads: 2 }
}

fn arena(bytes: u64) -> Arena {
    Arena::create(&options(bytes), &|_| {}).unwrap()
}

/// Pages of a mapping that have memory.
fn resident(arena: &Arena) -> u64 {
    let page = rustix::param::page_size();
    let mut state = vec![0u8; arena.bytes() as usize / page];
    // SAFETY: the range is the whole mapping and `state` has a byte for each of its pages.
    let result = unsafe { libc::mincore(arena.base().cast(), arena.bytes() as usize, state.as_mut_ptr()) };
    assert_eq!(result, 0);
    state.iter().filter(|byte| **byte & 1 == 1).count() as u64 * page as u64
}

#[test]
fn an_arena_is_rounded_up_faulted_in_and_its_progress_ends_at_its_size() {
    let reported = Mutex::new(Vec::new());
    let arena =
        Arena::create(&options(130 * MIB + 1), &|bytes| reported.lock().unwrap().push(bytes)).unwrap();
    assert!(arena.bytes() > 130 * MIB && arena.bytes() <= 132 * MIB);
    assert_eq!(arena.bytes() % 4096, 0);
    assert_eq!(resident(&arena), arena.bytes());
    let mut reported = reported.into_inner().unwrap();
    reported.sort_unstable();
    assert_eq!(reported.len(), 3, "one report for each 64 MiB: {reported:?}");
    assert_eq!(reported.last(), Some(&arena.bytes()));
    let nodes = arena.nodes();
    assert_eq!((nodes[0].start, nodes[nodes.len() - 1].end), (0, arena.bytes()));
    assert!(nodes.windows(2).all(|pair| pair[0].end == pair[1].start));
}

#[test]
fn a_view_reads_and_writes_inside_the_pool_and_nowhere_else() {
    let arena = arena(4 * MIB);
    let view = PoolView::map(arena.descriptor(true).unwrap(), arena.bytes(), true).unwrap();
    let (end, mut found) = (arena.bytes(), [0; 4]);
    view.write(PoolOffset(end - 4), b"last").unwrap();
    view.read(PoolOffset(end - 4), &mut found).unwrap();
    assert_eq!(&found, b"last");
    for offset in [end - 3, end, u64::MAX - 1].map(PoolOffset) {
        assert_eq!(view.write(offset, b"last"), Err(OutsidePool { offset, bytes: 4 }));
        assert_eq!(view.read(offset, &mut found), Err(OutsidePool { offset, bytes: 4 }));
    }
    view.read(PoolOffset(0), &mut found).unwrap();
    assert_eq!(found, [0; 4]);
}

#[test]
fn views_see_what_the_arena_holds_and_outlive_it() {
    let arena = arena(4 * MIB);
    let writable = PoolView::map(arena.descriptor(true).unwrap(), arena.bytes(), true).unwrap();
    let read_only = PoolView::map(arena.descriptor(false).unwrap(), arena.bytes(), false).unwrap();
    assert!(writable.writable() && !read_only.writable());
    read_only.prefault(PoolOffset(3 * MIB - 5), 10).unwrap();
    // SAFETY: both bytes lie inside the mappings, and only this thread touches them.
    unsafe {
        writable.base().add(3 * MIB as usize).write(42);
        assert_eq!(arena.bytes_at(PoolOffset(3 * MIB), 1), [42]);
        assert_eq!(read_only.base().add(3 * MIB as usize).read(), 42);
    }
    drop((arena, writable));
    // SAFETY: as above; the view keeps the memory.
    assert_eq!(unsafe { read_only.base().add(3 * MIB as usize).read() }, 42);
}

#[test]
fn nobody_can_change_the_size() {
    let arena = arena(4 * MIB);
    let descriptor = arena.descriptor(true).unwrap();
    for bytes in [0, 2 * MIB, 8 * MIB] {
        assert_eq!(rustix::fs::ftruncate(&descriptor, bytes), Err(Errno::PERM), "to {bytes}");
    }
    let more = rustix::fs::fcntl_add_seals(&descriptor, rustix::fs::SealFlags::FUTURE_WRITE);
    assert_eq!(more, Err(Errno::PERM));
}

#[test]
fn a_read_only_descriptor_cannot_be_mapped_writable() {
    let arena = arena(2 * MIB);
    let error = PoolView::map(arena.descriptor(false).unwrap(), arena.bytes(), true).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied);
    let written = rustix::io::write(arena.descriptor(false).unwrap().as_fd(), b"x");
    assert_eq!(written, Err(Errno::BADF));
    let mode = rustix::fs::fstat(arena.descriptor(false).unwrap()).unwrap().st_mode;
    assert_eq!(mode & 0o777, 0o400, "nobody but root can reopen it for writing");
}

#[test]
fn a_view_longer_than_its_file_is_refused() {
    let arena = arena(2 * MIB);
    let bytes = arena.bytes() + 4096;
    let error = PoolView::map(arena.descriptor(false).unwrap(), bytes, false).unwrap_err();
    assert!(error.to_string().contains(&bytes.to_string()), "{error}");
    assert!(PoolView::map(arena.descriptor(false).unwrap(), 0, false).is_err());
}

/// An engine maps what the socket brings. A sender that made it shorter afterwards ended the engine, by SIGBUS, at its next
/// load.
#[test]
fn what_its_sender_could_shrink_is_not_mapped() {
    let memfd = |seals| {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memfd = rustix::fs::memfd_create("kvlane-test", flags).unwrap();
        rustix::fs::ftruncate(&memfd, MIB).unwrap();
        rustix::fs::fcntl_add_seals(&memfd, seals).unwrap();
        memfd
    };
    let all = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    PoolView::map(memfd(all), MIB, true).unwrap();
    for missing in [SealFlags::SHRINK, SealFlags::GROW, SealFlags::SEAL, all] {
        let error = PoolView::map(memfd(all.difference(missing)), MIB, false).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::InvalidData);
        assert!(error.to_string().contains("lacks the seals"), "{error}");
    }
    let file = tempfile::tempfile().unwrap();
    file.set_len(MIB).unwrap();
    let error = PoolView::map(file.into(), MIB, false).unwrap_err();
    assert!(error.to_string().contains("no memfd"), "{error}");
}

#[test]
fn wrong_sizes_are_told_apart() {
    assert!(matches!(Arena::create(&options(0), &|_| {}), Err(ArenaError::Empty)));
    for bytes in [1 << 50, u64::MAX] {
        match Arena::create(&options(bytes), &|_| {}) {
            Err(ArenaError::LargerThanMemory { asked, available }) => {
                assert_eq!(asked, bytes);
                assert!(available <= available_memory().unwrap() + (1 << 30), "{available}");
            }
            other => unreachable!("{other:?}"),
        }
    }
}

#[test]
fn demanded_huge_pages_are_used_or_the_setting_is_named() {
    // More than any machine reserves, so that it is refused everywhere.
    let asked = ArenaOptions { hugepages: HugePages::On, ..options(1 << 50) };
    let error = Arena::create(&asked, &|_| {}).unwrap_err();
    assert!(matches!(error, ArenaError::NoHugePages { needed: 0x2000_0000, .. }), "{error:?}");
    assert!(error.to_string().contains("sysctl vm.nr_hugepages="), "{error}");
    // Two pages: used where they are reserved.
    match Arena::create(&ArenaOptions { hugepages: HugePages::On, ..options(3 * MIB) }, &|_| {}) {
        Ok(arena) => {
            assert_eq!((arena.page_size(), arena.bytes()), ("2 MB (hugetlb)", 4 * MIB));
            assert_eq!(resident(&arena), arena.bytes());
            let view = PoolView::map(arena.descriptor(false).unwrap(), arena.bytes(), false).unwrap();
            view.prefault(PoolOffset(MIB), MIB).unwrap();
        }
        Err(error) => assert!(matches!(error, ArenaError::NoHugePages { needed: 2, .. }), "{error:?}"),
    }
    let auto = ArenaOptions { hugepages: HugePages::Auto, ..options(3 * MIB) };
    let auto = Arena::create(&auto, &|_| {}).unwrap();
    assert_eq!(resident(&auto), auto.bytes());
    assert_eq!(auto.page_size().starts_with("2 MB"), auto.bytes() == 4 * MIB, "{}", auto.page_size());
    assert!(arena(3 * MIB).page_size().ends_with("kB"));
}
