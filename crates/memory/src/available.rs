//! [`available_memory`]: how much memory this process may still take from the machine and under its control group's
//! limits.

use std::fs;
use std::path::Path;

/// Bytes that this process can still take, by each limit. None if the kernel does not say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Available {
    /// Memory that the machine can give without swapping.
    pub machine: Option<u64>,
    /// Rest under the tightest memory limit of the process's control group and those around it.
    pub group: Option<u64>,
}

impl Available {
    /// Reads the kernel's files below `root`, which is `/` except in tests.
    pub fn under(root: &Path) -> Available {
        let text = |path| fs::read_to_string(root.join(path)).ok();
        Available {
            machine: text("proc/meminfo").and_then(|text| meminfo_bytes(&text, "MemAvailable")),
            group: text("proc/self/cgroup")
                .and_then(|text| cgroup_available(&text, &root.join("sys/fs/cgroup"))),
        }
    }

    /// The smaller of the two; None if the kernel says neither.
    pub fn least(&self) -> Option<u64> {
        self.machine.into_iter().chain(self.group).min()
    }
}

/// Bytes that this process can take without swapping or being killed. That is the least of the machine's available
/// memory and the rest under each memory limit of its control group. None if the kernel does not say.
pub fn available_memory() -> Option<u64> {
    Available::under(Path::new("/")).least()
}

/// A field of /proc/meminfo or of a mapping in /proc/PID/smaps, in bytes.
pub(crate) fn meminfo_bytes(text: &str, field: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The rest under the memory limits of a process, from its /proc/PID/cgroup and the mount of the hierarchies.
fn cgroup_available(membership: &str, mount: &Path) -> Option<u64> {
    membership
        .lines()
        .filter_map(|line| {
            let mut fields = line.splitn(3, ':');
            let (id, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
            if id == "0" && controllers.is_empty() {
                return left_in(mount, path, &V2);
            }
            let v1 = controllers.split(',').any(|controller| controller == "memory");
            v1.then(|| left_in(&mount.join("memory"), path, &V1)).flatten()
        })
        .min()
}

struct Files {
    limit: &'static str,
    used: &'static str,
    /// The field of memory.stat for page cache that the kernel gives back under pressure.
    reclaimable: &'static str,
}

const V2: Files = Files { limit: "memory.max", used: "memory.current", reclaimable: "inactive_file" };
const V1: Files = Files {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    reclaimable: "total_inactive_file",
};

/// The rest under the tightest limit from a group up to the root. In a container the path may be that of the host,
/// which is not mounted here. Then the root of the mount is the container's own group.
fn left_in(mount: &Path, path: &str, files: &Files) -> Option<u64> {
    let group = mount.join(path.trim_start_matches('/'));
    group
        .ancestors()
        .take_while(|dir| dir.starts_with(mount))
        .filter_map(|dir| left_in_group(dir, files))
        .min()
}

fn left_in_group(dir: &Path, files: &Files) -> Option<u64> {
    let number = |file: &str| fs::read_to_string(dir.join(file)).ok()?.trim().parse::<u64>().ok();
    let limit = number(files.limit)?; // "max" is no number: no limit
    let used = number(files.used).unwrap_or(0);
    let stat = fs::read_to_string(dir.join("memory.stat")).unwrap_or_default();
    let reclaimable = stat
        .lines()
        .find_map(|line| line.strip_prefix(files.reclaimable)?.trim().parse::<u64>().ok())
        .unwrap_or(0);
    Some(limit.saturating_sub(used.saturating_sub(reclaimable)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_fields_are_found_by_their_whole_name() {
        let text = "MemTotal:       24105 kB\nMemAvailableX:  7 kB\nMemAvailable:   100 kB\n";
        assert_eq!(meminfo_bytes(text, "MemAvailable"), Some(100 * 1024));
        assert_eq!(meminfo_bytes(text, "HugePages_Free"), None);
    }

    #[test]
    fn the_tightest_limit_above_a_v2_group_counts_and_cache_is_given_back() {
        let root = tempfile::tempdir().unwrap();
        let inner = root.path().join("outer/inner");
        fs::create_dir_all(&inner).unwrap();
        fs::write(inner.join("memory.max"), "max\n").unwrap();
        fs::write(inner.join("memory.current"), "10\n").unwrap();
        let outer = root.path().join("outer");
        fs::write(outer.join("memory.max"), "1000\n").unwrap();
        fs::write(outer.join("memory.current"), "700\n").unwrap();
        fs::write(outer.join("memory.stat"), "anon 3\ninactive_file 200\n").unwrap();
        assert_eq!(cgroup_available("0::/outer/inner\n", root.path()), Some(500));
        // A path of another cgroup namespace: the mounted root counts.
        assert_eq!(cgroup_available("0::/elsewhere\n", root.path()), None);
        fs::write(root.path().join("memory.max"), "300\n").unwrap();
        assert_eq!(cgroup_available("0::/elsewhere\n", root.path()), Some(300));
        assert_eq!(cgroup_available("0::/outer/inner\n", root.path()), Some(300));
    }

    #[test]
    fn v1_limits_count_too() {
        let root = tempfile::tempdir().unwrap();
        let group = root.path().join("memory/a");
        fs::create_dir_all(&group).unwrap();
        fs::write(group.join("memory.limit_in_bytes"), "4096\n").unwrap();
        fs::write(group.join("memory.usage_in_bytes"), "5000\n").unwrap();
        fs::write(group.join("memory.stat"), "total_inactive_file 1000\n").unwrap();
        assert_eq!(cgroup_available("4:cpu,memory:/a\n3:pids:/a\n", root.path()), Some(96));
    }

    #[test]
    fn machine_and_group_are_told_apart_and_the_smaller_counts() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(Available::under(root.path()).least(), None);
        for folder in ["proc/self", "sys/fs/cgroup"] {
            fs::create_dir_all(root.path().join(folder)).unwrap();
        }
        fs::write(root.path().join("proc/meminfo"), "MemAvailable: 8 kB\n").unwrap();
        fs::write(root.path().join("proc/self/cgroup"), "0::/\n").unwrap();
        fs::write(root.path().join("sys/fs/cgroup/memory.max"), "300\n").unwrap();
        let available = Available::under(root.path());
        assert_eq!(available, Available { machine: Some(8192), group: Some(300) });
        assert_eq!(available.least(), Some(300));
    }

    #[test]
    fn this_machine_tells() {
        let available = available_memory().unwrap();
        assert!(available > 1 << 20, "{available}");
    }
}
