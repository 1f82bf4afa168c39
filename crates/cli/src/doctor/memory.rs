//! Memory for the pool, and the limit on locked memory.

use std::path::Path;

use kvlane_memory::Available;

use crate::{
    doctor::{files, finding::Finding},
    size::Size,
};

/// `in_huge_pages`: reserved ones hold the pool, which are not part of the available memory. `running`: a daemon has
/// its pool already.
pub(crate) fn judge(available: &Available, pool: Size, in_huge_pages: bool, running: bool) -> Finding {
    let Some(least) = available.least() else {
        return Finding::ok("memory", "the kernel does not tell how much is available");
    };
    let machine = available.machine.map(|bytes| format!("{} available", Size(bytes)));
    // Without a limit, the first version of control groups says exabytes.
    let group = available.group.filter(|bytes| available.machine.is_none_or(|machine| *bytes < machine));
    let group = group.map(|bytes| format!("{} left under the control group's limit", Size(bytes)));
    let found = machine.into_iter().chain(group).collect::<Vec<_>>().join(", ");
    if running {
        Finding::ok("memory", found).means("the daemon that runs has taken its pool already")
    } else if in_huge_pages || pool.0 <= least {
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

/// The soft limit on locked memory, as the kernel writes it: bytes or "unlimited".
pub(crate) fn read_memlock(root: &Path) -> Option<String> {
    let limits = files::text(root, "proc/self/limits")?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
    line.split_whitespace().next().map(str::to_owned)
}

/// Never more than a fact: nothing here needs it.
pub(crate) fn judge_memlock(soft: Option<&str>) -> Finding {
    let found = match soft {
        None => "the kernel does not tell".to_owned(),
        Some(soft) => soft.parse().map_or_else(|_| soft.to_owned(), |bytes| Size(bytes).to_string()),
    };
    Finding::ok("locked memory", found).means(
        "kvlane does not lock its pool, and uses no RDMA, whose registrations count against this limit; the pool is \
         pinned for GPUs by the CUDA driver",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::{files::tree, finding::Verdict};

    const POOL: Size = Size(4_000_000_000);
    const ROOMY: Available = Available { machine: Some(8_000_000_000), group: None };

    #[test]
    fn a_pool_fits_or_does_not() {
        let found = judge(&ROOMY, POOL, false, false);
        assert_eq!((found.verdict, &*found.found), (Verdict::Ok, "8.0 GB available"));
        assert_eq!(judge(&ROOMY, Size(8_000_000_001), false, false).verdict, Verdict::Problem);
        assert_eq!(judge(&Available::default(), POOL, false, false).verdict, Verdict::Ok);
    }

    #[test]
    fn the_limit_of_a_control_group_is_told_apart() {
        let root = tree(&[
            ("proc/meminfo", "MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n"),
            ("proc/self/cgroup", "0::/pod\n"),
            ("sys/fs/cgroup/pod/memory.max", "2000000000\n"),
            ("sys/fs/cgroup/pod/memory.current", "500000000\n"),
        ]);
        let found = judge(&Available::under(root.path()), POOL, false, false);
        assert_eq!(found.verdict, Verdict::Problem);
        assert_eq!(found.found, "8.2 GB available, 1.5 GB left under the control group's limit");
        assert!(found.advice.contains("raise its limit"), "{}", found.advice);
    }

    #[test]
    fn a_limit_that_does_not_bind_is_left_out() {
        let unlimited = Available { group: Some(i64::MAX as u64 - 4095), ..ROOMY };
        assert_eq!(judge(&unlimited, POOL, false, false).found, "8.0 GB available");
    }

    #[test]
    fn reserved_huge_pages_and_a_running_daemon_need_no_more_of_it() {
        let full = Available { machine: Some(1_000_000), group: None };
        assert_eq!(judge(&full, POOL, true, false).verdict, Verdict::Ok);
        assert_eq!(judge(&full, POOL, false, true).verdict, Verdict::Ok);
    }

    #[test]
    fn locked_memory_is_a_fact() {
        let limits = "Limit                     Soft Limit           Hard Limit           Units     \n\
                      Max processes             96274                96274                processes \n\
                      Max locked memory         8388608              unlimited            bytes     \n";
        let root = tree(&[("proc/self/limits", limits)]);
        let soft = read_memlock(root.path());
        assert_eq!(soft.as_deref(), Some("8388608"));
        assert_eq!(judge_memlock(soft.as_deref()).found, "8.4 MB");
        assert_eq!(judge_memlock(Some("unlimited")).found, "unlimited");
        assert_eq!(read_memlock(tree(&[]).path()), None);
    }
}
