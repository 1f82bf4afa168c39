//! Kernel features that the daemon requires: a sealed memfd for the pool, and pidfds of its peers.

use std::{os::unix::net::UnixStream, path::Path};

use kvlane_memory::{Arena, ArenaOptions, HugePages, Numa, peer_pidfd};

use crate::doctor::{files, finding::Finding};

/// Since this version a socket gives its peer's pidfd, also of a process in another PID namespace.
const PEER_PIDFD: (u32, u32) = (6, 5);

/// Results of the attempts, with their errors.
#[derive(Debug)]
pub(crate) struct Facts {
    release: Option<String>,
    pool: Result<(), String>,
    pidfd: Result<(), String>,
}

impl Facts {
    /// Tries what the daemon will do, by the same functions, in small.
    pub(crate) fn read(root: &Path) -> Self {
        let smallest =
            ArenaOptions { bytes: 1 << 20, hugepages: HugePages::Off, numa: Numa::Off, threads: 1 };
        let pidfd = UnixStream::pair().and_then(|(one, _other)| peer_pidfd(&one));
        Self {
            release: files::text(root, "proc/sys/kernel/osrelease"),
            pool: Arena::create(&smallest, &|_| {}).map(drop).map_err(|error| error.to_string()),
            pidfd: pidfd.map(drop).map_err(|error| error.to_string()),
        }
    }
}

pub(crate) fn judge(facts: &Facts) -> Finding {
    let release = facts.release.as_deref().unwrap_or("of unknown version");
    if let Err(error) = &facts.pool {
        return Finding::problem("kernel", format!("Linux {release}; {error}"))
            .means("`kvlane serve` cannot make its pool, which is a sealed memfd")
            .advice(
                "see the memory above; in a container, let its seccomp filter allow memfd_create and madvise",
            );
    }
    if let Err(error) = &facts.pidfd {
        return Finding::problem("kernel", format!("Linux {release}; no pidfd of a peer: {error}"))
            .means("the daemon turns away every engine, since it could not see one die")
            .advice("use Linux 5.3 or newer; in a container, let its seccomp filter allow pidfd_open");
    }
    let found = format!("Linux {release}, memfd and pidfd work");
    match facts.release.as_deref().and_then(version) {
        Some(version) if version < PEER_PIDFD => Finding::note("kernel", found)
            .means("before Linux 6.5 the daemon turns away engines in a PID namespace that it does not see")
            .advice("where engines or the daemon run in containers, give them the host's PID namespace"),
        _ => Finding::ok("kernel", found),
    }
}

/// Major and minor number of "6.18.44-generic".
pub(crate) fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::{files::tree, finding::Verdict};

    fn facts(release: &str) -> Facts {
        Facts { release: Some(release.into()), pool: Ok(()), pidfd: Ok(()) }
    }

    #[test]
    fn this_machine_can_do_what_is_needed() {
        let root = tree(&[("proc/sys/kernel/osrelease", "6.8.0-45-generic\n")]);
        let found = judge(&Facts::read(root.path()));
        assert_eq!(found, Finding::ok("kernel", "Linux 6.8.0-45-generic, memfd and pidfd work"));
    }

    #[test]
    fn an_older_kernel_has_a_consequence_for_containers() {
        assert_eq!(judge(&facts("5.15.0-1")).verdict, Verdict::Note);
        assert_eq!(judge(&facts("6.4")).verdict, Verdict::Note);
        assert_eq!(judge(&facts("6.5.0")).verdict, Verdict::Ok);
        assert_eq!(judge(&facts("strange")).verdict, Verdict::Ok);
    }

    #[test]
    fn without_a_pool_or_a_pidfd_there_is_no_daemon() {
        let found = judge(&Facts { pool: Err("memfd_create: EPERM".into()), ..facts("6.8") });
        assert_eq!(found.verdict, Verdict::Problem);
        assert!(found.found.contains("EPERM"));
        let found = judge(&Facts { pidfd: Err("ENOSYS".into()), ..facts("4.18") });
        assert_eq!(found.verdict, Verdict::Problem);
        assert!(found.found.contains("ENOSYS") && found.found.contains("4.18"));
    }

    #[test]
    fn versions_of_kernels() {
        assert_eq!(version("6.18.44-fc"), Some((6, 18)));
        assert_eq!(version("6"), None);
    }
}
