//! Whether the daemon may read the memory of workers, by process_vm; otherwise their saves travel through a mapping.

use std::path::Path;

use kvlane_engine_memory::ProcessVm;

use crate::doctor::{files, finding::Finding};

const CAP_SYS_PTRACE: u32 = 19;
const SUBJECT: &str = "reading workers";
const OTHERWISE: &str =
    "workers write their saves through a mapping of the pool instead; engines on GPUs are not affected";

/// The kernel's facts.
#[derive(Debug)]
pub(crate) struct Facts {
    /// Yama's setting; None without Yama.
    ptrace_scope: Option<String>,
    /// Whether this process has CAP_SYS_PTRACE.
    capable: bool,
    /// Whether the call works at all, by the daemon's own probe.
    call: Result<(), String>,
}

impl Facts {
    pub(crate) fn read(root: &Path) -> Self {
        Self {
            ptrace_scope: files::text(root, "proc/sys/kernel/yama/ptrace_scope"),
            capable: files::has_capability(root, CAP_SYS_PTRACE),
            call: ProcessVm::probe_own().map_err(|error| error.to_string()),
        }
    }
}

pub(crate) fn judge(facts: &Facts) -> Finding {
    if let Err(error) = &facts.call {
        return Finding::note(SUBJECT, error.clone())
            .means(OTHERWISE)
            .advice("let the container's seccomp filter allow process_vm_readv");
    }
    let yama = match facts.ptrace_scope.as_deref() {
        None => "no Yama".to_owned(),
        Some(scope) => format!("Yama ptrace_scope {scope}"),
    };
    let found = format!("{yama}, {} CAP_SYS_PTRACE", if facts.capable { "with" } else { "without" });
    match (facts.ptrace_scope.as_deref(), facts.capable) {
        (Some("3"), _) => Finding::note(SUBJECT, found)
            .means(format!("nobody may read another process until the next boot: {OTHERWISE}"))
            .advice("boot with a lower kernel.yama.ptrace_scope, or leave it so"),
        (Some("2"), false) => Finding::note(SUBJECT, found)
            .means(format!("only a daemon with CAP_SYS_PTRACE may read workers: {OTHERWISE}"))
            .advice("give the daemon CAP_SYS_PTRACE, set kernel.yama.ptrace_scope to 1, or leave it so"),
        (_, true) => {
            Finding::ok(SUBJECT, found).means("the daemon copies saves out of workers by process_vm")
        }
        (Some("1"), false) => Finding::ok(SUBJECT, found).means(
            "the daemon copies saves out of workers of its own user by process_vm; they allow it themselves",
        ),
        (_, false) => Finding::ok(SUBJECT, found)
            .means("the daemon copies saves out of workers of its own user by process_vm"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::{files::tree, finding::Verdict};

    fn with(scope: Option<&str>, capabilities: &str) -> Finding {
        let status = format!("Name:\tx\nCapPrm:\t000001ffffffffff\nCapEff:\t{capabilities}\n");
        let mut files = vec![("proc/self/status", &*status)];
        files.extend(scope.map(|scope| ("proc/sys/kernel/yama/ptrace_scope", scope)));
        judge(&Facts::read(tree(&files).path()))
    }

    const NONE: &str = "0000000000000000";
    const ONLY_PTRACE: &str = "0000000000080000";

    #[test]
    fn yama_and_the_capability_decide() {
        for (scope, capabilities, verdict) in [
            (None, NONE, Verdict::Ok),
            (Some("0\n"), NONE, Verdict::Ok),
            (Some("1\n"), NONE, Verdict::Ok),
            (Some("2\n"), NONE, Verdict::Note),
            (Some("2\n"), ONLY_PTRACE, Verdict::Ok),
            (Some("3\n"), ONLY_PTRACE, Verdict::Note),
        ] {
            let found = with(scope, capabilities);
            assert_eq!(found.verdict, verdict, "{found:?}");
        }
        assert_eq!(with(Some("1\n"), NONE).found, "Yama ptrace_scope 1, without CAP_SYS_PTRACE");
        assert_eq!(with(None, ONLY_PTRACE).found, "no Yama, with CAP_SYS_PTRACE");
    }

    #[test]
    fn a_filtered_call_is_a_note_with_the_way_around() {
        let facts = Facts { ptrace_scope: None, capable: true, call: Err("process_vm refused".into()) };
        let found = judge(&facts);
        assert_eq!(found.verdict, Verdict::Note);
        assert!(found.means.contains("through a mapping"));
    }
}
