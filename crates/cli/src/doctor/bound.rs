//! Workers of several engines that vLLM has bound to the same processor.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use crate::doctor::finding::Finding;

const SUBJECT: &str = "bound workers";
/// Prefix of the names of kvlane's own threads. It marks a process as one of kvlane's workers; vLLM does not bind these threads.
const OURS: &str = "kvlane-";

/// For each process with kvlane's connector, the processors to which vLLM has bound its threads.
#[derive(Debug)]
pub(crate) struct Facts(BTreeMap<u32, BTreeSet<u32>>);

impl Facts {
    /// Leaves out processes that end meanwhile and those of other users.
    pub(crate) fn read(root: &Path) -> Self {
        let numbered = |path: &Path| {
            let entries = fs::read_dir(path).into_iter().flatten().flatten();
            entries.filter_map(|entry| Some((entry.file_name().to_str()?.parse::<u32>().ok()?, entry.path())))
        };
        let mut found = BTreeMap::new();
        for (process, path) in numbered(&root.join("proc")) {
            let (mut is_worker, mut bound) = (false, BTreeSet::new());
            for (_, task) in numbered(&path.join("task")) {
                let Ok(status) = fs::read_to_string(task.join("status")) else { continue };
                let value = |key: &str| {
                    status.lines().find_map(|line| Some(line.strip_prefix(key)?.strip_prefix(':')?.trim()))
                };
                match value("Name") {
                    // If kvlane's thread is bound to one processor too, `nobind` would change nothing.
                    Some(name) if name.starts_with(OURS) => {
                        is_worker |=
                            value("Cpus_allowed_list").is_some_and(|list| list.parse::<u32>().is_err());
                    }
                    // A single number is one processor. Several are a list or a range, which does not parse.
                    _ => bound.extend(value("Cpus_allowed_list").and_then(|list| list.parse::<u32>().ok())),
                }
            }
            if is_worker && !bound.is_empty() {
                found.insert(process, bound);
            }
        }
        Self(found)
    }
}

/// Returns None if no two workers share a processor.
pub(crate) fn judge(Facts(workers): &Facts) -> Option<Finding> {
    let mut of_processor: BTreeMap<u32, Vec<String>> = BTreeMap::new();
    for (process, bound) in workers {
        bound.iter().for_each(|cpu| of_processor.entry(*cpu).or_default().push(process.to_string()));
    }
    let shared: Vec<String> = of_processor
        .iter()
        .filter(|(_, processes)| processes.len() > 1)
        .map(|(cpu, processes)| format!("processor {cpu} has those of processes {}", processes.join(", ")))
        .collect();
    (!shared.is_empty()).then(|| {
        Finding::note(SUBJECT, shared.join("; "))
            .means("each waits while another computes: hand-offs between them take longer than to compute the prompt")
            .advice(
                "start CPU engines of one host with VLLM_CPU_OMP_THREADS_BIND=nobind, or name processors of its own for each",
            )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::{files::tree, finding::Verdict};

    /// Each has a thread that computes and one of kvlane's.
    fn judged(workers: &[(u32, &str)], ours: &str) -> Option<Finding> {
        judged_on(workers, ours, "0-3")
    }

    fn judged_on(workers: &[(u32, &str)], ours: &str, our_cpus: &str) -> Option<Finding> {
        let mut files = Vec::new();
        for (process, cpus) in workers {
            files.push((
                format!("proc/{process}/task/{process}/status"),
                format!("Name:\tVLLM::Worker\nCpus_allowed_list:\t{cpus}\n"),
            ));
            let other = process + 1;
            files.push((
                format!("proc/{process}/task/{other}/status"),
                format!("Name:\t{ours}\nCpus_allowed_list:\t{our_cpus}\n"),
            ));
        }
        let files: Vec<(&str, &str)> = files.iter().map(|(path, text)| (&**path, &**text)).collect();
        judge(&Facts::read(tree(&files).path()))
    }

    #[test]
    fn two_workers_on_one_processor_are_named_and_others_are_not() {
        let found = judged(&[(100, "0"), (200, "0"), (300, "1")], "kvlane-fabric").unwrap();
        assert_eq!(found.verdict, Verdict::Note);
        assert_eq!(found.found, "processor 0 has those of processes 100, 200");
        assert!(found.advice.contains("VLLM_CPU_OMP_THREADS_BIND=nobind"));
        assert_eq!(judged(&[(100, "0"), (200, "1")], "kvlane-fabric").map(|found| found.found), None);
        assert_eq!(
            judged(&[(100, "0-1"), (200, "0-1")], "kvlane-fabric").map(|found| found.found),
            None,
            "nobind"
        );
        assert_eq!(
            judged(&[(100, "0"), (200, "0")], "other").map(|found| found.found),
            None,
            "no engines of ours"
        );
        assert_eq!(
            judged_on(&[(100, "0"), (200, "0")], "kvlane-fabric", "0").map(|found| found.found),
            None,
            "a host with one processor"
        );
    }
}
