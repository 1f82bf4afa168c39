//! Which way the SSDs of a running daemon transfer, and what another setting of the host would bring.

use kvlane_proto::v1::SsdStatus;

use crate::{doctor::finding::Finding, size::Size};

/// A finding for each SSD. `reserve` is the command that gives the pool huge pages.
pub(crate) fn judge(ssds: &[SsdStatus], reserve: &str) -> Vec<Finding> {
    ssds.iter().filter(|ssd| !ssd.transfer_path.is_empty()).map(|ssd| judge_one(ssd, reserve)).collect()
}

fn judge_one(ssd: &SsdStatus, reserve: &str) -> Finding {
    let subject = format!("SSD {}", ssd.path);
    let gb = |rate: u64| format!("{:.2} GB/s", rate as f64 / 1e9);
    let (direct, staged) = (ssd.direct_bytes_per_second, ssd.staged_bytes_per_second);
    let rates = match direct {
        0 => String::new(),
        _ => format!("; reads direct {}, staged {}", gb(direct), gb(staged)),
    };
    let found = format!("{}: {}{rates}", ssd.transfer_path, ssd.path_reason);
    match (ssd.transfer_path.as_str(), ssd.path_reason.as_str()) {
        ("staged", _) => Finding::ok(subject, found)
            .means(format!(
                "transfers go through {} of memory on huge pages, and are copied from and to the pool",
                Size(ssd.staging_bytes)
            ))
            .advice(format!("with huge pages for the pool they are as fast without the copy: {reserve}, and restart it")),
        (_, reason) if reason.contains("huge pages") && !reason.contains("the pool is on") => {
            Finding::note(subject, found)
                .means("the kernel cuts transfers into small requests, because memory is in pages of 4 KiB")
                .advice(format!(
                    "allow huge pages by `echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`, or {reserve}; then \
                     restart the daemon"
                ))
        }
        _ => Finding::ok(subject, found).means("transfers go straight from and to the pool"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Verdict;

    fn ssd(transfer_path: &str, path_reason: &str) -> SsdStatus {
        SsdStatus {
            path: "/ssd/blocks".into(),
            transfer_path: transfer_path.into(),
            path_reason: path_reason.into(),
            direct_bytes_per_second: 1_190_000_000,
            staged_bytes_per_second: 3_930_000_000,
            staging_bytes: 64 << 20,
            ..SsdStatus::default()
        }
    }

    #[test]
    fn the_way_its_reason_and_both_rates_are_said() {
        let [found] =
            judge(&[ssd("staged", "it reads faster")], "`sysctl vm.nr_hugepages=8`").try_into().unwrap();
        assert_eq!(found.verdict, Verdict::Ok);
        assert_eq!(found.found, "staged: it reads faster; reads direct 1.19 GB/s, staged 3.93 GB/s");
        assert!(found.advice.contains("vm.nr_hugepages=8"), "{found:?}");
    }

    #[test]
    fn memory_in_small_pages_is_a_note_with_what_to_do() {
        let small = ssd("direct", "the kernel gave no huge pages for staging memory");
        let [found] = judge(&[small], "x").try_into().unwrap();
        assert!(found.verdict == Verdict::Note && found.advice.contains("echo madvise"), "{found:?}");
        let [huge] = judge(&[ssd("direct", "the pool is on huge pages")], "x").try_into().unwrap();
        assert!(huge.verdict == Verdict::Ok && huge.advice.is_empty(), "{huge:?}");
    }

    #[test]
    fn an_older_daemon_says_nothing_of_it() {
        assert_eq!(judge(&[SsdStatus::default()], "x"), []);
    }
}
