//! Huge pages, and which pages `--hugepages auto` would take.

use std::path::Path;

use crate::{
    doctor::{files, finding::Finding},
    size::Size,
};

const BYTES: u64 = 2 << 20;

/// The kernel's facts.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Facts {
    two_mib: Reserved,
    one_gib: Reserved,
    /// The chosen word for transparent huge pages of shared memory, such as "never".
    shared: Option<String>,
}

/// Pages of one size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Reserved {
    total: u64,
    /// Neither in use nor reserved by a mapping.
    free: u64,
}

impl Facts {
    pub(crate) fn read(root: &Path) -> Self {
        let reserved = |size: &str| {
            let count = |file: &str| {
                files::number(root, &format!("sys/kernel/mm/hugepages/hugepages-{size}/{file}")).unwrap_or(0)
            };
            Reserved {
                total: count("nr_hugepages"),
                free: count("free_hugepages").saturating_sub(count("resv_hugepages")),
            }
        };
        let setting = files::text(root, "sys/kernel/mm/transparent_hugepage/shmem_enabled");
        let chosen = |text: String| Some(text.split_once('[')?.1.split_once(']')?.0.to_owned());
        Self { two_mib: reserved("2048kB"), one_gib: reserved("1048576kB"), shared: setting.and_then(chosen) }
    }

    /// Whether the free reserved pages hold the whole pool. The same rule as the arena's (crates/memory/src/arena.rs).
    pub(crate) fn hold(&self, pool: Size) -> bool {
        pool.0.div_ceil(BYTES) <= self.two_mib.free
    }

    /// The command that reserves enough for the pool.
    pub(crate) fn reserve(&self, pool: Size) -> String {
        let missing = pool.0.div_ceil(BYTES).saturating_sub(self.two_mib.free);
        format!("`sysctl vm.nr_hugepages={}`", self.two_mib.total.saturating_add(missing))
    }

    fn has_transparent(&self) -> bool {
        matches!(self.shared.as_deref(), Some("advise" | "always" | "within_size"))
    }
}

/// If `running`, a daemon has its pool already and needs none of the free pages.
pub(crate) fn judge(facts: &Facts, pool: Size, running: bool) -> Finding {
    let Facts { two_mib, one_gib, shared } = facts;
    let mut found = vec![format!("2 MiB: {} of {} free", two_mib.free, two_mib.total)];
    if one_gib.total > 0 {
        found.push(format!("1 GiB: {} of {} free, which kvlane does not use", one_gib.free, one_gib.total));
    }
    if let Some(word) = shared {
        found.push(format!("transparent ones for shared memory: {word}"));
    }
    let found = found.join("; ");
    if running {
        return Finding::ok("huge pages", found)
            .means("the daemon that runs has its pool already; `kvlane status` says in which pages");
    }
    if facts.hold(pool) {
        return Finding::ok("huge pages", found)
            .means(format!("--hugepages auto takes reserved 2 MiB pages for a pool of {pool}"));
    }
    let reserve = format!("reserve them with {}", facts.reserve(pool));
    if facts.has_transparent() {
        Finding::ok("huge pages", found)
            .means(format!(
                "--hugepages auto asks for transparent ones for a pool of {pool}, which the kernel need not give"
            ))
            .advice(format!("to be sure, {reserve}"))
    } else {
        Finding::note("huge pages", found)
            .means(format!(
                "--hugepages auto takes ordinary pages for a pool of {pool}; --hugepages on would not start"
            ))
            .advice(format!(
                "{reserve}, or allow transparent ones by `echo advise > \
                 /sys/kernel/mm/transparent_hugepage/shmem_enabled`"
            ))
    }
}

#[cfg(test)]
mod tests {
    use kvlane_memory::{Arena, ArenaOptions, HugePages, Numa};

    use super::*;
    use crate::doctor::{files::tree, finding::Verdict};

    const POOL: Size = Size(4 << 30);
    const FOLDER: &str = "sys/kernel/mm/hugepages/hugepages-2048kB";

    fn facts(total: &str, free: &str, reserved: &str, shared: &str) -> Facts {
        let path = |file| format!("{FOLDER}/{file}");
        let (nr, left, resv) = (path("nr_hugepages"), path("free_hugepages"), path("resv_hugepages"));
        let root = tree(&[
            (&nr, total),
            (&left, free),
            (&resv, reserved),
            ("sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages", "2\n"),
            ("sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages", "1\n"),
            ("sys/kernel/mm/transparent_hugepage/shmem_enabled", shared),
        ]);
        Facts::read(root.path())
    }

    #[test]
    fn enough_reserved_pages() {
        let found =
            judge(&facts("3000\n", "2050\n", "2\n", "always within_size advise [never]\n"), POOL, false);
        assert_eq!(found.verdict, Verdict::Ok);
        assert_eq!(
            found.found,
            "2 MiB: 2048 of 3000 free; 1 GiB: 1 of 2 free, which kvlane does not use; \
             transparent ones for shared memory: never"
        );
        assert!(found.means.contains("reserved 2 MiB pages"), "{}", found.means);
    }

    #[test]
    fn one_page_too_few_and_nothing_transparent() {
        let found = judge(&facts("3000\n", "2050\n", "3\n", "always advise [never]\n"), POOL, false);
        assert_eq!(found.verdict, Verdict::Note);
        assert!(found.advice.contains("vm.nr_hugepages=3001"), "{}", found.advice);
    }

    #[test]
    fn transparent_ones_do_too() {
        let found = judge(&facts("0\n", "0\n", "0\n", "always within_size [advise] never\n"), POOL, false);
        assert_eq!(found.verdict, Verdict::Ok);
        assert!(found.means.contains("transparent"), "{}", found.means);
    }

    #[test]
    fn a_machine_without_the_files_and_one_whose_daemon_runs() {
        let none = Facts::read(tree(&[]).path());
        assert_eq!(judge(&none, POOL, false).verdict, Verdict::Note);
        assert_eq!(judge(&none, POOL, true).verdict, Verdict::Ok);
    }

    #[test]
    fn what_is_said_is_what_the_arena_does_on_this_machine() {
        let pool = Size(4 << 20);
        let options =
            ArenaOptions { bytes: pool.0, hugepages: HugePages::Auto, numa: Numa::Auto, threads: 1 };
        let pages = Arena::create(&options, &|_| {}).unwrap().page_size();
        let facts = Facts::read(Path::new("/"));
        match pages {
            "2 MB (hugetlb)" => assert!(facts.hold(pool)),
            "2 MB (transparent)" => assert!(facts.has_transparent()),
            // Reserved pages may be free and forbidden, and transparent ones not to be had.
            _ => {}
        }
    }
}
