//! Memory for the pool, and the limit on locked memory.

use std::path::Path;

use kvlane_memory::Available;

use crate::{
    doctor::{files, finding::Finding},
    size::Size,
};

/// The source of the pool's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PoolMemory {
    /// A daemon would take it from the available memory.
    Available,
    /// Reserved huge pages hold the pool. The kernel does not count them as available.
    HugePages,
    /// A daemon that runs has its pool already.
    Taken,
}

pub(crate) fn judge(available: &Available, pool: Size, memory: PoolMemory) -> Finding {
    let Some(least) = available.least() else {
        return Finding::ok("memory", "the kernel does not tell how much is available");
    };
    let machine = available.machine.map(|bytes| format!("{} available", Size(bytes)));
    // Version 1 of control groups reports exabytes if there is no limit. So only a limit below the machine's memory counts.
    let group = available.group.filter(|bytes| available.machine.is_none_or(|machine| *bytes < machine));
    let group = group.map(|bytes| format!("{} left under the control group's limit", Size(bytes)));
    let found = machine.into_iter().chain(group).collect::<Vec<_>>().join(", ");
    if memory == PoolMemory::Taken {
        Finding::ok("memory", found).means("the daemon that runs has taken its pool already")
    } else if memory == PoolMemory::HugePages || pool.0 <= least {
        Finding::ok("memory", found)
            .means(format!("a pool of {pool} fits; it is taken at the start and kept"))
    } else {
        let (which, else_) = match available.group {
            Some(group) if group == least => ("the control group leaves less", "raise its limit"),
            _ => ("less is available", "free some memory"),
        };
        Finding::problem("memory", found)
            .means(format!("`kvlane serve` does not start with a pool of {pool}: {which}"))
            .advice(format!("choose a smaller --pool-size, or {else_}"))
    }
}

const CAP_IPC_LOCK: u32 = 14;
const LOCKED: &str = "locked memory";
/// Bytes that each file of the tier registers beside the pool: staging memory as large as by default, 16 MiB to measure with,
/// 1 MiB of headers, and its ring.
const BESIDE_POOL: u64 = 82 << 20;

/// The limit on locked memory. io_uring counts registered memory against it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Locked {
    /// The soft limit, as the kernel writes it: bytes or "unlimited"; None if unknown.
    soft: Option<String>,
    /// Whether the limit does not hold for this process.
    is_exempt: bool,
}

impl Locked {
    pub(crate) fn read(root: &Path) -> Self {
        let limits = files::text(root, "proc/self/limits").unwrap_or_default();
        let line = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"));
        Self {
            soft: line.and_then(|line| line.split_whitespace().next()).map(str::to_owned),
            is_exempt: files::has_capability(root, CAP_IPC_LOCK),
        }
    }
}

/// The daemon of an SSD tier registers its pool with io_uring (crates/ssd/src/uring.rs). Nothing else is locked: the driver
/// that pins the pool for GPUs does not count it.
pub(crate) fn judge_locked(locked: &Locked, pool: Size) -> Finding {
    let bytes = locked.soft.as_deref().map(|soft| soft.parse::<u64>().ok());
    let found = match bytes {
        None => "the kernel does not tell the limit".to_owned(),
        Some(None) => "no limit".to_owned(),
        Some(Some(bytes)) => format!("at most {}", Size(bytes)),
    };
    if locked.is_exempt {
        return Finding::ok(LOCKED, format!("{found}; CAP_IPC_LOCK makes it void for this user"))
            .means("an SSD tier (--ssd) can register its pool with io_uring");
    }
    match bytes {
        Some(Some(bytes)) if bytes < pool.0.saturating_add(BESIDE_POOL) => {
            Finding::note(LOCKED, format!("{found}, too little for a pool of {pool}"))
                .means(
                    "an SSD tier (--ssd) cannot register its pool with io_uring, and pins the pages of each transfer anew, \
                     which is slower; nothing else needs locked memory",
                )
                .advice(
                    "with --ssd, raise the limit (ulimit -l, LimitMEMLOCK= of systemd) to the pool's size and 82 MiB for each \
                     of its files, or give the daemon CAP_IPC_LOCK",
                )
        }
        _ => Finding::ok(LOCKED, found).means("an SSD tier (--ssd) of one file can register its pool with io_uring"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::{files::tree, finding::Verdict};

    const POOL: Size = Size(4_000_000_000);
    const ROOMY: Available = Available { machine: Some(8_000_000_000), group: None };

    #[test]
    fn a_pool_fits_or_does_not() {
        let found = judge(&ROOMY, POOL, PoolMemory::Available);
        assert_eq!((found.verdict, &*found.found), (Verdict::Ok, "8.0 GB available"));
        assert_eq!(judge(&ROOMY, Size(8_000_000_001), PoolMemory::Available).verdict, Verdict::Problem);
        assert_eq!(judge(&Available::default(), POOL, PoolMemory::Available).verdict, Verdict::Ok);
    }

    #[test]
    fn the_limit_of_a_control_group_is_told_apart() {
        let root = tree(&[
            ("proc/meminfo", "MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n"),
            ("proc/self/cgroup", "0::/pod\n"),
            ("sys/fs/cgroup/pod/memory.max", "2000000000\n"),
            ("sys/fs/cgroup/pod/memory.current", "500000000\n"),
        ]);
        let found = judge(&Available::under(root.path()), POOL, PoolMemory::Available);
        assert_eq!(found.verdict, Verdict::Problem);
        assert_eq!(found.found, "8.2 GB available, 1.5 GB left under the control group's limit");
        assert!(found.advice.contains("raise its limit"), "{}", found.advice);
    }

    #[test]
    fn a_limit_that_does_not_bind_is_left_out() {
        let unlimited = Available { group: Some(i64::MAX as u64 - 4095), ..ROOMY };
        assert_eq!(judge(&unlimited, POOL, PoolMemory::Available).found, "8.0 GB available");
    }

    #[test]
    fn reserved_huge_pages_and_a_running_daemon_need_no_more_of_it() {
        let full = Available { machine: Some(1_000_000), group: None };
        assert_eq!(judge(&full, POOL, PoolMemory::HugePages).verdict, Verdict::Ok);
        assert_eq!(judge(&full, POOL, PoolMemory::Taken).verdict, Verdict::Ok);
    }

    /// It was told that nothing here needs it, while an SSD tier could not register its pool for it.
    #[test]
    fn an_ssd_tier_wants_to_lock_its_pool() {
        let limits = "Limit                     Soft Limit           Hard Limit           Units     \n\
                      Max processes             96274                96274                processes \n\
                      Max locked memory         8388608              unlimited            bytes     \n";
        let with = |status: &str| {
            Locked::read(tree(&[("proc/self/limits", limits), ("proc/self/status", status)]).path())
        };
        let bound = with("CapEff:\t0000000000000000\n");
        assert_eq!(bound, Locked { soft: Some("8388608".into()), is_exempt: false });
        let small = judge_locked(&bound, POOL);
        assert_eq!(
            (small.verdict, &*small.found),
            (Verdict::Note, "at most 8.4 MB, too little for a pool of 4.0 GB")
        );
        let roomy = Locked { soft: Some((128 << 20).to_string()), is_exempt: false };
        assert!(small.means.contains("--ssd") && small.advice.contains("LimitMEMLOCK="), "{small:?}");
        assert_eq!(judge_locked(&roomy, Size(100 << 20)).verdict, Verdict::Note, "staging counts, too");
        assert_eq!(judge_locked(&roomy, Size(40 << 20)).verdict, Verdict::Ok);
        let exempt = judge_locked(&with("CapEff:\t0000000000004000\n"), POOL);
        assert!(exempt.verdict == Verdict::Ok && exempt.found.contains("CAP_IPC_LOCK"), "{exempt:?}");
        let unlimited = Locked { soft: Some("unlimited".into()), is_exempt: false };
        assert_eq!(judge_locked(&unlimited, POOL).found, "no limit");
        assert_eq!(Locked::read(tree(&[]).path()).soft, None);
        assert_eq!(judge_locked(&Locked::read(tree(&[]).path()), POOL).verdict, Verdict::Ok);
    }
}
