//! io_uring, by which the SSD tier reads and writes.

use std::path::Path;

use crate::doctor::{files, finding::Finding};

const SUBJECT: &str = "io_uring";

/// The result of an attempt, and the kernel's setting.
#[derive(Debug)]
pub(crate) struct Facts {
    works: Result<(), String>,
    /// The sysctl io_uring_disabled; None before Linux 6.6.
    disabled: Option<u64>,
}

impl Facts {
    /// Makes a ring, as the tier does.
    pub(crate) fn read(root: &Path) -> Self {
        Self {
            works: kvlane_ssd::try_io_uring().map_err(|error| error.to_string()),
            disabled: files::number(root, "proc/sys/kernel/io_uring_disabled"),
        }
    }
}

pub(crate) fn judge(facts: &Facts) -> Finding {
    let error = match &facts.works {
        Ok(()) => {
            return Finding::ok(SUBJECT, "it works").means("an SSD tier (--ssd) reads and writes by it");
        }
        Err(error) => error,
    };
    let setting = facts.disabled.filter(|setting| *setting > 0);
    let found = match setting {
        Some(setting) => format!("it cannot be used: {error} (kernel.io_uring_disabled {setting})"),
        None => format!("it cannot be used: {error}"),
    };
    Finding::note(SUBJECT, found)
        .means("an SSD tier (--ssd) transfers by a few threads instead, which is slower; nothing else uses it")
        .advice(match setting {
            Some(_) => "set kernel.io_uring_disabled to 0, if you want an SSD tier",
            None => {
                "use Linux 5.11 or newer; in a container, let its seccomp filter allow io_uring_setup, io_uring_enter and \
                 io_uring_register"
            }
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::{files::tree, finding::Verdict};

    /// It was told not to be used, long after the SSD tier began to.
    #[test]
    fn what_was_tried_is_said() {
        let facts = Facts::read(tree(&[("proc/sys/kernel/io_uring_disabled", "2\n")]).path());
        assert_eq!(facts.disabled, Some(2));
        let works = judge(&Facts { works: Ok(()), ..facts });
        assert_eq!((works.verdict, &*works.found), (Verdict::Ok, "it works"));
        assert!(works.means.contains("--ssd"));
        let refused = judge(&Facts { works: Err("Operation not permitted".into()), disabled: Some(2) });
        assert_eq!(refused.verdict, Verdict::Note);
        assert!(
            refused.found.ends_with("Operation not permitted (kernel.io_uring_disabled 2)"),
            "{refused:?}"
        );
        let filtered = judge(&Facts { works: Err("Function not implemented".into()), disabled: Some(0) });
        assert!(filtered.advice.contains("seccomp"), "{filtered:?}");
    }
}
