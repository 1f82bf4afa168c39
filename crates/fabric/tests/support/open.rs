//! Everything that a process has open.

use std::time::Duration;

use super::Deadline;

/// Descriptors, threads and mappings, once they are no more than `wanted`, or have not become fewer for half a second of an idle
/// machine.
pub(crate) fn settled(wanted: Option<[usize; 3]>) -> [usize; 3] {
    let count = || {
        let entries = |path: &str| std::fs::read_dir(path).unwrap().count();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
        [entries("/proc/self/fd"), entries("/proc/self/task"), maps]
    };
    let unchanged = || Deadline::after(Duration::from_millis(500));
    let (mut fewest, mut deadline) = (count(), unchanged());
    loop {
        let now = count();
        let is_it = wanted.is_some_and(|wanted| (0..3).all(|index| now[index] <= wanted[index]));
        if is_it || deadline.has_passed() {
            return now;
        }
        if (0..3).any(|index| now[index] < fewest[index]) {
            (fewest, deadline) = (now, unchanged());
        }
        std::thread::yield_now();
    }
}

pub(crate) fn numbers(counts: [usize; 3]) -> String {
    format!("{counts:?}").replace(['[', ']', ','], "")
}
